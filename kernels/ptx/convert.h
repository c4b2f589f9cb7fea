// Pairs of 16-bit floats in one register, the first in the low half.
#ifndef ATTN_KERNELS_PTX_CONVERT_H
#define ATTN_KERNELS_PTX_CONVERT_H

namespace attn::ptx {

__device__ __forceinline__ unsigned pack_f16(float low, float high) {
  unsigned d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
  unsigned d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

__device__ __forceinline__ float unpack_f16(unsigned short x) {
  float d;
  asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"(x));
  return d;
}

__device__ __forceinline__ float unpack_bf16(unsigned short x) {
  return __uint_as_float(unsigned(x) << 16);
}

}  // namespace attn::ptx
#endif
