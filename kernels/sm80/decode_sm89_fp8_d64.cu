//# architectures sm_89 sm_90
#include "../decode/decode.cuh"
#include "../ptx/convert_fp8.h"

ATTN_DECODE_SM89_FP8(decode_sm89_fp8_d64, .head_dim = 64, .head_dim_v = 64, .element_bytes = 1)
