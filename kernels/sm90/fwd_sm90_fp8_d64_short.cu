//# architectures sm_90a
#include "fp8_forward.cuh"

ATTN_SM90_FP8_FORWARD(fwd_sm90_fp8_d64_short, tile_fp8_d64_short, with_fp8, false)
