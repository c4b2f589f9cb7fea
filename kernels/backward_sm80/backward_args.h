// The parameter struct of the kernels bwd_sm80_*.
#ifndef ATTN_KERNELS_BACKWARD_SM80_BACKWARD_ARGS_H
#define ATTN_KERNELS_BACKWARD_SM80_BACKWARD_ARGS_H

#include "../backward/prepare_args.h"
#include "../shared/block_mask.h"

struct attn_bwd_sm80_kernarg {
  const void *q, *k, *v, *d_out;
  const float *lse2, *delta;  // of bwd_prepare_cuda
  const int* cu_seqlens_q;    // null: padded q
  const void* bias;           // null: none
  const float* alibi_slopes;
  attn_gradient_array dq, dk, dv;
  long long q_stride[3], k_stride[3], v_stride[3], d_out_stride[3];  // elements: batch, seq, head
  long long bias_stride[4];                                          // elements: batch, head, q, kv
  attn::BackwardRows rows;
  attn_kv_lengths kv;
  attn::RangeMask mask;
  attn_mask_arrays block_mask;
  int heads_q, heads_kv, group;  // group: query heads per K/V head
  int head_dim, head_dim_v, bias_type;
  // Blocks of the grid: first those of dv and dk, or where one block cannot have both those of dv
  // alone and then those of dk alone; then those of dq.
  unsigned items_dv, items_dk, items_dq;
  // (batch, head) pairs whose tiles follow each other, so that what they walk over stays in L2.
  unsigned query_chunk, key_chunk;
  float scale;       // of the scores
  float log2_scale;  // scale * log2(e), at least 1e-37 in size
  float softcap;     // 0: none
};

#endif
