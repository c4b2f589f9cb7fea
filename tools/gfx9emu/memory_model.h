// Which wave may see which other wave's operations on device memory. README.md says how.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "gfx9emu/inst.h"
#include "gfx9emu/memory.h"
#include "gfx9emu/scope.h"

namespace gfx9emu {

class MemoryView;
struct LaunchContext;
enum class FaultKind : uint8_t;

// What a wave knows of another wave's operations. All are numbers of operations: those up to it.
struct Known {
  uint32_t issued = 0;   // came before, in the order that barriers and atomics make
  uint32_t done = 0;     // had been waited for by then
  uint32_t written = 0;  // had been written back by then (buffer_wbl2)
  // The same when this wave last dropped what its vector caches held (buffer_inv), and its scalar
  // cache (s_dcache_inv).
  uint32_t fresh_done = 0, fresh_written = 0;
  uint32_t scalar_done = 0, scalar_written = 0;

  void join(const Known& o);
};

struct KnownWave {
  uint32_t wave = 0;
  Known known;
};
using Knowledge = std::vector<KnownWave>;  // by wave
using SharedKnowledge = std::shared_ptr<const Knowledge>;

// What an atomic access or a store with sc bits hands on to those who read its value.
struct Released {
  uint32_t wave = 0;
  Scope scope = Scope::Wave;
  Known own;
  SharedKnowledge rest;
};

// For every dword of device memory who wrote and who read it last: wave, number of the operation,
// instruction, and which of the four bytes. 0: nobody in this launch.
struct Cell {
  uint64_t write, read;
};

// Of a launch.
class MemoryModel {
 public:
  static constexpr uint32_t wave_bits = 22, clock_bits = 22, inst_bits = 16;

  // Null if the launch has more waves or instructions than a Cell can name.
  static std::unique_ptr<MemoryModel> create(const LaunchContext& context);
  explicit MemoryModel(const LaunchContext& context);

  // Whether workgroups may hand data to each other: the program has atomics or sc bits.
  bool synchronises() const { return synchronises_; }
  // While this is held, no other wave has an atomic access.
  std::unique_lock<std::mutex> exclusive(const Inst& inst);

 private:
  friend class MemoryView;
  struct Free {
    void operator()(Cell* cells) const { std::free(cells); }
  };
  Cell* cells(const Allocation& a);

  uint32_t waves_per_group_ = 1;
  bool synchronises_ = false;
  std::shared_mutex mutex_;
  std::unordered_map<const Allocation*, std::unique_ptr<Cell[], Free>> cells_;
  std::mutex atomics_;
  std::unordered_map<uint64_t, std::vector<Released>> released_;  // by address of a dword
};

// Of a wave.
class MemoryView {
 public:
  MemoryView(MemoryModel& model, class Wave& wave);

  // The current instruction accesses bytes [at, at + bytes); false after a fault of the wave.
  // `value`: what a store is going to leave there; it does so before this returns.
  bool note(const Allocation& a, uint64_t at, uint32_t bytes, bool read, bool write,
            const void* value);
  void write_back(const Inst& inst);  // before the operation is issued
  void invalidate(const Inst& inst);
  void invalidate_scalar();
  // All waves of a workgroup have met at a barrier.
  static void meet(std::span<const std::unique_ptr<Wave>> waves);

 private:
  // What takes effect when the operation has been waited for.
  struct Pending {
    uint64_t clock = 0;
    bool write_back = false;
    SharedKnowledge then;            // write-back: what was known when it was issued
    std::vector<Released> released;  // atomic: what it read
  };
  struct Access;

  Cell* cells_of(const Allocation& a);
  Known own() const;
  Known known(uint32_t wave) const;
  void settle();
  template <class F>
  void change(F f);
  void acquire(const std::vector<Released>& released);
  bool is_mate(uint32_t wave) const;
  bool check_read(const Access& access, uint64_t write);
  bool check_write(const Access& access, uint64_t write);
  bool check_write_after_read(const Access& access, uint64_t read);
  bool fail(const Access& access, uint64_t entry, FaultKind kind, bool read,
            const std::string& why);
  void synchronise(uint64_t address, uint64_t clock, Scope scope, bool acquires, bool releases,
                   bool keeps);

  MemoryModel& model_;
  Wave& wave_;
  const uint32_t id_;
  uint32_t written_ = 0, scalar_done_ = 0;  // of its own operations
  SharedKnowledge rest_;                    // of all other waves that it has met
  std::vector<Pending> pending_;
  // The last allocations and their cells.
  struct Place {
    const Allocation* allocation = nullptr;
    Cell* cells = nullptr;
  };
  Place places_[8];
};

}  // namespace gfx9emu
