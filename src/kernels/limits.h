// Types and names that the rows of several families have.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

#include "kernels/kernel.h"

namespace attn {

// What device code knows; rows of host kernels, which take all types of a kind, are of
// core/types.h.
constexpr uint32_t fp8_of_cuda = type_bit(ATTN_F8_E4M3FN) | type_bit(ATTN_F8_E5M2);
constexpr uint32_t device_fp8_types = fp8_of_cuda | type_bit(ATTN_F8_E4M3FNUZ);
constexpr uint32_t device_ggml_types = type_bit(ATTN_Q8_0) | type_bit(ATTN_Q4_0);
constexpr uint32_t device_scaled_types = type_bit(ATTN_I8) | type_bit(ATTN_I4);
constexpr uint32_t device_scale_arrays =
    device_scaled_types | type_bit(ATTN_F8_E4M3FN_TOKEN) | type_bit(ATTN_NVFP4);

// Masks and layouts that every forward kernel takes.
constexpr uint32_t forward_flags = ATTN_CAUSAL | ATTN_CAUSAL_TOP_LEFT | ATTN_WINDOW | ATTN_SINKS;
constexpr uint32_t forward_features = feature_packed_q | feature_packed_kv | feature_seqlens;
constexpr uint32_t kv_descale_features =
    feature_descale_tensor | feature_descale_head | feature_descale_block;

constexpr Limits with_block_mask(Limits limits) {
  limits.flags |= ATTN_BLOCK_MASK;
  limits.demands |= ATTN_BLOCK_MASK;
  return limits;
}

// The rows of `n` variants, in their order. `row` is a function object whose operator()<i>() makes
// the i-th.
template <size_t n, class Row>
constexpr std::array<Kernel, n> rows_of_variants(Row row) {
  return [&]<size_t... i>(std::index_sequence<i...>) {
    return std::array<Kernel, n> { row.template operator()<i>()... };
  }(std::make_index_sequence<n>());
}

template <size_t n, size_t m>
constexpr std::array<Kernel, n + m> joined(const std::array<Kernel, n>& a,
                                           const std::array<Kernel, m>& b) {
  std::array<Kernel, n + m> all{};
  std::copy(b.begin(), b.end(), std::copy(a.begin(), a.end(), all.begin()));
  return all;
}

// A name of at most 47 characters, put together when the library is compiled.
struct Text {
  char text[48] = {};
  constexpr Text() = default;
  constexpr Text(const char* from) { append(from); }  // NOLINT: a literal is a Text
  constexpr Text& append(const char* from) {
    size_t end = 0;
    while (text[end]) ++end;
    while (*from) text[end++] = *from++;
    return *this;
  }
};

// A name that is passed to a template, where it can be pointed to.
template <Text name>
constexpr Text name_of = name;

}  // namespace attn
