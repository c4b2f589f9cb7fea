// The table of operations: what the decoder must know of each by name, and the function that runs
// it.
#pragma once
#include <span>
#include <string_view>

#include "gfx9emu/inst.h"

namespace gfx9emu {

// What an operation touches besides its written operands.
enum OpFlags : uint16_t {
  reads_dst = 1,
  writes_scc = 2,
  reads_scc = 4,
  reads_vcc = 8,
  writes_vcc = 16,
  reads_m0 = 32,
  reads_exec = 64,
  writes_exec = 128,
  own_lanes = 256,  // reads or writes other lanes than EXEC's and looks after that itself
  // Source 0 or 1 by the lane mask in source 2.
  selects = 512,
  // Moves source 0 and does nothing with it: undefined it may be, and stays.
  copies = 1024,
  // Source 2 has a bit for each lane, of which those of inactive lanes do not count.
  lane_mask = 2048,
  // Bits of source 1 where source 0 is set, else of source 2.
  inserts = 4096,
  writes_m0 = 8192,
  // M0 is added to the number of the source's register, of the destination's.
  moves_src = 16384,
  moves_dst = 32768,
};

// What runs an operation, and the types that this takes its operands for.
template <class Run>
struct Typed {
  Run run;
  Types types;
  BitFunction bits;
  constexpr Typed(Run run_, Types types_ = {}, BitFunction bits_ = nullptr)
      : run(run_), types(types_), bits(bits_) {}
};
using WaveOp = Typed<Handler>;
using LaneOp = Typed<LaneHandler>;

struct Op {
  std::string_view name;
  Class cls = Class::Valu;
  Handler run = nullptr;
  LaneHandler lanes = nullptr;
  Types types = {};
  BitFunction bits = nullptr;
  uint8_t dsts = 1;
  uint16_t flags = 0;
  // Memory operations.
  uint8_t bytes = 0;
  bool load = false, store = false;
  Atomic atomic = Atomic::None;
  bool sign = false;
  uint8_t d16 = 0;
  uint16_t stride = 0;
};

// Null if there is no such operation. `name` is without its encoding's suffix.
const Op* find_op(std::string_view name);
// Whether gfx942 lacks it or, with the suffix .ocp, has another of the name.
inline bool gfx950_alone(const Op& op) {
  return op.name.ends_with(".ocp") || op.name.ends_with("_f8f6f4") ||
         op.name.find("_tr_") != op.name.npos || op.name.find("_lds_dwordx") != op.name.npos ||
         op.name.starts_with("v_permlane");
}

std::span<const Op> salu_ops();
std::span<const Op> valu_ops();  // of the widest instruction set that this host has
std::span<const Op> cross_lane_ops();
std::span<const Op> mfma_ops();
std::span<const Op> lds_ops();
std::span<const Op> memory_ops();

}  // namespace gfx9emu
