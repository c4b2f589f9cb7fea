#include "core/dtype.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

namespace attn {
namespace {

constexpr TypeInfo types[] = {
    {"none", 1, 0, 0},          {"f32", 1, 4, FLT_MAX},
    {"f16", 1, 2, 65504},       {"bf16", 1, 2, value_of(bf16_format, bf16_format.max_code)},
    {"f8_e4m3fn", 1, 1, 448},   {"f8_e5m2", 1, 1, 57344},
    {"f8_e4m3fnuz", 1, 1, 240}, {"q8_0", 32, 34, 0},
    {"q4_0", 32, 18, 0},        {"f64", 1, 8, DBL_MAX},
};

template <class T>
T load(const void* base, int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(base) + index * int64_t(sizeof(T)), sizeof(T));
  return value;
}
template <class T>
void store(void* base, int64_t index, T value) {
  std::memcpy(static_cast<char*>(base) + index * int64_t(sizeof(T)), &value, sizeof(T));
}

float q8_0_value(const void* base, int64_t index) {
  const char* block = static_cast<const char*>(base) + index / 32 * 34;
  return f16_value(load<uint16_t>(block, 0)) * float(load<int8_t>(block + 2, index % 32));
}
// Byte i of the 16 holds element i in its low and element i + 16 in its high nibble.
float q4_0_value(const void* base, int64_t index) {
  const char* block = static_cast<const char*>(base) + index / 32 * 18;
  const int byte = load<uint8_t>(block + 2, index % 16);
  const int q = (index % 32 < 16 ? byte & 15 : byte >> 4) - 8;
  return f16_value(load<uint16_t>(block, 0)) * float(q);
}

template <class Real>
void decode_row_as(attn_dtype type, const void* base, int64_t index, int64_t n, Real* out) {
  const auto each = [&](auto value) {
    for (int64_t i = 0; i < n; ++i) out[i] = Real(value(base, index + i));
  };
  switch (type) {
    case ATTN_F64:
      return each(load<double>);
    case ATTN_F32:
      return each(load<float>);
    case ATTN_F16:
      return each([](auto b, auto i) { return f16_value(load<uint16_t>(b, i)); });
    case ATTN_BF16:
      return each([](auto b, auto i) { return bf16_value(load<uint16_t>(b, i)); });
    case ATTN_F8_E4M3FN:
      return each([](auto b, auto i) { return e4m3fn_values[load<uint8_t>(b, i)]; });
    case ATTN_F8_E5M2:
      return each([](auto b, auto i) { return e5m2_values[load<uint8_t>(b, i)]; });
    case ATTN_F8_E4M3FNUZ:
      return each([](auto b, auto i) { return e4m3fnuz_values[load<uint8_t>(b, i)]; });
    case ATTN_Q8_0:
      return each(q8_0_value);
    case ATTN_Q4_0:
      return each(q4_0_value);
    case ATTN_DTYPE_NONE:
      return;
  }
}

// Stores the scale of a block and returns the factor that takes values to quotients.
float store_scale(float d, bool has_nan, void* block, bool saturate) {
  if (has_nan || (!saturate && std::abs(d) > 65504)) {
    d = std::numeric_limits<float>::quiet_NaN();
  } else {
    d = std::clamp(d, -65504.0f, 65504.0f);
  }
  store<uint16_t>(block, 0, f16_code(d));
  const float inverse = 1 / d;
  return std::isfinite(inverse) ? inverse : 0;
}

}  // namespace

const TypeInfo& type_info(attn_dtype type) {
  return types[type > 0 && size_t(type) < std::size(types) ? type : 0];
}

attn_dtype dtype_from_name(std::string_view name) {
  for (int i = 1; i < int(std::size(types)); ++i) {
    if (name == types[i].name) return attn_dtype(i);
  }
  return ATTN_DTYPE_NONE;
}

void decode_row(attn_dtype type, const void* base, int64_t index, int64_t n, double* out) {
  decode_row_as(type, base, index, n, out);
}
void decode_row(attn_dtype type, const void* base, int64_t index, int64_t n, float* out) {
  decode_row_as(type, base, index, n, out);
}
double decode_element(attn_dtype type, const void* base, int64_t index) {
  double x = 0;
  decode_row_as(type, base, index, 1, &x);
  return x;
}

void encode_element(attn_dtype type, void* base, int64_t index, double x, bool saturate) {
  switch (type) {
    case ATTN_F64:
      return store(base, index, x);
    case ATTN_F32:
      return store(base, index, float(x));
    case ATTN_F16:
      return store(base, index, f16_code(x));
    case ATTN_BF16:
      return store(base, index, bf16_code(x));
    case ATTN_F8_E4M3FN:
      return store(base, index, uint8_t(encode(e4m3fn_format, x, saturate)));
    case ATTN_F8_E5M2:
      return store(base, index, uint8_t(encode(e5m2_format, x, saturate)));
    case ATTN_F8_E4M3FNUZ:
      return store(base, index, uint8_t(encode(e4m3fnuz_format, x, saturate)));
    default:
      return;
  }
}

void encode_result(attn_dtype type, void* base, int64_t index, double x) {
  if (!dtype_is_fp8(type)) return encode_element(type, base, index, x, true);
  const SmallFloat& format = fp8_format(type);
  const unsigned code = encode(format, x, true);
  const bool zero = format.signed_zero_and_nan && code == format.sign_bit();
  store(base, index, uint8_t(zero ? 0 : code));
}

void encode_q8_0(const float* x, void* block, bool saturate) {
  float amax = 0;
  bool has_nan = false;
  for (int i = 0; i < 32; ++i) {
    amax = std::max(amax, std::abs(x[i]));
    has_nan |= std::isnan(x[i]);
  }
  const float inverse = store_scale(amax / 127, has_nan, block, saturate);
  for (int i = 0; i < 32; ++i) {
    const float q = inverse == 0 ? 0 : std::round(x[i] * inverse);
    store<int8_t>(static_cast<char*>(block) + 2, i, int8_t(std::clamp(q, -127.0f, 127.0f)));
  }
}

void encode_q4_0(const float* x, void* block, bool saturate) {
  float amax = 0, max = 0;
  bool has_nan = false;
  for (int i = 0; i < 32; ++i) {
    if (std::abs(x[i]) > amax) amax = std::abs(max = x[i]);
    has_nan |= std::isnan(x[i]);
  }
  const float inverse = store_scale(max / -8, has_nan, block, saturate);
  const auto quotient = [&](float value) {
    const float q = inverse == 0 ? 8 : value * inverse + 8.5f;
    return int(std::clamp(q, 0.0f, 15.0f));
  };
  for (int i = 0; i < 16; ++i) {
    const int byte = quotient(x[i]) | quotient(x[i + 16]) << 4;
    store<uint8_t>(static_cast<char*>(block) + 2, i, uint8_t(byte));
  }
}

}  // namespace attn
