//# architectures sm_90a local_bytes=8
#include "fp8_forward.cuh"

ATTN_SM90_FP8_FORWARD(fwd_sm90_fp8_d64_long, tile_fp8_d64_long, with_fp8, false)
