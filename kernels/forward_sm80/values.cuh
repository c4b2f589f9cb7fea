// Sums of weight * v, and the rows of the result.
#pragma once
#include "../common/softmax.cuh"
#include "../common/store.cuh"
#include "../ptx/ldmatrix.h"
#include "scores.cuh"
#include "state.cuh"

namespace attn::sm80 {

using namespace device;

// o += P V. v_at: the lane's place in the tile. zeroing: values of keys that nobody sees are taken
// as zero.
template <bool zeroing, class Shape>
__device__ __forceinline__ void multiply_values_as(State<Shape>& state, unsigned v_at) {
#pragma unroll
  for (int k = 0; k < Shape::key_tiles / 2; ++k) {
    unsigned seen[2];
    if (Shape::masked && zeroing)
      seen[0] = state.seen_words(2 * k), seen[1] = state.seen_words(2 * k + 1);
#pragma unroll
    for (int n = 0; n < Shape::v_tiles; n += 2) {
      unsigned v[4];
      ptx::ldmatrix_transposed(v,
                               (v_at ^ line_step(n / 2)) + n / 8 * 128 + k * 16 * Shape::v_pitch);
      if (zeroing) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          v[i] &= Shape::masked ? seen[i % 2] : state.seen[state.words_per_key ? 2 * k + i % 2 : 0];
      }
#pragma unroll
      for (int m = 0; m < Shape::row_tiles; ++m) {
        Shape::Element::mma(state.o[m][n], state.p[m][k], v[0], v[1]);
        Shape::Element::mma(state.o[m][n + 1], state.p[m][k], v[2], v[3]);
      }
    }
  }
}

template <class Shape>
__device__ __forceinline__ void multiply_values(State<Shape>& state, unsigned v_at) {
  constexpr bool may_zero = Shape::biased || Shape::masked;
  if (Shape::masked &&
      __all_sync(0xffffffff, state.seen[0] == state.all_seen))  // lanes have other keys
    multiply_values_as<false>(state, v_at);
  else
    multiply_values_as<may_zero>(state, v_at);
}

// out and lse of the warp's rows.
template <class Shape>
__device__ __forceinline__ void store_results(State<Shape>& state,
                                              const typename Shape::Arguments& a,
                                              const Block& block, int warp_row) {
  const int lane = threadIdx.x % 32;
  const int first = Shape::first_column(threadIdx.x / 32);
  const float sink = a.sinks ? a.sinks[block.h] : -infinity();
#pragma unroll
  for (int m = 0; m < Shape::row_tiles; ++m) {
    auto& o = reinterpret_cast<float(&)[4 * Shape::v_tiles]>(state.o[m]);
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = row_sum(state.sum[m][half]);
      factor[half] = row_factor(state.reference[m][half], sum, sink);
      const float lse = row_lse(state.reference[m][half], sum, sink);
      const int row = query_at<Shape>(block, warp_row, m, half, lane);
      if (a.lse && first == 0 && row < block.seqlen_q && lane % 4 == 0) {
        const long long at = a.cu_seqlens_q
                                 ? block.h * a.total_q + block.q_begin + row
                                 : (block.b * (long long)a.heads_q + block.h) * a.seqlen_q + row;
        a.lse[at] = lse;
      }
    }
    clear_rows(o, factor);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = query_at<Shape>(block, warp_row, m, half, lane);
      const long long at = (a.cu_seqlens_q ? 0 : block.b * a.out_stride[0]) +
                           (block.q_begin + row) * a.out_stride[1] + block.h * a.out_stride[2] +
                           first;
      store_row(a.out, a.out_type, at, row < block.seqlen_q, o, half, factor[half],
                a.head_dim_v - first);
    }
  }
}

}  // namespace attn::sm80
