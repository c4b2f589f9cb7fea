// Bad input: each mistake gets its status and a sentence that names argument, value and what is
// accepted.
#include <cmath>
#include <cstddef>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "attn/attn.hpp"
#include "bad_input.h"
#include "catalog/catalog.h"
#include "catch.h"
#include "hopper.h"
#include "problem/operations.h"

namespace {

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

// A valid problem and its data; each case spoils one thing.
struct Setup {
  attn_segment segment = attn::make<attn_segment>();
  attn_problem problem = attn::make<attn_problem>();
  attn_segment_args segment_args = attn::make<attn_segment_args>();
  attn_args args = attn::make<attn_args>();
  std::vector<float> q = std::vector<float>(2 * 3 * 4 * 8, 0.5f);
  std::vector<float> k = std::vector<float>(2 * 5 * 2 * 8, 0.5f),
                     v = std::vector<float>(q.size(), 0.5f);  // out may lie there
  std::vector<float> out = std::vector<float>(q.size(), nan_value),
                     lse = std::vector<float>(2 * 4 * 3, nan_value);
  std::vector<int32_t> lengths = {5, 2}, cu_q = {0, 3, 6}, cu_kv = {0, 5, 10}, table = {0, 1, 2, 3};
  std::vector<int32_t> begin = {1, 0};
  std::vector<float> numbers = std::vector<float>(64, 1.0f);
  std::vector<uint8_t> kinds = std::vector<uint8_t>(4, ATTN_BLOCK_FULL);
  std::vector<int32_t> index = std::vector<int32_t>(4, -1);
  std::vector<uint32_t> bits = std::vector<uint32_t>(64, ~0u);
  std::vector<uint64_t> tree = std::vector<uint64_t>(2 * 2 * 3, ~uint64_t{0});

  Setup() {
    segment.k_type = segment.v_type = ATTN_F32;
    segment.seqlen = 5;
    problem.batch = 2;
    problem.heads_q = 4;
    problem.heads_kv = 2;
    problem.head_dim = 8;
    problem.seqlen_q = 3;
    problem.q_type = ATTN_F32;
    problem.num_segments = 1;
    problem.segments = &segment;
    segment_args.k = k.data();
    segment_args.v = v.data();
    args.q = q.data();
    args.out = out.data();
    args.lse = lse.data();
    args.num_segments = 1;
    args.segments = &segment_args;
  }
  Setup(const Setup&) = delete;

  void pack_q() {
    problem.q_layout = ATTN_PACKED;
    problem.total_q = 6;
    args.cu_seqlens_q = cu_q.data();
  }
  void pack_kv() {
    segment.layout = ATTN_PACKED;
    segment.total = 10;
    segment_args.cu_seqlens = cu_kv.data();
  }
  void page_kv() {
    segment.layout = ATTN_PAGED;
    segment.seqlen = 0;
    segment.page_size = 2;
    segment.max_pages = 2;
    segment.num_pages = 5;
    segment_args.block_table = table.data();
  }
  void mask() {
    problem.flags |= ATTN_BLOCK_MASK;
    problem.block_q = problem.block_k = 4;
    args.block_kinds = kinds.data();
  }
  void begin_keys() {
    problem.has_kv_begin = 1;
    args.kv_begin = begin.data();
  }
  void grow_tree() {
    problem.tree_keys = 4;
    args.tree = tree.data();
  }
};

using Case = attn::test::BadInput<Setup>;
using attn::test::expect;

constexpr attn_status bad = ATTN_INVALID_ARGUMENT, not_here = ATTN_UNSUPPORTED;

}  // namespace

TEST_CASE("a good problem runs on reference and cpu") {
  for (attn_backend backend : {ATTN_BACKEND_REFERENCE, ATTN_BACKEND_CPU}) {
    const attn::context context(backend);
    for (auto change : std::vector<std::function<void(Setup&)>>{
             [](Setup&) {}, [](Setup& s) { s.pack_q(); }, [](Setup& s) { s.pack_kv(); },
             [](Setup& s) { s.page_kv(); }, [](Setup& s) { s.mask(); },
             [](Setup& s) { s.grow_tree(); }, [](Setup& s) { s.begin_keys(); }}) {
      Setup s;
      change(s);
      const attn::plan plan(context, s.problem);
      const attn::buffer workspace = plan.make_workspace(context);
      const uint64_t before = attn_launch_count(plan.kernel());
      plan.run(s.args, workspace);
      CHECK(attn_launch_count(plan.kernel()) == before + 1);
      for (float x : s.out) CHECK(std::abs(x - 0.5f) < 1e-6f);
      for (float x : s.lse) CHECK(std::isfinite(x));
    }
  }
}

