// fixed_split in the kernels decode_sm90_*_r8 to _r64: which splits there are, where their sums
// lie, what is declined.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "catalog/catalog.h"
#include "catch.h"
#include "hopper.h"
#include "kernels/decode/decode_args.h"
#include "problem/problem.h"

using namespace attn;
using test::hopper;

namespace {

constexpr const char* kernel = "decode_sm90_bf16_d128_r64";
constexpr int64_t blocks = test::hopper_multiprocessors;

// 3 sequences, 8 query heads on 2 of K and V; segments of 1000 keys.
struct Input {
  std::vector<attn_segment> segment;
  attn_problem problem{};

  explicit Input(int64_t fixed_split, int64_t queries = 1, size_t segments = 1) {
    segment.resize(segments);
    for (attn_segment& s : segment) {
      s.struct_size = sizeof s;
      s.k_type = s.v_type = ATTN_BF16;
      s.seqlen = 1000;
    }
    problem.struct_size = sizeof problem;
    problem.batch = 3, problem.heads_q = 8, problem.heads_kv = 2;
    problem.head_dim = 128, problem.seqlen_q = queries;
    problem.q_type = ATTN_BF16;
    problem.flags = ATTN_CAUSAL;
    problem.fixed_split = fixed_split;
  }
  void make(Problem* p) {
    problem.num_segments = int32_t(segment.size());
    problem.segments = segment.data();
    const Status made = make_problem(&problem, p);
    INFO(made.text);
    REQUIRE(made.ok());
  }
  std::string chosen() {
    Problem p;
    make(&p);
    return test::chosen(p);
  }
};

// The one launch, and the size of its workspace.
struct Planned {
  attn_decode_kernarg a;
  size_t workspace;
  Launch launch;
};
Planned planned(Input in) {
  Problem p;
  in.make(&p);
  Recipe recipe;
  const Status made = find_kernel(kernel)->recipe(p, hopper(), &recipe);
  INFO(made.text);
  REQUIRE(made.ok());
  REQUIRE(recipe.steps.size() == 1);
  const Step& step = recipe.steps[0];
  const std::vector<attn_segment_args> given(in.segment.size());
  Args args{};
  args.segment = given.data();
  alignas(256) static char workspace[256];
  Parameters parameters;
  pack(step, p, &args, workspace, &parameters);
  attn_decode_sm90_kernarg kernarg;
  REQUIRE(step.arguments.bytes.size() == sizeof kernarg);
  std::memcpy(&kernarg, parameters.kernarg, sizeof kernarg);
  return {kernarg.a, recipe.workspace, step.launch};
}

// Of 64 rows: sums of 128 columns and two numbers, in float; two counters.
constexpr size_t slot_bytes = 64 * (128 + 2) * 4 + 2 * 4;

}  // namespace

TEST_CASE("fixed_split: a slot for each split", "[plan]") {
  struct Row {
    int64_t fixed_split, queries;
    size_t segments;
    int splits, row_tiles;
  };
  for (const Row& r : {Row{64, 1, 1, 16, 1}, Row{256, 1, 1, 4, 1}, Row{256, 16, 1, 4, 1},
                       Row{256, 17, 1, 4, 2}, Row{256, 100, 1, 4, 7}, Row{512, 1, 3, 6, 1},
                       Row{960, 1, 2, 4, 1}, Row{1024, 1, 1, 1, 1}, Row{1 << 20, 1, 2, 2, 1}}) {
    INFO(r.fixed_split << ", " << r.queries << " queries, " << r.segments << " segments");
    const Planned got = planned(Input(r.fixed_split, r.queries, r.segments));
    CHECK(got.a.split_keys == r.fixed_split);
    CHECK(got.a.splits == r.splits);
    CHECK(got.a.row_tiles == r.row_tiles);
    CHECK(got.a.rows_taken == 4 * r.queries);
    CHECK(got.a.whole_heads == 0);
    const unsigned slots = 3 * 2 * unsigned(r.splits * r.row_tiles);
    CHECK(got.a.slots == slots);
    CHECK(got.workspace == slots * slot_bytes);
    CHECK(got.launch.grid[0] == std::min<int64_t>(slots, blocks));
  }
}

