// The parameter structs of the kernels bwd_sm90_*, which the host side packs and the kernels read.
#ifndef ATTN_KERNELS_BACKWARD_SM90_BACKWARD_ARGS_H
#define ATTN_KERNELS_BACKWARD_SM90_BACKWARD_ARGS_H

#include "../shared/forward_args.h"
#include "../shared/mask.h"
#include "../shared/tensor_map.h"
#include "order.h"

// A gradient's array.
struct attn_sm90_gradient {
  void* at;             // null: not wanted
  long long stride[3];  // elements: batch, seq, head
  int type;             // shared/types.h
  int add;              // to what it holds
};

struct attn_sm90_backward_kernarg {
  // Dimensions of all maps: head_dim, seq, head, batch; packed: batch 1.
  attn_tensor_map q, k, v, d_out;
  // Of each query head, 64 for each tile of queries, see order.h: lse * log2(e), +inf for a row that
  // sees nothing or does not exist; the sum of out * d_out less d_lse, 0 for rows that do not exist.
  const float *lse, *delta;
  float* dq_sum;   // [heads_q, tiles, 64 * head_dim of the kernel's tile], in its order, see dq.cuh
  unsigned* turn;  // [heads_q, tiles]: blocks that have added to the tile. 0 at first
  unsigned* taken;  // items taken after each block's first one. 0 at first
  attn_sm90_gradient dk, dv;
  const int* cu_seqlens_q;  // null: padded q
  long long total_q;        // packed q: tokens in q
  attn_kv_lengths kv;
  int batch, heads_kv, group;  // group: query heads per K/V head
  int seqlen_q;                // capacity
  int head_dim;
  int tiles;  // of all sequences
  unsigned items;
  attn::backward_sm90::ItemList list;
  float log2_scale, scale;  // log2_scale: scale * log2(e), above 0
  attn::RangeMask mask;
};

// dq of dq_sum, by one block of 128 threads for each tile of queries, query head and sequence.
struct attn_sm90_finish_kernarg {
  const float* dq_sum;
  attn_sm90_gradient dq;
  const int* cu_seqlens_q;
  long long total_q;
  attn_kv_lengths kv;
  int heads_q, seqlen_q, head_dim, tiles;
  int panels;      // 64 columns each, of dq_sum
  int block_keys;  // of the kernel that made dq_sum
  float scale;
  attn::RangeMask mask;
};

#endif
