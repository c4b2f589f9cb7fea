// mbarrier: a phase of a barrier in shared memory ends when `count` arrivals and the announced
// bytes have come.
#ifndef ATTN_KERNELS_PTX_MBARRIER_H
#define ATTN_KERNELS_PTX_MBARRIER_H

namespace attn::ptx {

using Barrier = unsigned long long;  // in shared memory

__device__ __forceinline__ void mbarrier_init(unsigned barrier, unsigned count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Makes initialised barriers known to the copy engine.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// For the lanes whose `arrives` is true; without a branch, after which lanes would diverge.
__device__ __forceinline__ void mbarrier_arrive_if(unsigned barrier, bool arrives) {
  asm volatile(
      "{\n"
      ".reg .pred arrives;\n"
      "setp.ne.s32 arrives, %1, 0;\n"
      "@arrives mbarrier.arrive.shared::cta.b64 _, [%0];\n"
      "}" ::"r"(barrier),
      "r"(int(arrives))
      : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// At the barrier at the same address in another block of the cluster.
__device__ __forceinline__ void mbarrier_arrive_at(unsigned barrier, unsigned block) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(barrier),
      "r"(block)
      : "memory");
}
// Writes a word to the same place of another block of the cluster, whose barrier receives its four
// bytes.
__device__ __forceinline__ void store_async_at(unsigned to, unsigned barrier, unsigned block,
                                               unsigned word) {
  asm volatile(
      "{\n"
      ".reg .b32 there, barrier;\n"
      "mapa.shared::cluster.u32 there, %0, %3;\n"
      "mapa.shared::cluster.u32 barrier, %1, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %2, [barrier];\n"
      "}" ::"r"(to),
      "r"(barrier), "r"(word), "r"(block)
      : "memory");
}
// Arrives and announces bytes that the copy engine will bring in this phase.
__device__ __forceinline__ void mbarrier_arrive_expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_if(unsigned barrier, unsigned bytes,
                                                          bool arrives) {
  asm volatile(
      "{\n"
      ".reg .pred arrives;\n"
      "setp.ne.s32 arrives, %2, 0;\n"
      "@arrives mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n"
      "}" ::"r"(barrier),
      "r"(bytes), "r"(int(arrives))
      : "memory");
}
// Waits for the end of the phase of this parity. A new barrier is in phase 0; the phase before it,
// of parity 1, counts as ended.
__device__ __forceinline__ void mbarrier_wait(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra behind;\n"
      "bra again;\n"
      "behind:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Whether it has ended.
__device__ __forceinline__ bool mbarrier_test(unsigned barrier, unsigned parity) {
  unsigned ended;
  asm volatile(
      "{\n"
      ".reg .pred ended;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
      "selp.u32 %0, 1, 0, ended;\n"
      "}"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ended;
}

}  // namespace attn::ptx
#endif
