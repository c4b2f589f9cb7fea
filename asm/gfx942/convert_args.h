// The parameter struct of convert_gfx942, for its host side; convert_gfx942.s says what the fields
// are.
#ifndef ATTN_ASM_GFX942_CONVERT_ARGS_H
#define ATTN_ASM_GFX942_CONVERT_ARGS_H

enum { attn_convert_waves = 8 };
enum { attn_convert_one, attn_convert_divide, attn_convert_find, attn_convert_multiply };

// How the codes of an fp8 type come from those of the hardware: encode_4_fp8 of
// asm/include/convert.inc.
struct attn_gfx942_fp8_codes {
  unsigned nan_shift;
  float to_hardware, limit;
  unsigned nan_mask, sign_always;
};

struct attn_convert_kernarg {
  const void* src;
  void* dst;
  long long src_stride[3], dst_stride[3];
  float* descale;
  int descale_stride[3];
  int seqlen, head_dim, scale;
  int box[3];
  int src_type, dst_type;
  int src_row_bytes, dst_row_bytes;
  struct attn_gfx942_fp8_codes codes;
  float max_mantissa, max_inverse;
  int max_exponent;
  float from_hardware;
  unsigned code_mask;
  float inf_value, nan_value;
  int log2_per_lane;
};

#endif
