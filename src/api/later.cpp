// Declared interfaces that no kernel serves yet: arguments are checked as far as they can be, then
// the answer is ATTN_UNSUPPORTED.
#include "api/handles.h"
#include "core/error.h"

using namespace attn;

namespace {

attn_status not_yet(const attn_context* context, const char* what,
                    std::initializer_list<const void*> needed) {
  return guarded([&]() -> Status {
    if (!context) return invalid("context is NULL; accepted: a context");
    for (const void* pointer : needed)
      if (!pointer) return invalid(what, ": an argument is NULL; accepted: an address");
    return unsupported(what, ": no kernel of backend ",
                       attn_backend_string(context->context->backend), " yet");
  });
}

}  // namespace

attn_status attn_plan_create_kv_append(attn_context* context, const attn_kv_append_problem* problem,
                                       attn_plan** plan) {
  return not_yet(context, "kv_append", {problem, plan});
}
attn_status attn_run_kv_append(const attn_plan* plan, const attn_kv_append_args*, void*) {
  return guarded([&]() -> Status {
    if (!plan) return invalid("plan is NULL; accepted: a plan");
    return invalid("plan is for ", op_name(plan->plan->kernel->op),
                   "; accepted by this call: plans for kv_append");
  });
}
