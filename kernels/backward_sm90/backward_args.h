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
  // [heads_q, tiles, 64 * head_dim of the kernel's tile]: dq, as products leave it in a warpgroup.
  // Of each 8 columns there are 4 floats of each of 128 threads.
  float* dq_sum;
  // [heads_q, tiles, the tile's dq_parts()]: blocks that have added to the part. 0 at first
  unsigned* turn;
  // With several query heads of a K/V head, of each [pair of sequence and K/V head, block of keys]:
  // dk and dv so far, of each of a warpgroup's threads 4 floats at a time; and the heads that each
  // warp has added, 0 at first.
  float* kv_sum;
  unsigned* kv_turn;
  unsigned* taken;  // items that blocks have taken. 0 at first
  attn_gradient_array dq, dk, dv;
  const int* cu_seqlens_q;  // null: padded q
  attn_kv_lengths kv;
  attn::BackwardRows rows;
  int batch, heads_q, group;  // group: query heads per K/V head
  int key_blocks;             // of all sequences, see first_key_block
  int head_dim, head_dim_v;
  int tiles;  // rows.tiles()
  unsigned items;
  attn::bwd_sm90::ItemList list;
  attn::bwd_sm90::Order order;
  // log2_scale: above 0; of a score, or with a softcap of its tanh, in the log2 domain.
  float log2_scale, scale;
  attn::RangeMask mask;
  // Of the kernels _score and _bias.
  float into_softcap;         // scale / softcap, 0: none
  const float* alibi_slopes;  // null: none
  // Of the kernels _bias.
  const void* bias;
  long long bias_stride[2];  // elements: batch, head
  int bias_query, bias_key;  // elements from query to query, from key to key
  int bias_type;             // f32 or the type of q
};

#endif
