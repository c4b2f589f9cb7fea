#include "cpu/tile.h"

#include <algorithm>
#include <cstring>

namespace attn {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// The width, at most `limit`, that splits `vectors` most evenly.
int even_width(int64_t vectors, int limit) {
  return int(ceil_div(vectors, ceil_div(vectors, limit)));
}

}  // namespace

TileShape::TileShape(const Problem& p, const TileOps& ops) {
  const int64_t all_rows = std::max<int64_t>(1, p.seqlen_q) * p.group();
  few_rows = all_rows <= ops.few_rows;
  // Mask blocks are mostly powers of two: so are their items.
  const int limit = p.has(ATTN_BLOCK_MASK) ? std::min(2, ops.panel_vectors) : ops.panel_vectors;
  panel_vectors = even_width(ceil_div(all_rows, ops.lanes), limit);
  panel = int64_t(panel_vectors) * ops.lanes;
  // Large items reuse each K/V tile more often; many items keep many cores busy.
  rows = p.has(ATTN_BLOCK_MASK) ? 128 : 192;
  const int64_t sequences = std::max<int64_t>(1, p.batch * p.heads_kv);
  while (rows > 48 && sequences * ceil_div(all_rows, rows) < 32) rows /= 2;
  rows = round_up(std::min(rows, all_rows), panel);
  key_stride = round_up(p.head_dim, ops.lanes);
  const int64_t value_vectors = ceil_div(p.head_dim_v, ops.lanes);
  slab_vectors = even_width(value_vectors, ops.slab_vectors);
  slab = int64_t(slab_vectors) * ops.lanes;
  value_width = round_up(p.head_dim_v, slab);
}

size_t Tile::place(const Problem& p, const TileShape& shape, char* base) {
  size_t used = 0;
  const auto take = [&](auto*& pointer, int64_t count) {
    if (base) pointer = reinterpret_cast<std::decay_t<decltype(pointer)>>(base + used);
    used += size_t(round_up(count * int64_t(sizeof(*pointer)), 256));
  };
  const int64_t rows = shape.rows;
  take(queries, rows * (shape.few_rows ? shape.key_stride : p.head_dim));
  take(keys, tile_keys * shape.key_stride);
  take(values, tile_keys * shape.value_width);
  take(scores, tile_keys * rows);
  take(add, tile_keys * rows);
  take(out, rows * shape.value_width);
  take(row, std::max(shape.key_stride, shape.value_width));
  for (float** state : {&max, &sum, &rescale, &tile_max, &slope}) take(*state, rows);
  for (int64_t** range : {&begin, &end}) take(*range, rows);
  for (int32_t** range : {&tile_begin, &tile_end, &position}) take(*range, rows);
  for (uint8_t** mark : {&wanted, &seen}) take(*mark, tile_keys);
  return used;
}

void load_row(const TileOps& ops, attn_dtype type, const void* base, int64_t index, int64_t n,
              float factor, float* out) {
  if (type == ATTN_F32) {
    const float* in = static_cast<const float*>(base) + index;
    if (factor != 1) return ops.multiply(in, factor, out, n);
    std::memcpy(out, in, size_t(n) * sizeof(float));
    return;
  }
  if (type == ATTN_F16 && ops.f16_to_f32) {
    ops.f16_to_f32(static_cast<const uint16_t*>(base) + index, out, n);
  } else if (type == ATTN_BF16) {
    ops.bf16_to_f32(static_cast<const uint16_t*>(base) + index, out, n);
  } else {
    decode_row(type, base, index, n, out);
  }
  if (factor != 1) ops.multiply(out, factor, out, n);
}

void store_row(const TileOps& ops, attn_dtype type, float* in, float factor, int64_t n, void* base,
               int64_t index) {
  if (type == ATTN_F32) return ops.multiply(in, factor, static_cast<float*>(base) + index, n);
  ops.multiply(in, factor, in, n);
  if (type == ATTN_F16 && ops.f32_to_f16) {
    ops.f32_to_f16(in, static_cast<uint16_t*>(base) + index, n);
  } else if (type == ATTN_BF16) {
    ops.f32_to_bf16(in, static_cast<uint16_t*>(base) + index, n);
  } else {
    for (int64_t d = 0; d < n; ++d) encode_element(type, base, index + d, in[d], true);
  }
}

