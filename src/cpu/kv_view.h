// Where the queries and keys of one batch entry are in host memory. Lengths are clamped, tables are
// never trusted, nothing allocates.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/cache_format.h"
#include "core/dtype.h"
#include "kernels/shared/key_places.h"
#include "problem/problem.h"

namespace attn {

// The queries of batch entry b. Offsets count elements.
struct QueryView {
  int64_t length;  // Sq[b]
  int64_t q, out;  // row 0, head 0
  int64_t lse;     // head 0, row 0; rows are 1 apart
  int64_t lse_head;
  int64_t row;  // of query 0 among those of all entries
};
QueryView query_view(const Problem& problem, const Args& args, int64_t b);

// The position of query 0 of seqlen_q.
inline int64_t first_position(const Problem& p, const Args& args, int64_t b, int64_t seqlen_q,
                              int64_t seqlen_kv) {
  return p.has(ATTN_QUERY_POSITIONS) ? args.query_start[b] : seqlen_kv - seqlen_q;
}
// Causal masks may hold for some entries only.
inline RangeMask sequence_mask(const Problem& p, const Args& args, int64_t b) {
  RangeMask mask = p.range_mask();
  if (p.has_causal_sequences && args.causal_sequences[b] == 0) mask.causal = false;
  return mask;
}

// The keys that query i of seqlen_q in batch entry b sees among seqlen_kv keys, by causal, window
// and kv_begin. Empty ranges have end <= begin. Where segments say where their keys are, it is the
// smallest range that contains these keys.
KeyRange range_of_positions(const Problem& p, const Args& args, int64_t b, int64_t i);
inline KeyRange visible_keys(const Problem& p, const Args& args, int64_t b, int64_t i,
                             int64_t seqlen_q, int64_t seqlen_kv) {
  if (p.key_positions()) return range_of_positions(p, args, b, i);
  const int64_t first = first_position(p, args, b, seqlen_q, seqlen_kv);
  KeyRange range = sequence_mask(p, args, b).keys(i, seqlen_kv - first, seqlen_kv);
  if (p.has_kv_begin) range.begin = std::max<int64_t>(range.begin, args.kv_begin[b]);
  return range;
}

// Bit n: whether query i sees key first + n of seqlen_kv as far as the tree goes.
uint64_t tree_bits(const Problem& problem, const Args& args, const QueryView& query, int64_t i,
                   int64_t first, int64_t seqlen_kv);

// Packed q: rows after the last sequence get the results of a row that sees no key.
void write_rows_of_nobody(const Problem& problem, const Args& args);

// Consecutive keys whose rows are one stride apart.
struct KeyRun {
  int64_t count;  // 0 after the segment's end
  int64_t key;    // the first one's number in the segment
  // Row of the first key at the asked head; null: a bad page, these keys do not exist.
  const char* k = nullptr;
  const char* v = nullptr;
  // Scales of the first key; null of types that have none.
  const char *k_scale = nullptr, *v_scale = nullptr;
};

// One segment of batch entry b.
struct SegmentView {
  const attn_segment* shape;
  const void *k, *v;
  const float *k_descales, *v_descales;
  const char *k_scales, *v_scales;
  int64_t b;
  int64_t length;                    // keys, of a list: with those that do not exist
  int64_t first;                     // position of key 0 among all keys of the sequence
  const int32_t* list;               // of a query, see view_of_query(); null: all keys in order
  KeyRange seen;                     // of a query: keys of the segment that exist for it
  int64_t first_row;                 // PACKED: row of key 0 in the buffer
  const int32_t* pages;              // PAGED: this sequence's row of the block table
  int64_t k_row_bytes, v_row_bytes;  // between consecutive keys of a run
  KeyPlaces<int64_t> places;

