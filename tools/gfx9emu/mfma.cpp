#include "gfx9emu/mfma.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "gfx9emu/mfma_rows.h"

namespace gfx9emu {
namespace {

using enum MfmaType;

constexpr MfmaShape shape(const char* name, MfmaType a, MfmaType b, int m, int k, int blocks,
                          int passes) {
  const int bits = a == F64 ? 64 : a == F32 || a == Xf32 ? 32 : a == F16 || a == Bf16 ? 16 : 8;
  MfmaShape s{};
  s.name = name;
  s.a = a;
  s.b = b;
  s.m = s.n = uint8_t(m);
  s.k = uint8_t(k);
  s.blocks = uint8_t(blocks);
  s.passes = uint8_t(passes);
  s.xdl = a != F32 && a != F64;
  s.a_regs = uint8_t(m * k * blocks * bits / 2048);
  s.d_regs = uint8_t(m * m * blocks * (a == F64 ? 2 : 1) / 64);
  return s;
}

constexpr auto shapes = std::to_array<MfmaShape>({
    shape("v_mfma_f32_32x32x16_fp8_fp8", Fp8, Fp8, 32, 16, 1, 8),
    shape("v_mfma_f32_32x32x16_fp8_bf8", Fp8, Bf8, 32, 16, 1, 8),
    shape("v_mfma_f32_32x32x16_bf8_fp8", Bf8, Fp8, 32, 16, 1, 8),
    shape("v_mfma_f32_32x32x16_bf8_bf8", Bf8, Bf8, 32, 16, 1, 8),
    shape("v_mfma_f32_16x16x32_fp8_fp8", Fp8, Fp8, 16, 32, 1, 4),
    shape("v_mfma_f32_16x16x32_fp8_bf8", Fp8, Bf8, 16, 32, 1, 4),
    shape("v_mfma_f32_16x16x32_bf8_fp8", Bf8, Fp8, 16, 32, 1, 4),
    shape("v_mfma_f32_16x16x32_bf8_bf8", Bf8, Bf8, 16, 32, 1, 4),
    shape("v_mfma_f32_32x32x8_f16", F16, F16, 32, 8, 1, 8),
    shape("v_mfma_f32_16x16x16_f16", F16, F16, 16, 16, 1, 4),
    shape("v_mfma_f32_32x32x4_2b_f16", F16, F16, 32, 4, 2, 16),
    shape("v_mfma_f32_16x16x4_4b_f16", F16, F16, 16, 4, 4, 8),
    shape("v_mfma_f32_4x4x4_16b_f16", F16, F16, 4, 4, 16, 2),
    shape("v_mfma_f32_32x32x8_bf16", Bf16, Bf16, 32, 8, 1, 8),
    shape("v_mfma_f32_16x16x16_bf16", Bf16, Bf16, 16, 16, 1, 4),
    shape("v_mfma_f32_32x32x4_2b_bf16", Bf16, Bf16, 32, 4, 2, 16),
    shape("v_mfma_f32_16x16x4_4b_bf16", Bf16, Bf16, 16, 4, 4, 8),
    shape("v_mfma_f32_4x4x4_16b_bf16", Bf16, Bf16, 4, 4, 16, 2),
    shape("v_mfma_i32_32x32x16_i8", I8, I8, 32, 16, 1, 8),
    shape("v_mfma_i32_16x16x32_i8", I8, I8, 16, 32, 1, 4),
    shape("v_mfma_i32_32x32x4_2b_i8", I8, I8, 32, 4, 2, 16),
    shape("v_mfma_i32_16x16x4_4b_i8", I8, I8, 16, 4, 4, 8),
    shape("v_mfma_i32_4x4x4_16b_i8", I8, I8, 4, 4, 16, 2),
    shape("v_mfma_f32_32x32x4_xf32", Xf32, Xf32, 32, 4, 1, 8),
    shape("v_mfma_f32_16x16x8_xf32", Xf32, Xf32, 16, 8, 1, 4),
    shape("v_mfma_f32_32x32x2_f32", F32, F32, 32, 2, 1, 16),
    shape("v_mfma_f32_16x16x4_f32", F32, F32, 16, 4, 1, 8),
    shape("v_mfma_f32_32x32x1_2b_f32", F32, F32, 32, 1, 2, 16),
    shape("v_mfma_f32_16x16x1_4b_f32", F32, F32, 16, 1, 4, 8),
    shape("v_mfma_f32_4x4x1_16b_f32", F32, F32, 4, 1, 16, 2),
    shape("v_mfma_f64_16x16x4_f64", F64, F64, 16, 4, 1, 8),
    shape("v_mfma_f64_4x4x4_4b_f64", F64, F64, 4, 4, 4, 4),
});
constexpr auto gfx950_shapes = std::to_array<MfmaShape>({
    shape("v_mfma_f32_32x32x64_f8f6f4", E4m3, E4m3, 32, 64, 1, 16),
    shape("v_mfma_f32_16x16x128_f8f6f4", E4m3, E4m3, 16, 128, 1, 8),
});

constexpr uint32_t f32_nan = 0x7fc00000;

constexpr SmallFloat format_of(MfmaType t) {
  return t == Fp8    ? fp8_format
         : t == Bf8  ? bf8_format
         : t == E4m3 ? e4m3_format
         : t == F16  ? f16_format
         : t == Bf16 ? bf16_format
                     : f32_format;
}

// How a type's products are added up.
struct Summation {
  int group;    // products per rounding
  int sums;     // 2: those of even and of odd k apart
  bool drop_c;  // C is left out where it is more than 25 exponents below
};
constexpr Summation summation_of(MfmaType t) {
  if (t == Fp8 || t == Bf8 || t == E4m3) return {16, 2, true};
  if (t == Xf32) return {4, 1, false};
  return {8, 1, false};
}
constexpr int term_bits = mfma_term_bits, sum_bits = mfma_sum_bits;

// ---- by element --------------------------------------------------------------------------------

// value = significand * 2^(exponent - fraction bits). Subnormals have the smallest exponent.
struct Number {
  enum Kind : uint8_t { Finite, Inf, Nan } kind = Finite;
  int32_t significand = 0;
  int32_t exponent = 0;
};

Number decode(const SmallFloat& f, uint32_t code) {
  const bool negative = code & f.sign();
  const uint32_t magnitude = code & (f.sign() - 1);
  const int exponent = int(magnitude >> f.fraction_bits);
  const int32_t fraction = int32_t(magnitude & ((1u << f.fraction_bits) - 1));
  Number x;
  if (f.kind == SmallFloat::Kind::fnuz
          ? code == f.sign()
          : f.kind == SmallFloat::Kind::fn && magnitude == f.sign() - 1) {
    x.kind = Number::Nan;
  } else if (f.kind == SmallFloat::Kind::ieee && exponent == (1 << f.exponent_bits) - 1) {
    x.kind = fraction ? Number::Nan : Number::Inf;
    x.significand = negative ? -1 : 1;
  } else {
    const int32_t s = exponent ? fraction | 1 << f.fraction_bits : fraction;
    x.significand = negative ? -s : s;
    x.exponent = std::max(exponent, 1) - f.bias;
  }
  return x;
}

int highest_bit(uint64_t n) {
  return 63 - std::countl_zero(n);
}

// n * 2^-shift, towards zero or towards minus infinity.
int64_t truncate_shift(int64_t n, int shift) {
  if (shift <= 0) return n << -shift;
  if (shift > 62) return 0;
  return n < 0 ? -(-n >> shift) : n >> shift;
}
int64_t floor_shift(int64_t n, int shift) {
  if (shift <= 0) return n << -shift;
  return n >> std::min(shift, 63);
}

// n * 2^exponent as f32, to nearest even.
uint32_t round_f32(int64_t n, int exponent, bool clamp) {
  if (n == 0) return 0;
  const uint32_t sign = n < 0 ? 1u << 31 : 0;
  const uint64_t magnitude = n < 0 ? uint64_t(-n) : uint64_t(n);
  const int top = highest_bit(magnitude) + exponent;
  int unit = std::max(top, -126) - 23;  // exponent of the result's last bit
  const int shift = unit - exponent;
  uint64_t m = magnitude << std::max(-shift, 0);
  if (shift > 63) {
    m = 0;
  } else if (shift > 0) {
    const uint64_t half = 1ull << (shift - 1), rest = magnitude & (2 * half - 1);
    m = magnitude >> shift;
    if (rest > half || (rest == half && (m & 1))) ++m;
  }
  if (m >> 24) {
    m >>= 1;
    ++unit;
  }
  if (m < 1u << 23) return sign | uint32_t(m);
  if (unit + 23 > 127) return sign | (clamp ? 0x7f7fffffu : 0x7f800000u);
  return sign | uint32_t(unit + 23 + 127) << 23 | (uint32_t(m) & 0x7fffff);
}

// One group of products onto c.
uint32_t dot_add(const Number* a, const Number* b, int fraction_bits, const Summation& how,
                 int count, uint32_t c, bool clamp) {
  const Number cn = decode(f32_format, c);
  bool nan = cn.kind == Number::Nan;
  int infinite = cn.kind == Number::Inf ? cn.significand : 0;
  constexpr int none = -100000;
  int64_t sum[2] = {0, 0};
  int exponent[2] = {none, none};
  for (int k = 0; k < count; ++k) {
    const Number &x = a[k], &y = b[k];
    int sign = 0;
    if (x.kind == Number::Nan || y.kind == Number::Nan) {
      nan = true;
    } else if (x.kind == Number::Inf || y.kind == Number::Inf) {
      sign = (x.significand > 0) - (x.significand < 0);
      sign *= (y.significand > 0) - (y.significand < 0);
      nan |= sign == 0;
    } else if (x.significand != 0 && y.significand != 0) {
      const int e = x.exponent + y.exponent;
      int& most = exponent[k % how.sums];
      most = std::max(most, e);
      const int64_t p = std::abs(int64_t(x.significand) * y.significand);
      // As f32 products do, those from 2^128 on become infinite.
      if (highest_bit(uint64_t(p)) + e - fraction_bits >= 128) {
        sign = (x.significand > 0) == (y.significand > 0) ? 1 : -1;
      }
    }
    if (sign != 0) {
      nan |= infinite == -sign;
      infinite = sign;
    }
  }
  if (nan) return f32_nan;
  if (infinite != 0) return infinite > 0 ? 0x7f800000 : 0xff800000;

  for (int k = 0; k < count; ++k) {
    const int64_t p = int64_t(a[k].significand) * b[k].significand;
    if (p == 0) continue;
    const int shift = exponent[k % how.sums] - a[k].exponent - b[k].exponent;
    sum[k % how.sums] += truncate_shift(p << (term_bits - fraction_bits), shift);
  }
  int top = std::max(exponent[0], exponent[1]);
  int64_t total = 0;
  for (int s = 0; s < how.sums; ++s) {
    if (exponent[s] != none) total += floor_shift(sum[s], top - exponent[s]);
  }
  if (top == none) top = -126;
  const int e = std::max(top, cn.exponent);
  int64_t result = floor_shift(total << (sum_bits - term_bits), e - top);
  if (!how.drop_c || cn.exponent >= e - term_bits - 1) {
    result += floor_shift(int64_t(cn.significand) << 1, e - cn.exponent) << (sum_bits - term_bits);
  }
  return round_f32(result, e - sum_bits, clamp);
}

uint32_t clamped(float x, bool clamp, bool was_finite) {
  if (std::isnan(x)) return f32_nan;
  if (std::isinf(x) && clamp && was_finite) x = std::copysign(std::numeric_limits<float>::max(), x);
  return std::bit_cast<uint32_t>(x);
}

// The lane whose B the given lane multiplies with.
int blgp_lane(int blgp, int lane) {
  switch (blgp) {
    case 1:
      return lane % 32;
    case 2:
      return 32 + lane % 32;
    case 3:
      return (lane + 16) % 64;
    case 4:
    case 5:
    case 6:
    case 7:
      return 16 * (blgp - 4) + lane % 16;
    default:
      return lane;
  }
}

uint64_t element(const uint32_t* regs, const MfmaPlace& p, int bits) {
  const uint32_t* reg = regs + p.reg * 64 + p.lane;
  if (bits == 64) return reg[0] | uint64_t(reg[64]) << 32;
  return bits == 32 ? *reg : *reg >> p.bit & ((1u << bits) - 1);
}

int bits_of(MfmaType t) {
  return t == F64 ? 64 : t == I8 ? 8 : format_of(t).bits();
}

}  // namespace

std::span<const MfmaShape> mfma_shapes() {
  return shapes;
}
std::span<const MfmaShape> gfx950_mfma_shapes() {
  return gfx950_shapes;
}

const MfmaShape* find_mfma(std::string_view name) {
  for (const std::span<const MfmaShape> of : {mfma_shapes(), gfx950_mfma_shapes()})
    for (const MfmaShape& s : of)
      if (name == s.name) return &s;
  return nullptr;
}

MfmaPlace mfma_a_place(const MfmaShape& s, int block, int i, int k) {
  // Each lane holds `run` consecutive k of one row, of 16 bytes at most; then the same for the k
  // behind those of all lanes. Lanes go by row, block, k.
  const int of_lane = s.m * s.k * s.blocks / 64, run = std::min(of_lane, 128 / bits_of(s.a));
  const int lanes = s.k / of_lane;  // of a row
  const int bit = (k % run + k / run / lanes * run) * bits_of(s.a);
  return {i + s.m * (block + s.blocks * (k / run % lanes)), bit / 32, bit % 32};
}

MfmaPlace mfma_b_place(const MfmaShape& s, int block, int k, int j) {
  MfmaShape of_b = s;
  of_b.a = s.b;
  return mfma_a_place(of_b, block, j, k);
}

MfmaPlace mfma_d_place(const MfmaShape& s, int block, int i, int j) {
  const int lanes = 64 / s.n;  // groups of lanes that hold whole rows
  if (s.a == F64) {
    // Rows go round the groups one by one; blocks stand beside each other.
    const int groups = lanes / s.blocks;
    return {j + s.n * (block + s.blocks * (i % groups)), 2 * (i / groups), 0};
  }
  // Rows go round the groups by fours. 4x4: one group per block.
  if (s.m == 4) return {4 * block + j, i, 0};
  const int four = i / 4;
  return {j + s.n * (four % lanes), block * s.m / lanes + 4 * (four / lanes) + i % 4, 0};
}

std::string mfma_refuses(const MfmaShape& s, const MfmaModifiers& m) {
  const std::string name = s.name;
  if (s.a == E4m3 && (m.cbsz != 0 || m.blgp != 0))
    return name + ": cbsz and blgp, the types of A and B, are known as 0, e4m3";
  if (m.cbsz > 7 || m.abid > 15 || m.blgp > 7) return name + ": cbsz, abid or blgp is out of range";
  if ((1 << m.cbsz) > s.blocks) {
    return name + ": cbsz " + std::to_string(m.cbsz) + " broadcasts over " +
           std::to_string(1 << m.cbsz) + " blocks and the instruction has " +
           std::to_string(s.blocks);
  }
  if (m.abid >= 1 << m.cbsz) {
    return name + ": abid " + std::to_string(m.abid) + " is not below " +
           std::to_string(1 << m.cbsz) + ", the blocks that cbsz " + std::to_string(m.cbsz) +
           " broadcasts over";
  }
  // What came with gfx940 has no lane patterns.
  const bool gfx940 = s.a == Fp8 || s.a == Bf8 || s.a == Xf32 || (s.a == I8 && s.blocks == 1);
  if (m.blgp != 0 && gfx940) return name + ": blgp " + std::to_string(m.blgp) + " is not supported";
  return "";
}

void mfma_by_element(const MfmaShape& s, const uint32_t* a, const uint32_t* b, const uint32_t* c,
                     int c_stride, uint32_t* d, const MfmaModifiers& mods) {
  std::vector<uint64_t> av(s.k), bv(s.k);
  std::vector<Number> an(s.k), bn(s.k);
  std::vector<uint32_t> out(s.d_regs * 64);
  const int a_bits = bits_of(s.a), b_bits = bits_of(s.b);
  const bool numbers = s.a != F32 && s.a != F64 && s.a != I8;
  const Summation how = summation_of(s.a);
  for (int block = 0; block < s.blocks; ++block) {
    const int a_block = (block >> mods.cbsz << mods.cbsz) + mods.abid;
    for (int i = 0; i < s.m; ++i) {
      for (int k = 0; k < s.k; ++k) {
        av[k] = element(a, mfma_a_place(s, mods.cbsz ? a_block : block, i, k), a_bits);
        if (s.a == Xf32) av[k] &= ~uint64_t(0x1fff);
        if (numbers) an[k] = decode(format_of(s.a), uint32_t(av[k]));
        if (s.a == Xf32) an[k].significand >>= an[k].kind == Number::Finite ? 13 : 0;
      }
      for (int j = 0; j < s.n; ++j) {
        for (int k = 0; k < s.k; ++k) {
          MfmaPlace p = mfma_b_place(s, block, k, j);
          if (s.a != F64) p.lane = blgp_lane(mods.blgp, p.lane);
          bv[k] = element(b, p, b_bits);
          if (s.b == Xf32) bv[k] &= ~uint64_t(0x1fff);
          if (numbers) bn[k] = decode(format_of(s.b), uint32_t(bv[k]));
          if (s.b == Xf32) bn[k].significand >>= bn[k].kind == Number::Finite ? 13 : 0;
        }
        const MfmaPlace p = mfma_d_place(s, block, i, j);
        const uint32_t* from = c + p.reg * c_stride + p.lane;
        uint32_t* to = out.data() + p.reg * 64 + p.lane;
        if (s.a == F64) {
          double x = std::bit_cast<double>(from[0] | uint64_t(from[c_stride]) << 32);
          if (mods.blgp & 4) x = -x;
          for (int k = 0; k < s.k; ++k) {
            const double ax = std::bit_cast<double>(av[k]), bx = std::bit_cast<double>(bv[k]);
            x = std::fma(mods.blgp & 1 ? -ax : ax, mods.blgp & 2 ? -bx : bx, x);
          }
          const uint64_t bits = std::isnan(x) ? 0x7ff8ull << 48 : std::bit_cast<uint64_t>(x);
          to[0] = uint32_t(bits);
          to[64] = uint32_t(bits >> 32);
        } else if (s.a == F32) {
          float x = std::bit_cast<float>(*from);
          bool finite = std::isfinite(x);
          for (int k = 0; k < s.k; ++k) {
            const float ax = std::bit_cast<float>(uint32_t(av[k]));
            const float bx = std::bit_cast<float>(uint32_t(bv[k]));
            finite &= std::isfinite(ax) && std::isfinite(bx);
            x = std::fma(ax, bx, x);
          }
          *to = clamped(x, mods.fp16_ovfl, finite);
        } else if (s.a == I8) {
          uint32_t x = *from;
          for (int k = 0; k < s.k; ++k) x += uint32_t(int8_t(av[k]) * int8_t(bv[k]));
          *to = x;
        } else {
          const auto fraction = [](MfmaType t) {
            return t == Xf32 ? 10 : format_of(t).fraction_bits;
          };
          uint32_t x = *from;
          for (int k = 0; k < s.k; k += how.group) {
            x = dot_add(&an[k], &bn[k], fraction(s.a) + fraction(s.b), how,
                        std::min<int>(how.group, s.k - k), x, mods.fp16_ovfl);
          }
          *to = x;
        }
      }
    }
  }
  std::memcpy(d, out.data(), out.size() * 4);
}

// ---- whole rows --------------------------------------------------------------------------------

namespace {

const MfmaRows& choose_rows() {
#if GFX9EMU_X86
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      return mfma_rows_avx512;
    }
    return mfma_rows_avx2;
  }
#endif
  return mfma_rows_baseline;
}

}  // namespace

