//# architectures compute_80 not_in_library
// Reads a buffer and sums it: how fast device memory can be read. Part of `attn bench`, not of the
// library.
#include "../shared/read_args.h"

extern "C" __global__ void __launch_bounds__(attn_read_threads, attn_read_blocks_per_sm)
    read_cuda(const __grid_constant__ attn_read_kernarg a) {
  constexpr long long stride = attn_read_threads * attn_read_unroll;
  const uint4* data = static_cast<const uint4*>(a.data);
  unsigned sum = 0;
  for (long long at = blockIdx.x * stride; at < a.vectors; at += gridDim.x * stride) {
    uint4 v[attn_read_unroll];  // all loads in flight before the first is used
#pragma unroll
    for (int i = 0; i < attn_read_unroll; ++i)
      v[i] = __ldcs(data + at + i * attn_read_threads + threadIdx.x);
#pragma unroll
    for (int i = 0; i < attn_read_unroll; ++i) sum += v[i].x + v[i].y + v[i].z + v[i].w;
  }
  sum = __reduce_add_sync(0xffffffff, sum);
  if (threadIdx.x % 32 == 0) atomicAdd(a.sum, sum);
}