TEST_CASE("a wrong problem is refused with a sentence") {
  const std::vector<Case> cases = {
      {"batch too large",
       [](Setup& s) { s.problem.batch = int64_t{1} << 31; },
       bad,
       {"batch", "0 to"}},
      {"tokens of batch zero",
       [](Setup& s) {
         s.pack_q();
         s.problem.batch = 0;
       },
       bad,
       {"total_q is 6", "0 to 0"}},
      {"batch negative", [](Setup& s) { s.problem.batch = -4; }, bad, {"batch", "-4"}},
      {"heads_q negative", [](Setup& s) { s.problem.heads_q = -1; }, bad, {"heads_q", "-1"}},
      {"heads not a multiple",
       [](Setup& s) { s.problem.heads_q = 5; },
       bad,
       {"heads_q is 5", "heads_kv = 2"}},
      {"head_dim zero", [](Setup& s) { s.problem.head_dim = 0; }, bad, {"head_dim"}},
      {"head_dim_v negative",
       [](Setup& s) { s.problem.head_dim_v = -8; },
       bad,
       {"head_dim_v", "-8"}},
      {"seqlen_q negative", [](Setup& s) { s.problem.seqlen_q = -3; }, bad, {"seqlen_q", "-3"}},
      {"seqlen_q huge", [](Setup& s) { s.problem.seqlen_q = INT64_MAX; }, bad, {"seqlen_q"}},
      {"q_type unset",
       [](Setup& s) { s.problem.q_type = ATTN_DTYPE_NONE; },
       bad,
       {"q_type", "f32"}},
      {"q_type ggml", [](Setup& s) { s.problem.q_type = ATTN_Q8_0; }, bad, {"q_type is q8_0"}},
      {"q_type unknown",
       [](Setup& s) { s.problem.q_type = attn_dtype(77); },
       bad,
       {"q_type is 77; accepted: f32"}},
      {"k_type unset", [](Setup& s) { s.segment.k_type = ATTN_DTYPE_NONE; }, bad, {"k_type"}},
      {"v_type f64", [](Setup& s) { s.segment.v_type = ATTN_F64; }, bad, {"v_type is f64"}},
      {"out_type ggml",
       [](Setup& s) { s.problem.out_type = ATTN_Q4_0; },
       bad,
       {"out_type is q4_0"}},
      {"ggml head_dim",
       [](Setup& s) { s.segment.k_type = ATTN_Q8_0; },
       bad,
       {"head_dim 8", "multiple of 32"}},
      {"q_layout paged", [](Setup& s) { s.problem.q_layout = ATTN_PAGED; }, bad, {"q_layout"}},
      {"kv layout unknown",
       [](Setup& s) { s.segment.layout = attn_layout(9); },
       bad,
       {"layout is 9"}},
      {"no segments", [](Setup& s) { s.problem.num_segments = 0; }, bad, {"num_segments is 0"}},
      {"null segments", [](Setup& s) { s.problem.segments = nullptr; }, bad, {"segments is NULL"}},
      {"struct_size zero",
       [](Setup& s) { s.problem.struct_size = 0; },
       bad,
       {"problem.struct_size is 0"}},
      {"segment struct_size",
       [](Setup& s) { s.segment.struct_size = 3; },
       bad,
       {"segments.struct_size is 3"}},
      {"overflowing stride",
       [](Setup& s) { s.segment.k_stride = {INT64_MAX, 16, 8}; },
       bad,
       {"k_stride.batch"}},
      {"overflowing negative stride",
       [](Setup& s) { s.segment.k_stride = {16, INT64_MIN, 8}; },
       bad,
       {"k_stride.seq is -9223372036854775808", "above -2^60"}},
      {"overlapping out with a negative stride",
       [](Setup& s) { s.problem.out_stride = {96, -4, 8}; },
       bad,
       {"out_stride.seq is -4", "overlap"}},
      {"overlapping out",
       [](Setup& s) { s.problem.out_stride = {96, 4, 8}; },
       bad,
       {"out_stride", "overlap"}},
      {"out broadcast",
       [](Setup& s) { s.problem.out_stride = {0, 32, 8}; },
       bad,
       {"out_stride.batch is 0"}},
      {"unknown flag", [](Setup& s) { s.problem.flags = 1u << 30; }, bad, {"flags is 0x40000000"}},
      {"both causals",
       [](Setup& s) { s.problem.flags = ATTN_CAUSAL | ATTN_CAUSAL_TOP_LEFT; },
       bad,
       {"ATTN_CAUSAL_TOP_LEFT"}},
      {"out_scale with f32",
       [](Setup& s) { s.problem.flags = ATTN_OUT_SCALE; },
       bad,
       {"ATTN_OUT_SCALE", "f32"}},
      {"fp8_precise with f32",
       [](Setup& s) { s.problem.flags = ATTN_FP8_PRECISE; },
       bad,
       {"ATTN_FP8_PRECISE", "f32", "an fp8 q_type"}},
      {"window without flag",
       [](Setup& s) { s.problem.window_left = 3; },
       bad,
       {"window_left is 3", "ATTN_WINDOW"}},
      {"window below -1",
       [](Setup& s) {
         s.problem.flags = ATTN_WINDOW;
         s.problem.window_right = -2;
       },
       bad,
       {"window_right is -2", "0 and above, or -1 (unbounded)"}},
      {"scale nan", [](Setup& s) { s.problem.scale = nan_value; }, bad, {"scale is nan"}},
      {"softcap negative", [](Setup& s) { s.problem.softcap = -1; }, bad, {"softcap is -1"}},
      {"softcap inf", [](Setup& s) { s.problem.softcap = INFINITY; }, bad, {"softcap is inf"}},
      {"fixed_split negative",
       [](Setup& s) { s.problem.fixed_split = -1; },
       bad,
       {"fixed_split is -1"}},
      {"has_kv_begin",
       [](Setup& s) { s.problem.has_kv_begin = 2; },
       bad,
       {"has_kv_begin is 2", "0, 1"}},
      {"has_causal_sequences",
       [](Setup& s) { s.problem.has_causal_sequences = 1; },
       bad,
       {"has_causal_sequences is 1", "ATTN_CAUSAL"}},
      {"tree_keys negative",
       [](Setup& s) { s.problem.tree_keys = -1; },
       bad,
       {"tree_keys is -1", "0 to 128"}},
      {"tree_keys above",
       [](Setup& s) { s.problem.tree_keys = 129; },
       bad,
       {"tree_keys is 129", "0 to 128"}},
      {"max_sms negative", [](Setup& s) { s.problem.max_sms = -1; }, bad, {"max_sms is -1"}},
      {"bias type",
       [](Setup& s) { s.problem.bias_type = ATTN_BF16; },
       bad,
       {"bias_type is bf16", "f32, f16"}},
      {"slopes without a bias",
       [](Setup& s) { s.problem.flags = ATTN_BIAS_SLOPES; },
       bad,
       {"ATTN_BIAS_SLOPES", "without a bias_type"}},
      {"odd head_dim in i4",
       [](Setup& s) {
         s.problem.head_dim = 7;
         s.segment.v_type = ATTN_I4;
       },
       bad,
       {"v: head_dim_v 7", "multiple of 2", "i4"}},
      {"half a byte",
       [](Setup& s) {
         s.segment.k_type = ATTN_I4;
         s.segment.k_stride = {80, 16, 9};
       },
       bad,
       {"k_stride.head is 9", "i4: multiples of 2"}},
      {"a stride that cuts a block",
       [](Setup& s) {
         s.problem.head_dim = 32;
         s.segment.k_type = ATTN_Q8_0;
         s.segment.k_stride = {320, 64, 40};
       },
       bad,
       {"k_stride.head is 40", "q8_0: multiples of 32"}},
      {"scale strides of a type without scales",
       [](Setup& s) { s.segment.v_scale_stride = {10, 2, 1}; },
       bad,
       {"v_scale_stride is given", "f32: 0", "only i8, i4, f8_e4m3fn_token, nvfp4 and mla_584"}},
      {"bias with packed q",
       [](Setup& s) {
         s.pack_q();
         s.problem.bias_type = ATTN_F32;
       },
       not_here,
       {"bias with packed q"}},
      {"bias stride",
       [](Setup& s) {
         s.problem.bias_type = ATTN_F32;
         s.problem.bias_stride[2] = -(int64_t{1} << 59);
       },
       bad,
       {"bias_stride.q is -576460752303423488", "2^60"}},
      {"block_q zero",
       [](Setup& s) {
         s.mask();
         s.problem.block_q = 0;
       },
       bad,
       {"block_q is 0"}},
      {"mask_heads",
       [](Setup& s) {
         s.mask();
         s.problem.mask_heads = 3;
       },
       bad,
       {"mask_heads is 3", "1, 4"}},
      {"mask_batch",
       [](Setup& s) {
         s.mask();
         s.problem.mask_batch = 7;
       },
       bad,
       {"mask_batch is 7", "1, 2"}},
      {"q_descale per block",
       [](Setup& s) { s.problem.q_descale = ATTN_DESCALE_BLOCK; },
       bad,
       {"q_descale is 3"}},
      {"descale_block_keys",
       [](Setup& s) {
         s.segment.k_descale = ATTN_DESCALE_BLOCK;
         s.segment.descale_block_keys = 32;
       },
       bad,
       {"descale_block_keys is 32", "64, 128"}},
      {"seqlens of packed",
       [](Setup& s) {
         s.pack_kv();
         s.segment.has_seqlens = 1;
       },
       bad,
       {"has_seqlens"}},
      {"has_seqlens 2", [](Setup& s) { s.segment.has_seqlens = 2; }, bad, {"has_seqlens is 2"}},
      {"page_size of padded", [](Setup& s) { s.segment.page_size = 16; }, bad, {"page_size is 16"}},
      {"page_size zero",
       [](Setup& s) {
         s.page_kv();
         s.segment.page_size = 0;
       },
       bad,
       {"page_size is 0"}},
      {"seqlen above pages",
       [](Setup& s) {
         s.page_kv();
         s.segment.seqlen = 9;
       },
       bad,
       {"seqlen is 9", "= 4"}},
      {"total_q of padded", [](Setup& s) { s.problem.total_q = 6; }, bad, {"total_q is 6"}},
      {"f64 on cpu",
       [](Setup& s) { s.problem.out_type = ATTN_F64; },
       not_here,
       {"no kernel on cpu", "out: f64; accepted: f32, f16, bf16, f8_e4m3fn, f8_e5m2"}},
      {"unknown kernel",
       [](Setup& s) { s.problem.kernel = "fwd_nothing"; },
       bad,
       {"fwd_nothing", "cpu_"}},
      {"kernel of another op",
       [](Setup& s) { s.problem.kernel = "merge_cpu"; },
       bad,
       {"merge_cpu", "forward"}},
      {"kernel of another backend",
       [](Setup& s) { s.problem.kernel = "reference"; },
       bad,
       {"reference", "cpu"}},
  };
  const attn::context context(ATTN_BACKEND_CPU);
  for (const Case& c : cases) {
    Setup s;
    c.spoil(s);
    attn_plan* plan = nullptr;
    expect(c, attn_plan_create(context.get(), &s.problem, &plan));
    CHECK(plan == nullptr);
    attn_plan_destroy(plan);
  }
}

