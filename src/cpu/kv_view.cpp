#include "cpu/kv_view.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace attn {
namespace {

struct Span {
  int64_t begin, length;
};

// Entry b of cumulative lengths, inside [0, total] and at most `capacity` long.
Span packed_span(const int32_t* cu_seqlens, int64_t b, int64_t total, int64_t capacity) {
  const int64_t begin = std::clamp<int64_t>(cu_seqlens[b], 0, total);
  const int64_t end = std::clamp<int64_t>(cu_seqlens[b + 1], begin, total);
  return {begin, std::min(end - begin, capacity)};
}

int64_t length_of(const attn_segment& shape, const attn_segment_args& data, int64_t b) {
  if (shape.layout == ATTN_PACKED) {
    return packed_span(data.cu_seqlens, b, shape.total, shape.seqlen).length;
  }
  int64_t capacity = shape.seqlen;
  if (shape.layout == ATTN_PAGED) {
    capacity = std::min(capacity, int64_t(shape.max_pages) * shape.page_size);
  }
  return shape.has_seqlens ? std::clamp<int64_t>(data.seqlens[shape.shared ? 0 : b], 0, capacity)
                           : capacity;
}

}  // namespace

QueryView query_view(const Problem& p, const Args& args, int64_t b) {
  if (p.q_layout == ATTN_PACKED) {
    const int64_t total = total_q(p, args);
    const Span span = packed_span(args.cu_seqlens_q, b, total, p.seqlen_q);
    return {
        span.length, span.begin * p.q_stride.seq, span.begin * p.out_stride.seq, span.begin, total,
        span.begin};
  }
  return {p.seqlen_q, b * p.q_stride.batch, b * p.out_stride.batch, b * p.heads_q * p.seqlen_q,
          p.seqlen_q, b * p.seqlen_q};
}

double exact_scale(const Problem& p) {
  const double exact = 1 / std::sqrt(double(p.head_dim));
  return p.scale == float(exact) ? exact : double(p.scale);
}

uint64_t tree_bits(const Problem& p, const Args& args, const QueryView& query, int64_t i,
                   int64_t first, int64_t seqlen_kv) {
  const uint64_t* words = args.tree + 2 * (query.row + i);
  return p.tree_mask().seen(words[0], words[1], first, seqlen_kv);
}

void write_rows_of_nobody(const Problem& p, const Args& args) {
  if (p.q_layout != ATTN_PACKED || p.batch == 0 || p.has(ATTN_ACCUMULATE)) return;
  const size_t bytes = size_t(dtype_bytes(p.out_type, p.head_dim_v));
  const int64_t total = total_q(p, args);
  for (int64_t row = args.cu_seqlens_q[p.batch]; row < total; ++row) {
    for (int64_t head = 0; head < p.heads_q; ++head) {
      const int64_t at = row * p.out_stride.seq + head * p.out_stride.head;
      std::memset(static_cast<char*>(args.out) + dtype_bytes(p.out_type, at), 0,
                  bytes);  // 0 in each type
      if (args.lse) args.lse[head * total + row] = -std::numeric_limits<float>::infinity();
    }
  }
}

KeyRange range_of_positions(const Problem& p, const Args& args, int64_t b, int64_t i) {
  const KeyBand band = sequence_mask(p, args, b).band(0, args.query_start[b]);
  KeyRange range{0, 0};
  int64_t first = 0;
  for (int64_t s = 0; s < p.num_segments; ++s) {
    const SegmentView segment = segment_view(p, args, b, s, first);
    const int64_t begin = std::min<int64_t>(segment.places.before(i + band.lower), segment.length);
    const int64_t end = std::min<int64_t>(segment.places.before(i + band.upper), segment.length);
    if (begin < end) {
      if (range.end == 0) range.begin = first + begin;
      range.end = first + end;
    }
    first += segment.length;
  }
  return range;
}

int64_t segment_length(const Problem& problem, const Args& args, int64_t b, int64_t s) {
  return length_of(problem.segment[s], args.segment[s], b);
}

int64_t sequence_length_kv(const Problem& problem, const Args& args, int64_t b) {
  int64_t sum = 0;
  for (int64_t s = 0; s < problem.num_segments; ++s)
    if (!problem.segment[s].no_positions) sum += segment_length(problem, args, b, s);
  return sum;
}

