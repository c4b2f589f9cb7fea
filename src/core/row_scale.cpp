#include "core/row_scale.h"

#include <limits>

namespace attn {

uint16_t row_scale(attn_dtype type, double amax, bool has_nan, bool saturate) {
  constexpr double largest = 65504;
  const double scale = amax / type_info(type).max_finite;
  if (has_nan || (!saturate && scale > largest))
    return f16_code(std::numeric_limits<double>::quiet_NaN());
  return f16_code(std::min(scale, largest));
}

void encode_codes(attn_dtype type, void* base, int64_t index, int64_t n, const double* x,
                  uint16_t scale) {
  const double most = type_info(type).max_finite, divisor = f16_value(scale);
  const auto code = [&](int64_t i) {
    if (!(divisor > 0)) return 0;
    return int(std::clamp(std::nearbyint(x[i] / divisor), -most, most));
  };
  auto* to = static_cast<unsigned char*>(base) + dtype_bytes(type, index);
  if (type == ATTN_I8) {
    for (int64_t i = 0; i < n; ++i) to[i] = uint8_t(code(i));
  } else {
    for (int64_t i = 0; i < n; i += 2)
      to[i / 2] = uint8_t((code(i) & 15) | (code(i + 1) & 15) << 4);
  }
}

}  // namespace attn
