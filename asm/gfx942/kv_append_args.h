/* The parameter struct of kv_append_gfx942, for its host side; kv_append_gfx942.s says what the
 * fields are. */
#ifndef ATTN_ASM_GFX942_KV_APPEND_ARGS_H
#define ATTN_ASM_GFX942_KV_APPEND_ARGS_H

#include "../../kernels/shared/forward_args.h"
#include "convert_args.h"
#include "divisor_args.h"

enum {
  attn_gfx942_append_elements = 8,  // of a lane
  attn_gfx942_append_max_threads = 512
};

// New tokens, and where they go: K, V or q.
struct attn_gfx942_append_tensor {
  const void* src;
  void* dst;
  long long src_stride[3], dst_stride[3];
  struct attn_descale descale;
  int dst_type, dim;
  int heads, chunks;
  struct attn_gfx942_fp8_codes fp8;
  int reserved;
};

struct attn_gfx942_append_kernarg {
  struct attn_gfx942_append_tensor tensor[3];  // K, V, q
  const float *rotary_cos, *rotary_sin;
  const int* cu_seqlens_new;
  const int* seqlens;
  int* seqlens_out;
  const int* block_table;
  int total_new, seqlen_new;
  struct attn_gfx942_divisor by_seqlen_new;
  int batch, capacity;
  int num_pages, page_size;
  struct attn_gfx942_divisor by_page_size;
  int max_pages, chunk_heads;
  struct attn_gfx942_divisor by_head_threads;
  int head_threads, chunk_step;
  int new_type, half;
  int interleaved, aligned;
  int lengths_only, reserved;
  const long long* slot_mapping;
};

#endif
