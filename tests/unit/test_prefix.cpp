// Segments that the batch shares: what is refused, and what prefix_* are composed of, also on a
// Hopper, which need not be here.
#include <cstddef>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "attn/attn.hpp"
#include "catalog/catalog.h"
#include "catch.h"
#include "core/dtype.h"
#include "hopper.h"
#include "plan/prefix.h"

using namespace attn;

namespace {

// 64 sequences with 8192 shared keys and up to 256 of their own.
struct Setup {
  std::vector<attn_segment> segments = std::vector<attn_segment>(2, attn::make<attn_segment>());
  attn_problem problem = attn::make<attn_problem>();
  attn_segment &shared = segments[0], &own = segments[1];

  Setup() {
    for (attn_segment& s : segments) s.k_type = s.v_type = ATTN_BF16;
    shared.seqlen = 8192;
    shared.shared = 1;
    own.seqlen = 256;
    own.has_seqlens = 1;
    problem.batch = 64;
    problem.heads_q = 32;
    problem.heads_kv = 8;
    problem.head_dim = 128;
    problem.seqlen_q = 1;
    problem.q_type = ATTN_BF16;
    problem.flags = ATTN_CAUSAL | ATTN_SINKS;
    problem.num_segments = 2;
    problem.segments = segments.data();
  }
};

Status made(const Setup& s, Problem* p) {
  attn_problem in = s.problem;
  return make_problem(&in, p);
}

struct Chosen {
  Status status;
  Choice choice;
  std::vector<Declined> declined;
  std::string name() const { return choice.kernel ? choice.kernel->name : ""; }
  std::string reason(const std::string& kernel) const {
    for (const Declined& d : declined)
      if (d.kernel->name == kernel) return d.reason;
    return "";
  }
};
// As if each image were there.
Chosen on_hopper(const Setup& s) {
  struct All : CodeFile {
    std::string without(const char*) const override { return ""; }
  } const all;
  const DeviceInfo device = test::hopper();
  const Machine machine = {.backend = ATTN_BACKEND_CUDA, .device = &device, .file = &all};
  Chosen chosen;
  Problem p;
  chosen.status = made(s, &p);
  if (chosen.status.ok()) chosen.status = choose(p, machine, &chosen.choice, &chosen.declined);
  Choice silent;  // nobody asks for reasons
  if (chosen.status.ok()) {
    CHECK(choose(p, machine, &silent).ok());
    CHECK(silent.kernel == chosen.choice.kernel);
    CHECK(silent.recipe.workspace == chosen.choice.recipe.workspace);
  }
  return chosen;
}

const Problem& problem_of(const Part& part) {
  return static_cast<const Problem&>(*part.problem);
}
// In the order of their runs: over shared segments, over own ones, the merge.
struct Parts {
  const Part &shared, &own, &merge;
  const RunForward &run_shared, &run_own;
  const RunMerge& run_merge;
  const MergeProblem& merged() const { return static_cast<const MergeProblem&>(*merge.problem); }
};
Parts parts_of(const Chosen& chosen) {
  const Composition& c = *chosen.choice.composition;
  REQUIRE(c.parts.size() == 3);
  REQUIRE(c.stages.size() == 3);
  const auto &shared = std::get<RunForward>(c.stages[0]), &own = std::get<RunForward>(c.stages[1]);
  const auto& merge = std::get<RunMerge>(c.stages[2]);
  return {c.parts[shared.part], c.parts[own.part], c.parts[merge.part], shared, own, merge};
}

bool has(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

}  // namespace

TEST_CASE("prefix: the parts on a Hopper") {
  const Setup s;
  const Chosen chosen = on_hopper(s);
  INFO(chosen.status.text);
  REQUIRE(chosen.name() == "prefix_cuda");
  REQUIRE(chosen.choice.composition);
  const Parts c = parts_of(chosen);

  const Problem& shared = problem_of(c.shared);
  CHECK(shared.batch == 1);
  CHECK(shared.seqlen_q == 64);
  CHECK(shared.q_stride.seq == 32 * 128);
  CHECK(shared.num_segments == 1);
  CHECK(shared.segment[0].seqlen == 8192);
  CHECK(shared.segment[0].shared == 0);
  CHECK(shared.flags == 0);
  CHECK(shared.out_type == ATTN_F32);
  // A tile of each of 32 heads for 4 parts of the keys: 128 of 132 multiprocessors.
  CHECK(shared.key_parts == 4);
  CHECK(shared.fixed_split == 0);
  CHECK(shared.out_stride.batch == 64 * 32 * 128);
  CHECK(std::string(c.shared.choice.kernel->name) == "fwd_sm90_bf16_d128");
  CHECK(c.shared.choice.recipe.steps.at(0).launch.grid[0] == 128);

  const Problem& own = problem_of(c.own);
  CHECK(own.batch == 64);
  CHECK(own.num_segments == 1);
  CHECK(own.segment[0].seqlen == 256);
  CHECK(own.flags == (ATTN_CAUSAL | ATTN_SINKS));
  CHECK(own.out_type == ATTN_F32);
  CHECK(has(c.own.choice.kernel->name, "decode_sm90_bf16_d128"));

  CHECK(c.merged().num_parts == 5);
  CHECK(c.merged().by_head == 4);
  CHECK(c.merged().out_type == ATTN_BF16);
  CHECK(std::string(c.merge.choice.kernel->name) == "merge_cuda");
  CHECK(c.merged().batch == 64);
  CHECK(c.merged().heads_q == 32);
  REQUIRE(c.merge.choice.recipe.steps.size() == 1);

  // Each part of the merge is where the part of the problem left it.
  const size_t lse = 64 * 32 * 4, out = lse * 128;
  const auto places = [](const Place& place, const Place& other, size_t apart) {
    return place.from == Place::workspace && place.bytes == other.bytes + int64_t(apart);
  };
  REQUIRE(c.run_merge.outs.size() == 5);
  for (size_t i = 0; i < 4; ++i) {
    CHECK(places(c.run_merge.outs[i], c.run_shared.out, i * out));
    CHECK(places(c.run_merge.lses[i], c.run_shared.lse, i * lse));
  }
  CHECK(places(c.run_merge.outs[4], c.run_own.out, 0));
  CHECK(places(c.run_merge.lses[4], c.run_own.lse, 0));
  CHECK(c.run_merge.out.from == Place::caller);
  CHECK(c.run_shared.sinks.from == Place::nowhere);
  CHECK(c.run_own.sinks.from == Place::caller);
  CHECK(c.run_own.first_segment == 1);

  // Arrays in the workspace do not overlap and are within it.
  const struct {
    size_t at, bytes;
  } arrays[] = {{c.shared.workspace_at, c.shared.choice.recipe.workspace},
                {c.own.workspace_at, c.own.choice.recipe.workspace},
                {size_t(c.run_shared.out.bytes), 4 * out},
                {size_t(c.run_own.out.bytes), out},
                {size_t(c.run_shared.lse.bytes), 4 * lse},
                {size_t(c.run_own.lse.bytes), lse}};
  for (const auto& a : arrays) {
    CHECK(a.at % 256 == 0);
    CHECK(a.at + a.bytes <= chosen.choice.recipe.workspace);
    for (const auto& b : arrays)
      CHECK((&a == &b || a.at + a.bytes <= b.at || b.at + b.bytes <= a.at));
  }
}

// Parts of the keys fill the device, but have 512 keys or more.
TEST_CASE("prefix: how many parts the shared keys are cut into") {
  const struct {
    int64_t batch, heads_q, heads_kv, keys, parts;
  } cases[] = {{64, 32, 8, 8192, 4},  {16, 32, 8, 8192, 4},   {200, 32, 8, 8192, 2},
               {64, 128, 8, 8192, 1}, {1000, 32, 8, 8192, 1}, {64, 8, 8, 8192, 15},
               {64, 8, 8, 4096, 8},   {64, 32, 8, 1100, 2}};
  for (const auto& of : cases) {
    Setup s;
    s.problem.batch = of.batch;
    s.problem.heads_q = of.heads_q;
    s.problem.heads_kv = of.heads_kv;
    s.problem.kernel = "prefix_cuda";
    s.shared.seqlen = of.keys;
    const Chosen chosen = on_hopper(s);
    INFO(of.batch << " " << of.heads_q << "/" << of.heads_kv << " " << of.keys);
    REQUIRE(chosen.choice.composition);
    const Parts c = parts_of(chosen);
    CHECK(problem_of(c.shared).key_parts == of.parts);
    CHECK(c.merged().num_parts == of.parts + 1);
    CHECK(has(c.shared.choice.kernel->name, "fwd_sm90_bf16_d128"));
  }
}

// K and V of few rows are not converted for parts of the keys, as docs/decode.md says.
TEST_CASE("prefix: what takes the shared keys in other types") {
  const struct {
    attn_dtype type;
    int64_t batch, parts;
    const char* kernel;
  } cases[] = {
      {ATTN_F8_E4M3FN, 4, 1, "decode_sm90_fp8_d128_r16"},
      {ATTN_F8_E4M3FN, 16, 1, "decode_sm90_fp8_d128_r64"},
      {ATTN_F8_E4M3FN, 17, 4, "fwd_sm90_bf16_d128_dequantised"},
      {ATTN_F8_E4M3FN, 64, 4, "fwd_sm90_bf16_d128_dequantised"},
      {ATTN_Q8_0, 2, 1, "decode_sm90_blocks_d128"},
      {ATTN_I4, 4, 1, "decode_sm90_blocks_d128_r16"},
      {ATTN_Q8_0, 5, 4, "fwd_sm90_bf16_d128_dequantised"},
  };
  for (const auto& of : cases) {
    Setup s;
    s.problem.batch = of.batch;
    s.problem.kernel = "prefix_cuda";
    for (attn_segment& segment : s.segments) segment.k_type = segment.v_type = of.type;
    const Chosen chosen = on_hopper(s);
    INFO(dtype_name(of.type) << ", batch " << of.batch << " " << chosen.status.text);
    REQUIRE(chosen.choice.composition);
    const Parts c = parts_of(chosen);
    CHECK(std::string(c.shared.choice.kernel->name) == of.kernel);
    CHECK(problem_of(c.shared).key_parts == of.parts);
    CHECK(problem_of(c.shared).fixed_split == 0);
    CHECK(c.merged().num_parts == of.parts + 1);
  }
}

TEST_CASE("prefix: the plain way where it is as fast, or the only one") {
  const struct {
    const char* what;
    std::function<void(Setup&)> change;
    const char* reason;  // of prefix_cuda
  } cases[] = {
      {"few keys", [](Setup& s) { s.shared.seqlen = 64; },
       "16515072 bytes would be read again, below 33554432; decode_sm80_bf16_d128"},
      {"many rows",
       [](Setup& s) {
         s.problem.flags = 0;
         s.problem.seqlen_q = 16;
       },
       "for 64 rows, seqlen_q * heads_q / heads_kv, from 64 on"},
      {"queries that may not see the prefix", [](Setup& s) { s.problem.seqlen_q = 2; },
       "the sequences may have 0 keys of their own, and the first queries then not see all shared "
       "ones; accepted with masks: 1 or more without seqlens or cu_seqlens"},
      {"a window",
       [](Setup& s) {
         s.problem.flags |= ATTN_WINDOW;
         s.problem.window_left = 100;
       },
       "window_left is 100; accepted: -1"},
      {"ALiBi", [](Setup& s) { s.problem.flags |= ATTN_ALIBI; }, "ALiBi"},
      {"top left", [](Setup& s) { s.problem.flags = ATTN_CAUSAL_TOP_LEFT; }, "causal_top_left"},
      {"packed q",
       [](Setup& s) {
         s.problem.q_layout = ATTN_PACKED;
         s.problem.total_q = 64;
       },
       "packed q"},
      {"a tree", [](Setup& s) { s.problem.tree_keys = 4; }, "accepted: tree_keys = 4"},
      {"shared alone", [](Setup& s) { s.problem.num_segments = 1; }, "all segments are shared"},
  };
  for (const auto& c : cases) {
    Setup s;
    c.change(s);
    const Chosen chosen = on_hopper(s);
    INFO(c.what << ": " << chosen.status.text << " " << chosen.reason("prefix_cuda"));
    CHECK(chosen.name() != "");
    CHECK(chosen.name() != "prefix_cuda");
    CHECK(!chosen.choice.composition);
    CHECK(has(chosen.reason("prefix_cuda"), c.reason));
    // Demanded by name it is refused, unless others are only as fast.
    s.problem.kernel = "prefix_cuda";
    const Chosen demanded = on_hopper(s);
    if (has(c.reason, "accepted") || (!has(c.reason, " bytes ") && !has(c.reason, "for 64 rows")))
      CHECK(demanded.status.code == ATTN_UNSUPPORTED);
    else
      CHECK(demanded.name() == "prefix_cuda");
  }
}

TEST_CASE("prefix: masks that show every query all shared keys") {
  Setup s;
  s.problem.seqlen_q = 4;
  s.own.has_seqlens = 0;
  CHECK(on_hopper(s).name() == "prefix_cuda");
  s.problem.flags |= ATTN_WINDOW;
  s.problem.window_left = -1;
  s.problem.window_right = 1;
  s.problem.tree_keys = 8;
  CHECK(on_hopper(s).name() == "prefix_cuda");
  // Arrays of a batch of 1 suit the part that reads them.
  s.shared.layout = ATTN_PAGED;
  s.shared.page_size = 64;
  s.shared.max_pages = 128;
  s.shared.num_pages = 1000;
  s.shared.has_seqlens = 1;
  CHECK(on_hopper(s).name() == "prefix_cuda");
}

TEST_CASE("prefix: a part may be composed itself") {
  Setup s;
  for (attn_segment& segment : s.segments) segment.k_type = segment.v_type = ATTN_F8_E4M3FN_TOKEN;
  s.problem.flags = ATTN_CAUSAL;
  for (attn_segment& segment : s.segments) {  // no other kernel takes such pages of this type
    segment.layout = ATTN_PAGED;
    segment.page_size = 8;
    segment.max_pages = int32_t(segment.seqlen / 8);
    segment.num_pages = 10000;
  }
  const Chosen chosen = on_hopper(s);
  INFO(chosen.status.text);
  REQUIRE(chosen.name() == "prefix_cuda");
  const Parts c = parts_of(chosen);
  for (const Part* part : {&c.shared, &c.own}) {
    CHECK(part->choice.kernel->name == std::string("lists_cuda"));
    REQUIRE(part->choice.composition);
    CHECK(part->choice.composition->stages.size() >= 2);  // copies, attention to them
  }
}

// Its promise is about bits, which depend on the kernel that takes the rows of all sequences.
TEST_CASE("prefix: fixed_split") {
  Setup s;
  s.problem.fixed_split = 512;
  const Chosen padded = on_hopper(s);
  CHECK(padded.name() == "");
  CHECK(has(padded.status.text, "a shared segment with padded K/V"));
  CHECK(padded.reason("prefix_cuda") == "fixed_split");
  s.problem.kernel = "prefix_cuda";
  CHECK(has(on_hopper(s).status.text, "fixed_split"));
}

// Arrays of a batch of 1, which kernels read per sequence.
TEST_CASE("prefix: what kernels for other segments take of shared ones") {
  Setup s;
  s.problem.flags |= ATTN_ALIBI;  // not prefix_cuda
  Chosen chosen = on_hopper(s);
  CHECK(chosen.reason("decode_sm90_bf16_d128_r8") != "");
  CHECK(has(chosen.reason("fwd_sm90_bf16_d128_score"), "shared segment"));
  CHECK(chosen.name() == "decode_sm80_bf16_d128");
  s.shared.has_seqlens = 1;
  chosen = on_hopper(s);
  CHECK(chosen.name() == "");
  CHECK(has(chosen.status.text, "seqlens of a shared segment"));
  s.shared.has_seqlens = 0;
  s.shared.layout = ATTN_PAGED;
  s.shared.page_size = 64;
  s.shared.max_pages = 128;
  s.shared.num_pages = 1000;
  chosen = on_hopper(s);
  CHECK(chosen.name() == "fwd_sm90_bf16_d128_score_paged");
  CHECK(has(chosen.reason("decode_sm80_bf16_d128"), "pages of a shared segment"));
}

TEST_CASE("prefix: bad input") {
  const struct {
    std::function<void(Setup&)> change;
    std::vector<const char*> words;
  } cases[] = {
      {[](Setup& s) { s.shared.shared = 2; }, {"segment 0: shared is 2", "accepted: 0, 1"}},
      {[](Setup& s) {
         s.shared.layout = ATTN_PACKED;
         s.shared.total = 8192;
       },
       {"segment 0: shared is 1 with layout packed (1)", "padded (0), paged (2)"}},
      {[](Setup& s) { std::swap(s.shared, s.own); },
       {"segment 1: shared is 1 after a segment that is not shared",
        "shared segments before all others"}},
  };
  for (const auto& c : cases) {
    Setup s;
    c.change(s);
    Problem p;
    const Status status = made(s, &p);
    CHECK(status.code == ATTN_INVALID_ARGUMENT);
    for (const char* word : c.words) {
      INFO(status.text);
      CHECK(has(status.text, word));
    }
  }
  // Caches that are written.
  auto append = attn::make<attn_kv_append_problem>();
  append.batch = 2;
  append.heads_kv = 1;
  append.head_dim = 64;
  append.seqlen_new = 1;
  append.new_type = ATTN_BF16;
  append.segment = Setup().own;
  append.segment.shared = 1;
  KvAppendProblem p;
  const Status status = make_kv_append_problem(&append, &p);
  CHECK(status.code == ATTN_INVALID_ARGUMENT);
  CHECK(has(status.text, "shared is 1; accepted except in attention: 0"));
  auto roll = attn::make<attn_kv_roll_problem>();
  attn_segment recent = Setup().own, old = append.segment;
  recent.shared = 1;
  recent.layout = ATTN_PAGED;
  recent.page_size = 64;
  recent.max_pages = 4;
  recent.num_pages = 9;
  roll.batch = 2;
  roll.heads_kv = 1;
  roll.head_dim = 64;
  roll.recent = &recent;
  roll.old = &old;
  KvRollProblem of_roll;
  CHECK(has(make_kv_roll_problem(&roll, &of_roll).text, "recent.shared is 1; accepted except"));
}

// The arrays of a shared segment have one entry: what is after it may be written.
TEST_CASE("prefix: overlap and contents on the host") {
  const attn::context context(ATTN_BACKEND_CPU);
  for (const char* kernel : {"prefix_cpu", "cpu_baseline"}) {
    Setup s;
    s.problem.batch = 2;
    s.problem.heads_q = s.problem.heads_kv = 2;
    s.problem.head_dim = 8;
    s.problem.q_type = ATTN_F32;
    s.problem.flags = 0;
    s.problem.kernel = kernel;
    for (attn_segment& segment : s.segments) segment.k_type = segment.v_type = ATTN_F32;
    s.shared.layout = ATTN_PAGED;
    s.shared.seqlen = 3;
    s.shared.page_size = 2;
    s.shared.max_pages = s.shared.num_pages = 2;
    s.shared.has_seqlens = 1;
    s.own.seqlen = 2;
    s.own.has_seqlens = 0;
    constexpr size_t row = 16;  // of two heads
    std::vector<float> q(2 * row, 0.5f), k(4 * row + 2 * row, 0.5f), own(4 * row, 0.5f);
    float* const out = k.data() + 4 * row;             // after the pages
    std::vector<int32_t> numbers = {3, 0, 1, -1, -1};  // a length, the table
    std::vector<attn_segment_args> kv(2, attn::make<attn_segment_args>());
    kv[0].k = kv[0].v = k.data();
    kv[0].seqlens = numbers.data();
    kv[0].block_table = numbers.data() + 1;
    kv[1].k = kv[1].v = own.data();
    auto args = attn::make<attn_args>();
    args.q = q.data();
    args.out = out;
    args.num_segments = 2;
    args.segments = kv.data();
    const attn::plan plan(context, s.problem);
    REQUIRE(std::string(plan.kernel()) == kernel);
    const attn::buffer workspace = plan.make_workspace(context);
    const auto run = [&] {
      return attn_run(plan.get(), &args, workspace.data(), workspace.bytes(), nullptr);
    };
    REQUIRE(run() == ATTN_OK);
    CHECK(out[0] == 0.5f);
    CHECK(out[2 * row - 1] == 0.5f);
    CHECK(attn_check(plan.get(), &args, nullptr) == ATTN_OK);

    args.out = out - 1;
    CHECK(run() == ATTN_INVALID_ARGUMENT);
    CHECK(has(attn_last_error(), "segment 0"));
    args.out = out;
    args.lse = reinterpret_cast<float*>(numbers.data() + 1);  // 4 floats
    CHECK(run() == ATTN_INVALID_ARGUMENT);
    CHECK(has(attn_last_error(), "block_table"));
    args.lse = nullptr;

    numbers[0] = 4;
    CHECK(run() == ATTN_INVALID_ARGUMENT);
    CHECK(has(attn_last_error(), "seqlens[0] is 4; accepted: 0 to 3"));
    numbers = {3, 0, 7, -1, -1};
    CHECK(attn_check(plan.get(), &args, nullptr) == ATTN_INVALID_ARGUMENT);
    CHECK(has(attn_last_error(), "block_table[0, 1] is 7; accepted: 0 to 1"));
  }
}

// Structs of headers before the field are shorter.
TEST_CASE("prefix: a segment without the field is not shared") {
  Setup s;
  for (attn_segment& segment : s.segments) segment.struct_size = offsetof(attn_segment, shared);
  std::vector<char> older(2 * offsetof(attn_segment, shared));
  for (size_t i = 0; i < 2; ++i)
    std::memcpy(&older[i * offsetof(attn_segment, shared)], &s.segments[i],
                offsetof(attn_segment, shared));
  s.problem.segments = reinterpret_cast<const attn_segment*>(older.data());
  Problem p;
  REQUIRE(made(s, &p).ok());
  CHECK(p.segment[0].shared == 0);
  CHECK(p.segment[1].seqlen == 256);
  CHECK(!shares_segments(p));
}

TEST_CASE("prefix: a batch of one shares nothing") {
  Setup s;
  s.problem.batch = 1;
  Problem p;
  REQUIRE(made(s, &p).ok());
  CHECK(!shares_segments(p));
  CHECK(on_hopper(s).reason("prefix_cuda") == "");
}
