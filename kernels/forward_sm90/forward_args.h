// The parameter struct of the kernels fwd_sm90_*, for their host side and for the kernels.
#ifndef ATTN_KERNELS_FORWARD_SM90_FORWARD_ARGS_H
#define ATTN_KERNELS_FORWARD_SM90_FORWARD_ARGS_H

#include "../shared/block_mask.h"
#include "../shared/forward_args.h"
#include "../shared/mask.h"
#include "../shared/tensor_map.h"

enum { attn_sm90_max_segments = 8 };
enum { attn_sm90_order_classes = 32, attn_sm90_order_max_items = 400 };
enum { attn_sm90_order_words = (attn_sm90_order_max_items + 31) / 32 };

struct attn_sm90_forward_kernarg {
  // Dimensions of all: head_dim, seq, head, batch; packed: batch 1.
  attn_tensor_map q;
  struct {
    attn_tensor_map k, v;
  } map[attn_sm90_max_segments];
  void* out;
  float* lse;                 // null: not wanted
  const int* cu_seqlens_q;    // null: padded q
  const float* sinks;         // null: none
  const float* alibi_slopes;  // null: none
  long long out_stride[3];    // elements: batch, seq, head
  long long total_q;          // packed q: tokens in q
  int batch, heads_q, group;  // group: query heads per K/V head
  int seqlen_q;               // capacity
  int head_dim_v;
  int out_type;  // shared/types.h
  int split_invariant;
  int num_segments;
  int down;          // items walk their keys from the last to the first, see key_walk.h
  unsigned chunk;    // (batch, head) pairs that stand together, so that their K and V stay in L2
  unsigned items;    // query tiles of all pairs
  unsigned* taken;   // of them, beyond the first of each block: 0 between launches, unused if there
                     // are none
  float log2_scale;  // scale * log2(e), above 0; kernels that change scores take the following
  float scale, softcap;  // softcap 0: none
  attn::RangeMask mask;
  attn_kv_lengths segment[attn_sm90_max_segments];
};

// The workspace of item_order.cuh, 0 between launches.
struct attn_sm90_order {
  unsigned taken;   // where attn_sm90_forward_kernarg has it
  unsigned shares;  // of items, taken to be listed
  unsigned listed;  // items
  // A bit for each item that is sorted, counted from the first of them.
  unsigned in_class[attn_sm90_order_classes][attn_sm90_order_words];
};

struct attn_sm90_mask_kernarg : attn_sm90_forward_kernarg {
  attn_mask_arrays block_mask;
  attn_sm90_order* order;  // unused if there are no items beyond the first of each block
};

struct attn_sm90_bias_kernarg : attn_sm90_forward_kernarg {
  const void* bias;          // null: none
  long long bias_stride[4];  // elements: batch, head, q, kv
  int bias_type;             // shared/types.h
  int bias_pairs;  // two keys from an even one on lie side by side, where a load of both can begin
};

// fp8.
struct attn_sm90_scales {
  attn_descale q;  // heads are those of K/V
  struct {
    attn_descale k, v;
  } segment[attn_sm90_max_segments];
  const float* out;  // null: 1
};
struct attn_sm90_fp8_kernarg : attn_sm90_forward_kernarg {
  attn_sm90_scales scales;
};
struct attn_sm90_fp8_mask_kernarg : attn_sm90_mask_kernarg {
  attn_sm90_scales scales;
};

struct attn_sm90_paged_kernarg : attn_sm90_forward_kernarg {
  attn_pages pages[attn_sm90_max_segments];
  int box_keys[attn_sm90_max_segments];  // of the maps of K and V: they divide page and tile
  int lists;          // packed q: items are counted from the lengths, see query_list.cuh
  int least_queries;  // then of sequences that have so many; others are another kernel's
};

#endif
