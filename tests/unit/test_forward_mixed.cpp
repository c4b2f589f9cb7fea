// What the kernels fwd_sm90_*_mixed get from their host side: decode_sm90_* takes the sequences of
// few rows and fwd_sm90_*_paged the others, before it or, beside it, in two launches around it.
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "attn/attn.hpp"
#include "backends.h"
#include "catalog/catalog.h"
#include "catch.h"
#include "hopper.h"
#include "kernels/cache/dequantise_args.h"
#include "kernels/decode/decode_args.h"
#include "kernels/forward_sm90/forward_args.h"
#include "kernels/mixed_shares.h"
#include "mock/mock_library.h"
#include "problem/problem.h"

using namespace attn;
using test::hopper;

namespace {

// Addresses alone count: nothing is launched.
alignas(256) char workspace[256];

// A step of a server: packed q of 128 sequences, one of which has its prompt's 2048 queries. 32
// query heads on 8 of K and V, in pages of 64 keys.
struct Input {
  std::vector<attn_segment> segment;
  attn_problem problem{};

  explicit Input(attn_dtype type = ATTN_BF16, int64_t head_dim = 128, size_t segments = 1) {
    segment.resize(segments);
    for (attn_segment& s : segment) {
      s.struct_size = sizeof s;
      s.k_type = s.v_type = type;
      s.layout = ATTN_PAGED;
      s.seqlen = 8192;
      s.has_seqlens = 1;
      s.page_size = 64;
      s.max_pages = 128;
      s.num_pages = 9000;
    }
    problem.struct_size = sizeof problem;
    problem.batch = 128, problem.heads_q = 32, problem.heads_kv = 8;
    problem.head_dim = head_dim, problem.seqlen_q = 2048;
    problem.q_layout = ATTN_PACKED, problem.total_q = 2048 + 127;
    problem.q_type = type;
    problem.flags = ATTN_CAUSAL;
  }
  void make(Problem* p) {
    problem.num_segments = int32_t(segment.size());
    problem.segments = segment.data();
    const Status made = make_problem(&problem, p);
    INFO(made.text);
    REQUIRE(made.ok());
  }
  Status recipe(const char* kernel, Recipe* to) {
    Problem p;
    make(&p);
    return find_kernel(kernel)->recipe(p, hopper(), to);
  }
  std::string declined(const char* kernel) {
    Recipe recipe;
    const Status made = this->recipe(kernel, &recipe);
    CHECK(made.code == ATTN_UNSUPPORTED);
    return made.text;
  }
  // With caches of this type.
  Input& of(attn_dtype type) {
    for (attn_segment& s : segment) s.k_type = s.v_type = type;
    return *this;
  }
  // Of so short sequences that one launch follows the other.
  Input& with_few_keys() {
    for (attn_segment& s : segment) {
      s.seqlen = 64;
      s.max_pages = 1;
    }
    return *this;
  }
  // The images of all steps.
  std::string images(const char* kernel) {
    Recipe recipe;
    const Status made = this->recipe(kernel, &recipe);
    INFO(made.text);
    REQUIRE(made.ok());
    std::string images;
    for (const Step& step : recipe.steps) {
      CHECK(step.launch.starts_early);
      images += (images.empty() ? "" : " ") + std::string(step.image);
    }
    return images;
  }
  std::string passed_over(const char* kernel) {
    Recipe recipe;
    REQUIRE(this->recipe(kernel, &recipe).ok());
    return recipe.passed_over;
  }
  std::string chosen() {
    Problem p;
    make(&p);
    return test::chosen(p);
  }
};

constexpr const char* kernel = "fwd_sm90_bf16_d128_mixed";
constexpr const char* fp8_kernel = "fwd_sm90_bf16_d128_dequantised_mixed";

}  // namespace

