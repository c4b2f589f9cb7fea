// A load that sees what other blocks have written before they raised the value that it finds.
#ifndef ATTN_KERNELS_PTX_ACQUIRE_H
#define ATTN_KERNELS_PTX_ACQUIRE_H

namespace attn::ptx {

__device__ __forceinline__ unsigned load_acquire(const unsigned* from) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

}  // namespace attn::ptx
#endif
