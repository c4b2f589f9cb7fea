//# architectures sm_80 sm_90 compute_80
// Merges a partial attention result into (out, lse): ATTN_ACCUMULATE. One warp per row; rows in the
// order of lse, [batch, heads, seqlen_q]; the lanes of the warp walk along head_dim.
#include "../ptx/grid.h"
#include "shards_args.h"

namespace {

__device__ float add(float old, float keep, float part, float weight) {
  return keep * old + weight * part;
}
__device__ float4 add(float4 old, float keep, float4 part, float weight) {
  return {add(old.x, keep, part.x, weight), add(old.y, keep, part.y, weight),
          add(old.z, keep, part.z, weight), add(old.w, keep, part.w, weight)};
}

// keep and weight add up to 1. What is not kept is not read: it may be anything.
template <class Vector>
__device__ void accumulate_row(const float* part, float* out, int head_dim, float keep,
                               float weight) {
  const Vector* const from = reinterpret_cast<const Vector*>(part);
  Vector* const to = reinterpret_cast<Vector*>(out);
  const int vectors = head_dim / int(sizeof(Vector) / sizeof(float));
  for (int d = threadIdx.x % 32; d < vectors; d += 32)
    to[d] = keep == 0 ? from[d] : add(to[d], keep, from[d], weight);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * attn_accumulate_warps)
    accumulate_cuda(const __grid_constant__ attn_accumulate_kernarg a) {
  const long long row = blockIdx.x * (long long)attn_accumulate_warps + threadIdx.x / 32;
  if (row >= a.rows) return;
  const long long i = row % a.seqlen_q, h = row / a.seqlen_q % a.heads,
                  b = row / a.seqlen_q / a.heads;
#if __CUDA_ARCH__ >= 900
  attn::ptx::grid_let_next_start();
  attn::ptx::grid_wait();
#endif
  const float nothing = __int_as_float(0xff800000);  // -inf
  const float old = a.lse[row], lse = a.part_lse[row];
  if (lse == nothing) return;  // the row keeps its bits
  float keep = 0, weight = 1, both = lse;
  if (old != nothing) {
    const float highest = fmaxf(old, lse);
    keep = expf(old - highest);
    weight = expf(lse - highest);
    const float sum = keep + weight;
    both = highest + logf(sum);
    keep /= sum;
    weight /= sum;
  }
  const float* const part = a.part + ((b * a.seqlen_q + i) * a.heads + h) * a.head_dim;
  float* const out = a.out + b * a.out_stride[0] + i * a.out_stride[1] + h * a.out_stride[2];
  if (a.fours)
    accumulate_row<float4>(part, out, a.head_dim, keep, weight);
  else
    accumulate_row<float>(part, out, a.head_dim, keep, weight);
  __syncwarp();  // all lanes have read the row's lse
  if (threadIdx.x % 32 == 0) a.lse[row] = both;
}
