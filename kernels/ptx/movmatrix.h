// movmatrix: transposes an 8x8 matrix of 16-bit elements in the registers of a warp. Lane l holds
// elements 2(l%4) and 2(l%4)+1 of row l/4.
#ifndef ATTN_KERNELS_PTX_MOVMATRIX_H
#define ATTN_KERNELS_PTX_MOVMATRIX_H

namespace attn::ptx {

__device__ __forceinline__ unsigned transpose_8x8(unsigned x) {
  unsigned d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(x));
  return d;
}

}  // namespace attn::ptx
#endif
