// Backward: what is refused, and the sentences that say so.
#include <functional>
#include <string>
#include <vector>

#include "attn/attn.hpp"
#include "bad_input.h"
#include "catch.h"
#include "hopper.h"
#include "plan/choose.h"
#include "problem/backward.h"

namespace {

// A valid problem and its data; each case spoils one thing.
struct Setup {
  attn_segment segment = attn::make<attn_segment>();
  attn_problem forward = attn::make<attn_problem>();
  attn_backward_problem problem = attn::make<attn_backward_problem>();
  attn_segment_args segment_args = attn::make<attn_segment_args>();
  attn_args forward_args = attn::make<attn_args>();
  attn_backward_args args = attn::make<attn_backward_args>();
  std::vector<float> q = std::vector<float>(2 * 3 * 4 * 8, 0.5f), k = std::vector<float>(160, 0.5f),
                     v = k, out = q, lse = std::vector<float>(24, 1), d_out = q, d_lse = lse,
                     dq = q, dk = k, dv = v, sinks = std::vector<float>(4, 0), d_sinks = sinks,
                     bias = std::vector<float>(2 * 4 * 3 * 5, 0), d_bias = bias;
  std::vector<int32_t> lengths = {5, 2};

  Setup() {
    segment.k_type = segment.v_type = ATTN_F32;
    segment.seqlen = 5;
    forward.batch = 2;
    forward.heads_q = 4;
    forward.heads_kv = 2;
    forward.head_dim = 8;
    forward.seqlen_q = 3;
    forward.q_type = ATTN_F32;
    forward.num_segments = 1;
    forward.segments = &segment;
    problem.forward = &forward;
    segment_args.k = k.data();
    segment_args.v = v.data();
    forward_args.q = q.data();
    forward_args.out = out.data();
    forward_args.lse = lse.data();
    forward_args.num_segments = 1;
    forward_args.segments = &segment_args;
    args.forward = &forward_args;
    args.d_out = d_out.data();
    args.dq = dq.data();
    args.dk = dk.data();
    args.dv = dv.data();
  }
  Setup(const Setup&) = delete;

