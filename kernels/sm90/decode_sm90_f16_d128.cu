//# architectures sm_90 compute_90
#include "../decode/decode.cuh"

ATTN_DECODE_SM90(decode_sm90_f16_d128, F16, 128, 128)
