//# architectures sm_90a
#include "forward.cuh"

ATTN_SM90_FORWARD(fwd_sm90_bf16_d192_dv128, BF16, tile_d192_dv128, plain)
