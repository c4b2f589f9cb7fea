// The state of one wave and of its workgroup while they run.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "gfx9emu/emu.h"
#include "gfx9emu/hazards.h"
#include "gfx9emu/memory_model.h"
#include "gfx9emu/wave_registers.h"

namespace gfx9emu {

struct DefinedRow {
  uint64_t half[2] = {0, 0};  // lanes whose low, high 16 bits were written
};

class Workgroup;

// "" or which register of the instruction lies outside what the kernel allocates.
std::string bad_register_message(const Kernel& kernel, const Inst& inst, Level level);

// "v17": register i of the range.
std::string register_name(const RegRange& reg, int i);

// What all waves of a launch share.
struct LaunchContext {
  Memory* memory = nullptr;
  const Kernel* kernel = nullptr;
  const Program* program = nullptr;
  const Options* options = nullptr;
  uint64_t image_address = 0;
  uint64_t kernarg_address = 0;
  uint64_t dispatch_address = 0;
  uint64_t queue_address = 0;
  Dim3 grid, block;
  uint32_t lds_bytes = 0;
  // By instruction: 1 where it names a register outside the allocation.
  std::vector<uint8_t> bad_registers;
  // By instruction, with hazards checked.
  std::vector<HazardRoles> hazard_roles;
  bool replays = false;  // checked: loads may be repeated after page faults
  MemoryModel* memory_model = nullptr;
};

// A memory operation that its counter still counts.
struct Outstanding {
  uint64_t id = 0;
  const Inst* inst = nullptr;
  uint8_t counters = 0;  // how many of vmcnt and lgkmcnt still count it
  bool delivered = false;
  // Registers that its data goes to: the data row by row, and the lanes it is for.
  RegRange dst;
  uint8_t halves = 3;
  std::vector<Row> data;
  std::vector<uint32_t> scalars;
  uint64_t lanes = 0;
  // LDS accessed: one offset per lane (or more), each of `lds_bytes`. A barrier orders it only if
  // it was waited for. LDS-DMA carries its bytes in `lds_data`.
  std::vector<uint32_t> lds_offsets;
  uint32_t lds_bytes = 0;
  bool lds_write = false;
  std::vector<uint32_t> lds_data;
};

class Wave : public WaveRegisters {
 public:
  Wave(Workgroup& group, const LaunchContext& context, uint32_t index);

  uint32_t next = 0;  // index of the instruction to run after this one
  bool done = false;
  bool at_barrier = false;
  bool checks = true;
  bool late = false;  // loads deliver late
  bool track = true;  // outstanding operations are kept: checks or late

  const LaunchContext& context;
  Workgroup& group;
  const uint32_t index;  // in the workgroup
  const Inst* current = nullptr;
  Counters counters;
  std::vector<TraceEntry> trace;
  TraceEntry entry;  // of the current instruction
  uint64_t executed = 0;
  int rounding = 0;  // of f32, as <cfenv> names it

  void set_mode(uint32_t value);

  int physical(const RegRange& r) const {
    return r.file == RegFile::Agpr ? static_cast<int>(a - v) + r.first : r.first;
  }

  // --- Faults. The first error stops the wave; handlers return after one.
  void fail(FaultKind kind, std::string message, const Inst* earlier = nullptr);
  void warn(FaultKind kind, std::string message, const Inst* earlier = nullptr);
  Where where(const Inst& inst) const;

  // --- Definedness.
  std::vector<DefinedRow> defined;                           // by physical register
  std::array<uint32_t, scalar::count + 1> scalar_defined{};  // bit by bit
  uint64_t scalar_defined64(int r) const {
    return scalar_defined[r] | uint64_t{scalar_defined[r + 1]} << 32;
  }
  // Faults unless lanes `lanes` of the register were written.
  bool check_defined(const RegRange& reg, uint8_t halves, uint64_t lanes);
  void define(const RegRange& reg, uint8_t halves, uint64_t lanes);
  // Of register i and a lane, bit by bit.
  uint32_t defined_bits(const RegRange& reg, int i, int lane) const;
  void set_defined_bits(const RegRange& reg, int i, int lane, uint32_t bits);
  // Words in lanes of VGPRs (register * 64 + lane) and in scratch (scratch_key + byte) that are
  // defined in some bits, not in whole halves: SGPRs that were spilled there. By halves they count
  // as undefined.
  static constexpr uint64_t scratch_key = uint64_t{1} << 32;
  std::unordered_map<uint64_t, uint32_t> partly_defined;
  void note_partly_defined(uint64_t key, uint32_t bits);
  // By register of a scratch load: lanes that got bytes which were never written. What a kernel
  // spills may be undefined and stays so.
  std::array<uint64_t, 4> loaded_undefined{};
  struct Partly {
    int reg, lane;
    uint32_t bits;
  };
  std::vector<Partly> loaded_partly;
  // Bit i: dword i of the scalar result is nothing that was written, such as what a load takes
  // along behind a kernel's arguments. It stays undefined.
  uint32_t scalars_undefined = 0;

