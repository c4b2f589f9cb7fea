// What is checked before an instruction and noted after it.
#include <algorithm>
#include <bit>

#include "gfx9emu/dpp.h"
#include "gfx9emu/wave.h"

namespace gfx9emu {
namespace {

std::string scalar_name(int r) {
  if (r <= 101) return "s" + std::to_string(r);
  switch (r) {
    case scalar::flat_scratch:
      return "flat_scratch_lo";
    case scalar::flat_scratch + 1:
      return "flat_scratch_hi";
    case scalar::vcc:
      return "vcc_lo";
    case scalar::vcc + 1:
      return "vcc_hi";
    case scalar::m0:
      return "m0";
    case scalar::exec:
      return "exec_lo";
    case scalar::exec + 1:
      return "exec_hi";
    case scalar::scc:
      return "scc";
    default:
      return "scalar register " + std::to_string(r);
  }
}

std::string register_name(const RegRange& reg, int i) {
  const int n = reg.first + i;
  if (reg.file == RegFile::Scalar) return scalar_name(n);
  return (reg.file == RegFile::Agpr ? "a" : "v") + std::to_string(n);
}

// The lanes of the source that a DPP operation reads.
uint64_t dpp_read_lanes(const Inst& inst, uint64_t exec) {
  uint64_t lanes = 0;
  for (int i = 0; i < wave_lanes; ++i) {
    const int from = dpp_source(inst, i);
    if (exec >> i & 1 && from >= 0 && exec >> from & 1) lanes |= uint64_t{1} << from;
  }
  return lanes;
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

std::string bad_register_message(const Kernel& kernel, const Inst& inst) {
  const Descriptor& d = kernel.descriptor;
  const auto check = [&](const RegRange& r) -> std::string {
    uint32_t limit = d.accum_offset;
    std::string of = "arch VGPRs";
    if (r.file == RegFile::Agpr) {
      limit = d.vgprs - d.accum_offset;
      of = "AGPRs";
    } else if (r.file == RegFile::Scalar) {
      if (r.first > 101) return "";  // the named ones are always there
      limit = d.sgprs;
      of = "SGPRs";
    }
    for (int i = 0; i < r.count; ++i) {
      if (r.first + i >= static_cast<int>(limit)) {
        return register_name(r, i) + " is outside the " + std::to_string(limit) + " " + of +
               " that the kernel has";
      }
    }
    return "";
  };
  for (const auto* list : {&inst.writes, &inst.reads}) {
    for (const RegRange& r : *list) {
      std::string message = check(r);
      if (!message.empty()) return message;
    }
  }
  return "";
}

bool Wave::check_in_flight(const RegRange& reg, bool is_write) {
  for (int i = 0; i < reg.count; ++i) {
    const uint64_t id = reg.file == RegFile::Scalar ? scalar_in_flight_[reg.first + i]
                                                    : in_flight_[physical(reg) + i];
    if (id == 0) continue;
    const Outstanding* op = find(id);
    if (!op) continue;
    fail(FaultKind::MissingWaitcnt,
         register_name(reg, i) + (is_write ? " is overwritten while a load into it is outstanding"
                                           : " is used before the s_waitcnt that covers its load"),
         op->inst);
    return false;
  }
  return true;
}

bool Wave::check_defined(const RegRange& reg, uint8_t halves, uint64_t lanes) {
  const int first = reg.file == RegFile::Scalar ? 0 : physical(reg);
  for (int i = 0; i < reg.count; ++i) {
    uint64_t missing = 0;
    if (reg.file == RegFile::Scalar) {
      missing = scalar_defined[reg.first + i] ? 0 : ~uint64_t{0};
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

void Wave::define(const RegRange& reg, uint8_t halves, uint64_t lanes) {
  if (reg.file == RegFile::Scalar) {
    for (int i = 0; i < reg.count; ++i) scalar_defined[reg.first + i] = 1;
    return;
  }
  const int first = physical(reg);
  for (int i = 0; i < reg.count; ++i) {
    DefinedRow& row = defined[first + i];
    if (halves & 1) row.half[0] |= lanes;
    if (halves & 2) row.half[1] |= lanes;
  }
}

bool Wave::check_operand(const Inst& inst, int i, uint64_t active) {
  const Operand& o = inst.op[i];
  uint64_t lanes = active;
  if (inst.cls == Class::Mfma) lanes = ~uint64_t{0};
  const int source = i - inst.dst_count;
  if (inst.dpp != Dpp::None && source == 0) lanes = dpp_read_lanes(inst, active);
  if (inst.selects && source < 2) {
    const uint64_t mask = scalar64(inst.op[inst.dst_count + 2].reg.first);
    lanes &= source == 0 ? ~mask : mask;
  }
  if (inst.cls == Class::PackedF32 && o.reg.count == 2 && source < 3) {
    // op_sel may take both results from one of the two registers.
    const bool moves = inst.name == "v_pk_mov_b32";
    const bool low_from_second = inst.op_sel >> source & 1;
    const bool high_from_second = moves ? low_from_second : inst.op_sel_hi >> source & 1;
    RegRange one = o.reg;
    one.count = 1;
    if (low_from_second == high_from_second) {
      one.first += low_from_second ? 1 : 0;
      return check_defined(one, 3, lanes);
    }
  }
  // What is spilled may be undefined, and stays so until it is used.
  if (inst.cls == Class::Scratch && inst.is_store && i == 1) return true;
  return check_defined(o.reg, inst.halves[i], lanes);
}

void Wave::check_hazards(const Inst& inst) {
  const auto fault = hazards_.issue(inst, context.hazard_roles[entry.inst]);
  if (!fault) return;
  const std::string message = std::string(fault->rule->text) + ": needs " +
                              std::to_string(fault->needed) + " wait states, has " +
                              std::to_string(fault->given);
  if (!fault->rule->warning) {
    fail(FaultKind::MissingWaitStates, message, fault->earlier);
  } else if (std::find(group.warned.begin(), group.warned.end(), &inst) == group.warned.end()) {
    group.warned.push_back(&inst);
    warn(FaultKind::MissingWaitStates, message, fault->earlier);
  }
}

bool Wave::check_before(const Inst& inst) {
  if (!context.hazard_roles.empty()) {
    check_hazards(inst);
    if (failed) return false;
  }
  if (!operations_.empty()) {
    for (const RegRange& r : inst.reads) {
      if (!check_in_flight(r, false)) return false;
    }
    for (const RegRange& r : inst.writes) {
      if (!check_in_flight(r, true)) return false;
    }
  }
  for (const RegRange& r : inst.reads) {
    if (r.file == RegFile::Scalar && !check_defined(r, 3, 0)) return false;
  }
  if (inst.own_lanes) return true;
  const uint64_t active = exec();
  for (int i = inst.dst_is_read ? 0 : inst.dst_count; i < inst.op_count; ++i) {
    if (inst.op[i].is_vector() && !check_operand(inst, i, active)) return false;
  }
  return true;
}

void Wave::define_after(const Inst& inst, uint64_t active) {
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
  if (inst.cls == Class::Scratch && inst.is_load) undefine_loaded(inst);
}

void Wave::undefine_loaded(const Inst& inst) {
  const int first = physical(inst.op[0].reg);
  for (int i = 0; i < inst.op[0].reg.count; ++i) {
    for (int half = 0; half < 2; ++half) {
      if (inst.halves[0] >> half & 1) defined[first + i].half[half] &= ~loaded_undefined[i];
    }
  }
  loaded_undefined = {};
}

// --- LDS: definedness and races.

bool Workgroup::note_lds_read(Wave& wave, uint32_t offset, uint32_t bytes) {
  const uint32_t inst = static_cast<uint32_t>(wave.entry.inst);
  for (uint32_t i = offset; i < offset + bytes; ++i) {
    LdsByte& b = lds_state[i];
    if (b.write_epoch == 0) {
      wave.fail(FaultKind::UndefinedLds, "LDS byte " + std::to_string(i) + " was never written");
      return false;
    }
    if (b.in_flight) {
      wave.fail(FaultKind::MissingWaitcnt,
                "LDS byte " + std::to_string(i) +
                    " is touched before the s_waitcnt vmcnt that covers the load into it",
                &context_.program->insts[b.writer_inst]);
      return false;
    }
    if (b.write_epoch == epoch && b.writer != wave.index) {
      wave.fail(FaultKind::LdsRace,
                "LDS byte " + std::to_string(i) + " was written by wave " +
                    std::to_string(b.writer) + " with no barrier (and wait) in between",
                &context_.program->insts[b.writer_inst]);
      return false;
    }
    if (b.read_epoch != epoch) {
      b.read_epoch = epoch;
      b.readers = 0;
    }
    b.readers |= static_cast<uint16_t>(1u << wave.index);
    b.reader_inst = inst;
  }
  return true;
}

bool Workgroup::note_lds_write(Wave& wave, uint32_t offset, uint32_t bytes, bool atomic, bool dma) {
  const uint32_t inst = static_cast<uint32_t>(wave.entry.inst);
  for (uint32_t i = offset; i < offset + bytes; ++i) {
    LdsByte& b = lds_state[i];
    if (b.in_flight) {
      wave.fail(FaultKind::MissingWaitcnt,
                "LDS byte " + std::to_string(i) +
                    " is touched before the s_waitcnt vmcnt that covers the load into it",
                &context_.program->insts[b.writer_inst]);
      return false;
    }
    const bool other_wrote = b.write_epoch == epoch && b.writer != wave.index;
    if (other_wrote && !(atomic && b.writer_atomic)) {
      wave.fail(FaultKind::LdsRace,
                "LDS byte " + std::to_string(i) + " was written by wave " +
                    std::to_string(b.writer) + " too, with no barrier (and wait) in between",
                &context_.program->insts[b.writer_inst]);
      return false;
    }
    const uint32_t others = b.readers & ~(1u << wave.index);
    if (b.read_epoch == epoch && others != 0) {
      wave.fail(FaultKind::LdsRace,
                "LDS byte " + std::to_string(i) + " was read by wave " +
                    std::to_string(std::countr_zero(others)) +
                    " with no barrier (and wait) in between",
                &context_.program->insts[b.reader_inst]);
      return false;
    }
    b.write_epoch = epoch;
    b.writer = static_cast<uint8_t>(wave.index);
    b.writer_atomic = atomic;
    b.in_flight = dma;
    b.writer_inst = inst;
  }
  return true;
}

void Workgroup::renew_lds(Wave& wave, uint32_t offset, uint32_t bytes, bool write) {
  if (lds_state.empty()) return;
  for (uint32_t i = offset; i < offset + bytes; ++i) {
    LdsByte& b = lds_state[i];
    if (write) {
      b.write_epoch = epoch;
      b.writer = static_cast<uint8_t>(wave.index);
    } else {
      if (b.read_epoch != epoch) b.readers = 0;
      b.read_epoch = epoch;
      b.readers |= static_cast<uint16_t>(1u << wave.index);
    }
  }
}

void Workgroup::land_lds_dma(uint32_t offset, uint32_t bytes) {
  if (lds_state.empty()) return;
  for (uint32_t i = offset; i < offset + bytes; ++i) {
    lds_state[i].in_flight = false;
    lds_state[i].write_epoch = epoch;
  }
}

}  // namespace gfx9emu
