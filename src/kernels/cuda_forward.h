// What the host sides of the CUDA kernels that read or write K/V share.
#pragma once
#include <algorithm>

#include "kernels/kv_args.h"
#include "kernels/mask_arrays.h"
#include "kernels/shared/positions.h"

namespace attn {

// (batch, head) pairs whose K and V are at most this many bytes, and at most two thirds of the L2,
// but at least those of one K/V head.
inline unsigned pairs_in_l2(const Problem& p, int64_t bytes, const DeviceInfo& device) {
  if (device.l2_bytes > 0) bytes = std::min(bytes, device.l2_bytes * 2 / 3);
  const int64_t head_bytes = std::max<int64_t>(1, 2 * p.seqlen_kv * (p.head_dim + p.head_dim_v));
  return unsigned(
      std::min(p.batch * p.heads_q, p.group() * std::max<int64_t>(1, bytes / head_bytes)));
}

// Whether keys of the segment are further apart than their numbers say.
inline bool interleaved(const attn_segment& s) {
  return s.has_key_start && s.key_ranks > 1 && s.seqlen > s.key_interleave;
}
// interleaved_alibi: whether the kernel takes it.
inline Status check_positions(const Problem& p, bool interleaved_alibi) {
  if (!p.key_positions()) return {};
  const attn_segment& s = p.segment[0];
  if (p.num_segments > 1)
    return unsupported("positions of keys in ", p.num_segments, " segments; accepted: in 1");
  if (!interleaved(s)) return {};
  if (p.has(ATTN_ALIBI) && !interleaved_alibi) return unsupported("ALiBi over interleaved keys");
  const int64_t last = (s.seqlen - 1) / s.key_interleave * s.key_interleave * s.key_ranks +
                       (s.seqlen - 1) % s.key_interleave;
  constexpr int64_t most = 1 << 30;  // most_places of kernels/common/positions.cuh
  if (last >= most)
    return unsupported("keys of the segment are up to ", last, " positions apart; accepted: below ",
                       most);
  return {};
}

// Without the addresses that a run brings.
inline attn_positions positions(const Problem& p) {
  const attn_segment& s = p.segment[0];
  attn_positions places{};
  places.key_batch = s.shared ? 0 : 1;
  places.first_key = s.key_rank * s.key_interleave;
  if (interleaved(s)) {
    places.interleave = int(s.key_interleave);
    places.period = int(s.key_interleave * s.key_ranks);
  }
  return places;
}
inline void patch_positions(const Problem& p, const Args& args, attn_positions* places) {
  places->query_start = reinterpret_cast<const long long*>(args.query_start);
  if (p.key_positions())
    places->key_start =
        reinterpret_cast<const long long*>(attn_segment_args(args.segment[0]).key_start);
}

}  // namespace attn
