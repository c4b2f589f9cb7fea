// Where the bytes of ggml's blocks of 32 elements are and what they stand for. Constants alone:
// code of any instruction set includes this.
#pragma once
#include <stdint.h>

#include "attn/attn.h"

namespace attn {

constexpr bool is_ggml(attn_dtype type) {
  return type == ATTN_Q8_0 || type == ATTN_Q4_0 || (type >= ATTN_Q4_1 && type <= ATTN_IQ4_NL);
}

// A block is d in f16, m in f16 where it has a minimum, one bit of each code where codes have five,
// and the codes: bytes with a sign, or the low halves of codes i and i + 16 in byte i.
// An element is (code - offset) d, with a minimum code d + m.
struct BlockLayout {
  bool has_min, has_bit;
  int code_bytes;
  int offset;
};
constexpr BlockLayout block_layout(attn_dtype type) {
  switch (type) {
    case ATTN_Q8_0:
      return {false, false, 32, 0};
    case ATTN_Q4_0:
      return {false, false, 16, 8};
    case ATTN_Q4_1:
      return {true, false, 16, 0};
    case ATTN_Q5_0:
      return {false, true, 16, 16};
    case ATTN_Q5_1:
      return {true, true, 16, 0};
    default:
      return {false, false, 16, 0};  // iq4_nl
  }
}
constexpr int block_bytes(attn_dtype type) {
  const BlockLayout layout = block_layout(type);
  return 2 + 2 * layout.has_min + 4 * layout.has_bit + layout.code_bytes;
}

// Of iq4_nl: an element is the one of these at its code, times d.
constexpr int8_t iq4_nl_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                      1,    13,   25,  38,  53,  69,  89,  113};

}  // namespace attn
