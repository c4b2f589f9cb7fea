// The rows of asm/gfx942's FP8 forward kernels.
#pragma once
#include "kernels/device_kernel.h"

namespace attn {

extern const DeviceKernel fwd_gfx942_fp8_d64_kernel;
extern const DeviceKernel fwd_gfx942_fp8_d128_kernel;
extern const DeviceKernel fwd_gfx942_fp8_d64_mask_kernel;
extern const DeviceKernel fwd_gfx942_fp8_d128_mask_kernel;

}  // namespace attn
