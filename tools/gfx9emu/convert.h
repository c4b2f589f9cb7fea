// Conversions between f32 and the smaller formats as gfx942 and gfx950 do them, on bits and without
// branches where loops over lanes are made of them.
//
// Everything is static: these functions are compiled once per instruction set, and no copy made for
// a wider one may serve the others.
#pragma once
#include <cstdint>

namespace gfx9emu {

static inline float as_f32(uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}
static inline uint32_t bits_of(float x) {
  return __builtin_bit_cast(uint32_t, x);
}
static inline double as_f64(uint64_t bits) {
  return __builtin_bit_cast(double, bits);
}
static inline uint64_t bits_of64(double x) {
  return __builtin_bit_cast(uint64_t, x);
}

static inline uint32_t f16_to_f32(uint32_t h) {
  const uint32_t sign = (h & 0x8000) << 16, magnitude = h & 0x7fff;
  const uint32_t normal = (magnitude << 13) + 0x38000000;
  const uint32_t special = (magnitude << 13) + 0x70000000;
  const uint32_t subnormal =
      bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  return sign | (magnitude >= 0x7c00 ? special : magnitude < 0x0400 ? subnormal : normal);
}

// To nearest, ties to even. `saturate` is MODE.FP16_OVFL: finite values do not become infinite.
static inline uint32_t f32_to_f16(uint32_t f, bool saturate) {
  const uint32_t sign = f >> 16 & 0x8000, magnitude = f & 0x7fffffff;
  const uint32_t normal = (magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13;
  const uint32_t subnormal = bits_of(as_f32(magnitude) + 0.5f) - 0x3f000000;
  const uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
  const uint32_t bounded = finite >= 0x7c00 ? (saturate ? 0x7bff : 0x7c00) : finite;
  const uint32_t nan = 0x7e00 | (magnitude >> 13 & 0x3ff);
  return sign | (magnitude > 0x7f800000    ? nan
                 : magnitude == 0x7f800000 ? 0x7c00
                 : magnitude >= 0x47800000 ? (saturate ? 0x7bff : 0x7c00)
                                           : bounded);
}

// Toward zero: v_cvt_pkrtz_f16_f32. Too large a value becomes the largest finite one.
static inline uint32_t f32_to_f16_toward_zero(uint32_t f) {
  const uint32_t sign = f >> 16 & 0x8000, magnitude = f & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00 | (magnitude >> 13 & 0x3ff);
  if (magnitude == 0x7f800000) return sign | 0x7c00;
  if (magnitude >= 0x47800000) return sign | 0x7bff;
  if (magnitude >= 0x38800000) return sign | ((magnitude - 0x38000000) >> 13);
  return sign | static_cast<uint32_t>(as_f32(magnitude) * 0x1p24f);
}

// f64 to f16 with one rounding: first to f32 "to odd", which keeps what a second rounding needs.
static inline uint32_t f64_to_f32_odd(double x) {
  float f = static_cast<float>(x);
  uint32_t bits = bits_of(f);
  const double back = f;
  if (back != x && x == x && (bits & 1) == 0 && (bits & 0x7fffffff) != 0x7f800000) {
    // Toward x, to the neighbour with an odd last bit.
    bits += (__builtin_fabs(x) > __builtin_fabs(back)) ? 1 : -1;
  }
  return bits;
}

// FP8. FNUZ (one NaN 0x80, no infinities, no -0): `mantissa` bits and `bias` are 3 and 8 for fp8, 2
// and 16 for bf8. OCP: 3 and 7 for fp8 (NaN 0x7f, no infinities), 2 and 15 for bf8 (infinity 0x7c).
template <int bias>
inline constexpr bool is_ocp = bias == 7 || bias == 15;
template <int bias>
inline constexpr uint32_t largest_f8 = bias == 7    ? 0x7e
                                       : bias == 15 ? 0x7b
                                                    : 0x7f;
// What values beyond the largest become, without a sign, and what a NaN does.
template <int bias>
inline constexpr uint32_t beyond_f8 = bias == 7    ? 0x7f
                                      : bias == 15 ? 0x7c
                                                   : 0x80;
template <int bias>
inline constexpr uint32_t nan_f8 = is_ocp<bias> ? 0x7f : 0x80;

template <int mantissa, int bias>
static inline uint32_t f8_to_f32(uint32_t code) {
  const uint32_t sign = (code & 0x80) << 24, magnitude = code & 0x7f;
  const uint32_t normal = (magnitude << (23 - mantissa)) + ((127u - bias) << 23);
  constexpr float step =
      (mantissa == 3 ? 0x1p-10f : 0x1p-17f) * (is_ocp<bias> ? 2 : 1);  // 2^(1 - bias - mantissa)
  const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * step);
  const uint32_t value = sign | (magnitude < (1u << mantissa) ? subnormal : normal);
  if (is_ocp<bias>) {
    const uint32_t beyond = bias == 15 && magnitude == 0x7c ? sign | 0x7f800000 : 0x7fc00000;
    return magnitude > largest_f8<bias> ? beyond : value;
  }
  return (code & 0xff) == 0x80 ? 0x7fc00000 : magnitude == 0 ? 0 : value;
}

// To nearest, ties to even. Beyond the largest value: that value if `saturate`, else NaN, in OCP
// bf8 infinity.
template <int mantissa, int bias>
static inline uint32_t f32_to_f8(uint32_t f, bool saturate) {
  constexpr int drop = 23 - mantissa;
  constexpr uint32_t half = (1u << (drop - 1)) - 1;
  constexpr uint32_t min_normal = (128u - bias) << 23;
  // Adding 2^23 steps leaves the rounded number of steps in the low bits.
  constexpr float magic = (mantissa == 3 ? 0x1p13f : 0x1p6f) * (is_ocp<bias> ? 2 : 1);
  const uint32_t sign = f >> 24 & 0x80, magnitude = f & 0x7fffffff;
  const uint32_t normal =
      ((magnitude + half + (magnitude >> drop & 1)) >> drop) - ((127u - bias) << mantissa);
  const uint32_t subnormal = bits_of(as_f32(magnitude) + magic) - bits_of(magic);
  const uint32_t rounded = magnitude < min_normal ? subnormal : normal;
  const bool over =
      magnitude >= 0x7f800000 || (magnitude >= min_normal && rounded > largest_f8<bias>);
  const uint32_t finite = over ? largest_f8<bias> : rounded;
  const uint32_t code = finite == 0 && !is_ocp<bias> ? 0 : finite | sign;
  const uint32_t beyond = magnitude > 0x7f800000 ? nan_f8<bias> : beyond_f8<bias>;
  return magnitude > 0x7f800000 || (over && !saturate) ? beyond | sign : code;
}

// Stochastic rounding: the seed's high bits are added below the last place, then it is cut off.
template <int mantissa, int bias>
static inline uint32_t f32_to_f8_stochastic(uint32_t f, uint32_t seed, bool saturate) {
  constexpr int drop = 23 - mantissa;
  const uint32_t sign = f >> 24 & 0x80, magnitude = f & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | nan_f8<bias>;
  if (magnitude == 0x7f800000 && !saturate) return sign | beyond_f8<bias>;
  const int exponent = static_cast<int>(magnitude >> 23) - 127;
  const uint64_t significand = (magnitude & 0x7fffff) | (magnitude >> 23 ? 0x800000 : 0);
  const int below = 1 - bias - exponent;  // > 0: the result is subnormal
  const int shift = drop + (below > 0 ? below : 0);
  const uint64_t noise = uint64_t{seed >> (32 - drop)} << (shift - drop < 36 ? shift - drop : 36);
  const uint64_t units = shift < 60 ? (significand + noise) >> shift : 0;
  const uint64_t code =
      below > 0 ? units : units + (static_cast<uint64_t>(exponent + bias - 1) << mantissa);
  if (code > largest_f8<bias>) return sign | (saturate ? largest_f8<bias> : beyond_f8<bias>);
  return code == 0 && !is_ocp<bias> ? 0 : sign | static_cast<uint32_t>(code);
}

static inline uint32_t bf16_to_f32(uint32_t b) {
  return b << 16;
}

}  // namespace gfx9emu
