// Each file that includes this defines GFX9EMU_SIMD_NAMESPACE and GFX9EMU_SIMD_ROWS, and is
// compiled with the flags of one instruction set. No standard library in here: its inline functions
// would be compiled with those flags and might serve the whole program.
#define HWY_COMPILE_ONLY_STATIC
#include <hwy/highway.h>

#include "gfx9emu/mfma_rows.h"

HWY_BEFORE_NAMESPACE();
namespace gfx9emu {
namespace GFX9EMU_SIMD_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// Products and their scaling are exact in T. E holds exponents.
template <typename T, typename E>
struct Types {
  using Real = T;
  using Exp = E;
  static constexpr Exp zero = sizeof(E) == 1 ? -60 : -5000;  // the exponent of zero
  static constexpr int none = sizeof(E) == 1 ? -40 : -4800;  // products are zero below it
};
using Small = Types<float, int8_t>;    // fp8, bf8, f16
using Large = Types<double, int16_t>;  // bf16

// A decoded operand: by k, then by row of A or column of B.
template <class T, int elements>
struct Decoded {
  HWY_ALIGN typename T::Real value[elements];
  HWY_ALIGN typename T::Exp exponent[elements];
};

// 2^e of every lane.
template <class D, class I>
HWY_INLINE hn::Vec<D> powers_of_two(D d, I e) {
  const hn::RebindToSigned<D> i;
  if constexpr (sizeof(hn::TFromD<D>) == 4) {
    return hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(e, hn::Set(i, 127))));
  } else {
    return hn::BitCast(d, hn::ShiftLeft<52>(hn::Add(hn::PromoteTo(i, e), hn::Set(i, 1023))));
  }
}

// Towards zero; |x| < 2^31.
template <class D>
HWY_INLINE auto truncate(D, hn::Vec<D> x) {
  const hn::Rebind<int32_t, D> i;
  if constexpr (sizeof(hn::TFromD<D>) == 8) {
    return hn::DemoteTo(i, x);
  } else {
    // Highway's conversion also saturates.
#if HWY_TARGET <= HWY_AVX3
    return hn::Vec<decltype(i)>{_mm512_cvttps_epi32(x.raw)};
#elif HWY_TARGET == HWY_AVX2
    return hn::Vec<decltype(i)>{_mm256_cvttps_epi32(x.raw)};
#else
    return hn::ConvertTo(i, x);
#endif
  }
}

// False if an element is infinite or NaN.
template <class T, int size, int count>
HWY_INLINE bool decode(const SmallFloat& f, const uint32_t* HWY_RESTRICT regs,
                       Decoded<T, size * count>& to) {
  const hn::CappedTag<uint32_t, 16> u;
  const hn::RebindToFloat<decltype(u)> f32;
  const hn::RebindToSigned<decltype(u)> i32;
  // As mfma_a_place.
  constexpr int of_lane = size * count / 64, run = of_lane > 16 ? 16 : of_lane;
  constexpr int lanes = count / of_lane;
  const auto sign_bit = hn::Set(u, f.sign()), magnitude_bits = hn::Set(u, f.sign() - 1);
  const auto first_normal = hn::Set(u, 1u << f.fraction_bits);
  const bool fnuz = f.kind == SmallFloat::Kind::fnuz, fn = f.kind == SmallFloat::Kind::fn;
  const auto last_finite = hn::Set(u, f.sign() - (fn ? 1 : 1u << f.fraction_bits) - 1);
  const auto rebias = hn::Set(u, uint32_t(127 - f.bias) << 23), one = hn::Set(u, 1u << 23);
  auto special = hn::Zero(u);
  for (int k = 0; k < count; ++k) {
    const int bit = (k % run + k / run / lanes * run) * f.bits();
    const uint32_t* from = regs + bit / 32 * 64 + k / run % lanes * size;
    for (int i = 0; i < size; i += int(hn::Lanes(u))) {
      const auto code = hn::ShiftRightSame(hn::LoadU(u, from + i), bit % 32);
      const auto sign = hn::And(code, sign_bit), magnitude = hn::And(code, magnitude_bits);
      const auto zero = hn::Eq(magnitude, hn::Zero(u));
      special = hn::Or(special, fnuz ? hn::IfThenElseZero(zero, sign)
                                     : hn::VecFromMask(u, hn::Gt(magnitude, last_finite)));
      // A subnormal has the exponent of the smallest normal and no leading 1.
      const auto subnormal = hn::VecFromMask(u, hn::Lt(magnitude, first_normal));
      const auto bits = hn::Add(hn::Add(hn::ShiftLeftSame(magnitude, 23 - f.fraction_bits), rebias),
                                hn::And(subnormal, one));
      const auto leading = hn::And(subnormal, hn::Add(rebias, one));
      const auto value = hn::Or(hn::Sub(hn::BitCast(f32, bits), hn::BitCast(f32, leading)),
                                hn::BitCast(f32, hn::ShiftLeftSame(sign, 32 - f.bits())));
      const auto e = hn::Sub(hn::BitCast(i32, hn::ShiftRight<23>(bits)), hn::Set(i32, 127));
      const auto exponent =
          hn::IfThenElse(hn::RebindMask(i32, zero), hn::Set(i32, int32_t(T::zero)), e);
      const hn::Rebind<typename T::Exp, decltype(u)> narrow;
      hn::StoreU(hn::DemoteTo(narrow, exponent), narrow, to.exponent + k * size + i);
      if constexpr (sizeof(typename T::Real) == 4) {
        hn::StoreU(value, f32, to.value + k * size + i);
      } else {
        HWY_ALIGN float part[16];
        hn::Store(value, f32, part);
        for (int n = 0; n < int(hn::Lanes(u)); ++n) to.value[k * size + i + n] = double(part[n]);
      }
    }
  }
  return hn::AllTrue(u, hn::Eq(special, hn::Zero(u)));
}

