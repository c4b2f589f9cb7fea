// Whether the bounds tell right from wrong: the model in the place of a kernel, as it is and with
// each planted bug. Needs no backend.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "fp8_stress/model.h"

namespace attn::tools {

struct BugCheck {
  std::string failed;    // the first case that shows it, "" if none does
  bool changes = false;  // whether it changes an output of any case so far
};

struct SelfCheck {
  int cases = 0, above = 0;  // above: where the model's own error is above a bound's fixed part
  std::vector<std::string> broken;  // "case: bounds" of the model as it is
  std::array<BugCheck, std::size(planted_bugs)> bugs;
};

// All cases of one choice; a bug is tried until a case has shown it.
SelfCheck self_check(const Numerics& rule, const StressOptions& options, ThreadPool& pool);

// Choice `index` of those from `seed`: 1 to 320 queries and keys, at most 64 in 4 of 9, 1 to 4
// heads, head_dim a multiple of 16 up to 128.
StressOptions random_choice(uint64_t seed, uint64_t index);

}  // namespace attn::tools
