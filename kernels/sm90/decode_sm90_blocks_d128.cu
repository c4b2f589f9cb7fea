//# architectures sm_90 compute_90 local_bytes=8
#include "../decode/decode.cuh"

ATTN_DECODE_SM90_BLOCKS(decode_sm90_blocks_d128, .head_dim = 128, .head_dim_v = 128,
                        .element_bytes = 2, .own_types = true, .rows_of_group = 8)
