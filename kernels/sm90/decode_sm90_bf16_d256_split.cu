//# architectures sm_90 compute_90
#include "../decode/decode.cuh"

ATTN_DECODE_SM90(decode_sm90_bf16_d256_split, BF16, .head_dim = 256, .head_dim_v = 256,
                 .element_bytes = 2, .split = true)
