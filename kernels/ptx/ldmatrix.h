// ldmatrix: four 8x8 matrices of 16-bit elements from shared memory into fragments. Lane 8m + r
// gives the address of row r of matrix m; lane l receives of each matrix elements 2(l%4) and
// 2(l%4)+1 of row l/4, or, transposed, of column l/4.
#ifndef ATTN_KERNELS_PTX_LDMATRIX_H
#define ATTN_KERNELS_PTX_LDMATRIX_H

namespace attn::ptx {

__device__ __forceinline__ void ldmatrix(unsigned (&d)[4], unsigned shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_transposed(unsigned (&d)[4], unsigned shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared)
               : "memory");
}

// stmatrix: the other way, from fragments as ldmatrix leaves them. sm_90.
__device__ __forceinline__ void stmatrix(unsigned shared, const unsigned (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

}  // namespace attn::ptx
#endif
