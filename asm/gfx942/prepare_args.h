/* The parameter struct of the kernels prepare_gfx942_*, for their host side and for the table of
 * asm/include/prepare.inc, field for field. */
#ifndef ATTN_ASM_GFX942_PREPARE_ARGS_H
#define ATTN_ASM_GFX942_PREPARE_ARGS_H

#include "forward_args.h"
#include "kv_segment_args.h"

struct attn_gfx942_prepare_kernarg {
  void* prepared;
  const int* cu_seqlens_q;
  int* lengths;  // [batch], written: the keys of all segments of a sequence
  int seqlen_q, total_q;
  int seqlen_kv;  // capacity of all segments together; _descaled: each, of whole tiles
  struct attn_gfx942_band band;
  int tiles;  // of a K/V head in `prepared`
  int head_dim, head_dim_v;
  int padded_dim;            // 64 or 128
  int convert_k, convert_v;  // from OCP
  int num_segments;
  int reserved;
  unsigned long long* missing;  // [batch, tile], written: bits of keys that have no page
  struct attn_gfx942_tile_record* tile_records;  // [KV head, tile], written by _descaled
  struct attn_descale q_descale;                 // of _descaled
  const int* kv_begins;                          // [batch]: first keys that are seen; 0: all 0
  struct attn_gfx942_kv_segment segment[attn_gfx942_kv_segments];
};

#endif
