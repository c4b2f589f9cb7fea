// log2(x) with an absolute error of 2^-22 where the result is near 0, else a relative one; x >= 0.
#ifndef ATTN_KERNELS_PTX_LG2_H
#define ATTN_KERNELS_PTX_LG2_H

namespace attn::ptx {

__device__ __forceinline__ float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace attn::ptx
#endif
