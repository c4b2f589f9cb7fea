// What the host sides of the CUDA forward kernels share.
#pragma once
#include <algorithm>

#include "kernels/common/block_mask.h"
#include "kernels/common/forward_args.h"
#include "plan/kernarg.h"

namespace attn {

// (batch, head) pairs whose blocks start together: as many as leave K and V in the L2, of which the
// large devices have about twice this.
inline unsigned pairs_in_l2(const Problem& p) {
  constexpr int64_t l2_bytes = 24 << 20;
  const int64_t head_bytes = std::max<int64_t>(1, 2 * p.seqlen_kv * (p.head_dim + p.head_dim_v));
  return unsigned(
      std::min(p.batch * p.heads_q, p.group() * std::max<int64_t>(1, l2_bytes / head_bytes)));
}

static_assert(int(attn_kind_empty) == ATTN_BLOCK_EMPTY &&
              int(attn_kind_causal) == ATTN_BLOCK_CAUSAL &&
              int(attn_kind_full) == ATTN_BLOCK_FULL &&
              int(attn_kind_partial) == ATTN_BLOCK_PARTIAL);

// Of a problem with a block mask whose blocks are 64 or 128.
inline attn_mask_arrays mask_arrays(const Problem& p, const Args& args) {
  attn_mask_arrays a{};
  a.kinds = args.block_kinds;
  a.index = p.mask_partials > 0 ? args.block_index : nullptr;
  a.bits = args.block_bits;
  a.rows = int((p.seqlen_q + p.block_q - 1) / p.block_q);
  a.columns = int((p.seqlen_kv + p.block_k - 1) / p.block_k);
  const long long grid = (long long)a.rows * a.columns;
  a.batch_stride = p.mask_batch == 1 ? 0 : p.mask_heads * grid;
  a.head_stride = p.mask_heads == 1 ? 0 : grid;
  a.block_q_log2 = p.block_q == 64 ? 6 : 7;
  a.block_k_log2 = p.block_k == 64 ? 6 : 7;
  a.partials = int(p.mask_partials);
  return a;
}

inline attn_kv_lengths kv_lengths(const attn_segment& segment, const attn_segment_args& args) {
  return {.seqlens = segment.has_seqlens ? args.seqlens : nullptr,
          .cu_seqlens = segment.layout == ATTN_PACKED ? args.cu_seqlens : nullptr,
          .total = segment.total,
          .capacity = int(segment.seqlen)};
}

}  // namespace attn
