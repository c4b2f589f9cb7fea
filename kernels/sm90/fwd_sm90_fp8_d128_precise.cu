//# architectures sm_90a
#include "fp8_forward.cuh"

ATTN_SM90_FP8_FORWARD(fwd_sm90_fp8_d128_precise, tile_fp8_d128_precise, with_fp8, false)
