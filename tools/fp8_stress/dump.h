// One output row of a case with all that went into it: raw bits and decoded values side by side.
#pragma once

#include <cstdio>
#include <span>

#include "common/safetensors.h"
#include "fp8_stress/model.h"

namespace attn::tools {

// The row whose element is furthest from the truth. out: as the kernel stored it.
void dump_worst_row(std::FILE* to, const Numerics& rule, const StressInputs& inputs,
                    const Tensor& out, attn_dtype out_type, std::span<const double> truth,
                    std::span<const double> model);

}  // namespace attn::tools
