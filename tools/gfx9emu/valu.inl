// The vector ALU: a loop over 64 lanes for each operation. This file is compiled once per
// instruction set of the host (valu_*.cpp), each time with GFX9EMU_TARGET as its namespace. It
// calls no inline function that other files share, so that no code for a wide instruction set gets
// into their way.
#include <cmath>

#include "gfx9emu/convert.h"
#include "gfx9emu/dpp.h"
#include "gfx9emu/ops.h"
#include "gfx9emu/wave_registers.h"

#define GFX9EMU_INLINE static inline __attribute__((always_inline))

namespace gfx9emu::GFX9EMU_TARGET {
namespace {

using U16 = uint16_t;
using I16 = int16_t;
using U32 = uint32_t;
using I32 = int32_t;
using U64 = uint64_t;
using I64 = int64_t;

struct alignas(64) Lanes {
  U32 lane[64];
};
struct alignas(64) Lanes64 {
  U64 lane[64];
};

GFX9EMU_INLINE U64 exec_mask(const WaveRegisters& w) {
  return U64{w.s[126]} | U64{w.s[127]} << 32;
}

GFX9EMU_INLINE const U32* row_of(WaveRegisters& w, const RegRange& r, int i) {
  return (r.file == RegFile::Agpr ? w.a : w.v)[r.first + i].lane;
}

// dst = mask ? src : dst
GFX9EMU_INLINE void blend(U32* dst, const U32* src, U64 mask) {
  if (mask == ~U64{0}) {
    for (int i = 0; i < 64; ++i) dst[i] = src[i];
    return;
  }
  const U32 low = static_cast<U32>(mask), high = static_cast<U32>(mask >> 32);
  for (int i = 0; i < 32; ++i) dst[i] = low >> i & 1 ? src[i] : dst[i];
  for (int i = 0; i < 32; ++i) dst[i + 32] = high >> i & 1 ? src[i + 32] : dst[i + 32];
}

GFX9EMU_INLINE U32 flush(U32 bits) {
  return bits & 0x7f800000 ? bits : bits & 0x80000000;
}

// One 32-bit register of source `n`, all lanes, as bits. Points into the register file where
// nothing has to be done to the value.
GFX9EMU_INLINE const U32* raw(WaveRegisters& w, const Operand& o, int i, Lanes& temp) {
  if (o.kind == Operand::Kind::Register) {
    if (o.reg.file != RegFile::Scalar) return row_of(w, o.reg, i);
    const U32 x = w.s[o.reg.first + i];
    for (int l = 0; l < 64; ++l) temp.lane[l] = x;
    return temp.lane;
  }
  const U32 x = static_cast<U32>(i == 0 ? o.value : o.value >> 32);
  for (int l = 0; l < 64; ++l) temp.lane[l] = x;
  return temp.lane;
}

// The lanes that the result is written to: EXEC, less what DPP masks off.
__attribute__((noinline)) U64 dpp_lanes(WaveRegisters& w, const Inst& in) {
  U64 lanes = exec_mask(w);
  for (int i = 0; i < 64; ++i) {
    const bool masked = !(in.row_mask >> (i / 16) & 1) || !(in.bank_mask >> (i / 4 % 4) & 1);
    const int from = dpp_source(in, i);
    const bool outside = from < 0 || !(exec_mask(w) >> from & 1);
    if (masked || (outside && !in.bound_ctrl)) lanes &= ~(U64{1} << i);
  }
  return lanes;
}

__attribute__((noinline)) void dpp_permute(WaveRegisters& w, const Inst& in, const U32* source,
                                           Lanes& temp) {
  Lanes copy;
  for (int i = 0; i < 64; ++i) copy.lane[i] = source[i];
  for (int i = 0; i < 64; ++i) {
    const int from = dpp_source(in, i);
    temp.lane[i] = from >= 0 && (exec_mask(w) >> from & 1) ? copy.lane[from] : 0;
  }
}

__attribute__((noinline)) void sdwa_extract(const Operand& o, const U32* source, Lanes& temp) {
  const int sel = static_cast<int>(o.sel);
  if (sel < 4) {
    for (int i = 0; i < 64; ++i) {
      const U32 x = source[i] >> (8 * sel) & 0xff;
      temp.lane[i] = o.sext ? static_cast<U32>(static_cast<I32>(x << 24) >> 24) : x;
    }
  } else if (sel < 6) {
    for (int i = 0; i < 64; ++i) {
      const U32 x = source[i] >> (16 * (sel - 4)) & 0xffff;
      temp.lane[i] = o.sext ? static_cast<U32>(static_cast<I32>(x << 16) >> 16) : x;
    }
  } else {
    for (int i = 0; i < 64; ++i) temp.lane[i] = source[i];
  }
}

// Source n as 32-bit lanes: F16 widened to f32, B16 zero-extended.
template <Type type>
GFX9EMU_INLINE const U32* source(WaveRegisters& w, const Inst& in, int n, Lanes& temp) {
  const Operand& o = in.op[in.dst_count + n];
  const U32* p = raw(w, o, 0, temp);
  if (in.dpp != Dpp::None && n == 0) {
    dpp_permute(w, in, p, temp);
    p = temp.lane;
  }
  if (in.is_sdwa) {
    sdwa_extract(o, p, temp);
    p = temp.lane;
  } else if (type == Type::F16 || type == Type::B16) {
    const int shift = in.op_sel >> n & 1 ? 16 : 0;
    for (int i = 0; i < 64; ++i) temp.lane[i] = p[i] >> shift & 0xffff;
    p = temp.lane;
  }
  if constexpr (type == Type::F16) {
    for (int i = 0; i < 64; ++i) temp.lane[i] = f16_to_f32(p[i]);
    p = temp.lane;
  }
  if constexpr (type == Type::F32 || type == Type::F16) {
    if (type == Type::F32 && w.flush_f32_in) {
      for (int i = 0; i < 64; ++i) temp.lane[i] = flush(p[i]);
      p = temp.lane;
    }
    if (o.abs || o.neg) {
      const U32 keep = o.abs ? 0x7fffffff : ~0u, change = o.neg ? 0x80000000 : 0;
      for (int i = 0; i < 64; ++i) temp.lane[i] = (p[i] & keep) ^ change;
      p = temp.lane;
    }
  }
  return p;
}

template <Type type>
GFX9EMU_INLINE void source64(WaveRegisters& w, const Inst& in, int n, Lanes64& out) {
  const Operand& o = in.op[in.dst_count + n];
  Lanes t0, t1;
  const U32* low = raw(w, o, 0, t0);
  const U32* high = raw(w, o, 1, t1);
  if (in.dpp != Dpp::None && n == 0) {
    dpp_permute(w, in, low, t0);
    dpp_permute(w, in, high, t1);
    low = t0.lane;
    high = t1.lane;
  }
  U64 keep = ~U64{0}, change = 0;
  if (type == Type::F64 && o.abs) keep >>= 1;
  if (type == Type::F64 && o.neg) change = U64{1} << 63;
  for (int i = 0; i < 64; ++i) out.lane[i] = ((U64{low[i]} | U64{high[i]} << 32) & keep) ^ change;
}

GFX9EMU_INLINE U64 write_lanes(WaveRegisters& w, const Inst& in) {
  return in.dpp == Dpp::None ? exec_mask(w) : dpp_lanes(w, in);
}

__attribute__((noinline)) void output_modifiers(const WaveRegisters& w, const Inst& in, U32* out) {
  if (in.omod) {
    const float factor = in.omod == 1 ? 2.0f : in.omod == 2 ? 4.0f : 0.5f;
    for (int i = 0; i < 64; ++i) out[i] = bits_of(as_f32(out[i]) * factor);
  }
  if (in.clamp) {
    const U32 nan = w.mode >> 8 & 1 ? 0 : 0x7fc00000;  // DX10_CLAMP
    for (int i = 0; i < 64; ++i) {
      const float x = as_f32(out[i]);
      out[i] = x != x ? nan : bits_of(x > 1.0f ? 1.0f : x > 0.0f ? x : 0.0f);
    }
  }
}

// What the end of an operation does to f32 results.
GFX9EMU_INLINE void finish_f32(WaveRegisters& w, const Inst& in, U32* out, bool flushes) {
  if (in.omod | in.clamp) output_modifiers(w, in, out);
  // A NaN that the operation made itself is positive here, negative on x86.
  for (int i = 0; i < 64; ++i) out[i] = out[i] == 0xffc00000 ? 0x7fc00000 : out[i];
  if (flushes && w.flush_f32_out) {
    for (int i = 0; i < 64; ++i) out[i] = flush(out[i]);
  }
}

__attribute__((noinline)) void sdwa_insert(const Inst& in, const U32* dst, U32* out) {
  const int sel = static_cast<int>(in.dst_sel);
  const int width = sel < 4 ? 8 : 16, shift = sel < 4 ? 8 * sel : 16 * (sel - 4);
  const U32 field = ((1u << width) - 1) << shift;
  for (int i = 0; i < 64; ++i) {
    const U32 x = out[i] << shift & field;
    if (in.dst_unused == 2) {
      out[i] = (dst[i] & ~field) | x;
    } else if (in.dst_unused == 1) {
      out[i] = static_cast<U32>(static_cast<I32>(x << (32 - width - shift)) >> (32 - width))
               << shift;
    } else {
      out[i] = x;
    }
  }
}

// `out` holds f32 for F32 and F16; it is overwritten.
template <Type type>
GFX9EMU_INLINE void store(WaveRegisters& w, const Inst& in, U32* out) {
  if constexpr (type == Type::F32 || type == Type::F16) finish_f32(w, in, out, type == Type::F32);
  if constexpr (type == Type::F16) {
    const bool saturate = w.mode >> 23 & 1;
    for (int i = 0; i < 64; ++i) out[i] = f32_to_f16(out[i], saturate);
  }
  if constexpr (type == Type::B16) {
    for (int i = 0; i < 64; ++i) out[i] &= 0xffff;
  }
  U32* dst = const_cast<U32*>(row_of(w, in.op[0].reg, 0));
  if (in.is_sdwa && in.dst_sel != Sdwa::Dword) sdwa_insert(in, dst, out);
  blend(dst, out, write_lanes(w, in));
}

// 16 bits into the half that op_sel[3] names, the other half kept.
GFX9EMU_INLINE void store_half(WaveRegisters& w, const Inst& in, U32* out, bool high) {
  U32* dst = const_cast<U32*>(row_of(w, in.op[0].reg, 0));
  for (int i = 0; i < 64; ++i) {
    out[i] = high ? (dst[i] & 0xffff) | out[i] << 16 : (dst[i] & 0xffff0000) | (out[i] & 0xffff);
  }
  blend(dst, out, write_lanes(w, in));
}

template <Type type>
GFX9EMU_INLINE void store64(WaveRegisters& w, const Inst& in, U64* out) {
  if (type == Type::F64) {
    if (in.omod) {
      const double factor = in.omod == 1 ? 2.0 : in.omod == 2 ? 4.0 : 0.5;
      for (int i = 0; i < 64; ++i) out[i] = bits_of64(as_f64(out[i]) * factor);
    }
    if (in.clamp) {
      for (int i = 0; i < 64; ++i) {
        const double x = as_f64(out[i]);
        out[i] = bits_of64(x > 1.0 ? 1.0 : x > 0.0 ? x : 0.0);
      }
    }
    for (int i = 0; i < 64; ++i) {
      out[i] = out[i] == 0xfff8000000000000 ? 0x7ff8000000000000 : out[i];
    }
  }
  Lanes low, high;
  for (int i = 0; i < 64; ++i) low.lane[i] = static_cast<U32>(out[i]);
  for (int i = 0; i < 64; ++i) high.lane[i] = static_cast<U32>(out[i] >> 32);
  const U64 lanes = write_lanes(w, in);
  blend(const_cast<U32*>(row_of(w, in.op[0].reg, 0)), low.lane, lanes);
  blend(const_cast<U32*>(row_of(w, in.op[0].reg, 1)), high.lane, lanes);
}

// A lane mask into a scalar pair; lanes outside EXEC give 0.
GFX9EMU_INLINE void store_mask(WaveRegisters& w, const Operand& dst, U64 mask) {
  w.s[dst.reg.first] = static_cast<U32>(mask);
  w.s[dst.reg.first + 1] = static_cast<U32>(mask >> 32);
}

GFX9EMU_INLINE U64 load_mask(const WaveRegisters& w, const Operand& o) {
  if (!o.is_register()) return o.value;
  return U64{w.s[o.reg.first]} | U64{w.s[o.reg.first + 1]} << 32;
}

// Modifiers that an operation on bits does not have here.
GFX9EMU_INLINE bool odd_modifiers(WaveRegisters& w, const Inst& in) {
  if (!in.clamp && !in.omod) return false;
  refuse(w, "clamp and omod are not known for this operation");
  return true;
}

// --- Shapes of operations: the function, and with it the types that it takes its operands for. f
// works on bits.

template <Type from, Type to, auto f>
void unary_lanes(WaveRegisters& w, const Inst& in) {
  if ((to == Type::B32 || to == Type::B16) && odd_modifiers(w, in)) return;
  Lanes t, out;
  const U32* a = source<from>(w, in, 0, t);
  for (int i = 0; i < 64; ++i) out.lane[i] = f(a[i]);
  store<to>(w, in, out.lane);
}
template <Type from, Type to, auto f>
constexpr LaneOp unary{unary_lanes<from, to, f>, {to, {from}}};
template <Type type, auto f>
void binary_lanes(WaveRegisters& w, const Inst& in) {
  if ((type == Type::B32 || type == Type::B16) && odd_modifiers(w, in)) return;
  Lanes ta, tb, out;
  const U32* a = source<type>(w, in, 0, ta);
  const U32* b = source<type>(w, in, 1, tb);
  for (int i = 0; i < 64; ++i) out.lane[i] = f(a[i], b[i]);
  store<type>(w, in, out.lane);
}
template <Type type, auto f>
constexpr LaneOp binary{binary_lanes<type, f>, {type, {type, type}}};
template <Type type, auto f>
void ternary_lanes(WaveRegisters& w, const Inst& in) {
  if ((type == Type::B32 || type == Type::B16) && odd_modifiers(w, in)) return;
  Lanes ta, tb, tc, out;
  const U32* a = source<type>(w, in, 0, ta);
  const U32* b = source<type>(w, in, 1, tb);
  const U32* c = source<type>(w, in, 2, tc);
  for (int i = 0; i < 64; ++i) out.lane[i] = f(a[i], b[i], c[i]);
  store<type>(w, in, out.lane);
}
template <Type type, auto f>
constexpr LaneOp ternary{ternary_lanes<type, f>, {type, {type, type, type}}};
// The same with the result in half a register, the other half kept.
template <Type type>
GFX9EMU_INLINE void finish_half(WaveRegisters& w, const Inst& in, Lanes& out) {
  if (type == Type::F16) {
    finish_f32(w, in, out.lane, false);
    const bool saturate = w.mode >> 23 & 1;
    for (int i = 0; i < 64; ++i) out.lane[i] = f32_to_f16(out.lane[i], saturate);
  }
  store_half(w, in, out.lane, in.op_sel & 8);
}
template <Type type, auto f>
void binary_half_lanes(WaveRegisters& w, const Inst& in) {
  if (type == Type::B16 && odd_modifiers(w, in)) return;
  Lanes ta, tb, out;
  const U32* a = source<type>(w, in, 0, ta);
  const U32* b = source<type>(w, in, 1, tb);
  for (int i = 0; i < 64; ++i) out.lane[i] = f(a[i], b[i]);
  finish_half<type>(w, in, out);
}
template <Type type, auto f>
constexpr LaneOp binary_half{binary_half_lanes<type, f>, {type, {type, type}, Keeps::Other}};
template <Type type, auto f>
void ternary_half_lanes(WaveRegisters& w, const Inst& in) {
  if (type == Type::B16 && odd_modifiers(w, in)) return;
  Lanes ta, tb, tc, out;
  const U32* a = source<type>(w, in, 0, ta);
  const U32* b = source<type>(w, in, 1, tb);
  const U32* c = source<type>(w, in, 2, tc);
  for (int i = 0; i < 64; ++i) out.lane[i] = f(a[i], b[i], c[i]);
  finish_half<type>(w, in, out);
}
template <Type type, auto f>
constexpr LaneOp ternary_half{ternary_half_lanes<type, f>,
                              {type, {type, type, type}, Keeps::Other}};
// With clamp as saturation.
template <auto f, auto saturated>
void binary_saturating_lanes(WaveRegisters& w, const Inst& in) {
  Lanes ta, tb, out;
  const U32* a = source<Type::B32>(w, in, 0, ta);
  const U32* b = source<Type::B32>(w, in, 1, tb);
  if (in.clamp) {
    for (int i = 0; i < 64; ++i) out.lane[i] = saturated(a[i], b[i]);
  } else {
    for (int i = 0; i < 64; ++i) out.lane[i] = f(a[i], b[i]);
  }
  store<Type::B32>(w, in, out.lane);
}
template <auto f, auto saturated>
constexpr LaneOp binary_saturating{binary_saturating_lanes<f, saturated>, {}};
template <Type from, Type to, auto f>
void unary64_lanes(WaveRegisters& w, const Inst& in) {
  Lanes64 a, out;
  source64<from>(w, in, 0, a);
  for (int i = 0; i < 64; ++i) out.lane[i] = f(a.lane[i]);
  store64<to>(w, in, out.lane);
}
template <Type from, Type to, auto f>
constexpr LaneOp unary64{unary64_lanes<from, to, f>, {to, {from}}};
template <Type type, auto f>
void binary64_lanes(WaveRegisters& w, const Inst& in) {
  Lanes64 a, b, out;
  source64<type>(w, in, 0, a);
  source64<type>(w, in, 1, b);
  for (int i = 0; i < 64; ++i) out.lane[i] = f(a.lane[i], b.lane[i]);
  store64<type>(w, in, out.lane);
}
template <Type type, auto f>
constexpr LaneOp binary64{binary64_lanes<type, f>, {type, {type, type}}};
template <Type type, auto f>
void ternary64_lanes(WaveRegisters& w, const Inst& in) {
  Lanes64 a, b, c, out;
  source64<type>(w, in, 0, a);
  source64<type>(w, in, 1, b);
  source64<type>(w, in, 2, c);
  for (int i = 0; i < 64; ++i) out.lane[i] = f(a.lane[i], b.lane[i], c.lane[i]);
  store64<type>(w, in, out.lane);
}
template <Type type, auto f>
constexpr LaneOp ternary64{ternary64_lanes<type, f>, {type, {type, type, type}}};
// 64-bit value, 32-bit second source: v_ldexp_f64; `reversed`: the shifts, whose count comes first.
template <Type type, auto f, bool reversed = false>
void with_32_lanes(WaveRegisters& w, const Inst& in) {
  Lanes64 a, out;
  Lanes t;
  source64<type>(w, in, reversed ? 1 : 0, a);
  const U32* n = source<Type::B32>(w, in, reversed ? 0 : 1, t);
  for (int i = 0; i < 64; ++i) out.lane[i] = f(a.lane[i], n[i]);
  store64<type>(w, in, out.lane);
}
template <Type type, auto f, bool reversed = false>
constexpr LaneOp with_32{with_32_lanes<type, f, reversed>, reversed
                                                               ? Types{type, {Type::B32, type}}
                                                               : Types{type, {type, Type::B32}}};
template <Type from, Type to, auto f>
void widen_lanes(WaveRegisters& w, const Inst& in) {
  Lanes t;
  Lanes64 out;
  const U32* a = source<from>(w, in, 0, t);
  for (int i = 0; i < 64; ++i) out.lane[i] = f(a[i]);
  store64<to>(w, in, out.lane);
}
template <Type from, Type to, auto f>
constexpr LaneOp widen{widen_lanes<from, to, f>, {to, {from}}};
template <Type from, Type to, auto f>
void narrow_lanes(WaveRegisters& w, const Inst& in) {
  Lanes64 a;
  Lanes out;
  source64<from>(w, in, 0, a);
  for (int i = 0; i < 64; ++i) out.lane[i] = f(a.lane[i]);
  store<to>(w, in, out.lane);
}
template <Type from, Type to, auto f>
constexpr LaneOp narrow{narrow_lanes<from, to, f>, {to, {from}}};
template <Type type, auto f>
void compare_lanes(WaveRegisters& w, const Inst& in) {
  Lanes ta, tb;
  const U32* a = source<type>(w, in, 0, ta);
  const U32* b = source<type>(w, in, 1, tb);
  U64 mask = 0;
  for (int i = 0; i < 64; ++i) mask |= U64{f(a[i], b[i])} << i;
  store_mask(w, in.op[0], mask & exec_mask(w));
}
template <Type type, auto f>
constexpr LaneOp compare{compare_lanes<type, f>, {Type::B64, {type, type}}};
template <Type type, auto f>
void compare64_lanes(WaveRegisters& w, const Inst& in) {
  Lanes64 a, b;
  source64<type>(w, in, 0, a);
  source64<type>(w, in, 1, b);
  U64 mask = 0;
  for (int i = 0; i < 64; ++i) mask |= U64{f(a.lane[i], b.lane[i])} << i;
  store_mask(w, in.op[0], mask & exec_mask(w));
}
template <Type type, auto f>
constexpr LaneOp compare64{compare64_lanes<type, f>, {Type::B64, {type, type}}};
template <const LaneOp& compare_op>
void and_exec_lanes(WaveRegisters& w, const Inst& in) {
  compare_op.run(w, in);
  const RegRange dst = in.op[0].reg;
  w.s[126] = w.s[dst.first];
  w.s[127] = w.s[dst.first + 1];
}
template <const LaneOp& compare_op>
constexpr LaneOp and_exec{and_exec_lanes<compare_op>, compare_op.types};

// --- Functions of one lane.

#define F32_1(expr)             \
  [](U32 a_) -> U32 {           \
    const float a = as_f32(a_); \
    return bits_of(expr);       \
  }
#define F32_2(expr)                             \
  [](U32 a_, U32 b_) -> U32 {                   \
    const float a = as_f32(a_), b = as_f32(b_); \
    return bits_of(expr);                       \
  }
#define F32_3(expr)                                             \
  [](U32 a_, U32 b_, U32 c_) -> U32 {                           \
    const float a = as_f32(a_), b = as_f32(b_), c = as_f32(c_); \
    return bits_of(expr);                                       \
  }
#define F64_1(expr)              \
  [](U64 a_) -> U64 {            \
    const double a = as_f64(a_); \
    return bits_of64(expr);      \
  }
#define F64_2(expr)                              \
  [](U64 a_, U64 b_) -> U64 {                    \
    const double a = as_f64(a_), b = as_f64(b_); \
    return bits_of64(expr);                      \
  }
#define B1(expr) [](U32 a) -> U32 { return (expr); }
#define B2(expr) [](U32 a, U32 b) -> U32 { return (expr); }
#define B3(expr) [](U32 a, U32 b, U32 c) -> U32 { return (expr); }
#define S(x) static_cast<I32>(x)
#define S16(x) static_cast<I32>(static_cast<I16>(x))

template <class T>
GFX9EMU_INLINE T least(T a, T b) {
  return a < b ? a : b;
}
template <class T>
GFX9EMU_INLINE T most(T a, T b) {
  return a > b ? a : b;
}

// -0 is less than +0, a NaN loses against a number.
GFX9EMU_INLINE float fmin_lane(float a, float b) {
  const bool a_first = a < b || (a == b && (bits_of(a) >> 31) != 0) || b != b;
  return a_first ? a : b;
}
GFX9EMU_INLINE float fmax_lane(float a, float b) {
  const bool a_first = a > b || (a == b && (bits_of(a) >> 31) == 0) || b != b;
  return a_first ? a : b;
}
GFX9EMU_INLINE double fmin_lane(double a, double b) {
  const bool a_first = a < b || (a == b && (bits_of64(a) >> 63) != 0) || b != b;
  return a_first ? a : b;
}
GFX9EMU_INLINE double fmax_lane(double a, double b) {
  const bool a_first = a > b || (a == b && (bits_of64(a) >> 63) == 0) || b != b;
  return a_first ? a : b;
}
GFX9EMU_INLINE float fmed3_lane(float a, float b, float c) {
  if (a != a || b != b || c != c) return fmin_lane(fmin_lane(a, b), c);
  return fmax_lane(fmin_lane(a, b), fmin_lane(fmax_lane(a, b), c));
}
template <class T>
GFX9EMU_INLINE T med3_lane(T a, T b, T c) {
  return most(least(a, b), least(most(a, b), c));
}

// 2^x in double by a polynomial, rounded once; within half an ulp and a bit.
GFX9EMU_INLINE float exp2_lane(float x) {
  const bool tiny = x < -160.0f, huge = x > 160.0f;
  const double y = tiny ? -160.0 : huge ? 160.0 : x == x ? static_cast<double>(x) : 0.0;
  const double n = __builtin_floor(y + 0.5);
  const double t = (y - n) * 0.6931471805599453094;
  double p = 1.0 / 479001600.0;
  p = p * t + 1.0 / 39916800.0;
  p = p * t + 1.0 / 3628800.0;
  p = p * t + 1.0 / 362880.0;
  p = p * t + 1.0 / 40320.0;
  p = p * t + 1.0 / 5040.0;
  p = p * t + 1.0 / 720.0;
  p = p * t + 1.0 / 120.0;
  p = p * t + 1.0 / 24.0;
  p = p * t + 1.0 / 6.0;
  p = p * t + 0.5;
  p = p * t + 1.0;
  p = p * t + 1.0;
  const I64 e = static_cast<I64>(static_cast<I32>(n)) + 1023;
  const double scale = as_f64(static_cast<U64>(e) << 52);
  const float r = static_cast<float>(p * scale);
  return x != x ? x : r;
}
float log2_lane(float x) {
  return static_cast<float>(log2(static_cast<double>(x)));
}
float sin_lane(float x) {
  if (x != x || x - x != 0.0f) return as_f32(0x7fc00000);
  const double turn = static_cast<double>(x) - floor(static_cast<double>(x));
  return static_cast<float>(sin(turn * 6.283185307179586477));
}
float cos_lane(float x) {
  if (x != x || x - x != 0.0f) return as_f32(0x7fc00000);
  const double turn = static_cast<double>(x) - floor(static_cast<double>(x));
  return static_cast<float>(cos(turn * 6.283185307179586477));
}
GFX9EMU_INLINE float rcp_lane(float x) {
  return static_cast<float>(1.0 / static_cast<double>(x));
}
GFX9EMU_INLINE float rsq_lane(float x) {
  return static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(x)));
}

