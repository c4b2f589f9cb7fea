// The softmax of a row.
#pragma once
#include "../ptx/ex2.h"
#include "../ptx/lg2.h"
#include "../ptx/rcp.h"
#include "element.cuh"

namespace attn::device {

// Added up over the four lanes that share a row.
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// Weights are 2^(score * log2_scale - reference), by one fma, where the reference is such a
// product, rounded. What rounding takes off it, the same for all of a row, grows with it: from 2^31
// on no weight may be left, or none that is finite. Long before that the products are rounded as
// well.
constexpr float large_score = 1 << 24;
__device__ __forceinline__ float round_large_score(float score, float log2_scale, float reference) {
  return __fmul_rn(score, log2_scale) - reference;
}

// A sink, -inf if there is none, joins here, for as a reference it could leave weights too small
// for 16 bits. The sink is natural, as lse, all else log2; reference: of the row's weights,
// 2^(score - reference), which `sum` is the sum of.

// The factor of the sums of weight * v, 0 if no key is seen. sum: of the weights as
// those sums have them.
__device__ __forceinline__ float row_factor(float reference, float sum, float sink) {
  if (sink == -infinity()) [[likely]]
    return sum == 0 ? 0 : ptx::rcp(sum);
  const float joins = sink * log2_e;
  const float most = fmaxf(reference, joins), scale = ptx::ex2(reference - most);
  const float total = fmaf(sum, scale, ptx::ex2(joins - most));
  return sum == 0 ? 0 : scale * ptx::rcp(total);
}

// Without a key it is the sink, whatever its size.
__device__ __forceinline__ float row_lse(float reference, float sum, float sink) {
  const float joins = sink * log2_e;
  const float most = fmaxf(reference, joins), used = most == -infinity() ? 0 : most;
  const float total = fmaf(sum, ptx::ex2(reference - used), ptx::ex2(joins - used));
  return sum == 0 ? sink : fmaf(used, ln_2, ptx::lg2(total) * ln_2);
}

}  // namespace attn::device
