//# architectures sm_90a
#include "forward.cuh"

ATTN_SM90_FORWARD(fwd_sm90_f16_d192, F16, tile_d192, plain)
