//# architectures sm_90a
#include "forward.cuh"

ATTN_SM90_FORWARD(fwd_sm90_f16_d256_pair, F16, tile_d256_pair, plain,
                  __cluster_dims__(attn::sm90::tile_d256_pair.blocks))
