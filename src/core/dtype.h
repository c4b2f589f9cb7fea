// The element types' names, sizes and conversions.
#pragma once
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/types.h"
#include "kernels/shared/small_float.h"

namespace attn {

inline const char* dtype_name(attn_dtype type) {
  return type_info(type).name;
}
// The same; the number of what is no type.
inline std::string dtype_text(attn_dtype type) {
  const bool known = type >= 0 && type < end_of_dtypes;
  return known ? dtype_name(type) : std::to_string(int(type));
}
// ATTN_DTYPE_NONE if no type has this name.
attn_dtype dtype_from_name(std::string_view name);

// The names of `types`, bits of type_bit: "f32, f16, bf16"; with `last` " or " "f32, f16 or bf16".
std::string type_names(uint32_t types, const char* last = ", ");

constexpr bool dtype_is_fp8(attn_dtype t) {
  return type_info(t).kind == ATTN_KIND_FP8;
}
inline bool dtype_is_ggml(attn_dtype t) {
  return type_info(t).kind == ATTN_KIND_GGML;
}
// Whether there is a separate array with an f16 scale for each token and head.
inline bool dtype_has_scales(attn_dtype t) {
  return type_info(t).has_scales;
}

// Elements and bytes of one block.
inline int64_t dtype_block(attn_dtype type) {
  return type_info(type).block_elements;
}
inline int64_t dtype_bytes(attn_dtype type) {
  return type_info(type).block_bytes;
}
// Bytes of `elements` consecutive elements, which are whole blocks; the offset of that element.
inline int64_t dtype_bytes(attn_dtype type, int64_t elements) {
  return elements / dtype_block(type) * dtype_bytes(type);
}

// ---- small floats ------------------------------------------------------------------------------

inline constexpr SmallFloat f16_format{5, 10, 15, 0x7bff, 0x7c00, 0x7e00, true};
inline constexpr SmallFloat bf16_format{8, 7, 127, 0x7f7f, 0x7f80, 0x7fc0, true};
inline constexpr SmallFloat e4m3fn_format{4, 3, 7, 0x7e, 0, 0x7f, true};
inline constexpr SmallFloat e5m2_format{5, 2, 15, 0x7b, 0x7c, 0x7e, true};
inline constexpr SmallFloat e4m3fnuz_format{4, 3, 8, 0x7f, 0, 0x80, false};
inline constexpr SmallFloat e2m1_format{2, 1, 1, 7, 0, 0, true};  // has no NaN
// Of an fp8 type.
constexpr const SmallFloat& fp8_format(attn_dtype type) {
  return type == ATTN_F8_E5M2     ? e5m2_format
         : type == ATTN_F8_E4M3FN ? e4m3fn_format
                                  : e4m3fnuz_format;
}

namespace detail {
constexpr double pow2(int e) {
  return std::bit_cast<double>(uint64_t(e + 1023) << 52);
}
}  // namespace detail

// Exact.
constexpr double value_of(const SmallFloat& f, uint32_t code) {
  constexpr double nan = std::bit_cast<double>(0x7ff8000000000000ull);
  constexpr double inf = std::bit_cast<double>(0x7ff0000000000000ull);
  if (!f.signed_zero_and_nan && code == f.nan_code) return nan;
  const uint32_t magnitude = code & (f.sign_bit() - 1);
  const double sign = code & f.sign_bit() ? -1.0 : 1.0;
  if (f.inf_code != 0 && magnitude == f.inf_code) return sign * inf;
  if (magnitude > f.max_code) return nan;
  const int exponent = int(magnitude >> f.mantissa_bits);
  const uint32_t fraction = magnitude & ((1u << f.mantissa_bits) - 1);
  if (exponent == 0) return sign * fraction * detail::pow2(1 - f.bias - f.mantissa_bits);
  return sign * (fraction + (1u << f.mantissa_bits)) *
         detail::pow2(exponent - f.bias - f.mantissa_bits);
}

inline constexpr std::array<float, 256> make_table(const SmallFloat& f) {
  std::array<float, 256> table{};
  for (uint32_t code = 0; code < 256; ++code) table[code] = float(value_of(f, code));
  return table;
}
inline constexpr std::array<float, 256> e4m3fn_values = make_table(e4m3fn_format);
inline constexpr std::array<float, 256> e5m2_values = make_table(e5m2_format);
inline constexpr std::array<float, 256> e4m3fnuz_values = make_table(e4m3fnuz_format);

// A power of two; 255 is NaN.
constexpr double e8m0_value(uint8_t code) {
  return code == 255 ? std::bit_cast<double>(0x7ff8000000000000ull) : detail::pow2(code - 127);
}
inline float f16_value(uint16_t code) {
  return float(value_of(f16_format, code));
}
inline float bf16_value(uint16_t code) {
  return std::bit_cast<float>(uint32_t(code) << 16);
}
inline uint16_t f16_code(double x) {
  return uint16_t(encode(f16_format, x, false));
}
inline uint16_t bf16_code(double x) {
  return uint16_t(encode(bf16_format, x, false));
}

// The FNUZ code whose value is half that of the OCP code. Exact; -0 becomes 0, NaN stays NaN.
constexpr uint8_t fnuz_half_of_e4m3fn(uint8_t code) {
  if (code == 0x80) return 0x00;
  if (code == 0x7f || code == 0xff) return 0x80;
  return code;
}

// ---- rows of any type --------------------------------------------------------------------------

// Reads elements [index, index + n) from `base`, the codes of i8, i4, nvfp4 and f8_e4m3fn_token;
// exact. ggml blocks: index may be inside a block. Not of mla_*, whose rows cache_format.h reads.
void decode_row(attn_dtype type, const void* base, int64_t index, int64_t n, double* out);
void decode_row(attn_dtype type, const void* base, int64_t index, int64_t n, float* out);
double decode_element(attn_dtype type, const void* base, int64_t index);

// Writes one element (f64, f32, f16, bf16, fp8), rounding once. `saturate` acts on fp8 only.
void encode_element(attn_dtype type, void* base, int64_t index, double x, bool saturate);

// An element of forward's out: fp8 saturates, and its zero has no sign (docs/numerics.md).
void encode_result(attn_dtype type, void* base, int64_t index, double x);

}  // namespace attn
