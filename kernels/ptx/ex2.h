// ex2.approx.ftz: 2^x within 2 ulp; results below 2^-126 are 0; ex2(-inf) = 0.
#ifndef ATTN_KERNELS_PTX_EX2_H
#define ATTN_KERNELS_PTX_EX2_H

namespace attn::ptx {

__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace attn::ptx
#endif
