// Which of the two CUDA kernels takes new tokens, and what kv_append_many_cuda is launched with.
#include <cstring>

#include "catalog/catalog.h"
#include "catch.h"
#include "hopper.h"
#include "kernels/cache/kv_append_args.h"
#include "problem/operations.h"

using namespace attn;

namespace {

// 8 heads of 128 of K and V: 256 threads a token.
struct Tokens : KvAppendProblem {
  Tokens(int64_t batch, int64_t seqlen_new, int64_t heads_q = 0);
};
Tokens::Tokens(int64_t batch, int64_t seqlen_new, int64_t heads_q) {
  attn_kv_append_problem in{};
  in.struct_size = sizeof in;
  in.batch = batch, in.heads_kv = 8, in.heads_q = heads_q, in.head_dim = 128;
  in.seqlen_new = seqlen_new;
  in.new_type = ATTN_BF16;
  if (heads_q) in.rotary_dim = 128, in.rotary_positions = 5000;
  in.segment.struct_size = sizeof in.segment;
  in.segment.k_type = in.segment.v_type = ATTN_BF16;
  in.segment.has_seqlens = 1;
  in.segment.seqlen = 5000;
  in.advance_seqlens = 1;
  REQUIRE(make_kv_append_problem(&in, this).text == "");
}

}  // namespace

TEST_CASE("kv_append: few tokens are one a block, many several", "[plan]") {
  // From 640 threads for each of 132 multiprocessors on.
  CHECK(test::chosen(Tokens(64, 1, 32)) == "kv_append_cuda");
  CHECK(test::chosen(Tokens(1, 329)) == "kv_append_cuda");
  CHECK(test::chosen(Tokens(1, 330)) == "kv_append_many_cuda");
  CHECK(test::chosen(Tokens(4, 82)) == "kv_append_cuda");
  CHECK(test::chosen(Tokens(4, 83)) == "kv_append_many_cuda");
  CHECK(test::chosen(Tokens(1, 109, 32)) == "kv_append_cuda");
  CHECK(test::chosen(Tokens(1, 110, 32)) == "kv_append_many_cuda");

  const Kernel& many = *find_kernel("kv_append_many_cuda");
  Recipe recipe;
  REQUIRE(many.recipe(Tokens(1, 329), test::hopper(), &recipe).ok());
  CHECK(recipe.passed_over == "for 329 new tokens, below 330");
}

TEST_CASE("kv_append: launches of many tokens on CUDA", "[plan]") {
  const Kernel& many = *find_kernel("kv_append_many_cuda");
  const auto check = [&](int64_t batch, int64_t seqlen_new, int of_block, uint32_t blocks) {
    Recipe recipe;
    REQUIRE(many.recipe(Tokens(batch, seqlen_new), test::hopper(), &recipe).ok());
    REQUIRE(recipe.steps.size() == 2);
    for (const Step& step : recipe.steps) {
      attn_kv_append_kernarg a;
      REQUIRE(step.arguments.bytes.size() == sizeof a);
      std::memcpy(static_cast<void*>(&a), step.arguments.bytes.data(), sizeof a);
      CHECK(std::string(step.image) == "kv_append_many_cuda");
      CHECK(a.lengths_only == (&step == &recipe.steps[1]));
      CHECK(a.tokens == batch * seqlen_new);
      CHECK(a.tokens_of_block == of_block);
    }
    CHECK(recipe.steps[0].launch.grid[0] == blocks);
    CHECK(recipe.steps[0].launch.block[0] == 256);
    CHECK(recipe.steps[1].launch.grid[0] == 1);
  };
  check(8, 1, 1, 8);  // if demanded by name
  check(8, 512, 1, 4096);
  check(8, 529, 2, 2116);
  check(8, 2048, 7, 2341);
  check(8, 4096, 8, 4096);
}
