// The launches of shards_cuda (plan/shards.h): wait_cuda waits for segments to arrive,
// accumulate_cuda adds a partial result to an earlier one.
#pragma once
#include "kernels/kernel.h"

namespace attn {

constexpr const char* accumulate_image = "accumulate_cuda";
constexpr const char* wait_image = "wait_cuda";

// For those of `count` segments from `first` on that have ready words, if any.
std::vector<Step> wait_steps(const Problem& problem, int64_t first, int64_t count);

// Of a contiguous float32 result and its lse, at offsets in the workspace, into the problem's out
// and lse.
Step accumulate_step(const Problem& problem, const DeviceInfo& device, size_t out, size_t lse);

}  // namespace attn
