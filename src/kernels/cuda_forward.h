// What the host sides of the CUDA kernels that read or write K/V share.
#pragma once
#include <algorithm>

#include "kernels/kv_args.h"
#include "kernels/mask_arrays.h"

namespace attn {

// (batch, head) pairs whose K and V are at most this many bytes, and at most two thirds of the L2,
// but at least those of one K/V head.
inline unsigned pairs_in_l2(const Problem& p, int64_t bytes, const DeviceInfo& device) {
  if (device.l2_bytes > 0) bytes = std::min(bytes, device.l2_bytes * 2 / 3);
  const int64_t head_bytes = std::max<int64_t>(1, 2 * p.seqlen_kv * (p.head_dim + p.head_dim_v));
  return unsigned(
      std::min(p.batch * p.heads_q, p.group() * std::max<int64_t>(1, bytes / head_bytes)));
}

}  // namespace attn
