// Block masks in the parameter structs of forward kernels.
#ifndef ATTN_KERNELS_SHARED_BLOCK_MASK_H
#define ATTN_KERNELS_SHARED_BLOCK_MASK_H

// Values of attn_block_kind in attn/attn.h, which device code cannot include.
enum { attn_kind_empty = 0, attn_kind_causal = 1, attn_kind_full = 2, attn_kind_partial = 3 };

// The arrays' contents are not trusted: other kinds and an index out of range count as EMPTY.
struct attn_mask_arrays {
  const unsigned char* kinds;  // [batch or 1, heads or 1, rows, columns]
  const int* index;            // the same grid; null: there are no PARTIAL blocks
  const unsigned* bits;        // [partials, block_q, block_k / 32]
  long long
      batch_stride;  // blocks from batch entry to batch entry and from head to head of the grid;
  long long head_stride;           // 0 where one serves all
  int rows, columns;               // blocks
  int block_q_log2, block_k_log2;  // 6 or 7
  int partials;
};

#endif
