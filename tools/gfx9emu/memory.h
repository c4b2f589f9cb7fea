// Device memory: allocations with bounds, and for every byte whether it was ever written.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <string>
#include <vector>

namespace gfx9emu {

struct Allocation {
  uint64_t address = 0;
  uint64_t bytes = 0;
  std::string label;
  std::byte* data = nullptr;
  uint8_t* defined = nullptr;  // one byte per byte: 0 never written, 1 written
  std::atomic<bool> freed{false};
};

// Addresses are the emulator's own and are never handed out twice, so that a use after free is
// seen. Host memory can be mapped at its own address. Allocating and freeing may run at any time;
// freeing what a running launch uses is a fault of that launch. Functions that return a string
// return the error, "" being success.
class Memory {
 public:
  Memory();
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // Aligned to 256 bytes; contents undefined. 0 if the host has not that much.
  uint64_t allocate(uint64_t bytes, std::string label = "");
  // The next allocation begins at `address` (a multiple of 256) unless addresses are beyond it.
  void skip_to(uint64_t address);
  // Makes `bytes` at a host pointer visible at the same address; defined. free() unmaps it.
  std::string map_host(void* pointer, uint64_t bytes, std::string label = "");
  std::string free(uint64_t address);

  std::string write(uint64_t address, std::span<const std::byte> from);
  // Undefined bytes are copied as they are.
  std::string read(uint64_t address, std::span<std::byte> to) const;
  std::string fill(uint64_t address, uint8_t value, uint64_t bytes);
  // Definedness goes along with the bytes. Ranges may overlap.
  std::string copy(uint64_t to, uint64_t from, uint64_t bytes);

  // The allocation that holds `address`, or did before it was freed, or null. Stays valid until the
  // launch ends.
  const Allocation* find(uint64_t address) const;
  // Why [address, address + bytes) cannot be accessed, as a sentence without its full stop.
  std::string explain(uint64_t address, uint64_t bytes) const;
  uint64_t bytes_in_use() const;

  // Between these, what is freed keeps its bytes, so that a launch that still uses them can be
  // told.
  void begin_launch();
  void end_launch();

 private:
  struct Owned;
  std::string check(uint64_t address, uint64_t bytes, Allocation** found) const;
  std::vector<std::unique_ptr<Owned>>::iterator at_or_after(uint64_t address);
  void release_freed();

  mutable std::shared_mutex mutex_;
  std::vector<std::unique_ptr<Owned>> allocations_;  // by address
  uint64_t next_ = 0;
  uint64_t in_use_ = 0;
  int launches_ = 0;
  std::vector<Owned*> freed_;                      // whose bytes are still there
  std::vector<std::unique_ptr<Owned>> forgotten_;  // at addresses that are in use again
  size_t freed_count_ = 0;                         // of allocations_
};

}  // namespace gfx9emu
