// An empty instruction that the compiler cannot see through.
#ifndef ATTN_KERNELS_PTX_RECOMPUTE_H
#define ATTN_KERNELS_PTX_RECOMPUTE_H

namespace attn::ptx {

// The compiler computes what follows from x where it is used instead of keeping it in registers.
__device__ __forceinline__ unsigned recompute(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace attn::ptx
#endif
