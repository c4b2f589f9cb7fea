//# architectures sm_80 sm_90 compute_80
// The lse of queries that were sequences of their own, in the order of the problem. Rows of packed
// q that belong to no sequence get -inf.
#include "../common/element.cuh"
#include "gather_args.h"

extern "C" __global__ void __launch_bounds__(attn_gather_lse_threads)
    gather_lse_cuda(const __grid_constant__ attn_gather_lse_kernarg a) {
  const long long n = blockIdx.x * (long long)attn_gather_lse_threads + threadIdx.x;
  if (n >= a.rows * a.heads) return;
  const long long row = n % a.rows;
  const int h = int(n / a.rows);
  const long long to = (row / a.seqlen_q * a.heads + h) * a.seqlen_q + row % a.seqlen_q;
  const bool nobody = a.cu_seqlens_q && row >= a.cu_seqlens_q[a.batch];
  a.to[to] = nobody ? -attn::device::infinity()
                    : a.from[(h / a.group * a.rows + row) * a.group + h % a.group];
}
