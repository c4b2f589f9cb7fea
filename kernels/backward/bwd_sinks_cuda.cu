//# architectures sm_80 sm_90 compute_80
// d_sinks of a head from its parts, added in an order that depends on their number alone.
#include "prepare_args.h"

extern "C" __global__ void __launch_bounds__(attn_backward_threads)
    bwd_sinks_cuda(const __grid_constant__ attn_backward_sinks_kernarg a) {
  const float* parts = a.parts + blockIdx.x * a.num_parts;
  double sum = 0;
  for (long long i = threadIdx.x; i < a.num_parts; i += attn_backward_threads) sum += parts[i];
  __shared__ double sums[attn_backward_threads];
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  sum = a.add ? a.d_sinks[blockIdx.x] : 0;
  for (const double x : sums) sum += x;
  a.d_sinks[blockIdx.x] = float(sum);
}
