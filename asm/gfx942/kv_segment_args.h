/* A segment of K/V, for the host sides of the kernels of gfx942 that read several and for the table
 * of asm/include/kv_segment.inc, field for field. */
#ifndef ATTN_ASM_GFX942_KV_SEGMENT_ARGS_H
#define ATTN_ASM_GFX942_KV_SEGMENT_ARGS_H

#include "../../kernels/shared/forward_args.h"
#include "divisor_args.h"

enum { attn_gfx942_kv_segments = 8 };
enum { attn_gfx942_ocp_k = 1, attn_gfx942_ocp_v = 2 };

struct attn_gfx942_kv_segment {
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

#endif
