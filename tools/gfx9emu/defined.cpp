// Which registers hold what was written: each half of a lane of a VGPR, each bit of an SGPR. What
// is copied may be undefined and stays so until it is used.
#include <algorithm>
#include <bit>

#include "gfx9emu/dpp.h"
#include "gfx9emu/wave.h"

namespace gfx9emu {
namespace {

constexpr RegRange exec_registers{RegFile::Scalar, scalar::exec, 2};

// Bits that are the same whatever the undefined bits of a and b are.
uint64_t determined(BitFunction f, uint64_t a, uint64_t a_defined, uint64_t b, uint64_t b_defined) {
  const uint64_t x = f(a & a_defined, b & b_defined);
  return ~((x ^ f(a & a_defined, b | ~b_defined)) | (x ^ f(a | ~a_defined, b & b_defined)) |
           (x ^ f(a | ~a_defined, b | ~b_defined)));
}

uint64_t dpp_written_lanes(const Inst& inst, uint64_t exec) {
  uint64_t lanes = exec;
  for (int i = 0; i < wave_lanes; ++i) {
    const bool masked = !(inst.row_mask >> (i / 16) & 1) || !(inst.bank_mask >> (i / 4 % 4) & 1);
    const int from = dpp_source(inst, i);
    const bool outside = from < 0 || !(exec >> from & 1);
    if (masked || (outside && !inst.bound_ctrl)) lanes &= ~(uint64_t{1} << i);
  }
  return lanes;
}

}  // namespace

bool Wave::check_defined(const RegRange& reg, uint8_t halves, uint64_t lanes) {
  const int first = reg.file == RegFile::Scalar ? 0 : physical(reg);
  for (int i = 0; i < reg.count; ++i) {
    uint64_t missing = 0;
    if (reg.file == RegFile::Scalar) {
      missing = ~scalar_defined[reg.first + i];
    } else {
      const DefinedRow& row = defined[first + i];
      if (halves & 1) missing |= lanes & ~row.half[0];
      if (halves & 2) missing |= lanes & ~row.half[1];
    }
    if (missing == 0) continue;
    std::string what = register_name(reg, i) + " is read, but was never written";
    if (reg.file != RegFile::Scalar) {
      what += " in lane " + std::to_string(std::countr_zero(missing));
      const int n = std::popcount(missing);
      if (n > 1) what += " and " + std::to_string(n - 1) + " more";
    }
    fail(FaultKind::UndefinedRegister, what);
    return false;
  }
  return true;
}

bool Wave::check_lane_mask(const RegRange& reg) {
  const uint64_t unknown = exec() & ~scalar_defined64(reg.first);
  if (unknown == 0) return true;
  const int lane = std::countr_zero(unknown);
  fail(FaultKind::UndefinedRegister, register_name(reg, lane / 32) +
                                         " is read, but its bit for lane " + std::to_string(lane) +
                                         " was never written");
  return false;
}

void Wave::define(const RegRange& reg, uint8_t halves, uint64_t lanes) {
  if (reg.file == RegFile::Scalar) {
    for (int i = 0; i < reg.count; ++i) scalar_defined[reg.first + i] = ~0u;
    return;
  }
  const int first = physical(reg);
  for (int i = 0; i < reg.count; ++i) {
    DefinedRow& row = defined[first + i];
    if (halves & 1) row.half[0] |= lanes;
    if (halves & 2) row.half[1] |= lanes;
  }
}

uint32_t Wave::defined_bits(const RegRange& reg, int i, int lane) const {
  const size_t at = static_cast<size_t>(physical(reg)) + i;
  const uint32_t low = defined[at].half[0] >> lane & 1, high = defined[at].half[1] >> lane & 1;
  const uint32_t halves = (low ? 0xffff : 0) | (high ? 0xffff0000 : 0);
  if (halves == ~0u || partly_defined.empty()) return halves;
  const auto found = partly_defined.find(at * wave_lanes + static_cast<size_t>(lane));
  return found == partly_defined.end() ? halves : found->second;
}

void Wave::set_defined_bits(const RegRange& reg, int i, int lane, uint32_t bits) {
  const size_t at = static_cast<size_t>(physical(reg)) + i;
  const uint64_t bit = uint64_t{1} << lane;
  for (int half = 0; half < 2; ++half) {
    const bool whole = (bits >> (16 * half) & 0xffff) == 0xffff;
    defined[at].half[half] = (defined[at].half[half] & ~bit) | (whole ? bit : 0);
  }
  note_partly_defined(at * wave_lanes + static_cast<size_t>(lane), bits);
}

void Wave::note_partly_defined(uint64_t key, uint32_t bits) {
  const bool by_halves = bits == 0 || bits == 0xffff || bits == 0xffff0000 || bits == ~0u;
  if (!by_halves) {
    partly_defined[key] = bits;
  } else if (!partly_defined.empty()) {
    partly_defined.erase(key);
  }
}

// Operands that need not be defined: what is copied, what is undefined bit by bit.
bool Wave::check_partly_used(const Inst& inst) {
  if (inst.inserts) return !inst.op[1].is_scalar() || check_defined(inst.op[1].reg, 3, 0);
  const bool to_exec = inst.op[0].reg.overlaps(exec_registers);
  if (inst.copies && !to_exec) {
    // v_cndmask's mask, v_readlane's and v_writelane's lane.
    const Operand& third = inst.op[inst.lane_mask ? 3 : 2];
    if (!third.is_scalar()) return true;
    return inst.lane_mask ? check_lane_mask(third.reg) : check_defined(third.reg, 3, 0);
  }
  if (!inst.bits) return check_defined(inst.op[1].reg, 3, 0);

  const bool saves = std::any_of(inst.writes.begin(), inst.writes.end(),
                                 [](const RegRange& r) { return r == exec_registers; });
  const bool wide = inst.op[0].reg.count == 2;
  const auto value = [&](const Operand& o, uint64_t& is_defined) {
    is_defined = ~uint64_t{0};
    if (!o.is_register()) return o.value;
    const int r = o.reg.first;
    if (wide) {
      is_defined = scalar_defined64(r);
      return scalar64(r);
    }
    is_defined = scalar_defined[r];
    return uint64_t{s[r]};
  };
  uint64_t a_defined = 0, b_defined = ~uint64_t{0};
  const uint64_t a = value(inst.op[1], a_defined);
  const bool with_exec = saves && inst.op_count == 2;
  const uint64_t b = with_exec ? exec() : value(inst.op[2], b_defined);
  bits_defined_ = determined(inst.bits, a, a_defined, b, b_defined);
  const uint64_t width = wide ? ~uint64_t{0} : 0xffffffff;
  // SCC is set where any bit is for certain.
  scc_defined_ = (bits_defined_ & width) == width || (inst.bits(a, b) & bits_defined_ & width) != 0;
  if ((saves || to_exec) && (bits_defined_ & width) != width) {
    for (const Operand* o : {&inst.op[1], &inst.op[2]}) {
      if (o->is_register() && !check_defined(o->reg, 3, 0)) return false;
    }
  }
  return true;
}

void Wave::define_bits(const Inst& inst) {
  const RegRange& to = inst.op[0].reg;
  const bool old_exec = inst.op_count == 2 && inst.writes.size() > 2;  // s_*_saveexec
  for (int i = 0; i < to.count; ++i) {
    scalar_defined[to.first + i] =
        old_exec ? ~0u : static_cast<uint32_t>(bits_defined_ >> (32 * i));
  }
  scalar_defined[scalar::scc] = scc_defined_ ? ~0u : 0;
}

// Halves of v_bfi's result: source 1 where the mask is set, source 2 where it is not.
void Wave::define_inserted(const Inst& inst, uint64_t active) {
  const Operand& m = inst.op[1];
  const uint32_t mask = m.is_scalar() ? s[m.reg.first] : static_cast<uint32_t>(m.value);
  DefinedRow result{{~uint64_t{0}, ~uint64_t{0}}};
  for (int source = 1; source < 3; ++source) {
    const Operand& from = inst.op[1 + source];
    const uint32_t taken = source == 1 ? mask : ~mask;
    for (int half = 0; half < 2; ++half) {
      if ((taken >> (16 * half) & 0xffff) == 0) continue;
      if (from.is_vector()) {
        result.half[half] &= defined[static_cast<size_t>(physical(from.reg))].half[half];
      } else if (from.is_scalar() && scalar_defined[from.reg.first] != ~0u) {
        result.half[half] = 0;
      }
    }
  }
  DefinedRow& written = defined[static_cast<size_t>(physical(inst.op[0].reg))];
  for (int half = 0; half < 2; ++half) {
    written.half[half] = (written.half[half] & ~active) | (result.half[half] & active);
  }
}

// A copy's destination is as defined as what it takes: source 0, of v_cndmask 1 where the mask says
// so.
void Wave::define_copy(const Inst& inst, uint64_t active) {
  if (inst.own_lanes) return;  // done
  const RegRange& to = inst.op[0].reg;
  const Operand& m = inst.op[3];
  const uint64_t mask = !inst.selects ? 0 : m.is_scalar() ? scalar64(m.reg.first) : m.value;
  for (int source = 0; source <= inst.selects; ++source) {
    const Operand& from = inst.op[1 + source];
    const uint64_t lanes = active & (source == 0 ? ~mask : mask);
    for (int i = 0; i < to.count; ++i) {
      uint32_t word = ~0u;
      if (from.is_scalar()) word = scalar_defined[from.reg.first + i];
      if (to.file == RegFile::Scalar) {
        scalar_defined[to.first + i] = word;
        continue;
      }
      const uint64_t all = word == ~0u ? ~uint64_t{0} : 0;
      DefinedRow row{{all, all}};
      if (from.is_vector()) row = defined[static_cast<size_t>(physical(from.reg)) + i];
      DefinedRow& written = defined[static_cast<size_t>(physical(to)) + i];
      for (int half = 0; half < 2; ++half) {
        written.half[half] = (written.half[half] & ~lanes) | (row.half[half] & lanes);
      }
      if (partly_defined.empty() || !from.is_vector()) continue;
      for (uint64_t left = lanes & ~(row.half[0] & row.half[1]); left != 0; left &= left - 1) {
        const int lane = std::countr_zero(left);
        set_defined_bits({to.file, static_cast<uint16_t>(to.first + i), 1}, 0, lane,
                         defined_bits(from.reg, i, lane));
      }
    }
  }
}

void Wave::define_after(const Inst& inst, uint64_t active) {
  if (inst.bits) return define_bits(inst);
  if (inst.copies) return define_copy(inst, active);
  if (inst.inserts) return define_inserted(inst, active);
  uint64_t lanes = active;
  if (inst.cls == Class::Mfma) lanes = ~uint64_t{0};
  if (inst.dpp != Dpp::None) lanes = dpp_written_lanes(inst, active);
  for (const RegRange& r : inst.writes) {
    if (r.file == RegFile::Scalar) define(r, 3, 0);
  }
  for (; scalars_undefined != 0; scalars_undefined &= scalars_undefined - 1) {
    scalar_defined[inst.op[0].reg.first + std::countr_zero(scalars_undefined)] = 0;
  }
  if (inst.own_lanes) return;
  for (int i = 0; i < inst.dst_count; ++i) {
    if (inst.op[i].is_vector()) define(inst.op[i].reg, inst.halves[i], lanes);
  }
  if (inst.other_half != D16::Keeps) define_other_half(inst, lanes);
  if (inst.cls == Class::Scratch && inst.is_load) undefine_loaded(inst);
}

// Of a load into half a register that writes all of it.
void Wave::define_other_half(const Inst& inst, uint64_t lanes) {
  uint64_t& half =
      defined[static_cast<size_t>(physical(inst.op[0].reg))].half[inst.d16 == 2 ? 0 : 1];
  half = inst.other_half == D16::Clears ? half | lanes : half & ~lanes;
}

void Wave::undefine_loaded(const Inst& inst) {
  const int first = physical(inst.op[0].reg);
  for (int i = 0; i < inst.op[0].reg.count; ++i) {
    for (int half = 0; half < 2; ++half) {
      if (inst.halves[0] >> half & 1) defined[first + i].half[half] &= ~loaded_undefined[i];
    }
  }
  loaded_undefined = {};
  for (const auto& [i, lane, bits] : loaded_partly) set_defined_bits(inst.op[0].reg, i, lane, bits);
  loaded_partly.clear();
}

}  // namespace gfx9emu
