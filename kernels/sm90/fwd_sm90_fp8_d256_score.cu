//# architectures sm_90a local_bytes=16
#include "fp8_forward.cuh"

ATTN_SM90_FP8_FORWARD(fwd_sm90_fp8_d256_score, tile_fp8_d256_score, with_fp8_and_score, false)
