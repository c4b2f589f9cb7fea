//# architectures sm_90a
#include "forward.cuh"

ATTN_SM90_FORWARD(fwd_sm90_bf16_d128_paged, BF16, tile_d128, with_pages)
