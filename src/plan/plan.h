// Plans: everything decided before the first run.
#pragma once
#include <memory>
#include <vector>

#include "masks/device_mask.h"
#include "plan/choose.h"
#include "problem/backward.h"
#include "problem/operations.h"
#include "runtime/context.h"

namespace attn {

struct Plan {
  std::shared_ptr<Context> context;
  std::unique_ptr<const AnyProblem> problem;
  Choice choice;  // the code of its steps loaded, the maps in their parameters encoded
};

// Chooses a kernel and loads its code.
Status make_plan(const std::shared_ptr<Context>& context, std::unique_ptr<const AnyProblem> problem,
                 std::unique_ptr<Plan>* plan);

// Of the caller's problems.
Status plan_forward(const std::shared_ptr<Context>& context, const attn_problem* problem,
                    std::unique_ptr<Plan>* plan);
Status plan_backward(const std::shared_ptr<Context>& context, const attn_backward_problem* problem,
                     std::unique_ptr<Plan>* plan);
Status plan_merge(const std::shared_ptr<Context>& context, const attn_merge_problem* problem,
                  std::unique_ptr<Plan>* plan);
Status plan_quantize(const std::shared_ptr<Context>& context, const attn_quantize_problem* problem,
                     std::unique_ptr<Plan>* plan);
Status plan_kv_append(const std::shared_ptr<Context>& context,
                      const attn_kv_append_problem* problem, std::unique_ptr<Plan>* plan);
Status plan_kv_roll(const std::shared_ptr<Context>& context, const attn_kv_roll_problem* problem,
                    std::unique_ptr<Plan>* plan);

Status init_workspace(const Plan& plan, void* workspace, size_t bytes, void* stream);
Status run_forward(const Plan& plan, const attn_args* args, void* workspace, size_t bytes,
                   void* stream);
Status run_backward(const Plan& plan, const attn_backward_args* args, void* workspace, size_t bytes,
                    void* stream);
Status run_merge(const Plan& plan, const attn_merge_args* args, void* stream);
Status run_quantize(const Plan& plan, const attn_quantize_args* args, void* stream);
Status run_kv_append(const Plan& plan, const attn_kv_append_args* args, void* stream);
Status run_kv_roll(const Plan& plan, const attn_kv_roll_args* args, void* stream);
// Device backends only.
Status run_block_mask(const Plan& plan, const MaskArgs& args, void* stream);
Status check_forward(const Plan& plan, const attn_args* args, void* stream);

}  // namespace attn