void mfma(const MfmaShape& s, const uint32_t* a, const uint32_t* b, const uint32_t* c, int c_stride,
          uint32_t* d, const MfmaModifiers& mods) {
  static const MfmaRows& rows = choose_rows();
  const bool f8 = s.a == Fp8 || s.a == Bf8 || s.a == E4m3;
  bool done = false;
  if (s.blocks == 1 && mods.blgp == 0 && (f8 || s.a == F16 || s.a == Bf16)) {
    // C is read row by row while D is written.
    uint32_t copy[16 * 64];
    const uint32_t* c_end = c + (c_stride ? s.d_regs : 1) * 64;
    if (c != d && std::less<>()(c, d + s.d_regs * 64) && std::less<>()(d, c_end)) {
      std::copy(c, c_end, copy);
      c = copy;
    }
    const bool clamp = mods.fp16_ovfl;
    if (f8) {
      done = rows.f8(format_of(s.a), format_of(s.b), s.m, s.k, clamp, a, b, c, c_stride, d);
    } else if (s.a == F16) {
      done = rows.f16(s.m, clamp, a, b, c, c_stride, d);
    } else {
      done = rows.bf16(s.m, clamp, a, b, c, c_stride, d);
    }
  }
  if (!done) mfma_by_element(s, a, b, c, c_stride, d, mods);
}

}  // namespace gfx9emu