// The unit for these knows no subnormals, whatever MODE says.
template <Type type, auto f>
void transcendental_lanes(WaveRegisters& w, const Inst& in) {
  Lanes t, out;
  const U32* a = source<type>(w, in, 0, t);
  if (type == Type::F32) {
    for (int i = 0; i < 64; ++i) out.lane[i] = flush(bits_of(f(as_f32(flush(a[i])))));
  } else {
    for (int i = 0; i < 64; ++i) out.lane[i] = bits_of(f(as_f32(a[i])));
  }
  store<type>(w, in, out.lane);
}
template <Type type, auto f>
constexpr LaneOp transcendental{transcendental_lanes<type, f>, {type, {type}}};

GFX9EMU_INLINE I32 to_i32(double x) {
  if (x != x) return 0;
  if (x >= 2147483647.0) return 2147483647;
  if (x <= -2147483648.0) return -2147483647 - 1;
  return static_cast<I32>(x);
}
GFX9EMU_INLINE U32 to_u32(double x) {
  if (!(x > 0.0)) return 0;
  if (x >= 4294967295.0) return 0xffffffff;
  return static_cast<U32>(x);
}
GFX9EMU_INLINE U32 to_u16(float x) {
  if (!(x > 0.0f)) return 0;
  return x >= 65535.0f ? 0xffff : static_cast<U32>(x);
}
GFX9EMU_INLINE I32 to_i16(float x) {
  if (x != x) return 0;
  return x >= 32767.0f ? 32767 : x <= -32768.0f ? -32768 : static_cast<I32>(x);
}

