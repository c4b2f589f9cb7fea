//# architectures sm_80 sm_90 compute_80
// Merges partial attention results by their log-sum-exp. One warp per row; rows in the order of
// lse, [batch, heads, seqlen_q]; the lanes of the warp walk along head_dim.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../ptx/grid.h"
#include "../shared/merge_args.h"
#include "../shared/types.h"

namespace {

using namespace attn;

__device__ float load(const float* p) {
  return *p;
}
__device__ float load(const __half* p) {
  return __half2float(*p);
}
__device__ float load(const __nv_bfloat16* p) {
  return __bfloat162float(*p);
}
__device__ void store(float* p, float x) {
  *p = x;
}
__device__ void store(__half* p, float x) {
  *p = __float2half_rn(x);
}
__device__ void store(__nv_bfloat16* p, float x) {
  *p = __float2bfloat16_rn(x);
}

// Lane s has the weight of part s. Parts outside `present` contribute nothing and are not read. A
// lane has several columns and parts at once, since it waits for what it loads, which may be in
// another GPU's memory.
template <class Part, class Out>
__device__ void merge_row(const attn_merge_kernarg& a, long long part_row, long long out_row,
                          unsigned present, float weight, float inverse_sum) {
  constexpr int columns = 4, together = 4;  // a divisor of attn_merge_max_parts
  Out* out = static_cast<Out*>(a.out) + out_row;
  const unsigned head_dim = a.head_dim;
  for (unsigned base = threadIdx.x % 32; base - threadIdx.x % 32 < head_dim; base += 32 * columns) {
    float sum[columns] = {};
    for (int s = 0; s < a.num_parts; s += together) {
      float x[together][columns];
#pragma unroll
      for (int j = 0; j < together; ++j)
#pragma unroll
        for (int i = 0; i < columns; ++i)
          if ((present >> (s + j) & 1) && base + 32 * i < head_dim)
            x[j][i] = load(static_cast<const Part*>(a.outs[s + j]) + part_row + base + 32 * i);
#pragma unroll
      for (int j = 0; j < together; ++j) {
        const float w = __shfl_sync(0xffffffff, weight, s + j);
#pragma unroll
        for (int i = 0; i < columns; ++i)
          if ((present >> (s + j) & 1) && base + 32 * i < head_dim) sum[i] += w * x[j][i];
      }
    }
#pragma unroll
    for (int i = 0; i < columns; ++i)
      if (base + 32 * i < head_dim) store(out + base + 32 * i, sum[i] * inverse_sum);
  }
}

template <class Part>
__device__ void merge_row(const attn_merge_kernarg& a, long long part_row, long long out_row,
                          unsigned present, float weight, float inverse_sum) {
  if (a.out_type == attn_element_f32)
    merge_row<Part, float>(a, part_row, out_row, present, weight, inverse_sum);
  else if (a.out_type == attn_element_f16)
    merge_row<Part, __half>(a, part_row, out_row, present, weight, inverse_sum);
  else
    merge_row<Part, __nv_bfloat16>(a, part_row, out_row, present, weight, inverse_sum);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * attn_merge_warps)
    merge_cuda(const __grid_constant__ attn_merge_cuda_kernarg a) {
  const long long row = blockIdx.x * (long long)attn_merge_warps + threadIdx.x / 32;
  if (row >= a.rows) return;
  const int lane = threadIdx.x % 32;
  const long long i = row % a.seqlen_q, h = row / a.seqlen_q % a.heads,
                  b = row / a.seqlen_q / a.heads;

  const float nothing = __int_as_float(0xff800000);  // -inf
  const long long by_head = (h * (a.rows / a.heads / a.seqlen_q) + b) * a.seqlen_q + i;
#if __CUDA_ARCH__ >= 900
  ptx::grid_let_next_start();
  ptx::grid_wait();
#endif
  const float lse = lane < a.num_parts ? a.lses[lane][lane < a.by_head ? by_head : row] : nothing;
  float highest = lse;
  for (int step = 16; step > 0; step /= 2)
    highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, step));
  const unsigned present = __ballot_sync(0xffffffff, lse != nothing);
  const float weight = lse != nothing ? expf(lse - highest) : 0.0f;
  float sum = weight;
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);

  if (a.lse && lane == 0) a.lse[row] = present == 0 ? nothing : highest + logf(sum);
  const float inverse_sum = present == 0 ? 0.0f : 1 / sum;
  const long long part_row = b * a.part_stride[0] + i * a.part_stride[1] + h * a.part_stride[2];
  const long long out_row = b * a.out_stride[0] + i * a.out_stride[1] + h * a.out_stride[2];
  if (a.part_type == attn_element_f32)
    merge_row<float>(a, part_row, out_row, present, weight, inverse_sum);
  else if (a.part_type == attn_element_f16)
    merge_row<__half>(a, part_row, out_row, present, weight, inverse_sum);
  else
    merge_row<__nv_bfloat16>(a, part_row, out_row, present, weight, inverse_sum);
}
