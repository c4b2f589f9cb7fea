//# architectures sm_80 sm_90 compute_80
#include "../decode/decode.cuh"

ATTN_DECODE_SM80(decode_sm80_bf16_d64, BF16, .head_dim = 64, .head_dim_v = 64, .element_bytes = 2)
