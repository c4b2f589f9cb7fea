// The parameter struct of mask_cuda, for its host side and for the kernel.
#ifndef ATTN_KERNELS_SHARED_MASK_ARGS_H
#define ATTN_KERNELS_SHARED_MASK_ARGS_H

enum { attn_mask_threads = 256, attn_mask_max_words = 128 * 128 / 32 };
enum { attn_mask_blocks = 6 };              // that a multiprocessor has at once
enum { attn_mask_shared_bytes = 5 << 10 };  // static, at most

struct attn_mask_kernarg {
  const unsigned char* dense;  // [planes, seqlen_q, seqlen_kv]; null: intervals
  const int* intervals;        // [planes, seqlen_kv, num_intervals, 2]
  int num_intervals;           // 1 or 2
  int seqlen_q, seqlen_kv;
  int block_q, block_k;  // 64 or 128
  int rows, columns;     // of the grid
  unsigned cells;        // planes * rows * columns, less than 2^31
  unsigned char* kinds;  // [cells]
  int* index;            // [cells]
  unsigned* bits;        // [cells, block_q, block_k / 32], for as many as there may be
  // Where the PARTIAL blocks are found by what they hold: all zero at first.
  unsigned long long* table;  // [table_size], a power of two above cells
  unsigned table_size;
  int* partials;  // [1], blocks in `bits`
};

#endif
