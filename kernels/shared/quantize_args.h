// The parameter struct of quantize_cuda, for its host side and for the kernel.
#ifndef ATTN_KERNELS_SHARED_QUANTIZE_ARGS_H
#define ATTN_KERNELS_SHARED_QUANTIZE_ARGS_H

#include "small_float.h"

enum { attn_quantize_warps = 8 };
enum { attn_quantize_one, attn_quantize_given, attn_quantize_amax };  // attn_scale_source

struct attn_quantize_kernarg {
  const void* src;  // [batch, seqlen, heads, head_dim]
  void* dst;
  float* descale;                          // one per group; null: scale one and not wanted
  long long src_stride[3], dst_stride[3];  // elements: batch, seq, head
  long long batch, seqlen, heads, head_dim;
  // Group g holds group_seqs rows of group_heads heads of group_batch batches, the last of a
  // sequence fewer rows: ((batch / group_batch) * (heads / group_heads)) * seq_groups groups.
  long long groups, group_batch, group_seqs, group_heads, seq_groups;
  double max_finite;        // of dst_type; nvfp4: of a code times a scale
  attn::SmallFloat format;  // of dst_type if that is fp8
  int src_type, dst_type;   // types.h; fp8: see format
  int scale, saturate;
  void* scales;               // of a row: of i8 and i4 f16, of f8_e4m3fn_token f32; of nvfp4 of 16
                              // elements, e4m3
  long long scale_stride[3];  // batch, seq, head
};

#endif
