// Where the bytes of ggml's blocks of 32 elements are, and what they mean. Constants alone:
// code of any instruction set includes this. Types are those of types.h.
#ifndef ATTN_KERNELS_SHARED_GGML_LAYOUT_H
#define ATTN_KERNELS_SHARED_GGML_LAYOUT_H

#include "host_device.h"
#include "types.h"

namespace attn {

ATTN_HOST_DEVICE constexpr bool is_ggml(int type) {
  return type == attn_element_q8_0 || type == attn_element_q4_0 ||
         (type >= attn_element_q4_1 && type <= attn_element_iq4_nl);
}

// A block is d in f16, m in f16 where it has a minimum, one bit of each code where codes have five,
// and the codes: bytes with a sign, or the low halves of codes i and i + 16 in byte i.
// An element is (code - offset) d, with a minimum code d + m.
struct BlockLayout {
  bool has_min, has_bit;
  int code_bytes;
  int offset;

  ATTN_HOST_DEVICE constexpr int bits_at() const { return 2 + 2 * has_min; }
  ATTN_HOST_DEVICE constexpr int codes_at() const { return bits_at() + 4 * has_bit; }
  ATTN_HOST_DEVICE constexpr int size() const { return codes_at() + code_bytes; }
};
ATTN_HOST_DEVICE constexpr BlockLayout block_layout(int type) {
  switch (type) {
    case attn_element_q8_0:
      return {false, false, 32, 0};
    case attn_element_q4_0:
      return {false, false, 16, 8};
    case attn_element_q4_1:
      return {true, false, 16, 0};
    case attn_element_q5_0:
      return {false, true, 16, 16};
    case attn_element_q5_1:
      return {true, true, 16, 0};
    default:
      return {false, false, 16, 0};  // iq4_nl
  }
}

// iq4_nl: an element is the value at its code in this table, times d.
constexpr signed char iq4_nl_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                           1,    13,   25,  38,  53,  69,  89,  113};

}  // namespace attn
#endif