TEST_CASE("sm90 mixed: which problems the plan gives it", "[plan]") {
  CHECK(Input().chosen() == kernel);
  CHECK(Input(ATTN_F16, 64).chosen() == "fwd_sm90_f16_d64_mixed");
  CHECK(Input(ATTN_BF16, 192).chosen() == "fwd_sm90_bf16_d256_mixed");
  Input padded_kv;
  padded_kv.segment[0].layout = ATTN_PADDED;
  padded_kv.segment[0].page_size = padded_kv.segment[0].max_pages = 0;
  padded_kv.segment[0].num_pages = 0;
  CHECK(padded_kv.chosen() == kernel);
  // Nearly all items are there.
  Input whole;
  whole.problem.batch = 4;
  whole.problem.total_q = 4 * 2048;
  CHECK(whole.passed_over(kernel) == "for 8192 queries of 4 sequences with up to 2048 each");
  CHECK(whole.chosen() == "fwd_sm90_bf16_d128_paged");
  // The tile of heads of 512 has fewer queries, so by itself it would take this one.
  Input narrow;
  narrow.problem.batch = 18;
  narrow.problem.total_q = 18 * 910;
  CHECK(narrow.passed_over(kernel) != "");
  CHECK(narrow.passed_over("fwd_sm90_bf16_d512_mixed") == "for head_dim 128");
  CHECK(narrow.chosen() == "fwd_sm90_bf16_d128_paged");
  // Items of 128 queries: 128 * ceil(seqlen_q / 128) of capacities, at most 2175 / 128 + 128 = 144
  // that there are.
  Input edge;
  edge.problem.seqlen_q = 256;
  CHECK(edge.passed_over(kernel) != "");
  edge.problem.seqlen_q = 257;
  CHECK(edge.passed_over(kernel) == "");
  // Tokens alone go to decode_*, trees to those who take them.
  Input tokens;
  tokens.problem.seqlen_q = 1;
  tokens.problem.total_q = 128;
  CHECK(tokens.chosen() == "decode_sm90_bf16_d128_r8");
  CHECK(tokens.of(ATTN_F8_E4M3FN).chosen() == "decode_sm90_fp8_d128_r8");
  CHECK(Input().of(ATTN_F8_E4M3FN).chosen() == fp8_kernel);
  CHECK(Input(ATTN_F16, 64).of(ATTN_F8_E5M2).chosen() == "fwd_sm90_f16_d64_dequantised_mixed");
  CHECK(whole.of(ATTN_F8_E4M3FN).chosen() == "fwd_sm90_bf16_d128_dequantised");
  Input both;
  both.of(ATTN_F8_E4M3FN).segment[0].v_type = ATTN_F8_E5M2;
  CHECK(both.chosen() == "fwd_sm90_bf16_d128_dequantised");
  Input tree;
  tree.problem.tree_keys = 4;
  CHECK(tree.chosen() == "decode_sm90_bf16_d128_r64");
}

TEST_CASE("sm90 mixed: what is declined", "[plan]") {
  CHECK(Input(ATTN_BF16, 128, 9).declined(kernel) == "num_segments is 9; accepted: up to 8");

  // Limits of the row.
  const auto reason = [](Input in) {
    in.problem.kernel = kernel;
    return in.chosen();
  };
  CHECK(reason(Input()) == kernel);
  Input group;
  group.problem.heads_kv = 2;  // 16 query heads each
  CHECK(reason(group) == kernel);
  group.problem.heads_kv = 1;
  CHECK(reason(group) == "heads_q / heads_kv 32 is above 16 (fwd_sm90_bf16_d128_mixed)");
  Input pages;
  pages.segment[0].page_size = 24;
  pages.segment[0].max_pages = 342;
  CHECK(reason(pages) == "page_size 24 is not a multiple of 16 (fwd_sm90_bf16_d128_mixed)");
  Input split;
  split.problem.fixed_split = 256;
  CHECK(reason(split) == "fixed_split (fwd_sm90_bf16_d128_mixed)");
}

