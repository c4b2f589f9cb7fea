// cp.async.bulk.tensor: TMA copies a box of a tensor to shared memory. What is
// outside the tensor arrives as zeros; the barrier receives the bytes of the whole box either way.
#ifndef ATTN_KERNELS_PTX_TMA_H
#define ATTN_KERNELS_PTX_TMA_H

namespace attn::ptx {

// `map`: a CUtensorMap in parameter space. Coordinates from the innermost dimension.
__device__ __forceinline__ void tma_load(unsigned shared, const void* map, unsigned barrier, int x,
                                         int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
// The same of what L2 shall evict first.
__device__ __forceinline__ void tma_load_once(unsigned shared, const void* map, unsigned barrier,
                                              int x, int y, int z, int w) {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "l"(policy)
      : "memory");
}
// By those lanes for which `loads` is true; no branch, after which lanes would go on apart.
__device__ __forceinline__ void tma_load_if(unsigned shared, const void* map, unsigned barrier,
                                            int x, int y, int z, int w, bool loads) {
  asm volatile(
      "{\n"
      ".reg .pred loads;\n"
      "setp.ne.s32 loads, %7, 0;\n"
      "@loads cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];\n"
      "}" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "r"(int(loads))
      : "memory");
}
// What describes the tensor, ahead of its first use.
__device__ __forceinline__ void tma_prefetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// The same box to L2 only.
__device__ __forceinline__ void tma_prefetch(const void* map, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map),
               "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}
// The same to the same place of each block of the cluster that has a bit in `blocks`; the barrier
// in each of them receives the bytes.
__device__ __forceinline__ void tma_load_to_all(unsigned shared, const void* map, unsigned barrier,
                                                int x, int y, int z, int w, unsigned short blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "h"(blocks)
      : "memory");
}
// Orders this thread's accesses to shared memory before later ones by wgmma and the copy engine.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace attn::ptx
#endif
