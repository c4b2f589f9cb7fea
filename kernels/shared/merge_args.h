// The parameter structs of merge_cuda and merge_gfx942, for their host side and for the CUDA
// kernel.
#ifndef ATTN_KERNELS_SHARED_MERGE_ARGS_H
#define ATTN_KERNELS_SHARED_MERGE_ARGS_H

enum { attn_merge_max_parts = 16, attn_merge_warps = 4 };  // warps, or waves, of a workgroup

struct attn_merge_kernarg {
  const void* outs[attn_merge_max_parts];   // [batch, seqlen_q, heads, head_dim] each
  const float* lses[attn_merge_max_parts];  // [batch, heads, seqlen_q]
  void* out;
  float* lse;                               // null: not wanted
  long long part_stride[3], out_stride[3];  // elements: batch, seq, head
  long long rows;                           // batch * heads * seqlen_q
  int heads, seqlen_q, head_dim;
  int num_parts;
  int part_type, out_type;  // types.h
};

struct attn_merge_cuda_kernarg : attn_merge_kernarg {
  int by_head;  // parts, the first ones, whose lse is [heads, batch, seqlen_q]
};

#endif
