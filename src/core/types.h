// The table of element types: what is to be known of each but code. All lists of types follow from
// it. Constants alone: code compiled for one instruction set includes this.
#pragma once
#include <float.h>
#include <stdint.h>

#include "attn/attn.h"
#include "kernels/shared/ggml_layout.h"
#include "kernels/shared/row_scale.h"
#include "kernels/shared/types.h"

namespace attn {

using TypeInfo = attn_dtype_properties;

namespace detail {

constexpr TypeInfo element(attn_dtype type, const char* name, attn_dtype_kind kind, int bytes,
                           double max_finite) {
  return {sizeof(TypeInfo), type, name, kind, 1, bytes, 0, type == ATTN_F64, max_finite, 0, 0};
}
constexpr TypeInfo blocks(attn_dtype type, const char* name) {
  return {
      sizeof(TypeInfo), type, name, ATTN_KIND_GGML, 32, block_layout(type).size(), 0, 0, 0, 0, 0};
}
constexpr TypeInfo codes(attn_dtype type, const char* name, int in_a_byte, int largest) {
  return {sizeof(TypeInfo), type, name, ATTN_KIND_CODES, in_a_byte, 1, 1, 0, double(largest), 2, 0};
}
// `elements` are in `bytes`; a scale of `scale_bytes`, 0 = none, serves `scale_elements`.
constexpr TypeInfo cache(attn_dtype type, const char* name, int elements, int bytes, double largest,
                         int scale_bytes, int scale_elements) {
  return {sizeof(TypeInfo), type, name,    ATTN_KIND_CACHE, elements,      bytes,
          scale_bytes > 0,  0,    largest, scale_bytes,     scale_elements};
}

// A row's place is its type's number.
inline constexpr TypeInfo types[] = {
    element(ATTN_DTYPE_NONE, "none", {}, 0, 0),
    element(ATTN_F32, "f32", ATTN_KIND_FLOAT, 4, FLT_MAX),
    element(ATTN_F16, "f16", ATTN_KIND_FLOAT, 2, 65504),
    element(ATTN_BF16, "bf16", ATTN_KIND_FLOAT, 2, 0x1.fep127),
    element(ATTN_F8_E4M3FN, "f8_e4m3fn", ATTN_KIND_FP8, 1, 448),
    element(ATTN_F8_E5M2, "f8_e5m2", ATTN_KIND_FP8, 1, 57344),
    element(ATTN_F8_E4M3FNUZ, "f8_e4m3fnuz", ATTN_KIND_FP8, 1, 240),
    blocks(ATTN_Q8_0, "q8_0"),
    blocks(ATTN_Q4_0, "q4_0"),
    element(ATTN_F64, "f64", ATTN_KIND_FLOAT, 8, DBL_MAX),
    blocks(ATTN_Q4_1, "q4_1"),
    blocks(ATTN_Q5_0, "q5_0"),
    blocks(ATTN_Q5_1, "q5_1"),
    blocks(ATTN_IQ4_NL, "iq4_nl"),
    codes(ATTN_I8, "i8", 1, 127),
    codes(ATTN_I4, "i4", 2, 7),
    cache(ATTN_F8_E4M3FN_TOKEN, "f8_e4m3fn_token", 1, 1, 448, 4, 0),
    cache(ATTN_NVFP4, "nvfp4", 16, 8, 6, 1, 16),
    cache(ATTN_MLA_656, "mla_656", 576, 656, 0, 0, 0),
    cache(ATTN_MLA_584, "mla_584", 512, 576, 0, 1, 64),
};

}  // namespace detail

constexpr int end_of_dtypes = int(sizeof detail::types / sizeof detail::types[0]);

// Scales of a token's head of `dim` elements, in the separate array; 0: there is none.
constexpr int64_t scales_of_row(const TypeInfo& type, int64_t dim) {
  if (!type.has_scales) return 0;
  return type.scale_elements ? dim / type.scale_elements : 1;
}

// Values outside the enum give the row of ATTN_DTYPE_NONE.
constexpr const TypeInfo& type_info(attn_dtype type) {
  return detail::types[type > 0 && type < end_of_dtypes ? type : 0];
}

constexpr uint32_t type_bit(attn_dtype type) {
  return 1u << type;
}

// type_bit of all types of a kind that q, K or V may be of.
constexpr uint32_t types_of(attn_dtype_kind kind) {
  uint32_t types = 0;
  for (const TypeInfo& t : detail::types)
    if (t.kind == kind && !t.output_only) types |= type_bit(t.type);
  return types;
}
inline constexpr uint32_t float_types = types_of(ATTN_KIND_FLOAT),
                          fp8_types = types_of(ATTN_KIND_FP8),
                          ggml_types = types_of(ATTN_KIND_GGML),
                          scaled_types = types_of(ATTN_KIND_CODES),
                          cache_types = types_of(ATTN_KIND_CACHE),
                          q_types = float_types | fp8_types,
                          kv_types = q_types | ggml_types | scaled_types | cache_types,
                          types_with_scales = scaled_types | type_bit(ATTN_F8_E4M3FN_TOKEN) |
                                              type_bit(ATTN_NVFP4) | type_bit(ATTN_MLA_584);
// A type of the size of a type's scales.
constexpr attn_dtype scale_element(attn_dtype type) {
  const int bytes = type_info(type).scale_bytes;
  return bytes == 4 ? ATTN_F32 : bytes == 2 ? ATTN_F16 : ATTN_F8_E4M3FN;
}

template <attn_dtype t>
struct Type {
  static constexpr attn_dtype type = t;
};
// Calls body(Type<t>()) for the t among `types` that `type` is; false if it is none of them.
template <uint32_t types, int t = ATTN_F32, class Body>
[[gnu::always_inline]] inline bool with_type(attn_dtype type, const Body& body) {
  if constexpr (types >> t != 0) {
    if constexpr (types >> t & 1)
      if (type == t) return body(Type<attn_dtype(t)>()), true;
    return with_type<types, t + 1>(type, body);
  } else {
    return false;
  }
}

// What device code has of the table, which cannot include attn.h.
static_assert(
    [] {
      for (int t = 0; t < end_of_dtypes; ++t) {
        const TypeInfo& row = detail::types[t];
        if (row.type != t || is_ggml(t) != (row.kind == ATTN_KIND_GGML) ||
            has_row_scale(t) != (row.kind == ATTN_KIND_CODES))
          return false;
      }
      return int(attn_element_f32) == ATTN_F32 && int(attn_element_f16) == ATTN_F16 &&
             int(attn_element_bf16) == ATTN_BF16 && int(attn_element_f8_e4m3fn) == ATTN_F8_E4M3FN &&
             int(attn_element_f8_e5m2) == ATTN_F8_E5M2 && int(attn_element_q8_0) == ATTN_Q8_0 &&
             int(attn_element_q4_0) == ATTN_Q4_0 && int(attn_element_q4_1) == ATTN_Q4_1 &&
             int(attn_element_q5_0) == ATTN_Q5_0 && int(attn_element_q5_1) == ATTN_Q5_1 &&
             int(attn_element_iq4_nl) == ATTN_IQ4_NL && int(attn_element_i8) == ATTN_I8 &&
             int(attn_element_i4) == ATTN_I4 &&
             int(attn_element_f8_e4m3fn_token) == ATTN_F8_E4M3FN_TOKEN &&
             int(attn_element_mla_656) == ATTN_MLA_656;
    }(),
    "kernels/shared has other numbers or kinds of types");

}  // namespace attn
