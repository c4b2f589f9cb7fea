// The kernels fwd_sm90_*. They differ by the largest head_dim they take.
#pragma once
#include "plan/device_kernel.h"

namespace attn {

extern const DeviceKernel fwd_sm90_d64_kernel, fwd_sm90_d128_kernel, fwd_sm90_d256_kernel;

}  // namespace attn
