// gfx9emu: executes gfx942 code objects on the host, more strictly than the silicon does.
//
//   Memory memory;
//   std::string error;
//   auto object = CodeObject::load(bytes, &memory, &error);
//   Report report = launch(memory, *object->kernel("add"), {grid}, {block}, kernarg, 0, {});
//   for (const Fault& f : report.faults) puts(f.to_string().c_str());
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "gfx9emu/code_object.h"
#include "gfx9emu/inst.h"
#include "gfx9emu/level.h"
#include "gfx9emu/memory.h"
#include "gfx9emu/scope.h"

namespace gfx9emu {

struct Dim3 {
  uint32_t x = 1, y = 1, z = 1;
};

struct Options {
  bool checks = true;
  Level level = Level::Strict;
  // Wait states are part of the checks; they can be left out by themselves.
  bool hazards = true;
  // So are races, stale caches and outstanding stores in device memory (memory_model.h).
  bool memory_model = true;
  // How far apart workgroups count as: Agent, on different dies of a device; System, on different
  // devices.
  Scope apart = Scope::Agent;
  // 0: workgroups and waves take turns in order and loads deliver at once. Otherwise workgroups
  // come in another order, waves are interleaved at random, and what a load returns appears in its
  // registers at a random time before the wait.
  uint64_t seed = 0;
  // Instructions that one wave may execute; an endless loop ends here.
  uint64_t instruction_budget = 1ull << 32;
  // Host threads that workgroups are spread over; 0: all cores.
  int threads = 1;
  // Faults to report in all; a workgroup stops at its first error in any case.
  int max_faults = 16;
  // Record the instructions that each wave of workgroup 0 executes.
  bool trace = false;
};

enum class FaultKind : uint8_t {
  BadLaunch,  // grid, block, kernarg size, LDS: nothing was run
  UnknownInstruction,
  RegisterRange,      // outside the allocation
  UndefinedRegister,  // read, never written
  UndefinedLds,
  UndefinedMemory,
  MissingWaitcnt,     // a load's result used, or its register overwritten, before it has arrived
  MissingWaitStates,  // s_nop or independent instructions
  LdsRace,
  MemoryRace,   // two waves access device memory and nothing orders them
  Incoherent,   // what was written there is not written back, or a cache may be stale
  OutOfBounds,  // device memory, LDS or scratch
  UseAfterFree,
  Misaligned,
  Budget,   // endless loop
  Barrier,  // not all waves reach it
  BadJump,
  Trap,
  Replay,  // a load that a page fault repeats would not find its operands again
};
const char* fault_name(FaultKind kind);

struct Where {
  std::string instruction;  // its text
  uint64_t offset = 0;      // from the kernel's entry
  std::string source;       // "file.s:12", or ""
};

struct Fault {
  FaultKind kind = FaultKind::BadLaunch;
  bool warning = false;  // the workgroup went on
  std::string message;   // "v148 is outside the 48 registers that the kernel has"
  std::string kernel;
  Dim3 workgroup{0, 0, 0};
  uint32_t wave = 0;
  Where where;
  bool has_earlier = false;
  Where earlier;  // the load not waited for, the write raced with, ...
  // Everything, on one line.
  std::string to_string() const;
};

struct Counters {
  std::array<uint64_t, class_count> instructions{};  // by Class
  uint64_t mfma_passes = 0;
  uint64_t wait_states = 0;  // spent in s_nop
  uint64_t lds_bytes = 0;
  uint64_t lds_conflict_cycles = 0;  // model.h says how; counted with checks or a trace
  uint64_t global_read_bytes = 0, global_written_bytes = 0;  // buffer, global, flat; active lanes
  uint64_t scratch_bytes = 0;
  uint64_t barriers = 0;

  uint64_t total() const;
  Counters& operator+=(const Counters& o);
};

// One executed instruction, in a wave's order.
struct TraceEntry {
  uint32_t inst = 0;        // index into the object's program().insts
  uint16_t lds_cycles = 0;  // LDS clocks with bank conflicts; 0 for others
  uint16_t bytes = 0;       // moved by all active lanes, 65535 at most
};

struct Report {
  std::vector<Fault> faults;
  Counters counters;
  std::vector<Counters> waves;                  // of workgroup 0, by wave
  std::vector<std::vector<TraceEntry>> traces;  // of workgroup 0, by wave, if asked for

  // Nothing but warnings.
  bool ok() const;
};

// Runs the grid to its end or to the first errors. `grid` is in workgroups, `block` in work items.
// `kernarg` is what the caller packed; hidden arguments beyond it are filled in. `dynamic_lds`
// bytes follow the kernel's fixed LDS. Never throws on account of the kernel.
Report launch(Memory& memory, const Kernel& kernel, Dim3 grid, Dim3 block,
              std::span<const std::byte> kernarg, uint32_t dynamic_lds, const Options& options);

}  // namespace gfx9emu
