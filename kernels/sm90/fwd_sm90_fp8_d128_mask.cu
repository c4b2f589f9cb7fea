//# architectures sm_90a local_bytes=40
#include "fp8_forward.cuh"

ATTN_SM90_FP8_FORWARD(fwd_sm90_fp8_d128_mask, tile_fp8_d128_mask, with_fp8_and_mask, false)
