//# architectures sm_90a
#include "forward.cuh"

ATTN_SM90_FORWARD(fwd_sm90_bf16_d128_score_paged, BF16, tile_d128_score, with_score_and_pages)
