//# architectures sm_90a
#include "forward.cuh"

ATTN_SM90_FORWARD(fwd_sm90_bf16_d128_heads, BF16, tile_d128_heads, plain,
                  __cluster_dims__(attn::sm90::tile_d128_heads.blocks))
