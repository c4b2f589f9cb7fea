//# architectures sm_90 compute_90 local_bytes=48
#include "../decode/decode.cuh"

ATTN_DECODE_SM90(decode_sm90_f16_d128_r48, F16, .head_dim = 128, .head_dim_v = 128,
                 .element_bytes = 2, .row_groups = 3)
