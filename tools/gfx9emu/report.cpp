#include <cstdio>
#include <numeric>

#include "gfx9emu/emu.h"

namespace gfx9emu {

const char* fault_name(FaultKind kind) {
  switch (kind) {
    case FaultKind::BadLaunch:
      return "bad launch";
    case FaultKind::UnknownInstruction:
      return "unknown instruction";
    case FaultKind::RegisterRange:
      return "register out of range";
    case FaultKind::UndefinedRegister:
      return "undefined register";
    case FaultKind::UndefinedLds:
      return "undefined LDS";
    case FaultKind::UndefinedMemory:
      return "undefined memory";
    case FaultKind::MissingWaitcnt:
      return "missing s_waitcnt";
    case FaultKind::MissingWaitStates:
      return "missing wait states";
    case FaultKind::LdsRace:
      return "LDS race";
    case FaultKind::MemoryRace:
      return "memory race";
    case FaultKind::Incoherent:
      return "incoherent memory";
    case FaultKind::OutOfBounds:
      return "out of bounds";
    case FaultKind::UseAfterFree:
      return "use after free";
    case FaultKind::Misaligned:
      return "misaligned";
    case FaultKind::Replay:
      return "load that cannot be repeated";
    case FaultKind::Budget:
      return "instruction budget";
    case FaultKind::Barrier:
      return "barrier";
    case FaultKind::BadJump:
      return "bad jump";
    case FaultKind::Trap:
      return "trap";
  }
  return "fault";
}

namespace {

std::string place(const Where& w) {
  char offset[32];
  std::snprintf(offset, sizeof offset, "+0x%llx", static_cast<unsigned long long>(w.offset));
  std::string text = std::string(offset) + " `" + w.instruction + "`";
  if (!w.source.empty()) text += " (" + w.source + ")";
  return text;
}

}  // namespace

std::string Fault::to_string() const {
  std::string text = std::string(warning ? "warning: " : "") + fault_name(kind) + ": " + kernel;
  if (!where.instruction.empty()) {
    text += place(where) + ", workgroup " + std::to_string(workgroup.x) + "," +
            std::to_string(workgroup.y) + "," + std::to_string(workgroup.z) + " wave " +
            std::to_string(wave);
  }
  text += ": " + message;
  if (has_earlier) text += "; earlier: " + place(earlier);
  return text;
}

uint64_t Counters::total() const {
  return std::accumulate(instructions.begin(), instructions.end(), uint64_t{0});
}

Counters& Counters::operator+=(const Counters& o) {
  for (int i = 0; i < class_count; ++i) instructions[i] += o.instructions[i];
  mfma_passes += o.mfma_passes;
  wait_states += o.wait_states;
  lds_bytes += o.lds_bytes;
  lds_conflict_cycles += o.lds_conflict_cycles;
  global_read_bytes += o.global_read_bytes;
  global_written_bytes += o.global_written_bytes;
  scratch_bytes += o.scratch_bytes;
  barriers += o.barriers;
  return *this;
}

bool Report::ok() const {
  for (const Fault& f : faults) {
    if (!f.warning) return false;
  }
  return true;
}

}  // namespace gfx9emu
