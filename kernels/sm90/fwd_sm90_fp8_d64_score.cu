//# architectures sm_90a
#include "fp8_forward.cuh"

ATTN_SM90_FP8_FORWARD(fwd_sm90_fp8_d64_score, tile_fp8_d64, with_fp8_and_score, false)
