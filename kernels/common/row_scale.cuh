// i8 and i4 by the rules of core/row_scale.h, where numbers are float64: a row's scale and its
// codes. float32 gives the same.
#pragma once
#include "../shared/row_scale.h"
#include "convert.cuh"

namespace attn::device {

__device__ __forceinline__ float largest_code(int type) {
  return type == attn_element_i8 ? 127 : 7;
}

// amax: NaN where one is among the elements.
__device__ __forceinline__ unsigned short row_scale(int type, float amax, bool saturate) {
  constexpr float largest = 65504;
  if (amax != amax) return 0x7e00;
  const float most = largest_code(type), x = fminf(amax, 1e30f);
  const float quotient = divide(x, most, type == attn_element_i8 ? 1.f / 127 : 1.f / 7);
  // To odd, after which rounding to f16 is as if it were the first.
  const float rest = fmaf(-quotient, most, x);
  const unsigned bits = __float_as_uint(quotient);
  const float scale = __uint_as_float(rest == 0 ? bits : (rest < 0 ? bits - 1 : bits) | 1);
  if (!saturate && scale > largest) return 0x7e00;
  return __half_as_ushort(__float2half_rn(fminf(scale, largest)));
}
// 0 under a scale of 0 or NaN.
__device__ __forceinline__ int row_code(int type, float x, unsigned short scale) {
  const float divisor = __half2float(__ushort_as_half(scale)), most = largest_code(type);
  if (!(divisor > 0)) return 0;
  // A scale has 11 digits: no quotient but half an integer itself is rounded to one.
  x = fminf(fmaxf(x, -most * divisor), most * divisor);
  return __float2int_rn(divide(x, divisor, __frcp_rn(divisor)));
}

// Of n elements. As 8 bits, above which words have others.
template <int n>
__device__ __forceinline__ void row_codes(int type, const float (&x)[n], unsigned short scale,
                                          int (&code)[n]) {
  const float divisor = __half2float(__ushort_as_half(scale)), inverse = __frcp_rn(divisor),
              bias = 3 << 22;  // after which the last digit is 1
  // The scale of rows without subnormal or saturated ones is so near that no quotient is 127.5.
  const bool exact = scale >= 0x400 && scale < 0x7bff;
#pragma unroll
  for (int k = 0; k < n; ++k)
    code[k] = __float_as_int(__fadd_rn(divide(x[k], divisor, inverse), bias));
  if (exact) [[likely]]
    return;
#pragma unroll
  for (int k = 0; k < n; ++k) code[k] = row_code(type, x[k], scale);
}

}  // namespace attn::device
