// What the parameter structs of the forward kernels have in common.
#ifndef ATTN_KERNELS_SHARED_FORWARD_ARGS_H
#define ATTN_KERNELS_SHARED_FORWARD_ARGS_H

struct attn_kv_lengths {
  const int* seqlens;     // padded: [batch], null: all have `capacity` keys
  const int* cu_seqlens;  // packed: [batch + 1]
  long long total;        // packed: tokens in the buffer
  int capacity;
};

#endif
