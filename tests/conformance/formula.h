// The formula of attention over the rows that the test wrote itself: no view, no layout and no mask
// of the library.
#pragma once
#include "backend.h"

namespace attn::test {

// float64; lse as float32.
Outputs formula(const Case& c, const Data& data);

// The same with the roundings that kernels on matrix units cannot avoid: the weights 2^(s - max) to
// q's type, where split-invariant kernels take the next integer above max and sum the rounded
// weights, as fp8 kernels do, and out to its type.
Outputs rounded_formula(const Case& c, const Data& data);

}  // namespace attn::test