  void with_sinks() {
    forward.flags |= ATTN_SINKS;
    forward_args.sinks = sinks.data();
    problem.gradients = ATTN_GRAD_SINKS;
    args.d_sinks = d_sinks.data();
    args.dq = args.dk = args.dv = nullptr;
  }
  void with_bias() {
    forward.bias_type = ATTN_F32;
    forward_args.bias = bias.data();
    problem.gradients = ATTN_GRAD_BIAS;
    args.d_bias = d_bias.data();
    args.dq = args.dk = args.dv = nullptr;
  }
};

using Case = attn::test::BadInput<Setup>;
using attn::test::expect;

constexpr attn_status bad = ATTN_INVALID_ARGUMENT, not_here = ATTN_UNSUPPORTED;

const Case of_problems[] = {
    {"no problem",
     [](Setup& s) { s.problem.forward = nullptr; },
     bad,
     {"problem.forward is NULL", "the problem of the forward run"}},
    {"a bad forward problem",
     [](Setup& s) { s.forward.heads_q = 3; },
     bad,
     {"heads_q is 3", "multiples of heads_kv = 2"}},
    {"two segments",
     [](Setup& s) {
       static attn_segment two[2];
       two[0] = two[1] = s.segment;
       s.forward.segments = two;
       s.forward.num_segments = 2;
     },
     not_here,
     {"num_segments is 2; accepted for backward: 1"}},
    {"fp8",
     [](Setup& s) { s.forward.q_type = ATTN_F8_E4M3FN; },
     not_here,
     {"q_type is f8_e4m3fn; accepted for backward: f32, f16, bf16"}},
    {"other keys",
     [](Setup& s) { s.segment.k_type = ATTN_F16; },
     not_here,
     {"k_type is f16; accepted for backward: q's type, f32"}},
    {"quantised values",
     [](Setup& s) {
       s.forward.head_dim = s.forward.head_dim_v = 32;
       s.segment.v_type = ATTN_Q8_0;
     },
     not_here,
     {"v_type is q8_0; accepted for backward: q's type, f32"}},
    {"out in fp8",
     [](Setup& s) { s.forward.out_type = ATTN_F8_E5M2; },
     not_here,
     {"out_type is f8_e5m2; accepted for backward: f32, f16, bf16, f64"}},
    {"pages",
     [](Setup& s) {
       s.segment.layout = ATTN_PAGED;
       s.segment.seqlen = 0;
       s.segment.page_size = s.segment.max_pages = s.segment.num_pages = 4;
     },
     not_here,
     {"layout is paged (2); accepted for backward: padded (0), packed (1)"}},
    {"shared keys",
     [](Setup& s) { s.segment.shared = 1; },
     not_here,
     {"shared is 1; accepted for backward: 0"}},
    {"descales",
     [](Setup& s) { s.segment.k_descale = ATTN_DESCALE_TENSOR; },
     not_here,
     {"k_descale is 1; accepted for backward: none (0)"}},
    {"a tree",
     [](Setup& s) { s.forward.tree_keys = 4; },
     not_here,
     {"tree_keys is 4; accepted for backward: 0"}},
    {"unknown gradients",
     [](Setup& s) { s.problem.gradients = 64; },
     bad,
     {"gradients is 0x40; accepted: bits of 0x1f"}},
    {"adding to none",
     [](Setup& s) {
       s.problem.gradients = ATTN_GRAD_Q;
       s.problem.accumulate = ATTN_GRAD_K;
     },
     bad,
     {"accumulate is 0x2; accepted: bits of gradients, 0x1"}},
    {"no sinks",
     [](Setup& s) { s.problem.gradients = ATTN_GRAD_SINKS; },
     bad,
     {"ATTN_GRAD_SINKS; accepted with ATTN_SINKS"}},
    {"no bias",
     [](Setup& s) { s.problem.gradients = ATTN_GRAD_BIAS; },
     bad,
     {"ATTN_GRAD_BIAS; accepted with a bias_type"}},
    {"type of dq",
     [](Setup& s) { s.problem.dq_type = ATTN_BF16; },
     bad,
     {"dq_type is bf16; accepted: f32, f64"}},
    {"type of d_out",
     [](Setup& s) { s.problem.d_out_type = ATTN_F8_E5M2; },
     bad,
     {"d_out_type is f8_e5m2; accepted: f32, f16, bf16, f64"}},
    {"strides of dk",
     [](Setup& s) { s.problem.dk_stride = {80, 4, 8}; },
     bad,
     {"dk_stride", "so that elements overlap"}},
    {"another operation's kernel",
     [](Setup& s) { s.problem.kernel = "cpu_baseline"; },
     bad,
     {"kernel \"cpu_baseline\" is not a backward kernel", "bwd_"}},
};

const Case of_runs[] = {
    {"no arguments",
     [](Setup& s) { s.args.forward = nullptr; },
     bad,
     {"args.forward is NULL", "the arguments of the forward run"}},
    {"no lse",
     [](Setup& s) { s.forward_args.lse = nullptr; },
     bad,
     {"lse is NULL; accepted for backward: the lse of the forward run"}},
    {"no out", [](Setup& s) { s.forward_args.out = nullptr; }, bad, {"out is NULL"}},
    {"no d_out", [](Setup& s) { s.args.d_out = nullptr; }, bad, {"d_out is NULL"}},
    {"no dq",
     [](Setup& s) { s.args.dq = nullptr; },
     bad,
     {"dq is NULL", "ATTN_GRAD_Q in gradients"}},
    {"dv not wanted",
     [](Setup& s) { s.args.d_sinks = s.d_sinks.data(); },
     bad,
     {"d_sinks is given", "without ATTN_GRAD_SINKS in gradients"}},
    {"dq over q", [](Setup& s) { s.args.dq = s.q.data(); }, bad, {"dq is at", "overlaps q at"}},
    {"dq over out",
     [](Setup& s) { s.args.dq = s.out.data(); },
     bad,
     {"dq is at", "overlaps out at"}},
    {"dq over d_out",
     [](Setup& s) { s.args.dq = s.d_out.data(); },
     bad,
     {"dq is at", "overlaps d_out at"}},
    {"dv over dk", [](Setup& s) { s.args.dv = s.dk.data(); }, bad, {"dk is at", "overlaps dv at"}},
    {"dk over v", [](Setup& s) { s.args.dk = s.v.data(); }, bad, {"dk is at", "overlaps v at"}},
    {"alignment",
     [](Setup& s) { s.args.dq = reinterpret_cast<char*>(s.dq.data()) + 2; },
     bad,
     {"dq is at", "4-byte aligned"}},
    {"lengths",
     [](Setup& s) {
       s.segment.has_seqlens = 1;
       s.lengths[1] = 6;
       s.segment_args.seqlens = s.lengths.data();
     },
     bad,
     {"seqlens[1] is 6; accepted: 0 to 5"}},
};

TEST_CASE("backward: bad problems") {
  for (const attn_backend backend : {ATTN_BACKEND_REFERENCE, ATTN_BACKEND_CPU}) {
    const attn::context context(backend);
    for (const Case& c : of_problems) {
      Setup s;
      c.spoil(s);
      attn_plan* plan = nullptr;
      expect(c, attn_plan_create_backward(context.get(), &s.problem, &plan));
      CHECK(plan == nullptr);
    }
  }
}

attn_status run(const attn::context& context, const Setup& s, size_t less = 0) {
  const attn::plan plan(context, s.problem);
  attn::buffer workspace = plan.make_workspace(context);
  return attn_run_backward(plan.get(), &s.args, workspace.data(), workspace.bytes() - less,
                           nullptr);
}

TEST_CASE("backward: bad arguments") {
  for (const attn_backend backend : {ATTN_BACKEND_REFERENCE, ATTN_BACKEND_CPU}) {
    const attn::context context(backend);
    for (const Case& c : of_runs) {
      Setup s;
      c.spoil(s);
      expect(c, run(context, s));
    }
    Setup s;
    CHECK(run(context, s) == ATTN_OK);
    expect(Case{"workspace", {}, ATTN_WORKSPACE_TOO_SMALL, {"workspace has", "or more (bwd_"}},
           run(context, s, 1));
    s.with_sinks();
    CHECK(run(context, s) == ATTN_OK);
    Setup t;
    t.with_bias();
    CHECK(run(context, t) == ATTN_OK);
    // Plans of the other operation.
    const attn::plan forward(context, s.forward), backward(context, t.problem);
    expect(Case{"forward plan", {}, bad, {"plan is for forward", "plans for backward"}},
           attn_run_backward(forward.get(), &s.args, nullptr, 0, nullptr));
    expect(Case{"backward plan", {}, bad, {"plan is for backward", "plans for forward"}},
           attn_run(backward.get(), &s.forward_args, nullptr, 0, nullptr));
  }
}

TEST_CASE("backward: f64 is the reference's") {
  Setup s;
  s.problem.dq_type = ATTN_F64;
  const attn::context cpu(ATTN_BACKEND_CPU);
  attn_plan* plan = nullptr;
  CHECK(attn_plan_create_backward(cpu.get(), &s.problem, &plan) == ATTN_UNSUPPORTED);
  CHECK(std::string(attn_last_error()).find("output type f64; accepted: f32, f16, bf16") !=
        std::string::npos);
  CHECK(std::string(attn::plan(attn::context(ATTN_BACKEND_REFERENCE), s.problem).kernel()) ==
        "bwd_reference");
}

// Of a GPU, and why if there is none.
std::string chosen(attn_backend backend, const attn_backward_problem& of) {
  attn::BackwardProblem problem;
  const attn::Status made = attn::make_backward_problem(&of, &problem);
  INFO(made.text);
  REQUIRE(made.ok());
  const attn::DeviceInfo device = attn::test::hopper();
  attn::Choice choice;
  const attn::Status status =
      attn::choose(problem, attn::Machine{.backend = backend, .device = &device}, &choice);
  if (status.ok()) return choice.kernel->name;
  CHECK(status.code == ATTN_UNSUPPORTED);
  return status.text;
}

TEST_CASE("backward: HIP has no kernel yet") {
  Setup s;
  CHECK(chosen(ATTN_BACKEND_HIP, s.problem) == "backward: no kernel of backend hip yet");
}

TEST_CASE("backward: the kernels of CUDA") {
  Setup s;
  if (!attn::image_for("merge_cuda", "sm_90")) {
    CHECK(chosen(ATTN_BACKEND_CUDA, s.problem) ==
          "backward: this build has no cuda kernels: it was made without a CUDA toolkit; backend "
          "cpu needs none");
    return;
  }
  const auto has = [&](const char* part) {
    const std::string text = chosen(ATTN_BACKEND_CUDA, s.problem);
    INFO(text);
    CHECK(text.find(part) != std::string::npos);
  };
  has("input type f32; accepted: bf16 (bwd_sm90_");
  s.forward.q_type = s.segment.k_type = s.segment.v_type = ATTN_BF16;
  s.forward.head_dim = s.forward.head_dim_v = 64;
  has("bwd_sm90_bf16_d64");
  s.problem.d_out_type = ATTN_F32;
  has("d_out_type is f32; accepted: q's type, bf16 (bwd_sm90_bf16_d64");
  s.problem.d_out_type = ATTN_DTYPE_NONE;
  s.forward.head_dim = 72;
  has("bwd_sm90_bf16_d128");
  s.forward.scale = -1;
  has("bwd_sm80_bf16_d128");
  s.problem.kernel = "bwd_sm90_bf16_d128";
  has("scale is -1; accepted: above 0");
  s.problem.kernel = nullptr;
  s.forward.scale = 1;
  s.forward.softcap = 20;
  has("bwd_sm90_bf16_d128_score");
  s.forward.head_dim_v = 256;
  has("bwd_sm90_bf16_d256_score");
  s.forward.max_sms = 1;
  has("bwd_sm80_bf16_d256_score");
  s.forward.max_sms = 0;
  s.forward.flags |= ATTN_BLOCK_MASK;
  s.forward.block_q = s.forward.block_k = 64;
  has("bwd_sm80_bf16_d256_mask");
  s.forward.block_q = 32;
  s.problem.kernel = "bwd_sm80_bf16_d256_mask";  // else too many kernels have other reasons
  has("mask blocks other than 64 and 128");
  s.problem.kernel = nullptr;
  s.forward.flags &= ~uint32_t(ATTN_BLOCK_MASK);
  s.forward.bias_type = ATTN_BF16;
  s.problem.gradients = ATTN_GRAD_BIAS;
  has("bwd_sm90_bf16_d256_bias");
  s.forward.bias_type = ATTN_F16;
  has("bwd_sm80_bf16_d256_score");
}

TEST_CASE("backward: nothing to do") {
  for (const attn_backend backend : {ATTN_BACKEND_REFERENCE, ATTN_BACKEND_CPU}) {
    const attn::context context(backend);
    Setup s;
    s.with_sinks();
    s.forward.batch = 0;
    s.args.d_sinks[0] = 7;
    CHECK(run(context, s) == ATTN_OK);
    CHECK(s.args.d_sinks[0] == 7);
    // No keys: zeros, and a sink has all the weight.
    Setup t;
    t.with_sinks();
    t.segment.seqlen = 0;
    t.problem.gradients = ATTN_GRAD_Q | ATTN_GRAD_SINKS;
    t.args.dq = t.dq.data();
    t.args.d_lse = t.d_lse.data();
    t.lse.assign(24, 0);
    t.out.assign(t.out.size(), 0);
    INFO(attn_last_error());
    CHECK(run(context, t) == ATTN_OK);
    CHECK(t.dq == std::vector<float>(t.dq.size(), 0));
    CHECK(t.d_sinks == std::vector<float>(4, 6));  // of 2 sequences of 3 queries with d_lse 1
  }
}

TEST_CASE("backward: explained") {
  Setup s;
  const attn::context context(ATTN_BACKEND_CPU);
  const std::string text = attn::explain(context, s.problem);
  CHECK(text.find("\"kernel\":\"bwd_cpu_") != std::string::npos);
  CHECK(text.find("\"workspace\":") != std::string::npos);
  const attn::context reference(ATTN_BACKEND_REFERENCE);
  const uint64_t before = attn_launch_count("bwd_reference");
  CHECK(run(reference, s) == ATTN_OK);
  CHECK(attn_launch_count("bwd_reference") == before + 1);
}

}  // namespace
