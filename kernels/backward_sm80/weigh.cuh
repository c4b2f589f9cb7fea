// Scores and d_out V become P and the gradients of the scores.
#pragma once
#include "../common/block_mask.cuh"
#include "../common/tanh.cuh"
#include "../forward_sm80/fragment.h"
#include "../forward_sm80/state.cuh"
#include "../ptx/ex2.h"
#include "../ptx/max.h"
#include "items.cuh"

namespace attn::bwd_sm80 {

using namespace device;
using sm80::fragment_column, sm80::fragment_row;

// lse2 and delta of the queries. Of those that stay a lane has its rows' in registers, of those
// that are walked over they are in shared memory.
template <class Shape>
struct RowStats {
  float lse2[Shape::row_tiles][2], delta[Shape::row_tiles][2];
};

// A finite bias hides nothing, so it is kept where its product with log2(e) is finite.
constexpr float lowest_bias = -2.3e38f;

// What all scores of a head have in common. Nothing here branches from score to score, so that many
// are under way together.
struct ScoreRule {
  float factor;  // of a product, or with a softcap of its tanh
  float alibi;
  bool capped;

  __device__ __forceinline__ ScoreRule(const attn_bwd_sm80_kernarg& a, int head)
      : factor(a.softcap > 0 ? a.softcap : a.scale),
        alibi(a.alibi_slopes ? a.alibi_slopes[head] : 0),
        capped(a.softcap > 0) {}

  // With a softcap products become its tanh.
  template <int n>
  __device__ __forceinline__ void cap(const attn_bwd_sm80_kernarg& a, float (&x)[n][4]) const {
    if (!capped) return;
#pragma unroll
    for (int k = 0; k < n; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) x[k][i] = tanh_accurate(x[k][i] * a.scale / a.softcap);
  }
  // In the log2 domain; -inf: a bias hides the key. x: as cap() leaves it. distance: from the query
  // to the key.
  __device__ __forceinline__ float score(float x, float bias, int distance) const {
    const float y = fmaf(x, factor, ptx::max_nan(bias, lowest_bias));
    return bias == -infinity() ? bias : fmaf(-alibi, fabsf(float(distance)), y) * log2_e;
  }
  __device__ __forceinline__ float slope(float x) const {  // of softcap
    return capped ? 1 - x * x : 1;
  }
};

// The bias of 2 rows and `columns` pairs of neighbouring columns of a lane, 8 columns from pair to
// pair. Loads of all are under way together: those of rows and columns that there are not are of
// the last ones.
template <Of of, int columns>
__device__ __forceinline__ void load_bias(const attn_bwd_sm80_kernarg& a, const Item& item,
                                          int head, int row, int column,
                                          float (&b)[columns][2][2]) {
  constexpr int of_rows = is_keys<of> ? 3 : 2, of_columns = is_keys<of> ? 2 : 3;
  const long long row_stride = a.bias_stride[of_rows], column_stride = a.bias_stride[of_columns];
  const long long entry = item.b * a.bias_stride[0] + head * a.bias_stride[1];
  const bool whole = column + 8 * columns <= item.walked;
  const auto load = [&](const auto* from, auto convert) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto* const at = from + entry + min(row + 8 * half, item.length - 1) * row_stride;
      // Addresses that the compiler knows but for a register, or of few products.
      if (whole && column_stride == 1) {
#pragma unroll
        for (int n = 0; n < columns; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) b[n][half][i] = convert((at + column)[8 * n + i]);
      } else {
#pragma unroll
        for (int n = 0; n < columns; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            b[n][half][i] = convert(at[min(column + 8 * n + i, item.walked - 1) * column_stride]);
      }
    }
  };
  const auto* narrow = static_cast<const unsigned short*>(a.bias);
  if (a.bias_type == attn_element_f32)
    load(static_cast<const float*>(a.bias), [](float x) { return x; });
  else if (a.bias_type == attn_element_bf16)
    load(narrow, [](unsigned short x) { return BF16::unpack(x); });
  else
    load(narrow, [](unsigned short x) { return F16::unpack(x); });
}

// Which of the lane's columns see or are seen by one of its rows.
template <class Shape>
struct SeenColumns {
  int begin, end;
  unsigned bits[Shape::keys / 32];  // masked queries: of the lane's first column and those after it
};

template <class Shape, Of of>
__device__ __forceinline__ SeenColumns<Shape> seen_columns(const attn_bwd_sm80_kernarg& a,
                                                           const Item& item, const Walked& tile,
                                                           int row) {
  SeenColumns<Shape> seen;
  seen.begin = clamp(row + item.from - tile.first, 0, Shape::keys);
  seen.end = row < item.length ? clamp(row + item.to - tile.first, 0, tile.count) : 0;
  if constexpr (Shape::masked) {
    // Query i sees keys up to i + the difference of the lengths.
    if (tile.mask == mask_causal) {
      if (is_keys<of>)
        seen.begin = max(seen.begin, row - (item.length - item.walked) - tile.first);
      else
        seen.end = min(seen.end, row + (item.walked - item.length) + 1 - tile.first);
    }
    if constexpr (!is_keys<of>) {
      const int block_q = 1 << a.block_mask.block_q_log2, block_k = 1 << a.block_mask.block_k_log2;
#pragma unroll
      for (int n = 0; n < Shape::keys / 32; ++n) {
        seen.bits[n] = ~0u;
        if (tile.mask >= 0 && row < item.length)
          seen.bits[n] = mask_word(a.block_mask, tile.mask, row & (block_q - 1),
                                   (tile.first & (block_k - 1)) + 32 * n) >>
                         fragment_column(0, threadIdx.x % 32);
      }
    }
  }
  return seen;
}

