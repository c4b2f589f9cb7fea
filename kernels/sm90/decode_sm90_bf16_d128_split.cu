//# architectures sm_90 compute_90
#include "../decode/decode.cuh"

ATTN_DECODE_SM90(decode_sm90_bf16_d128_split, BF16, .head_dim = 128, .head_dim_v = 128,
                 .element_bytes = 2, .split = true)