GFX9EMU_INLINE U32 bfe_u(U32 a, U32 b, U32 c) {
  const U32 offset = b & 31, width = c & 31;
  return a >> offset & ((1u << width) - 1);
}
GFX9EMU_INLINE U32 bfe_i(U32 a, U32 b, U32 c) {
  const U32 offset = b & 31, width = c & 31;
  if (width == 0) return 0;
  if (offset + width >= 32) return static_cast<U32>(S(a) >> offset);
  return static_cast<U32>(S(a << (32 - offset - width)) >> (32 - width));
}
GFX9EMU_INLINE U32 perm_byte(U64 bytes, U32 sel) {
  if (sel < 8) return bytes >> (8 * sel) & 0xff;
  if (sel < 12) return bytes >> (16 * (sel - 8) + 15) & 1 ? 0xff : 0;  // a sign, spread
  return sel == 12 ? 0 : 0xff;
}
GFX9EMU_INLINE U32 perm(U32 a, U32 b, U32 sel) {
  const U64 bytes = U64{a} << 32 | b;
  U32 r = 0;
  for (int i = 0; i < 4; ++i) r |= perm_byte(bytes, sel >> (8 * i) & 0xff) << (8 * i);
  return r;
}
GFX9EMU_INLINE U32 reverse(U32 x) {
  x = (x >> 1 & 0x55555555) | (x & 0x55555555) << 1;
  x = (x >> 2 & 0x33333333) | (x & 0x33333333) << 2;
  x = (x >> 4 & 0x0f0f0f0f) | (x & 0x0f0f0f0f) << 4;
  return __builtin_bswap32(x);
}
GFX9EMU_INLINE I32 s24(U32 x) {
  return S(x << 8) >> 8;
}
GFX9EMU_INLINE U32 u24(U32 x) {
  return x & 0xffffff;
}

GFX9EMU_INLINE int exponent_of(float x) {  // x = m * 2^e, 0.5 <= |m| < 1
  int e = 0;
  if (x == 0.0f || x - x != 0.0f) return 0;
  frexpf(x, &e);
  return e;
}
GFX9EMU_INLINE int exponent_of(double x) {
  int e = 0;
  if (x == 0.0 || x - x != 0.0) return 0;
  frexp(x, &e);
  return e;
}
GFX9EMU_INLINE float mantissa_of(float x) {
  int e = 0;
  return x == 0.0f || x - x != 0.0f ? x : frexpf(x, &e);
}
GFX9EMU_INLINE double mantissa_of(double x) {
  int e = 0;
  return x == 0.0 || x - x != 0.0 ? x : frexp(x, &e);
}
GFX9EMU_INLINE float fract_lane(float x) {
  const float r = x - __builtin_floorf(x);
  return r >= 1.0f ? as_f32(0x3f7fffff) : r;
}
GFX9EMU_INLINE double fract_lane(double x) {
  const double r = x - __builtin_floor(x);
  return r >= 1.0 ? as_f64(0x3fefffffffffffff) : r;
}

// f16 arithmetic: products and sums of two are rounded once from f32; a fused one needs "to odd".
GFX9EMU_INLINE float fma_for_f16(float a, float b, float c) {
  const double product = static_cast<double>(a) * b;
  const double sum = product + c;
  // The exact error of the sum, to make its last bit odd where it was inexact.
  const double bb = sum - product;
  const double error = (product - (sum - bb)) + (c - bb);
  U64 bits = bits_of64(sum);
  if (error != 0.0 && error == error && (bits & 1) == 0) {
    bits += (error > 0.0) == (sum > 0.0) ? 1 : -1;
  }
  return as_f32(f64_to_f32_odd(as_f64(bits)));
}

// --- Operations with a shape of their own.

void v_cndmask_lanes(WaveRegisters& w, const Inst& in) {
  const Operand& m = in.op[3];
  const U64 mask = U64{w.s[m.reg.first]} | U64{w.s[m.reg.first + 1]} << 32;
  Lanes ta, tb, out;
  // Type float, so that neg and abs work; no flushing of subnormals.
  const Operand &oa = in.op[1], &ob = in.op[2];
  const U32* a = source<Type::B32>(w, in, 0, ta);
  const U32* b = source<Type::B32>(w, in, 1, tb);
  const U32 keep_a = oa.abs ? 0x7fffffff : ~0u, flip_a = oa.neg ? 0x80000000 : 0;
  const U32 keep_b = ob.abs ? 0x7fffffff : ~0u, flip_b = ob.neg ? 0x80000000 : 0;
  for (int i = 0; i < 64; ++i) out.lane[i] = (a[i] & keep_a) ^ flip_a;
  Lanes taken;
  for (int i = 0; i < 64; ++i) taken.lane[i] = (b[i] & keep_b) ^ flip_b;
  blend(out.lane, taken.lane, mask);
  store<Type::B32>(w, in, out.lane);
}
constexpr LaneOp v_cndmask{v_cndmask_lanes, {Type::B32, {Type::F32, Type::F32, Type::B64}}};

// Sums with carry: op 0 the sum, op 1 the carry out, op 4 the carry in.
template <bool subtract, bool reversed, bool carry_in>
void add_carry_lanes(WaveRegisters& w, const Inst& in) {
  Lanes ta, tb, out;
  const U32* a = source<Type::B32>(w, in, reversed ? 1 : 0, ta);
  const U32* b = source<Type::B32>(w, in, reversed ? 0 : 1, tb);
  const U64 carry = carry_in ? load_mask(w, in.op[4]) : 0;
  U64 result_carry = 0;
  for (int i = 0; i < 64; ++i) {
    const U64 c = carry >> i & 1;
    const U64 r = subtract ? U64{a[i]} - b[i] - c : U64{a[i]} + b[i] + c;
    out.lane[i] = static_cast<U32>(r);
    result_carry |= U64{(r >> 32 & 1) != 0} << i;
  }
  if (in.clamp) {
    for (int i = 0; i < 64; ++i) {
      if (result_carry >> i & 1) out.lane[i] = subtract ? 0 : ~0u;
    }
  }
  store<Type::B32>(w, in, out.lane);
  store_mask(w, in.op[1], result_carry & exec_mask(w));
}
template <bool subtract, bool reversed, bool carry_in>
constexpr LaneOp add_carry{add_carry_lanes<subtract, reversed, carry_in>,
                           {Type::B32, {Type::B32, Type::B32, Type::B64}}};

template <bool is_signed>
void v_mad_64_32_lanes(WaveRegisters& w, const Inst& in) {
  Lanes ta, tb;
  Lanes64 c, out;
  const U32* a = source<Type::B32>(w, in, 0, ta);
  const U32* b = source<Type::B32>(w, in, 1, tb);
  source64<Type::B64>(w, in, 2, c);
  U64 carry = 0;
  for (int i = 0; i < 64; ++i) {
    const U64 product = is_signed ? static_cast<U64>(I64{S(a[i])} * S(b[i])) : U64{a[i]} * b[i];
    out.lane[i] = product + c.lane[i];
    bool over = out.lane[i] < product;
    if (is_signed) {
      I64 ignored;
      over =
          __builtin_add_overflow(static_cast<I64>(product), static_cast<I64>(c.lane[i]), &ignored);
    }
    carry |= U64{over} << i;
  }
  store64<Type::B64>(w, in, out.lane);
  store_mask(w, in.op[1], carry & exec_mask(w));
}
template <bool is_signed>
constexpr LaneOp v_mad_64_32{v_mad_64_32_lanes<is_signed>,
                             {Type::B64, {Type::B32, Type::B32, Type::B64}}};

void v_lshl_add_u64_lanes(WaveRegisters& w, const Inst& in) {
  Lanes64 a, c, out;
  Lanes t;
  source64<Type::B64>(w, in, 0, a);
  const U32* n = source<Type::B32>(w, in, 1, t);
  source64<Type::B64>(w, in, 2, c);
  for (int i = 0; i < 64; ++i) out.lane[i] = (a.lane[i] << (n[i] & 7)) + c.lane[i];
  store64<Type::B64>(w, in, out.lane);
}
constexpr LaneOp v_lshl_add_u64{v_lshl_add_u64_lanes,
                                {Type::B64, {Type::B64, Type::B32, Type::B64}}};

// fmac: the destination is the third source.
template <Type type>
void fmac_lanes(WaveRegisters& w, const Inst& in) {
  if constexpr (type == Type::F64) {
    Lanes64 a, b, c, out;
    source64<type>(w, in, 0, a);
    source64<type>(w, in, 1, b);
    source64<type>(w, in, -1, c);
    for (int i = 0; i < 64; ++i) {
      out.lane[i] =
          bits_of64(__builtin_fma(as_f64(a.lane[i]), as_f64(b.lane[i]), as_f64(c.lane[i])));
    }
    store64<type>(w, in, out.lane);
  } else {
    Lanes ta, tb, tc, out;
    const U32* a = source<type>(w, in, 0, ta);
    const U32* b = source<type>(w, in, 1, tb);
    const U32* c = row_of(w, in.op[0].reg, 0);
    if (w.flush_f32_in) {
      for (int i = 0; i < 64; ++i) tc.lane[i] = flush(c[i]);
      c = tc.lane;
    }
    for (int i = 0; i < 64; ++i) {
      out.lane[i] = bits_of(__builtin_fmaf(as_f32(a[i]), as_f32(b[i]), as_f32(c[i])));
    }
    store<type>(w, in, out.lane);
  }
}
template <Type type>
constexpr LaneOp fmac{fmac_lanes<type>, {type, {type, type}}};

// Sources of packed f32: op_sel names the register for the low result, op_sel_hi for the high one.
const U32* packed_source(WaveRegisters& w, const Inst& in, int n, bool high, Lanes& temp) {
  const Operand& o = in.op[1 + n];
  const bool second = (high ? in.op_sel_hi : in.op_sel) >> n & 1;
  if (!o.is_register()) {
    if (second) {
      refuse(w, "a constant with the high half selected is not known");
    }
    return raw(w, o, 0, temp);
  }
  const U32* p = raw(w, o, second ? 1 : 0, temp);
  if (w.flush_f32_in) {
    for (int i = 0; i < 64; ++i) temp.lane[i] = flush(p[i]);
    p = temp.lane;
  }
  if ((high ? in.neg_hi : in.neg_lo) >> n & 1) {
    for (int i = 0; i < 64; ++i) temp.lane[i] = p[i] ^ 0x80000000;
    p = temp.lane;
  }
  return p;
}
template <int sources, auto f>
void packed_f32_lanes(WaveRegisters& w, const Inst& in) {
  Lanes out[2], ta, tb, tc;
  for (int half = 0; half < 2; ++half) {
    const U32* a = packed_source(w, in, 0, half, ta);
    const U32* b = packed_source(w, in, 1, half, tb);
    const U32* c = sources == 3 ? packed_source(w, in, 2, half, tc) : a;
    if (w.failed) return;
    U32* o = out[half].lane;
    for (int i = 0; i < 64; ++i) o[i] = bits_of(f(as_f32(a[i]), as_f32(b[i]), as_f32(c[i])));
    finish_f32(w, in, o, true);
  }
  const U64 lanes = exec_mask(w);
  for (int half = 0; half < 2; ++half) {
    blend(const_cast<U32*>(row_of(w, in.op[0].reg, half)), out[half].lane, lanes);
  }
}
template <int sources, auto f>
constexpr LaneOp packed_f32{packed_f32_lanes<sources, f>,
                            {Type::PkF32, {Type::PkF32, Type::PkF32, Type::PkF32}}};
