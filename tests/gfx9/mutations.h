// A kernel with something left out or wrong, and why it may not matter.
#pragma once
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "gfx9emu/code_object.h"

namespace attn::test {

enum class MutationKind { Wait, Nop, Barrier, Descriptor, Register, Cache };

struct Mutation {
  MutationKind kind;
  std::string text;
  int index = -1;        // of the instruction in the program
  std::string replaced;  // Register: what stands in its place
  std::function<void(gfx9emu::CodeObject&)> apply;
};
const char* kind_name(MutationKind kind);

// Each s_waitcnt, s_nop and s_barrier dropped, each field of the descriptor lowered. `executed` are
// the instructions that are reached.
std::vector<Mutation> dropped_and_lowered(const std::string& kernel,
                                          const gfx9emu::CodeObject& object,
                                          const std::set<uint32_t>& executed);
// Each buffer_wbl2, buffer_inv and s_waitcnt beside an atomic of device memory dropped or weakened.
std::vector<Mutation> weakened_atomics(const std::string& kernel,
                                       const gfx9emu::CodeObject& object);
// One register of each of `count` random operands swapped for another of its kind and size.
std::vector<Mutation> swapped_registers(const std::string& kernel,
                                        const gfx9emu::CodeObject& object,
                                        const std::set<uint32_t>& executed, int count,
                                        uint32_t seed);

// Whether it is an s_nop that LLVM's hazard recognizer misses, which tests ask about every kernel.
bool is_reported_by_llvm(const std::string& kernel, const Mutation& mutation);

// Why a mutation that no run has noticed is harmless, shown by other means than looking at results
// of the same problems; "" if it is not shown.
//   s_nop       LLVM's hazard recognizer does not put it back (tools/amdhsa hazards)
//   s_waitcnt, s_barrier  the results are right for many random latencies and orders of waves
//   registers   on other problems, each time the instruction runs it leaves the same values, or
//   what
//               it leaves otherwise is never read
std::string why_harmless(const std::string& kernel, const Mutation& mutation);

}  // namespace attn::test
