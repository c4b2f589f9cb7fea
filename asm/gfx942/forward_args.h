// The parameter structs of the FP8 forward kernels of gfx942, for their host side.
#ifndef ATTN_ASM_GFX942_FORWARD_ARGS_H
#define ATTN_ASM_GFX942_FORWARD_ARGS_H

#include "kernels/shared/block_mask.h"

// Tiles of 64 keys, workgroups of 256 queries. Lengths and window sides stay below
// attn_gfx942_max_length, so that their sums are 32-bit integers; without a bound `left`, `right`
// and `top` are attn_gfx942_unbounded.
enum {
  attn_gfx942_tile_keys = 64,
  attn_gfx942_rows = 256,
  attn_gfx942_max_length = 1 << 29,
  attn_gfx942_unbounded = 1 << 30
};

// Query i of Sq sees the keys from i + Skv - Sq - left to min(i + Skv - Sq + right, i + top) - 1.
struct attn_gfx942_band {
  int left, right, top;
};

struct attn_gfx942_forward_kernarg {
  const void* q;
  const void* prepared;
  void* out;
  float* lse;
  const int* cu_seqlens_q;
  const int* seqlens_kv;
  const int* cu_seqlens_kv;
  const float* q_descale;  // of _descaled: 0, tile records have it
  const float* k_descale;
  const float* v_descale;
  const float* sinks;
  long long q_stride[3], out_stride[3];  // bytes: batch, seq, head
  int seqlen_q, total_q;
  int seqlen_kv, total_kv;  // seqlen_kv of _descaled: each segment's, of whole tiles
  struct attn_gfx942_band band;
  int tiles;
  int heads_kv, group, q_tiles, pairs;  // pairs: batch * heads_kv
  int parts_log2;                       // XCDs that share a pair
  unsigned group_magic, heads_magic;    // ceil(2^32 / x), 0 for 1
  int options;       // bits 0, 1, 2: q, k, v descales are [batch, heads_kv]; 3: split-invariant
  float scale;       // of raw scores: log2(e) and what OCP codes mean included
  float out_factor;  // 2 for an OCP v
  int convert_q;
  int out_type;  // 1 f32, 2 f16, 3 bf16; FP8 kernels: 4 f8_e4m3fn, 5 f8_e5m2, 6 f8_e4m3fnuz
  int head_dim, head_dim_v;
  int items;                          // of the grid
  int workgroups;                     // packed q: so many share the rows of nobody
  const unsigned long long* missing;  // [batch, tile]: bits of keys that have no page; 0: none
  const float* out_scale;             // 0: 1
  const int* kv_begins;               // [batch]: first keys that are seen; 0: all 0
};

// A tile of a sequence in which each segment begins with a tile of its own, as
// prepare_gfx942_fp8_descaled writes it.
struct attn_gfx942_tile_record {
  unsigned long long missing;  // bit n: key n is none, behind the segment's last or without a page
  float k_factor;              // of dot products, of FNUZ codes of K; with the descale of Q
  int first_key;               // of the sequence's
  float v_factor;              // V is its FNUZ codes times v_factor * 2^v_doublings
  int v_doublings;
  int tiles;  // of the sequence
  int reserved;
};

// Of the kernels for those.
struct attn_gfx942_descaled_kernarg {
  struct attn_gfx942_forward_kernarg forward;
  const struct attn_gfx942_tile_record* tile_records;  // [heads_kv, tiles]
  int num_segments;
  int reserved;
};

// Of the kernels that read K and V from the caller's memory; forward.prepared is not read.
struct attn_gfx950_direct_kernarg {
  struct attn_gfx942_forward_kernarg forward;
  const void* k;
  const void* v;
  long long k_stride[3], v_stride[3];  // bytes: batch, 0 where packed; seq; head
};

// Of the kernels with block masks.
struct attn_gfx942_mask_kernarg {
  struct attn_gfx942_forward_kernarg forward;
  struct attn_mask_arrays block_mask;
};

// Of the kernels with softcap and ALiBi.
struct attn_gfx942_score_kernarg {
  struct attn_gfx942_forward_kernarg forward;
  const float* alibi_slopes;  // 0: none
  float cap;                  // of scores, times log2(e), which `scale` then has not; 0: none
  int reserved;
};

// And with a bias.
struct attn_gfx942_bias_kernarg {
  struct attn_gfx942_score_kernarg score;
  const void* bias;          // null: none
  long long bias_stride[4];  // bytes: batch, head, query, key
  long long bias_bytes;      // of a head, from its first element to the end of its last one
  int bias_type;             // 1 f32, else that of q
  int bias_reserved;
};

#endif