TEST_CASE("sm90 mixed: kernels of the launches, in their order", "[plan]") {
  const auto images = [](const std::string& tokens, const std::string& chunks) {
    return std::pair{chunks + " " + tokens + " " + chunks, tokens + " " + chunks};
  };
  const auto check = [&](Input in, const char* kernel, const std::string& tokens,
                         const std::string& chunks) {
    const auto& [concurrent, in_turn] = images(tokens, chunks);
    CHECK(in.images(kernel) == concurrent);
    CHECK(in.with_few_keys().images(kernel) == in_turn);
  };
  check(Input(), kernel, "decode_sm90_bf16_d128_r16", "fwd_sm90_bf16_d128_paged");
  check(Input(ATTN_F16, 64), "fwd_sm90_f16_d64_mixed", "decode_sm90_f16_d64_r16",
        "fwd_sm90_f16_d64_paged");
  check(Input(ATTN_F16, 256), "fwd_sm90_f16_d256_mixed", "decode_sm90_f16_d256_r16",
        "fwd_sm90_f16_d256_paged");
  constexpr const char *decode = "decode_sm90_bf16_d128_r16",
                       *score = "fwd_sm90_bf16_d128_score_paged";
  Input softcap, scale;
  softcap.problem.softcap = 3;
  scale.problem.scale = -1;
  check(softcap, kernel, decode, score);
  check(scale, kernel, decode, score);
  for (const uint32_t flag : {ATTN_ALIBI, ATTN_SPLIT_INVARIANT}) {
    Input in;
    in.problem.flags |= flag;
    check(in, kernel, decode, score);
  }
}

TEST_CASE("sm90 mixed: over fp8 the keys of chunks are converted first", "[plan]") {
  Input in;
  in.of(ATTN_F8_E4M3FN);
  const std::string decode = "decode_sm90_fp8_d128_r16", paged = "fwd_sm90_bf16_d128_paged";
  CHECK(in.images(fp8_kernel) == "dequantise_sm90 " + decode + " " + paged);
  in.segment[0].k_descale = ATTN_DESCALE_TENSOR;
  in.segment[0].v_descale = ATTN_DESCALE_HEAD;
  in.with_few_keys();
  CHECK(in.images(fp8_kernel) == "dequantise_sm90 " + decode + " " + paged);
  Input softcap;
  softcap.of(ATTN_F8_E4M3FN).with_few_keys().problem.softcap = 3;
  CHECK(softcap.images(fp8_kernel) ==
        "dequantise_sm90 " + decode + " fwd_sm90_bf16_d128_score_paged");
  Input f16(ATTN_F16);
  f16.of(ATTN_F8_E4M3FN).segment[0].k_descale = ATTN_DESCALE_TENSOR;
  CHECK(f16.declined("fwd_sm90_f16_d128_dequantised_mixed") ==
        "segments[0]: k_descale is 1 with q of f16, whose range the product may leave; accepted: "
        "none (0)");

  Problem p;
  in.make(&p);
  Recipe recipe;
  REQUIRE(find_kernel(fp8_kernel)->recipe(p, hopper(), &recipe).ok());
  REQUIRE(recipe.steps.size() == 3);
  const Step &converts = recipe.steps[0], &few = recipe.steps[1], &many = recipe.steps[2];
  // Blocks share the items that there are, and leave room for those of tokens.
  CHECK(converts.launch.grid[0] == 3 * 132);
  CHECK(few.workspace_at == 0);
  CHECK(converts.workspace_at == many.workspace_at);
  constexpr size_t counter = 256, keys = 128 * 64 * 8 * 128 * 2, table = 128 * sizeof(int);
  CHECK(recipe.workspace == many.workspace_at + counter + 2 * keys + table);
  static char k, v;
  static const int32_t offsets[1] = {}, lengths[1] = {}, pages[1] = {};
  static const float descale[1] = {};
  attn_segment_args given{};
  given.struct_size = sizeof given;
  given.k = &k, given.v = &v, given.seqlens = lengths, given.block_table = pages;
  given.k_descale = given.v_descale = descale;
  Args args{};
  args.segment = &given;
  args.cu_seqlens_q = offsets;
  Parameters parameters;
  const auto packed = [&](const Step& step, auto* kernarg) {
    REQUIRE(step.arguments.bytes.size() == sizeof *kernarg);
    pack(step, p, &args, workspace, &parameters);
    std::memcpy(static_cast<void*>(kernarg), parameters.kernarg, sizeof *kernarg);
  };
  attn_dequantise_kernarg first;
  packed(converts, &first);
  CHECK(first.least_queries == 5);
  CHECK(first.concurrent == 1);
  CHECK(first.part_keys == 16);
  CHECK(first.cu_seqlens_q == offsets);
  attn_sm90_paged_kernarg last;
  packed(many, &last);
  for (int n = 0; n < 2; ++n) {
    CHECK(first.segment[0].tensor[n].dst == workspace + counter + size_t(n) * keys);
    CHECK(parameters.map_base[1 + n] == first.segment[0].tensor[n].dst);
  }
  CHECK(first.segment[0].table == last.pages[0].block_table);
  CHECK(last.least_queries == 5);
  CHECK(last.lists == 1);
  attn_decode_sm90_kernarg between;
  packed(few, &between);
  CHECK(between.a.rows_taken == 16);
  CHECK(between.a.concurrent == 1);
  CHECK(between.a.segment[0].k == &k);
  CHECK(between.a.segment[0].block_table == pages);
  CHECK(between.a.segment[0].k_descale.at == descale);
  CHECK(parameters.map_base[0] == &k);

  // Padded sequences are all of one launch.
  in.problem.q_layout = ATTN_PADDED;
  in.problem.total_q = 0;
  for (const int64_t queries : {4, 5}) {
    in.problem.seqlen_q = queries;
    in.make(&p);
    REQUIRE(find_kernel(fp8_kernel)->recipe(p, hopper(), &recipe).ok());
    CHECK(is_empty(recipe.steps[0].launch) == (queries == 4));
    CHECK(is_empty(recipe.steps[1].launch) == (queries == 5));
    CHECK(is_empty(recipe.steps[2].launch) == (queries == 4));
    packed(recipe.steps[0], &first);
    CHECK(first.least_queries == 0);
    CHECK(first.concurrent == 0);
  }
}

