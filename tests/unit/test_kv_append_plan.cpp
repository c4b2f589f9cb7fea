// What kv_append_cuda is launched with.
#include <cstring>
#include <vector>

#include "catalog/catalog.h"
#include "catch.h"
#include "hopper.h"
#include "kernels/cache/kv_append_args.h"
#include "problem/operations.h"

using namespace attn;

namespace {

// 8 heads of K and V.
struct Tokens : KvAppendProblem {
  Tokens(int64_t batch, int64_t seqlen_new, int64_t heads_q = 0, int64_t head_dim = 128);
};
Tokens::Tokens(int64_t batch, int64_t seqlen_new, int64_t heads_q, int64_t head_dim) {
  attn_kv_append_problem in{};
  in.struct_size = sizeof in;
  in.batch = batch, in.heads_kv = 8, in.heads_q = heads_q, in.head_dim = head_dim;
  in.seqlen_new = seqlen_new;
  in.new_type = ATTN_BF16;
  if (heads_q) in.rotary_dim = head_dim, in.rotary_positions = 5000;
  in.segment.struct_size = sizeof in.segment;
  in.segment.k_type = in.segment.v_type = ATTN_BF16;
  in.segment.has_seqlens = 1;
  in.segment.seqlen = 5000;
  in.advance_seqlens = 1;
  REQUIRE(make_kv_append_problem(&in, this).text == "");
}

struct Made {
  attn_kv_append_kernarg a;
  uint32_t x, y, threads;
};
std::vector<Made> launches(const Tokens& tokens) {
  Recipe recipe;
  REQUIRE(find_kernel("kv_append_cuda")->recipe(tokens, test::hopper(), &recipe).ok());
  std::vector<Made> all;
  for (const Step& step : recipe.steps) {
    Made launch{{}, step.launch.grid[0], step.launch.grid[1], step.launch.block[0]};
    REQUIRE(step.arguments.bytes.size() == sizeof launch.a);
    std::memcpy(static_cast<void*>(&launch.a), step.arguments.bytes.data(), sizeof launch.a);
    all.push_back(launch);
  }
  return all;
}

}  // namespace

TEST_CASE("kv_append: a token of each sequence is one launch on CUDA, while a block has all heads",
          "[plan]") {
  const auto check = [](const Tokens& tokens, size_t steps, uint32_t y, uint32_t threads) {
    const std::vector<Made> made = launches(tokens);
    REQUIRE(made.size() == steps);
    CHECK(made[0].x == 64);
    CHECK(made[0].y == y);
    CHECK(made[0].threads == threads);
    if (steps == 2) CHECK(made[1].a.lengths_only);
  };
  check(Tokens(64, 1), 1, 1, 256);
  check(Tokens(64, 1, 32), 1, 1, 768);
  check(Tokens(64, 1, 34), 2, 7, 128);
  check(Tokens(64, 1, 0, 512), 2, 8, 128);  // 64 threads a head
}

TEST_CASE("kv_append: units are the heads of a warp, or the warps of a head", "[plan]") {
  const auto check = [](int64_t dim, int log_head, int log_unit, int units_kv, int units) {
    const attn_kv_append_kernarg a = launches(Tokens(1, 2, 9, dim))[0].a;
    CHECK(a.log_head == log_head);
    CHECK(a.log_unit == log_unit);
    CHECK(a.units_kv == units_kv);
    CHECK(a.units == units);
  };
  check(8, 2, 5, 1, 4);
  check(64, 3, 5, 2, 7);
  check(96, 4, 5, 4, 13);
  check(128, 4, 5, 4, 13);
  check(256, 5, 5, 8, 25);
  check(264, 6, 6, 8, 25);
  check(4096, 9, 9, 8, 25);
}

TEST_CASE("kv_append: launches of many tokens on CUDA", "[plan]") {
  const auto check = [](int64_t batch, int64_t seqlen_new, int of_block, uint32_t blocks) {
    const std::vector<Made> made = launches(Tokens(batch, seqlen_new));
    REQUIRE(made.size() == 2);
    for (const Made& launch : made) {
      CHECK(launch.a.lengths_only == (&launch == &made[1]));
      CHECK(launch.a.tokens == batch * seqlen_new);
      CHECK(launch.a.tokens_of_block == of_block);
    }
    CHECK(made[0].x == blocks);
    CHECK(made[0].y == 2);
    CHECK(made[0].threads == 128);
    CHECK(made[1].x == 1);
  };
  // 792 blocks of 128 threads are on 132 multiprocessors at once, and 2 have a token.
  check(8, 2, 1, 16);
  check(8, 49, 1, 392);
  check(8, 50, 2, 200);
  check(8, 1584, 32, 396);
  check(8, 1585, 17, 746);
  check(8, 2048, 21, 781);
}
