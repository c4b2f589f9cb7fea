// The parameter struct of the kernels decode_*, for their host side and for the kernels.
#ifndef ATTN_KERNELS_DECODE_ARGS_H
#define ATTN_KERNELS_DECODE_ARGS_H

#include <type_traits>

#include "../shared/forward_args.h"
#include "../shared/mask.h"
#include "../shared/positions.h"
#include "../shared/tensor_map.h"

enum { attn_decode_max_segments = 8 };

// i8, i4: f16, one for each token and head; f8_e4m3fn_token: f32; nvfp4: e4m3, one for each 16
// columns.
struct attn_key_scales {
  const void* at;
  // Bytes, of mla_* scales, between sequences or pages; of i8's and i4's pages a multiple of 4
  // bytes.
  long long batch;
  int seq, head;
};

struct attn_decode_segment {
  const void* k;  // padded [batch, seq, head, head_dim], packed [total, head, head_dim]
  const void* v;  // or paged [num_pages, page_size, head, head_dim]
  union {
    long long k_stride[3];         // elements: batch or page, seq, head
    attn_descale k_nvfp4_descale;  // of own_types, whose strides only the maps have
  };
  union {
    long long v_stride[3];
    attn_descale v_nvfp4_descale;
  };
  attn_kv_lengths lengths;
  const int* block_table;  // paged: [batch, max_pages]; null: not paged
  int num_pages, page_size, max_pages;
  int page_log2;       // of page_size; -1: it is no power of two
  int box_keys;        // of the copy engine: 16, 32 or 64, of which one is in one page
  int k_type, v_type;  // shared/types.h; kernels of own_types look at them, and at these:
  int k_head, v_head;  // units of 2 bytes between heads; 0: a row of codes has one head
  union {
    attn_descale k_descale;
    attn_key_scales k_scales;  // of own_types
  };
  union {
    attn_descale v_descale;
    attn_key_scales v_scales;
  };
};

struct attn_decode_kernarg {
  const void* q;
  void* out;
  float* lse;               // null: not wanted
  const int* cu_seqlens_q;  // null: padded q
  const float* alibi_slopes;
  const float* sinks;
  long long q_stride[3], out_stride[3];  // elements: batch, seq, head
  long long total_q;                     // packed q: tokens in q
  int batch, heads_q, heads_kv, group;   // group: query heads per K/V head
  int seqlen_q;                          // capacity
  int rows_taken;  // sequences of more rows, queries times `group`, are another kernel's
  int head_dim, head_dim_v;
  int q_type, out_type;  // shared/types.h
  union {
    int kv_e5m2;      // fp8 K and V: e5m2, else e4m3
    int v_scales_at;  // of own_types: in a stage, as scales_at of K's
  };
  int stages;                // of the ring
  int k_bytes, stage_bytes;  // of own_types: a unit's in shared memory
  int scales_at;             // of own_types: in a stage; 0: no segment has an array of scales
  int heads_log2;  // of own_types: of the K/V heads of a block, 0 to 2; heads_kv counts such
                   // groups
  int columns;     // see Work
  int split_invariant;
  int loaders;     // warps of a block that load
  int split_keys;  // of fixed_split; 0: parts of a head end where blocks do
  union {
    int whole_heads;  // with split_keys: a block takes all splits of a head's row tile
    int v_by_fours;   // of own_types: V of each segment is nvfp4 or i4, see NvFp4
  };
  int row_tiles, splits;  // with split_keys: of a head, of a row tile, at most
  int num_segments;
  float scale;    // of the scores
  float softcap;  // 0: none
  attn::RangeMask mask;
  attn::TreeMask tree_mask;
  const unsigned long long* tree;  // [queries, 2]; null: none
  // The workspace: two slots for each block; with split_keys and without whole_heads one for each
  // split, [batch, heads_kv, row_tiles, splits].
  unsigned slots;
  int concurrent;     // with the kernel before it: see grid_begin_concurrent
  float* sums;        // [slots, rows, head_dim_v of the tile]
  float* stats;       // [slots, rows, 2]: reference and sum of the weights
  unsigned* arrived;  // [2, slots]: zero between launches
  attn_positions positions;
  attn_decode_segment segment[attn_decode_max_segments];
  int fixed_lengths;  // no length is in memory, no kv_begin and no positions
  // K and V are one segment, of which the last query sees all; without split_keys, tree and
  // kv_begin.
  int sees_all;
  const int* kv_begin;  // [batch]: the first key of each sequence that is seen; null: 0
};

// K and V come by the copy engine. Dimensions: head_dim, seq, head, batch; packed: batch 1; paged:
// head_dim, slot, head, page.
struct attn_decode_sm90_kernarg {
  struct {
    attn_tensor_map k, v;
  } map[attn_decode_max_segments];
  attn_decode_kernarg a;
};

namespace attn::decode {
template <bool copy_engine>
using Kernarg = std::conditional_t<copy_engine, attn_decode_sm90_kernarg, attn_decode_kernarg>;
}

#endif
