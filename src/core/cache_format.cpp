#include "core/cache_format.h"

#include <cmath>
#include <limits>

namespace attn {
namespace {

constexpr double largest_e4m3fn = 448, largest_e2m1 = 6;

struct Largest {
  double finite = 0;
  bool has_nan = false;
};
Largest largest_of(const double* x, int64_t n) {
  Largest most;
  for (int64_t i = 0; i < n; ++i) {
    if (std::isfinite(x[i])) most.finite = std::max(most.finite, std::abs(x[i]));
    most.has_nan |= std::isnan(x[i]);
  }
  return most;
}

// The exponent of the least power of two, from 2^-126 on, that is at least `most` / 448.
int power_of_scale(double most) {
  int exponent;
  const double fraction = std::frexp(most / largest_e4m3fn, &exponent);  // in [1/2, 1), or 0
  if (fraction == 0) return -126;
  if (fraction == 0.5) --exponent;
  return std::clamp(exponent, -126, 127);
}

void encode_e2m1(char* row, int64_t i, double x) {
  char& byte = row[i / 2];
  const unsigned code = std::isnan(x) ? 0 : encode(e2m1_format, x, true);
  byte = char(i % 2 == 0 ? (byte & 0xf0) | code : (byte & 0x0f) | code << 4);
}

}  // namespace

void decode_cache(attn_dtype type, const char* row, const char* scales, int64_t d, int64_t n,
                  double* out) {
  for_each_piece(type, row, scales, d, n,
                 [&](const CachePiece& piece, int64_t first, int64_t count, double scale) {
                   double* const to = out + (first - d);
                   decode_row(piece.type, row + piece.base, piece.at + first - piece.first, count,
                              to);
                   for (int64_t i = 0; i < count; ++i) to[i] *= scale;
                 });
}

float token_scale(double amax) {
  constexpr float smallest = std::numeric_limits<float>::denorm_min();
  return amax == 0 ? 1 : std::max(float(amax / largest_e4m3fn), smallest);
}

void encode_cache(attn_dtype type, char* row, char* scales, int64_t d, int64_t n, const double* x) {
  for (int64_t at = d; at < d + n;) {
    const CachePiece piece = cache_piece(type, at);
    const int64_t count = std::min(d + n - at, piece.first + piece.count - at);
    const double* const from = x + (at - d);
    double scale = 1;
    if (type == ATTN_F8_E4M3FN_TOKEN) {
      scale = cache_scale(type, row, scales, 0);
    } else if (type == ATTN_NVFP4) {
      const Largest most = largest_of(from, count);
      const double exact =
          most.has_nan ? std::numeric_limits<double>::quiet_NaN() : most.finite / largest_e2m1;
      scales[piece.scale] = char(encode(e4m3fn_format, exact, true));
      scale = cache_scale(type, row, scales, piece.scale);
    } else if (piece.scale >= 0) {
      const int power = power_of_scale(largest_of(from, count).finite);
      const float as_f32 = std::ldexp(1.0f, power);
      if (type == ATTN_MLA_656)
        std::memcpy(row + mla_656_latent + 4 * piece.scale, &as_f32, sizeof as_f32);
      else
        scales[piece.scale] = char(power + 127);
      scale = as_f32;
    }
    for (int64_t i = 0; i < count; ++i) {
      const double value = scale > 0 ? from[i] / scale : 0;
      const int64_t to = piece.at + at - piece.first + i;
      if (type == ATTN_NVFP4)
        encode_e2m1(row, to, value);
      else
        encode_element(piece.type, row + piece.base, to, value, true);
    }
    at += count;
  }
  if (type == ATTN_MLA_584 && d + n == type_info(type).block_elements) scales[7] = 0;
}

}  // namespace attn
