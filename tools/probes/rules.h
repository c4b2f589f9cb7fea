// The emulator's tables, for probes to be made of.
#pragma once
#include "attn/common.h"

namespace attn::probes {

// {"operations": [{"name", "result", "sources", "class", "destinations", "bytes", "load", "store",
//    "atomic"}], "result" and "sources" f16, f32, f64, fp8 or, for what is no float, "",
//  "hazards": [{"text", "strict", "isa"}], at each level fault, warning or nothing,
//  "mfma": [{"name", "a", "b", "m", "n", "k", "blocks", "passes", "a_regs", "d_regs"}],
//  "constants": {NAME: the issue model's}}
tools::Json emulator_rules();

}  // namespace attn::probes
