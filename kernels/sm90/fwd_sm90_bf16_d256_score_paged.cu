//# architectures sm_90a
#include "forward.cuh"

ATTN_SM90_FORWARD(fwd_sm90_bf16_d256_score_paged, BF16, tile_d256_score, with_score_and_pages)
