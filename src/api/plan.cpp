// Plans and runs.
#include "api/error.h"
#include "api/handles.h"

using namespace attn;

namespace {

template <class Problem>
attn_status create(attn_context* context, const Problem* problem, attn_plan** plan, auto&& make) {
  return guarded([&]() -> Status {
    if (!context) return invalid("context is NULL; accepted: a context");
    if (!plan) return invalid("plan is NULL; accepted: where to put the plan");
    auto made = std::make_unique<attn_plan>();
    ATTN_TRY(make(context->context, problem, &made->plan));
    *plan = made.release();
    return {};
  });
}

attn_status with_plan(const attn_plan* plan, auto&& body) {
  return guarded([&]() -> Status {
    if (!plan) return invalid("plan is NULL; accepted: a plan");
    return body(*plan->plan);
  });
}

}  // namespace

attn_status attn_plan_create(attn_context* context, const attn_problem* problem, attn_plan** plan) {
  return create(context, problem, plan, plan_forward);
}
attn_status attn_plan_create_backward(attn_context* context, const attn_backward_problem* problem,
                                      attn_plan** plan) {
  return create(context, problem, plan, plan_backward);
}
attn_status attn_plan_create_merge(attn_context* context, const attn_merge_problem* problem,
                                   attn_plan** plan) {
  return create(context, problem, plan, plan_merge);
}
attn_status attn_plan_create_quantize(attn_context* context, const attn_quantize_problem* problem,
                                      attn_plan** plan) {
  return create(context, problem, plan, plan_quantize);
}
attn_status attn_plan_create_kv_append(attn_context* context, const attn_kv_append_problem* problem,
                                       attn_plan** plan) {
  return create(context, problem, plan, plan_kv_append);
}
attn_status attn_plan_create_kv_roll(attn_context* context, const attn_kv_roll_problem* problem,
                                     attn_plan** plan) {
  return create(context, problem, plan, plan_kv_roll);
}

void attn_plan_destroy(attn_plan* plan) {
  delete plan;
}

const char* attn_plan_kernel(const attn_plan* plan) {
  return plan ? plan->plan->choice.kernel->name : "";
}
size_t attn_plan_workspace(const attn_plan* plan) {
  return plan ? plan->plan->choice.recipe.workspace : 0;
}

attn_status attn_workspace_init(const attn_plan* plan, void* workspace, size_t bytes,
                                void* stream) {
  return with_plan(plan,
                   [&](const Plan& p) { return init_workspace(p, workspace, bytes, stream); });
}

attn_status attn_run(const attn_plan* plan, const attn_args* args, void* workspace, size_t bytes,
                     void* stream) {
  return with_plan(plan,
                   [&](const Plan& p) { return run_forward(p, args, workspace, bytes, stream); });
}
attn_status attn_run_backward(const attn_plan* plan, const attn_backward_args* args,
                              void* workspace, size_t bytes, void* stream) {
  return with_plan(plan,
                   [&](const Plan& p) { return run_backward(p, args, workspace, bytes, stream); });
}
attn_status attn_run_merge(const attn_plan* plan, const attn_merge_args* args, void* stream) {
  return with_plan(plan, [&](const Plan& p) { return run_merge(p, args, stream); });
}
attn_status attn_run_quantize(const attn_plan* plan, const attn_quantize_args* args, void* stream) {
  return with_plan(plan, [&](const Plan& p) { return run_quantize(p, args, stream); });
}
attn_status attn_run_kv_append(const attn_plan* plan, const attn_kv_append_args* args,
                               void* stream) {
  return with_plan(plan, [&](const Plan& p) { return run_kv_append(p, args, stream); });
}
attn_status attn_run_kv_roll(const attn_plan* plan, const attn_kv_roll_args* args, void* stream) {
  return with_plan(plan, [&](const Plan& p) { return run_kv_roll(p, args, stream); });
}
attn_status attn_check(const attn_plan* plan, const attn_args* args, void* stream) {
  return with_plan(plan, [&](const Plan& p) { return check_forward(p, args, stream); });
}

uint64_t attn_launch_count(const char* kernel) {
  const Kernel* row = kernel ? find_kernel(kernel) : nullptr;
  return row ? launch_count(*row) : 0;
}