namespace {

// A step of the model by another way: multiprocessors one by one, in short steps of time.
double simulated_us(const MixedWork& work, int64_t blocks) {
  constexpr double step = 0.25;
  const double all = double(work.multiprocessors);
  std::vector<double> left(size_t(work.multiprocessors), 0);  // of the item of a multiprocessor
  int64_t items = work.items;
  double bytes = work.token_bytes, us = 0;
  // Chunks begin on `blocks`; others are the tokens' until these end.
  for (;; us += step) {
    int64_t busy = 0;
    for (size_t n = 0; n < left.size(); ++n) {
      if (left[n] <= 0 && items > 0 && (int64_t(n) < blocks || bytes <= 0))
        --items, left[n] += work.item_us;
      busy += left[n] > 0;
    }
    if (busy == 0 && bytes <= 0) return us;
    const double rate = bytes > 0 ? std::min(memory_bytes_per_us,
                                             (all - double(busy)) * multiprocessor_bytes_per_us)
                                  : 0;
    bytes -= rate * step;
    for (double& item : left)
      if (item > 0) item -= step / (1 + slowed_by_tokens * rate / memory_bytes_per_us);
  }
}

}  // namespace

TEST_CASE("sm90 mixed: the model of the time that a step takes", "[plan]") {
  constexpr double cache = 8192 * 8 * 512;  // bytes of a sequence's K and V
  const MixedWork works[] = {{132, 512, 94, 127 * cache},  {132, 512, 94, 31 * cache},
                             {132, 128, 107, 127 * cache}, {132, 512, 94, 5 * cache},
                             {78, 300, 50, 40 * cache},    {132, 2048, 6, 255 * cache / 16}};
  for (const MixedWork& work : works) {
    INFO(work.items << " items, " << work.token_bytes << " bytes");
    double best = 1e9;
    for (int64_t blocks = 4; blocks < work.multiprocessors; blocks += 5) {
      const double us = simulated_us(work, blocks);
      INFO(blocks << " blocks: simulated " << us << ", model " << mixed_us(work, blocks));
      CHECK(std::abs(mixed_us(work, blocks) - us) <= 0.005 * us);
      best = std::min(best, us);
    }
    const int64_t chosen = concurrent_blocks(work);
    if (chosen > 0) CHECK(simulated_us(work, chosen) <= 1.015 * best);
  }
  // 127 tokens and 2048 queries over 8192 keys each: both end at about the same time.
  CHECK(concurrent_blocks(works[0]) >= 60);
  CHECK(concurrent_blocks(works[0]) <= 76);
  // Fewer tokens leave more.
  CHECK(concurrent_blocks(works[1]) > concurrent_blocks(works[0]));
  // What has little of one or of the other gains nothing.
  CHECK(concurrent_blocks({132, 512, 94, 2 * cache}) == 0);
  CHECK(concurrent_blocks({132, 4, 20, 127 * cache}) == 0);
  // More blocks than items have nothing to do.
  CHECK(concurrent_blocks({132, 4, 94, 127 * cache}) == 4);
  CHECK(concurrent_blocks({132, 512, 0.1, 127 * 64 * 8 * 512.0}) == 0);
  CHECK(concurrent_blocks({132, 0, 94, 127 * cache}) == 0);
  CHECK(concurrent_blocks({132, 512, 94, 0}) == 0);
  CHECK(concurrent_blocks({1, 512, 94, 127 * cache}) == 0);
}