void v_pk_mov_b32_lanes(WaveRegisters& w, const Inst& in) {
  // The low result comes from source 0, the high one from source 1, each by its op_sel.
  Lanes ta, tb, out[2];
  const bool a_high = in.op_sel & 1, b_high = in.op_sel & 2;
  if ((!in.op[1].is_register() && a_high) || (!in.op[2].is_register() && b_high)) {
    refuse(w, "a constant with the high half selected is not known");
    return;
  }
  const U32* a = raw(w, in.op[1], a_high, ta);
  const U32* b = raw(w, in.op[2], b_high, tb);
  for (int i = 0; i < 64; ++i) out[0].lane[i] = a[i];
  for (int i = 0; i < 64; ++i) out[1].lane[i] = b[i];
  blend(const_cast<U32*>(row_of(w, in.op[0].reg, 0)), out[0].lane, exec_mask(w));
  blend(const_cast<U32*>(row_of(w, in.op[0].reg, 1)), out[1].lane, exec_mask(w));
}
constexpr LaneOp v_pk_mov_b32{v_pk_mov_b32_lanes, {Type::PkB32, {Type::PkB32, Type::PkB32}}};

// One half of a packed 16-bit source, zero-extended.
GFX9EMU_INLINE const U32* half_source(WaveRegisters& w, const Inst& in, int n, bool high,
                                      bool is_float, Lanes& temp) {
  const U32* p = raw(w, in.op[1 + n], 0, temp);
  if (in.dpp != Dpp::None && n == 0) {
    dpp_permute(w, in, p, temp);
    p = temp.lane;
  }
  const int shift = (high ? in.op_sel_hi : in.op_sel) >> n & 1 ? 16 : 0;
  const U32 flip = is_float && ((high ? in.neg_hi : in.neg_lo) >> n & 1) ? 0x8000 : 0;
  for (int i = 0; i < 64; ++i) temp.lane[i] = (p[i] >> shift & 0xffff) ^ flip;
  return temp.lane;
}
template <int sources, bool is_float, auto f, bool dst_is_third = false>
void packed_16_lanes(WaveRegisters& w, const Inst& in) {
  if (!is_float && in.clamp) {
    refuse(w, "clamp is not known for this operation");
    return;
  }
  Lanes result, ta, tb, tc, part;
  const bool saturate = w.mode >> 23 & 1;
  for (int half = 0; half < 2; ++half) {
    half_source(w, in, 0, half, is_float, ta);
    half_source(w, in, 1, half, is_float, tb);
    if (sources == 3 && !dst_is_third) half_source(w, in, 2, half, is_float, tc);
    if (dst_is_third) {
      const U32* d = row_of(w, in.op[0].reg, 0);
      for (int i = 0; i < 64; ++i) tc.lane[i] = d[i] >> (16 * half) & 0xffff;
    }
    if (sources == 2) tc = ta;
    for (int i = 0; i < 64; ++i) {
      if constexpr (is_float) {
        part.lane[i] = bits_of(f(as_f32(f16_to_f32(ta.lane[i])), as_f32(f16_to_f32(tb.lane[i])),
                                 as_f32(f16_to_f32(tc.lane[i]))));
      } else {
        part.lane[i] = f(ta.lane[i], tb.lane[i], tc.lane[i]) & 0xffff;
      }
    }
    if (is_float) {
      finish_f32(w, in, part.lane, false);
      for (int i = 0; i < 64; ++i) part.lane[i] = f32_to_f16(part.lane[i], saturate);
    }
    for (int i = 0; i < 64; ++i) {
      result.lane[i] = half ? result.lane[i] | part.lane[i] << 16 : part.lane[i];
    }
  }
  blend(const_cast<U32*>(row_of(w, in.op[0].reg, 0)), result.lane, write_lanes(w, in));
}
template <int sources, bool is_float, auto f, bool dst_is_third = false,
          Type type = is_float ? Type::PkF16 : Type::PkB16>
constexpr LaneOp packed_16{packed_16_lanes<sources, is_float, f, dst_is_third>,
                           {type, {type, type, type}}};

// Mixed precision: op_sel_hi makes a source f16, op_sel takes its high half.
const U32* mix_source(WaveRegisters& w, const Inst& in, int n, Lanes& temp) {
  const Operand& o = in.op[1 + n];
  const U32* p = raw(w, o, 0, temp);
  const U32 keep = in.neg_hi >> n & 1 || o.abs ? 0x7fffffff : ~0u;
  const U32 flip = in.neg_lo >> n & 1 || o.neg ? 0x80000000 : 0;
  if (in.op_sel_hi >> n & 1) {
    const int shift = in.op_sel >> n & 1 ? 16 : 0;
    for (int i = 0; i < 64; ++i) temp.lane[i] = f16_to_f32(p[i] >> shift & 0xffff);
  } else {
    const bool flushes = w.flush_f32_in;
    for (int i = 0; i < 64; ++i) temp.lane[i] = flushes ? flush(p[i]) : p[i];
  }
  for (int i = 0; i < 64; ++i) temp.lane[i] = (temp.lane[i] & keep) ^ flip;
  return temp.lane;
}
enum class MixTo { F32, Low, High };
template <MixTo to>
void v_fma_mix_lanes(WaveRegisters& w, const Inst& in) {
  Lanes ta, tb, tc, out;
  const U32* a = mix_source(w, in, 0, ta);
  const U32* b = mix_source(w, in, 1, tb);
  const U32* c = mix_source(w, in, 2, tc);
  for (int i = 0; i < 64; ++i) {
    out.lane[i] = bits_of(__builtin_fmaf(as_f32(a[i]), as_f32(b[i]), as_f32(c[i])));
  }
  if (to == MixTo::F32) {
    store<Type::F32>(w, in, out.lane);
    return;
  }
  finish_f32(w, in, out.lane, true);
  const bool saturate = w.mode >> 23 & 1;
  for (int i = 0; i < 64; ++i) out.lane[i] = f32_to_f16(out.lane[i], saturate);
  store_half(w, in, out.lane, to == MixTo::High);
}
template <MixTo to>
constexpr LaneOp v_fma_mix{v_fma_mix_lanes<to>,
                           {to == MixTo::F32 ? Type::F32 : Type::F16,
                            {Type::Mix, Type::Mix, Type::Mix},
                            to == MixTo::F32   ? Keeps::Nothing
                            : to == MixTo::Low ? Keeps::High
                                               : Keeps::Low}};

template <int mantissa, int bias>
void v_cvt_pk_f8_lanes(WaveRegisters& w, const Inst& in) {
  Lanes ta, tb, out;
  const U32* a = source<Type::F32>(w, in, 0, ta);
  const U32* b = source<Type::F32>(w, in, 1, tb);
  const bool saturate = w.mode >> 23 & 1;  // FP16_OVFL
  for (int i = 0; i < 64; ++i) {
    out.lane[i] =
        f32_to_f8<mantissa, bias>(a[i], saturate) | f32_to_f8<mantissa, bias>(b[i], saturate) << 8;
  }
  store_half(w, in, out.lane, in.op_sel & 8);
}
template <int mantissa, int bias>
constexpr LaneOp v_cvt_pk_f8{v_cvt_pk_f8_lanes<mantissa, bias>,
                             {Type::Fp8, {Type::F32, Type::F32}, Keeps::Other}};
template <int mantissa, int bias>
void v_cvt_sr_f8_lanes(WaveRegisters& w, const Inst& in) {
  Lanes ta, tb, out;
  const U32* a = source<Type::F32>(w, in, 0, ta);
  const U32* b = source<Type::B32>(w, in, 1, tb);
  const bool saturate = w.mode >> 23 & 1;
  const int shift = 8 * (in.op_sel >> 2 & 3);
  U32* dst = const_cast<U32*>(row_of(w, in.op[0].reg, 0));
  for (int i = 0; i < 64; ++i) {
    const U32 code = f32_to_f8_stochastic<mantissa, bias>(a[i], b[i], saturate);
    out.lane[i] = (dst[i] & ~(0xffu << shift)) | code << shift;
  }
  blend(dst, out.lane, exec_mask(w));
}
template <int mantissa, int bias>
constexpr LaneOp v_cvt_sr_f8{v_cvt_sr_f8_lanes<mantissa, bias>,
                             {Type::Fp8, {Type::F32, Type::B32}, Keeps::Other}};
template <auto decode>
void v_cvt_f32_f8_lanes(WaveRegisters& w, const Inst& in) {
  Lanes t, out;
  const U32* a = source<Type::B32>(w, in, 0, t);
  for (int i = 0; i < 64; ++i) out.lane[i] = decode(a[i] & 0xff);
  store<Type::F32>(w, in, out.lane);
}
template <auto decode>
constexpr LaneOp v_cvt_f32_f8{v_cvt_f32_f8_lanes<decode>, {Type::F32, {Type::Fp8}}};
template <auto decode>
void v_cvt_pk_f32_f8_lanes(WaveRegisters& w, const Inst& in) {
  Lanes t, low, high;
  const U32* a = source<Type::B32>(w, in, 0, t);  // SDWA or op_sel pick the word
  const int shift = !in.is_sdwa && in.op_sel & 1 ? 16 : 0;
  for (int i = 0; i < 64; ++i) low.lane[i] = decode(a[i] >> shift & 0xff);
  for (int i = 0; i < 64; ++i) high.lane[i] = decode(a[i] >> (shift + 8) & 0xff);
  finish_f32(w, in, low.lane, false);
  finish_f32(w, in, high.lane, false);
  const U64 lanes = write_lanes(w, in);
  blend(const_cast<U32*>(row_of(w, in.op[0].reg, 0)), low.lane, lanes);
  blend(const_cast<U32*>(row_of(w, in.op[0].reg, 1)), high.lane, lanes);
}
template <auto decode>
constexpr LaneOp v_cvt_pk_f32_f8{v_cvt_pk_f32_f8_lanes<decode>, {Type::PkF32, {Type::Fp8}}};

// Two sources into two halves.
template <Type from, auto f>
void pack_halves_lanes(WaveRegisters& w, const Inst& in) {
  Lanes ta, tb, out;
  const U32* a = source<from>(w, in, 0, ta);
  const U32* b = source<from>(w, in, 1, tb);
  for (int i = 0; i < 64; ++i) out.lane[i] = (f(a[i]) & 0xffff) | f(b[i]) << 16;
  store<Type::B32>(w, in, out.lane);
}
template <Type from, auto f>
constexpr LaneOp pack_halves{pack_halves_lanes<from, f>, {Type::B32, {from, from}}};
void v_pack_b32_f16_lanes(WaveRegisters& w, const Inst& in) {
  Lanes ta, tb, out;
  const U32* a = source<Type::B16>(w, in, 0, ta);
  const U32* b = source<Type::B16>(w, in, 1, tb);
  const U32 fa = in.op[1].neg ? 0x8000 : 0, ka = in.op[1].abs ? 0x7fff : 0xffff;
  const U32 fb = in.op[2].neg ? 0x8000 : 0, kb = in.op[2].abs ? 0x7fff : 0xffff;
  for (int i = 0; i < 64; ++i) out.lane[i] = ((a[i] & ka) ^ fa) | ((b[i] & kb) ^ fb) << 16;
  store<Type::B32>(w, in, out.lane);
}
constexpr LaneOp v_pack_b32_f16{v_pack_b32_f16_lanes, {Type::B32, {Type::F16, Type::F16}}};

