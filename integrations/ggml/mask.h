// What ggml's masks say. ggml gives attention a dense array of f16 that is mostly 0 and -inf; where
// each row sees one run of keys, lengths and flags say the same in a few bytes, and libattn reads
// no key that nobody sees.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

namespace attn::ggml {

// An f16 array [batch, rows, keys] of -inf (hidden) and other numbers (added to scores). Strides
// count elements; keys are adjacent.
struct Mask {
  const std::uint16_t* data;
  std::int64_t batch, rows, keys;
  std::int64_t batch_stride, row_stride;
};

// Row i of batch entry b, whose last row is rows - 1, sees the keys from
//   max(begin[b], last - window_left)  to  last,  where last = end[b] - 1,
// or last = end[b] - 1 - (rows - 1 - i) if causal.
struct Ranges {
  bool causal = false;
  std::int64_t window_left = -1;         // -1: unbounded
  std::vector<std::int32_t> begin, end;  // [batch]
};

// The ranges that say the same as the mask; none if it has other numbers than 0 and -inf, or rows
// that are not such ranges.
std::optional<Ranges> ranges_of(const Mask& mask);

}  // namespace attn::ggml
