//# architectures sm_90a local_bytes=8
#include "fp8_forward.cuh"

ATTN_SM90_FP8_FORWARD(fwd_sm90_fp8_d128_heads, tile_fp8_d128_heads, with_fp8, false,
                      __cluster_dims__(attn::sm90::tile_fp8_d128_heads.blocks))
