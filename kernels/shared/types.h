// Element types in parameter structs: the values of attn_dtype in attn/attn.h, which device code
// cannot include.
#ifndef ATTN_KERNELS_SHARED_TYPES_H
#define ATTN_KERNELS_SHARED_TYPES_H

enum {
  attn_element_f32 = 1,
  attn_element_f16 = 2,
  attn_element_bf16 = 3,
  attn_element_f8_e4m3fn = 4,
  attn_element_f8_e5m2 = 5,
  attn_element_q8_0 = 7,
  attn_element_q4_0 = 8,
  attn_element_q4_1 = 10,
  attn_element_q5_0 = 11,
  attn_element_q5_1 = 12,
  attn_element_iq4_nl = 13,
  attn_element_i8 = 14,
  attn_element_i4 = 15,
  attn_element_f8_e4m3fn_token = 16,
  attn_element_mla_656 = 18
};

#endif
