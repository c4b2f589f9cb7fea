// A load that sees what other devices, copy engines and the host have written before they raised
// the value that it finds.
#ifndef ATTN_KERNELS_PTX_ACQUIRE_SYSTEM_H
#define ATTN_KERNELS_PTX_ACQUIRE_SYSTEM_H

namespace attn::ptx {

__device__ __forceinline__ unsigned load_acquire_system(const unsigned* from) {
  unsigned value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

}  // namespace attn::ptx
#endif
