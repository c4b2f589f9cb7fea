// Rows of gradients, from the fragments that matrix instructions leave (common/store.cuh).
#pragma once
#include "../common/store.cuh"
#include "backward_args.h"

namespace attn::bwd_sm90 {

// Adds what a gradient's array holds to one of a lane's rows, o[at] = o[at] * factor + that.
template <int count>
__device__ __forceinline__ void add_row(const attn_gradient_array& g, long long at, bool valid,
                                        float (&o)[count], int half, float factor, int head_dim) {
  const int columns = valid ? head_dim : 0;
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int n = 0; n < count / 4; ++n)
    if (8 * n < columns)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& x = o[4 * n + 2 * half + i];
        const long long element = at + 8 * n + column + i;
        const unsigned short bits =
            g.type == attn_element_f32 ? 0 : static_cast<const unsigned short*>(g.at)[element];
        const float old = g.type == attn_element_f32   ? static_cast<const float*>(g.at)[element]
                          : g.type == attn_element_f16 ? device::F16::unpack(bits)
                                                       : device::BF16::unpack(bits);
        x = fmaf(x, factor, old);
      }
}
// Stores a lane's row of a gradient, o times factor, from element `at` on. By all lanes of a warp.
template <int count>
__device__ __forceinline__ void store_gradient(const attn_gradient_array& g, long long at,
                                               bool valid, float (&o)[count], int half,
                                               float factor, int head_dim) {
  if (g.add) {
    add_row(g, at, valid, o, half, factor, head_dim);
    factor = 1;
  }
  device::store_row(g.at, g.type, at, valid, o, half, factor, head_dim);
}

}  // namespace attn::bwd_sm90
