// What the host sides of the kernels share: from problems to parameter structs.
#pragma once
#include <algorithm>

#include "attn/attn.h"
#include "kernels/kernel.h"
#include "kernels/shared/types.h"

namespace attn {

constexpr int64_t max_grid = (int64_t{1} << 31) - 1;  // blocks of a launch along x

// Blocks of a forward launch that has this many for its queries: rows that belong to no sequence
// are stored even where no sequence can have a query.
inline int64_t forward_blocks(const Problem& p, int64_t blocks) {
  return p.q_layout == ATTN_PACKED && p.total_q > 0 ? std::max<int64_t>(1, blocks) : blocks;
}

inline void set(long long (&to)[3], const attn_strides& from) {
  to[0] = from.batch, to[1] = from.seq, to[2] = from.head;
}

// Pointers into the workspace: a plan says where in it, a run adds its address.
template <class T>
T* offset_of(size_t bytes) {
  return reinterpret_cast<T*>(bytes);
}
template <class... T>
void rebase(void* workspace, T*&... offsets) {
  const auto base = reinterpret_cast<uintptr_t>(workspace);
  ((offsets = reinterpret_cast<T*>(base + reinterpret_cast<uintptr_t>(offsets))), ...);
}

}  // namespace attn
