// One attention through the C ABI: plan, copies, launch, result.
#pragma once

#include "attn/io.h"

namespace attn::tools {

struct ForwardResult {
  std::string kernel;
  size_t workspace = 0;
  double plan_us = 0, run_us = 0;
  Tensor out, lse;  // [B, Sq, Hq, Dv] and [B, Hq, Sq], or [total, Hq, Dv] and [Hq, total]
};

// Runs the input's problem, whose out_type is set; stages the input. What no kernel writes holds
// the byte `unwritten` in out and -inf in lse.
ForwardResult run_forward(const context& device, Input& input, int unwritten, Progress& progress);

}  // namespace attn::tools
