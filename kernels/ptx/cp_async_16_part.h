// cp.async of 16 bytes, at a multiple of 16 and past L1, that are not read whole: the first `bytes`
// are, and the others become zero.
#ifndef ATTN_KERNELS_PTX_CP_ASYNC_16_PART_H
#define ATTN_KERNELS_PTX_CP_ASYNC_16_PART_H

namespace attn::ptx {

__device__ __forceinline__ void cp_async_16_part(unsigned shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}

}  // namespace attn::ptx
#endif
