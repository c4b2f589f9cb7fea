// Pairs of fp8 as pairs of f16, the first in the low half: exact. And of floats: to nearest even,
// at most the largest value, NaN loses its sign. sm_89 and newer.
#ifndef ATTN_KERNELS_PTX_CONVERT_FP8_H
#define ATTN_KERNELS_PTX_CONVERT_FP8_H

namespace attn::ptx {

__device__ __forceinline__ unsigned f16_of_e4m3(unsigned short pair) {
  unsigned d;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(pair));
  return d;
}
__device__ __forceinline__ unsigned f16_of_e5m2(unsigned short pair) {
  unsigned d;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(d) : "h"(pair));
  return d;
}
// Both pairs of a word, whose halves need no shift then.
__device__ __forceinline__ void f16_of_e4m3_word(unsigned word, unsigned* low, unsigned* high) {
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
      : "=r"(*low), "=r"(*high)
      : "r"(word));
}
__device__ __forceinline__ void f16_of_e5m2_word(unsigned word, unsigned* low, unsigned* high) {
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e5m2x2 %0, l; cvt.rn.f16x2.e5m2x2 %1, h;}"
      : "=r"(*low), "=r"(*high)
      : "r"(word));
}
__device__ __forceinline__ unsigned short e4m3_of(float low, float high) {
  unsigned short d;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
  return d;
}
__device__ __forceinline__ unsigned short e4m3_of_f16(unsigned pair) {
  unsigned short d;
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(d) : "r"(pair));
  return d;
}
__device__ __forceinline__ unsigned short e5m2_of(float low, float high) {
  unsigned short d;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
  return d;
}

}  // namespace attn::ptx
#endif
