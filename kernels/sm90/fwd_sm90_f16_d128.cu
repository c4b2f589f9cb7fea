//# architectures sm_90a
#include "forward.cuh"

ATTN_SM90_FORWARD(fwd_sm90_f16_d128, F16, tile_d128, plain)
