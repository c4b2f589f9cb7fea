// The formula of attention over the rows that the test wrote itself: no view, no layout and no mask
// of the library.
#pragma once
#include "backend.h"

namespace attn::test {

// float64; lse as float32.
Outputs formula(const Case& c, const Data& data);

// A mistake of one K/V head of one sequence: the keys [begin, end) count so often, as does the
// sink.
struct Planted {
  int64_t b = 0, kv_head = 0, begin = 0, end = 0;
  int times = 1, sink_times = 1;
};
Outputs formula_with(const Planted& mistake, const Case& c, const Data& data);

// The same with the rounding that kernels on matrix units cannot avoid: the weights 2^(s - max) to
// q's type, where split-invariant kernels take the next integer above max and sum the rounded
// weights, as fp8 kernels do. out is left unrounded.
Outputs rounded_formula(const Case& c, const Data& data, bool split_invariant);

}  // namespace attn::test