template <class Visit>
void KeyReader::for_each_key(int64_t begin, int64_t end, Visit&& visit) {
  // A tile's values come after its keys, from the same segment on.
  int64_t segment = segment_;
  SegmentView view = view_;
  for (int64_t j = begin; j < end;) {
    while (j >= view.first + view.length) {
      view = segment_view(p_, args_, b_, ++segment, view.first + view.length);
    }
    if (j == begin) {
      segment_ = segment;
      view_ = view;
    }
    const KeyRun run = view.run(j - view.first, kv_head_);
    const int64_t count = std::min(run.count, end - j);
    for (int64_t n = 0; n < count; ++n) visit(view, j - view.first + n, j + n, run, n);
    j += count;
  }
}

bool KeyReader::load_keys(const TileOps& ops, const TileShape& shape, const Tile& tile, int64_t base,
                          int64_t begin, int64_t end, uint8_t* wanted) {
  bool all_exist = true;
  const int64_t dim = p_.head_dim;
  for_each_key(begin, end, [&](const SegmentView& view, int64_t key, int64_t j, const KeyRun& run,
                               int64_t n) {
    float* out = tile.keys + (j - base) * shape.key_stride;
    if (wanted[j - base] && run.k) {
      load_row(ops, view.shape->k_type, run.k + n * view.k_row_bytes, 0, dim,
               view.k_descale(key, kv_head_, p_.heads_kv), out);
      std::fill(out + dim, out + shape.key_stride, 0.0f);
      return;
    }
    if (wanted[j - base]) {
      wanted[j - base] = 0;
      all_exist = false;
    }
    std::fill(out, out + shape.key_stride, 0.0f);
  });
  return all_exist;
}

void KeyReader::load_values(const TileOps& ops, const TileShape& shape, const Tile& tile,
                            int64_t base, int64_t begin, int64_t end, const uint8_t* wanted) {
  const int64_t dim = p_.head_dim_v;
  const bool direct = shape.value_width == shape.slab;
  for_each_key(begin, end, [&](const SegmentView& view, int64_t key, int64_t j, const KeyRun& run,
                               int64_t n) {
    float* out = tile.values + (j - base) * shape.slab;
    float* row = direct ? out : tile.row;
    if (wanted[j - base] && run.v) {
      load_row(ops, view.shape->v_type, run.v + n * view.v_row_bytes, 0, dim,
               view.v_descale(key, kv_head_, p_.heads_kv), row);
      std::fill(row + dim, row + shape.value_width, 0.0f);
    } else {
      std::fill(row, row + shape.value_width, 0.0f);
    }
    if (direct) return;
    for (int64_t d = 0; d < shape.value_width; d += shape.slab) {
      std::memcpy(out + d * tile_keys, row + d, size_t(shape.slab) * sizeof(float));
    }
  });
}

void load_queries(const Problem& p, const Args& args, const TileOps& ops, const TileShape& shape,
                  const Tile& tile, int64_t b, int64_t kv_head, int64_t first_row, int64_t count,
                  float factor) {
  const QueryView query = query_view(p, args, b);
  const int64_t group = p.group(), dim = p.head_dim;
  factor *= q_descale(p, args, b, kv_head);
  if (shape.few_rows || count % shape.panel != 0) {
    const int64_t width = shape.few_rows ? shape.key_stride : dim;
    std::fill_n(tile.queries, round_up(count, shape.panel) * width, 0.0f);
  }
  for (int64_t row = 0; row < count; ++row) {
    const int64_t i = (first_row + row) / group, head = kv_head * group + (first_row + row) % group;
    const int64_t index = query.q + i * p.q_stride.seq + head * p.q_stride.head;
    if (shape.few_rows) {
      load_row(ops, p.q_type, args.q, index, dim, factor, tile.queries + row * shape.key_stride);
      continue;
    }
    load_row(ops, p.q_type, args.q, index, dim, factor, tile.row);
    float* out = tile.queries + row / shape.panel * shape.panel * dim + row % shape.panel;
    for (int64_t d = 0; d < dim; ++d) out[d * shape.panel] = tile.row[d];
  }
}

}  // namespace attn