// s.s -> s.p and d.s -> d.p, as the products take them; s.s is then -inf where nothing is seen.
// hiding: some of the pairs of a query and a key may not be visible.
template <bool hiding, Of of, class Shape>
__device__ __forceinline__ void weigh_as(sm80::State<Shape>& s, sm80::State<Shape>& d,
                                         const attn_bwd_sm80_kernarg& a, const Item& item,
                                         const Walked& tile, int warp_row,
                                         const RowStats<Shape>& rows, const float* walked) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < Shape::row_tiles; ++m) {
    SeenColumns<Shape> seen[2];
    if (hiding) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        seen[half] =
            seen_columns<Shape, of>(a, item, tile, warp_row + 16 * m + fragment_row(half, lane));
    }
    float bias[Shape::score ? Shape::key_tiles : 1][2][2] = {};
    const ScoreRule rule(a, Shape::score ? tile.head : 0);
    if constexpr (Shape::score) rule.cap(a, s.s[m]);
    if (Shape::score && a.bias)
      load_bias<of>(a, item, tile.head, warp_row + 16 * m + fragment_row(0, lane),
                    tile.first + fragment_column(0, lane), bias);
#pragma unroll
    for (int n = 0; n < Shape::key_tiles; ++n) {
      const int first = 8 * n + fragment_column(0, lane);
      float2 lse2, delta;
      if (is_keys<of>) {
        lse2 = *reinterpret_cast<const float2*>(walked + first);
        delta = *reinterpret_cast<const float2*>(walked + Shape::block.copied + first);
      }
      unsigned key_bits[2];  // of the warp's keys, for the lane's two queries
      if constexpr (Shape::masked && hiding && is_keys<of>) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int block_q = 1 << a.block_mask.block_q_log2,
                    block_k = 1 << a.block_mask.block_k_log2;
          key_bits[i] = ~0u;
          if (tile.mask >= 0)
            key_bits[i] =
                mask_word(a.block_mask, tile.mask, (tile.first + first + i) & (block_q - 1),
                          (warp_row + 16 * m) & (block_k - 1));
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float p[2], ds[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = warp_row + 16 * m + fragment_row(half, lane);
          float& x = s.s[m][n][2 * half + i];
          const float of_lse2 = is_keys<of> ? (i ? lse2.y : lse2.x) : rows.lse2[m][half];
          const float of_delta = is_keys<of> ? (i ? delta.y : delta.x) : rows.delta[m][half];
          bool hidden = false;
          if constexpr (hiding) {
            hidden = first + i < seen[half].begin || first + i >= seen[half].end;
            if constexpr (Shape::masked)
              hidden = hidden || !((is_keys<of> ? key_bits[i] >> fragment_row(half, lane)
                                                : seen[half].bits[n / 4] >> (8 * n % 32 + i)) &
                                   1);
          }
          float slope = 1;
          if constexpr (Shape::score) {
            const int column = tile.first + first + i;
            const int distance = is_keys<of> ? column + item.length - item.walked - row
                                             : row + item.walked - item.length - column;
            const float score = rule.score(x, bias[n][half][i], distance);
            hidden = hidden || score == -infinity();
            slope = rule.slope(x);
            x = score - of_lse2;
          } else {
            x = fmaf(x, a.log2_scale, -of_lse2);
          }
          p[i] = hidden ? 0 : ptx::ex2(x);
          if (of != Of::keys_dv) {
            ds[i] = p[i] * (d.s[m][n][2 * half + i] - of_delta);
            if (Shape::score) ds[i] *= slope;
            if (hidden) ds[i] = 0;
          }
          x = hidden ? -infinity() : 0;
        }
        if (of == Of::keys || of == Of::keys_dv)
          s.p[m][n / 2][n % 2 * 2 + half] = Shape::Element::pack(p[0], p[1]);
        if (of != Of::keys_dv) d.p[m][n / 2][n % 2 * 2 + half] = Shape::Element::pack(ds[0], ds[1]);
      }
    }
  }
}

// full: all of the warp's rows see, or are seen by, the whole tile.
template <Of of, class Shape>
__device__ __forceinline__ void weigh(sm80::State<Shape>& s, sm80::State<Shape>& d,
                                      const attn_bwd_sm80_kernarg& a, const Item& item,
                                      const Walked& tile, bool full, int warp_row,
                                      const RowStats<Shape>& rows, const float* walked) {
  if (Shape::score || !full)
    weigh_as<true, of>(s, d, a, item, tile, warp_row, rows, walked);
  else
    weigh_as<false, of>(s, d, a, item, tile, warp_row, rows, walked);
  // What a bias or a mask hides from all of the warp's rows may be anything: products take it as
  // zero.
  if constexpr (Shape::masked || Shape::biased) {
    if (Shape::masked) s.seen[0] = s.all_seen;
    if ((Shape::masked && !full) || (Shape::biased && a.bias)) s.find_unseen();
#pragma unroll
    for (int n = 0; n < int(sizeof s.seen / sizeof *s.seen); ++n) d.seen[n] = s.seen[n];
  }
}

}  // namespace attn::bwd_sm80
