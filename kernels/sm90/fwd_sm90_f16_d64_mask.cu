//# architectures sm_90a
#include "forward.cuh"

ATTN_SM90_FORWARD(fwd_sm90_f16_d64_mask, F16, tile_d64_mask, with_mask)
