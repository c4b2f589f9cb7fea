// The parameter structs of gather_cuda, list_slots_cuda and gather_lse_cuda, for their host side
// and for the kernels.
#ifndef ATTN_KERNELS_CACHE_GATHER_ARGS_H
#define ATTN_KERNELS_CACHE_GATHER_ARGS_H

#include "../shared/forward_args.h"
#include "../shared/mask.h"

enum {
  attn_gather_max_segments = 8,
  attn_gather_threads = 256,  // of a block, which has this many visited keys
  attn_gather_elements = 8,   // that a thread has at once
  attn_gather_lse_threads = 256,
  attn_gather_shared_bytes = 6432,  // that gather_cuda declares
  attn_list_slots_threads = 256,
  attn_list_slots_rounds = 8,          // visited keys that a thread looks up at once
  attn_list_slots_shared_bytes = 768,  // that list_slots_cuda declares
};

struct attn_gather_tensor {
  const void* src;
  long long src_stride[3];  // bytes: batch or page, seq, head
  const float* scale;       // f8_e4m3fn_token: one for each token and head
  long long scale_stride[3];
  attn_descale descale;
  int type;  // shared/types.h: dst_type, f8_e4m3fn, f8_e4m3fn_token or mla_656
};

struct attn_visited_segment {
  attn_kv_lengths lengths;
  attn_pages pages;
  const int *list, *list_lengths;  // as attn_segment_args has them; null: not given
  int list_size;                   // 0: all keys that the query sees, in their order
  int list_heads, list_block, list_queries;
  int of_pool, no_positions;  // 0 or 1
};

// Items and the keys that they visit. Items are queries, the rows of q in its order, or
// (by_sequence) sequences, which visit all their keys.
struct attn_visits {
  attn_visited_segment segment[attn_gather_max_segments];
  const int* cu_seqlens_q;  // null: padded q
  long long total_q;        // packed q
  long long first;          // the number of item 0 of this launch
  attn::RangeMask mask;
  int batch, seqlen_q;
  int num_segments;
  int by_sequence;  // 0 or 1
  int first_head;   // of the launch's K/V heads
};

struct attn_gather_kernarg {
  attn_visits visits;
  attn_gather_tensor tensor[attn_gather_max_segments][2];  // of each segment K and V
  void* dst[2];  // [count, rows, heads, dim] of dst_type, K and V; null: not copied
  int dim[2];
  int* lengths;  // [count]: the keys of each item
  int heads;     // the K/V heads of this launch
  int rows;      // of an item; no item visits more keys
  int dst_type;
  unsigned parts;  // blocks of an item
};

struct attn_list_slots_segment {
  int* table;             // [count, capacity]: the slots of each item's keys
  int* lengths;           // [count]
  long long entry_slots;  // between a page and the next, or sequences; packed keys: any
  int capacity;           // no item visits more keys
};
struct attn_list_slots_kernarg {
  attn_visits visits;
  attn_list_slots_segment segment[attn_gather_max_segments];
};

struct attn_gather_lse_kernarg {
  const float* from;        // [heads / group, rows, group]
  float* to;                // [batch, heads, seqlen_q], or packed [heads, rows]
  const int* cu_seqlens_q;  // packed q; null: padded
  long long rows;           // of q
  int batch, seqlen_q;      // packed: seqlen_q is `rows`
  int heads, group;
};

#endif
