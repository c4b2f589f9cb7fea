/* The parameter struct of the kernels decode_gfx942_*, for their host side and for the table of
 * asm/include/decode.inc, field for field. */
#ifndef ATTN_ASM_GFX942_DECODE_ARGS_H
#define ATTN_ASM_GFX942_DECODE_ARGS_H

#include "divisor_args.h"
#include "forward_args.h"
#include "kv_segment_args.h"

enum {
  attn_gfx942_decode_keys = 64,  // of a unit, which a wave takes at once
  attn_gfx942_decode_rows = 16,  // queries times query heads of a K/V head that a wave has
  attn_gfx942_decode_waves = 4,
  attn_gfx942_decode_merged_parts = 32,  // results that one wave adds up
  attn_gfx942_decode_lds_bytes = 21504
};
struct attn_gfx942_decode_kernarg {
  const void* q;
  void* out;
  float* lse;               // null: not wanted
  const int* cu_seqlens_q;  // null: padded q
  const float* alibi_slopes;
  const float* sinks;
  long long q_stride[3], out_stride[3];  // bytes: batch, seq, head
  // The workspace: two slots for each workgroup, of 16 rows, head dims as the waves' lanes have
  // them.
  float* sums;
  float* stats;       // [slots, waves, 16, 4]: reference, sum of the weights as rounded, sum, 0
  unsigned* arrived;  // [2, slots, waves]: zero between launches
  struct attn_descale q_descale;
  int batch, heads_q, heads_kv, group;  // group: query heads per K/V head
  struct attn_gfx942_divisor by_group;
  int seqlen_q, total_q;
  struct attn_gfx942_band band;
  int columns, column_blocks;  // workgroups: columns * column_blocks
  unsigned slots;
  int num_segments;
  int head_dim, head_dim_v;  // bytes of a row of K, of V
  int q_type, out_type;      // shared/types.h
  float factor;              // of dot products: with log2(e), unless scores are capped
  float cap;                 // largest score, times log2(e); 0: none
  int out_bytes;             // of a row of out
  int workgroups;            // packed q: so many share the rows of nobody
  int reserved;
  const int* kv_begins;  // [batch]: first keys that are seen; null: all 0
  struct attn_gfx942_kv_segment segment[attn_gfx942_kv_segments];
};

#endif
