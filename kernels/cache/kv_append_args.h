// The parameter structs of kv_append_cuda and kv_roll_cuda, for their host side and for the
// kernels.
#ifndef ATTN_KERNELS_CACHE_KV_APPEND_ARGS_H
#define ATTN_KERNELS_CACHE_KV_APPEND_ARGS_H

#include "../shared/forward_args.h"
#include "../shared/small_float.h"

enum { attn_kv_append_elements = 8 };                                       // of a thread
enum { attn_kv_append_max_threads = 768, attn_kv_append_max_tokens = 32 };  // of a block
enum { attn_kv_append_shared_bytes = attn_kv_append_max_threads / 8 };

// New tokens, and where they go: K, V or q.
struct attn_kv_append_tensor {
  const void* src;  // padded [batch, seq, head, dim] or packed [total, head, dim]
  void* dst;        // of q as src, else padded, or paged [num_pages, page_size, head, dim]
  long long src_stride[3], dst_stride[3];  // elements: batch or page, seq, head
  attn_descale descale;
  attn::SmallFloat format;  // of dst_type, if that is a small float
  int dst_type;             // shared/types.h, any other: fp8
  int dim;
  void* scale;  // one for each token and head, of i8 and i4 f16, of f8_e4m3fn_token f32; of nvfp4
                // of 16 elements, e4m3
  long long scale_stride[3];  // batch or page, seq, head
};

struct attn_kv_append_kernarg {
  attn_kv_append_tensor tensor[3];       // K, V, q
  const float *rotary_cos, *rotary_sin;  // [positions, half]
  const int* cu_seqlens_new;             // null: padded
  long long total_new;
  attn_kv_lengths lengths;  // of the cache
  int* seqlens_out;         // null: not written by this launch, which has several blocks a sequence
  const int* block_table;   // paged: [batch, max_pages]; null: not paged, or slot_mapping is given
  int num_pages, page_size, max_pages;  // page_size 0: not paged
  int batch, seqlen_new;                // packed: capacity
  int heads_kv, heads_q;
  int tokens, tokens_of_block;
  // A unit is the heads of a warp, which are all of K, of V or of q, or a head of several warps.
  int units_kv, units;     // of K, and of K, V and q
  int log_unit, log_head;  // log2 of the threads; a head has at least 4, which have a ggml block
  int new_type;
  int half, interleaved;  // pairs to rotate, and which
  int aligned;            // all that a thread has at once can be moved by 8 or 16 bytes
  int row_scales;         // K or V is i8, i4 or f8_e4m3fn_token
  int lengths_only;       // the launch writes seqlens_out, nothing else
  // [batch, seqlen_new]: page * page_size + place in the page; null: by lengths and block_table.
  // num_pages * page_size is below 2^31.
  const long long* slot_mapping;
};

// kv_roll_cuda: the new tokens are the first of each sequence of a paged cache, k_new and v_new, as
// many whole pages of them as leave `keep`. With lengths_only its lengths and table too.
struct attn_kv_roll_kernarg {
  attn_kv_append_kernarg append;
  int* recent_table;
  attn_pages recent;
  attn_kv_lengths recent_lengths;
  int* recent_seqlens_out;
  int keep;
};

#endif
