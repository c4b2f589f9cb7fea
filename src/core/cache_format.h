// Formats of servers' caches (ATTN_KIND_CACHE): rows of a token's head whose elements are codes
// with scales in the row or in an array next to it.
#pragma once
#include <algorithm>
#include <cstring>

#include "core/dtype.h"

namespace attn {

constexpr bool dtype_is_cache(attn_dtype t) {
  return type_info(t).kind == ATTN_KIND_CACHE;
}

// Elements [first, first + count) of a row: of `type`, element i of them at element at + i from
// `base`, times a scale. count is 0 at the end of a row.
struct CachePiece {
  attn_dtype type;
  int64_t base, at;  // base: bytes from the row's first
  int64_t first, count;
  int64_t scale;  // its number in the row; -1: none
};

constexpr int64_t mla_656_latent = 512, mla_656_group = 128, mla_656_rope = 528;  // of its bytes
constexpr int64_t mla_584_codes = 448, mla_584_group = 64;
constexpr int64_t nvfp4_group = 16;

// The piece with element `d` of a row of a cache's type.
constexpr CachePiece cache_piece(attn_dtype type, int64_t d) {
  constexpr auto group = [](attn_dtype codes, int64_t d, int64_t size) {
    const int64_t first = d / size * size;
    return CachePiece{codes, 0, first, first, size, first / size};
  };
  switch (type) {
    case ATTN_MLA_656:
      if (d < mla_656_latent) return group(ATTN_F8_E4M3FN, d, mla_656_group);
      return {ATTN_BF16, mla_656_rope, 0, mla_656_latent, 64, -1};
    case ATTN_MLA_584:
      if (d < mla_584_codes) return group(ATTN_F8_E4M3FN, d, mla_584_group);
      return {ATTN_BF16, mla_584_codes, 0, mla_584_codes, 64, -1};
    case ATTN_NVFP4:
      return group(ATTN_NVFP4, d, nvfp4_group);
    default:
      return {ATTN_F8_E4M3FN, 0, 0, 0, int64_t{1} << 40, 0};
  }
}

// Scale n of a row; `scales`: of the row, in its array, not of mla_656.
inline double cache_scale(attn_dtype type, const char* row, const char* scales, int64_t n) {
  float x;
  switch (type) {
    case ATTN_MLA_656:
      std::memcpy(&x, row + mla_656_latent + 4 * n, sizeof x);
      return x;
    case ATTN_F8_E4M3FN_TOKEN:
      std::memcpy(&x, scales, sizeof x);
      return x;
    case ATTN_NVFP4:
      return e4m3fn_values[uint8_t(scales[n])];
    default:
      return e8m0_value(uint8_t(scales[n]));
  }
}

// Calls visit(piece, first, count, scale) for the pieces of elements [d, d + n) of a row.
template <class Visit>
void for_each_piece(attn_dtype type, const char* row, const char* scales, int64_t d, int64_t n,
                    Visit&& visit) {
  for (int64_t at = d, next; at < d + n; at = next) {
    const CachePiece piece = cache_piece(type, at);
    next = std::min(d + n, piece.first + piece.count);
    visit(piece, at, next - at, piece.scale < 0 ? 1 : cache_scale(type, row, scales, piece.scale));
  }
}

// Elements [d, d + n) times their scales; exact but for the product's rounding.
void decode_cache(attn_dtype type, const char* row, const char* scales, int64_t d, int64_t n,
                  double* out);

// Stores elements [d, d + n), whole pieces, and makes their scales as attn_quantize does. Of
// f8_e4m3fn_token the scale is there already, made by token_scale().
void encode_cache(attn_dtype type, char* row, char* scales, int64_t d, int64_t n, const double* x);
// From the largest finite |x| of a token's head.
float token_scale(double amax);

}  // namespace attn
