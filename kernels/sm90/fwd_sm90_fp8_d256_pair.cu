//# architectures sm_90a
#include "fp8_forward.cuh"

ATTN_SM90_FP8_FORWARD(fwd_sm90_fp8_d256_pair, tile_fp8_d256_pair, with_fp8, false,
                      __cluster_dims__(attn::sm90::tile_fp8_d256_pair.blocks))
