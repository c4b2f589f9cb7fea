// Values that are the same in all lanes of a warp.
#ifndef ATTN_KERNELS_PTX_UNIFORM_H
#define ATTN_KERNELS_PTX_UNIFORM_H

namespace attn::ptx {

// The bits that x has in any lane. The result is in a uniform register, from which descriptors
// are used as they are; the compiler cannot know of most values that all lanes have the same.
__device__ __forceinline__ unsigned uniform(unsigned x) {
  unsigned y;
  asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}

}  // namespace attn::ptx
#endif