// x * 2^n with one rounding.
void v_ldexp_f32_lanes(WaveRegisters& w, const Inst& in) {
  Lanes ta, tb, out;
  const U32* a = source<Type::F32>(w, in, 0, ta);
  const U32* b = source<Type::B32>(w, in, 1, tb);
  for (int i = 0; i < 64; ++i) {
    I32 n = S(b[i]);
    n = n > 600 ? 600 : n < -600 ? -600 : n;
    const double scale = as_f64(static_cast<U64>(n + 1023) << 52);
    out.lane[i] = bits_of(static_cast<float>(static_cast<double>(as_f32(a[i])) * scale));
  }
  store<Type::F32>(w, in, out.lane);
}
constexpr LaneOp v_ldexp_f32{v_ldexp_f32_lanes, {Type::F32, {Type::F32, Type::B32}}};
void v_ldexp_f16_lanes(WaveRegisters& w, const Inst& in) {
  // The exponent is an integer; LLVM encodes its constants as f16.
  Lanes ta, tb, out;
  const U32* a = source<Type::F16>(w, in, 0, ta);
  const U32* b = source<Type::B16>(w, in, 1, tb);
  for (int i = 0; i < 64; ++i) {
    const I32 n = S16(b[i]), m = n > 60 ? 60 : n < -60 ? -60 : n;
    out.lane[i] = bits_of(as_f32(a[i]) * as_f32(static_cast<U32>(m + 127) << 23));
  }
  store<Type::F16>(w, in, out.lane);
}
constexpr LaneOp v_ldexp_f16{v_ldexp_f16_lanes, {Type::F16, {Type::F16, Type::F16}}};

// Division in steps, as the compiler uses them: scale, estimate, refine, fix up.
template <class T>
struct Float;
template <>
struct Float<float> {
  // Quotients of 2^wide and more, and numerators below 2^narrow, are scaled.
  static constexpr int scale = 64, emin = -126, precision = 23, wide = 96, narrow = -104;
};
template <>
struct Float<double> {
  static constexpr int scale = 128, emin = -1022, precision = 52, wide = 768, narrow = -970;
};
GFX9EMU_INLINE float scale_by(float x, int n) {
  return ldexpf(x, n);
}
GFX9EMU_INLINE double scale_by(double x, int n) {
  return ldexp(x, n);
}
GFX9EMU_INLINE bool is_nan(double x) {
  return x != x;
}
GFX9EMU_INLINE bool is_inf(double x) {
  return x == x && x - x != 0.0;
}
template <class T>
GFX9EMU_INLINE bool is_subnormal(T x) {
  return x != T{0} && __builtin_fabs(static_cast<double>(x)) < __builtin_ldexp(1.0, Float<T>::emin);
}
template <>
inline bool is_subnormal<double>(double x) {
  return x != 0.0 && __builtin_fabs(x) < 0x1p-1022;
}
template <class T>
T nan_of();
template <>
float nan_of<float>() {
  return as_f32(0x7fc00000);
}
template <>
double nan_of<double>() {
  return as_f64(0x7ff8000000000000);
}

// S0 is S1 or S2, whichever is to be scaled; S1 the denominator, S2 the numerator.
template <class T>
T div_scale(T s0, T s1, T s2, bool& vcc) {
  vcc = false;
  if (s2 == T{0} || s1 == T{0}) return nan_of<T>();
  const int e1 = exponent_of(s1) - 1, e2 = exponent_of(s2) - 1;
  const int up = Float<T>::scale;
  if (e2 - e1 >= Float<T>::wide) {
    vcc = true;
    return s0 == s1 ? scale_by(s0, up) : s0;
  }
  if (is_subnormal(s1)) return scale_by(s0, up);
  const T inverse = T{1} / s1, quotient = s2 / s1;
  if (is_subnormal(inverse) && is_subnormal(quotient)) {
    vcc = true;
    return s0 == s1 ? scale_by(s0, up) : s0;
  }
  if (is_subnormal(inverse)) return scale_by(s0, -up);
  if (is_subnormal(quotient)) {
    vcc = true;
    return s0 == s2 ? scale_by(s0, up) : s0;
  }
  if (e2 <= Float<T>::narrow) return scale_by(s0, up);
  return s0;
}
template <class T>
T div_fixup(T s0, T s1, T s2) {
  const bool negative = __builtin_signbit(s1) != __builtin_signbit(s2);
  if (is_nan(s2)) return s2;
  if (is_nan(s1)) return s1;
  if ((s1 == T{0} && s2 == T{0}) || (is_inf(s1) && is_inf(s2))) return nan_of<T>();
  const T infinity = static_cast<T>(__builtin_inf());
  if (s1 == T{0} || is_inf(s2)) return negative ? -infinity : infinity;
  if (is_inf(s1) || s2 == T{0}) return negative ? -T{0} : T{0};
  if (exponent_of(s2) - exponent_of(s1) < Float<T>::emin - Float<T>::precision - 1) {
    return negative ? -T{0} : T{0};
  }
  const T magnitude = s0 < T{0} || (s0 == T{0} && __builtin_signbit(s0)) ? -s0 : s0;
  return negative ? -magnitude : magnitude;
}
void v_div_scale_f32_lanes(WaveRegisters& w, const Inst& in) {
  Lanes ta, tb, tc, out;
  const U32* a = source<Type::F32>(w, in, 0, ta);
  const U32* b = source<Type::F32>(w, in, 1, tb);
  const U32* c = source<Type::F32>(w, in, 2, tc);
  U64 mask = 0;
  for (int i = 0; i < 64; ++i) {
    bool vcc = false;
    out.lane[i] = bits_of(div_scale(as_f32(a[i]), as_f32(b[i]), as_f32(c[i]), vcc));
    mask |= U64{vcc} << i;
  }
  store<Type::F32>(w, in, out.lane);
  store_mask(w, in.op[1], mask & exec_mask(w));
}
constexpr LaneOp v_div_scale_f32{v_div_scale_f32_lanes,
                                 {Type::F32, {Type::F32, Type::F32, Type::F32}}};
void v_div_scale_f64_lanes(WaveRegisters& w, const Inst& in) {
  Lanes64 a, b, c, out;
  source64<Type::F64>(w, in, 0, a);
  source64<Type::F64>(w, in, 1, b);
  source64<Type::F64>(w, in, 2, c);
  U64 mask = 0;
  for (int i = 0; i < 64; ++i) {
    bool vcc = false;
    out.lane[i] =
        bits_of64(div_scale(as_f64(a.lane[i]), as_f64(b.lane[i]), as_f64(c.lane[i]), vcc));
    mask |= U64{vcc} << i;
  }
  store64<Type::F64>(w, in, out.lane);
  store_mask(w, in.op[1], mask & exec_mask(w));
}
constexpr LaneOp v_div_scale_f64{v_div_scale_f64_lanes,
                                 {Type::F64, {Type::F64, Type::F64, Type::F64}}};
U64 vcc_mask(WaveRegisters& w) {
  return U64{w.s[106]} | U64{w.s[107]} << 32;
}
void v_div_fmas_f32_lanes(WaveRegisters& w, const Inst& in) {
  Lanes ta, tb, tc, out;
  const U32* a = source<Type::F32>(w, in, 0, ta);
  const U32* b = source<Type::F32>(w, in, 1, tb);
  const U32* c = source<Type::F32>(w, in, 2, tc);
  const U64 vcc = vcc_mask(w);
  for (int i = 0; i < 64; ++i) {
    const float r = __builtin_fmaf(as_f32(a[i]), as_f32(b[i]), as_f32(c[i]));
    // Which way depends on the addend, that was scaled along.
    const int n = exponent_of(as_f32(c[i])) - 1 > 0 ? 64 : -64;
    out.lane[i] = bits_of(vcc >> i & 1 ? ldexpf(r, n) : r);
  }
  store<Type::F32>(w, in, out.lane);
}
constexpr LaneOp v_div_fmas_f32{v_div_fmas_f32_lanes,
                                {Type::F32, {Type::F32, Type::F32, Type::F32}}};
void v_div_fmas_f64_lanes(WaveRegisters& w, const Inst& in) {
  Lanes64 a, b, c, out;
  source64<Type::F64>(w, in, 0, a);
  source64<Type::F64>(w, in, 1, b);
  source64<Type::F64>(w, in, 2, c);
  const U64 vcc = vcc_mask(w);
  for (int i = 0; i < 64; ++i) {
    const double r = __builtin_fma(as_f64(a.lane[i]), as_f64(b.lane[i]), as_f64(c.lane[i]));
    const int n = exponent_of(as_f64(c.lane[i])) - 1 > 0 ? 128 : -128;
    out.lane[i] = bits_of64(vcc >> i & 1 ? ldexp(r, n) : r);
  }
  store64<Type::F64>(w, in, out.lane);
}
constexpr LaneOp v_div_fmas_f64{v_div_fmas_f64_lanes,
                                {Type::F64, {Type::F64, Type::F64, Type::F64}}};

// Classes: signalling NaN, quiet NaN, -inf, -normal, -subnormal, -0, +0, +subnormal, +normal, +inf.
GFX9EMU_INLINE int class_of(U64 magnitude, bool negative, U64 quiet, U64 infinity, U64 normal) {
  if (magnitude > infinity) return magnitude & quiet ? 1 : 0;
  const int c = magnitude == infinity ? 0 : magnitude >= normal ? 1 : magnitude != 0 ? 2 : 3;
  return negative ? 2 + c : 9 - c;
}
void v_cmp_class_f32_lanes(WaveRegisters& w, const Inst& in) {
  Lanes ta, tb;
  const U32* a = source<Type::F32>(w, in, 0, ta);
  const U32* b = source<Type::B32>(w, in, 1, tb);
  U64 mask = 0;
  for (int i = 0; i < 64; ++i) {
    const int c = class_of(a[i] & 0x7fffffff, a[i] >> 31, 0x400000, 0x7f800000, 0x800000);
    mask |= U64{b[i] >> c & 1} << i;
  }
  store_mask(w, in.op[0], mask & exec_mask(w));
}
constexpr LaneOp v_cmp_class_f32{v_cmp_class_f32_lanes, {Type::B64, {Type::F32, Type::B32}}};
void v_cmp_class_f16_lanes(WaveRegisters& w, const Inst& in) {
  Lanes ta, tb;
  const U32* a = source<Type::B16>(w, in, 0, ta);
  const U32* b = source<Type::B32>(w, in, 1, tb);
  const U32 keep = in.op[1].abs ? 0x7fff : 0xffff, flip = in.op[1].neg ? 0x8000 : 0;
  U64 mask = 0;
  for (int i = 0; i < 64; ++i) {
    const U32 x = (a[i] & keep) ^ flip;
    mask |= U64{b[i] >> class_of(x & 0x7fff, x >> 15, 0x200, 0x7c00, 0x400) & 1} << i;
  }
  store_mask(w, in.op[0], mask & exec_mask(w));
}
constexpr LaneOp v_cmp_class_f16{v_cmp_class_f16_lanes, {Type::B64, {Type::F16, Type::B32}}};
void v_cmp_class_f64_lanes(WaveRegisters& w, const Inst& in) {
  Lanes64 a;
  Lanes tb;
  source64<Type::F64>(w, in, 0, a);
  const U32* b = source<Type::B32>(w, in, 1, tb);
  U64 mask = 0;
  for (int i = 0; i < 64; ++i) {
    const int c = class_of(a.lane[i] & ~(U64{1} << 63), a.lane[i] >> 63, U64{1} << 51,
                           U64{0x7ff} << 52, U64{1} << 52);
    mask |= U64{b[i] >> c & 1} << i;
  }
  store_mask(w, in.op[0], mask & exec_mask(w));
}
constexpr LaneOp v_cmp_class_f64{v_cmp_class_f64_lanes, {Type::B64, {Type::F64, Type::B32}}};

void v_swap_b32_lanes(WaveRegisters& w, const Inst& in) {
  U32* a = const_cast<U32*>(row_of(w, in.op[0].reg, 0));
  U32* b = const_cast<U32*>(row_of(w, in.op[1].reg, 0));
  Lanes ca, cb;
  for (int i = 0; i < 64; ++i) ca.lane[i] = a[i], cb.lane[i] = b[i];
  blend(a, cb.lane, exec_mask(w));
  blend(b, ca.lane, exec_mask(w));
}
constexpr LaneOp v_swap_b32{v_swap_b32_lanes, {}};
// Lanes 32 to 63 of the first with lanes 0 to 31 of the second.
void v_permlane32_swap_b32_lanes(WaveRegisters& w, const Inst& in) {
  U32* a = const_cast<U32*>(row_of(w, in.op[0].reg, 0));
  U32* b = const_cast<U32*>(row_of(w, in.op[1].reg, 0));
  Lanes ca, cb;
  for (int i = 0; i < 32; ++i) {
    ca.lane[i] = a[i], ca.lane[32 + i] = b[i];
    cb.lane[i] = a[32 + i], cb.lane[32 + i] = b[32 + i];
  }
  blend(a, ca.lane, exec_mask(w));
  blend(b, cb.lane, exec_mask(w));
}
constexpr LaneOp v_permlane32_swap_b32{v_permlane32_swap_b32_lanes, {}};
void v_nop(WaveRegisters&, const Inst&) {}

