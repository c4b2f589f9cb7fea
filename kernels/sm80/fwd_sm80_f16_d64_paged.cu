//# architectures sm_80 sm_90 compute_80
#include "forward.cuh"

ATTN_SM80_FORWARD(fwd_sm80_f16_d64_paged, F16, 64, attn::sm80::with_pages)
