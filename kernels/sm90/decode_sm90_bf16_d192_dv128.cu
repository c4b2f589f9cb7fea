//# architectures sm_90 compute_90
#include "../decode/decode.cuh"

ATTN_DECODE_SM90(decode_sm90_bf16_d192_dv128, BF16, 192, 128)