// Dot products sum onto the third source or, in the "c" forms, onto the destination.
template <Type type>
const U32* summand(WaveRegisters& w, const Inst& in, bool onto_dst, Lanes& temp) {
  return onto_dst ? row_of(w, in.op[0].reg, 0) : source<type>(w, in, 2, temp);
}
GFX9EMU_INLINE bool odd_halves(WaveRegisters& w, const Inst& in) {
  if (in.op_sel == 0 && (in.op_sel_hi & 3) == 3) return false;
  refuse(w, "op_sel is not known for this operation");
  return true;
}
template <int bits, bool is_signed, bool onto_dst>
void integer_dot_lanes(WaveRegisters& w, const Inst& in) {
  if (odd_halves(w, in)) return;
  Lanes ta, tb, tc, out;
  const U32* a = source<Type::B32>(w, in, 0, ta);
  const U32* b = source<Type::B32>(w, in, 1, tb);
  const U32* c = summand<Type::B32>(w, in, onto_dst, tc);
  for (int i = 0; i < 64; ++i) {
    I64 sum = is_signed ? I64{S(c[i])} : I64{c[i]};
    for (int k = 0; k < 32; k += bits) {
      const U32 x = a[i] << (32 - bits - k), y = b[i] << (32 - bits - k);
      sum += is_signed ? I64{S(x) >> (32 - bits)} * (S(y) >> (32 - bits))
                       : I64{x >> (32 - bits)} * (y >> (32 - bits));
    }
    if (in.clamp) {
      const I64 low = is_signed ? -2147483648ll : 0, high = is_signed ? 2147483647ll : 4294967295ll;
      sum = sum < low ? low : sum > high ? high : sum;
    }
    out.lane[i] = static_cast<U32>(sum);
  }
  blend(const_cast<U32*>(row_of(w, in.op[0].reg, 0)), out.lane, write_lanes(w, in));
}
template <int bits, bool is_signed, bool onto_dst>
constexpr LaneOp integer_dot{integer_dot_lanes<bits, is_signed, onto_dst>, {}};
// Two f16 products; the sum is kept exact to f64 and rounded once.
template <bool onto_dst>
void dot2_f32_f16_lanes(WaveRegisters& w, const Inst& in) {
  if (odd_halves(w, in)) return;
  Lanes ta, tb, tc, out;
  double sum[64] = {};
  for (int half = 0; half < 2; ++half) {
    const U32* a = half_source(w, in, 0, half, true, ta);
    const U32* b = half_source(w, in, 1, half, true, tb);
    for (int i = 0; i < 64; ++i) {
      sum[i] += static_cast<double>(as_f32(f16_to_f32(a[i]))) * as_f32(f16_to_f32(b[i]));
    }
  }
  const U32* c = summand<Type::F32>(w, in, onto_dst, tc);
  for (int i = 0; i < 64; ++i) out.lane[i] = bits_of(static_cast<float>(sum[i] + as_f32(c[i])));
  store<Type::F32>(w, in, out.lane);
}
template <bool onto_dst>
constexpr LaneOp dot2_f32_f16{dot2_f32_f16_lanes<onto_dst>,
                              {Type::F32, {Type::PkF16, Type::PkF16, Type::F32}}};
template <bool high>
void v_mbcnt_lanes(WaveRegisters& w, const Inst& in) {
  Lanes ta, tb, out;
  const U32* a = source<Type::B32>(w, in, 0, ta);
  const U32* b = source<Type::B32>(w, in, 1, tb);
  for (int i = 0; i < 64; ++i) {
    const U64 below = (U64{1} << i) - 1;
    const U32 part = static_cast<U32>(high ? below >> 32 : below);
    out.lane[i] = static_cast<U32>(__builtin_popcount(a[i] & part)) + b[i];
  }
  store<Type::B32>(w, in, out.lane);
}
template <bool high>
constexpr LaneOp v_mbcnt{v_mbcnt_lanes<high>, {}};

// --- The table.

constexpr Op op(std::string_view name, LaneOp of, int flags = 0, Class cls = Class::Valu,
                int dsts = 1) {
  return {.name = name,
          .cls = cls,
          .lanes = of.run,
          .types = of.types,
          .dsts = static_cast<uint8_t>(dsts),
          .flags = static_cast<uint16_t>(flags)};
}
constexpr Op trans(std::string_view name, LaneOp of) {
  return op(name, of, 0, Class::Trans);
}

#define FLOAT_COMPARES(T, AS, CMP, FROM)                                                      \
  COMPARE("f_" T, CMP, AS, [](auto, auto) -> bool { return false; })                          \
  COMPARE("lt_" T, CMP, AS, [](auto a, auto b) -> bool { return (FROM(a) < FROM(b)); })       \
  COMPARE("eq_" T, CMP, AS, [](auto a, auto b) -> bool { return FROM(a) == FROM(b); })        \
  COMPARE("le_" T, CMP, AS, [](auto a, auto b) -> bool { return (FROM(a) <= FROM(b)); })      \
  COMPARE("gt_" T, CMP, AS, [](auto a, auto b) -> bool { return (FROM(a) > FROM(b)); })       \
  COMPARE("lg_" T, CMP, AS,                                                                   \
          [](auto a, auto b) -> bool { return (FROM(a) < FROM(b) || FROM(a) > FROM(b)); })    \
  COMPARE("ge_" T, CMP, AS, [](auto a, auto b) -> bool { return (FROM(a) >= FROM(b)); })      \
  COMPARE("o_" T, CMP, AS,                                                                    \
          [](auto a, auto b) -> bool { return FROM(a) == FROM(a) && FROM(b) == FROM(b); })    \
  COMPARE("u_" T, CMP, AS,                                                                    \
          [](auto a, auto b) -> bool { return FROM(a) != FROM(a) || FROM(b) != FROM(b); })    \
  COMPARE("nge_" T, CMP, AS, [](auto a, auto b) -> bool { return (!(FROM(a) >= FROM(b))); })  \
  COMPARE("nlg_" T, CMP, AS,                                                                  \
          [](auto a, auto b) -> bool { return (!(FROM(a) < FROM(b) || FROM(a) > FROM(b))); }) \
  COMPARE("ngt_" T, CMP, AS, [](auto a, auto b) -> bool { return (!(FROM(a) > FROM(b))); })   \
  COMPARE("nle_" T, CMP, AS, [](auto a, auto b) -> bool { return (!(FROM(a) <= FROM(b))); })  \
  COMPARE("neq_" T, CMP, AS, [](auto a, auto b) -> bool { return !(FROM(a) == FROM(b)); })    \
  COMPARE("nlt_" T, CMP, AS, [](auto a, auto b) -> bool { return (!(FROM(a) < FROM(b))); })   \
  COMPARE("tru_" T, CMP, AS, [](auto, auto) -> bool { return true; })

#define INT_COMPARES(T, AS, CMP, TYPE)                                                           \
  COMPARE("f_" T, CMP, AS, [](auto, auto) -> bool { return false; })                             \
  COMPARE("lt_" T, CMP, AS,                                                                      \
          [](auto a, auto b) -> bool { return (static_cast<TYPE>(a) < static_cast<TYPE>(b)); })  \
  COMPARE("eq_" T, CMP, AS,                                                                      \
          [](auto a, auto b) -> bool { return static_cast<TYPE>(a) == static_cast<TYPE>(b); })   \
  COMPARE("le_" T, CMP, AS,                                                                      \
          [](auto a, auto b) -> bool { return (static_cast<TYPE>(a) <= static_cast<TYPE>(b)); }) \
  COMPARE("gt_" T, CMP, AS,                                                                      \
          [](auto a, auto b) -> bool { return (static_cast<TYPE>(a) > static_cast<TYPE>(b)); })  \
  COMPARE("ne_" T, CMP, AS,                                                                      \
          [](auto a, auto b) -> bool { return static_cast<TYPE>(a) != static_cast<TYPE>(b); })   \
  COMPARE("ge_" T, CMP, AS,                                                                      \
          [](auto a, auto b) -> bool { return (static_cast<TYPE>(a) >= static_cast<TYPE>(b)); }) \
  COMPARE("t_" T, CMP, AS, [](auto, auto) -> bool { return true; })

#define COMPARE(NAME, CMP, AS, ...)        \
  op("v_cmp_" NAME, CMP<AS, __VA_ARGS__>), \
      op("v_cmpx_" NAME, and_exec<CMP<AS, __VA_ARGS__>>, writes_exec),

#define I24(x) static_cast<U32>(x)

