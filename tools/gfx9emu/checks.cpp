// What is checked before an instruction and noted after it.
#include <algorithm>
#include <bit>

#include "gfx9emu/access.h"
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

// The lanes of the source that a DPP operation reads.
uint64_t dpp_read_lanes(const Inst& inst, uint64_t exec) {
  uint64_t lanes = 0;
  for (int i = 0; i < wave_lanes; ++i) {
    const int from = dpp_source(inst, i);
    if (exec >> i & 1 && from >= 0 && exec >> from & 1) lanes |= uint64_t{1} << from;
  }
  return lanes;
}

}  // namespace

std::string register_name(const RegRange& reg, int i) {
  const int n = reg.first + i;
  if (reg.file == RegFile::Scalar) return scalar_name(n);
  return (reg.file == RegFile::Agpr ? "a" : "v") + std::to_string(n);
}

std::string bad_register_message(const Kernel& kernel, const Inst& inst, Level level) {
  const Descriptor& d = kernel.descriptor;
  const auto check = [&](const RegRange& r) -> std::string {
    // The registers are one file: those from accum_offset on can be reached as arch VGPRs too.
    uint32_t limit = level == Level::Strict ? d.accum_offset : d.vgprs;
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
  // What is spilled may be undefined, and stays so until it is used.
  if (inst.cls == Class::Scratch && inst.is_store && i == 1) return true;
  return check_defined(o.read, inst.halves[i], lanes);
}

bool Wave::check_replay(const Inst& inst) {
  const Inst* reader = clause_.issue(inst);
  if (!reader) return true;
  if (reader != &inst) {
    fail(FaultKind::Replay,
         "it overwrites an operand of a load that is repeated together with it after a page fault "
         "(xnack); an s_nop parts them",
         reader);
    return false;
  }
  // A scalar load within its own alignment comes in one part.
  const uint32_t bytes = 4u * inst.op[0].reg.count;
  if (inst.cls == Class::Smem && scalar_load_address(*this, inst) % bytes == 0) return true;
  fail(FaultKind::Replay,
       "it overwrites its own operand, and is made for devices that repeat loads after page faults "
       "(xnack)");
  return false;
}

void Wave::check_hazards(const Inst& inst) {
  if (context.replays && !check_replay(inst)) return;
  const auto fault = hazards_.issue(inst, context.hazard_roles[entry.inst]);
  if (!fault) return;
  const std::string message = std::string(fault->rule->text) + ": needs " +
                              std::to_string(fault->needed) + " wait states, has " +
                              std::to_string(fault->given);
  if (fault->severity == Severity::Fault) {
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
  if (inst.copies || inst.bits || inst.inserts) return check_partly_used(inst);
  const RegRange mask = inst.lane_mask ? inst.op[inst.dst_count + 2].reg : RegRange{};
  for (const RegRange& r : inst.reads) {
    if (r.file != RegFile::Scalar) continue;
    if (r == mask ? !check_lane_mask(r) : !check_defined(r, 3, 0)) return false;
  }
  if (inst.own_lanes) return true;
  const uint64_t active = exec();
  for (int i = inst.dst_is_read ? 0 : inst.dst_count; i < inst.op_count; ++i) {
    if (inst.op[i].is_vector() && !check_operand(inst, i, active)) return false;
  }
  return true;
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
    if (b.write_epoch == epoch && !(b.writers >> wave.index & 1)) {
      wave.fail(FaultKind::LdsRace,
                "LDS byte " + std::to_string(i) + " was written by wave " +
                    std::to_string(std::countr_zero(b.writers)) +
                    " with no barrier (and wait) in between",
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

bool Workgroup::note_lds_write(Wave& wave, uint32_t offset, uint32_t bytes, const void* value,
                               bool atomic, bool dma) {
  const uint32_t inst = static_cast<uint32_t>(wave.entry.inst);
  const uint16_t self = static_cast<uint16_t>(1u << wave.index);
  const auto* written = static_cast<const std::byte*>(value);
  for (uint32_t i = offset; i < offset + bytes; ++i) {
    LdsByte& b = lds_state[i];
    if (b.in_flight) {
      wave.fail(FaultKind::MissingWaitcnt,
                "LDS byte " + std::to_string(i) +
                    " is touched before the s_waitcnt vmcnt that covers the load into it",
                &context_.program->insts[b.writer_inst]);
      return false;
    }
    const uint16_t others_wrote =
        b.write_epoch == epoch ? static_cast<uint16_t>(b.writers & ~self) : uint16_t{0};
    // The order of atomics, and of writes of one value, does not matter.
    const bool same = written && written[i - offset] == lds[i];
    if (others_wrote != 0 && !(atomic && b.writer_atomic) && !same) {
      wave.fail(FaultKind::LdsRace,
                "LDS byte " + std::to_string(i) + " was written by wave " +
                    std::to_string(std::countr_zero(others_wrote)) +
                    " too, with no barrier (and wait) in between",
                &context_.program->insts[b.writer_inst]);
      return false;
    }
    // Who has written the value itself may have read it before.
    const uint32_t others = b.readers & ~(same ? self | others_wrote : self);
    if (b.read_epoch == epoch && others != 0) {
      wave.fail(FaultKind::LdsRace,
                "LDS byte " + std::to_string(i) + " was read by wave " +
                    std::to_string(std::countr_zero(others)) +
                    " with no barrier (and wait) in between",
                &context_.program->insts[b.reader_inst]);
      return false;
    }
    b.write_epoch = epoch;
    b.writers = static_cast<uint16_t>(self | (same ? others_wrote : 0));
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
      if (b.write_epoch != epoch) b.writers = 0;
      b.write_epoch = epoch;
      b.writers |= static_cast<uint16_t>(1u << wave.index);
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
