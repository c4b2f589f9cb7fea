//# architectures sm_90 compute_90
#include "../decode/decode.cuh"
#include "../ptx/convert_fp8.h"

ATTN_DECODE_SM90_FP8(decode_sm90_fp8_d192_dv128_split, .head_dim = 192, .head_dim_v = 128,
                     .element_bytes = 1, .split = true)
