// Elements of ggml's blocks, and blocks of 32 values.
#pragma once
#include <cstdint>
#include <cstring>

#include "core/dtype.h"

namespace attn {

// Element `index` from `base`. Exact.
template <attn_dtype type>
double block_value(const void* base, int64_t index) {
  constexpr BlockLayout layout = block_layout(type);
  const auto* at =
      static_cast<const unsigned char*>(base) + index / 32 * type_info(type).block_bytes;
  const int i = int(index % 32);
  const auto half = [&] {
    uint16_t code;
    std::memcpy(&code, at, sizeof code);
    at += sizeof code;
    return double(f16_value(code));
  };
  const double d = half(), m = layout.has_min ? half() : 0;
  int code = 0;
  if constexpr (layout.has_bit) {
    code = (at[i / 8] >> i % 8 & 1) << 4;
    at += 4;
  }
  if constexpr (layout.code_bytes == 32) return d * int8_t(at[i]);
  code |= i < 16 ? at[i] & 15 : at[i - 16] >> 4;
  if constexpr (type == ATTN_IQ4_NL) return d * iq4_nl_values[code];
  if constexpr (layout.has_min) return d * code + m;
  return d * (code - layout.offset);
}

// One block of 32 values by ggml's rules, x / d being x times the reciprocal of d, and `largest`
// the value of largest magnitude:
//   q8_0          d = |largest| / 127; q = round(x / d), half away from zero
//   q4_0, q5_0    d = largest / -n, n = 8 or 16; q = min(2 n - 1, trunc(x / d + n + 0.5))
//   q4_1, q5_1    m = min, d = (max - m) / n, n = 15 or 31; q = min(n, trunc((x - m) / d + 0.5))
//   iq4_nl        q = the value next to x / (largest / -127), the larger one of two as near; then
//                 d = sum(x^2 x value) / sum(x^2 value^2), which ggml adds up in float32, this in
//                 float64
// Quotients use d and m before they are stored as f16. A NaN, or without `saturate` a d or m beyond
// f16, makes the block's d and so all its values NaN; with it d and m are within 65504 and q is
// clamped.
void encode_block(attn_dtype type, const float* x, void* block, bool saturate);

}  // namespace attn
