// Caches' formats by the rules of core/cache_format.cpp, where numbers are float64: scales of a
// token and of 16 elements, and codes of nvfp4. float32 gives the same, if what was divided by a
// descale is rounded to odd.
#pragma once
#include "../ptx/convert_fp8.h"
#include "../ptx/max.h"
#include "../shared/nvfp4.h"
#include "../shared/small_float.h"
#include "convert.cuh"

namespace attn::device {

constexpr float infinity = __builtin_huge_valf();

// |x|, 0 of what is not finite.
__device__ __forceinline__ float finite_magnitude(float x) {
  const float magnitude = fabsf(x);
  return magnitude < infinity ? magnitude : 0;
}
// f8_e4m3fn_token's scale of a head of which these are the most.
__device__ __forceinline__ float token_scale(float most) {
  return most == 0 ? 1 : fmaxf(__fdiv_rn(most, 448), __uint_as_float(1));
}

// The largest of |x| that is finite; NaN if there is one.
template <int n>
__device__ __forceinline__ float largest_finite(const float (&x)[n]) {
  float most = 0;
#pragma unroll
  for (int k = 0; k < n; ++k) most = ptx::max_nan(most, fabsf(x[k]));
  if (most != infinity) [[likely]]
    return most;
  most = 0;
#pragma unroll
  for (int k = 0; k < n; ++k) most = ptx::max_nan(most, finite_magnitude(x[k]));
  return most;
}

// The scale in e4m3 of elements of which largest_finite() is `most`.
__device__ __forceinline__ unsigned nvfp4_scale(float most) {
  if (most != most) return 0x7f;
  const float quotient = divide(most, 6, 1.f / 6), rest = fmaf(-quotient, 6, most);
  // To odd, after which rounding to e4m3 is as if it were the first.
  const unsigned bits = __float_as_uint(quotient);
  const float scale = __uint_as_float(rest == 0 ? bits : (rest < 0 ? bits - 1 : bits) | 1);
#if __CUDA_ARCH__ >= 890
  return ptx::e4m3_of(scale, 0) & 0xff;
#else
  return encode(SmallFloat{4, 3, 7, 0x7e, 0, 0x7f, true}, scale, true);
#endif
}

// x / scale as e2m1, to nearest even, at most 6; 0 under a scale of 0 or NaN.
__device__ __forceinline__ unsigned nvfp4_code(float x, unsigned scale) {
  if (scale == 0 || scale == 0x7f) return 0;
  const float one = __half2float(__ushort_as_half((unsigned short)(scale << 7))) * 256,
              y = fabsf(x);
  // What is halfway between two codes, times the scale, is exact. One bit of the code after the
  // other; an odd code is not taken where it is as near as the even one.
  const bool four = y >= 1.75f * one, two = y >= (four ? 3.5f * one : 0.75f * one);
  const float above = four ? 5 * one : 1.25f * one, below = four ? 2.5f * one : 0.25f * one;
  const unsigned code = four * 4 + two * 2 + (y > (two ? above : below));
  return code | __float_as_uint(x) >> 28 & 8;
}

}  // namespace attn::device
