// i8 and i4 by the rules of core/row_scale.h, where numbers are float64: a row's scale and its
// codes.
#pragma once
#include <cuda_fp16.h>

#include "../shared/row_scale.h"

namespace attn::device {

__device__ __forceinline__ double largest_code(int type) {
  return type == attn_element_i8 ? 127 : 7;
}

// amax: NaN where one is among the elements.
__device__ __forceinline__ unsigned short row_scale(int type, float amax, bool saturate) {
  constexpr double largest = 65504;
  const double scale = __ddiv_rn(amax, largest_code(type));
  if (amax != amax || (!saturate && scale > largest)) return 0x7e00;
  return __half_as_ushort(__double2half(scale < largest ? scale : largest));
}
// 0 under a scale of 0 or NaN.
__device__ __forceinline__ int row_code(int type, float x, unsigned short scale) {
  const double divisor = __half2float(__ushort_as_half(scale)), most = largest_code(type);
  if (!(divisor > 0)) return 0;
  return int(fmin(fmax(rint(__ddiv_rn(x, divisor)), -most), most));
}

}  // namespace attn::device
