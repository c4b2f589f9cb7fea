// Arithmetic on pairs of f16, rounded to nearest even.
#ifndef ATTN_KERNELS_PTX_F16X2_H
#define ATTN_KERNELS_PTX_F16X2_H

namespace attn::ptx {

__device__ __forceinline__ unsigned add_f16x2(unsigned a, unsigned b) {
  unsigned d;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ unsigned mul_f16x2(unsigned a, unsigned b) {
  unsigned d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
// a * b + c
__device__ __forceinline__ unsigned fma_f16x2(unsigned a, unsigned b, unsigned c) {
  unsigned d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
// The larger of |a| and |b|; of a number and NaN the number.
__device__ __forceinline__ unsigned max_abs_f16x2(unsigned a, unsigned b) {
  unsigned d;
  asm("{\n"
      ".reg .b32 x, y;\n"
      "abs.f16x2 x, %1;\n"
      "abs.f16x2 y, %2;\n"
      "max.f16x2 %0, x, y;\n"
      "}"
      : "=r"(d)
      : "r"(a), "r"(b));
  return d;
}

}  // namespace attn::ptx
#endif
