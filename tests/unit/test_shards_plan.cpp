// What shards_cuda makes of a problem on a Hopper, which need not be here: groups of segments,
// waits, merges. The parts, computed by the reference and merged in double, are the whole problem's
// answer.
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "attn/attn.hpp"
#include "backends.h"
#include "catalog/catalog.h"
#include "catch.h"
#include "core/dtype.h"
#include "hopper.h"
#include "kernels/merge/shards_args.h"
#include "mock/mock_library.h"
#include "plan/shards.h"

using namespace attn;

namespace {

constexpr int64_t dim = 64;
const std::string usual = "fwd_sm90_f16_d64_short";  // takes so few queries

// 3 segments of 2 sequences, each with ready words.
struct Setup {
  std::vector<attn_segment> segments;
  attn_problem problem = attn::make<attn_problem>();

  explicit Setup(std::vector<int64_t> keys = {96, 40, 64}) {
    for (const int64_t n : keys) {
      auto s = attn::make<attn_segment>();
      s.k_type = s.v_type = ATTN_F16;
      s.seqlen = n;
      s.has_ready = 1;
      segments.push_back(s);
    }
    problem.batch = 2;
    problem.heads_q = 4;
    problem.heads_kv = 2;
    problem.head_dim = dim;
    problem.seqlen_q = 50;
    problem.q_type = ATTN_F16;
  }
  attn_problem made() {
    problem.num_segments = int32_t(segments.size());
    problem.segments = segments.data();
    return problem;
  }
};

struct Chosen {
  Status status;
  Choice choice;
  std::string name() const { return status.ok() ? choice.kernel->name : status.text; }
  // "wait_cuda 0, attention, accumulate_cuda": the stages, waits with their segments.
  std::string stages() const {
    std::string text;
    for (const Stage& stage : choice.composition->stages) {
      if (!text.empty()) text += ", ";
      if (const auto* own = std::get_if<RunStep>(&stage)) {
        const Step& step = choice.recipe.steps[own->step];
        text += step.image;
        if (step.image != std::string("wait_cuda")) continue;
        attn_wait_kernarg a;
        std::memcpy(&a, step.arguments.bytes.data(), sizeof a);
        text += join(" ", a.first_segment);
        if (a.count > 1) text += join(" and ", a.count - 1, " more");
      } else if (const auto* forward = std::get_if<RunForward>(&stage)) {
        text += choice.composition->parts[forward->part].computes;
      } else {
        text += "merge";
      }
    }
    return text;
  }
};
// As if each image were there.
Chosen on_hopper(Setup s) {
  struct All : CodeFile {
    std::string without(const char*) const override { return ""; }
  } const all;
  const DeviceInfo device = test::hopper();
  const Machine machine = {.backend = ATTN_BACKEND_CUDA, .device = &device, .file = &all};
  Chosen chosen;
  const attn_problem in = s.made();
  Problem p;
  chosen.status = make_problem(&in, &p);
  if (chosen.status.ok()) chosen.status = choose(p, machine, &chosen.choice);
  return chosen;
}

bool has(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

std::vector<unsigned char> numbers(attn_dtype type, int64_t count, int salt) {
  std::vector<unsigned char> x(size_t(count * dtype_bytes(type)));
  for (int64_t n = 0; n < count; ++n)
    encode_element(
        type, x.data(), n,
        double(int(uint64_t(n * 7919 + salt * 104729) * 2654435761u >> 20 & 4095) - 2048) / 1024,
        false);
  return x;
}

// What the arguments of a problem of Setup point to, in host memory.
struct Data {
  std::vector<unsigned char> q;
  std::vector<std::vector<unsigned char>> k, v;
  std::vector<float> sinks = {0.5f, -1, 2, 0}, out, lse;
  std::vector<int32_t> cu_seqlens_q = {0, 13, 50}, lengths = {31, 90};
  std::vector<attn_segment_args> segments;
  attn_args args = attn::make<attn_args>();

  explicit Data(Setup s) {
    const attn_problem p = s.made();
    const int64_t tokens = p.q_layout == ATTN_PACKED ? p.total_q : p.batch * p.seqlen_q;
    q = numbers(p.q_type, tokens * p.heads_q * dim, 1);
    for (size_t i = 0; i < s.segments.size(); ++i) {
      const int64_t count = p.batch * s.segments[i].seqlen * p.heads_kv * dim;
      k.push_back(numbers(s.segments[i].k_type, count, 10 + int(i)));
      v.push_back(numbers(s.segments[i].v_type, count, 20 + int(i)));
    }
    for (size_t i = 0; i < s.segments.size(); ++i) {
      auto a = attn::make<attn_segment_args>();
      a.k = k[i].data();
      a.v = v[i].data();
      if (s.segments[i].has_seqlens) a.seqlens = lengths.data();
      segments.push_back(a);
    }
    out.assign(size_t(tokens * p.heads_q * dim), NAN);
    lse.assign(size_t(tokens * p.heads_q), NAN);
    args.q = q.data();
    args.out = out.data();
    args.lse = lse.data();
    args.num_segments = int32_t(segments.size());
    args.segments = segments.data();
    args.sinks = p.flags & ATTN_SINKS ? sinks.data() : nullptr;
    if (p.q_layout == ATTN_PACKED) args.cu_seqlens_q = cu_seqlens_q.data();
  }
};

// By the reference, with float32 out.
void run_on_host(attn_problem in, std::vector<attn_segment> segments, const attn_args& args) {
  static const attn::context reference(ATTN_BACKEND_REFERENCE);
  in.struct_size = sizeof in;
  in.out_type = ATTN_F32;
  in.out_stride = {};
  in.kernel = nullptr;
  for (attn_segment& s : segments) s.struct_size = sizeof s, s.has_ready = 0;
  in.segments = segments.data();
  const attn::plan plan(reference, in);
  attn::buffer workspace = plan.make_workspace(reference, nullptr);
  attn::check(attn_run(plan.get(), &args, workspace.data(), workspace.bytes(), nullptr));
}

// The largest difference between the parts' merged results and the whole problem's.
double difference(const Setup& setup, const Chosen& chosen) {
  Setup s = setup;
  Data whole(s);
  run_on_host(s.made(), s.segments, whole.args);

  const size_t rows = whole.lse.size();
  std::vector<double> out(whole.out.size()), sum(rows);
  const attn_problem p = s.made();
  const int64_t queries = p.q_layout == ATTN_PACKED ? p.total_q : p.seqlen_q;
  for (const Stage& stage : chosen.choice.composition->stages) {
    const auto* run = std::get_if<RunForward>(&stage);
    if (!run) continue;
    const auto& problem =
        static_cast<const Problem&>(*chosen.choice.composition->parts[run->part].problem);
    Data part(s);
    part.args.num_segments = problem.num_segments;
    part.args.segments = part.segments.data() + run->first_segment;
    if (run->sinks.from == Place::nowhere) part.args.sinks = nullptr;
    run_on_host(problem, {problem.segment.begin(), problem.segment.end()}, part.args);
    for (size_t row = 0; row < rows; ++row) {
      const double weight = std::exp(double(part.lse[row]));
      const size_t i = row % size_t(queries), h = row / size_t(queries) % 4,
                   b = row / size_t(queries) / 4;
      sum[row] += weight;
      for (size_t d = 0; d < size_t(dim); ++d) {
        const size_t at = ((b * size_t(queries) + i) * 4 + h) * size_t(dim) + d;
        out[at] += weight * double(part.out[at]);
      }
    }
  }
  double most = 0;
  for (size_t row = 0; row < rows; ++row) {
    const size_t i = row % size_t(queries), h = row / size_t(queries) % 4,
                 b = row / size_t(queries) / 4;
    if (sum[row] == 0) {
      most = std::max(most, whole.lse[row] == -INFINITY ? 0.0 : double(INFINITY));
      continue;
    }
    most = std::max(most, std::abs(std::log(sum[row]) - double(whole.lse[row])));
    for (size_t d = 0; d < size_t(dim); ++d) {
      const size_t at = ((b * size_t(queries) + i) * 4 + h) * size_t(dim) + d;
      most = std::max(most, std::abs(out[at] / sum[row] - double(whole.out[at])));
    }
  }
  return most;
}

constexpr const char* one_wait = "wait_cuda 0 and 2 more, attention";
constexpr const char* each =
    "wait_cuda 0, attention, wait_cuda 1, attention, wait_cuda 2, attention, merge";

}  // namespace

TEST_CASE("shards: each segment is attended to when it has arrived, under any masks") {
  const struct {
    const char* name;
    std::function<void(Setup&)> change;
    const char* stages;
  } cases[] = {
      {"all keys", [](Setup&) {}, each},
      {"causal", [](Setup& s) { s.problem.flags = ATTN_CAUSAL; }, each},
      {"causal with queries that see no key of the last segment",
       [](Setup& s) {
         s.problem.flags = ATTN_CAUSAL;
         s.problem.seqlen_q = 190;
       },
       each},
      {"more queries than keys",
       [](Setup& s) {
         s.problem.flags = ATTN_CAUSAL;
         s.problem.seqlen_q = 230;
       },
       each},
      {"a window to both sides",
       [](Setup& s) {
         s.problem.flags = ATTN_WINDOW;
         s.problem.window_left = 130;
         s.problem.window_right = 3;
       },
       each},
      {"a window to the right",
       [](Setup& s) {
         s.problem.flags = ATTN_WINDOW;
         s.problem.window_left = -1;
         s.problem.window_right = 20;
         s.problem.seqlen_q = 150;
       },
       each},
      {"a causal window",
       [](Setup& s) {
         s.problem.flags = ATTN_WINDOW | ATTN_CAUSAL;
         s.problem.window_left = 120;
         s.problem.window_right = 5;
       },
       each},
      {"a window that ends among the last keys",
       [](Setup& s) {
         s.problem.flags = ATTN_WINDOW;
         s.problem.window_left = 60;
         s.problem.window_right = -1;
       },
       one_wait},
      {"sinks count once", [](Setup& s) { s.problem.flags = ATTN_SINKS | ATTN_CAUSAL; }, each},
      {"packed queries",
       [](Setup& s) {
         s.problem.flags = ATTN_CAUSAL;
         s.problem.q_layout = ATTN_PACKED;
         s.problem.total_q = 50;
         s.problem.seqlen_q = 37;
       },
       each},
      {"lengths of the first segment",
       [](Setup& s) {
         s.problem.flags = ATTN_CAUSAL;
         s.segments[0].has_seqlens = 1;
       },
       each},
      {"lengths of a later one, which the mask of the first would need",
       [](Setup& s) {
         s.problem.flags = ATTN_CAUSAL;
         s.segments[0].has_seqlens = s.segments[1].has_seqlens = 1;
         s.segments[1].seqlen = 96;
       },
       one_wait},
      {"lengths without masks",
       [](Setup& s) {
         s.segments[0].has_seqlens = s.segments[1].has_seqlens = 1;
         s.segments[1].seqlen = 96;
       },
       each},
      {"a segment that is there goes with the one before",
       [](Setup& s) {
         s.problem.flags = ATTN_CAUSAL;
         s.segments[1].has_ready = 0;
       },
       "wait_cuda 0, attention, wait_cuda 2, attention, merge"},
      {"the first segment is there", [](Setup& s) { s.segments[0].has_ready = 0; },
       "attention, wait_cuda 1, attention, wait_cuda 2, attention, merge"},
      {"one segment has words",
       [](Setup& s) { s.segments[1].has_ready = s.segments[2].has_ready = 0; },
       "wait_cuda 0, attention"},
  };
  for (const auto& c : cases) {
    Setup s;
    c.change(s);
    const Chosen chosen = on_hopper(s);
    INFO(c.name << ": " << chosen.name());
    REQUIRE(chosen.name() == "shards_cuda");
    CHECK(chosen.stages() == c.stages);
    CHECK(difference(s, chosen) < 2e-6);
  }
}

TEST_CASE("shards: each segment whose keys have positions is attended to alone") {
  Setup s;
  s.problem.flags = ATTN_CAUSAL | ATTN_QUERY_POSITIONS;
  for (attn_segment& segment : s.segments) {
    segment.has_ready = 0;
    segment.has_key_start = 1;
    segment.key_interleave = 16;
    segment.key_ranks = 3;
  }
  CHECK(on_hopper(s).stages() == "attention, attention, attention, merge");
  for (attn_segment& segment : s.segments) segment.has_ready = 1;
  CHECK(on_hopper(s).stages() == each);
  // Of one segment the kernels take it themselves.
  s.segments.resize(1);
  s.segments[0].has_ready = 0;
  CHECK(on_hopper(s).name() == usual);
  // What they decline of it. All kernels together have too many reasons for a sentence.
  s.problem.kernel = "fwd_sm90_f16_d128_score";
  s.problem.flags |= ATTN_ALIBI;
  CHECK(has(on_hopper(s).name(), "ALiBi over interleaved keys"));
  s.problem.flags &= ~uint32_t{ATTN_ALIBI};
  s.segments[0].key_interleave = 1;
  s.segments[0].key_ranks = 1 << 24;
  CHECK(has(on_hopper(s).name(), "positions apart; accepted: below 1073741824"));
  // Keys that count from the first of all segments cannot be told apart by segments.
  s = Setup();
  s.problem.flags = ATTN_CAUSAL | ATTN_QUERY_POSITIONS;
  CHECK(on_hopper(s).stages() == "wait_cuda 0 and 2 more, attention");
}

TEST_CASE("shards: a result is merged into the earlier one after each part") {
  Setup s;
  s.problem.flags = ATTN_CAUSAL | ATTN_ACCUMULATE;
  s.problem.out_type = ATTN_F32;
  CHECK(on_hopper(s).stages() ==
        "wait_cuda 0, attention, accumulate_cuda, wait_cuda 1, attention, accumulate_cuda, "
        "wait_cuda 2, attention, accumulate_cuda");
  for (attn_segment& segment : s.segments) segment.has_ready = 0;
  const Chosen chosen = on_hopper(s);
  REQUIRE(chosen.name() == "shards_cuda");
  CHECK(chosen.stages() == "attention, accumulate_cuda");
  const Part& part = chosen.choice.composition->parts[0];
  CHECK(static_cast<const Problem&>(*part.problem).flags == ATTN_CAUSAL);
  CHECK(part.choice.kernel->name == usual);
  // Without any of both the kernel itself has the problem.
  s.problem.flags = ATTN_CAUSAL;
  CHECK(on_hopper(s).name() == usual);
  // 16 results can be merged; more segments are waited for first.
  s = Setup(std::vector<int64_t>(17, 64));
  CHECK(on_hopper(s).stages() == "wait_cuda 0 and 16 more, attention");
  s.segments.pop_back();
  CHECK(has(on_hopper(s).stages(), "wait_cuda 15, attention, merge"));
}

TEST_CASE("shards: the attention is that of other composed kernels, or of the one that is named") {
  Setup s;
  s.problem.flags = ATTN_ACCUMULATE;
  s.problem.out_type = ATTN_F32;
  const auto attends_by = [&] {
    const Chosen chosen = on_hopper(s);
    if (chosen.name() != "shards_cuda") return chosen.name();
    return std::string(chosen.choice.composition->parts[0].choice.kernel->name);
  };
  CHECK(attends_by() == usual);
  s.problem.kernel = "shards_cuda";
  CHECK(attends_by() == usual);
  s.problem.kernel = "fwd_sm80_f16_d64";
  CHECK(attends_by() == "fwd_sm80_f16_d64");
  s.problem.kernel = "prefix_cuda";
  CHECK(has(attends_by(), "attention: "));
  s.segments[0].shared = 1;
  for (attn_segment& segment : s.segments) segment.has_ready = 0;
  CHECK(attends_by() == "prefix_cuda");
  s.segments[0].shared = 0;
  s.problem.kernel = nullptr;
  s.segments[0].list_size = 16;
  CHECK(attends_by() == "lists_cuda");
  s.segments[0].list_size = 0;
  // What no kernel takes is said of the part, with the part's reason.
  for (attn_segment& segment : s.segments) segment.k_type = segment.v_type = ATTN_F32;
  s.problem.q_type = ATTN_F32;
  CHECK(has(attends_by(), "attention: no kernel on sm_90 takes q of f32"));
}

TEST_CASE("shards: attn_explain names the parts, and theirs") {
  if (!image_for("accumulate_cuda", "sm_90")) ATTN_SKIP("this build has no CUDA kernels");
  Setup s({64});
  s.segments[0].list_size = 16;
  s.problem.flags = ATTN_ACCUMULATE;
  s.problem.out_type = ATTN_F32;
  const attn_problem problem = s.made();
  auto device = attn::make<attn_device>();
  device.arch = "sm_90";
  device.multiprocessors = 132;
  device.shared_bytes_max = 227 << 10;
  std::vector<char> text(1 << 20);
  size_t size;
  REQUIRE(attn_explain_device(&device, &problem, text.data(), text.size(), &size) == ATTN_OK);
  INFO(std::string(text.data()).substr(0, 800));
  CHECK(has(text.data(), R"("kernel":"shards_cuda")"));
  CHECK(has(text.data(), R"("parts":[{"kernel":"wait_cuda","computes":"arrival of segments"},)"
                         R"({"kernel":"lists_cuda","computes":"attention","parts":[{"kernel":)"
                         R"("list_slots_cuda","computes":"places of keys"},)"));
  CHECK(has(text.data(), R"({"kernel":"accumulate_cuda","computes":"merge into out and lse"}])"));
}

namespace {

std::vector<mock::Launch>* launched;

}  // namespace

TEST_CASE("shards: launches in their order, with the addresses of the run") {
  const mock::MockLibrary library("cuda_12");
  const attn::context context = test::device_on(library);
  std::vector<mock::Launch> launches;
  launched = &launches;
  library->kernel = [](const mock::Launch& launch) { launched->push_back(launch); };

  Setup s;
  s.problem.flags = ATTN_CAUSAL | ATTN_ACCUMULATE;
  s.problem.out_type = ATTN_F32;
  s.problem.out_stride = {50 * 8 * dim, 8 * dim, 2 * dim};
  const attn::plan plan(context, s.made());
  REQUIRE(std::string(plan.kernel()) == "shards_cuda");
  attn::buffer workspace = plan.make_workspace(context, nullptr);
  launches.clear();
  alignas(256) static float memory[2 * 50 * 8 * dim], lse[2 * 4 * 50];
  alignas(256) static uint32_t ready[3][2];
  alignas(256) static char q[2 * 50 * 4 * dim * 2], kv[3][2][2 * 96 * 2 * dim * 2];
  std::vector<attn_segment_args> segments(3, attn::make<attn_segment_args>());
  for (size_t i = 0; i < 3; ++i) {
    segments[i].k = kv[i][0];
    segments[i].v = kv[i][1];
    segments[i].ready = ready[i];
  }
  auto args = attn::make<attn_args>();
  args.q = q;
  args.out = memory;
  args.lse = lse;
  args.num_segments = 3;
  args.segments = segments.data();
  const uint64_t before = attn_launch_count(usual.c_str()),
                 composed = attn_launch_count("shards_cuda");
  attn::check(attn_run(plan.get(), &args, workspace.data(), workspace.bytes(), nullptr));
  CHECK(attn_launch_count("shards_cuda") == composed + 1);
  CHECK(attn_launch_count(usual.c_str()) == before + 3);
  std::vector<std::string> symbols;
  for (const mock::Launch& l : launches) symbols.push_back(l.symbol);
  REQUIRE(symbols.size() == 9);
  const char* const base = static_cast<const char*>(workspace.data());
  for (size_t i = 0; i < 3; ++i) {
    CHECK(symbols[3 * i] == "wait_cuda");
    CHECK(symbols[3 * i + 1] == usual);
    CHECK(symbols[3 * i + 2] == "accumulate_cuda");
    attn_wait_kernarg wait;
    std::memcpy(&wait, launches[3 * i].kernarg, sizeof wait);
    CHECK(wait.count == 1);
    CHECK(wait.ready[0] == ready[i]);
    attn_accumulate_kernarg a;
    std::memcpy(&a, launches[3 * i + 2].kernarg, sizeof a);
    CHECK(a.out == memory);
    CHECK(a.lse == lse);
    CHECK(a.rows == 2 * 4 * 50);
    CHECK(a.fours == 1);
    CHECK(a.out_stride[1] == 8 * dim);
    const auto within = [&](const void* array, size_t bytes) {
      const char* const at = static_cast<const char*>(array);
      return at >= base && at + bytes <= base + workspace.bytes();
    };
    CHECK(within(a.part, 2 * 50 * 4 * dim * 4));
    CHECK(within(a.part_lse, 2 * 50 * 4 * 4));
  }
}

TEST_CASE("shards: a run has the tokens of its plan") {
  const mock::MockLibrary library("cuda_12");
  const attn::context context = test::device_on(library);
  Setup s;
  s.problem.q_layout = ATTN_PACKED;
  s.problem.total_q = 50;
  const attn::plan plan(context, s.made());
  REQUIRE(std::string(plan.kernel()) == "shards_cuda");
  attn::buffer workspace = plan.make_workspace(context, nullptr);
  alignas(256) static char q[50 * 4 * dim * 2], out[50 * 4 * dim * 2], kv[2 * 96 * 2 * dim * 2];
  static const uint32_t ready[2] = {};
  static const int32_t offsets[] = {0, 13, 40};
  std::vector<attn_segment_args> segments(3, attn::make<attn_segment_args>());
  for (attn_segment_args& of : segments) of.k = of.v = kv, of.ready = ready;
  auto args = attn::make<attn_args>();
  args.q = q;
  args.out = out;
  args.cu_seqlens_q = offsets;
  args.num_segments = 3;
  args.segments = segments.data();
  args.total_q = 40;
  const auto run = [&] {
    return attn_run(plan.get(), &args, workspace.data(), workspace.bytes(), nullptr);
  };
  CHECK(run() == ATTN_INVALID_ARGUMENT);
  CHECK(std::string(attn_last_error()) ==
        "args.total_q is 40; accepted by shards_cuda: the problem's 50");
  args.total_q = 50;
  CHECK(run() == ATTN_OK);
}