TEST_CASE("wrong arguments of a run are refused with a sentence and touch nothing") {
  struct Run {
    const char* name;
    std::function<void(Setup&)> shape;  // before the plan
    std::function<void(Setup&)> spoil;  // before the run
    std::vector<const char*> words;
  };
  const auto same = [](Setup&) {};
  const std::vector<Run> runs = {
      {"q null",
       same,
       [](Setup& s) { s.args.q = nullptr; },
       {"q is NULL", "an address (the queries)"}},
      {"out null", same, [](Setup& s) { s.args.out = nullptr; }, {"out is NULL"}},
      {"k null", same, [](Setup& s) { s.segment_args.k = nullptr; }, {"k is NULL"}},
      {"v null", same, [](Setup& s) { s.segment_args.v = nullptr; }, {"v is NULL"}},
      {"segments null",
       same,
       [](Setup& s) { s.args.segments = nullptr; },
       {"args.segments is NULL"}},
      {"segment count",
       same,
       [](Setup& s) { s.args.num_segments = 2; },
       {"args.num_segments is 2", "1"}},
      {"struct_size", same, [](Setup& s) { s.args.struct_size = 1; }, {"args.struct_size is 1"}},
      {"misaligned q",
       same,
       [](Setup& s) { s.args.q = reinterpret_cast<char*>(s.q.data()) + 1; },
       {"q is at", "4-byte"}},
      {"misaligned lse",
       same,
       [](Setup& s) {
         s.args.lse = reinterpret_cast<float*>(reinterpret_cast<char*>(s.lse.data()) + 2);
       },
       {"lse is at"}},
      {"out is q", same, [](Setup& s) { s.args.out = s.q.data(); }, {"out is at", "overlaps q at"}},
      {"out is v", same, [](Setup& s) { s.args.out = s.v.data(); }, {"out is at", "overlaps v at"}},
      {"sinks not declared",
       same,
       [](Setup& s) { s.args.sinks = s.numbers.data(); },
       {"sinks is given", "ATTN_SINKS"}},
      {"sinks missing", [](Setup& s) { s.problem.flags = ATTN_SINKS; }, same, {"sinks is NULL"}},
      {"kv_begin not declared",
       same,
       [](Setup& s) { s.args.kv_begin = s.begin.data(); },
       {"kv_begin is given", "has_kv_begin"}},
      {"kv_begin missing",
       [](Setup& s) { s.begin_keys(); },
       [](Setup& s) { s.args.kv_begin = nullptr; },
       {"kv_begin is NULL", "accepted: an address (has_kv_begin)"}},
      {"kv_begin negative",
       [](Setup& s) { s.begin_keys(); },
       [](Setup& s) { s.begin[1] = -1; },
       {"kv_begin[1] is -1", "0 to"}},
      {"out is kv_begin",
       [](Setup& s) { s.begin_keys(); },
       [](Setup& s) { s.args.kv_begin = reinterpret_cast<const int32_t*>(s.args.out); },
       {"out is at", "overlaps kv_begin"}},
      {"causal_sequences not declared",
       same,
       [](Setup& s) { s.args.causal_sequences = s.begin.data(); },
       {"causal_sequences is given", "has_causal_sequences"}},
      {"tree not declared",
       same,
       [](Setup& s) { s.args.tree = s.tree.data(); },
       {"tree is given", "tree_keys"}},
      {"tree missing",
       [](Setup& s) { s.grow_tree(); },
       [](Setup& s) { s.args.tree = nullptr; },
       {"tree is NULL", "tree_keys"}},
      {"misaligned tree",
       [](Setup& s) { s.grow_tree(); },
       [](Setup& s) {
         s.args.tree = reinterpret_cast<uint64_t*>(reinterpret_cast<char*>(s.tree.data()) + 4);
       },
       {"tree is at", "8-byte"}},
      {"out is the tree",
       [](Setup& s) { s.grow_tree(); },
       [](Setup& s) { s.args.tree = reinterpret_cast<uint64_t*>(s.out.data()); },
       {"out is at", "overlaps tree at"}},
      {"slopes missing",
       [](Setup& s) { s.problem.flags = ATTN_ALIBI; },
       same,
       {"alibi_slopes is NULL"}},
      {"scales missing",
       [](Setup& s) { s.segment.k_type = ATTN_I8; },
       same,
       {"k_scale is NULL", "a type that has scales"}},
      {"scales not wanted",
       same,
       [](Setup& s) { s.segment_args.v_scale = s.numbers.data(); },
       {"v_scale is given", "a type that has scales"}},
      {"scales in out",
       [](Setup& s) { s.segment.v_type = ATTN_I4; },
       [](Setup& s) { s.segment_args.v_scale = s.out.data(); },
       {"out is at", "overlaps v_scale at"}},
      {"bias slopes missing",
       [](Setup& s) {
         s.problem.bias_type = ATTN_F16;
         s.problem.flags = ATTN_BIAS_SLOPES;
       },
       [](Setup& s) { s.args.bias = s.numbers.data(); },
       {"bias_slopes is NULL", "ATTN_BIAS_SLOPES"}},
      {"bias missing", [](Setup& s) { s.problem.bias_type = ATTN_F32; }, same, {"bias is NULL"}},
      {"descale missing",
       [](Setup& s) { s.segment.k_descale = ATTN_DESCALE_HEAD; },
       same,
       {"k_descale is NULL"}},
      {"kinds missing",
       [](Setup& s) { s.mask(); },
       [](Setup& s) { s.args.block_kinds = nullptr; },
       {"block_kinds is NULL"}},
      {"bits missing",
       [](Setup& s) {
         s.mask();
         s.problem.mask_partials = 1;
         s.args.block_index = s.index.data();
       },
       same,
       {"block_bits is NULL"}},
      {"lengths missing", [](Setup& s) { s.segment.has_seqlens = 1; }, same, {"seqlens is NULL"}},
      {"length negative",
       [](Setup& s) { s.segment.has_seqlens = 1; },
       [](Setup& s) {
         s.lengths[1] = -1;
         s.segment_args.seqlens = s.lengths.data();
       },
       {"seqlens[1] is -1", "0 to 5"}},
      {"length above",
       [](Setup& s) { s.segment.has_seqlens = 1; },
       [](Setup& s) {
         s.lengths[0] = 6;
         s.segment_args.seqlens = s.lengths.data();
       },
       {"seqlens[0] is 6", "0 to 5"}},
      {"cu_seqlens_q missing",
       [](Setup& s) { s.pack_q(); },
       [](Setup& s) { s.args.cu_seqlens_q = nullptr; },
       {"cu_seqlens_q is NULL"}},
      {"cu_seqlens_q decreases",
       [](Setup& s) { s.pack_q(); },
       [](Setup& s) { s.cu_q = {0, 3, 2}; },
       {"cu_seqlens_q[2] is 2", "decrease"}},
      {"cu_seqlens_q start",
       [](Setup& s) { s.pack_q(); },
       [](Setup& s) { s.cu_q = {1, 3, 6}; },
       {"cu_seqlens_q[0] is 1"}},
      {"cu_seqlens_q too long",
       [](Setup& s) { s.pack_q(); },
       [](Setup& s) { s.cu_q = {0, 4, 6}; },
       {"is 4", "up to 3"}},
      {"cu_seqlens past total",
       [](Setup& s) { s.pack_kv(); },
       [](Setup& s) {
         s.cu_kv = {0, 5, 11};
         s.segment_args.cu_seqlens = s.cu_kv.data();
       },
       {"cu_seqlens"}},
      {"table missing",
       [](Setup& s) { s.page_kv(); },
       [](Setup& s) { s.segment_args.block_table = nullptr; },
       {"block_table is NULL"}},
  };
  const attn::context context(ATTN_BACKEND_CPU);
  for (const Run& r : runs) {
    Setup s;
    r.shape(s);
    const attn::plan plan(context, s.problem);
    const attn::buffer workspace = plan.make_workspace(context);
    r.spoil(s);
    const std::vector<float> q = s.q, v = s.v;
    const Case c{r.name, {}, bad, r.words};
    expect(c, attn_run(plan.get(), &s.args, workspace.data(), workspace.bytes(), nullptr));
    for (float x : s.out) CHECK(std::isnan(x));
    CHECK(s.q == q);
    CHECK(s.v == v);
  }
}

