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

// How a kernel rounds the weights of a case; kernels that round alike have the same.
struct Rounding {
  bool split_invariant = false, scaled_weights = false;
  double lag = 0;  // 0: weights are relative to the row's maximum
  int keys = 0;    // of a tile; 0 without lag
  bool last_tile_first = false, rounded_largest = false;  // of `lag`
  auto operator<=>(const Rounding&) const = default;
};
Rounding rounding_of(const Case& c, const Numerics& numerics);

// The same with the roundings that kernels on matrix units cannot avoid: the weights 2^(s - m) to
// q's type, and out to its type. m is the row's maximum or, with `lag`, lags behind it as Numerics
// has it. Split-invariant kernels take the next integer above the maximum and sum the rounded
// weights, as fp8 kernels do.
Outputs rounded_formula(const Case& c, const Data& data, const Rounding& as);

}  // namespace attn::test
