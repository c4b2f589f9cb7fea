// What the host sides of the kernels share: from problems to parameter structs.
#pragma once
#include <algorithm>
#include <cstring>

#include "attn/attn.h"
#include "kernels/kernel.h"
#include "kernels/shared/types.h"

namespace attn {

static_assert(int(attn_element_f32) == ATTN_F32 && int(attn_element_f16) == ATTN_F16 &&
              int(attn_element_bf16) == ATTN_BF16 &&
              int(attn_element_f8_e4m3fn) == ATTN_F8_E4M3FN &&
              int(attn_element_f8_e5m2) == ATTN_F8_E5M2 && int(attn_element_i8) == ATTN_I8 &&
              int(attn_element_i4) == ATTN_I4);  // ggml's: core/ggml_layout.h

constexpr int64_t max_grid = (int64_t{1} << 31) - 1;  // blocks of a launch along x

// Blocks of a forward launch that has this many for its queries: rows that belong to no sequence
// are stored even where no sequence can have a query.
inline int64_t forward_blocks(const Problem& p, int64_t blocks) {
  return p.q_layout == ATTN_PACKED && p.total_q > 0 ? std::max<int64_t>(1, blocks) : blocks;
}

inline void set(long long (&to)[3], const attn_strides& from) {
  to[0] = from.batch, to[1] = from.seq, to[2] = from.head;
}

template <class T>
void store(const T& kernarg, Parameters* to) {
  static_assert(sizeof kernarg <= max_kernarg_bytes);
  std::memcpy(to->kernarg, &kernarg, sizeof kernarg);
}

}  // namespace attn