TEST_CASE("workspace, stream, plan kind and handles") {
  const attn::context context(ATTN_BACKEND_CPU);
  Setup s;
  const attn::plan plan(context, s.problem);
  const attn::buffer workspace = plan.make_workspace(context);
  const auto run = [&](void* memory, size_t bytes, void* stream) {
    return attn_run(plan.get(), &s.args, memory, bytes, stream);
  };
  REQUIRE(plan.workspace() > 0);
  expect(Case{"small", {}, ATTN_WORKSPACE_TOO_SMALL, {"workspace has", "or more"}},
         run(workspace.data(), workspace.bytes() - 1, nullptr));
  expect(Case{"null", {}, bad, {"workspace is at"}}, run(nullptr, workspace.bytes(), nullptr));
  expect(Case{"misaligned", {}, bad, {"256-byte"}},
         run(static_cast<char*>(workspace.data()) + 8, workspace.bytes(), nullptr));
  expect(Case{"stream", {}, bad, {"stream is"}}, run(workspace.data(), workspace.bytes(), &s));
  expect(Case{"no plan", {}, bad, {"plan is NULL"}},
         attn_run(nullptr, &s.args, nullptr, 0, nullptr));
  expect(Case{"no args", {}, bad, {"args is NULL"}},
         attn_run(plan.get(), nullptr, workspace.data(), workspace.bytes(), nullptr));
  auto merge_args = attn::make<attn_merge_args>();
  expect(Case{"wrong plan", {}, bad, {"plan is for forward", "merge"}},
         attn_run_merge(plan.get(), &merge_args, nullptr));

  attn_plan* made = nullptr;
  expect(Case{"no context", {}, bad, {"context is NULL"}},
         attn_plan_create(nullptr, &s.problem, &made));
  expect(Case{"no problem", {}, bad, {"problem is NULL"}},
         attn_plan_create(context.get(), nullptr, &made));
  expect(Case{"no output", {}, bad, {"plan is NULL"}},
         attn_plan_create(context.get(), &s.problem, nullptr));
  attn_context* other = nullptr;
  expect(Case{"backend", {}, bad, {"backend is 42"}},
         attn_context_create(attn_backend(42), nullptr, &other));
  auto options = attn::make<attn_context_options>();
  for (attn_backend backend : {ATTN_BACKEND_CPU, ATTN_BACKEND_REFERENCE}) {
    options.device = 5;
    expect(Case{"device", {}, bad, {"options.device is 5", "0", attn_backend_string(backend)}},
           attn_context_create(backend, &options, &other));
  }
  options.device = 0;
  options.cpu_threads = -1;
  expect(Case{"threads", {}, bad, {"cpu_threads is -1"}},
         attn_context_create(ATTN_BACKEND_CPU, &options, &other));
  void* memory = nullptr;
  expect(Case{"alloc", {}, bad, {"bytes is 0"}}, attn_alloc(context.get(), 0, &memory));
  expect(Case{"huge", {}, ATTN_OUT_OF_MEMORY, {"bytes is"}},
         attn_alloc(context.get(), size_t{1} << 60, &memory));
  CHECK(std::string(attn_status_string(ATTN_WORKSPACE_TOO_SMALL)) == "workspace too small");
  CHECK(attn_launch_count("nothing") == 0);
  CHECK(attn_launch_count(nullptr) == 0);
}

TEST_CASE("a struct of a newer header is taken while its new fields are zero") {
  struct Newer {
    attn_problem problem;
    uint64_t later[4];
  };
  const attn::context context(ATTN_BACKEND_CPU);
  Setup s;
  Newer newer{s.problem, {}};
  newer.problem.struct_size = sizeof newer;
  attn_plan* plan = nullptr;
  CHECK(attn_plan_create(context.get(), &newer.problem, &plan) == ATTN_OK);
  attn_plan_destroy(plan);
  newer.problem.struct_size = offsetof(attn_problem, segments) + 4;  // half a pointer
  expect(Case{"cut", {}, bad, {"problem.struct_size is"}},
         attn_plan_create(context.get(), &newer.problem, &plan));
  newer.problem.struct_size = sizeof newer;
  newer.later[2] = 1;
  expect(Case{"newer", {}, bad, {"struct_size", "is set"}},
         attn_plan_create(context.get(), &newer.problem, &plan));
}