const Op table[] = {
    op("v_nop", v_nop, 0, Class::Valu, 0),
    op("v_mov_b32", unary<Type::B32, Type::B32, B1(a)>, copies),
    op("v_mov_b64", unary64<Type::B64, Type::B64, [](U64 a) -> U64 { return a; }>, copies),
    op("v_accvgpr_read_b32", unary<Type::B32, Type::B32, B1(a)>, copies),
    op("v_accvgpr_write_b32", unary<Type::B32, Type::B32, B1(a)>, copies),
    op("v_accvgpr_mov_b32", unary<Type::B32, Type::B32, B1(a)>, copies),
    op("v_not_b32", unary<Type::B32, Type::B32, B1(~a)>),
    op("v_bfrev_b32", unary<Type::B32, Type::B32, B1(reverse(a))>),
    op("v_ffbh_u32", unary<Type::B32, Type::B32, B1(a == 0 ? ~0u : __builtin_clz(a))>),
    op("v_ffbl_b32", unary<Type::B32, Type::B32, B1(a == 0 ? ~0u : __builtin_ctz(a))>),
    op("v_ffbh_i32", unary<Type::B32, Type::B32,
                           [](U32 a) -> U32 {
                             const U32 x = S(a) < 0 ? ~a : a;
                             return x == 0 ? ~0u : __builtin_clz(x);
                           }>),
    op("v_swap_b32", v_swap_b32, reads_dst, Class::Valu, 2),
    op("v_permlane32_swap_b32", v_permlane32_swap_b32, reads_dst, Class::Valu, 2),  // of gfx950

    op("v_cvt_f32_i32", unary<Type::B32, Type::F32, B1(bits_of(static_cast<float>(S(a))))>),
    op("v_cvt_f32_u32", unary<Type::B32, Type::F32, B1(bits_of(static_cast<float>(a)))>),
    op("v_cvt_i32_f32", unary<Type::F32, Type::B32, B1(static_cast<U32>(to_i32(as_f32(a))))>),
    op("v_cvt_u32_f32", unary<Type::F32, Type::B32, B1(to_u32(as_f32(a)))>),
    op("v_cvt_rpi_i32_f32",
       unary<Type::F32, Type::B32,
             B1(static_cast<U32>(to_i32(__builtin_floor(static_cast<double>(as_f32(a)) + 0.5))))>),
    op("v_cvt_flr_i32_f32",
       unary<Type::F32, Type::B32,
             B1(static_cast<U32>(to_i32(__builtin_floor(static_cast<double>(as_f32(a))))))>),
    op("v_cvt_f32_ubyte0", unary<Type::B32, Type::F32, B1(bits_of(static_cast<float>(a & 255)))>),
    op("v_cvt_f32_ubyte1",
       unary<Type::B32, Type::F32, B1(bits_of(static_cast<float>(a >> 8 & 255)))>),
    op("v_cvt_f32_ubyte2",
       unary<Type::B32, Type::F32, B1(bits_of(static_cast<float>(a >> 16 & 255)))>),
    op("v_cvt_f32_ubyte3", unary<Type::B32, Type::F32, B1(bits_of(static_cast<float>(a >> 24)))>),
    op("v_cvt_f16_f32", unary<Type::F32, Type::F16, B1(a)>),
    op("v_cvt_f32_f16", unary<Type::F16, Type::F32, B1(a)>),
    op("v_cvt_f16_u16", unary<Type::B16, Type::F16, B1(bits_of(static_cast<float>(a & 0xffff)))>),
    op("v_cvt_f16_i16", unary<Type::B16, Type::F16, B1(bits_of(static_cast<float>(S16(a))))>),
    op("v_cvt_u16_f16", unary<Type::F16, Type::B16, B1(to_u16(as_f32(a)))>),
    op("v_cvt_i16_f16", unary<Type::F16, Type::B16, B1(static_cast<U32>(to_i16(as_f32(a))))>),
    op("v_cvt_f64_f32",
       widen<Type::F32, Type::F64, [](U32 a) -> U64 { return bits_of64(as_f32(a)); }>),
    op("v_cvt_f64_i32", widen<Type::B32, Type::F64, [](U32 a) -> U64 { return bits_of64(S(a)); }>),
    op("v_cvt_f64_u32", widen<Type::B32, Type::F64, [](U32 a) -> U64 { return bits_of64(a); }>),
    op("v_cvt_f32_f64",
       narrow<Type::F64, Type::F32,
              [](U64 a) -> U32 { return bits_of(static_cast<float>(as_f64(a))); }>),
    op("v_cvt_i32_f64", narrow<Type::F64, Type::B32,
                               [](U64 a) -> U32 { return static_cast<U32>(to_i32(as_f64(a))); }>),
    op("v_cvt_u32_f64",
       narrow<Type::F64, Type::B32, [](U64 a) -> U32 { return to_u32(as_f64(a)); }>),

    op("v_trunc_f32", unary<Type::F32, Type::F32, F32_1(__builtin_truncf(a))>),
    op("v_ceil_f32", unary<Type::F32, Type::F32, F32_1(__builtin_ceilf(a))>),
    op("v_rndne_f32", unary<Type::F32, Type::F32, F32_1(__builtin_rintf(a))>),
    op("v_floor_f32", unary<Type::F32, Type::F32, F32_1(__builtin_floorf(a))>),
    op("v_fract_f32", unary<Type::F32, Type::F32, F32_1(fract_lane(a))>),
    op("v_trunc_f16", unary<Type::F16, Type::F16, F32_1(__builtin_truncf(a))>),
    op("v_ceil_f16", unary<Type::F16, Type::F16, F32_1(__builtin_ceilf(a))>),
    op("v_rndne_f16", unary<Type::F16, Type::F16, F32_1(__builtin_rintf(a))>),
    op("v_floor_f16", unary<Type::F16, Type::F16, F32_1(__builtin_floorf(a))>),
    op("v_trunc_f64", unary64<Type::F64, Type::F64, F64_1(__builtin_trunc(a))>),
    op("v_ceil_f64", unary64<Type::F64, Type::F64, F64_1(__builtin_ceil(a))>),
    op("v_rndne_f64", unary64<Type::F64, Type::F64, F64_1(__builtin_rint(a))>),
    op("v_floor_f64", unary64<Type::F64, Type::F64, F64_1(__builtin_floor(a))>),
    op("v_fract_f64", unary64<Type::F64, Type::F64, F64_1(fract_lane(a))>),
    op("v_frexp_exp_i32_f32",
       unary<Type::F32, Type::B32, B1(static_cast<U32>(exponent_of(as_f32(a))))>),
    op("v_frexp_mant_f32", unary<Type::F32, Type::F32, F32_1(mantissa_of(a))>),
    op("v_frexp_exp_i16_f16",
       unary<Type::F16, Type::B16, B1(static_cast<U32>(exponent_of(as_f32(a))))>),
    op("v_frexp_mant_f16", unary<Type::F16, Type::F16, F32_1(mantissa_of(a))>),
    op("v_frexp_exp_i32_f64",
       narrow<Type::F64, Type::B32,
              [](U64 a) -> U32 { return static_cast<U32>(exponent_of(as_f64(a))); }>),
    op("v_frexp_mant_f64", unary64<Type::F64, Type::F64, F64_1(mantissa_of(a))>),

    trans("v_exp_f32", transcendental<Type::F32, exp2_lane>),
    trans("v_log_f32", transcendental<Type::F32, log2_lane>),
    trans("v_rcp_f32", transcendental<Type::F32, rcp_lane>),
    trans("v_rcp_iflag_f32", transcendental<Type::F32, rcp_lane>),
    trans("v_rsq_f32", transcendental<Type::F32, rsq_lane>),
    trans("v_sqrt_f32", transcendental<Type::F32, [](float a) { return __builtin_sqrtf(a); }>),
    trans("v_sin_f32", transcendental<Type::F32, sin_lane>),
    trans("v_cos_f32", transcendental<Type::F32, cos_lane>),
    trans("v_exp_f16", transcendental<Type::F16, exp2_lane>),
    trans("v_log_f16", transcendental<Type::F16, log2_lane>),
    trans("v_rcp_f16", transcendental<Type::F16, rcp_lane>),
    trans("v_rsq_f16", transcendental<Type::F16, rsq_lane>),
    trans("v_sqrt_f16", transcendental<Type::F16, [](float a) { return __builtin_sqrtf(a); }>),
    trans("v_sin_f16", transcendental<Type::F16, sin_lane>),
    trans("v_cos_f16", transcendental<Type::F16, cos_lane>),
    trans("v_rcp_f64", unary64<Type::F64, Type::F64, F64_1(1.0 / a)>),
    trans("v_rsq_f64", unary64<Type::F64, Type::F64, F64_1(1.0 / __builtin_sqrt(a))>),
    trans("v_sqrt_f64", unary64<Type::F64, Type::F64, F64_1(__builtin_sqrt(a))>),

    op("v_add_f32", binary<Type::F32, F32_2(a + b)>),
    op("v_sub_f32", binary<Type::F32, F32_2(a - b)>),
    op("v_subrev_f32", binary<Type::F32, F32_2(b - a)>),
    op("v_mul_f32", binary<Type::F32, F32_2(a* b)>),
    op("v_mul_legacy_f32", binary<Type::F32, F32_2(a == 0.0f || b == 0.0f ? 0.0f : a * b)>),
    op("v_min_f32", binary<Type::F32, F32_2(fmin_lane(a, b))>),
    op("v_max_f32", binary<Type::F32, F32_2(fmax_lane(a, b))>),
    op("v_fmac_f32", fmac<Type::F32>, reads_dst),
    op("v_fmac_f64", fmac<Type::F64>, reads_dst),
    op("v_fmaak_f32", ternary<Type::F32, F32_3(__builtin_fmaf(a, b, c))>),
    op("v_fmamk_f32", ternary<Type::F32, F32_3(__builtin_fmaf(a, b, c))>),
    op("v_fma_f32", ternary<Type::F32, F32_3(__builtin_fmaf(a, b, c))>),
    op("v_min3_f32", ternary<Type::F32, F32_3(fmin_lane(fmin_lane(a, b), c))>),
    op("v_max3_f32", ternary<Type::F32, F32_3(fmax_lane(fmax_lane(a, b), c))>),
    op("v_med3_f32", ternary<Type::F32, F32_3(fmed3_lane(a, b, c))>),
    op("v_div_fixup_f32", ternary<Type::F32, F32_3(div_fixup(a, b, c))>),
    op("v_div_scale_f32", v_div_scale_f32, 0, Class::Valu, 2),
    op("v_div_fmas_f32", v_div_fmas_f32, reads_vcc),
    op("v_ldexp_f32", v_ldexp_f32),

    op("v_add_f64", binary64<Type::F64, F64_2(a + b)>),
    op("v_mul_f64", binary64<Type::F64, F64_2(a* b)>),
    op("v_min_f64", binary64<Type::F64, F64_2(fmin_lane(a, b))>),
    op("v_max_f64", binary64<Type::F64, F64_2(fmax_lane(a, b))>),
    op("v_fma_f64", ternary64<Type::F64,
                              [](U64 a, U64 b, U64 c) -> U64 {
                                return bits_of64(__builtin_fma(as_f64(a), as_f64(b), as_f64(c)));
                              }>),
    op("v_ldexp_f64",
       with_32<Type::F64, [](U64 a, U32 n) -> U64 { return bits_of64(ldexp(as_f64(a), S(n))); }>),
    op("v_div_fixup_f64", ternary64<Type::F64,
                                    [](U64 a, U64 b, U64 c) -> U64 {
                                      return bits_of64(div_fixup(as_f64(a), as_f64(b), as_f64(c)));
                                    }>),
    op("v_div_scale_f64", v_div_scale_f64, 0, Class::Valu, 2),
    op("v_div_fmas_f64", v_div_fmas_f64, reads_vcc),

    op("v_add_f16", binary<Type::F16, F32_2(a + b)>),
    op("v_sub_f16", binary<Type::F16, F32_2(a - b)>),
    op("v_subrev_f16", binary<Type::F16, F32_2(b - a)>),
    op("v_mul_f16", binary<Type::F16, F32_2(a* b)>),
    op("v_min_f16", binary<Type::F16, F32_2(fmin_lane(a, b))>),
    op("v_max_f16", binary<Type::F16, F32_2(fmax_lane(a, b))>),
    op("v_min3_f16", ternary_half<Type::F16, F32_3(fmin_lane(fmin_lane(a, b), c))>),
    op("v_max3_f16", ternary_half<Type::F16, F32_3(fmax_lane(fmax_lane(a, b), c))>),
    op("v_med3_f16", ternary_half<Type::F16, F32_3(fmed3_lane(a, b, c))>),
    op("v_fma_f16", ternary_half<Type::F16, F32_3(fma_for_f16(a, b, c))>),
    op("v_div_fixup_f16", ternary_half<Type::F16, F32_3(div_fixup(a, b, c))>),
    op("v_ldexp_f16", v_ldexp_f16),
    op("v_fma_mix_f32", v_fma_mix<MixTo::F32>),
    op("v_fma_mixlo_f16", v_fma_mix<MixTo::Low>),
    op("v_fma_mixhi_f16", v_fma_mix<MixTo::High>),

    op("v_add_u32", binary_saturating<B2(a + b), B2(a + b < a ? ~0u : a + b)>),
    op("v_sub_u32", binary_saturating<B2(a - b), B2(b > a ? 0 : a - b)>),
    op("v_subrev_u32", binary_saturating<B2(b - a), B2(a > b ? 0 : b - a)>),
    op("v_add_i32", binary_saturating<B2(a + b),
                                      [](U32 a, U32 b) -> U32 {
                                        const I64 r = I64{S(a)} + S(b);
                                        return (static_cast<U32>(r > 2147483647      ? 2147483647
                                                                 : r < -2147483648ll ? -2147483648ll
                                                                                     : r));
                                      }>),
    op("v_sub_i32", binary_saturating<B2(a - b),
                                      [](U32 a, U32 b) -> U32 {
                                        const I64 r = I64{S(a)} - S(b);
                                        return (static_cast<U32>(r > 2147483647      ? 2147483647
                                                                 : r < -2147483648ll ? -2147483648ll
                                                                                     : r));
                                      }>),
    op("v_add_co_u32", add_carry<false, false, false>, 0, Class::Valu, 2),
    op("v_sub_co_u32", add_carry<true, false, false>, 0, Class::Valu, 2),
    op("v_subrev_co_u32", add_carry<true, true, false>, 0, Class::Valu, 2),
    op("v_addc_co_u32", add_carry<false, false, true>, lane_mask, Class::Valu, 2),
    op("v_subb_co_u32", add_carry<true, false, true>, lane_mask, Class::Valu, 2),
    op("v_subbrev_co_u32", add_carry<true, true, true>, lane_mask, Class::Valu, 2),
    op("v_mul_i32_i24", binary<Type::B32, B2(I24(s24(a) * I64{s24(b)}))>),
    op("v_mul_u32_u24", binary<Type::B32, B2(u24(a) * u24(b))>),
    op("v_mul_hi_i32_i24", binary<Type::B32, B2(I24((I64{s24(a)} * s24(b)) >> 32))>),
    op("v_mul_hi_u32_u24", binary<Type::B32, B2(static_cast<U32>((U64{u24(a)} * u24(b)) >> 32))>),
    op("v_min_i32", binary<Type::B32, B2(static_cast<U32>(least(S(a), S(b))))>),
    op("v_max_i32", binary<Type::B32, B2(static_cast<U32>(most(S(a), S(b))))>),
    op("v_min_u32", binary<Type::B32, B2(least(a, b))>),
    op("v_max_u32", binary<Type::B32, B2(most(a, b))>),
    op("v_lshrrev_b32", binary<Type::B32, B2(b >> (a & 31))>),
    op("v_lshlrev_b32", binary<Type::B32, B2(b << (a & 31))>),
    op("v_ashrrev_i32", binary<Type::B32, B2(static_cast<U32>(S(b) >> (a & 31)))>),
    op("v_and_b32", binary<Type::B32, B2(a& b)>),
    op("v_or_b32", binary<Type::B32, B2(a | b)>),
    op("v_xor_b32", binary<Type::B32, B2(a ^ b)>),
    op("v_xnor_b32", binary<Type::B32, B2(~(a ^ b))>),
    op("v_mul_lo_u32", binary<Type::B32, B2(a* b)>),
    op("v_mul_hi_u32", binary<Type::B32, B2(static_cast<U32>((U64{a} * b) >> 32))>),
    op("v_mul_hi_i32", binary<Type::B32, B2(static_cast<U32>((I64{S(a)} * S(b)) >> 32))>),
    op("v_bcnt_u32_b32", binary<Type::B32, B2(static_cast<U32>(__builtin_popcount(a)) + b)>),
    op("v_bfm_b32", binary<Type::B32, B2(((1u << (a & 31)) - 1) << (b & 31))>),
    op("v_mbcnt_lo_u32_b32", v_mbcnt<false>),
    op("v_mbcnt_hi_u32_b32", v_mbcnt<true>),
    op("v_cndmask_b32", v_cndmask, selects | lane_mask),

    op("v_mad_i32_i24", ternary<Type::B32, B3(I24(s24(a) * I64{s24(b)} + S(c)))>),
    op("v_mad_u32_u24", ternary<Type::B32, B3(u24(a) * u24(b) + c)>),
    op("v_bfe_u32", ternary<Type::B32, B3(bfe_u(a, b, c))>),
    op("v_bfe_i32", ternary<Type::B32, B3(bfe_i(a, b, c))>),
    op("v_bfi_b32", ternary<Type::B32, B3((a & b) | (~a & c))>, inserts),
    op("v_alignbit_b32", ternary<Type::B32, B3(static_cast<U32>((U64{a} << 32 | b) >> (c & 31)))>),
    op("v_alignbyte_b32",
       ternary<Type::B32, B3(static_cast<U32>((U64{a} << 32 | b) >> (8 * (c & 3))))>),
    op("v_min3_i32", ternary<Type::B32, B3(static_cast<U32>(least(least(S(a), S(b)), S(c))))>),
    op("v_max3_i32", ternary<Type::B32, B3(static_cast<U32>(most(most(S(a), S(b)), S(c))))>),
    op("v_med3_i32", ternary<Type::B32, B3(static_cast<U32>(med3_lane(S(a), S(b), S(c))))>),
    op("v_min3_u32", ternary<Type::B32, B3(least(least(a, b), c))>),
    op("v_max3_u32", ternary<Type::B32, B3(most(most(a, b), c))>),
    op("v_med3_u32", ternary<Type::B32, B3(med3_lane(a, b, c))>),
    op("v_min3_i16",
       ternary_half<Type::B16, B3(static_cast<U32>(least(least(S16(a), S16(b)), S16(c))))>),
    op("v_max3_i16",
       ternary_half<Type::B16, B3(static_cast<U32>(most(most(S16(a), S16(b)), S16(c))))>),
    op("v_med3_i16",
       ternary_half<Type::B16, B3(static_cast<U32>(med3_lane(S16(a), S16(b), S16(c))))>),
    op("v_min3_u16", ternary_half<Type::B16, B3(least(least(a, b), c))>),
    op("v_max3_u16", ternary_half<Type::B16, B3(most(most(a, b), c))>),
    op("v_med3_u16", ternary_half<Type::B16, B3(med3_lane(a, b, c))>),
    op("v_sad_u32", ternary<Type::B32, B3((a > b ? a - b : b - a) + c)>),
    op("v_perm_b32", ternary<Type::B32, B3(perm(a, b, c))>),
    op("v_add3_u32", ternary<Type::B32, B3(a + b + c)>),
    op("v_lshl_add_u32", ternary<Type::B32, B3((a << (b & 31)) + c)>),
    op("v_add_lshl_u32", ternary<Type::B32, B3((a + b) << (c & 31))>),
    op("v_lshl_or_b32", ternary<Type::B32, B3((a << (b & 31)) | c)>),
    op("v_and_or_b32", ternary<Type::B32, B3((a & b) | c)>),
    op("v_or3_b32", ternary<Type::B32, B3(a | b | c)>),
    op("v_xad_u32", ternary<Type::B32, B3((a ^ b) + c)>),
    op("v_mad_u64_u32", v_mad_64_32<false>, 0, Class::Valu, 2),
    op("v_mad_i64_i32", v_mad_64_32<true>, 0, Class::Valu, 2),
    op("v_lshl_add_u64", v_lshl_add_u64),
    op("v_lshlrev_b64",
       with_32<Type::B64, [](U64 a, U32 n) -> U64 { return (a << (n & 63)); }, true>),
    op("v_lshrrev_b64",
       with_32<Type::B64, [](U64 a, U32 n) -> U64 { return (a >> (n & 63)); }, true>),
    op("v_ashrrev_i64", with_32<Type::B64,
                                [](U64 a, U32 n) -> U64 {
                                  return (static_cast<U64>(static_cast<I64>(a) >> (n & 63)));
                                },
                                true>),

    op("v_add_u16", binary<Type::B16, B2(a + b)>),
    op("v_sub_u16", binary<Type::B16, B2(a - b)>),
    op("v_subrev_u16", binary<Type::B16, B2(b - a)>),
    op("v_add_i16", binary_half<Type::B16, B2(a + b)>),
    op("v_sub_i16", binary_half<Type::B16, B2(a - b)>),
    op("v_mul_lo_u16", binary<Type::B16, B2(a* b)>),
    op("v_lshlrev_b16", binary<Type::B16, B2(b << (a & 15))>),
    op("v_lshrrev_b16", binary<Type::B16, B2((b & 0xffff) >> (a & 15))>),
    op("v_ashrrev_i16", binary<Type::B16, B2(static_cast<U32>(S16(b) >> (a & 15)))>),
    op("v_max_u16", binary<Type::B16, B2(most(a & 0xffff, b & 0xffff))>),
    op("v_min_u16", binary<Type::B16, B2(least(a & 0xffff, b & 0xffff))>),
    op("v_max_i16", binary<Type::B16, B2(static_cast<U32>(most(S16(a), S16(b))))>),
    op("v_min_i16", binary<Type::B16, B2(static_cast<U32>(least(S16(a), S16(b))))>),
    op("v_mad_u16", ternary_half<Type::B16, B3((a * b + c) & 0xffff)>),
    op("v_mad_i16", ternary_half<Type::B16, B3((a * b + c) & 0xffff)>),
    op("v_mad_legacy_u16", ternary<Type::B16, B3(a* b + c)>),
    op("v_mad_legacy_i16", ternary<Type::B16, B3(a* b + c)>),

    op("v_cvt_pk_fp8_f32", v_cvt_pk_f8<3, 8>),
    op("v_cvt_pk_bf8_f32", v_cvt_pk_f8<2, 16>),
    op("v_cvt_sr_fp8_f32", v_cvt_sr_f8<3, 8>),
    op("v_cvt_sr_bf8_f32", v_cvt_sr_f8<2, 16>),
    op("v_cvt_f32_fp8", v_cvt_f32_f8<f8_to_f32<3, 8>>),
    op("v_cvt_f32_bf8", v_cvt_f32_f8<f8_to_f32<2, 16>>),
    op("v_cvt_pk_f32_fp8", v_cvt_pk_f32_f8<f8_to_f32<3, 8>>),
    op("v_cvt_pk_f32_bf8", v_cvt_pk_f32_f8<f8_to_f32<2, 16>>),
    // Of gfx950.
    op("v_cvt_pk_fp8_f32.ocp", v_cvt_pk_f8<3, 7>),
    op("v_cvt_pk_bf8_f32.ocp", v_cvt_pk_f8<2, 15>),
    op("v_cvt_sr_fp8_f32.ocp", v_cvt_sr_f8<3, 7>),
    op("v_cvt_sr_bf8_f32.ocp", v_cvt_sr_f8<2, 15>),
    op("v_cvt_f32_fp8.ocp", v_cvt_f32_f8<f8_to_f32<3, 7>>),
    op("v_cvt_f32_bf8.ocp", v_cvt_f32_f8<f8_to_f32<2, 15>>),
    op("v_cvt_pk_f32_fp8.ocp", v_cvt_pk_f32_f8<f8_to_f32<3, 7>>),
    op("v_cvt_pk_f32_bf8.ocp", v_cvt_pk_f32_f8<f8_to_f32<2, 15>>),
    op("v_cvt_pkrtz_f16_f32", pack_halves<Type::F32, f32_to_f16_toward_zero>),
    op("v_cvt_pknorm_i16_f32", pack_halves<Type::F32,
                                           [](U32 a) -> U32 {
                                             return static_cast<U32>(
                                                 to_i16(__builtin_rintf(as_f32(a) * 32767.0f)));
                                           }>),
    op("v_cvt_pknorm_u16_f32",
       pack_halves<Type::F32,
                   [](U32 a) -> U32 { return to_u16(__builtin_rintf(as_f32(a) * 65535.0f)); }>),
    op("v_cvt_pk_u16_u32", pack_halves<Type::B32, B1(least(a, 65535u))>),
    op("v_cvt_pk_i16_i32",
       pack_halves<Type::B32, B1(static_cast<U32>(med3_lane(S(a), -32768, 32767)))>),
    op("v_pack_b32_f16", v_pack_b32_f16),

    op("v_pk_fma_f32",
       packed_f32<3, [](float a, float b, float c) { return __builtin_fmaf(a, b, c); }>, 0,
       Class::PackedF32),
    op("v_pk_mul_f32", packed_f32<2, [](float a, float b, float) { return a * b; }>, 0,
       Class::PackedF32),
    op("v_pk_add_f32", packed_f32<2, [](float a, float b, float) { return a + b; }>, 0,
       Class::PackedF32),
    op("v_pk_mov_b32", v_pk_mov_b32, 0, Class::PackedF32),

    op("v_pk_add_f16", packed_16<2, true, [](float a, float b, float) { return a + b; }>),
    op("v_pk_mul_f16", packed_16<2, true, [](float a, float b, float) { return a * b; }>),
    op("v_pk_min_f16", packed_16<2, true, [](float a, float b, float) { return fmin_lane(a, b); }>),
    op("v_pk_max_f16", packed_16<2, true, [](float a, float b, float) { return fmax_lane(a, b); }>),
    op("v_pk_fma_f16", packed_16<3, true, fma_for_f16>),
    op("v_pk_fmac_f16", packed_16<3, true, fma_for_f16, true>, reads_dst),
    op("v_pk_add_u16", packed_16<2, false, [](U32 a, U32 b, U32) -> U32 { return a + b; }>),
    op("v_pk_sub_u16", packed_16<2, false, [](U32 a, U32 b, U32) -> U32 { return a - b; }>),
    op("v_pk_add_i16", packed_16<2, false, [](U32 a, U32 b, U32) -> U32 { return a + b; }>),
    op("v_pk_sub_i16", packed_16<2, false, [](U32 a, U32 b, U32) -> U32 { return a - b; }>),
    op("v_pk_mul_lo_u16", packed_16<2, false, [](U32 a, U32 b, U32) -> U32 { return a * b; }>),
    op("v_pk_mad_u16", packed_16<3, false, [](U32 a, U32 b, U32 c) -> U32 { return a * b + c; }>),
    op("v_pk_mad_i16", packed_16<3, false, [](U32 a, U32 b, U32 c) -> U32 { return a * b + c; }>),
    op("v_pk_min_u16", packed_16<2, false, [](U32 a, U32 b, U32) -> U32 { return least(a, b); }>),
    op("v_pk_max_u16", packed_16<2, false, [](U32 a, U32 b, U32) -> U32 { return most(a, b); }>),
    op("v_pk_min_i16",
       packed_16<2, false,
                 [](U32 a, U32 b, U32) -> U32 { return static_cast<U32>(least(S16(a), S16(b))); }>),
    op("v_pk_max_i16",
       packed_16<2, false,
                 [](U32 a, U32 b, U32) -> U32 { return static_cast<U32>(most(S16(a), S16(b))); }>),
    op("v_pk_lshlrev_b16",
       packed_16<2, false, [](U32 a, U32 b, U32) -> U32 { return (b << (a & 15)); }>),
    op("v_pk_lshrrev_b16",
       packed_16<2, false, [](U32 a, U32 b, U32) -> U32 { return (b >> (a & 15)); }>),
    op("v_pk_ashrrev_i16",
       packed_16<2, false,
                 [](U32 a, U32 b, U32) -> U32 { return (static_cast<U32>(S16(b) >> (a & 15))); }>),

    op("v_dot4_i32_i8", integer_dot<8, true, false>),
    op("v_dot4_u32_u8", integer_dot<8, false, false>),
    op("v_dot2_i32_i16", integer_dot<16, true, false>),
    op("v_dot2_u32_u16", integer_dot<16, false, false>),
    op("v_dot8_i32_i4", integer_dot<4, true, false>),
    op("v_dot8_u32_u4", integer_dot<4, false, false>),
    op("v_dot4c_i32_i8", integer_dot<8, true, true>, reads_dst),
    op("v_dot2c_i32_i16", integer_dot<16, true, true>, reads_dst),
    op("v_dot8c_i32_i4", integer_dot<4, true, true>, reads_dst),
    op("v_dot2_f32_f16", dot2_f32_f16<false>),
    op("v_dot2c_f32_f16", dot2_f32_f16<true>, reads_dst),

    FLOAT_COMPARES("f32", Type::F32, compare, as_f32) FLOAT_COMPARES(
        "f16", Type::F16, compare, as_f32) FLOAT_COMPARES("f64", Type::F64, compare64, as_f64)
        INT_COMPARES("i32", Type::B32, compare, I32) INT_COMPARES("u32", Type::B32, compare, U32)
            INT_COMPARES("i16", Type::B16, compare, I16) INT_COMPARES(
                "u16", Type::B16, compare, U16) INT_COMPARES("i64", Type::I64, compare64, I64)
                INT_COMPARES("u64", Type::B64, compare64, U64)
                    op("v_cmp_class_f32", v_cmp_class_f32),
    op("v_cmp_class_f16", v_cmp_class_f16),
    op("v_cmp_class_f64", v_cmp_class_f64),
    op("v_cmpx_class_f32", and_exec<v_cmp_class_f32>, writes_exec),
    op("v_cmpx_class_f64", and_exec<v_cmp_class_f64>, writes_exec),
};

}  // namespace

const Op* valu_table() {
  return table;
}
int valu_count() {
  return static_cast<int>(sizeof table / sizeof *table);
}

}  // namespace gfx9emu::GFX9EMU_TARGET
