// Floats of up to 16 bits and the rounding to them, stated once for every backend. No host headers:
// kernels/ includes this file too.
#pragma once
#include "host_device.h"

namespace attn {

struct SmallFloat {
  int exponent_bits, mantissa_bits, bias;
  unsigned max_code;  // largest finite magnitude
  unsigned inf_code;  // 0 = no infinity
  unsigned nan_code;
  bool signed_zero_and_nan;  // false: FNUZ, where code 0x80 is the only NaN
  ATTN_HOST_DEVICE constexpr unsigned sign_bit() const {
    return 1u << (exponent_bits + mantissa_bits);
  }
};

// The code of x, rounded once, to nearest even. Beyond the range: infinity, NaN in formats without
// one, or with `saturate` the largest finite value. NaN stays NaN.
ATTN_HOST_DEVICE constexpr unsigned encode(const SmallFloat& f, double x, bool saturate) {
  const auto bits = __builtin_bit_cast(unsigned long long, x);
  const unsigned sign = bits >> 63 ? f.sign_bit() : 0;
  const unsigned nan = f.signed_zero_and_nan ? f.nan_code | sign : f.nan_code;
  const int exponent = int(bits >> 52 & 0x7ff) - 1023;
  const unsigned long long fraction = bits & 0xfffffffffffffull;
  if (exponent == 1024 && fraction != 0) return nan;
  // Subnormal doubles are below half of every format's smallest value.
  unsigned magnitude = 0;  // below 2^21 in every format, whatever x is
  if (exponent == 1024) {
    magnitude = f.max_code + 1;
  } else if (exponent > -1023) {
    const int lowest = 1 - f.bias;
    const int shift = 52 - f.mantissa_bits + (exponent < lowest ? lowest - exponent : 0);
    if (shift <= 53) {
      const unsigned long long significand = fraction | 1ull << 52;
      const unsigned long long half = 1ull << (shift - 1);
      const unsigned long long rest = significand & (2 * half - 1);
      magnitude = unsigned(significand >> shift);
      if (rest > half || (rest == half && (magnitude & 1))) ++magnitude;
      // A carry moves to the next exponent by itself.
      if (exponent > lowest) magnitude += unsigned(exponent - lowest) << f.mantissa_bits;
    }
  }
  if (magnitude > f.max_code) {
    if (saturate)
      magnitude = f.max_code;
    else if (f.inf_code != 0)
      magnitude = f.inf_code;
    else
      return nan;
  }
  if (magnitude == 0 && !f.signed_zero_and_nan) return 0;
  return magnitude | sign;
}

}  // namespace attn
