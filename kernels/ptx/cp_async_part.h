// cp.async of words that are not read whole, and of 16 bytes past L1.
#ifndef ATTN_KERNELS_PTX_CP_ASYNC_PART_H
#define ATTN_KERNELS_PTX_CP_ASYNC_PART_H

namespace attn::ptx {

// 4 bytes at a multiple of 4, of which `bytes` are read and the others become zero; nothing is
// copied unless `take`.
__device__ __forceinline__ void cp_async_part_if(unsigned shared, const void* global, int bytes,
                                                 bool take) {
  asm volatile(
      "{\n"
      ".reg .pred take;\n"
      "setp.ne.s32 take, %3, 0;\n"
      "@take cp.async.ca.shared.global [%0], [%1], 4, %2;\n"
      "}" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(int(take))
      : "memory");
}

// 16 bytes at a multiple of 16, nothing unless `take`.
__device__ __forceinline__ void cp_async_16_if(unsigned shared, const void* global, bool take) {
  asm volatile(
      "{\n"
      ".reg .pred take;\n"
      "setp.ne.s32 take, %2, 0;\n"
      "@take cp.async.cg.shared.global [%0], [%1], 16;\n"
      "}" ::"r"(shared),
      "l"(global), "r"(int(take))
      : "memory");
}

}  // namespace attn::ptx
#endif
