// The end of a row's softmax.
#pragma once
#include "../ptx/ex2.h"
#include "../ptx/lg2.h"
#include "../ptx/rcp.h"
#include "element.cuh"

namespace attn::device {

// sum: of the row's weights, 2^(score - reference); the sums of weight * v have such as add up to
// sum + rounding. sink: its score, -inf if there is none. It joins here, for as a reference it could
// leave weights too small for 16 bits. All scores are log2. Returns lse; factor: what the sums of
// weight * v must be multiplied with, 0 if no key is seen.
__device__ __forceinline__ float end_softmax(float reference, float sum, float rounding, float sink,
                                             float& factor) {
  const float most = fmaxf(reference, sink), used = most == -infinity() ? 0 : most;
  const float scale = ptx::ex2(reference - used);
  const float of_sink = ptx::ex2(sink - used), total = fmaf(sum, scale, of_sink);
  factor = total == 0 ? 0 : scale * ptx::rcp(fmaf(sum + rounding, scale, of_sink));
  return total == 0 ? -infinity() : fmaf(used, ln_2, ptx::lg2(total) * ln_2);
}

}  // namespace attn::device