// Each sequence is one launch's: of up to least_queries - 1 queries, which rows_taken holds, or of
// more.
TEST_CASE("sm90 mixed: a launch takes what the other leaves", "[plan]") {
  struct Group {
    int64_t heads_kv;
    int rows, least_queries;
  };
  // 16 rows, or as many whole queries as they hold.
  for (const Group& g : {Group{2, 16, 2}, Group{4, 16, 3}, Group{8, 16, 5}, Group{32, 16, 17},
                         Group{3, 16, 2}, Group{6, 16, 3}, Group{16, 16, 9}}) {
    Input in(ATTN_BF16, 128, 2);
    in.with_few_keys();
    in.problem.heads_q = g.heads_kv == 3 ? 33 : g.heads_kv == 6 ? 36 : 32;
    in.problem.heads_kv = g.heads_kv;
    const int64_t group = in.problem.heads_q / g.heads_kv;
    INFO("group " << group);
    Problem p;
    in.make(&p);
    Recipe recipe;
    REQUIRE(find_kernel(kernel)->recipe(p, hopper(), &recipe).ok());
    REQUIRE(recipe.steps.size() == 2);
    const Step &few = recipe.steps[0], &many = recipe.steps[1];
    CHECK(few.workspace_at == 0);
    CHECK(many.workspace_at % 256 == 0);
    CHECK(recipe.workspace == many.workspace_at + sizeof(unsigned));
    CHECK(few.maps.size() == 4);
    CHECK(many.maps.size() == 5);
    CHECK(few.arguments.bytes.size() == sizeof(attn_decode_sm90_kernarg));
    CHECK(many.arguments.bytes.size() == sizeof(attn_sm90_paged_kernarg));

    static char q, k, v;
    static const int32_t offsets[1] = {}, lengths[1] = {}, table[1] = {};
    attn_segment_args given[2]{};
    for (attn_segment_args& s : given) {
      s.struct_size = sizeof s;
      s.k = &k, s.v = &v;
      s.seqlens = lengths;
      s.block_table = table;
    }
    Args args{};
    args.q = &q;
    args.cu_seqlens_q = offsets;
    args.segment = given;
    Parameters parameters;
    pack(few, p, &args, workspace, &parameters);
    attn_decode_sm90_kernarg first;
    std::memcpy(&first, parameters.kernarg, sizeof first);
    for (int n = 0; n < 2; ++n) {
      CHECK(parameters.map_base[2 * n] == &k);
      CHECK(parameters.map_base[2 * n + 1] == &v);
    }
    CHECK(first.a.rows_taken == 16 / group * group);
    CHECK(first.a.row_tiles == 1);
    CHECK(first.a.split_keys == 0);
    CHECK(first.a.seqlen_q == 2048);
    CHECK(first.a.total_q == 2175);
    CHECK(first.a.cu_seqlens_q == offsets);
    CHECK(first.a.segment[1].block_table == table);
    CHECK(first.a.segment[1].box_keys == 64);
    CHECK(static_cast<void*>(first.a.sums) == workspace);
    // Its part of the workspace ends where the other's begins.
    const size_t used = size_t(reinterpret_cast<char*>(first.a.arrived) - workspace) +
                        size_t(2 * first.a.slots) * sizeof(unsigned);
    CHECK(used <= many.workspace_at);
    CHECK(used + 256 > many.workspace_at);

    pack(many, p, &args, workspace, &parameters);
    attn_sm90_paged_kernarg second;
    std::memcpy(&second, parameters.kernarg, sizeof second);
    CHECK(parameters.map_base[0] == &q);
    CHECK(parameters.map_base[3] == &k);
    CHECK(second.lists == 1);
    CHECK(second.least_queries == first.a.rows_taken / group + 1);
    CHECK(second.least_queries == g.least_queries);
    CHECK(second.cu_seqlens_q == offsets);
    CHECK(second.pages[1].block_table == table);
    CHECK(second.pages[1].max_pages == 1);
    CHECK(first.a.concurrent == 0);
    CHECK(second.helpers == 0);
    CHECK(second.helped == 0);
    CHECK(second.heads_together == in.problem.heads_q);
    CHECK(static_cast<void*>(second.taken) == workspace);
  }
}

