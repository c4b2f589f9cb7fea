// 1 / x with an error of one unit in the last place; x is not subnormal.
#ifndef ATTN_KERNELS_PTX_RCP_H
#define ATTN_KERNELS_PTX_RCP_H

namespace attn::ptx {

__device__ __forceinline__ float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace attn::ptx
#endif
