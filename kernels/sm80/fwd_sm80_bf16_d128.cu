//# architectures sm_80 sm_90 compute_80
#include "forward.cuh"

ATTN_SM80_FORWARD(fwd_sm80_bf16_d128, BF16, 128, 0)
