// Counting the blocks that have come to a point: what they wrote before can then be read.
#ifndef ATTN_KERNELS_PTX_ARRIVE_H
#define ATTN_KERNELS_PTX_ARRIVE_H

namespace attn::ptx {

// Adds one and returns what was there. A release of what this thread has seen, and an acquire.
__device__ __forceinline__ unsigned count_arrival(unsigned* counter) {
  unsigned before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}

// Adds one. A release of what this thread has seen.
__device__ __forceinline__ void add_release(unsigned* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

}  // namespace attn::ptx
#endif
