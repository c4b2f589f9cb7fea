// How the FP8 forward kernels of gfx942 spread their work: the arithmetic of
// asm/include/forward_fp8.inc, find_work, on what the host side gives it.
#include <cstring>
#include <map>
#include <set>
#include <tuple>

#include "asm/gfx942/forward_args.h"
#include "catalog/catalog.h"
#include "catch.h"
#include "problem/problem.h"

using namespace attn;

namespace {

uint32_t divide(uint32_t n, uint32_t magic) {
  return magic == 0 ? n : uint32_t(uint64_t{n} * magic >> 32);
}

struct Spread {
  size_t items = 0;                           // (pair, head, tile) with a workgroup
  bool once = true;                           // none has two
  std::map<uint32_t, std::set<uint32_t>> on;  // XCDs of a pair
  uint64_t most = 0, least = UINT64_MAX;      // workgroups with work on an XCD
};

struct Planned {
  Launch launch;
  attn_gfx942_forward_kernarg kernarg;
};
// packed: q is, with `total_q` tokens.
Planned planned(int64_t batch, int64_t heads_q, int64_t heads_kv, int64_t seqlen_q,
                bool packed = false, int64_t total_q = 0) {
  attn_segment segment{};
  segment.struct_size = sizeof segment;
  segment.k_type = segment.v_type = ATTN_F8_E4M3FNUZ;
  segment.seqlen = 100;
  attn_problem in{};
  in.struct_size = sizeof in;
  in.batch = batch, in.heads_q = heads_q, in.heads_kv = heads_kv;
  in.head_dim = 128, in.seqlen_q = seqlen_q, in.total_q = total_q;
  in.q_layout = packed ? ATTN_PACKED : ATTN_PADDED;
  in.q_type = ATTN_F8_E4M3FNUZ;
  in.num_segments = 1, in.segments = &segment;
  Problem p;
  REQUIRE(make_problem(&in, &p).ok());
  Recipe recipe;
  const Kernel* kernel = find_kernel("fwd_gfx942_fp8_d128");
  REQUIRE(kernel->recipe(p, {}, &recipe).ok());
  Planned result{};
  if (recipe.steps.empty()) {
    result.launch.grid[0] = 0;
    return result;
  }
  REQUIRE(recipe.steps.size() == 2);
  CHECK(recipe.steps[0].image == std::string(kernel->first_images[0]));
  const Step& step = recipe.steps[1];
  result.launch = step.launch;
  Args args{};
  attn_segment_args segment_args{};
  args.segment = &segment_args;
  REQUIRE(sizeof result.kernarg == step.arguments.bytes.size());
  Parameters parameters;
  pack(step, p, &args, nullptr, &parameters);
  std::memcpy(&result.kernarg, parameters.kernarg, step.arguments.bytes.size());
  return result;
}

Spread spread(int64_t batch, int64_t heads_q, int64_t heads_kv, int64_t seqlen_q) {
  const auto [launch, a] = planned(batch, heads_q, heads_kv, seqlen_q);
  Spread result;
  std::set<std::tuple<uint32_t, uint32_t, uint32_t>> seen;
  std::map<uint32_t, uint64_t> of_xcd;
  for (uint32_t z = 0; z < launch.grid[2]; ++z) {
    for (uint32_t y = 0; y < launch.grid[1]; ++y) {
      for (uint32_t xcd = 0; xcd < launch.grid[0]; ++xcd) {
        const uint32_t portion = z * 8 + xcd, parts = 1u << a.parts_log2;
        const uint32_t item = y * parts + portion % parts, pair = portion / parts;
        if (pair >= uint32_t(a.pairs)) continue;
        const uint32_t tile = divide(item, a.group_magic);
        if (tile >= uint32_t(a.q_tiles)) continue;
        CHECK(tile == item / uint32_t(a.group));
        CHECK(divide(pair, a.heads_magic) == pair / uint32_t(heads_kv));
        result.once &= seen.emplace(pair, item % uint32_t(a.group), tile).second;
        result.on[pair].insert(xcd);
        ++of_xcd[xcd];
      }
    }
  }
  result.items = seen.size();
  for (uint32_t xcd = 0; xcd < 8; ++xcd) {
    result.most = std::max(result.most, of_xcd[xcd]);
    result.least = std::min(result.least, of_xcd[xcd]);
  }
  return result;
}

}  // namespace

