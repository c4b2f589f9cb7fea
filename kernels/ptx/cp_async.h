// cp.async: from global to shared memory, asynchronously; 16 bytes past L1, fewer through it.
#ifndef ATTN_KERNELS_PTX_CP_ASYNC_H
#define ATTN_KERNELS_PTX_CP_ASYNC_H

namespace attn::ptx {

// Without `valid` the 16 bytes become zero and global memory is not read.
__device__ __forceinline__ void cp_async_16(unsigned shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :
               : "r"(shared), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

// Copies `bytes` (4 or 8), aligned to that; nothing unless `take`.
template <int bytes>
__device__ __forceinline__ void cp_async_if(unsigned shared, const void* global, bool take) {
  asm volatile(
      "{\n"
      ".reg .pred take;\n"
      "setp.ne.s32 take, %3, 0;\n"
      "@take cp.async.ca.shared.global [%0], [%1], %2;\n"
      "}" ::"r"(shared),
      "l"(global), "n"(bytes), "r"(int(take))
      : "memory");
}

// Arrives at an mbarrier once all copies of this thread so far have come. The barrier counts it.
__device__ __forceinline__ void cp_async_arrive(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Makes a group of the copies of this thread since the last one.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `pending` of this thread's groups are under way.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}
// Waits for all copies of this thread, in groups or not.
__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace attn::ptx
#endif
