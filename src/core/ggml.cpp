#include "core/ggml.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace attn {
namespace {

constexpr float largest_f16 = 65504;

// What becomes of 32 values.
struct Coded {
  float d = 0, m = 0;
  int code[32];  // of q8_0 with a sign, else from 0 on
};

float clamp_to_f16(float x) {
  return std::clamp(x, -largest_f16, largest_f16);
}

// Of d as it is stored but for the rounding; 0 where it is not finite, so that codes are those of
// 0.
float reciprocal(float d) {
  const float inverse = 1 / clamp_to_f16(d);
  return std::isfinite(inverse) ? inverse : 0;
}

float largest_of(const float* x) {
  float largest = 0;
  for (int i = 0; i < 32; ++i) {
    if (std::abs(x[i]) > std::abs(largest)) largest = x[i];
  }
  return largest;
}

// to_code: of a quotient, before it is clamped and cut off.
template <class ToCode>
void code_values(const float* x, float inverse, int low, int high, Coded* to, ToCode&& to_code) {
  const float m = clamp_to_f16(to->m);
  for (int i = 0; i < 32; ++i) {
    const float q = inverse == 0 ? 0 : (x[i] - m) * inverse;
    to->code[i] = int(std::clamp(to_code(q), float(low), float(high)));
  }
}

void code_iq4_nl(const float* x, Coded* to) {
  const float largest = largest_of(x), inverse = reciprocal(largest / -127);
  double xv = 0, vv = 0;
  for (int i = 0; i < 32; ++i) {
    const float q = x[i] * inverse;
    int n = 0;
    while (n < 15 && q - float(iq4_nl_values[n]) >= float(iq4_nl_values[n + 1]) - q) ++n;
    to->code[i] = n;
    const double value = iq4_nl_values[n], square = double(x[i]) * x[i];
    xv += square * x[i] * value;
    vv += square * value * value;
  }
  to->d = std::isfinite(xv) ? (vv > 0 ? float(xv / vv) : 0) : largest / -127;
}

// No NaN among x. d and m may be beyond f16.
Coded code_block(attn_dtype type, const float* x) {
  Coded to;
  switch (type) {
    case ATTN_Q8_0:
      to.d = std::abs(largest_of(x)) / 127;
      code_values(x, reciprocal(to.d), -127, 127, &to, [](float q) { return std::round(q); });
      break;
    case ATTN_Q4_1:
    case ATTN_Q5_1: {
      const int most = type == ATTN_Q4_1 ? 15 : 31;
      const auto [min, max] = std::minmax_element(x, x + 32);
      to.m = *min;
      to.d = (*max - *min) / float(most);
      code_values(x, reciprocal(to.d), 0, most, &to, [](float q) { return q + 0.5f; });
      break;
    }
    case ATTN_IQ4_NL:
      code_iq4_nl(x, &to);
      break;
    default: {
      const int offset = block_layout(type).offset;
      const float middle = float(offset) + 0.5f;
      to.d = largest_of(x) / float(-offset);
      code_values(x, reciprocal(to.d), 0, 2 * offset - 1, &to, [&](float q) { return q + middle; });
    }
  }
  return to;
}

void store_f16(float x, unsigned char** to) {
  const uint16_t code = f16_code(x);
  std::memcpy(*to, &code, sizeof code);
  *to += sizeof code;
}

}  // namespace

void encode_block(attn_dtype type, const float* x, void* block, bool saturate) {
  const BlockLayout layout = block_layout(type);
  constexpr float zeros[32] = {};
  const bool nan = std::any_of(x, x + 32, [](float value) { return std::isnan(value); });
  Coded coded = code_block(type, nan ? zeros : x);
  if (nan || (!saturate && std::max(std::abs(coded.d), std::abs(coded.m)) > largest_f16)) {
    coded = code_block(type, zeros);
    coded.d = std::numeric_limits<float>::quiet_NaN();
  }
  auto* to = static_cast<unsigned char*>(block);
  store_f16(clamp_to_f16(coded.d), &to);
  if (layout.has_min) store_f16(clamp_to_f16(coded.m), &to);
  if (layout.has_bit) {
    for (int byte = 0; byte < 4; ++byte) {
      int bits = 0;
      for (int i = 0; i < 8; ++i) bits |= (coded.code[8 * byte + i] >> 4) << i;
      *to++ = uint8_t(bits);
    }
  }
  if (layout.code_bytes == 32) {
    for (int i = 0; i < 32; ++i) to[i] = uint8_t(coded.code[i]);
  } else {
    for (int i = 0; i < 16; ++i)
      to[i] = uint8_t((coded.code[i] & 15) | (coded.code[i + 16] & 15) << 4);
  }
}

}  // namespace attn
