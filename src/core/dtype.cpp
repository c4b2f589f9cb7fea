#include "core/dtype.h"

#include <cstring>

#include "core/ggml.h"

namespace attn {
namespace {

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
    case ATTN_F8_E4M3FN_TOKEN:
      return each([](auto b, auto i) { return e4m3fn_values[load<uint8_t>(b, i)]; });
    case ATTN_F8_E5M2:
      return each([](auto b, auto i) { return e5m2_values[load<uint8_t>(b, i)]; });
    case ATTN_F8_E4M3FNUZ:
      return each([](auto b, auto i) { return e4m3fnuz_values[load<uint8_t>(b, i)]; });
    case ATTN_I8:
      return each(load<int8_t>);
    case ATTN_I4:
      return each([](auto b, auto i) {
        const int byte = load<uint8_t>(b, i / 2), code = i % 2 == 0 ? byte & 15 : byte >> 4;
        return (code ^ 8) - 8;
      });
    case ATTN_NVFP4:
      return each([](auto b, auto i) {
        constexpr float values[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
        const int byte = load<uint8_t>(b, i / 2), code = i % 2 == 0 ? byte & 15 : byte >> 4;
        return code & 8 ? -values[code & 7] : values[code];
      });
    default:
      with_type<ggml_types>(type, [&](auto t) { each(block_value<t.type>); });
  }
}

}  // namespace

std::string type_names(uint32_t types, const char* last) {
  std::string names;
  for (int t = ATTN_F32; t < end_of_dtypes; ++t) {
    if (!(types & type_bit(attn_dtype(t)))) continue;
    if (!names.empty()) names += types >> t == 1 ? last : ", ";
    names += dtype_name(attn_dtype(t));
  }
  return names;
}

attn_dtype dtype_from_name(std::string_view name) {
  for (int t = ATTN_F32; t < end_of_dtypes; ++t)
    if (name == dtype_name(attn_dtype(t))) return attn_dtype(t);
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
    default:
      if (dtype_is_fp8(type)) store(base, index, uint8_t(encode(fp8_format(type), x, saturate)));
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