SegmentView view_of_query(const Problem& p, const Args& args, int64_t b, int64_t s, int64_t first,
                          const QueryView& query, int64_t i, int64_t kv_head) {
  SegmentView view = segment_view(p, args, b, s, first);
  const attn_segment& shape = *view.shape;
  view.seen = {0, view.length};
  if (shape.list_of_pool) view.seen.end = shape.num_pages * shape.page_size;
  if (!shape.no_positions) {
    int64_t before = 0;  // keys that have positions
    for (int64_t n = 0; n < s; ++n)
      if (!p.segment[n].no_positions) before += segment_length(p, args, b, n);
    const KeyRange range =
        visible_keys(p, args, b, i, query.length, sequence_length_kv(p, args, b));
    view.seen.begin = std::max<int64_t>(0, range.begin - before);
    view.seen.end = std::min<int64_t>(view.length, range.end - before);
  }
  view.length = std::max<int64_t>(0, view.seen.end - view.seen.begin);
  if (shape.list_size == 0) return view;
  const attn_segment_args data = args.segment[s];
  const int64_t row =
      p.q_layout == ATTN_PACKED
          ? query.row + i
          : b * ceil_div(p.seqlen_q, int64_t{shape.list_queries}) + i / shape.list_queries;
  const int64_t number = row * shape.list_heads + (shape.list_heads == 1 ? 0 : kv_head);
  view.list = data.list + number * shape.list_size;
  const int64_t entries = shape.has_list_lengths
                              ? std::clamp<int64_t>(data.list_lengths[number], 0, shape.list_size)
                              : shape.list_size;
  view.length = entries * shape.list_block;
  return view;
}

SegmentView segment_view(const attn_segment& shape, const attn_segment_args& data, int64_t b,
                         int64_t length) {
  SegmentView view{};
  view.shape = &shape;
  view.k = data.k;
  view.v = shape.v_in_k ? data.k : data.v;
  view.k_descales = data.k_descale;
  view.v_descales = shape.v_in_k ? data.k_descale : data.v_descale;
  view.k_scales = static_cast<const char*>(data.k_scale);
  view.v_scales = static_cast<const char*>(shape.v_in_k ? data.k_scale : data.v_scale);
  view.b = b = shape.shared ? 0 : b;
  view.length = length;
  if (shape.layout == ATTN_PACKED) {
    view.first_row = packed_span(data.cu_seqlens, b, shape.total, shape.seqlen).begin;
  } else if (data.block_table) {
    view.pages = data.block_table + b * shape.max_pages;
  }
  view.k_row_bytes = dtype_bytes(shape.k_type, shape.k_stride.seq);
  view.v_row_bytes = dtype_bytes(shape.v_type, shape.v_stride.seq);
  return view;
}

SegmentView segment_view(const Problem& problem, const Args& args, int64_t b, int64_t s,
                         int64_t first) {
  const attn_segment_args data = args.segment[s];
  const attn_segment& shape = problem.segment[s];
  SegmentView view = segment_view(shape, data, b, length_of(shape, data, b));
  view.first = first;
  view.places = {first, 1, 1};
  if (shape.has_key_start)
    view.places = {data.key_start[view.b] + shape.key_rank * shape.key_interleave,
                   shape.key_interleave, shape.key_interleave * shape.key_ranks};
  return view;
}

BlockView block_view(const Problem& p, const Args& args, int64_t b, int64_t head, int64_t block_row,
                     int64_t block_column) {
  const int64_t rows = p.mask_rows(), columns = p.mask_columns();
  const int64_t grid = (p.mask_batch == 1 ? 0 : b) * p.mask_heads + (p.mask_heads == 1 ? 0 : head);
  const int64_t cell = (grid * rows + block_row) * columns + block_column;
  const uint8_t kind = args.block_kinds[cell];
  BlockView view{kind <= ATTN_BLOCK_PARTIAL ? attn_block_kind(kind) : ATTN_BLOCK_EMPTY, nullptr,
                 int32_t((int64_t{p.block_k} + 31) / 32)};
  if (view.kind == ATTN_BLOCK_PARTIAL) {
    const int64_t index = p.mask_partials > 0 ? args.block_index[cell] : -1;
    if (index < 0 || index >= p.mask_partials) {
      view.kind = ATTN_BLOCK_EMPTY;
    } else {
      view.bits = args.block_bits + index * p.block_q * view.words;
    }
  }
  return view;
}

}  // namespace attn
