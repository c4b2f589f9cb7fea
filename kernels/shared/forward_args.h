// What the parameter structs of the kernels that read or write K/V have in common.
#ifndef ATTN_KERNELS_SHARED_FORWARD_ARGS_H
#define ATTN_KERNELS_SHARED_FORWARD_ARGS_H

struct attn_kv_lengths {
  const int* seqlens;     // padded: [batch], null: all have `capacity` keys
  const int* cu_seqlens;  // packed: [batch + 1]
  long long total;        // packed: tokens in the buffer
  int capacity;
};

// The pages of a paged segment, [num_pages, page_size, head, head_dim].
struct attn_pages {
  const int* block_table;               // [batch, max_pages]; null: not paged
  int num_pages, page_size, max_pages;  // not paged: one page
};

// The factor of stored values: at[b * batch + h * head + key / block_keys].
struct attn_descale {
  const float* at;  // null: the factor is 1
  int batch, head;  // elements
  int block_keys;   // 0: one descale for all keys
};

#endif
