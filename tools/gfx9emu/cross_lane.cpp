// Vector operations between lanes and scalar registers, and the MFMA instructions.
#include <bit>

#include "gfx9emu/mfma.h"
#include "gfx9emu/ops.h"
#include "gfx9emu/wave.h"

namespace gfx9emu {
namespace {

uint32_t scalar_source(const Wave& w, const Operand& o) {
  return o.is_register() ? w.s[o.reg.first] : static_cast<uint32_t>(o.value);
}

void read_lane(Wave& w, const Inst& in, int lane) {
  const Operand& from = in.op[1];
  if (!from.is_vector()) {
    w.s[in.op[0].reg.first] = scalar_source(w, from);
    w.scalar_defined[in.op[0].reg.first] = ~0u;
    return;
  }
  w.s[in.op[0].reg.first] = w.row(from.reg).lane[lane];
  w.scalar_defined[in.op[0].reg.first] = w.defined_bits(from.reg, 0, lane);
}

void v_readlane(Wave& w, const Inst& in) {
  read_lane(w, in, static_cast<int>(scalar_source(w, in.op[2]) & 63));
}
void v_readfirstlane(Wave& w, const Inst& in) {
  read_lane(w, in, w.exec() == 0 ? 0 : std::countr_zero(w.exec()));
}
void v_writelane(Wave& w, const Inst& in) {
  const int lane = static_cast<int>(scalar_source(w, in.op[2]) & 63);
  w.row(in.op[0].reg).lane[lane] = scalar_source(w, in.op[1]);
  const Operand& from = in.op[1];
  const uint32_t bits = from.is_register() ? w.scalar_defined[from.reg.first] : ~0u;
  w.set_defined_bits(in.op[0].reg, 0, lane, bits);
}

constexpr Op lanes(std::string_view name, Handler run) {
  return {.name = name, .cls = Class::Valu, .run = run, .flags = own_lanes | copies};
}
const Op table[] = {
    lanes("v_readlane_b32", v_readlane),
    lanes("v_readfirstlane_b32", v_readfirstlane),
    lanes("v_writelane_b32", v_writelane),
};

void v_mfma(Wave& w, const Inst& in) {
  const MfmaShape& shape = *in.mfma;
  const MfmaModifiers modifiers{
      .cbsz = in.cbsz, .abid = in.abid, .blgp = in.blgp, .fp16_ovfl = (w.mode >> 23 & 1) != 0};
  const std::string refused = mfma_refuses(shape, modifiers);
  if (!refused.empty()) {
    w.fail(FaultKind::UnknownInstruction, refused);
    return;
  }
  const Operand& c = in.op[3];
  Row constant[8];  // all that D of an f64 shape has
  const uint32_t* c_rows = constant[0].lane;
  int c_stride = 0;
  if (c.is_vector()) {
    c_rows = w.row(c.reg).lane;
    c_stride = wave_lanes;
  } else if (c.is_register()) {
    w.fail(FaultKind::UnknownInstruction, "C in scalar registers is not known");
    return;
  } else if (shape.a == MfmaType::F64) {
    for (int i = 0; i < shape.d_regs; ++i) {
      for (uint32_t& x : constant[i].lane) x = static_cast<uint32_t>(c.value >> (i % 2 * 32));
    }
    c_stride = wave_lanes;
  } else {
    for (uint32_t& x : constant[0].lane) x = static_cast<uint32_t>(c.value);
  }
  mfma(shape, w.row(in.op[1].reg).lane, w.row(in.op[2].reg).lane, c_rows, c_stride,
       w.row(in.op[0].reg).lane, modifiers);
}

}  // namespace

std::span<const Op> cross_lane_ops() {
  return table;
}

std::span<const Op> mfma_ops() {
  static const auto all = [] {
    std::vector<Op> ops;
    for (const auto of : {mfma_shapes(), gfx950_mfma_shapes()})
      for (const MfmaShape& s : of) {
        const Type ab = s.a == MfmaType::F64 ? Type::F64 : Type::B32;
        const Type d = s.a == MfmaType::F64  ? Type::F64
                       : s.a == MfmaType::I8 ? Type::B32
                                             : Type::F32;
        ops.push_back(
            {.name = s.name, .cls = Class::Mfma, .run = v_mfma, .types = {d, {ab, ab, d}}});
      }
    return ops;
  }();
  return all;
}

}  // namespace gfx9emu
