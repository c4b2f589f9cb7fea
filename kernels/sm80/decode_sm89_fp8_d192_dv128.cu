//# architectures sm_89 sm_90
#include "../decode/decode.cuh"
#include "../ptx/convert_fp8.h"

ATTN_DECODE_SM89_FP8(decode_sm89_fp8_d192_dv128, .head_dim = 192, .head_dim_v = 128,
                     .element_bytes = 1)
