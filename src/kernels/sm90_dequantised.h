// What the kernels over caches that dequantise_sm90 converts first share: fwd_sm90_*_dequantised
// and _dequantised_mixed.
#pragma once
#include "kernels/sm90_forward.h"

namespace attn::dequantised {

constexpr const char* image = "dequantise_sm90";

// Segments as fwd_sm90_* get them: those of q's type as they are, the others in the workspace,
// which begins with what fwd_sm90_* count items in.
struct Segments {
  static bool in_workspace(const Problem& p, int32_t i);
  static sm90::ReadSegment segment(const Problem& p, int32_t i);
};
size_t workspace_bytes(const Problem& p);
size_t cleared_bytes(const Problem& p);  // Recipe::cleared

Status check(const Problem& p, const DeviceInfo& device);

// The launch that fills the workspace. least_queries: it leaves out sequences with fewer queries.
// concurrent: the launch after it runs at the same time (grid_begin_concurrent).
Step step(const Problem& p, const DeviceInfo& device, int least_queries = 0,
          bool concurrent = false);

}  // namespace attn::dequantised