TEST_CASE("structs of a header without trees are taken") {
  for (const attn_backend backend : {ATTN_BACKEND_REFERENCE, ATTN_BACKEND_CPU}) {
    const attn::context context(backend);
    Setup s;
    s.mask();
    s.problem.struct_size = offsetof(attn_problem, tree_keys);
    s.args.struct_size = offsetof(attn_args, tree);
    s.problem.tree_keys = 77;  // not of the struct
    s.args.tree = s.tree.data();
    const attn::plan plan(context, s.problem);
    plan.run(s.args, plan.make_workspace(context));
    for (float x : s.out) CHECK(std::abs(x - 0.5f) < 1e-6f);
    auto shape = attn::make<attn_block_mask_shape>();
    shape.seqlen_q = 3, shape.seqlen_kv = 5;
    shape.block_q = shape.block_k = 4;
    attn_block_mask* mask = nullptr;
    REQUIRE(attn_block_mask_from_window(context.get(), &shape, -1, 0, 0, 0, &mask) == ATTN_OK);
    CHECK(attn_block_mask_apply(mask, &s.problem, &s.args) == ATTN_OK);
    attn_block_mask_destroy(mask);
  }
}

TEST_CASE("attn_check reads what attn_run does not") {
  const attn::context context(ATTN_BACKEND_CPU);
  {
    Setup s;
    s.page_kv();
    s.table[3] = 5;
    const attn::plan plan(context, s.problem);
    expect(Case{"page", {}, bad, {"block_table[1, 1] is 5", "0 to 4"}},
           attn_check(plan.get(), &s.args, nullptr));
  }
  {
    Setup s;
    s.mask();
    s.kinds[1] = 9;
    const attn::plan plan(context, s.problem);
    expect(Case{"kind", {}, bad, {"block_kinds", "is 9"}},
           attn_check(plan.get(), &s.args, nullptr));
    s.kinds[1] = ATTN_BLOCK_PARTIAL;
    expect(Case{"index", {}, bad, {"block_index"}}, attn_check(plan.get(), &s.args, nullptr));
    s.kinds[1] = ATTN_BLOCK_EMPTY;
    CHECK(attn_check(plan.get(), &s.args, nullptr) == ATTN_OK);
  }
}

namespace {

// An append of two tokens to each of two sequences, and what spoils it.
struct Append {
  attn_kv_append_problem problem = attn::make<attn_kv_append_problem>();
  attn_kv_append_args args = attn::make<attn_kv_append_args>();
  std::vector<float> x = std::vector<float>(2 * 2 * 2 * 32, 0.5f), q = x;
  std::vector<float> k = std::vector<float>(2 * 6 * 2 * 32, nan_value), v = k;
  std::vector<float> q_out = std::vector<float>(q.size(), nan_value);
  std::vector<float> table_cos = std::vector<float>(6 * 4, 1), table_sin = table_cos;
  std::vector<float> descale = {2};
  std::vector<int32_t> lengths = {1, 5}, after = {-7, -7}, offsets = {0, 1, 3},
                       table = {0, 1, 2, 3};
  std::vector<int64_t> slots = {11, -1, 0, 4};
  std::vector<float> pages;

  Append() {
    problem.batch = problem.heads_kv = problem.seqlen_new = 2;
    problem.head_dim = 32;
    problem.new_type = ATTN_F32;
    problem.segment = attn::make<attn_segment>();
    problem.segment.k_type = problem.segment.v_type = ATTN_F32;
    problem.segment.has_seqlens = 1;
    problem.segment.seqlen = 6;
    args.k_new = args.v_new = x.data();
    args.cache = attn::make<attn_segment_args>();
    args.cache.k = k.data();
    args.cache.v = v.data();
    args.cache.seqlens = lengths.data();
  }
  Append(const Append&) = delete;
  void pack() {
    problem.new_layout = ATTN_PACKED;
    problem.total_new = 4;
    args.cu_seqlens_new = offsets.data();
  }
  void page() {
    problem.segment.layout = ATTN_PAGED;
    problem.segment.page_size = 3;
    problem.segment.max_pages = 2;
    problem.segment.num_pages = 4;
    args.cache.block_table = table.data();
  }
  // One pool of five pages: v's pages are k's, one later.
  void pool() {
    page();
    pages.assign(5 * 3 * 2 * 32, nan_value);
    args.cache.k = pages.data();
    args.cache.v = pages.data() + 3 * 2 * 32;
    table = {0, 2, 2, 0};
    lengths = {1, 0};
    problem.seqlen_new = 1;
  }
  void slot() {
    page();
    problem.segment.max_pages = problem.segment.has_seqlens = problem.segment.seqlen = 0;
    args.cache.block_table = args.cache.seqlens = nullptr;
    problem.has_slots = 1;
    args.slot_mapping = slots.data();
  }
  void rotate() {
    problem.rotary_dim = 8;
    problem.rotary_positions = 6;
    problem.heads_q = 2;
    args.rotary_cos = table_cos.data();
    args.rotary_sin = table_sin.data();
    args.q = q.data();
    args.q_out = q_out.data();
  }
  void advance() {
    problem.advance_seqlens = 1;
    args.seqlens_out = after.data();
  }
};

}  // namespace

TEST_CASE("a good append runs on reference and cpu") {
  for (attn_backend backend : {ATTN_BACKEND_REFERENCE, ATTN_BACKEND_CPU}) {
    const attn::context context(backend);
    Append s;
    s.page();
    s.rotate();
    s.advance();
    s.problem.segment.v_descale = ATTN_DESCALE_TENSOR;
    s.args.cache.v_descale = s.descale.data();
    const attn::plan plan(context, s.problem);
    CHECK(plan.workspace() == 0);
    plan.run(s.args);
    CHECK(s.after == std::vector<int32_t>{3, 6});
    CHECK(s.k[1 * 64 + 0] == 0.0f);  // 0.5 * 1 - 0.5 * 1
    CHECK(s.k[1 * 64 + 4] == 1.0f);
    CHECK(s.k[1 * 64 + 8] == 0.5f);
    CHECK(s.v[1 * 64] == 0.25f);
    CHECK(std::isnan(s.k[0]));
    CHECK(s.q_out[4] == 1.0f);
    CHECK(std::isnan(s.q_out[3 * 64]));  // of the token without room
  }
}

