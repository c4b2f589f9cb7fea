// The parameter structs of the kernels bwd_sm90_*, which the host side packs and the kernels read.
#ifndef ATTN_KERNELS_BACKWARD_SM90_BACKWARD_ARGS_H
#define ATTN_KERNELS_BACKWARD_SM90_BACKWARD_ARGS_H

#include "../backward/prepare_args.h"
#include "../shared/forward_args.h"
#include "../shared/mask.h"
#include "../shared/tensor_map.h"
#include "order.h"

struct attn_sm90_backward_kernarg {
  // Dimensions of all maps: head_dim, seq, head, batch; packed: batch 1.
  attn_tensor_map q, k, v, d_out;
  const float *lse2, *delta;  // as in attn_backward_prepare_kernarg
  float* dq_sum;   // [heads_q, tiles, 64 * head_dim of the kernel's tile], see bwd_sm90_finish.cu
  unsigned* turn;  // [heads_q, tiles]: blocks that have added to the tile. 0 at first
  unsigned* taken;  // items taken after each block's first one. 0 at first
  attn_gradient_array dk, dv;
  const int* cu_seqlens_q;  // null: padded q
  attn_kv_lengths kv;
  attn::BackwardRows rows;
  int heads_kv, group;  // group: query heads per K/V head
  int head_dim, head_dim_v;
  int tiles;  // rows.tiles()
  unsigned items;
  attn::bwd_sm90::ItemList list;
  float log2_scale, scale;  // log2_scale: scale * log2(e), above 0
  attn::RangeMask mask;
};

// dq of dq_sum, by one block of 128 threads for each tile of queries, query head and sequence.
struct attn_sm90_finish_kernarg {
  const float* dq_sum;
  attn_gradient_array dq;
  const int* cu_seqlens_q;
  attn_kv_lengths kv;
  attn::BackwardRows rows;
  int head_dim, tiles;  // rows.tiles()
  int panels;      // 64 columns each, of dq_sum
  int block_keys;  // of the kernel that made dq_sum
  float scale;
  attn::RangeMask mask;
};

#endif
