// stmatrix: a warp stores 8 x 8 matrices of 16-bit elements, of which lane l has elements 2 (l % 4)
// and behind of row l / 4.
#ifndef ATTN_KERNELS_PTX_STMATRIX_H
#define ATTN_KERNELS_PTX_STMATRIX_H

namespace attn::ptx {

// Two of them, each transposed. Lane l < 16 has the address of row l % 8, as stored, of matrix
// l / 8.
__device__ __forceinline__ void stmatrix_transposed(unsigned to, unsigned first, unsigned second) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to),
               "r"(first), "r"(second)
               : "memory");
}

}  // namespace attn::ptx
#endif
