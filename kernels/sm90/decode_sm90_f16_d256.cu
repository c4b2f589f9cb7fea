//# architectures sm_90 compute_90
#include "../decode/decode.cuh"

ATTN_DECODE_SM90(decode_sm90_f16_d256, F16, 256, 256)
