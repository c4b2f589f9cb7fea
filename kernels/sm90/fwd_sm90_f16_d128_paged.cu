//# architectures sm_90a
#include "forward.cuh"

ATTN_SM90_FORWARD(fwd_sm90_f16_d128_paged, F16, tile_d128, with_pages)
