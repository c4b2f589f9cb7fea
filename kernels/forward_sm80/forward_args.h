// The parameter structs of the kernels fwd_sm80_*, which the host side packs and the kernels read.
#ifndef ATTN_KERNELS_FORWARD_SM80_FORWARD_ARGS_H
#define ATTN_KERNELS_FORWARD_SM80_FORWARD_ARGS_H

#include "../shared/block_mask.h"
#include "../shared/forward_args.h"
#include "../shared/mask.h"
#include "../shared/positions.h"

enum { attn_sm80_max_segments = 24 };

struct attn_sm80_segment {
  const void* k;  // padded [batch, seq, head, head_dim], packed [total, head, head_dim] or
                  // paged [page, slot, head, head_dim]
  const void* v;
  long long k_stride[3], v_stride[3];  // elements: batch or page, seq or slot, head
  attn_kv_lengths lengths;
};

struct attn_sm80_forward_kernarg {
  const void* q;
  void* out;
  float* lse;               // null: not wanted
  const int* cu_seqlens_q;  // null: padded q
  const void* bias;         // null: none
  const float* alibi_slopes;
  const float* sinks;
  long long q_stride[3], out_stride[3];  // elements: batch, seq, head
  long long bias_stride[4];              // elements: batch, head, q, kv
  long long total_q;                     // packed q: tokens in q
  int batch, heads_q, group;             // group: query heads per K/V head
  int seqlen_q;                          // capacity
  int head_dim, head_dim_v;
  int out_type, bias_type;  // shared/types.h
  int split_invariant;
  int num_segments;
  unsigned
      chunk;  // (batch, head) pairs whose tiles follow each other, so that their K and V stay in L2
  float log2_scale;  // abs(scale) * log2(e), at least 1e-37
  float scale;       // of the scores
  float softcap;     // 0: none
  attn::RangeMask mask;
  attn_sm80_segment segment[attn_sm80_max_segments];
  const int* kv_begin;  // [batch]: the first key of each sequence that is seen; null: 0
  attn_positions positions;
};

struct attn_sm80_mask_kernarg : attn_sm80_forward_kernarg {
  attn_mask_arrays block_mask;
};

// Where block_table is null, the segment is not paged.
struct attn_sm80_paged_kernarg : attn_sm80_forward_kernarg {
  attn_pages pages[attn_sm80_max_segments];
};

#endif
