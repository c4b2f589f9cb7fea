#include "core/dtype.h"

#include <cfloat>
#include <cstring>
#include <iterator>

#include "core/ggml.h"

namespace attn {
namespace {

constexpr TypeInfo types[] = {
    {"none", 1, 0, 0},          {"f32", 1, 4, FLT_MAX},
    {"f16", 1, 2, 65504},       {"bf16", 1, 2, value_of(bf16_format, bf16_format.max_code)},
    {"f8_e4m3fn", 1, 1, 448},   {"f8_e5m2", 1, 1, 57344},
    {"f8_e4m3fnuz", 1, 1, 240}, {"q8_0", 32, 34, 0},
    {"q4_0", 32, 18, 0},        {"f64", 1, 8, DBL_MAX},
    {"q4_1", 32, 20, 0},        {"q5_0", 32, 22, 0},
    {"q5_1", 32, 24, 0},        {"iq4_nl", 32, 18, 0},
    {"i8", 1, 1, 127},          {"i4", 2, 1, 7},
};

static_assert(std::size(types) == end_of_dtypes);

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
      return each(block_value<ATTN_Q8_0>);
    case ATTN_Q4_0:
      return each(block_value<ATTN_Q4_0>);
    case ATTN_Q4_1:
      return each(block_value<ATTN_Q4_1>);
    case ATTN_Q5_0:
      return each(block_value<ATTN_Q5_0>);
    case ATTN_Q5_1:
      return each(block_value<ATTN_Q5_1>);
    case ATTN_IQ4_NL:
      return each(block_value<ATTN_IQ4_NL>);
    case ATTN_I8:
      return each(load<int8_t>);
    case ATTN_I4:
      return each([](auto b, auto i) {
        const int byte = load<uint8_t>(b, i / 2), code = i % 2 == 0 ? byte & 15 : byte >> 4;
        return (code ^ 8) - 8;
      });
    case ATTN_DTYPE_NONE:
      return;
  }
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

}  // namespace attn
