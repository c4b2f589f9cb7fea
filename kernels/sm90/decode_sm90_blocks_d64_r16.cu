//# architectures sm_90 compute_90 local_bytes=8
#include "../decode/decode.cuh"

ATTN_DECODE_SM90_BLOCKS(decode_sm90_blocks_d64_r16, .head_dim = 64, .head_dim_v = 64,
                        .element_bytes = 2, .own_types = true)
