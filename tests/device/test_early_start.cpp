// Kernels start before the kernel in front of them in the stream has ended, and read what it writes
// after it.
#include <cstring>
#include <memory>

#include "attn/attn.hpp"
#include "core/dtype.h"
#include "cuda.h"

namespace attn::test {
namespace {

using Plan = std::unique_ptr<attn_plan, void (*)(attn_plan*)>;
constexpr int64_t heads_kv = 2, heads_q = 8, dim = 128, keys = 512, row = heads_kv * dim;

Plan plan_of(attn_context* context, const attn_problem& problem) {
  attn_plan* plan = nullptr;
  const attn_status status = attn_plan_create(context, &problem, &plan);
  INFO((status == ATTN_OK ? "" : attn_last_error()));
  REQUIRE(status == ATTN_OK);
  return Plan(plan, attn_plan_destroy);
}

// Attention of `keys` queries, whose result is what a token's attention then has as its values: the
// kernel in front has few blocks, beside which the next one's find room at once.
TEST_CASE("cuda: values that the kernel in front writes") {
  Backend& backend = backend_of(ATTN_BACKEND_CUDA);
  if (!backend.context) ATTN_SKIP(backend.reason);
  const Stream stream;
  // The library's own kernels, whichever the other context has.
  const context own(ATTN_BACKEND_CUDA);
  constexpr attn_dtype type = ATTN_BF16;
  auto segment = make<attn_segment>();
  segment.k_type = segment.v_type = type;
  segment.seqlen = keys;
  auto front = make<attn_problem>();
  front.batch = 1;
  front.heads_q = front.heads_kv = heads_kv;
  front.head_dim = dim;
  front.seqlen_q = keys;
  front.q_type = front.out_type = type;
  front.num_segments = 1;
  front.segments = &segment;
  attn_problem token = front;
  token.heads_q = heads_q;
  token.seqlen_q = 1;
  token.out_type = ATTN_F32;
  const Plan front_plan = plan_of(own.get(), front), token_plan = plan_of(backend.context, token);
  INFO(attn_plan_kernel(front_plan.get()) << ", " << attn_plan_kernel(token_plan.get()));
  CHECK(std::string(attn_plan_kernel(token_plan.get())).starts_with("decode_"));

  const Buffer q = random_values(type, keys * row, 1), k = random_values(type, keys * row, 2),
               v = random_values(type, keys * row, 3), old = random_values(type, keys * row, 4),
               out(size_t(heads_q * dim) * 4, 0xff);
  Arena arena(backend.context);
  auto front_segment = make<attn_segment_args>(), token_segment = make<attn_segment_args>();
  front_segment.k = token_segment.k = arena.add(k);
  front_segment.v = arena.add(v);
  auto front_args = make<attn_args>(), token_args = make<attn_args>();
  front_args.q = token_args.q = arena.add(q);
  front_args.out = arena.add(old);
  token_segment.v = front_args.out;
  token_args.out = arena.add(out);
  front_args.num_segments = token_args.num_segments = 1;
  front_args.segments = &front_segment;
  token_args.segments = &token_segment;
  struct Space {
    void* memory;
    size_t bytes;
  };
  const auto space = [&](const Plan& plan) {
    const size_t bytes = attn_plan_workspace(plan.get());
    Space made = {bytes ? arena.workspace(bytes) : nullptr, bytes};
    if (bytes)
      REQUIRE(attn_workspace_init(plan.get(), made.memory, bytes, stream.get()) == ATTN_OK);
    return made;
  };
  const Space front_space = space(front_plan), token_space = space(token_plan);
  const auto run_front = [&] {
    return attn_run(front_plan.get(), &front_args, front_space.memory, front_space.bytes,
                    stream.get()) == ATTN_OK;
  };
  const auto run_token = [&] {
    return attn_run(token_plan.get(), &token_args, token_space.memory, token_space.bytes,
                    stream.get()) == ATTN_OK;
  };
  REQUIRE(run_front());
  REQUIRE(attn_synchronize(backend.context, stream.get()) == ATTN_OK);
  REQUIRE(run_token());
  REQUIRE(attn_synchronize(backend.context, stream.get()) == ATTN_OK);
  const Buffer want = arena.fetch(out, token_args.out);
  arena.replace(front_args.out, old);
  REQUIRE(run_token());
  REQUIRE(attn_synchronize(backend.context, stream.get()) == ATTN_OK);
  REQUIRE((arena.fetch(out, token_args.out).bytes != want.bytes));  // the values matter

  const Captured both(stream, [&] { return run_front() && run_token(); });
  for (int n = 0; n < 50; ++n) {
    arena.replace(front_args.out, old);
    arena.replace(token_args.out, out);
    both.replay();
    INFO("replay " << n);
    REQUIRE((arena.fetch(out, token_args.out).bytes == want.bytes));
  }
}

}  // namespace
}  // namespace attn::test
