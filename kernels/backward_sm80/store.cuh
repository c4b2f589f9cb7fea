// The rows of a gradient that a warp has.
#pragma once
#include "../backward/store_gradient.cuh"
#include "../forward_sm80/fragment.h"
#include "../forward_sm80/state.cuh"
#include "items.cuh"

namespace attn::bwd_sm80 {

// Those without `scale` become 0, or stay as they are if the gradient is added.
template <class Shape>
__device__ __forceinline__ void store_rows(sm80::State<Shape>& state, const attn_gradient_array& g,
                                           const Item& item, bool packed, int warp_row,
                                           const float (&scale)[Shape::row_tiles][2], int dim) {
  if (!g.at) return;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < Shape::row_tiles; ++m) {
    auto& o = reinterpret_cast<float(&)[4 * Shape::v_tiles]>(state.o[m]);
    clear_rows(o, scale[m]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + 16 * m + sm80::fragment_row(half, lane);
      const long long at = (packed ? 0 : item.b * g.stride[0]) +
                           (item.first_row + row) * g.stride[1] + item.head * g.stride[2];
      const bool valid = row < item.stored && !(g.add && scale[m][half] == 0);
      store_gradient<typename Shape::Element>(g, at, valid, o, half, scale[m][half], dim);
    }
  }
}

}  // namespace attn::bwd_sm80
