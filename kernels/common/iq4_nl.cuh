// The values of iq4_nl as words that byte permutations look up.
#pragma once
#include "../shared/ggml_layout.h"

namespace attn::device {

// Four of them, the first one lowest.
__device__ constexpr unsigned iq4_nl_word(int first) {
  unsigned word = 0;
  for (int i = 3; i >= 0; --i) word = word << 8 | (unsigned char)iq4_nl_values[first + i];
  return word;
}

}  // namespace attn::device