// D = sum * 2^(top - mfma_term_bits) + C, for `size` elements.
template <int size>
HWY_INLINE void add_c(const int32_t* HWY_RESTRICT sum, const int32_t* HWY_RESTRICT top, int none,
                      bool drop_c, bool clamp, const uint32_t* c, uint32_t* d) {
  constexpr int term = mfma_term_bits, more = mfma_sum_bits - mfma_term_bits;
  const hn::CappedTag<double, 8> f64;
  const hn::Rebind<int32_t, decltype(f64)> i32;
  const hn::Rebind<uint32_t, decltype(f64)> u32;
  const hn::Rebind<float, decltype(f64)> f32;
  const auto nan = hn::Set(u32, 0x7fc00000), inf = hn::Set(u32, 0x7f800000);
  for (int j = 0; j < size; j += int(hn::Lanes(f64))) {
    const auto cb = hn::LoadU(u32, c + j);
    const auto c_magnitude = hn::And(cb, hn::Set(u32, 0x7fffffff));
    const auto special = hn::Gt(c_magnitude, hn::Set(u32, 0x7f7fffff));
    const auto field = hn::BitCast(i32, hn::ShiftRight<23>(c_magnitude));
    const auto ce = hn::Sub(hn::Max(field, hn::Set(i32, 1)), hn::Set(i32, 127));
    auto t = hn::Load(i32, top + j);
    // Where all products are zero, any exponent not above C's will do.
    t = hn::IfThenElse(hn::Lt(t, hn::Set(i32, none)), hn::Set(i32, -126), t);
    const auto e = hn::Max(t, ce);
    const auto cv = hn::PromoteTo(f64, hn::BitCast(f32, hn::IfThenZeroElse(special, cb)));
    auto cs = hn::Floor(hn::Mul(cv, powers_of_two(f64, hn::Sub(hn::Set(i32, term), e))));
    if (drop_c) {
      const auto far = hn::Lt(ce, hn::Sub(e, hn::Set(i32, term + 1)));
      const hn::RebindToSigned<decltype(f64)> i64;
      cs = hn::AndNot(hn::BitCast(f64, hn::PromoteTo(i64, hn::VecFromMask(i32, far))), cs);
    }
    const auto down = powers_of_two(f64, hn::Sub(hn::Add(t, hn::Set(i32, more)), e));
    const auto s = hn::Floor(hn::Mul(hn::PromoteTo(f64, hn::Load(i32, sum + j)), down));
    const auto result = hn::MulAdd(cs, hn::Set(f64, 1 << more), s);
    const auto unit = powers_of_two(f64, hn::Sub(e, hn::Set(i32, mfma_sum_bits)));
    auto bits = hn::BitCast(u32, hn::DemoteTo(f32, hn::Mul(result, unit)));
    if (clamp) {
      const auto infinite = hn::Eq(hn::And(bits, hn::Set(u32, 0x7fffffff)), inf);
      bits = hn::Sub(bits, hn::IfThenElseZero(infinite, hn::Set(u32, 1)));
    }
    const auto kept = hn::IfThenElse(hn::Eq(c_magnitude, inf), cb, nan);
    hn::StoreU(hn::IfThenElse(special, kept, bits), u32, d + j);
  }
}

