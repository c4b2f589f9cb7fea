//# architectures sm_90a local_bytes=8
#include "fp8_forward.cuh"

ATTN_SM90_FP8_FORWARD(fwd_sm90_fp8_d128_e5m2, tile_fp8_d128, with_fp8, true)
