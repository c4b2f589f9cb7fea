//# architectures sm_89 sm_90 compute_89
#include "../ptx/convert_fp8.h"
#include "decode.cuh"

ATTN_DECODE_SM89_FP8(decode_sm89_fp8_d192_dv128, 192, 128)
