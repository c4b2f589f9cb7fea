//# architectures sm_90a local_bytes=24
#include "fp8_forward.cuh"

ATTN_SM90_FP8_FORWARD(fwd_sm90_fp8_d256_precise, tile_fp8_d256_precise, with_fp8, false)
