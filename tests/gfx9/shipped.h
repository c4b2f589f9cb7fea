// The shipped gfx9 kernels with problems that take every path through them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "gfx9emu/emu.h"

namespace attn::test {

// Bytes of all outputs of a kernel's problems, one after another, or the first fault.
struct ShippedRun {
  std::string fault;
  std::vector<std::byte> outputs;
  uint64_t work = 0;                 // instructions issued, s_waitcnt, s_nop and s_barrier aside
  std::set<uint32_t> executed;       // indices of instructions, by workgroup 0; with Options::trace
  uint64_t clocks = 0;               // of workgroups 0, by the issue model; with Options::trace
  std::vector<ShippedRun> problems;  // the same of each problem that was run
};

// "merge_gfx942" and so on; shipped.cpp says how to add one.
// `slow`: instead those that are too slow to be mutated in every run of the tests.
std::vector<std::string> shipped_kernels(bool slow = false);
// The name of the same kernel for gfx950, whose problems are those of gfx942. "": there is none.
std::string on_gfx950(const std::string& name);
// All of gfx950's.
std::vector<std::string> shipped_on_gfx950();
// Its code object, freshly loaded. Null if the build made none.
std::unique_ptr<gfx9emu::CodeObject> load_shipped(const std::string& name, gfx9emu::Memory* memory);
// Runs the kernel of `object` by that name on all its problems, until one faults or, with `right`,
// has other outputs than that run. `data` seeds the values in them.
ShippedRun run_shipped(const std::string& name, const gfx9emu::CodeObject& object,
                       gfx9emu::Memory& memory, const gfx9emu::Options& options, uint32_t data = 42,
                       const ShippedRun* right = nullptr);
// On the problem of this number alone.
ShippedRun run_shipped_problem(const std::string& name, size_t number,
                               const gfx9emu::CodeObject& object, gfx9emu::Memory& memory,
                               const gfx9emu::Options& options, uint32_t data = 42);

}  // namespace attn::test
