// max and min that keep NaN.
#ifndef ATTN_KERNELS_PTX_MAX_H
#define ATTN_KERNELS_PTX_MAX_H

namespace attn::ptx {

__device__ __forceinline__ float max_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
__device__ __forceinline__ float min_nan(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

}  // namespace attn::ptx
#endif
