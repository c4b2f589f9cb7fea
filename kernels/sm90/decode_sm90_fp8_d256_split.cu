//# architectures sm_90 compute_90
#include "../decode/decode.cuh"
#include "../ptx/convert_fp8.h"

ATTN_DECODE_SM90_FP8(decode_sm90_fp8_d256_split, .head_dim = 256, .head_dim_v = 256,
                     .element_bytes = 1, .split = true)
