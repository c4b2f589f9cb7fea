// Rows of a gradient, from the fragments that matrix instructions leave (common/store.cuh).
#pragma once
#include "../common/store.cuh"
#include "../forward_sm80/fragment.h"
#include "../forward_sm80/state.cuh"
#include "items.cuh"

namespace attn::bwd_sm80 {

using namespace device;

// o * factor + what is there, of one of the lane's rows.
template <class Element, int count>
__device__ __forceinline__ void add_row(const attn_gradient_array& g, long long at, bool valid,
                                        float (&o)[count], int half, float factor, int dim) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int n = 0; n < count / 4; ++n) {
    float2 old = make_float2(0, 0);
    if (valid && 8 * n < dim) {
      if (g.type == attn_element_f32) {
        old =
            *reinterpret_cast<const float2*>(static_cast<const float*>(g.at) + at + 8 * n + column);
      } else {
        const unsigned pair = *reinterpret_cast<const unsigned*>(
            static_cast<const unsigned short*>(g.at) + at + 8 * n + column);
        old = make_float2(Element::unpack(pair & 0xffff), Element::unpack(pair >> 16));
      }
    }
    float* x = o + 4 * n + 2 * half;
    x[0] = fmaf(x[0], factor, old.x);
    x[1] = fmaf(x[1], factor, old.y);
  }
}

// The warp's rows; those without `scale` are 0, or stay as they are if the gradient is added.
template <class Shape>
__device__ __forceinline__ void store_gradient(sm80::State<Shape>& state,
                                               const attn_gradient_array& g, const Item& item,
                                               bool packed, int warp_row,
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
      float factor = scale[m][half];
      bool valid = row < item.stored;
      if (g.add) {
        valid = valid && factor != 0;
        add_row<typename Shape::Element>(g, at, valid, o, half, factor, dim);
        factor = 1;
      }
      if (g.type == attn_element_f32)
        store_row_f32(static_cast<float*>(g.at) + at, valid, o, half, factor, dim);
      else
        store_row_16bit<typename Shape::Element>(static_cast<unsigned short*>(g.at) + at, valid, o,
                                                 half, factor, dim);
    }
  }
}

}  // namespace attn::bwd_sm80
