// Blocks of a cluster, which can reach each other's shared memory.
#ifndef ATTN_KERNELS_PTX_CLUSTER_H
#define ATTN_KERNELS_PTX_CLUSTER_H

namespace attn::ptx {

// Until all threads of the cluster that have not ended are here.
__device__ __forceinline__ void cluster_meet() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

}  // namespace attn::ptx
#endif
