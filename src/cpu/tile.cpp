#include "cpu/tile.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <utility>

namespace attn {
namespace {

bool all_marked(const uint8_t* marks, int64_t count) {
  return std::all_of(marks, marks + count, [](uint8_t mark) { return mark != 0; });
}

Rows tile_rows(const float* first, int64_t stride) {
  return {reinterpret_cast<const char*>(first), stride * int64_t(sizeof(float)), ATTN_F32, 1};
}

// i8 and i4, whose rows have a scale next to them.
bool has_codes(attn_dtype type) {
  return type_info(type).kind == ATTN_KIND_CODES;
}

// Bytes of `dim` elements, whole blocks or the beginning of one.
int64_t row_bytes(attn_dtype type, int64_t dim) {
  return ceil_div(dim, dtype_block(type)) * dtype_bytes(type);
}

// Calls visit(first, count, marked) for runs of equal marks.
template <class Visit>
void for_each_marked(const uint8_t* marks, int64_t count, Visit&& visit) {
  for (int64_t n = 0, next; n < count; n = next) {
    next = n + 1;
    while (next < count && (marks[next] != 0) == (marks[n] != 0)) ++next;
    visit(n, next - n, marks[n] != 0);
  }
}

}  // namespace

int even_width(int64_t vectors, int limit) {
  return int(ceil_div(vectors, ceil_div(vectors, limit)));
}

// Query rows of a head up to which it waits for memory, and up to which its keys are cut.
constexpr int64_t waiting_rows = 64, cut_rows = 128;
// The fewest keys of a part, and the most parts in all, or per sequence with a fixed split, so that
// partial results stay small compared with the keys.
constexpr int64_t least_part = 512, fixed_parts = 512;

bool heads_side_by_side(const Problem& p) {
  const auto side_by_side = [](const attn_strides& stride) {
    return 0 < stride.head && stride.head < stride.seq;
  };
  for (int64_t s = 0; s < p.num_segments; ++s) {
    if (!side_by_side(p.segment[s].k_stride) || !side_by_side(p.segment[s].v_stride)) return false;
  }
  return true;
}

TileShape::TileShape(const Problem& p, const TileOps& ops, int threads) : by_query(p.by_query) {
  queries = by_query ? std::max<int64_t>(1, p.seqlen_q) : 1;
  query_rows = by_query ? p.group() : std::max<int64_t>(1, p.seqlen_q) * p.group();
  const int64_t all_rows = query_rows;
  few_rows = all_rows <= ops.few_rows;
  // Mask blocks are mostly powers of two: so are their items.
  const int limit = p.has(ATTN_BLOCK_MASK) ? std::min(2, ops.panel_vectors) : ops.panel_vectors;
  panel_vectors = even_width(ceil_div(all_rows, ops.lanes), limit);
  panel = few_rows ? (all_rows == 1 ? 1 : round_up(all_rows, ops.few_height))
                   : int64_t(panel_vectors) * ops.lanes;
  lane_rows = std::max<int64_t>(panel, ops.lanes);
  // Large items reuse each K/V tile more often; many items keep all threads busy to the end.
  rows = p.has(ATTN_BLOCK_MASK) ? 128 : most_rows;
  const int64_t sequences = std::max<int64_t>(1, p.batch * p.heads_kv);
  // Few rows wait for memory: tiles stay in L1, and the heads of a token, which are mostly
  // adjacent, are read one after the other.
  const bool waits = all_rows <= waiting_rows;
  prefetch = waits && !p.has(ATTN_BLOCK_MASK);  // what a mask hides is not read
  keys = waits ? 32 : most_tile_keys;
  for (int64_t n = 0; few_rows && n < p.num_segments; ++n) {  // pages are read in place
    if (p.segment[n].layout == ATTN_PAGED && p.segment[n].page_size == keys / 2) keys /= 2;
  }
  // Where rows do not make items enough, the keys are cut.
  part_keys = round_up(std::max(least_part, std::min(p.fixed_split, p.most_keys)), keys);
  const int64_t limit_of_parts = p.fixed_split > 0 ? fixed_parts : ceil_div(fixed_parts, sequences);
  most_parts =
      all_rows <= cut_rows ? std::clamp<int64_t>(p.most_keys / part_keys, 1, limit_of_parts) : 1;
  const int64_t items = sequences * queries * most_parts;
  // The heads of an item visit the same tiles; lists of theirs may differ.
  heads = waits && !by_query && heads_side_by_side(p) ? std::min(p.heads_kv, most_heads) : 1;
  while (heads > 1 && items < 4 * threads * heads) heads = ceil_div(heads, 2);
  while (rows > 48 && items * ceil_div(all_rows, rows) < 5 * threads) rows /= 2;
  rows = round_up(std::min(rows, all_rows), panel);
  key_stride = round_up(p.head_dim, ops.lanes);
  const int64_t value_vectors = ceil_div(p.head_dim_v, ops.lanes);
  slab_vectors = even_width(value_vectors, ops.slab_vectors);
  slab = int64_t(slab_vectors) * ops.lanes;
  value_width = round_up(p.head_dim_v, slab);
  values_in_keys = std::all_of(p.segment.begin(), p.segment.end(),
                               [](const Segment& s) { return s.v_in_k != 0; });
}

size_t Tile::place(const Problem& p, const TileShape& shape, char* base, int64_t head) {
  Place at(base);
  const int64_t rows = shape.rows;
  // Panels of few rows are read and written in whole vectors.
  const int64_t state = std::max(rows, shape.lane_rows), end = shape.lane_rows;
  at.take(keys, shape.keys * std::max(shape.key_stride, shape.value_width));
  values = keys;
  at.take(scores, shape.keys * rows + end);
  at.take(add, shape.keys * rows + end);
  at.take(row, p.head_dim);
  for (float** of_row : {&rescale, &tile_max}) at.take(*of_row, state);
  for (int32_t** range : {&tile_begin, &tile_end, &position}) at.take(*range, state);
  for (uint8_t** mark : {&wanted, &seen}) at.take(*mark, shape.keys);
  at.take(scale, shape.keys);
  const size_t shared = at.used();
  const auto take_of_head = [&] {
    at.take(queries, rows * (shape.few_rows ? shape.key_stride : p.head_dim));
    at.take(out, rows * shape.value_width);
    for (float** of_row : {&max, &sum, &slope, &bias_base}) at.take(*of_row, state);
    for (int64_t** range : {&this->begin, &this->end}) at.take(*range, rows);
    at.take(nearest, state);
  };
  take_of_head();
  const size_t of_head = at.used() - shared;
  if (head > 0) {
    at.go_to(shared + size_t(head) * of_head);
    take_of_head();
  }
  return shared + size_t(shape.heads) * of_head;
}

void load_rows(const TileOps& ops, attn_dtype type, const char* base, int64_t row_bytes,
               int64_t rows, int64_t index, int64_t n, float factor, float* out,
               int64_t out_stride) {
  if (ops.load_rows(type, base, row_bytes, rows, index, n, factor, out, out_stride)) return;
  float* at = out;
  for (int64_t row = 0; row < rows; ++row, base += row_bytes, at += out_stride) {
    decode_row(type, base, index, n, at);
  }
  if (factor != 1) ops.multiply(rows, out, out_stride, factor, n, out, out_stride);
}

// The two elements of a byte of nvfp4, the lower half first.
constexpr auto nvfp4_pairs = [] {
  std::array<std::array<float, 2>, 256> pairs{};
  for (uint32_t byte = 0; byte < 256; ++byte)
    pairs[byte] = {float(value_of(e2m1_format, byte & 15)),
                   float(value_of(e2m1_format, byte >> 4))};
  return pairs;
}();

void load_cache_row(const TileOps& ops, attn_dtype type, const char* row, const char* scales,
                    int64_t index, int64_t n, float factor, float* out) {
  if (type == ATTN_NVFP4 && index % nvfp4_group == 0) {
    for (int64_t d = 0; d < n; d += nvfp4_group) {
      const float scale = e4m3fn_values[uint8_t(scales[(index + d) / nvfp4_group])] * factor;
      const char* codes = row + (index + d) / 2;
      float group[nvfp4_group];
      for (int64_t i = 0; i < nvfp4_group / 2; ++i)
        std::memcpy(group + 2 * i, nvfp4_pairs[uint8_t(codes[i])].data(), 2 * sizeof(float));
      for (int64_t i = 0; i < std::min(nvfp4_group, n - d); ++i) out[d + i] = group[i] * scale;
    }
    return;
  }
  for_each_piece(type, row, scales, index, n,
                 [&](const CachePiece& piece, int64_t first, int64_t count, double scale) {
                   load_rows(ops, piece.type, row + piece.base, 0, 1,
                             piece.at + first - piece.first, count, float(scale) * factor,
                             out + (first - index), 0);
                 });
}

void store_row(const TileOps& ops, attn_dtype type, float* in, float factor, int64_t n, void* base,
               int64_t index) {
  if (type == ATTN_F32) {
    return ops.multiply(1, in, 0, factor, n, static_cast<float*>(base) + index, 0);
  }
  ops.multiply(1, in, 0, factor, n, in, 0);
  if (type == ATTN_F16 && ops.f32_to_f16) {
    ops.f32_to_f16(in, static_cast<uint16_t*>(base) + index, n);
  } else if (type == ATTN_BF16) {
    ops.f32_to_bf16(in, static_cast<uint16_t*>(base) + index, n);
  } else {
    for (int64_t d = 0; d < n; ++d) encode_result(type, base, index + d, in[d]);
  }
}

void KeyReader::seek(int64_t position) {
  while (position >= view_.first + view_.length) {
    ++segment_;
    view_ = view_of(segment_, view_.first + view_.length);
  }
}

int64_t KeyReader::num_keys() const {
  if (i_ < 0) return sequence_length_kv(p_, args_, b_);
  int64_t sum = 0;
  for (int64_t s = 0; s < p_.num_segments; ++s) sum += view_of(s, sum).length;
  return sum;
}

template <class Visit>
void KeyReader::for_each_run(int64_t base, int64_t begin, int64_t end, Visit&& visit) const {
  int64_t segment = segment_;
  SegmentView view = view_;
  for (int64_t c = begin; c < end;) {
    while (base + c >= view.first + view.length) {
      ++segment;
      view = view_of(segment, view.first + view.length);
    }
    const KeyRun run = view.run(base + c - view.first, kv_head_);
    const int64_t key = run.key;
    int64_t count = std::min(run.count, end - c);
    if (view.shape->descale_block_keys > 0) {
      const int64_t size = view.shape->descale_block_keys;
      count = std::min(count, (key / size + 1) * size - key);
    }
    visit(view, key, c, run, count);
    c += count;
  }
}

const float* KeyReader::load_scales(const char* scales, int64_t stride, int64_t c,
                                    int64_t count) const {
  if (!scales) return nullptr;
  uint16_t codes[most_tile_keys];
  for (int64_t n = 0; n < count; ++n)
    std::memcpy(codes + n, scales + n * stride * int64_t(sizeof *codes), sizeof *codes);
  load_rows(ops_, ATTN_F16, reinterpret_cast<const char*>(codes), 0, 1, 0, count, 1, t_.scale + c,
            0);
  return t_.scale + c;
}

Rows KeyReader::load_keys(int64_t base, int64_t begin, int64_t end, uint8_t* wanted, bool* exist) {
  const int64_t dim = p_.head_dim, stride = shape_.key_stride;
  Rows rows = tile_rows(t_.keys + begin * stride, stride);
  seek(base + begin);
  *exist = true;
  for_each_run(
      base, begin, end,
      [&](const SegmentView& view, int64_t key, int64_t c, const KeyRun& run, int64_t count) {
        const attn_dtype type = view.shape->k_type;
        const float factor = run.k ? view.k_descale(key, kv_head_, p_.heads_kv) : 1;
        if (!run.k) {
          for (int64_t n = 0; n < count; ++n) *exist &= !std::exchange(wanted[c + n], uint8_t(0));
        } else if (count == end - begin && all_marked(wanted + c, count) &&
                   (shape_.few_rows ? dim == stride && (ops_.few_types >> type & 1)
                                    : type == ATTN_F32 && factor == 1)) {
          rows = {run.k, view.k_row_bytes, type, factor,
                  load_scales(run.k_scale, view.shape->k_scale_stride.seq, c, count)};
          return;
        }
        for_each_marked(wanted + c, count, [&](int64_t n, int64_t length, bool marked) {
          float* out = t_.keys + (c + n) * stride;
          if (!marked) {
            std::fill_n(out, length * stride, 0.0f);
            return;
          }
          if (dtype_is_cache(type)) {
            for (int64_t row = 0; row < length; ++row)
              load_cache_row(ops_, type, run.k + (n + row) * view.k_row_bytes,
                             view.k_scales_of(run, n + row), 0, dim, factor, out + row * stride);
          } else {
            load_rows(ops_, type, run.k + n * view.k_row_bytes, view.k_row_bytes, length, 0, dim,
                      factor, out, stride);
          }
          for (int64_t row = 0; has_codes(type) && row < length; ++row) {
            ops_.multiply(1, out + row * stride, 0, view.k_scale(run, n + row), dim,
                          out + row * stride, 0);
          }
          if (dim == stride) return;
          for (int64_t row = 0; row < length; ++row) {
            std::fill(out + row * stride + dim, out + (row + 1) * stride, 0.0f);
          }
        });
      });
  return rows;
}

Rows KeyReader::load_values(int64_t base, int64_t begin, int64_t end, const uint8_t* wanted) {
  const int64_t dim = p_.head_dim_v, slab = shape_.slab;
  Rows rows = tile_rows(t_.values + begin * slab, slab);
  for_each_run(
      base, begin, end,
      [&](const SegmentView& view, int64_t key, int64_t c, const KeyRun& run, int64_t count) {
        const attn_dtype type = view.shape->v_type;
        const float factor = run.v ? view.v_descale(key, kv_head_, p_.heads_kv) : 1;
        if (shape_.few_rows && count == end - begin && run.v && dim == shape_.value_width &&
            (ops_.few_types >> type & 1) && (!wide_type(type) || factor == 1) &&
            all_marked(wanted + c, count)) {
          rows = {run.v, view.v_row_bytes, type, factor,
                  load_scales(run.v_scale, view.shape->v_scale_stride.seq, c, count)};
          return;
        }
        for_each_marked(wanted + c, count, [&](int64_t n, int64_t length, bool marked) {
          for (int64_t d = 0; d < shape_.value_width; d += slab) {
            float* out = t_.values + d * shape_.keys + (c + n) * slab;
            const int64_t width = marked && run.v ? std::clamp<int64_t>(dim - d, 0, slab) : 0;
            if (width > 0) {
              if (dtype_is_cache(type)) {
                for (int64_t row = 0; row < length; ++row)
                  load_cache_row(ops_, type, run.v + (n + row) * view.v_row_bytes,
                                 view.v_scales_of(run, n + row), d, width, factor,
                                 out + row * slab);
              } else {
                load_rows(ops_, type, run.v + n * view.v_row_bytes, view.v_row_bytes, length, d,
                          width, factor, out, slab);
              }
              for (int64_t row = 0; has_codes(type) && row < length; ++row) {
                ops_.multiply(1, out + row * slab, 0, view.v_scale(run, n + row), width,
                              out + row * slab, 0);
              }
            }
            if (width == slab) continue;
            for (int64_t row = 0; row < length; ++row) {
              std::fill(out + row * slab + width, out + (row + 1) * slab, 0.0f);
            }
          }
        });
      });
  return rows;
}

Ahead KeyReader::ahead(int64_t base, int64_t begin, int64_t end, bool values) const {
  Ahead rows{};
  for_each_run(base, begin, end,
               [&](const SegmentView& view, int64_t, int64_t, const KeyRun& run, int64_t count) {
                 const char* first = values ? run.v : run.k;
                 if (count != end - begin || !first) return;
                 rows = {first, values ? view.v_row_bytes : view.k_row_bytes, count,
                         values ? row_bytes(view.shape->v_type, p_.head_dim_v)
                                : row_bytes(view.shape->k_type, p_.head_dim)};
               });
  return rows;
}

void KeyReader::prefetch(int64_t base, int64_t begin, int64_t end, bool values) const {
  constexpr int64_t line = 64;
  for_each_run(base, begin, end,
               [&](const SegmentView& view, int64_t, int64_t, const KeyRun& run, int64_t count) {
                 const char* row = values ? run.v : run.k;
                 const int64_t stride = values ? view.v_row_bytes : view.k_row_bytes;
                 const int64_t bytes = values ? row_bytes(view.shape->v_type, p_.head_dim_v)
                                              : row_bytes(view.shape->k_type, p_.head_dim);
                 for (int64_t n = 0; row && n < count; ++n, row += stride) {
                   for (int64_t at = 0; at < bytes; at += line) __builtin_prefetch(row + at, 0, 2);
                 }
               });
}

void load_queries(const Problem& p, const Args& args, const TileOps& ops, const TileShape& shape,
                  const Tile& tile, int64_t b, int64_t kv_head, int64_t first_row, int64_t count,
                  float factor) {
  const QueryView query = query_view(p, args, b);
  const int64_t group = p.group(), dim = p.head_dim;
  const char* base = static_cast<const char*>(args.q);
  factor *= q_descale(p, args, b, kv_head);
  if (shape.few_rows || count % shape.panel != 0) {
    const int64_t width = shape.few_rows ? shape.key_stride : dim;
    std::fill_n(tile.queries, round_up(count, shape.panel) * width, 0.0f);
  }
  for (int64_t row = 0; row < count; ++row) {
    const int64_t i = (first_row + row) / group, head = kv_head * group + (first_row + row) % group;
    const int64_t index = query.q + i * p.q_stride.seq + head * p.q_stride.head;
    if (shape.few_rows) {
      load_rows(ops, p.q_type, base, 0, 1, index, dim, factor,
                tile.queries + row * shape.key_stride, 0);
      continue;
    }
    load_rows(ops, p.q_type, base, 0, 1, index, dim, factor, tile.row, 0);
    float* out = tile.queries + row / shape.panel * shape.panel * dim + row % shape.panel;
    for (int64_t d = 0; d < dim; ++d) out[d * shape.panel] = tile.row[d];
  }
}

void read_bias(const Problem& p, const Args& args, const TileOps& ops, int64_t b, int64_t h,
               int64_t i, int64_t key, int64_t count, float* out) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const int64_t stride = p.bias_stride[3];
  const int64_t index =
      b * p.bias_stride[0] + h * p.bias_stride[1] + i * p.bias_stride[2] + key * stride;
  if (stride == 1) {
    load_rows(ops, p.bias_type, static_cast<const char*>(args.bias), 0, 1, index, count, 1, out, 0);
  } else {
    for (int64_t n = 0; n < count; ++n)
      decode_row(p.bias_type, args.bias, index + n * stride, 1, out + n);
  }
  if (!p.has(ATTN_BIAS_SLOPES)) return;
  const float slope = args.bias_slopes[h];
  for (int64_t n = 0; n < count; ++n) out[n] = out[n] == -infinity ? -infinity : out[n] * slope;
}

}  // namespace attn