  // The run that starts at key j of the segment, 0 <= j; of a list at its key j.
  KeyRun run(int64_t j, int64_t kv_head) const {
    if (j >= length) return {0, j};
    if (!list) return stored(seen.begin + j, length - j, kv_head);
    const int64_t block = shape->list_block, entry = list[j / block];
    const int64_t key = entry * block + j % block, count = block - j % block;
    if (entry < 0 || key >= seen.end) return {count, 0};
    if (key < seen.begin) return {std::min<int64_t>(count, seen.begin - key), 0};
    return stored(key, std::min<int64_t>(count, seen.end - key), kv_head);
  }
  // Of key n of a run: the scale of i8 and i4, 1 of other types, and the scales of all that have
  // them.
  float k_scale(const KeyRun& run, int64_t n) const {
    return one_scale(shape->k_type, k_scales_of(run, n));
  }
  float v_scale(const KeyRun& run, int64_t n) const {
    return one_scale(shape->v_type, v_scales_of(run, n));
  }
  const char* k_scales_of(const KeyRun& run, int64_t n) const {
    return run.k_scale + n * shape->k_scale_stride.seq * type_info(shape->k_type).scale_bytes;
  }
  const char* v_scales_of(const KeyRun& run, int64_t n) const {
    return run.v_scale + n * shape->v_scale_stride.seq * type_info(shape->v_type).scale_bytes;
  }

  float k_descale(int64_t j, int64_t kv_head, int64_t heads_kv) const {
    return descale(shape->k_descale, k_descales, j, kv_head, heads_kv);
  }
  float v_descale(int64_t j, int64_t kv_head, int64_t heads_kv) const {
    return descale(shape->v_descale, v_descales, j, kv_head, heads_kv);
  }

 private:
  // At most `count` keys from `key` on, whose rows are one stride apart.
  KeyRun stored(int64_t key, int64_t count, int64_t kv_head) const {
    int64_t batch = b, row = key;
    if (shape->layout == ATTN_PACKED) {
      batch = 0;
      row += first_row;
    } else if (shape->layout == ATTN_PAGED) {
      batch = shape->list_of_pool ? key / shape->page_size : pages[key / shape->page_size];
      row = key % shape->page_size;
      count = std::min(count, shape->page_size - row);
      if (batch < 0 || batch >= shape->num_pages) return {count, key};
    }
    return {count,
            key,
            address(k, shape->k_type, shape->k_stride, batch, row, kv_head),
            address(v, shape->v_type, shape->v_stride, batch, row, kv_head),
            scales(k_scales, shape->k_type, shape->k_scale_stride, batch, row, kv_head),
            scales(v_scales, shape->v_type, shape->v_scale_stride, batch, row, kv_head)};
  }
  static float one_scale(attn_dtype type, const char* at) {
    if (type_info(type).kind != ATTN_KIND_CODES) return 1;
    uint16_t code;
    std::memcpy(&code, at, sizeof code);
    return f16_value(code);
  }
  static const char* address(const void* base, attn_dtype type, const attn_strides& stride,
                             int64_t batch, int64_t row, int64_t head) {
    return static_cast<const char*>(base) +
           dtype_bytes(type, batch * stride.batch + row * stride.seq + head * stride.head);
  }
  static const char* scales(const char* base, attn_dtype type, const attn_strides& stride,
                            int64_t batch, int64_t row, int64_t head) {
    if (!base) return nullptr;
    return base + (batch * stride.batch + row * stride.seq + head * stride.head) *
                      type_info(type).scale_bytes;
  }
  float descale(attn_descale_kind kind, const float* values, int64_t j, int64_t kv_head,
                int64_t heads_kv) const {
    switch (kind) {
      case ATTN_DESCALE_TENSOR:
        return values[0];
      case ATTN_DESCALE_HEAD:
        return values[b * heads_kv + kv_head];
      case ATTN_DESCALE_BLOCK: {
        const int64_t size = shape->descale_block_keys;
        const int64_t blocks = (shape->seqlen + size - 1) / size;
        return values[(b * heads_kv + kv_head) * blocks + j / size];
      }
      case ATTN_DESCALE_NONE:
        break;
    }
    return 1;
  }
};

// Keys of segment s in batch entry b, in [0, capacity].
int64_t segment_length(const Problem& problem, const Args& args, int64_t b, int64_t s);
// Skv[b], the sum over all segments whose keys have positions.
int64_t sequence_length_kv(const Problem& problem, const Args& args, int64_t b);
// Batch entry b of a segment, as far as its first `length` keys.
SegmentView segment_view(const attn_segment& shape, const attn_segment_args& data, int64_t b,
                         int64_t length);
// `first`: the sum of the lengths of the segments before s.
SegmentView segment_view(const Problem& problem, const Args& args, int64_t b, int64_t s,
                         int64_t first);

// Segment s as query i, with the KeyRange of visible_keys() among keys that have positions, and
// kv_head visit it: the keys of its list, or those that it sees. `first` counts visited keys.
SegmentView view_of_query(const Problem& problem, const Args& args, int64_t b, int64_t s,
                          int64_t first, const QueryView& query, int64_t i, int64_t kv_head);

// Row n of a run as float64, times its scales but not its descale.
inline void read_row(attn_dtype type, const char* row, const char* scales, int64_t dim,
                     double* out) {
  if (dtype_is_cache(type)) return decode_cache(type, row, scales, 0, dim, out);
  decode_row(type, row, 0, dim, out);
}

// Adds a row of n elements, value(d) for d in [0, n), to the row of out and lse that holds earlier
// ones: ATTN_ACCUMULATE.
template <class Value>
void accumulate_row(float* out, float* lse, int64_t n, double new_lse, Value&& value) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  if (new_lse == -infinity) return;
  const double old_lse = *lse;
  if (old_lse == -infinity) {
    for (int64_t d = 0; d < n; ++d) out[d] = float(value(d));
    *lse = float(new_lse);
    return;
  }
  const double max = std::max(old_lse, new_lse);
  const double old_weight = std::exp(old_lse - max), new_weight = std::exp(new_lse - max);
  const double sum = old_weight + new_weight;
  for (int64_t d = 0; d < n; ++d)
    out[d] = float((old_weight * out[d] + new_weight * value(d)) / sum);
  *lse = float(max + std::log(sum));
}

