//# architectures sm_90a local_bytes=64
#include "../decode/decode.cuh"
#include "../ptx/convert_fp8.h"

ATTN_DECODE_SM90_FP8(decode_sm90_fp8_d128_r64, .head_dim = 128, .head_dim_v = 128,
                     .element_bytes = 1, .rows_of_group = 64)
