// Scores become weights.
#pragma once
#include "../common/softmax.cuh"
#include "../ptx/ex2.h"
#include "state.cuh"

namespace attn::sm80 {

using namespace device;

// s -> p of row tile m, with s * log2_scale in the log2 domain. split_invariant: the reference is
// an integer, so that sums taken against different references differ by an exact power of two, and
// the sum has the weights as rounded.
template <bool split_invariant, class Shape>
__device__ __forceinline__ void softmax_rows(State<Shape>& state, int m, float log2_scale) {
  constexpr int key_tiles = Shape::key_tiles, v_tiles = Shape::v_tiles;
  auto& s = state.s[m];
  float used[2], shrink[2];
  bool moved = false, large = false;  // large: see ../common/softmax.cuh
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = fmaxf(s[0][2 * half], s[0][2 * half + 1]);
#pragma unroll
    for (int n = 1; n < key_tiles; ++n) top = fmaxf(top, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2)) * log2_scale;
    const float old = state.reference[m][half];
    const float next = fmaxf(old, split_invariant ? ceilf(top) : top);
    moved = moved || next != old;
    used[half] = next == -infinity() ? 0 : next;
    large = large || fabsf(used[half]) >= large_score;
    shrink[half] = ptx::ex2(old - used[half]);
    state.reference[m][half] = next;
  }
  if (__any_sync(0xffffffff, moved || (!Shape::score && large))) {
    if (!Shape::score && __any_sync(0xffffffff, large)) [[unlikely]] {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < key_tiles; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& x = s[n][2 * half + i];
            x = round_large_score(x, log2_scale, used[half]) * ptx::rcp(log2_scale);
          }
        used[half] = 0;
      }
    }
    state.sum[m][0] *= shrink[0];
    state.sum[m][1] *= shrink[1];
#pragma unroll
    for (int n = 0; n < v_tiles; ++n) {
      state.o[m][n][0] *= shrink[0];
      state.o[m][n][1] *= shrink[0];
      state.o[m][n][2] *= shrink[1];
      state.o[m][n][3] *= shrink[1];
    }
  }
#pragma unroll
  for (int n = 0; n < key_tiles; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = ptx::ex2(fmaf(s[n][2 * half], log2_scale, -used[half]));
      float y = ptx::ex2(fmaf(s[n][2 * half + 1], log2_scale, -used[half]));
      const unsigned packed = Shape::Element::pack(x, y);
      if (split_invariant) {
        x = Shape::Element::unpack(packed & 0xffff);
        y = Shape::Element::unpack(packed >> 16);
      }
      state.sum[m][half] += x + y;
      state.p[m][n / 2][n % 2 * 2 + half] = packed;
    }
  }
}

template <class Shape>
__device__ __forceinline__ void softmax(State<Shape>& state, float log2_scale,
                                        bool split_invariant) {
  if (split_invariant) {
#pragma unroll
    for (int m = 0; m < Shape::row_tiles; ++m) softmax_rows<true>(state, m, log2_scale);
  } else {
#pragma unroll
    for (int m = 0; m < Shape::row_tiles; ++m) softmax_rows<false>(state, m, log2_scale);
  }
}

}  // namespace attn::sm80