// The default scale was rounded to float when the problem was made; the formula has the exact one.
double exact_scale(const Problem& problem);

inline float q_descale(const Problem& problem, const Args& args, int64_t b, int64_t kv_head) {
  if (problem.q_descale == ATTN_DESCALE_TENSOR) return args.q_descale[0];
  if (problem.q_descale == ATTN_DESCALE_HEAD) {
    return args.q_descale[b * problem.heads_kv + kv_head];
  }
  return 1;
}

// What a block mask says about one block; causal, window and lengths are not in it.
struct BlockView {
  attn_block_kind kind;  // values out of range are EMPTY, as is PARTIAL with a bad index
  const uint32_t* bits;  // PARTIAL: the block's first row
  int32_t words;         // per row

  // Element (row, column) of the block, standing for query i and key j; diagonal = Skv - Sq.
  bool visible(int64_t row, int64_t column, int64_t i, int64_t j, int64_t diagonal) const {
    switch (kind) {
      case ATTN_BLOCK_EMPTY:
        return false;
      case ATTN_BLOCK_CAUSAL:
        return j <= i + diagonal;
      case ATTN_BLOCK_FULL:
        return true;
      case ATTN_BLOCK_PARTIAL:
        return bits[row * words + column / 32] >> (column % 32) & 1;
    }
    return false;
  }
};
BlockView block_view(const Problem& problem, const Args& args, int64_t b, int64_t head,
                     int64_t block_row, int64_t block_column);

// Rows of queries and of heads that share a K/V head: row r is query (first + r) / heads of head
// first_head + (first + r) % heads.
struct HeadRows {
  int64_t first, heads, first_head;

  int64_t query(int64_t row) const { return (first + row) / heads; }
  int64_t head(int64_t row) const { return first_head + (first + row) % heads; }
};

// Calls visit(row, number of rows, key, last key, block) for each block of the mask that the rows
// [begin, end) and the keys meet; the rows of a call are of one query.
template <class Visit>
void for_each_block(const Problem& p, const Args& args, int64_t b, const HeadRows& rows,
                    int64_t begin, int64_t end, int64_t key_begin, int64_t key_end, Visit&& visit) {
  const int64_t heads = p.mask_heads == 1 ? rows.heads : 1;  // that have the same blocks
  for (int64_t row = begin, next; row < end; row = next) {
    next = std::min(end, (rows.first + row) / heads * heads + heads - rows.first);
    const int64_t block_row = rows.query(row) / p.block_q;
    for (int64_t key = key_begin, last; key < key_end; key = last) {
      const int64_t column = key / p.block_k;
      last = std::min(key_end, (column + 1) * p.block_k);
      visit(row, next - row, key, last, block_view(p, args, b, rows.head(row), block_row, column));
    }
  }
}

}  // namespace attn