TEST_CASE("an append by slots writes where they say and skips negative ones") {
  for (attn_backend backend : {ATTN_BACKEND_REFERENCE, ATTN_BACKEND_CPU}) {
    const attn::context context(backend);
    Append s;
    s.slot();
    for (size_t n = 0; n < s.x.size(); ++n) s.x[n] = float(n / 64);  // the token
    const attn::plan plan(context, s.problem);
    plan.run(s.args);
    for (int64_t slot = 0; slot < 12; ++slot) {
      const float want = slot == 11 ? 0.0f : slot == 0 ? 2.0f : slot == 4 ? 3.0f : nan_value;
      for (const std::vector<float>* x : {&s.k, &s.v})
        for (int64_t n = 0; n < 64; ++n) {
          const float got = (*x)[size_t(slot * 64 + n)];
          CHECK((got == want || (std::isnan(got) && std::isnan(want))));
        }
    }
  }
}

TEST_CASE("k and v of a cache may be views of one pool of pages") {
  for (attn_backend backend : {ATTN_BACKEND_REFERENCE, ATTN_BACKEND_CPU}) {
    const attn::context context(backend);
    Append s;
    s.pool();
    const attn::plan plan(context, s.problem);
    plan.run(s.args);
    // Places 1 of page 0 and 0 of page 2, and of the pages after them.
    for (int64_t place = 0; place < 15; ++place)
      CHECK(std::isnan(s.pages[size_t(place * 64)]) !=
            (place == 1 || place == 4 || place == 6 || place == 9));
  }
}

TEST_CASE("kernels of devices take kv_begin and slots, and decline causal_sequences") {
  const auto takes = [](const attn::Kernel& kernel, attn::Feature feature) {
    return (kernel.limits.features & feature) != 0;
  };
  for (const attn::Kernel& kernel : attn::all_kernels()) {
    if (kernel.backend != ATTN_BACKEND_CUDA && kernel.backend != ATTN_BACKEND_HIP) continue;
    if (kernel.composed == attn::Composed::shards) continue;  // takes what its parts take
    INFO(kernel.name);
    const std::string_view name = kernel.name;
    // Those that read K and V without a prepare launch, which zeroes what is hidden, decline it,
    // those over latent caches that are of 64 rows, of codes or of pages of any size, and those
    // with two warpgroups.
    bool declines = name.ends_with("_direct");
    for (const char* part : {"_r64", "_656", "_e4m3", "_pages"})
      declines |= name.starts_with("mla_") && name.find(part) != name.npos;
    for (const char* tile : {"_d64_r64", "_d128_r64"})
      declines |= name.starts_with("decode_sm90_") && name.ends_with(tile);
    CHECK(takes(kernel, attn::feature_kv_begin) ==
          (kernel.op == attn::Op::forward && kernel.composed == attn::Composed::no && !declines));
    CHECK(takes(kernel, attn::feature_slots) == (kernel.op == attn::Op::kv_append));
    CHECK(!takes(kernel, attn::feature_causal_sequences));
  }
  Setup s;
  s.problem.head_dim = 64;
  s.problem.q_type = s.segment.k_type = s.segment.v_type = ATTN_F16;
  attn::Problem plain, padded;
  REQUIRE(attn::make_problem(&s.problem, &plain).ok());
  CHECK(attn::test::chosen(plain).find("_f16_d64") != std::string::npos);
  s.begin_keys();
  REQUIRE(attn::make_problem(&s.problem, &padded).ok());
  CHECK(attn::test::chosen(padded) == attn::test::chosen(plain));
  Append a;
  a.slot();
  attn::KvAppendProblem slots;
  REQUIRE(attn::make_kv_append_problem(&a.problem, &slots).ok());
  CHECK(attn::test::chosen(slots) == "kv_append_cuda");
}

TEST_CASE("an append by the struct of an older header neither rotates nor advances") {
  const attn::context context(ATTN_BACKEND_CPU);
  Append s;
  s.problem.struct_size = offsetof(attn_kv_append_problem, advance_seqlens);
  s.problem.advance_seqlens = s.problem.rotary_interleaved = 77;
  s.args.struct_size = offsetof(attn_kv_append_args, rotary_cos);
  s.args.q_out = s.args.seqlens_out = s.lengths.data();
  const attn::plan plan(context, s.problem);
  plan.run(s.args);
  CHECK(s.k[1 * 64] == 0.5f);
  CHECK(s.lengths == std::vector<int32_t>{1, 5});
}

// What such a caller passes: the struct with the held one cut short, all behind it moved up.
template <class Outer, class Inner>
std::vector<uint64_t> of_older_header(const Outer& outer, size_t at, size_t inner_size) {
  std::vector<uint64_t> words((sizeof(Outer) - sizeof(Inner) + inner_size) / 8);
  auto* to = reinterpret_cast<char*>(words.data());
  const auto* from = reinterpret_cast<const char*>(&outer);
  std::memcpy(to, from, at + inner_size);
  std::memcpy(to + at + inner_size, from + at + sizeof(Inner), sizeof(Outer) - at - sizeof(Inner));
  const size_t size = words.size() * 8;
  std::memcpy(to, &size, sizeof size);
  std::memcpy(to + at, &inner_size, sizeof inner_size);
  return words;
}

TEST_CASE("an append whose segment is that of an older header is taken") {
  const attn::context context(ATTN_BACKEND_CPU);
  Append s;
  s.rotate();
  s.advance();
  const auto problem = of_older_header<attn_kv_append_problem, attn_segment>(
      s.problem, offsetof(attn_kv_append_problem, segment), offsetof(attn_segment, k_scale_stride));
  const auto args = of_older_header<attn_kv_append_args, attn_segment_args>(
      s.args, offsetof(attn_kv_append_args, cache), offsetof(attn_segment_args, k_scale));
  const attn::plan plan(context, reinterpret_cast<const attn_kv_append_problem&>(problem[0]));
  plan.run(reinterpret_cast<const attn_kv_append_args&>(args[0]));
  CHECK(s.after == std::vector<int32_t>{3, 6});
  CHECK(s.k[1 * 64] == 0.0f);  // rotated: 0.5 * 1 - 0.5 * 1
  CHECK(s.v[1 * 64] == 0.5f);
  CHECK(s.q_out[4] == 1.0f);
}

