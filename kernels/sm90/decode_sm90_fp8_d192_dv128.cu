//# architectures sm_90 compute_90
#include "../ptx/convert_fp8.h"
#include "../sm80/decode.cuh"

ATTN_DECODE_SM90_FP8(decode_sm90_fp8_d192_dv128, 192, 128)