TEST_CASE("gfx942 forward: every tile of queries has one workgroup", "[plan]") {
  for (const auto& [batch, group, heads_kv, seqlen] : {std::tuple{1, 1, 1, 1},
                                                       {1, 1, 1, 5000},
                                                       {2, 8, 1, 300},
                                                       {3, 3, 5, 1000},
                                                       {1, 4, 8, 4096},
                                                       {5, 7, 3, 257},
                                                       {16, 1, 2, 256}}) {
    INFO(batch << " " << group << " " << heads_kv << " " << seqlen);
    const Spread s = spread(batch, group * heads_kv, heads_kv, seqlen);
    CHECK(s.once);
    CHECK(s.items == size_t(batch * group * heads_kv * ((seqlen + 255) / 256)));
  }
}

// The numbers that store_rows_of_nobody makes of workgroups count them from 0, and rows of nobody
// are stored where no sequence can have a query.
TEST_CASE("gfx942 forward: workgroups share the rows of nobody", "[plan]") {
  for (const auto& [batch, heads_kv, seqlen, total] :
       {std::tuple{1, 1, 0, 5}, {3, 5, 1000, 100}, {1, 1, 0, 0}, {40000, 1, 2000, 1 << 20}}) {
    INFO(batch << " " << heads_kv << " " << seqlen << " " << total);
    const auto [launch, a] = planned(batch, heads_kv, heads_kv, seqlen, true, total);
    const uint64_t all = uint64_t{launch.grid[0]} * launch.grid[1] * launch.grid[2];
    CHECK((all > 0) == (total > 0));
    if (total == 0) continue;
    CHECK(uint32_t(a.items) == launch.grid[1]);
    CHECK(uint64_t(a.workgroups) == std::min<uint64_t>(all, 1 << 16));
  }
}

TEST_CASE("gfx942 forward: a K/V head stays on one XCD unless XCDs would idle", "[plan]") {
  for (const auto& [batch, heads_kv] : {std::pair{1, 8}, {2, 8}, {1, 16}, {3, 8}, {4, 4}}) {
    const Spread s = spread(batch, 4 * heads_kv, heads_kv, 2048);
    for (const auto& [pair, xcds] : s.on) CHECK(xcds.size() == 1);
    CHECK(s.most == s.least);
  }
  for (const auto& [pairs, each] : {std::pair{1, 8}, {2, 4}, {4, 2}, {12, 2}}) {
    const Spread s = spread(1, 4 * pairs, pairs, 2048);
    for (const auto& [pair, xcds] : s.on) CHECK(int(xcds.size()) == each);
    CHECK(s.most == s.least);
  }
}

// Rows of 128 bytes from multiples of 16 on, and no more queries than prepared tiles are worse for.
TEST_CASE("gfx950 forward: which problems need no prepare launch", "[plan]") {
  const Kernel* kernel = find_kernel("fwd_gfx950_fp8_d128_direct");
  REQUIRE(kernel);
  const auto recipe_of = [&](int64_t seqlen_q, int64_t heads_q, attn_strides k_stride,
                             Recipe* recipe) {
    attn_segment segment{};
    segment.struct_size = sizeof segment;
    segment.k_type = segment.v_type = ATTN_F8_E4M3FN;
    segment.seqlen = 100;
    segment.k_stride = k_stride;
    attn_problem in{};
    in.struct_size = sizeof in;
    in.batch = 2, in.heads_q = heads_q, in.heads_kv = 2;
    in.head_dim = 128, in.seqlen_q = seqlen_q;
    in.q_type = ATTN_F8_E4M3FN;
    in.num_segments = 1, in.segments = &segment;
    Problem p;
    REQUIRE(make_problem(&in, &p).ok());
    return kernel->recipe(p, {}, recipe);
  };
  Recipe taken;
  REQUIRE(recipe_of(1024, 16, {}, &taken).ok());
  CHECK(taken.passed_over == "");
  CHECK(taken.workspace == 0);
  REQUIRE(taken.steps.size() == 1);
  CHECK(taken.steps[0].image == std::string("fwd_gfx950_fp8_d128_direct"));
  Recipe passed;
  REQUIRE(recipe_of(1025, 16, {}, &passed).ok());
  CHECK(passed.passed_over == "for 8200 rows, seqlen_q * heads_q / heads_kv, more than 8192");
  Recipe none;
  CHECK(recipe_of(8, 2, {100 * 264, 264, 128}, &none).text ==
        "k_stride is {batch 26400, seq 264, head 128}; accepted: multiples of 16, seq from 128 on");
}
