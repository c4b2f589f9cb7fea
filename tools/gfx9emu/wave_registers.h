// The registers of a wave: all that the vector ALU sees of it.
#pragma once
#include <cstdint>
#include <cstring>

#include "gfx9emu/inst.h"

namespace gfx9emu {

inline constexpr int wave_lanes = 64;

// One vector register: a word for each lane.
struct alignas(64) Row {
  uint32_t lane[wave_lanes];
};

struct WaveRegisters {
  Row* v = nullptr;  // arch VGPRs
  Row* a = nullptr;  // AGPRs, in the same file
  uint32_t s[scalar::count + 1] = {};
  uint32_t mode = 0;
  bool flush_f32_in = false, flush_f32_out = false;  // from `mode`
  bool gpr_index = false;                            // MODE: M0 is added to the numbers of VGPRs
  bool failed = false;

  uint64_t exec() const { return scalar64(scalar::exec); }
  uint64_t scalar64(int r) const {
    uint64_t x;
    std::memcpy(&x, s + r, 8);
    return x;
  }
  void set_scalar64(int r, uint64_t x) { std::memcpy(s + r, &x, 8); }
  bool scc() const { return s[scalar::scc] != 0; }
  void set_scc(bool b) { s[scalar::scc] = b; }
  Row& row(const RegRange& r, int i = 0) { return (r.file == RegFile::Agpr ? a : v)[r.first + i]; }
};

// A fault of the wave: an operation that is encoded in a way that is not known.
void refuse(WaveRegisters& w, const char* message);

}  // namespace gfx9emu