// All sequences are as long, and one launch has them.
TEST_CASE("sm90 mixed: padded q is one launch's", "[plan]") {
  Input in;
  in.problem.q_layout = ATTN_PADDED;
  in.problem.total_q = 0;
  for (const int64_t queries : {1, 4, 5, 300}) {
    INFO(queries);
    in.problem.seqlen_q = queries;
    Problem p;
    in.make(&p);
    Recipe recipe;
    REQUIRE(find_kernel(kernel)->recipe(p, hopper(), &recipe).ok());
    CHECK(recipe.passed_over == "for padded q");
    REQUIRE(recipe.steps.size() == 2);
    CHECK(is_empty(recipe.steps[0].launch) == (queries > 4));
    CHECK(is_empty(recipe.steps[1].launch) == (queries <= 4));
    Args args{};
    const attn_segment_args given{};
    args.segment = &given;
    Parameters parameters;
    pack(recipe.steps[1], p, &args, workspace, &parameters);
    attn_sm90_paged_kernarg second;
    std::memcpy(&second, parameters.kernarg, sizeof second);
    CHECK(second.lists == 0);
  }
}

TEST_CASE("sm90 mixed: capacities of few queries leave the second launch nothing", "[plan]") {
  Input in;
  in.problem.seqlen_q = 3;
  in.problem.total_q = 300;
  Problem p;
  in.make(&p);
  Recipe recipe;
  REQUIRE(find_kernel(kernel)->recipe(p, hopper(), &recipe).ok());
  Args args{};
  const attn_segment_args given{};
  args.segment = &given;
  Parameters parameters;
  pack(recipe.steps[1], p, &args, workspace, &parameters);
  attn_sm90_paged_kernarg second;
  std::memcpy(&second, parameters.kernarg, sizeof second);
  CHECK(second.least_queries == 4);
}

TEST_CASE("sm90 mixed: fwd_*_paged alone count nothing", "[plan]") {
  Input in;
  Problem p;
  in.make(&p);
  Recipe recipe;
  REQUIRE(find_kernel("fwd_sm90_bf16_d128_paged")->recipe(p, hopper(), &recipe).ok());
  REQUIRE(recipe.steps.size() == 1);
  CHECK(recipe.steps[0].workspace_at == 0);
  Args args{};
  const attn_segment_args given{};
  args.segment = &given;
  Parameters parameters;
  std::memset(&parameters, 0xff, sizeof parameters);
  pack(recipe.steps[0], p, &args, workspace, &parameters);
  attn_sm90_paged_kernarg got;
  std::memcpy(&got, parameters.kernarg, sizeof got);
  CHECK(got.lists == 0);
  CHECK(got.least_queries == 0);
}

TEST_CASE("sm90 mixed: max_sms is the number of blocks at most", "[plan]") {
  Input in;
  in.problem.max_sms = 7;
  Recipe recipe;
  REQUIRE(in.recipe(kernel, &recipe).ok());
  REQUIRE(recipe.steps.size() == 2);
  CHECK(recipe.steps[0].launch.grid[0] <= 7);
  CHECK(recipe.steps[1].launch.grid[0] == 7);
}

namespace {

// What the launches of a run were handed.
attn_decode_sm90_kernarg of_tokens;
std::vector<attn_sm90_paged_kernarg> of_chunks;
std::vector<std::pair<std::string, int>> launched;  // with their blocks
void record(const mock::Launch& launch) {
  launched.emplace_back(launch.symbol, launch.grid[0]);
  if (std::string(launch.symbol).starts_with("decode_"))
    std::memcpy(&of_tokens, launch.kernarg, sizeof of_tokens);
  else
    std::memcpy(&of_chunks.emplace_back(), launch.kernarg, sizeof of_chunks[0]);
}

}  // namespace

