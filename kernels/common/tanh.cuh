// Hyperbolic tangent for scores that are capped.
#pragma once
#include "../ptx/ex2.h"
#include "element.cuh"

namespace attn::device {

// tanh within a few ulp: ex2 loses too much for small x.
__device__ __forceinline__ float tanh_accurate(float x) {
  const float x2 = x * x, size = fabsf(x);
  const float small =
      x +
      x * x2 * (-0.333333333f + x2 * (0.133333333f + x2 * (-0.0539682540f + x2 * 0.0218694885f)));
  const float e = ptx::ex2(-2 * log2_e * size);
  return size < 0.35f ? small : copysignf(__fdividef(1 - e, 1 + e), x);
}

}  // namespace attn::device
