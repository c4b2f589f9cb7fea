// The kernels fwd_sm90_*. They differ by the largest head_dim they take; _short and
// _long are for sequences of that kind.
#pragma once
#include "kernels/device_kernel.h"

namespace attn {

extern const DeviceKernel fwd_sm90_d64_short_kernel, fwd_sm90_d64_kernel, fwd_sm90_d96_kernel,
    fwd_sm90_d128_pair_kernel, fwd_sm90_d256_pair_kernel, fwd_sm90_d128_long_kernel,
    fwd_sm90_d128_kernel, fwd_sm90_d192_dv128_kernel, fwd_sm90_d192_kernel, fwd_sm90_d256_kernel,
    fwd_sm90_d64_mask_kernel, fwd_sm90_d128_mask_kernel, fwd_sm90_d256_mask_kernel,
    fwd_sm90_d64_score_kernel, fwd_sm90_d128_score_kernel, fwd_sm90_d256_score_kernel,
    fwd_sm90_d64_bias_kernel, fwd_sm90_d128_bias_kernel, fwd_sm90_d256_bias_kernel;

}  // namespace attn