TEST_CASE("a wrong append is refused with a sentence") {
  struct Wrong {
    const char* name;
    std::function<void(Append&)> spoil;
    std::vector<const char*> words;
  };
  const std::vector<Wrong> problems = {
      {"batch", [](Append& s) { s.problem.batch = -1; }, {"batch is -1", "0 to"}},
      {"heads_kv", [](Append& s) { s.problem.heads_kv = 0; }, {"heads_kv is 0"}},
      {"head_dim", [](Append& s) { s.problem.head_dim = 0; }, {"head_dim is 0"}},
      {"head_dim_v", [](Append& s) { s.problem.head_dim_v = -8; }, {"head_dim_v is -8"}},
      {"seqlen_new", [](Append& s) { s.problem.seqlen_new = -2; }, {"seqlen_new is -2"}},
      {"new_type",
       [](Append& s) { s.problem.new_type = ATTN_F8_E5M2; },
       {"new_type is f8_e5m2", "f32, f16, bf16"}},
      {"new_layout",
       [](Append& s) { s.problem.new_layout = ATTN_PAGED; },
       {"new_layout is 2", "packed (1)"}},
      {"total of padded",
       [](Append& s) { s.problem.total_new = 4; },
       {"total_new is 4", "padded new tokens: 0"}},
      {"total of no batch",
       [](Append& s) {
         s.pack();
         s.problem.batch = 0;
       },
       {"total_new is 4", "0 to 0"}},
      {"new stride",
       [](Append& s) { s.problem.v_new_stride = {0, int64_t{1} << 61, 1}; },
       {"v_new_stride.seq"}},
      {"rows without memory",
       [](Append& s) {
         s.problem.batch = s.problem.seqlen_new = s.problem.heads_kv = 1 << 30;
         s.problem.k_new_stride = s.problem.v_new_stride = {0, 0, 1};
       },
       {"new tokens of 1073741824 heads", "2^60"}},
      {"segment size",
       [](Append& s) { s.problem.segment.struct_size = 0; },
       {"segment.struct_size is 0"}},
      {"segment longer than what holds it",
       [](Append& s) { s.problem.segment.struct_size = sizeof s.problem; },
       {"segment.struct_size is", "up to", "problem.struct_size is"}},
      {"packed cache",
       [](Append& s) { s.problem.segment.layout = ATTN_PACKED; },
       {"layout is packed (1)", "paged (2)"}},
      {"no lengths", [](Append& s) { s.problem.segment.has_seqlens = 0; }, {"has_seqlens is 0"}},
      {"page_size",
       [](Append& s) {
         s.page();
         s.problem.segment.page_size = 0;
       },
       {"page_size is 0", "1 to"}},
      {"capacity",
       [](Append& s) {
         s.page();
         s.problem.segment.seqlen = 7;
       },
       {"seqlen is 7", "max_pages * page_size = 6"}},
      {"k_type", [](Append& s) { s.problem.segment.k_type = ATTN_F64; }, {"k_type is f64", "q4_0"}},
      {"blocks",
       [](Append& s) {
         s.problem.head_dim = 40;
         s.problem.segment.k_type = ATTN_Q8_0;
       },
       {"head_dim 40", "multiple of 32", "q8_0"}},
      {"scales overlap themselves",
       [](Append& s) {
         s.problem.segment.k_type = ATTN_I8;
         s.problem.segment.k_scale_stride = {1, 2, 1};
       },
       {"k_scale_stride.head is 1", "overlap"}},
      {"cache overlaps itself",
       [](Append& s) { s.problem.segment.v_stride = {0, 64, 32}; },
       {"v_stride.batch is 0", "overlap"}},
      {"descale",
       [](Append& s) { s.problem.segment.k_descale = ATTN_DESCALE_BLOCK; },
       {"descale_block_keys is 0", "64, 128"}},
      {"advance",
       [](Append& s) { s.problem.advance_seqlens = 2; },
       {"advance_seqlens is 2", "0, 1"}},
      {"odd rotary_dim",
       [](Append& s) {
         s.rotate();
         s.problem.rotary_dim = 7;
       },
       {"rotary_dim is 7", "even", "head_dim = 32"}},
      {"rotary_dim above",
       [](Append& s) {
         s.rotate();
         s.problem.rotary_dim = 34;
       },
       {"rotary_dim is 34", "head_dim = 32"}},
      {"interleaved",
       [](Append& s) {
         s.rotate();
         s.problem.rotary_interleaved = -1;
       },
       {"rotary_interleaved is -1"}},
      {"few positions",
       [](Append& s) {
         s.rotate();
         s.problem.rotary_positions = 5;
       },
       {"rotary_positions is 5", "capacity 6"}},
      {"q without rotation",
       [](Append& s) { s.problem.heads_q = 2; },
       {"heads_q 2", "without rotary_dim: 0"}},
      {"heads_q",
       [](Append& s) {
         s.rotate();
         s.problem.heads_q = -1;
       },
       {"heads_q is -1"}},
      {"q_out overlaps itself",
       [](Append& s) {
         s.rotate();
         s.problem.q_out_stride = {128, 64, 16};
       },
       {"q_out_stride.head is 16", "overlap"}},
      {"has_slots", [](Append& s) { s.problem.has_slots = -1; }, {"has_slots is -1", "0, 1"}},
      {"slots of a padded cache",
       [](Append& s) { s.problem.has_slots = 1; },
       {"layout is 0", "has_slots: paged (2)"}},
      {"slots with lengths",
       [](Append& s) {
         s.slot();
         s.problem.segment.has_seqlens = 1;
       },
       {"has_seqlens is 1", "has_slots: 0"}},
      {"slots that advance",
       [](Append& s) {
         s.slot();
         s.advance();
       },
       {"advance_seqlens is 1", "has_slots: 0"}},
      {"slots with rotation",
       [](Append& s) {
         s.slot();
         s.rotate();
       },
       {"rotary_dim is 8", "has_slots: 0"}},
      {"slots of packed tokens",
       [](Append& s) {
         s.slot();
         s.pack();
       },
       {"new_layout is 1", "has_slots: padded (0)"}},
      {"slots with block descales",
       [](Append& s) {
         s.slot();
         s.problem.segment.v_descale = ATTN_DESCALE_BLOCK;
         s.problem.segment.descale_block_keys = 64;
       },
       {"v_descale is block (3)", "head (2)"}},
      {"kernel",
       [](Append& s) { s.problem.kernel = "quantize_cpu"; },
       {"quantize_cpu", "not a kv_append kernel", "kv_append_cpu"}},
  };
  const attn::context context(ATTN_BACKEND_CPU);
  attn_plan* made = nullptr;
  for (const Wrong& w : problems) {
    Append s;
    w.spoil(s);
    expect(Case{w.name, {}, bad, w.words},
           attn_plan_create_kv_append(context.get(), &s.problem, &made));
    CHECK(made == nullptr);
  }

  const auto plain = [](Append&) {};
  const auto all = [](Append& s) {
    s.rotate();
    s.advance();
  };
  const auto packed = [](Append& s) { s.pack(); };
  const auto paged = [](Append& s) { s.page(); };
  struct Run {
    const char* name;
    std::function<void(Append&)> shape, spoil;
    std::vector<const char*> words;
  };
  const std::vector<Run> runs = {
      {"k_new", plain, [](Append& s) { s.args.k_new = nullptr; }, {"k_new is NULL"}},
      {"v", plain, [](Append& s) { s.args.cache.v = nullptr; }, {"v is NULL"}},
      {"cache size",
       plain,
       [](Append& s) { s.args.cache.struct_size = 8; },
       {"args.cache.struct_size is 8"}},
      {"seqlens", plain, [](Append& s) { s.args.cache.seqlens = nullptr; }, {"seqlens is NULL"}},
      {"length negative",
       plain,
       [](Append& s) { s.lengths[0] = -1; },
       {"seqlens[0] is -1", "0 to 6"}},
      {"length above", plain, [](Append& s) { s.lengths[1] = 7; }, {"seqlens[1] is 7", "0 to 6"}},
      {"offsets missing",
       packed,
       [](Append& s) { s.args.cu_seqlens_new = nullptr; },
       {"cu_seqlens_new is NULL", "packed"}},
      {"offsets not wanted",
       plain,
       [](Append& s) { s.args.cu_seqlens_new = s.offsets.data(); },
       {"cu_seqlens_new is given", "packed"}},
      {"offsets decrease",
       packed,
       [](Append& s) { s.offsets = {0, 2, 1}; },
       {"cu_seqlens_new[2] is 1", "decrease"}},
      {"offsets too far", packed, [](Append& s) { s.offsets = {0, 3, 4}; }, {"is 3", "up to 2"}},
      {"offsets past total",
       packed,
       [](Append& s) {
         s.problem.total_new = 0;
         s.offsets = {0, 2, 5};
       },
       {"cu_seqlens_new"}},
      {"table",
       paged,
       [](Append& s) { s.args.cache.block_table = nullptr; },
       {"block_table is NULL"}},
      {"page", paged, [](Append& s) { s.table[3] = 4; }, {"block_table[1, 1] is 4", "0 to 3"}},
      {"page negative", paged, [](Append& s) { s.table[0] = -1; }, {"block_table[0, 0] is -1"}},
      {"cos",
       all,
       [](Append& s) { s.args.rotary_cos = nullptr; },
       {"rotary_cos is NULL", "rotary_dim"}},
      {"sin",
       all,
       [](Append& s) { s.args.rotary_sin = nullptr; },
       {"rotary_sin is NULL", "rotary_dim"}},
      {"tables not wanted",
       plain,
       [](Append& s) { s.args.rotary_sin = s.table_sin.data(); },
       {"rotary_sin is given", "rotary_dim"}},
      {"q", all, [](Append& s) { s.args.q = nullptr; }, {"q is NULL", "heads_q"}},
      {"q_out", all, [](Append& s) { s.args.q_out = nullptr; }, {"q_out is NULL", "heads_q"}},
      {"q not wanted", plain, [](Append& s) { s.args.q = s.q.data(); }, {"q is given", "heads_q"}},
      {"seqlens_out",
       all,
       [](Append& s) { s.args.seqlens_out = nullptr; },
       {"seqlens_out is NULL", "advance_seqlens"}},
      {"seqlens_out not wanted",
       plain,
       [](Append& s) { s.args.seqlens_out = s.after.data(); },
       {"seqlens_out is given"}},
      {"descale not wanted",
       plain,
       [](Append& s) { s.args.cache.k_descale = s.descale.data(); },
       {"k_descale is given"}},
      {"scales missing",
       [](Append& s) { s.problem.segment.v_type = ATTN_I4; },
       [](Append&) {},
       {"v_scale is NULL", "a type that has scales"}},
      {"slots missing",
       [](Append& s) { s.slot(); },
       [](Append& s) { s.args.slot_mapping = nullptr; },
       {"slot_mapping is NULL", "has_slots"}},
      {"slots not wanted",
       plain,
       [](Append& s) { s.args.slot_mapping = s.slots.data(); },
       {"slot_mapping is given", "has_slots"}},
      {"slot above",
       [](Append& s) { s.slot(); },
       [](Append& s) { s.slots[3] = 12; },
       {"slot_mapping[1, 1] is 12", "up to 11", "skip"}},
      {"a page of keys and of values",
       [](Append& s) { s.pool(); },
       [](Append& s) { s.table = {0, 2, 1, 0}; },
       {"page 1 of k and page 0 of v", "same memory"}},
      {"half a page apart",
       [](Append& s) { s.pool(); },
       [](Append& s) { s.args.cache.v = s.pages.data() + 2 * 32; },
       {"k is at", "overlaps v"}},
      {"one page array",
       [](Append& s) { s.pool(); },
       [](Append& s) { s.args.cache.v = s.args.cache.k; },
       {"k is at", "overlaps v"}},
      {"k over v",
       plain,
       [](Append& s) { s.args.cache.v = s.k.data() + 1; },
       {"k is at", "overlaps v"}},
      {"k over k_new",
       plain,
       [](Append& s) { s.args.k_new = s.k.data(); },
       {"k is at", "overlaps k_new"}},
      {"q_out beside q",
       all,
       [](Append& s) { s.args.q_out = s.q.data() + 1; },
       {"q_out is at", "overlaps q"}},
      {"seqlens_out beside seqlens",
       all,
       [](Append& s) { s.args.seqlens_out = s.lengths.data() + 1; },
       {"seqlens_out is at", "overlaps seqlens"}},
  };
  for (const Run& r : runs) {
    Append s;
    r.shape(s);
    const attn::plan plan(context, s.problem);
    r.spoil(s);
    expect(Case{r.name, {}, bad, r.words}, attn_run_kv_append(plan.get(), &s.args, nullptr));
    for (const std::vector<float>* x : {&s.k, &s.v, &s.q_out})
      for (float value : *x) CHECK(std::isnan(value));
    CHECK(s.after == std::vector<int32_t>{-7, -7});
  }
}

