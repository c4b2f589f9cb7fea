// The kernels fwd_sm80_*. They differ by the largest head_dim they take; _score: with softcap, bias
// and ALiBi; _mask: with a block mask.
#pragma once
#include "kernels/device_kernel.h"

namespace attn {

extern const DeviceKernel fwd_sm80_d64_kernel, fwd_sm80_d64_score_kernel, fwd_sm80_d64_mask_kernel,
    fwd_sm80_d64_score_mask_kernel;
extern const DeviceKernel fwd_sm80_d128_kernel, fwd_sm80_d128_score_kernel,
    fwd_sm80_d128_mask_kernel, fwd_sm80_d128_score_mask_kernel;
extern const DeviceKernel fwd_sm80_d256_kernel, fwd_sm80_d256_score_kernel,
    fwd_sm80_d256_mask_kernel, fwd_sm80_d256_score_mask_kernel;

}  // namespace attn
