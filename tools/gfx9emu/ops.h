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
  selects = 512,    // source 0 or 1 by the lane mask in source 2
};

// What runs an operation, and the types that this takes its operands for.
template <class Run>
struct Typed {
  Run run;
  Types types;
  constexpr Typed(Run run_, Types types_ = {}) : run(run_), types(types_) {}
};
using WaveOp = Typed<Handler>;
using LaneOp = Typed<LaneHandler>;

struct Op {
  std::string_view name;
  Class cls = Class::Valu;
  Handler run = nullptr;
  LaneHandler lanes = nullptr;
  Types types = {};
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

std::span<const Op> salu_ops();
std::span<const Op> valu_ops();  // of the widest instruction set that this host has
std::span<const Op> cross_lane_ops();
std::span<const Op> mfma_ops();
std::span<const Op> lds_ops();
std::span<const Op> memory_ops();

}  // namespace gfx9emu