  // --- Outstanding operations, oldest first. Handlers issue one for each memory access, after it.
  struct Counts {
    bool vm = false;
    int lgkm = 0;
    bool unordered = false;  // SMEM and flat: only a wait for 0 covers it
  };
  // What a vector load returned goes to the lanes of `dst`.
  void issue_load(const Inst& inst, Counts counts, const RegRange& dst, uint8_t halves,
                  std::span<const Row> data, uint64_t lanes);
  void issue_scalar_load(const Inst& inst, Counts counts, const RegRange& dst,
                         std::span<const uint32_t> data);
  // Without registers. The LDS bytes, if it touches any; with `lds_data` they are written later.
  void issue_other(const Inst& inst, Counts counts);
  void issue_lds(const Inst& inst, Counts counts, std::span<const uint32_t> offsets, uint32_t bytes,
                 bool write);
  void issue_lds_dma(const Inst& inst, std::span<const uint32_t> offsets, uint32_t bytes,
                     std::span<const uint32_t> data);
  void wait(int vmcnt, int lgkmcnt);
  // LDS accesses that have not been waited for reach over a barrier.
  void carry_lds_over_barrier();

  // The number of the next one, and up to which those of device memory have been waited for.
  uint64_t next_operation() const { return next_id_; }
  uint64_t completed_operations() const {
    return vm_queue_.empty() ? next_id_ - 1 : vm_queue_.front().id - 1;
  }

  const Allocation* last_allocation = nullptr;  // of the last device access, a guess for the next
  std::unique_ptr<MemoryView> view;             // with the memory model

  // Runs until the wave ends, waits at a barrier, fails or has executed `limit` instructions.
  void run(uint64_t limit);

 private:
  friend class Workgroup;
  struct Queued {
    uint64_t id;
    uint8_t counts;
    bool unordered;
  };

  bool fetch();
  bool check_before(const Inst& inst);
  void check_hazards(const Inst& inst);
  bool check_replay(const Inst& inst);
  bool check_operand(const Inst& inst, int i, uint64_t exec);
  bool check_partly_used(const Inst& inst);
  bool check_lane_mask(const RegRange& reg);
  bool check_in_flight(const RegRange& reg, bool is_write);
  void undefine_loaded(const Inst& inst);
  void define_after(const Inst& inst, uint64_t exec);
  void define_copy(const Inst& inst, uint64_t exec);
  void define_bits(const Inst& inst);
  void define_other_half(const Inst& inst, uint64_t lanes);
  void define_inserted(const Inst& inst, uint64_t exec);
  const Inst* moved(const Inst& inst);
  void execute(const Inst& inst);
  void count(const Inst& inst);

  Outstanding& issue(const Inst& inst, Counts counts);
  void mark_in_flight(const Outstanding& op);
  Outstanding* find(uint64_t id);
  void retire(uint64_t id);
  void deliver(Outstanding& op);
  void deliver_some();
  void drop_retired();

  std::vector<Row> file_;
  std::deque<Outstanding> operations_;
  std::vector<Outstanding> spare_;  // for their vectors' memory
  std::deque<Queued> vm_queue_, lgkm_queue_;
  int lgkm_count_ = 0;
  HazardHistory hazards_;
  Clause clause_;
  // Instructions with M0 added to registers, by instruction and M0.
  std::unordered_map<uint64_t, Inst> moved_;
  uint64_t bits_defined_ = 0;  // of the result of an operation on bits
  bool scc_defined_ = false;
  uint64_t next_id_ = 1;
  std::vector<uint64_t> in_flight_;                             // by physical register: operation
  std::array<uint64_t, scalar::count + 1> scalar_in_flight_{};  // likewise
};

// For every LDS byte, who touched it last.
struct LdsByte {
  uint32_t write_epoch = 0;  // 0: never written
  uint32_t read_epoch = 0;
  uint32_t writer_inst = 0, reader_inst = 0;
  uint16_t readers = 0;  // waves, of read_epoch
  uint16_t writers = 0;  // likewise; several where all wrote the same value
  bool writer_atomic = false;
  bool in_flight = false;  // LDS-DMA that has not been waited for
};

class Workgroup {
 public:
  Workgroup(const LaunchContext& context, Dim3 id, uint64_t seed);

  const Dim3 id;
  std::vector<std::byte> lds;
  std::vector<LdsByte> lds_state;  // empty with checks off
  std::vector<std::byte> scratch;  // per lane of the workgroup, one after the other
  std::vector<uint8_t> scratch_defined;
  uint32_t epoch = 1;  // barriers passed, plus 1
  std::vector<std::unique_ptr<Wave>> waves;
  std::vector<Fault> faults;
  std::vector<const Inst*> warned;  // each instruction warns once
  std::mt19937_64 random;

  // The byte ranges of an access by `wave`; false after a fault.
  bool note_lds_read(Wave& wave, uint32_t offset, uint32_t bytes);
  // `value` are the bytes to be written; null: not known yet.
  bool note_lds_write(Wave& wave, uint32_t offset, uint32_t bytes, const void* value, bool atomic,
                      bool dma = false);
  // The same bytes count as touched after the barrier that has just been passed.
  void renew_lds(Wave& wave, uint32_t offset, uint32_t bytes, bool write);
  void land_lds_dma(uint32_t offset, uint32_t bytes);

  // Lets its waves execute for a while; false if none can any more.
  bool run();

 private:
  void release_barrier();
  const LaunchContext& context_;
};

}  // namespace gfx9emu
