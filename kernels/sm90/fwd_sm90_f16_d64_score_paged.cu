//# architectures sm_90a
#include "forward.cuh"

ATTN_SM90_FORWARD(fwd_sm90_f16_d64_score_paged, F16, tile_d64_score, with_score_and_pages)
