// What the families bwd_* of CUDA share on the host: the workspace and the steps before the main
// one.
#pragma once
#include "kernels/backward/prepare_args.h"
#include "kernels/kernel.h"
#include "problem/backward.h"

namespace attn {

constexpr const char* backward_prepare_image = "bwd_prepare_cuda";
constexpr const char* backward_sinks_image = "bwd_sinks_cuda";

BackwardRows backward_rows(const Problem& p);

// Offsets in the workspace.
struct BackwardSpace {
  size_t lse2, delta;  // as in attn_backward_prepare_kernarg
  size_t sink_parts;
  size_t clear;  // of `clear_bytes` that are 0 when the main step begins
  size_t end;    // a multiple of 256, where a family's own arrays begin
};
BackwardSpace backward_space(const BackwardProblem& b, size_t clear_bytes);

// Adds the steps of bwd_prepare_cuda and, for d_sinks, bwd_sinks_cuda. The family sets
// recipe->workspace.
Status add_prepare_steps(const BackwardProblem& b, const BackwardSpace& space, size_t clear_bytes,
                         Recipe* recipe);

// Types of arrays that Limits do not say, and what no kernel of CUDA computes.
Status check_device_gradients(const BackwardProblem& b);

// The array of one of dq, dk and dv; a run sets its address (patch_gradients).
attn_gradient_array gradient_array(const BackwardProblem& b, attn_gradient which);
inline void patch_gradients(const BackwardProblem& b, const BackwardArgs& args,
                            attn_gradient_array* dq, attn_gradient_array* dk,
                            attn_gradient_array* dv) {
  dq->at = b.wants(ATTN_GRAD_Q) ? args.dq : nullptr;
  dk->at = b.wants(ATTN_GRAD_K) ? args.dk : nullptr;
  dv->at = b.wants(ATTN_GRAD_V) ? args.dv : nullptr;
}

}  // namespace attn
