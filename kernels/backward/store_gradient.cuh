// Rows of gradients, from the fragments that matrix instructions leave (common/store.cuh).
#pragma once
#include "../common/store.cuh"
#include "prepare_args.h"

namespace attn::device {

// Adds what a gradient's array holds to one of a lane's rows: o * factor + that.
template <class Element, int count>
__device__ __forceinline__ void add_row(const attn_gradient_array& g, long long at, bool valid,
                                        float (&o)[count], int half, float factor, int head_dim) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int n = 0; n < count / 4; ++n) {
    float2 old = make_float2(0, 0);
    if (valid && 8 * n < head_dim) {
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

// Stores a lane's row of a gradient, o times factor, from element `at` on. Element: the array's
// type if that is not f32. By all lanes of a warp.
template <class Element, int count>
__device__ __forceinline__ void store_gradient(const attn_gradient_array& g, long long at,
                                               bool valid, float (&o)[count], int half,
                                               float factor, int head_dim) {
  if (g.add) {
    add_row<Element>(g, at, valid, o, half, factor, head_dim);
    factor = 1;
  }
  if (g.type == attn_element_f32)
    store_row_f32(static_cast<float*>(g.at) + at, valid, o, half, factor, head_dim);
  else
    store_row_16bit<Element>(static_cast<unsigned short*>(g.at) + at, valid, o, half, factor,
                             head_dim);
}

}  // namespace attn::device