// One row of D, k from k0 to k0 + group. c and d may be the same.
template <class T, int size, int sums, int group, class D>
HWY_INLINE void row(const D& a, const D& b, int i, int k0, bool clamp, const uint32_t* c,
                    uint32_t* d) {
  using Exp = typename T::Exp;
  HWY_ALIGN Exp most[sums][size];
  const hn::CappedTag<Exp, size> exp;
  for (int j = 0; j < size; j += int(hn::Lanes(exp))) {
    for (int s = 0; s < sums; ++s) {
      auto m = hn::Set(exp, T::zero);
#pragma GCC unroll 8
      for (int k = k0 + s; k < k0 + group; k += sums) {
        const auto e = hn::Set(exp, a.exponent[k * size + i]);
        m = hn::Max(m, hn::Add(e, hn::Load(exp, b.exponent + k * size + j)));
      }
      hn::Store(m, exp, most[s] + j);
    }
  }

  HWY_ALIGN int32_t sum_of[size], top_of[size];
  const hn::CappedTag<typename T::Real, 16> real;
  const hn::Rebind<int32_t, decltype(real)> i32;
  const hn::Rebind<Exp, decltype(real)> narrow;
  for (int j = 0; j < size; j += int(hn::Lanes(real))) {
    hn::Vec<decltype(i32)> total[sums], exponent[sums];
    for (int s = 0; s < sums; ++s) {
      exponent[s] = hn::PromoteTo(i32, hn::Load(narrow, most[s] + j));
      // Zero needs no scale, and this one is in range.
      const auto e = hn::Max(exponent[s], hn::Set(i32, sizeof(Exp) == 1 ? -60 : -260));
      // Multiplying by a power of two is exact.
      const auto scale = powers_of_two(real, hn::Sub(hn::Set(i32, mfma_term_bits), e));
      total[s] = hn::Zero(i32);
#pragma GCC unroll 8
      for (int k = k0 + s; k < k0 + group; k += sums) {
        const auto p =
            hn::Mul(hn::Set(real, a.value[k * size + i]), hn::Load(real, b.value + k * size + j));
        total[s] = hn::Add(total[s], truncate(real, hn::Mul(p, scale)));
      }
    }
    auto top = exponent[0], sum = total[0];
    if constexpr (sums == 2) {
      top = hn::Max(exponent[0], exponent[1]);
      const auto all = hn::Set(i32, 31);
      sum = hn::Add(hn::Shr(total[0], hn::Min(hn::Sub(top, exponent[0]), all)),
                    hn::Shr(total[1], hn::Min(hn::Sub(top, exponent[1]), all)));
    }
    hn::Store(sum, i32, sum_of + j);
    hn::Store(top, i32, top_of + j);
  }
  add_c<size>(sum_of, top_of, T::none, sums == 2, clamp, c, d);
}

template <class T, int size, int count, int sums, int group>
HWY_INLINE bool multiply(const SmallFloat& a_format, const SmallFloat& b_format, bool clamp,
                         const uint32_t* a, const uint32_t* b, const uint32_t* c, int c_stride,
                         uint32_t* d) {
  Decoded<T, size * count> da, db;
  if (!decode<T, size, count>(a_format, a, da) || !decode<T, size, count>(b_format, b, db)) {
    return false;
  }
  if constexpr (sizeof(typename T::Exp) == 2) {
    int most_a = 0, most_b = 0;
    for (int x = 0; x < size * count; ++x) {
      most_a = da.exponent[x] > most_a ? da.exponent[x] : most_a;
      most_b = db.exponent[x] > most_b ? db.exponent[x] : most_b;
    }
    if (most_a + most_b > 126) return false;
  }
  constexpr int lanes = 64 / size;
  for (int i = 0; i < size; ++i) {
    const int reg = 4 * (i / 4 / lanes) + i % 4, lane = i / 4 % lanes * size;
    uint32_t* to = d + reg * 64 + lane;
    const uint32_t* from = c + reg * c_stride + lane;
    for (int k = 0; k < count; k += group) {
      row<T, size, sums, group>(da, db, i, k, clamp, from, to);
      from = to;
    }
  }
  return true;
}

bool f8(const SmallFloat& a_format, const SmallFloat& b_format, int size, int k, bool clamp,
        const uint32_t* a, const uint32_t* b, const uint32_t* c, int c_stride, uint32_t* d) {
  if (k == 64) {
    return multiply<Small, 32, 64, 2, 16>(a_format, b_format, clamp, a, b, c, c_stride, d);
  }
  if (k == 128) {
    return multiply<Small, 16, 128, 2, 16>(a_format, b_format, clamp, a, b, c, c_stride, d);
  }
  if (size == 32) {
    return multiply<Small, 32, 16, 2, 16>(a_format, b_format, clamp, a, b, c, c_stride, d);
  }
  return multiply<Small, 16, 32, 2, 16>(a_format, b_format, clamp, a, b, c, c_stride, d);
}
bool f16(int size, bool clamp, const uint32_t* a, const uint32_t* b, const uint32_t* c,
         int c_stride, uint32_t* d) {
  const SmallFloat& f = f16_format;
  if (size == 32) return multiply<Small, 32, 8, 1, 8>(f, f, clamp, a, b, c, c_stride, d);
  return multiply<Small, 16, 16, 1, 8>(f, f, clamp, a, b, c, c_stride, d);
}
bool bf16(int size, bool clamp, const uint32_t* a, const uint32_t* b, const uint32_t* c,
          int c_stride, uint32_t* d) {
  const SmallFloat& f = bf16_format;
  if (size == 32) return multiply<Large, 32, 8, 1, 8>(f, f, clamp, a, b, c, c_stride, d);
  return multiply<Large, 16, 16, 1, 8>(f, f, clamp, a, b, c, c_stride, d);
}

}  // namespace
}  // namespace GFX9EMU_SIMD_NAMESPACE

const MfmaRows GFX9EMU_SIMD_ROWS = {GFX9EMU_SIMD_NAMESPACE::f8, GFX9EMU_SIMD_NAMESPACE::f16,
                                    GFX9EMU_SIMD_NAMESPACE::bf16};

}  // namespace gfx9emu
HWY_AFTER_NAMESPACE();
