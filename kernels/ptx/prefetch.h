// prefetch: a line of global memory to L2.
#ifndef ATTN_KERNELS_PTX_PREFETCH_H
#define ATTN_KERNELS_PTX_PREFETCH_H

namespace attn::ptx {

__device__ __forceinline__ void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global) : "memory");
}

}  // namespace attn::ptx
#endif
