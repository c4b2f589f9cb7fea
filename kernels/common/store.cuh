// A warp's rows of out, from the fragments that matrix instructions leave: of every 8 columns a lane has
// o[4n + 2 half], column 8n + 2(lane % 4), and the one behind it, for rows lane / 4 + 8 half.
#pragma once
#include "element.cuh"

namespace attn::device {

// Four packed words, one per lane of a quad and 8-column tile, become four columns' words of one tile:
// afterwards lane t of the quad holds all of tile t's row.
__device__ __forceinline__ void transpose_quad(unsigned (&w)[4]) {
  const int t = threadIdx.x % 4;
  const bool odd = t & 1, high = t & 2;
  unsigned give0 = odd ? w[0] : w[1], give1 = odd ? w[2] : w[3];
  give0 = __shfl_xor_sync(0xffffffff, give0, 1);
  give1 = __shfl_xor_sync(0xffffffff, give1, 1);
  const unsigned a0 = odd ? give0 : w[0], a1 = odd ? w[1] : give0;
  const unsigned a2 = odd ? give1 : w[2], a3 = odd ? w[3] : give1;
  unsigned give2 = high ? a0 : a2, give3 = high ? a1 : a3;
  give2 = __shfl_xor_sync(0xffffffff, give2, 2);
  give3 = __shfl_xor_sync(0xffffffff, give3, 2);
  w[0] = high ? give2 : a0;
  w[1] = high ? give3 : a1;
  w[2] = high ? a2 : give2;
  w[3] = high ? a3 : give3;
}

template <class Element, int count>
__device__ __forceinline__ void store_row_16bit(unsigned short* row, bool valid, const float (&o)[count], int half,
                                                float factor, int head_dim_v) {
  const int column = threadIdx.x % 4 * 8;
  const int columns = valid ? head_dim_v - column : 0;
  row += column;
  asm volatile("" : "+l"(row));  // else the compiler adds up per store, and keeps the terms through the kernel's loops
#pragma unroll
  for (int n = 0; n < count / 4; n += 4) {
    unsigned w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = 4 * (n + j) + 2 * half;
      w[j] = Element::pack(o[at] * factor, o[at + 1] * factor);
    }
    transpose_quad(w);
    if (8 * n < columns) *reinterpret_cast<uint4*>(row + 8 * n) = make_uint4(w[0], w[1], w[2], w[3]);
  }
}
template <int count>
__device__ __forceinline__ void store_row_f32(float* row, bool valid, const float (&o)[count], int half, float factor,
                                              int head_dim_v) {
  const int columns = valid ? head_dim_v : 0;
  row += threadIdx.x % 4 * 2;
  asm volatile("" : "+l"(row));
#pragma unroll
  for (int n = 0; n < count / 4; ++n) {
    const int at = 4 * n + 2 * half;
    if (8 * n < columns) *reinterpret_cast<float2*>(row + 8 * n) = make_float2(o[at] * factor, o[at + 1] * factor);
  }
}
// Rows of factor 0 become zeros whatever they held. By all lanes of a warp.
template <int count>
__device__ __forceinline__ void clear_rows(float (&o)[count], const float (&factor)[2]) {
  if (!__any_sync(0xffffffff, factor[0] == 0 || factor[1] == 0)) [[likely]]
    return;
#pragma unroll
  for (int n = 0; n < count; ++n) o[n] = factor[n / 2 % 2] == 0 ? 0 : o[n];
}
// By all lanes of a warp. `at`: of the row's first element, in elements of out_type.
template <int count>
__device__ __forceinline__ void store_row(void* out, int out_type, long long at, bool valid, const float (&o)[count],
                                          int half, float factor, int head_dim_v) {
  if (out_type == attn_element_f32)
    store_row_f32(static_cast<float*>(out) + at, valid, o, half, factor, head_dim_v);
  else if (out_type == attn_element_f16)
    store_row_16bit<F16>(static_cast<unsigned short*>(out) + at, valid, o, half, factor, head_dim_v);
  else
    store_row_16bit<BF16>(static_cast<unsigned short*>(out) + at, valid, o, half, factor, head_dim_v);
}

}  // namespace attn::device
