/* The parameter struct of the kernels decode_gfx942_*, for their host side and for the tables of
 * asm/include/decode.inc and decode_segment.inc, field for field. */
#ifndef ATTN_ASM_GFX942_DECODE_ARGS_H
#define ATTN_ASM_GFX942_DECODE_ARGS_H

#include "../../kernels/shared/forward_args.h"
#include "divisor_args.h"
#include "forward_args.h"

enum {
  attn_gfx942_decode_keys = 64,  // of a unit, which a wave takes at once
  attn_gfx942_decode_rows = 16,  // queries times query heads of a K/V head that a wave has
  attn_gfx942_decode_waves = 4,
  attn_gfx942_decode_merged_parts = 32,  // results that one wave adds up
  attn_gfx942_decode_segments = 8,
  attn_gfx942_decode_lds_bytes = 21504
};
enum { attn_gfx942_ocp_k = 1, attn_gfx942_ocp_v = 2 };

struct attn_gfx942_decode_segment {
  const void* k;                       // padded [batch, seq, head, dim], packed [total, head, dim]
  const void* v;                       // or paged [page, slot, head, dim]
  long long k_stride[3], v_stride[3];  // bytes: batch or page, seq, head
  struct attn_kv_lengths lengths;
  struct attn_pages pages;
  struct attn_gfx942_divisor by_page_size;
  struct attn_descale k_descale, v_descale;
  int ocp;  // e4m3fn: attn_gfx942_ocp_k, attn_gfx942_ocp_v
  int reserved;
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
  struct attn_gfx942_decode_segment segment[attn_gfx942_decode_segments];
};

#endif
