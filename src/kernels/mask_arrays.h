// A problem's block mask in the parameter struct of a device's kernel.
#pragma once
#include "kernels/shared/block_mask.h"
#include "problem/problem.h"

namespace attn {

static_assert(int(attn_kind_empty) == ATTN_BLOCK_EMPTY &&
              int(attn_kind_causal) == ATTN_BLOCK_CAUSAL &&
              int(attn_kind_full) == ATTN_BLOCK_FULL &&
              int(attn_kind_partial) == ATTN_BLOCK_PARTIAL);

// Of a problem with a block mask whose blocks are 64 or 128.
inline attn_mask_arrays mask_arrays(const Problem& p) {
  attn_mask_arrays a{};
  a.rows = int(p.mask_rows());
  a.columns = int(p.mask_columns());
  const long long grid = (long long)a.rows * a.columns;
  a.batch_stride = p.mask_batch == 1 ? 0 : p.mask_heads * grid;
  a.head_stride = p.mask_heads == 1 ? 0 : grid;
  a.block_q_log2 = p.block_q == 64 ? 6 : 7;
  a.block_k_log2 = p.block_k == 64 ? 6 : 7;
  a.partials = int(p.mask_partials);
  return a;
}
inline void patch_mask(const Problem& p, const Args& args, attn_mask_arrays* a) {
  a->kinds = args.block_kinds;
  a->index = p.mask_partials > 0 ? args.block_index : nullptr;
  a->bits = args.block_bits;
}

}  // namespace attn