// Chunks have some multiprocessors and tokens the others at first; then chunks get the tokens'.
TEST_CASE("sm90 mixed: launches of a run, beside each other and in turn", "[plan]") {
  const mock::MockLibrary library("cuda_12");
  library->kernel = record;
  library->pointed_bytes = max_kernarg_bytes;
  const context device = test::device_on(library);
  for (const bool concurrent : {true, false}) {
    INFO(concurrent);
    Input in;
    if (!concurrent) in.with_few_keys();
    in.problem.num_segments = 1;
    in.problem.segments = in.segment.data();
    in.problem.kernel = kernel;
    const attn::plan plan(device, in.problem);
    const attn::buffer workspace = plan.make_workspace(device);
    char* const far = reinterpret_cast<char*>(uintptr_t{1} << 40);  // nothing reads or writes there
    auto kv = make<attn_segment_args>();
    kv.k = far;
    kv.v = far + (int64_t{1} << 36);
    kv.seqlens = reinterpret_cast<int32_t*>(far + (int64_t{1} << 37));
    kv.block_table = reinterpret_cast<int32_t*>(far + (int64_t{1} << 38));
    auto args = make<attn_args>();
    args.num_segments = 1;
    args.segments = &kv;
    args.q = far + (int64_t{1} << 39);
    args.out = far + (int64_t{3} << 39);
    args.cu_seqlens_q = reinterpret_cast<int32_t*>(far + (int64_t{5} << 39));
    launched.clear();
    of_chunks.clear();
    library->early = 0;
    plan.run(args, workspace);
    CHECK(library->early == int(launched.size()));
    const std::string tokens = "decode_sm90_bf16_d128_r16", chunks = "fwd_sm90_bf16_d128_paged";
    CHECK(of_tokens.a.concurrent == concurrent);
    if (concurrent) {
      REQUIRE(launched.size() == 3);
      CHECK(launched[0].first == chunks);
      CHECK(launched[1].first == tokens);
      CHECK(launched[2].first == chunks);
      const int first = launched[0].second, helpers = launched[2].second;
      CHECK(first + helpers == test::hopper_multiprocessors);
      CHECK(first >= 60);
      CHECK(first <= 76);
      for (const attn_sm90_paged_kernarg& a : of_chunks) {
        CHECK(a.helpers == helpers);
        CHECK(a.heads_together == 4);
        CHECK(a.least_queries == 5);
      }
      CHECK(of_chunks[0].helped == 0);
      CHECK(of_chunks[1].helped == first);
    } else {
      REQUIRE(launched.size() == 2);
      CHECK(launched[0].first == tokens);
      CHECK(launched[1].first == chunks);
      CHECK(launched[1].second == test::hopper_multiprocessors);
    }
    // Each launch has its own part of the workspace, but those of chunks the same counter.
    const char* begin = static_cast<char*>(workspace.data());
    CHECK(reinterpret_cast<char*>(of_tokens.a.sums) == begin);
    for (const attn_sm90_paged_kernarg& a : of_chunks) {
      CHECK(reinterpret_cast<char*>(a.taken) ==
            begin + attn_plan_workspace(plan.get()) - sizeof(unsigned));
      CHECK(reinterpret_cast<char*>(a.taken) >=
            reinterpret_cast<char*>(of_tokens.a.arrived + 2 * of_tokens.a.slots));
    }
    // With fewer tokens the copy engine gets no further than these.
    for (const int64_t tokens_of_run : {2175, 2000}) {
      args.total_q = tokens_of_run;
      of_chunks.clear();
      plan.run(args, workspace);
      CHECK(of_tokens.a.total_q == tokens_of_run);
      for (const attn_sm90_paged_kernarg& a : of_chunks) {
        CHECK(a.total_q == tokens_of_run);
        struct {
          const void* address;
          uint64_t size[4];
        } map;
        std::memcpy(&map, &a.q, sizeof map);
        CHECK(map.address == args.q);
        CHECK(map.size[1] == uint64_t(tokens_of_run));
        CHECK(map.size[2] == 32);
      }
    }
  }
}
