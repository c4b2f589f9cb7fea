// kernels/shared/ggml_layout.h for types of attn.h.
#pragma once
#include "attn/attn.h"
#include "kernels/shared/ggml_layout.h"

namespace attn {

static_assert(int(attn_element_q8_0) == ATTN_Q8_0 && int(attn_element_q4_0) == ATTN_Q4_0 &&
              int(attn_element_q4_1) == ATTN_Q4_1 && int(attn_element_q5_0) == ATTN_Q5_0 &&
              int(attn_element_q5_1) == ATTN_Q5_1 && int(attn_element_iq4_nl) == ATTN_IQ4_NL);

constexpr int block_bytes(attn_dtype type) {
  return block_layout(type).size();
}

}  // namespace attn