TEST_CASE("fixed_split: without it a block has two slots", "[plan]") {
  const Planned got = planned(Input(0, 12));
  CHECK(got.a.split_keys == 0);
  CHECK(got.a.splits == 0);
  CHECK(got.a.slots == 2 * got.launch.grid[0]);
  CHECK(got.workspace == got.a.slots * slot_bytes);
}

// Sums and statistics of 512 MiB are 16131 slots.
TEST_CASE("fixed_split: beyond 512 MiB blocks take whole row tiles", "[plan]") {
  constexpr int64_t most = (512 << 20) / (64 * (128 + 2) * 4);
  static_assert(most == 16131);
  Input in(64);
  in.problem.batch = in.problem.heads_kv = 1;
  in.segment[0].seqlen = 64 * most;
  Planned got = planned(in);
  CHECK(got.a.whole_heads == 0);
  CHECK(got.a.slots == most);
  CHECK(got.workspace == most * slot_bytes);
  in.segment[0].seqlen += 1;
  got = planned(in);
  CHECK(got.a.whole_heads == 1);
  CHECK(got.a.splits == most + 1);
  CHECK(got.launch.grid[0] == 1);  // there is one row tile
  CHECK(got.a.slots == 2);
  CHECK(got.workspace == 2 * slot_bytes);
  in.problem.seqlen_q = 2000;  // of 8 heads
  got = planned(in);
  CHECK(got.a.row_tiles == 250);
  CHECK(got.launch.grid[0] == blocks);
  CHECK(got.a.slots == 2 * blocks);
}

TEST_CASE("fixed_split: max_sms is the number of blocks at most", "[plan]") {
  Input in(64, 100);
  in.problem.max_sms = 7;
  CHECK(planned(in).launch.grid[0] <= 7);
}

TEST_CASE("ATTN_KV_PREFIX_STABLE is accepted, without effect", "[plan]") {
  Input plain(0), flagged(0);
  flagged.problem.flags |= ATTN_KV_PREFIX_STABLE;
  CHECK(flagged.chosen() == plain.chosen());
  const attn_decode_kernarg want = planned(plain).a, got = planned(flagged).a;
  CHECK(std::memcmp(&got, &want, sizeof got) == 0);
}

TEST_CASE("fixed_split: who takes it", "[plan]") {
  const auto of_rows = [](int rows) { return "decode_sm90_bf16_d128_r" + std::to_string(rows); };
  for (const auto& [queries, rows] :  // of 4 heads
       {std::pair{1, 8}, {4, 16}, {5, 32}, {12, 64}, {13, 64}, {1000, 64}})
    CHECK(Input(256, queries).chosen() == of_rows(rows));
  const auto reason = [](Input in, const char* name) {
    in.problem.kernel = name;
    return in.chosen();
  };
  CHECK(reason(Input(100), kernel) ==
        "fixed_split is 100; accepted: multiples of 64 (decode_sm90_bf16_d128_r64)");
  for (const Kernel& k : catalog()) {
    if (k.op != Op::forward || k.backend != ATTN_BACKEND_CUDA) continue;
    const std::string name = k.name;
    const auto decode_of_rows = [](const std::string& of) {
      const bool decode = of.starts_with("decode_sm90_");
      return (decode || of.starts_with("mla_sm90_")) && of.find("_blocks_") == std::string::npos &&
             (of.ends_with("_r8") || of.ends_with("_r16") || of.ends_with("_r32") ||
              (decode && of.ends_with("_r64")));
    };
    INFO(name);
    CHECK(bool(k.limits.features & feature_fixed_split) == decode_of_rows(name));
  }
  CHECK(reason(Input(256), "decode_sm80_bf16_d128") == "fixed_split (decode_sm80_bf16_d128)");
  CHECK(reason(Input(256), "fwd_sm90_bf16_d128") == "fixed_split (fwd_sm90_bf16_d128)");
  // The plan's own reasons name both.
  const std::string none = Input(100).chosen();
  CHECK(none.find("fixed_split is 100; accepted: multiples of 64") != std::string::npos);
}
