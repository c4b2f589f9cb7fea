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

attn_status attn_block_mask_from_dense(attn_context* context, const attn_block_mask_shape* shape,
                                       const uint8_t* dense, void*, attn_block_mask** mask) {
  return not_yet(context, "block mask from dense", {shape, dense, mask});
}
attn_status attn_block_mask_from_documents(attn_context* context,
                                           const attn_block_mask_shape* shape,
                                           const int64_t* lengths, int64_t, int32_t,
                                           attn_block_mask** mask) {
  return not_yet(context, "block mask from documents", {shape, lengths, mask});
}
attn_status attn_block_mask_from_window(attn_context* context, const attn_block_mask_shape* shape,
                                        int64_t, int64_t, int64_t, int64_t,
                                        attn_block_mask** mask) {
  return not_yet(context, "block mask from window", {shape, mask});
}
attn_status attn_block_mask_from_intervals(attn_context* context,
                                           const attn_block_mask_shape* shape,
                                           const int32_t* intervals, int32_t, void*,
                                           attn_block_mask** mask) {
  return not_yet(context, "block mask from intervals", {shape, intervals, mask});
}
attn_status attn_block_mask_from_kinds(attn_context* context, const attn_block_mask_shape* shape,
                                       const uint8_t* kinds, const int32_t*, const uint32_t*,
                                       int64_t, attn_block_mask** mask) {
  return not_yet(context, "block mask from kinds", {shape, kinds, mask});
}
attn_status attn_block_mask_combine(attn_context* context, const attn_block_mask* a,
                                    const attn_block_mask* b, int32_t, attn_block_mask** mask) {
  return not_yet(context, "block mask combination", {a, b, mask});
}
attn_status attn_block_mask_apply(const attn_block_mask*, attn_problem*, attn_args*) {
  return guarded([]() -> Status { return invalid("mask is NULL; accepted: a block mask"); });
}
void attn_block_mask_destroy(attn_block_mask*) {}
