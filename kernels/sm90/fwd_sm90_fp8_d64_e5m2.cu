//# architectures sm_90a
#include "fp8_forward.cuh"

ATTN_SM90_FP8_FORWARD(fwd_sm90_fp8_d64_e5m2, tile_fp8_d64, with_fp8, true)
