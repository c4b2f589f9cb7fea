// A warp's rows of out, from the fragments that matrix instructions leave: of every 8 columns a
// lane has o[4n + 2 half], column 8n + 2(lane % 4), and the next one, for rows lane / 4 + 8 half.
#pragma once
#include "element.cuh"

namespace attn::device {

// Each lane has a packed word of two neighbouring tiles of 8 columns. Afterwards lanes 0 and 2 of a
// quad have two words of the first tile, and lanes 1 and 3 two of the second, in the order of their
// columns.
__device__ __forceinline__ uint2 pair_columns(unsigned first, unsigned second) {
  const bool odd = threadIdx.x & 1;
  const unsigned got = __shfl_xor_sync(0xffffffff, odd ? first : second, 1);
  return odd ? make_uint2(got, second) : make_uint2(first, got);
}

template <class Element, int count>
__device__ __forceinline__ void store_row_16bit(unsigned short* row, bool valid,
                                                const float (&o)[count], int half, float factor,
                                                int head_dim_v) {
  const int column = threadIdx.x % 2 * 8 + threadIdx.x % 4 / 2 * 4;
  const int columns = valid ? head_dim_v - column : 0;
  row += column;
  asm volatile(""
               : "+l"(row));  // else the compiler adds up per store, and keeps the terms through
                              // the kernel's loops
#pragma unroll
  for (int n = 0; n < count / 4; n += 2) {
    unsigned w[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int at = 4 * (n + j) + 2 * half;
      w[j] = Element::pack(o[at] * factor, o[at + 1] * factor);
    }
    const uint2 pair = pair_columns(w[0], w[1]);
    if (8 * n < columns) *reinterpret_cast<uint2*>(row + 8 * n) = pair;
  }
}
template <int count>
__device__ __forceinline__ void store_row_f32(float* row, bool valid, const float (&o)[count],
                                              int half, float factor, int head_dim_v) {
  const int columns = valid ? head_dim_v : 0;
  row += threadIdx.x % 4 * 2;
  asm volatile("" : "+l"(row));
#pragma unroll
  for (int n = 0; n < count / 4; ++n) {
    const int at = 4 * n + 2 * half;
    if (8 * n < columns)
      *reinterpret_cast<float2*>(row + 8 * n) = make_float2(o[at] * factor, o[at + 1] * factor);
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
__device__ __forceinline__ void store_row(void* out, int out_type, long long at, bool valid,
                                          const float (&o)[count], int half, float factor,
                                          int head_dim_v) {
  if (out_type == attn_element_f32)
    store_row_f32(static_cast<float*>(out) + at, valid, o, half, factor, head_dim_v);
  else if (out_type == attn_element_f16)
    store_row_16bit<F16>(static_cast<unsigned short*>(out) + at, valid, o, half, factor,
                         head_dim_v);
  else
    store_row_16bit<BF16>(static_cast<unsigned short*>(out) + at, valid, o, half, factor,
                          head_dim_v);
}

}  // namespace attn::device
