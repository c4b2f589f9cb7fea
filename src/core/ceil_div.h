// Pieces of a size that cover a length.
#pragma once
#include <cstdint>

namespace attn {

// For a >= 0, b > 0.
constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
// The multiple of b that is not less than a.
constexpr int64_t round_up(int64_t a, int64_t b) {
  return ceil_div(a, b) * b;
}

}  // namespace attn
