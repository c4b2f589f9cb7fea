// Reads a block mask for a block of queries and keys.
#pragma once
#include "../shared/block_mask.h"

namespace attn::device {

// How to treat a block: one of these, or, from 0 on, the index of its bits in `bits`.
enum : int { mask_empty = -3, mask_causal = -2, mask_full = -1 };

// The block in column `column` of the grid with this kind and index, for queries [first, last] in
// it, by which CAUSAL blocks can be EMPTY or FULL. diagonal: Skv - Sq.
__device__ __forceinline__ int mask_block(const attn_mask_arrays& a, int kind, int index,
                                          int column, int first, int last, int diagonal) {
  if (kind == attn_kind_full) return mask_full;
  if (kind == attn_kind_causal) {
    const int begin = column << a.block_k_log2, end = (column + 1) << a.block_k_log2;
    if (begin > last + diagonal) return mask_empty;
    return end - 1 <= first + diagonal ? mask_full : mask_causal;
  }
  return kind == attn_kind_partial && index >= 0 && index < a.partials ? index : mask_empty;
}

// The block in row `row` of the grid. grid: where the (batch, head) has its blocks. kind and index
// are asked for together: either takes as long as the other.
__device__ __forceinline__ int mask_block(const attn_mask_arrays& a, long long grid, int row,
                                          int column, int first, int last, int diagonal) {
  const long long at = grid + (long long)row * a.columns + column;
  return mask_block(a, a.kinds[at], a.index ? a.index[at] : -1, column, first, last, diagonal);
}
// Whether mask_block may say other than EMPTY.
__device__ __forceinline__ bool mask_may_see(int kind) {
  return kind >= attn_kind_causal && kind <= attn_kind_partial;
}
__device__ __forceinline__ bool mask_may_see(const attn_mask_arrays& a, long long grid, int row,
                                             int column) {
  return mask_may_see(a.kinds[grid + (long long)row * a.columns + column]);
}

// The 32 bits of query `row` of a PARTIAL block from key `column` >= 0 on, both counted from the
// block's begin; bits after the block are 0.
__device__ __forceinline__ unsigned mask_word(const attn_mask_arrays& a, int index, int row,
                                              int column) {
  const int words_log2 = a.block_k_log2 - 5, words = 1 << words_log2, at = column / 32;
  const unsigned* from = a.bits + ((((long long)index << a.block_q_log2) + row) << words_log2);
  const unsigned low = at < words ? from[at] : 0, high = at + 1 < words ? from[at + 1] : 0;
  return __funnelshift_r(low, high, column % 32);
}

}  // namespace attn::device
