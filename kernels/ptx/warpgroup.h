// Registers and barriers of warpgroups (four warps each).
#ifndef ATTN_KERNELS_PTX_WARPGROUP_H
#define ATTN_KERNELS_PTX_WARPGROUP_H

namespace attn::ptx {

// setmaxnreg: every warp of the warpgroup gives back or takes registers; `count` is a multiple
// of 8.
template <int count>
__device__ __forceinline__ void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ __forceinline__ void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// Named barriers (0 is __syncthreads). `threads`: those that arrive and those that wait, together.
__device__ __forceinline__ void barrier_wait(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
template <int threads>
__device__ __forceinline__ void barrier_wait(int name) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "n"(threads) : "memory");
}
// Whether p is true in any of the threads that wait.
template <int threads>
__device__ __forceinline__ bool barrier_or(int name, bool p) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred mine, any;\n"
      "setp.ne.s32 mine, %1, 0;\n"
      "barrier.cta.red.or.pred any, %2, %3, mine;\n"
      "selp.s32 %0, 1, 0, any;\n"
      "}"
      : "=r"(any)
      : "r"(int(p)), "r"(name), "n"(threads)
      : "memory");
  return any;
}
__device__ __forceinline__ void barrier_arrive(int name, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

}  // namespace attn::ptx
#endif
