// i8 and i4: codes of a row, the elements of one head of a token, whose scale, an f16, is in an
// array next to them. An element is code x scale.
#pragma once
#include <algorithm>
#include <cmath>

#include "core/dtype.h"

namespace attn {

// The largest |x|, and whether there is a NaN.
struct RowMax {
  double amax = 0;
  bool has_nan = false;

  template <class T>
  void take(const T* x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      amax = std::max(amax, std::abs(double(x[i])));
      has_nan |= std::isnan(x[i]);
    }
  }
};

// amax / the largest code, as f16. NaN where a NaN is among the elements, or where that is beyond
// f16 without `saturate`; with it 65504 at most.
uint16_t row_scale(attn_dtype type, double amax, bool has_nan, bool saturate);

// Codes [index, index + n) from `base`: x / scale, to nearest even, and no larger than the
// largest code; 0 under a scale of 0 or NaN. i4: index and n are even.
void encode_codes(attn_dtype type, void* base, int64_t index, int64_t n, const double* x,
                  uint16_t scale);

}  // namespace attn
