//# architectures sm_80 sm_90 compute_80
#include "../decode/decode.cuh"

ATTN_DECODE_SM80(decode_sm80_f16_d192_dv128, F16, .head_dim = 192, .head_dim_v = 128,
                 .element_bytes = 2)
