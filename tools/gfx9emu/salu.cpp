// Scalar ALU, branches and program control.
#include <bit>
#include <string>

#include "gfx9emu/ops.h"
#include "gfx9emu/wave.h"

namespace gfx9emu {
namespace {

uint32_t read32(const Wave& w, const Operand& o) {
  return o.kind == Operand::Kind::Register ? w.s[o.reg.first] : static_cast<uint32_t>(o.value);
}
uint64_t read64(const Wave& w, const Operand& o) {
  return o.kind == Operand::Kind::Register ? w.scalar64(o.reg.first) : o.value;
}
void write32(Wave& w, const Operand& o, uint32_t value) {
  w.s[o.reg.first] = value;
}
void write64(Wave& w, const Operand& o, uint64_t value) {
  w.set_scalar64(o.reg.first, value);
}

// Result and SCC of one operation.
struct Out32 {
  uint32_t value;
  bool scc;
};
struct Out64 {
  uint64_t value;
  bool scc;
};
Out32 nonzero(uint32_t x) {
  return {x, x != 0};
}
Out64 nonzero64(uint64_t x) {
  return {x, x != 0};
}

template <auto f>
void run_binary32(Wave& w, const Inst& in) {
  const Out32 r = f(read32(w, in.op[1]), read32(w, in.op[2]), w.scc());
  write32(w, in.op[0], r.value);
  w.set_scc(r.scc);
}
template <auto f>
constexpr WaveOp binary32{run_binary32<f>, {}};
template <auto f>
void run_binary64(Wave& w, const Inst& in) {
  const Out64 r = f(read64(w, in.op[1]), read64(w, in.op[2]));
  write64(w, in.op[0], r.value);
  w.set_scc(r.scc);
}
template <auto f>
constexpr WaveOp binary64{run_binary64<f>, {Type::B64, {Type::B64, Type::B64}}};
// Bit by bit. SCC: any is set.
template <auto f>
void run_bits32(Wave& w, const Inst& in) {
  const Out32 r = nonzero(static_cast<uint32_t>(f(read32(w, in.op[1]), read32(w, in.op[2]))));
  write32(w, in.op[0], r.value);
  w.set_scc(r.scc);
}
template <auto f>
constexpr WaveOp bits32{run_bits32<f>, {}, f};
template <auto f>
void run_bits64(Wave& w, const Inst& in) {
  const Out64 r = nonzero64(f(read64(w, in.op[1]), read64(w, in.op[2])));
  write64(w, in.op[0], r.value);
  w.set_scc(r.scc);
}
template <auto f>
constexpr WaveOp bits64{run_bits64<f>, {Type::B64, {Type::B64, Type::B64}}, f};
// The second operand is 32 bits wide.
template <auto f, Type>
void run_shift64(Wave& w, const Inst& in) {
  const Out64 r = f(read64(w, in.op[1]), read32(w, in.op[2]));
  write64(w, in.op[0], r.value);
  w.set_scc(r.scc);
}
template <auto f, Type type = Type::B64>
constexpr WaveOp shift64{run_shift64<f, type>, {type, {type, Type::B32}}};
// No SCC.
template <auto f>
void run_plain32(Wave& w, const Inst& in) {
  write32(w, in.op[0], f(read32(w, in.op[1]), read32(w, in.op[2])));
}
template <auto f>
constexpr WaveOp plain32{run_plain32<f>, {}};
template <auto f>
void run_unary32(Wave& w, const Inst& in) {
  const Out32 r = f(read32(w, in.op[1]));
  write32(w, in.op[0], r.value);
  w.set_scc(r.scc);
}
template <auto f>
constexpr WaveOp unary32{run_unary32<f>, {}};
template <auto f>
void run_unary64(Wave& w, const Inst& in) {
  const Out64 r = f(read64(w, in.op[1]));
  write64(w, in.op[0], r.value);
  w.set_scc(r.scc);
}
template <auto f>
constexpr WaveOp unary64{run_unary64<f>, {Type::B64, {Type::B64}}};
template <auto f>
void run_move32(Wave& w, const Inst& in) {
  write32(w, in.op[0], f(read32(w, in.op[1])));
}
template <auto f>
constexpr WaveOp move32{run_move32<f>, {}};
template <auto f>
void run_move64(Wave& w, const Inst& in) {
  write64(w, in.op[0], f(read64(w, in.op[1])));
}
template <auto f>
constexpr WaveOp move64{run_move64<f>, {Type::B64, {Type::B64}}};
// From 64 bits to 32, without SCC.
template <auto f>
void run_narrow(Wave& w, const Inst& in) {
  write32(w, in.op[0], f(read64(w, in.op[1])));
}
template <auto f>
constexpr WaveOp narrow{run_narrow<f>, {Type::B32, {Type::B64}}};
// From 64 bits to 32, with SCC.
template <auto f>
void run_narrow_scc(Wave& w, const Inst& in) {
  const Out32 r = f(read64(w, in.op[1]));
  write32(w, in.op[0], r.value);
  w.set_scc(r.scc);
}
template <auto f>
constexpr WaveOp narrow_scc{run_narrow_scc<f>, {Type::B32, {Type::B64}}};
template <auto f>
void run_compare32(Wave& w, const Inst& in) {
  w.set_scc(f(read32(w, in.op[0]), read32(w, in.op[1])));
}
template <auto f>
constexpr WaveOp compare32{run_compare32<f>, {}};
template <auto f>
void run_compare64(Wave& w, const Inst& in) {
  w.set_scc(f(read64(w, in.op[0]), read64(w, in.op[1])));
}
template <auto f>
constexpr WaveOp compare64{run_compare64<f>, {Type::None, {Type::B64, Type::B64}}};
template <auto f>
void run_test_bit64(Wave& w, const Inst& in) {
  w.set_scc(f(read64(w, in.op[0]), read32(w, in.op[1])));
}
template <auto f>
constexpr WaveOp test_bit64{run_test_bit64<f>, {Type::None, {Type::B64, Type::B32}}};
template <auto f>
void run_compare_k(Wave& w, const Inst& in) {
  const uint32_t k = in.op[1].kind == Operand::Kind::Constant
                         ? static_cast<uint32_t>(in.op[1].value)
                         : static_cast<uint32_t>(in.imm);
  w.set_scc(f(read32(w, in.op[0]), k));
}
template <auto f>
constexpr WaveOp compare_k{run_compare_k<f>, {}};
// dst = exec; exec = f(exec, src).
template <auto f>
void run_save_exec(Wave& w, const Inst& in) {
  const uint64_t source = read64(w, in.op[1]), old = w.exec();
  const uint64_t result = f(source, old);
  w.set_scalar64(scalar::exec, result);
  write64(w, in.op[0], old);
  w.set_scc(result != 0);
}
template <auto f>
constexpr WaveOp save_exec{run_save_exec<f>, {Type::B64, {Type::B64}}, f};
template <auto f>
void run_write_exec(Wave& w, const Inst& in) {
  const uint64_t result = f(read64(w, in.op[1]), w.exec());
  w.set_scalar64(scalar::exec, result);
  write64(w, in.op[0], result);
  w.set_scc(result != 0);
}
template <auto f>
constexpr WaveOp write_exec{run_write_exec<f>, {Type::B64, {Type::B64}}, f};

using U32 = uint32_t;
using U64 = uint64_t;
using I32 = int32_t;
using I64 = int64_t;

constexpr auto add_u32 = [](U32 a, U32 b, bool) -> Out32 { return {a + b, a + b < a}; };
constexpr auto sub_u32 = [](U32 a, U32 b, bool) -> Out32 { return {a - b, b > a}; };
constexpr auto addc_u32 = [](U32 a, U32 b, bool c) -> Out32 {
  const U64 sum = U64{a} + b + c;
  return {static_cast<U32>(sum), sum >> 32 != 0};
};
constexpr auto subb_u32 = [](U32 a, U32 b, bool c) -> Out32 { return {a - b - c, U64{b} + c > a}; };
constexpr auto add_i32 = [](U32 a, U32 b, bool) -> Out32 {
  const U32 r = a + b;
  return {r, ((a ^ r) & (b ^ r)) >> 31 != 0};
};
constexpr auto sub_i32 = [](U32 a, U32 b, bool) -> Out32 {
  const U32 r = a - b;
  return {r, ((a ^ b) & (a ^ r)) >> 31 != 0};
};
template <auto better>
constexpr auto choose =
    [](U32 a, U32 b, bool) -> Out32 { return {better(a, b) ? a : b, better(a, b)}; };
constexpr auto less_i = [](U32 a, U32 b) { return static_cast<I32>(a) < static_cast<I32>(b); };
constexpr auto less_u = [](U32 a, U32 b) { return a < b; };
constexpr auto greater_i = [](U32 a, U32 b) { return static_cast<I32>(a) > static_cast<I32>(b); };
constexpr auto greater_u = [](U32 a, U32 b) { return a > b; };
constexpr auto less_equal_i = [](U32 a, U32 b) {
  return static_cast<I32>(a) <= static_cast<I32>(b);
};
constexpr auto less_equal_u = [](U32 a, U32 b) { return a <= b; };
constexpr auto greater_equal_i = [](U32 a, U32 b) {
  return static_cast<I32>(a) >= static_cast<I32>(b);
};
constexpr auto greater_equal_u = [](U32 a, U32 b) { return a >= b; };
constexpr auto equal = [](U32 a, U32 b) { return a == b; };
constexpr auto unequal = [](U32 a, U32 b) { return a != b; };
constexpr auto equal64 = [](U64 a, U64 b) { return a == b; };
constexpr auto unequal64 = [](U64 a, U64 b) { return a != b; };
constexpr auto bit0 = [](U32 a, U32 b) { return (a >> (b & 31) & 1) == 0; };
constexpr auto bit1 = [](U32 a, U32 b) { return (a >> (b & 31) & 1) == 1; };
constexpr auto bit0_64 = [](U64 a, U32 b) { return (a >> (b & 63) & 1) == 0; };
constexpr auto bit1_64 = [](U64 a, U32 b) { return (a >> (b & 63) & 1) == 1; };

template <int n>
constexpr auto shift_add = [](U32 a, U32 b, bool) -> Out32 {
  const U64 sum = (U64{a} << n) + b;
  return {static_cast<U32>(sum), sum >> 32 != 0};
};
constexpr auto bfe_u32 = [](U32 a, U32 b, bool) -> Out32 {
  const U32 offset = b & 31, width = b >> 16 & 127;
  const U32 mask = width >= 32 ? ~0u : (1u << width) - 1;
  return nonzero(a >> offset & mask);
};
constexpr auto bfe_i32 = [](U32 a, U32 b, bool) -> Out32 {
  const U32 offset = b & 31, width = b >> 16 & 127;
  if (width == 0) return {0, false};
  const U32 field = a >> offset;
  if (width >= 32) return nonzero(static_cast<U32>(static_cast<I32>(a) >> offset));
  return nonzero(static_cast<U32>(static_cast<I32>(field << (32 - width)) >> (32 - width)));
};
constexpr auto bfe_u64 = [](U64 a, U32 b) -> Out64 {
  const U32 offset = b & 63, width = b >> 16 & 127;
  const U64 mask = width >= 64 ? ~U64{0} : (U64{1} << width) - 1;
  return nonzero64(a >> offset & mask);
};
constexpr auto bfe_i64 = [](U64 a, U32 b) -> Out64 {
  const U32 offset = b & 63, width = b >> 16 & 127;
  if (width == 0) return {0, false};
  if (width >= 64) return nonzero64(static_cast<U64>(static_cast<I64>(a) >> offset));
  const U64 field = a >> offset;
  return nonzero64(static_cast<U64>(static_cast<I64>(field << (64 - width)) >> (64 - width)));
};

U32 reverse_bits(U32 x) {
  U32 r = 0;
  for (int i = 0; i < 32; ++i) r |= (x >> i & 1) << (31 - i);
  return r;
}
U64 reverse_bits64(U64 x) {
  return U64{reverse_bits(static_cast<U32>(x))} << 32 | reverse_bits(static_cast<U32>(x >> 32));
}
U32 whole_quads(U32 x, int group, int groups) {
  U32 r = 0;
  for (int i = 0; i < groups; ++i) r |= static_cast<U32>((x >> (i * group) & 15) != 0) << i;
  return r;
}

void s_cselect_b32(Wave& w, const Inst& in) {
  write32(w, in.op[0], read32(w, w.scc() ? in.op[1] : in.op[2]));
}
void run_s_cselect_b64(Wave& w, const Inst& in) {
  write64(w, in.op[0], read64(w, w.scc() ? in.op[1] : in.op[2]));
}
constexpr WaveOp s_cselect_b64{run_s_cselect_b64, {Type::B64, {Type::B64, Type::B64}}};
void s_cmov_b32(Wave& w, const Inst& in) {
  if (w.scc()) write32(w, in.op[0], read32(w, in.op[1]));
}
void run_s_cmov_b64(Wave& w, const Inst& in) {
  if (w.scc()) write64(w, in.op[0], read64(w, in.op[1]));
}
constexpr WaveOp s_cmov_b64{run_s_cmov_b64, {Type::B64, {Type::B64}}};
// simm16 is printed as a number of its own or as an operand; both come here.
U32 immediate(const Inst& in) {
  return static_cast<U32>(static_cast<I32>(static_cast<int16_t>(in.imm)));
}
void s_movk_i32(Wave& w, const Inst& in) {
  write32(w, in.op[0], immediate(in));
}
void s_cmovk_i32(Wave& w, const Inst& in) {
  if (w.scc()) write32(w, in.op[0], immediate(in));
}
void s_addk_i32(Wave& w, const Inst& in) {
  const Out32 r = add_i32(read32(w, in.op[0]), immediate(in), false);
  write32(w, in.op[0], r.value);
  w.set_scc(r.scc);
}
void s_mulk_i32(Wave& w, const Inst& in) {
  write32(w, in.op[0], read32(w, in.op[0]) * immediate(in));
}
template <int bits>
void bitset(Wave& w, const Inst& in) {
  const U32 n = read32(w, in.op[1]) & 31;
  const U32 old = read32(w, in.op[0]);
  write32(w, in.op[0], bits ? old | 1u << n : old & ~(1u << n));
}
template <int bits>
void run_bitset64(Wave& w, const Inst& in) {
  const U32 n = read32(w, in.op[1]) & 63;
  const U64 old = read64(w, in.op[0]);
  write64(w, in.op[0], bits ? old | U64{1} << n : old & ~(U64{1} << n));
}
template <int bits>
constexpr WaveOp bitset64{run_bitset64<bits>, {Type::B64, {Type::B32}}};
void run_s_bfm_b64(Wave& w, const Inst& in) {
  const U32 width = read32(w, in.op[1]) & 63, offset = read32(w, in.op[2]) & 63;
  write64(w, in.op[0], ((U64{1} << width) - 1) << offset);
}
constexpr WaveOp s_bfm_b64{run_s_bfm_b64, {Type::B64}};
void run_s_mov_b64(Wave& w, const Inst& in) {
  write64(w, in.op[0], read64(w, in.op[1]));
}
constexpr WaveOp s_mov_b64{run_s_mov_b64, {Type::B64, {Type::B64}}};
void s_mov_b32(Wave& w, const Inst& in) {
  write32(w, in.op[0], read32(w, in.op[1]));
}

// Jumps. Addresses are those of Memory; a Program knows offsets in the image.
void jump(Wave& w, uint64_t address) {
  const int32_t target = w.context.program->find(address - w.context.image_address);
  if (target < 0) {
    w.fail(FaultKind::BadJump, "jumps to where no instruction of this code object starts");
    return;
  }
  w.next = static_cast<uint32_t>(target);
}
uint64_t after(const Wave& w, const Inst& in) {
  return w.context.image_address + in.offset + in.size;
}
void branch(Wave& w, const Inst& in) {
  jump(w, after(w, in) + static_cast<U64>(static_cast<I64>(static_cast<int16_t>(in.imm)) * 4));
}
template <auto condition>
void branch_if(Wave& w, const Inst& in) {
  if (condition(w)) branch(w, in);
}
void run_s_getpc_b64(Wave& w, const Inst& in) {
  write64(w, in.op[0], after(w, in));
}
constexpr WaveOp s_getpc_b64{run_s_getpc_b64, {Type::B64}};
void run_s_setpc_b64(Wave& w, const Inst& in) {
  jump(w, read64(w, in.op[0]));
}
constexpr WaveOp s_setpc_b64{run_s_setpc_b64, {Type::None, {Type::B64}}};
void run_s_swappc_b64(Wave& w, const Inst& in) {
  const uint64_t target = read64(w, in.op[1]);
  write64(w, in.op[0], after(w, in));
  jump(w, target);
}
constexpr WaveOp s_swappc_b64{run_s_swappc_b64, {Type::B64, {Type::B64}}};
void run_s_call_b64(Wave& w, const Inst& in) {
  write64(w, in.op[0], after(w, in));
  branch(w, in);
}
constexpr WaveOp s_call_b64{run_s_call_b64, {Type::B64}};

void s_endpgm(Wave& w, const Inst&) {
  w.done = true;
}
void s_dcache_inv(Wave& w, const Inst&) {
  if (w.view) w.view->invalidate_scalar();
}
void s_barrier(Wave& w, const Inst&) {
  w.at_barrier = true;
  ++w.counters.barriers;
}
void s_waitcnt(Wave& w, const Inst& in) {
  w.wait(in.vmcnt, in.lgkmcnt);
}
void no_effect(Wave&, const Inst&) {}
void s_trap(Wave& w, const Inst& in) {
  w.fail(FaultKind::Trap, "trap " + std::to_string(in.imm));
}

enum : int { hw_mode = 1, hw_hw_id = 4, hw_xcc_id = 20 };

U32 field_mask(const Inst& in) {
  return in.hwreg_size >= 32 ? ~0u : ((1u << in.hwreg_size) - 1);
}
void set_hwreg(Wave& w, const Inst& in, U32 value) {
  if (in.hwreg != hw_mode) {
    w.fail(FaultKind::UnknownInstruction, "writes a hardware register other than MODE");
    return;
  }
  const U32 mask = field_mask(in) << in.hwreg_offset;
  w.set_mode((w.mode & ~mask) | (value << in.hwreg_offset & mask));
}
void s_setreg_b32(Wave& w, const Inst& in) {
  set_hwreg(w, in, read32(w, in.op[0]));
}
void s_setreg_imm32_b32(Wave& w, const Inst& in) {
  set_hwreg(w, in, static_cast<U32>(in.imm));
}
void s_getreg_b32(Wave& w, const Inst& in) {
  U32 value = 0;
  switch (in.hwreg) {
    case hw_mode:
      value = w.mode;
      break;
    case hw_hw_id:
      value = w.index;
      break;  // wave slot; the rest of the chip is not modelled
    case hw_xcc_id:
      value = 0;
      break;
    default:
      w.fail(FaultKind::UnknownInstruction, "reads a hardware register that is not modelled");
      return;
  }
  write32(w, in.op[0], value >> in.hwreg_offset & field_mask(in));
}
// M0[7:0] is added to the numbers of the VGPRs that M0[15:12] names.
void set_gpr_index(Wave& w, U32 mask, U32 value) {
  U32& m0 = w.s[scalar::m0];
  m0 = (m0 & ~mask) | (value & mask);
}
void s_set_gpr_idx_on(Wave& w, const Inst& in) {
  set_gpr_index(w, 0xf0ff, (read32(w, in.op[0]) & 0xff) | static_cast<U32>(in.imm) << 12);
  w.set_mode(w.mode | 1u << 27);
}
void s_set_gpr_idx_off(Wave& w, const Inst&) {
  w.set_mode(w.mode & ~(1u << 27));
}
void s_set_gpr_idx_mode(Wave& w, const Inst& in) {
  set_gpr_index(w, 0xf000, static_cast<U32>(in.imm) << 12);
}
void s_set_gpr_idx_idx(Wave& w, const Inst& in) {
  set_gpr_index(w, 0xff, read32(w, in.op[0]));
}
void s_memtime(Wave& w, const Inst& in) {
  write64(w, in.op[0], w.executed);
}

constexpr Op scc(std::string_view name, WaveOp of) {
  return {.name = name,
          .cls = Class::Salu,
          .run = of.run,
          .types = of.types,
          .bits = of.bits,
          .flags = writes_scc};
}
constexpr Op plain(std::string_view name, WaveOp of, int flags = 0) {
  return {.name = name,
          .cls = Class::Salu,
          .run = of.run,
          .types = of.types,
          .bits = of.bits,
          .flags = static_cast<uint16_t>(flags)};
}
constexpr Op compare(std::string_view name, WaveOp of) {
  return {.name = name,
          .cls = Class::Salu,
          .run = of.run,
          .types = of.types,
          .bits = of.bits,
          .dsts = 0,
          .flags = writes_scc};
}
constexpr Op saves(std::string_view name, WaveOp of) {
  return {.name = name,
          .cls = Class::Salu,
          .run = of.run,
          .types = of.types,
          .bits = of.bits,
          .flags = writes_scc | reads_exec | writes_exec};
}
constexpr Op control(std::string_view name, Class cls, WaveOp of, int dsts = 0, int flags = 0) {
  return {.name = name,
          .cls = cls,
          .run = of.run,
          .types = of.types,
          .bits = of.bits,
          .dsts = static_cast<uint8_t>(dsts),
          .flags = static_cast<uint16_t>(flags)};
}

#define F1(expr) [](U32 a) { return expr; }
#define F1_64(expr) [](U64 a) { return expr; }
#define F2(expr) [](U32 a, U32 b, bool) -> Out32 { return nonzero(expr); }
#define BITS(expr) [](U64 a, U64 b) -> U64 { return expr; }
#define BITS_OF_ONE(expr) [](U64 a, U64) -> U64 { return expr; }
#define S2_64(expr) [](U64 a, U32 b) -> Out64 { return nonzero64(expr); }
#define P2(expr) [](U32 a, U32 b) -> U32 { return expr; }

const Op table[] = {
    scc("s_add_u32", binary32<add_u32>),
    scc("s_sub_u32", binary32<sub_u32>),
    {.name = "s_addc_u32",
     .cls = Class::Salu,
     .run = binary32<addc_u32>.run,
     .flags = writes_scc | reads_scc},
    {.name = "s_subb_u32",
     .cls = Class::Salu,
     .run = binary32<subb_u32>.run,
     .flags = writes_scc | reads_scc},
    scc("s_add_i32", binary32<add_i32>),
    scc("s_sub_i32", binary32<sub_i32>),
    scc("s_min_i32", binary32<choose<less_i>>),
    scc("s_min_u32", binary32<choose<less_u>>),
    scc("s_max_i32", binary32<choose<greater_i>>),
    scc("s_max_u32", binary32<choose<greater_u>>),
    plain("s_cselect_b32", s_cselect_b32, reads_scc),
    plain("s_cselect_b64", s_cselect_b64, reads_scc),
    scc("s_and_b32", bits32<BITS(a& b)>),
    scc("s_and_b64", bits64<BITS(a& b)>),
    scc("s_or_b32", bits32<BITS(a | b)>),
    scc("s_or_b64", bits64<BITS(a | b)>),
    scc("s_xor_b32", bits32<BITS(a ^ b)>),
    scc("s_xor_b64", bits64<BITS(a ^ b)>),
    scc("s_andn2_b32", bits32<BITS(a & ~b)>),
    scc("s_andn2_b64", bits64<BITS(a & ~b)>),
    scc("s_orn2_b32", bits32<BITS(a | ~b)>),
    scc("s_orn2_b64", bits64<BITS(a | ~b)>),
    scc("s_nand_b32", bits32<BITS(~(a& b))>),
    scc("s_nand_b64", bits64<BITS(~(a& b))>),
    scc("s_nor_b32", bits32<BITS(~(a | b))>),
    scc("s_nor_b64", bits64<BITS(~(a | b))>),
    scc("s_xnor_b32", bits32<BITS(~(a ^ b))>),
    scc("s_xnor_b64", bits64<BITS(~(a ^ b))>),
    scc("s_lshl_b32", binary32<F2(a << (b & 31))>),
    scc("s_lshl_b64", shift64<S2_64(a << (b & 63))>),
    scc("s_lshr_b32", binary32<F2(a >> (b & 31))>),
    scc("s_lshr_b64", shift64<S2_64(a >> (b & 63))>),
    scc("s_ashr_i32", binary32<F2(static_cast<U32>(static_cast<I32>(a) >> (b & 31)))>),
    scc("s_ashr_i64", shift64<S2_64(static_cast<U64>(static_cast<I64>(a) >> (b & 63))), Type::I64>),
    plain("s_bfm_b32", plain32<P2(((1u << (a & 31)) - 1) << (b & 31))>),
    plain("s_bfm_b64", s_bfm_b64),
    plain("s_mul_i32", plain32<P2(a* b)>),
    plain("s_mul_hi_u32", plain32<P2(static_cast<U32>(U64{a} * b >> 32))>),
    plain("s_mul_hi_i32",
          plain32<P2(static_cast<U32>(I64{static_cast<I32>(a)} * static_cast<I32>(b) >> 32))>),
    scc("s_bfe_u32", binary32<bfe_u32>),
    scc("s_bfe_i32", binary32<bfe_i32>),
    scc("s_bfe_u64", shift64<bfe_u64>),
    scc("s_bfe_i64", shift64<bfe_i64, Type::I64>),
    scc("s_absdiff_i32", binary32<F2(static_cast<I32>(a - b) < 0 ? b - a : a - b)>),
    scc("s_lshl1_add_u32", binary32<shift_add<1>>),
    scc("s_lshl2_add_u32", binary32<shift_add<2>>),
    scc("s_lshl3_add_u32", binary32<shift_add<3>>),
    scc("s_lshl4_add_u32", binary32<shift_add<4>>),
    plain("s_pack_ll_b32_b16", plain32<P2((a & 0xffff) | b << 16)>),
    plain("s_pack_lh_b32_b16", plain32<P2((a & 0xffff) | (b & 0xffff0000))>),
    plain("s_pack_hh_b32_b16", plain32<P2((a >> 16) | (b & 0xffff0000))>),

    plain("s_mov_b32", s_mov_b32, copies),
    plain("s_mov_b64", s_mov_b64, copies),
    plain("s_cmov_b32", s_cmov_b32, reads_scc | reads_dst),
    plain("s_cmov_b64", s_cmov_b64, reads_scc | reads_dst),
    scc("s_not_b32", bits32<BITS_OF_ONE(~a)>),
    scc("s_not_b64", bits64<BITS_OF_ONE(~a)>),
    scc("s_wqm_b64", unary64<[](U64 a) {
          U64 r = 0;
          for (int i = 0; i < 64; i += 4) r |= (a >> i & 15) != 0 ? U64{15} << i : 0;
          return nonzero64(r);
        }>),
    plain("s_brev_b32", move32<reverse_bits>),
    plain("s_brev_b64", move64<reverse_bits64>),
    scc("s_bcnt0_i32_b32", unary32<[](U32 a) { return nonzero(std::popcount(~a)); }>),
    scc("s_bcnt0_i32_b64", narrow_scc<[](U64 a) { return nonzero(std::popcount(~a)); }>),
    scc("s_bcnt1_i32_b32", unary32<[](U32 a) { return nonzero(std::popcount(a)); }>),
    scc("s_bcnt1_i32_b64", narrow_scc<[](U64 a) { return nonzero(std::popcount(a)); }>),
    plain("s_ff0_i32_b32", move32<F1(a == ~0u ? ~0u : static_cast<U32>(std::countr_one(a)))>),
    plain("s_ff0_i32_b64", narrow<F1_64(~a == 0 ? ~0u : static_cast<U32>(std::countr_one(a)))>),
    plain("s_ff1_i32_b32", move32<F1(a == 0 ? ~0u : static_cast<U32>(std::countr_zero(a)))>),
    plain("s_ff1_i32_b64", narrow<F1_64(a == 0 ? ~0u : static_cast<U32>(std::countr_zero(a)))>),
    plain("s_flbit_i32_b32", move32<F1(a == 0 ? ~0u : static_cast<U32>(std::countl_zero(a)))>),
    plain("s_flbit_i32_b64", narrow<F1_64(a == 0 ? ~0u : static_cast<U32>(std::countl_zero(a)))>),
    plain("s_flbit_i32", move32<[](U32 a) {
            const U32 x = static_cast<I32>(a) < 0 ? ~a : a;
            return x == 0 ? ~0u : static_cast<U32>(std::countl_zero(x));
          }>),
    plain("s_sext_i32_i8", move32<F1(static_cast<U32>(static_cast<int8_t>(a)))>),
    plain("s_sext_i32_i16", move32<F1(static_cast<U32>(static_cast<int16_t>(a)))>),
    plain("s_bitset0_b32", bitset<0>, reads_dst),
    plain("s_bitset1_b32", bitset<1>, reads_dst),
    plain("s_bitset0_b64", bitset64<0>, reads_dst),
    plain("s_bitset1_b64", bitset64<1>, reads_dst),
    scc("s_abs_i32", unary32<[](U32 a) { return nonzero(static_cast<I32>(a) < 0 ? 0 - a : a); }>),
    scc("s_quadmask_b32", unary32<[](U32 a) { return nonzero(whole_quads(a, 4, 8)); }>),
    plain("s_getpc_b64", s_getpc_b64),

    saves("s_and_saveexec_b64", save_exec<BITS(a& b)>),
    saves("s_or_saveexec_b64", save_exec<BITS(a | b)>),
    saves("s_xor_saveexec_b64", save_exec<BITS(a ^ b)>),
    saves("s_andn2_saveexec_b64", save_exec<BITS(a & ~b)>),
    saves("s_orn2_saveexec_b64", save_exec<BITS(a | ~b)>),
    saves("s_nand_saveexec_b64", save_exec<BITS(~(a& b))>),
    saves("s_nor_saveexec_b64", save_exec<BITS(~(a | b))>),
    saves("s_xnor_saveexec_b64", save_exec<BITS(~(a ^ b))>),
    saves("s_andn1_saveexec_b64", save_exec<BITS(~a& b)>),
    saves("s_orn1_saveexec_b64", save_exec<BITS(~a | b)>),
    saves("s_andn1_wrexec_b64", write_exec<BITS(~a& b)>),
    saves("s_andn2_wrexec_b64", write_exec<BITS(a & ~b)>),

    compare("s_cmp_eq_i32", compare32<equal>),
    compare("s_cmp_lg_i32", compare32<unequal>),
    compare("s_cmp_gt_i32", compare32<greater_i>),
    compare("s_cmp_ge_i32", compare32<greater_equal_i>),
    compare("s_cmp_lt_i32", compare32<less_i>),
    compare("s_cmp_le_i32", compare32<less_equal_i>),
    compare("s_cmp_eq_u32", compare32<equal>),
    compare("s_cmp_lg_u32", compare32<unequal>),
    compare("s_cmp_gt_u32", compare32<greater_u>),
    compare("s_cmp_ge_u32", compare32<greater_equal_u>),
    compare("s_cmp_lt_u32", compare32<less_u>),
    compare("s_cmp_le_u32", compare32<less_equal_u>),
    compare("s_cmp_eq_u64", compare64<equal64>),
    compare("s_cmp_lg_u64", compare64<unequal64>),
    compare("s_bitcmp0_b32", compare32<bit0>),
    compare("s_bitcmp1_b32", compare32<bit1>),
    compare("s_bitcmp0_b64", test_bit64<bit0_64>),
    compare("s_bitcmp1_b64", test_bit64<bit1_64>),
    compare("s_cmpk_eq_i32", compare_k<equal>),
    compare("s_cmpk_lg_i32", compare_k<unequal>),
    compare("s_cmpk_gt_i32", compare_k<greater_i>),
    compare("s_cmpk_ge_i32", compare_k<greater_equal_i>),
    compare("s_cmpk_lt_i32", compare_k<less_i>),
    compare("s_cmpk_le_i32", compare_k<less_equal_i>),
    compare("s_cmpk_eq_u32", compare_k<equal>),
    compare("s_cmpk_lg_u32", compare_k<unequal>),
    compare("s_cmpk_gt_u32", compare_k<greater_u>),
    compare("s_cmpk_ge_u32", compare_k<greater_equal_u>),
    compare("s_cmpk_lt_u32", compare_k<less_u>),
    compare("s_cmpk_le_u32", compare_k<less_equal_u>),

    plain("s_movk_i32", s_movk_i32),
    plain("s_cmovk_i32", s_cmovk_i32, reads_scc | reads_dst),
    plain("s_addk_i32", s_addk_i32, writes_scc | reads_dst),
    plain("s_mulk_i32", s_mulk_i32, reads_dst),
    control("s_setreg_b32", Class::Salu, s_setreg_b32),
    control("s_setreg_imm32_b32", Class::Salu, s_setreg_imm32_b32),
    plain("s_getreg_b32", s_getreg_b32),

    control("s_set_gpr_idx_on", Class::Salu, s_set_gpr_idx_on, 0, writes_m0),
    control("s_set_gpr_idx_off", Class::Salu, s_set_gpr_idx_off),
    control("s_set_gpr_idx_mode", Class::Salu, s_set_gpr_idx_mode, 0, writes_m0),
    control("s_set_gpr_idx_idx", Class::Salu, s_set_gpr_idx_idx, 0, writes_m0),
    plain("s_movrels_b32", s_mov_b32, moves_src),
    plain("s_movrels_b64", s_mov_b64, moves_src),
    plain("s_movreld_b32", s_mov_b32, moves_dst),
    plain("s_movreld_b64", s_mov_b64, moves_dst),

    control("s_branch", Class::Branch, branch),
    control("s_cbranch_scc0", Class::Branch, branch_if<[](const Wave& w) { return !w.scc(); }>, 0,
            reads_scc),
    control("s_cbranch_scc1", Class::Branch, branch_if<[](const Wave& w) { return w.scc(); }>, 0,
            reads_scc),
    control("s_cbranch_vccz", Class::Branch,
            branch_if<[](const Wave& w) { return w.scalar64(scalar::vcc) == 0; }>, 0, reads_vcc),
    control("s_cbranch_vccnz", Class::Branch,
            branch_if<[](const Wave& w) { return w.scalar64(scalar::vcc) != 0; }>, 0, reads_vcc),
    control("s_cbranch_execz", Class::Branch,
            branch_if<[](const Wave& w) { return w.exec() == 0; }>, 0, reads_exec),
    control("s_cbranch_execnz", Class::Branch,
            branch_if<[](const Wave& w) { return w.exec() != 0; }>, 0, reads_exec),
    control("s_setpc_b64", Class::Branch, s_setpc_b64),
    control("s_swappc_b64", Class::Branch, s_swappc_b64, 1),
    control("s_call_b64", Class::Branch, s_call_b64, 1),

    control("s_endpgm", Class::End, s_endpgm),
    control("s_barrier", Class::Barrier, s_barrier),
    control("s_waitcnt", Class::Wait, s_waitcnt),
    control("s_nop", Class::Nop, no_effect),
    control("s_sleep", Class::Control, no_effect),
    control("s_setprio", Class::Control, no_effect),
    control("s_sendmsg", Class::Control, no_effect),
    control("s_incperflevel", Class::Control, no_effect),
    control("s_decperflevel", Class::Control, no_effect),
    control("s_ttracedata", Class::Control, no_effect),
    control("s_icache_inv", Class::Control, no_effect),
    control("s_dcache_inv", Class::Control, s_dcache_inv),
    control("s_dcache_wb", Class::Control, no_effect),
    control("s_trap", Class::Control, s_trap),
    {.name = "s_memtime", .cls = Class::Smem, .run = s_memtime},
    {.name = "s_memrealtime", .cls = Class::Smem, .run = s_memtime},
};

}  // namespace

std::span<const Op> salu_ops() {
  return table;
}

}  // namespace gfx9emu
