// The parameter struct of dequantise_sm90, for its host side and for the kernel.
#ifndef ATTN_KERNELS_CACHE_DEQUANTISE_ARGS_H
#define ATTN_KERNELS_CACHE_DEQUANTISE_ARGS_H

#include "../shared/forward_args.h"
#include "../shared/mask.h"

enum {
  attn_dequantise_max_segments = 8,
  attn_dequantise_threads = 256,  // of a block at most
  attn_dequantise_blocks = 6,     // of a multiprocessor
  attn_dequantise_beside = 3,     // the same, where a block of decode_sm90_fp8_*_r16 has room too
  attn_dequantise_elements = 16,  // that a thread has at once
  attn_dequantise_keys = 16,      // that lie in one page
};

struct attn_dequantise_tensor {
  const void* src;
  void* dst;  // rows of heads of `dim` elements, contiguous; null: src is read where it is
  long long src_stride[3];  // elements: batch or page, seq, head; of ggml's whole blocks
  attn_descale descale;
  int type;           // of src, shared/types.h: dst_type, or one of codes
  const void* scale;  // one for each token and head, i8, i4: f16, f8_e4m3fn_token: f32; nvfp4:
                      // e4m3, of 16 elements
  long long scale_stride[3];
  int dim;
};

struct attn_dequantise_segment {
  attn_dequantise_tensor tensor[2];  // K, V
  attn_kv_lengths lengths;
  attn_pages pages;
  // Paged: [batch, table_pages], gets the pages of dst: b * table_pages + n, -1 where
  // pages.block_table is out of range or the page ends before the first key that is seen.
  int* table;
  int table_pages;
  long long rows;  // of a sequence in dst; 0: packed, as in src
};

struct attn_dequantise_kernarg {
  attn_dequantise_segment segment[attn_dequantise_max_segments];
  const int* cu_seqlens_q;  // null: padded q
  long long total_q;
  int seqlen_q;
  attn::RangeMask mask;
  int num_segments;
  int heads;
  int dst_type;    // shared/types.h
  unsigned items;  // 2 * num_segments * batch * parts
  unsigned batch;
  unsigned parts;     // of a sequence
  int part_keys;      // a multiple of attn_dequantise_keys
  int least_queries;  // above 0, with packed q: sequences with fewer queries are left out, and
                      // items are counted from the lengths
  int concurrent;     // the next kernel runs at the same time: see grid_begin_concurrent
};

#endif
