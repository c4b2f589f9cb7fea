//# architectures sm_90a
#include "../decode/decode.cuh"

ATTN_DECODE_SM90(decode_sm90_f16_d64_r64, F16, .head_dim = 64, .head_dim_v = 64, .element_bytes = 2,
                 .rows_of_group = 64)
