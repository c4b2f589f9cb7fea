//# architectures sm_90a
#include "../decode/decode.cuh"

ATTN_DECODE_SM90(decode_sm90_bf16_d192_dv128_r64, BF16, .head_dim = 192, .head_dim_v = 128,
                 .element_bytes = 2, .rows_of_group = 64)
