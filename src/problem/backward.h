// The problem of attn_plan_create_backward, validated, with every default resolved.
#pragma once
#include "problem/problem.h"

namespace attn {

// After make_backward_problem: all types and strides, gradients hold their real values; `forward`
// is null, `of` has it.
struct BackwardProblem : AnyProblem, attn_backward_problem {
  Problem of;
  Footprint d_out_bytes, dq_bytes, dk_bytes, dv_bytes, d_bias_bytes;

  BackwardProblem() : AnyProblem(Op::backward), attn_backward_problem{} {}
  bool wants(uint32_t gradient) const { return (gradients & gradient) != 0; }
  bool adds(uint32_t gradient) const { return (accumulate & gradient) != 0; }
  const Segment& kv() const { return of.segment[0]; }
};
Status make_backward_problem(const attn_backward_problem* in, BackwardProblem* out);

// `forward` points to `of`.
struct BackwardArgs : attn_backward_args {
  Args of;
  BackwardArgs() : attn_backward_args{}, of{} {}
  BackwardArgs(const BackwardArgs&) = delete;
  BackwardArgs& operator=(const BackwardArgs&) = delete;
};
// As check_args.
Status check_backward_args(const BackwardProblem& problem, const attn_backward_args* in,
                           const void* workspace, size_t workspace_bytes, bool host_memory,
                           BackwardArgs* out);

}  // namespace attn
