// The parameter structs of the kernels fwd_sm90_*, which the host side packs and the kernels read.
#ifndef ATTN_KERNELS_FORWARD_SM90_FORWARD_ARGS_H
#define ATTN_KERNELS_FORWARD_SM90_FORWARD_ARGS_H

#include "../shared/block_mask.h"
#include "../shared/forward_args.h"
#include "../shared/mask.h"
#include "../shared/positions.h"
#include "../shared/tensor_map.h"

enum { attn_sm90_max_segments = 8 };
enum { attn_sm90_order_classes = 32, attn_sm90_order_max_items = 400 };
enum { attn_sm90_order_words = (attn_sm90_order_max_items + 31) / 32 };

struct attn_sm90_forward_kernarg {
  // Dimensions of all maps: head_dim, seq, head, batch; packed: batch 1; paged K and V: slot and
  // page in place of seq and batch.
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
  int down;  // items walk their keys from the last to the first, see key_walk.h
  unsigned
      chunk;  // (batch, head) pairs whose items follow each other, so that their K and V stay in L2
  unsigned items;        // query tiles of all pairs
  int part_keys;         // above 0: the one sequence's keys are in parts of this many, each with an
                         // out and an lse, and `batch` counts parts
  unsigned* taken;       // counts the items taken after each block's first one; 0 between launches,
                         // unused if there are no more items than blocks
  float log2_scale;      // scale * log2(e), above 0; kernels that change scores take the following
  float scale, softcap;  // softcap 0: none
  attn::RangeMask mask;
  attn_kv_lengths segment[attn_sm90_max_segments];
  const int* kv_begin;  // [batch]: the first key of each sequence that is seen; null: 0
  attn_positions positions;
};

// The workspace of item_order.cuh, 0 between launches.
struct attn_sm90_order {
  unsigned taken;   // attn_sm90_forward_kernarg.taken points here
  unsigned shares;  // portions of the sorted items that blocks have taken to classify
  unsigned listed;  // items classified so far
  // A bit for each sorted item, numbered from the first of them.
  unsigned in_class[attn_sm90_order_classes][attn_sm90_order_words];
};

struct attn_sm90_mask_kernarg : attn_sm90_forward_kernarg {
  attn_mask_arrays block_mask;
  attn_sm90_order* order;  // unused if there are no more items than blocks
};

struct attn_sm90_bias_kernarg : attn_sm90_forward_kernarg {
  const void* bias;          // null: none
  long long bias_stride[4];  // elements: batch, head, q, kv
  int bias_type;             // shared/types.h
  int bias_pairs;  // 1: keys 2 n and 2 n + 1 are adjacent and aligned for one load of both
};

// Descales of the fp8 kernels.
struct attn_sm90_scales {
  attn_descale q;  // one for each K/V head, not each query head
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
  int box_keys[attn_sm90_max_segments];  // keys that one box of the maps of K and V loads; a
                                         // divisor of page_size and of the tile's keys
  int lists;           // packed q: items are counted from the lengths, see query_list.cuh
  int least_queries;   // with lists: sequences with fewer queries are left to another kernel
  int heads_together;  // with lists: query heads whose items follow each other
  // With two launches that share `taken`, of which the later one takes the items that are left:
  int helpers;  // blocks of the later launch; else 0
  int helped;   // in the later launch, blocks of the first one; else 0
};

#endif