TEST_CASE("quantize refuses a descale that is no finite number on the host") {
  for (attn_backend backend : {ATTN_BACKEND_REFERENCE, ATTN_BACKEND_CPU}) {
    const attn::context context(backend);
    auto p = attn::make<attn_quantize_problem>();
    p.batch = p.seqlen = 1;
    p.heads = 2;
    p.head_dim = 4;
    p.src_type = ATTN_F32;
    p.dst_type = ATTN_F8_E4M3FN;
    p.kind = ATTN_DESCALE_HEAD;
    p.scale = ATTN_SCALE_GIVEN;
    const attn::plan plan(context, p);
    const float src[8] = {};
    uint8_t dst[8];
    float descale[2] = {1, NAN};
    auto args = attn::make<attn_quantize_args>();
    args.src = src;
    args.dst = dst;
    args.descale = descale;
    for (float wrong : {float(NAN), float(INFINITY)}) {
      descale[1] = wrong;
      expect(Case{"descale", {}, bad, {"descale[1] is", "accepted: finite values"}},
             attn_run_quantize(plan.get(), &args, nullptr));
    }
    descale[1] = -1;
    CHECK(attn_run_quantize(plan.get(), &args, nullptr) == ATTN_OK);
  }
}

TEST_CASE("info and explain are JSON texts of the size they say") {
  const std::string info = attn::info();
  for (const char* word :
       {"\"reference\"", "\"cpu\"", "\"cuda\"", "\"hip\"", "\"reason\"", "\"kernels\""})
    CHECK(info.find(word) != std::string::npos);
  char small[8];
  size_t size = 0;
  CHECK(attn_info(small, sizeof small, &size) == ATTN_OK);
  CHECK(size == info.size() + 1);
  CHECK(std::strlen(small) == sizeof small - 1);

  const attn::context context(ATTN_BACKEND_CPU);
  Setup s;
  const attn::plan plan(context, s.problem);
  const std::string text = attn::explain(context, s.problem);
  CHECK(text.find(std::string("{\"kernel\":\"") + plan.kernel() + "\"") == 0);
  s.problem.out_type = ATTN_F64;
  const std::string none = attn::explain(context, s.problem);
  CHECK(none.find("{\"kernel\":null") == 0);
  CHECK(none.find("out type f64") != std::string::npos);
}
