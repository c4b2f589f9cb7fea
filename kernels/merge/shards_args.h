// The parameter structs of accumulate_cuda and wait_cuda, for their host side too.
#ifndef ATTN_KERNELS_MERGE_SHARDS_ARGS_H
#define ATTN_KERNELS_MERGE_SHARDS_ARGS_H

enum { attn_accumulate_warps = 4, attn_wait_most = 64 };

struct attn_accumulate_kernarg {
  const float* part;      // [batch, seqlen_q, heads, head_dim], contiguous
  const float* part_lse;  // [batch, heads, seqlen_q]
  float* out;
  float* lse;               // as part_lse
  long long out_stride[3];  // elements: batch, seq, head
  long long rows;           // batch * heads * seqlen_q
  int heads, seqlen_q, head_dim;
  int fours;  // head_dim and strides are multiples of 4, out is aligned to 16 bytes
};

struct attn_wait_kernarg {
  const unsigned* ready[attn_wait_most];  // two words each
  int count;
  int first_segment;  // for the host: the first of `count` segments with words
};

#endif
