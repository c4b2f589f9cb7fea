// Copies and sums of contiguous bytes by the copy engine. Addresses and sizes are multiples of 16.
#ifndef ATTN_KERNELS_PTX_BULK_H
#define ATTN_KERNELS_PTX_BULK_H

namespace attn::ptx {

// To shared memory; the barrier receives the bytes.
__device__ __forceinline__ void bulk_load(unsigned shared, const void* from, unsigned bytes,
                                          unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
// From shared memory to that of another block of the cluster. `to` and `barrier` are the places
// that this block has at the same addresses.
__device__ __forceinline__ void bulk_send(unsigned to, unsigned shared, unsigned bytes,
                                          unsigned barrier, unsigned block) {
  asm volatile(
      "{\n"
      ".reg .b32 there, barrier;\n"
      "mapa.shared::cluster.u32 there, %0, %4;\n"
      "mapa.shared::cluster.u32 barrier, %3, %4;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [%1], %2, "
      "[barrier];\n"
      "}" ::"r"(to),
      "r"(shared), "r"(bytes), "r"(barrier), "r"(block)
      : "memory");
}
// From shared memory, as part of the thread's next group.
__device__ __forceinline__ void bulk_store(void* to, unsigned shared, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared),
               "r"(bytes)
               : "memory");
}
// Adds floats to what is there. Each sum is rounded, and subnormal ones become 0.
__device__ __forceinline__ void bulk_add(float* to, unsigned shared, unsigned bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
      "r"(shared), "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until the thread's groups have read shared memory, which can be written again then.
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// Until they have written, and this thread sees it.
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
// Orders accesses to any memory before and after it, by this thread and by the copy engine for it.
__device__ __forceinline__ void fence_async() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

}  // namespace attn::ptx
#endif
