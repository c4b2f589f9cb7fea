//# architectures sm_90a
#include "../decode/decode.cuh"

ATTN_DECODE_SM90(decode_sm90_f16_d256_r64, F16, .head_dim = 256, .head_dim_v = 256,
                 .element_bytes = 2, .rows_of_group = 64)
