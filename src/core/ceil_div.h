// Pieces of a size that cover a length.
#pragma once
#include <cstddef>
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
// From the beginning of an array to the next one in the same memory: each begins as aligned as
// memory of attn_alloc.
constexpr size_t aligned_bytes(size_t bytes) {
  return size_t(round_up(int64_t(bytes), 256));
}

}  // namespace attn
