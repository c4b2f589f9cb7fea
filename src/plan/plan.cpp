#include "plan/plan.h"

#include <algorithm>

#include "plan/composition.h"

namespace attn {
namespace {

// Loads the code of a step and encodes its maps, whose addresses alone are left to a run.
Status load(Context& context, Step* step) {
  ATTN_TRY(context.function(*step, &step->launch.function));
  alignas(64) unsigned char encoded[tensor_map_bytes];
  for (size_t i = 0; i < step->maps.size(); ++i) {
    ATTN_TRY(context.driver->encode(step->maps[i], encoded));
    std::copy_n(encoded, tensor_map_bytes, step->arguments.bytes.begin() + i * tensor_map_bytes);
  }
  return {};
}

Status load(Context& context, Choice* choice) {
  for (Step& step : choice->recipe.steps) ATTN_TRY(load(context, &step));
  if (choice->composition)
    for (Part& part : choice->composition->parts) ATTN_TRY(load(context, &part.choice));
  return {};
}

template <class P, class In>
Status plan_of(const std::shared_ptr<Context>& context, Status (*make)(const In*, P*), const In* in,
               std::unique_ptr<Plan>* plan) {
  auto problem = std::make_unique<P>();
  ATTN_TRY(make(in, problem.get()));
  return make_plan(context, std::move(problem), plan);
}

}  // namespace

Status make_plan(const std::shared_ptr<Context>& context, std::unique_ptr<const AnyProblem> problem,
                 std::unique_ptr<Plan>* out) {
  auto plan = std::make_unique<Plan>();
  ATTN_TRY(choose(*problem, context->machine(), &plan->choice));
  ATTN_TRY(load(*context, &plan->choice));
  plan->context = context;
  plan->problem = std::move(problem);
  *out = std::move(plan);
  return {};
}

Status plan_forward(const std::shared_ptr<Context>& context, const attn_problem* problem,
                    std::unique_ptr<Plan>* plan) {
  return plan_of(context, make_problem, problem, plan);
}
Status plan_backward(const std::shared_ptr<Context>& context, const attn_backward_problem* problem,
                     std::unique_ptr<Plan>* plan) {
  return plan_of(context, make_backward_problem, problem, plan);
}
Status plan_merge(const std::shared_ptr<Context>& context, const attn_merge_problem* problem,
                  std::unique_ptr<Plan>* plan) {
  return plan_of(context, make_merge_problem, problem, plan);
}
Status plan_quantize(const std::shared_ptr<Context>& context, const attn_quantize_problem* problem,
                     std::unique_ptr<Plan>* plan) {
  return plan_of(context, make_quantize_problem, problem, plan);
}
Status plan_kv_append(const std::shared_ptr<Context>& context,
                      const attn_kv_append_problem* problem, std::unique_ptr<Plan>* plan) {
  return plan_of(context, make_kv_append_problem, problem, plan);
}
Status plan_kv_roll(const std::shared_ptr<Context>& context, const attn_kv_roll_problem* problem,
                    std::unique_ptr<Plan>* plan) {
  return plan_of(context, make_kv_roll_problem, problem, plan);
}

}  // namespace attn
