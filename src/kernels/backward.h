// What the families bwd_* of CUDA share on the host: the workspace and the steps before the main
// one.
#pragma once
#include <algorithm>
#include <cmath>

#include "kernels/backward/prepare_args.h"
#include "kernels/backward_sm80/backward_args.h"
#include "kernels/kernel.h"
#include "kernels/limits.h"
#include "problem/backward.h"

namespace attn {

constexpr const char* backward_prepare_image = "bwd_prepare_cuda";
constexpr const char* backward_sinks_image = "bwd_sinks_cuda";
constexpr const char* backward_bias_image = "bwd_bias_cuda";

BackwardRows backward_rows(const Problem& p);

// The scores' factor, as powers of 2 need it, of scale's sign and not 0.
inline float log2_scale(const Problem& p) {
  return std::copysign(std::max(std::abs(p.scale) * 1.44269504f, 1e-37f), p.scale);  // log2(e)
}

// Offsets in the workspace.
struct BackwardSpace {
  size_t lse2, delta;  // as in attn_backward_prepare_kernarg
  size_t sink_parts;
  size_t bias_parts;  // as attn_backward_bias_kernarg::part_sums
  size_t clear;       // of `clear_bytes` that are 0 when the main step begins
  size_t end;         // a multiple of 256, where a family's own arrays begin
};
BackwardSpace backward_space(const BackwardProblem& b, size_t clear_bytes);

// Adds the steps of bwd_prepare_cuda and, for d_sinks and d_bias, bwd_sinks_cuda and bwd_bias_cuda.
// The family sets recipe->workspace.
Status add_prepare_steps(const BackwardProblem& b, const DeviceInfo& device,
                         const BackwardSpace& space, size_t clear_bytes, Recipe* recipe);
// Those of bwd_bias_cuda, and the bytes of their bias_parts.
Status add_bias_steps(const BackwardProblem& b, const DeviceInfo& device,
                      const BackwardSpace& space, Recipe* recipe);
size_t bias_parts_bytes(const BackwardProblem& b);

// The parameters of bwd_sm80_*, without what they write and the blocks of their grid, and their
// addresses of a run.
attn_bwd_sm80_kernarg sm80_backward_arguments(const BackwardProblem& b, const BackwardSpace& space,
                                              const DeviceInfo& device);
void patch_sm80_backward(const BackwardProblem& b, const BackwardArgs& args, void* workspace,
                         attn_bwd_sm80_kernarg* a);

// A row of the catalog, and what all rows take: one type of 16 bits, and up to head_dim columns.
constexpr Limits gradient_limits(attn_dtype type, int64_t head_dim) {
  return {.in_types = type_bit(type),
          .kv_types = type_bit(type),
          .out_types = float_types,
          .flags = forward_flags,
          .features = forward_features,
          .head_dim = {.multiple = 8, .max = head_dim},
          .head_dim_v = {.multiple = 8, .max = head_dim}};
}
constexpr Kernel gradient_row(const char* name, attn_dtype type, const Limits& limits,
                              MakeRecipe recipe) {
  return {.name = name,
          .op = Op::backward,
          .backend = ATTN_BACKEND_CUDA,
          .limits = limits,
          .numerics = {.weights = type},
          .recipe = recipe,
          .first_images = {backward_prepare_image, backward_sinks_image, backward_bias_image}};
}

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
