// Latent caches, lists of keys and formats of servers' caches: what is refused, with which
// sentence, and that device kernels decline with a reason. tests/python/test_mla.py has the
// numbers.
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "attn/attn.hpp"
#include "bad_input.h"
#include "catalog/catalog.h"
#include "catch.h"

namespace {

// A latent cache of 2 sequences of 5 keys of 16 elements, of which V is the first 12, and lists of
// 3 keys for each of 2 queries. Each case spoils one thing.
struct Setup {
  attn_segment segment = attn::make<attn_segment>();
  attn_problem problem = attn::make<attn_problem>();
  attn_segment_args segment_args = attn::make<attn_segment_args>();
  attn_args args = attn::make<attn_args>();
  std::vector<float> q = std::vector<float>(2 * 2 * 4 * 16, 0.5f);
  std::vector<float> k = std::vector<float>(2 * 5 * 16, 0.25f);
  std::vector<float> out = std::vector<float>(2 * 2 * 4 * 12, -1.0f);
  std::vector<float> numbers = std::vector<float>(256, 1.0f);
  std::vector<int32_t> list = {0, 4, -1, 1, 1, 2, 99, -7, 3, 0, 1, 2}, lengths = {3, 3, 3, 0},
                       table = {0, 1, 2, 0, 1, 2}, cu = {0, 2, 4};
  std::vector<uint64_t> tree = std::vector<uint64_t>(16, 0);

  Setup() {
    segment.k_type = ATTN_F32;
    segment.seqlen = 5;
    segment.v_in_k = 1;
    segment.list_size = 3;
    problem.batch = 2;
    problem.heads_q = 4;
    problem.heads_kv = 1;
    problem.head_dim = 16;
    problem.head_dim_v = 12;
    problem.seqlen_q = 2;
    problem.q_type = ATTN_F32;
    problem.num_segments = 1;
    problem.segments = &segment;
    segment_args.k = k.data();
    segment_args.list = list.data();
    args.q = q.data();
    args.out = out.data();
    args.num_segments = 1;
    args.segments = &segment_args;
  }
  Setup(const Setup&) = delete;

  void page() {
    segment.layout = ATTN_PAGED;
    segment.seqlen = 0;
    segment.page_size = 2;
    segment.max_pages = 3;
    segment.num_pages = 5;
    segment_args.block_table = table.data();
  }
  void pool() {
    page();
    segment.max_pages = 0;
    segment.list_of_pool = segment.no_positions = 1;
    segment_args.block_table = nullptr;
  }
  void no_list() {
    segment.list_size = 0;
    segment_args.list = nullptr;
  }
};

using Case = attn::test::BadInput<Setup>;
using attn::test::expect;
constexpr attn_status bad = ATTN_INVALID_ARGUMENT;

// Of attn_plan_create.
const Case problems[] = {
    {"v_in_k that is no flag",
     [](Setup& s) { s.segment.v_in_k = 2; },
     bad,
     {"v_in_k is 2", "0, 1"}},
    {"a v of another type",
     [](Setup& s) { s.segment.v_type = ATTN_F16; },
     bad,
     {"v_type is f16", "none, or f32"}},
    {"strides of v",
     [](Setup& s) { s.segment.v_stride = {80, 16, 12}; },
     bad,
     {"v_stride is (80, 16, 12)", "v_in_k", "that of k"}},
    {"more columns than k has",
     [](Setup& s) { s.problem.head_dim_v = 17; },
     bad,
     {"head_dim_v is 17", "head_dim = 16"}},
    {"a descale of v",
     [](Setup& s) { s.segment.v_descale = ATTN_DESCALE_TENSOR; },
     bad,
     {"v_descale is 1", "none (0), or k_descale"}},
    {"half a block",
     [](Setup& s) {
       s.segment.k_type = ATTN_NVFP4;
       s.problem.head_dim = 32;
     },
     bad,
     {"head_dim_v 12", "multiple of 16 (nvfp4)"}},
    {"no positions that is no flag",
     [](Setup& s) { s.segment.no_positions = -1; },
     bad,
     {"no_positions is -1"}},
    {"a list of no size",
     [](Setup& s) { s.segment.list_size = -3; },
     bad,
     {"list_size is -3", "1 to"}},
    {"fields of a list without one",
     [](Setup& s) {
       s.no_list();
       s.segment.list_block = 64;
     },
     bad,
     {"list_block is 64", "without list_size: 0"}},
    {"blocks of 32",
     [](Setup& s) { s.segment.list_block = 32; },
     bad,
     {"list_block is 32", "1, 64, 128"}},
    {"a list for 2 queries",
     [](Setup& s) { s.segment.list_queries = 2; },
     bad,
     {"list_queries is 2", "1, 64, 128"}},
    {"lists wider than any segment",
     [](Setup& s) {
       s.segment.list_size = int64_t{1} << 30;
       s.segment.list_block = 64;
     },
     bad,
     {"list_size is 1073741824", "accepted: 1 to"}},
    {"lists of query heads",
     [](Setup& s) { s.segment.list_heads = 4; },
     bad,
     {"list_heads is 4; accepted: 1 (heads_kv)"}},
    {"lists of packed keys",
     [](Setup& s) {
       s.segment.layout = ATTN_PACKED;
       s.segment.total = 10;
     },
     bad,
     {"list_size is 3", "packed", "padded (0), paged (2)"}},
    {"lists of 64 packed queries",
     [](Setup& s) {
       s.problem.q_layout = ATTN_PACKED;
       s.problem.total_q = 4;
       s.segment.list_queries = 64;
     },
     bad,
     {"list_queries is 64", "packed q: 1"}},
    {"a pool that is padded",
     [](Setup& s) { s.segment.list_of_pool = s.segment.no_positions = 1; },
     bad,
     {"layout is 0", "list_of_pool: 2"}},
    {"a pool with positions",
     [](Setup& s) {
       s.pool();
       s.segment.no_positions = 0;
     },
     bad,
     {"no_positions is 0", "list_of_pool: 1"}},
    {"a pool of blocks",
     [](Setup& s) {
       s.pool();
       s.segment.list_block = 64;
     },
     bad,
     {"list_block is 64", "list_of_pool: 1"}},
    {"a pool with a table",
     [](Setup& s) {
       s.pool();
       s.segment.max_pages = 3;
     },
     bad,
     {"max_pages is 3", "list_of_pool: 0"}},
    {"a pool with descales of blocks of keys",
     [](Setup& s) {
       s.pool();
       s.segment.k_descale = ATTN_DESCALE_BLOCK;
       s.segment.descale_block_keys = 64;
     },
     bad,
     {"k_descale is block (3)", "list_of_pool"}},
    {"a bias",
     [](Setup& s) { s.problem.bias_type = ATTN_F32; },
     bad,
     {"bias_type is f32", "lists of keys"}},
    {"a block mask",
     [](Setup& s) {
       s.problem.flags = ATTN_BLOCK_MASK;
       s.problem.block_q = s.problem.block_k = 64;
     },
     bad,
     {"ATTN_BLOCK_MASK", "lists of keys"}},
    {"ALiBi without positions",
     [](Setup& s) {
       s.no_list();
       s.segment.no_positions = 1;
       s.problem.flags = ATTN_ALIBI;
     },
     bad,
     {"ATTN_ALIBI", "no_positions"}},
    {"a tree", [](Setup& s) { s.problem.tree_keys = 4; }, bad, {"tree_keys is 4", "lists of keys"}},
    {"padding on the left",
     [](Setup& s) { s.problem.has_kv_begin = 1; },
     bad,
     {"has_kv_begin is 1"}},
    {"rows of 656 bytes with another head_dim",
     [](Setup& s) { s.segment.k_type = ATTN_MLA_656; },
     bad,
     {"head_dim 16", "multiple of 576 (mla_656)"}},
    {"two rows of 656 bytes for a key",
     [](Setup& s) {
       s.segment.k_type = ATTN_MLA_656;
       s.problem.head_dim = s.problem.head_dim_v = 1152;
     },
     bad,
     {"k: head_dim is 1152", "accepted for mla_656: 576"}},
    {"two rows of mla_584 for a value",
     [](Setup& s) {
       s.segment.v_in_k = 0;
       s.segment.v_type = ATTN_MLA_584;
       s.problem.head_dim_v = 1024;
     },
     bad,
     {"v: head_dim_v is 1024", "accepted for mla_584: 512"}},
    {"a row of 656 bytes that is no whole number",
     [](Setup& s) {
       s.segment.k_type = ATTN_MLA_656;
       s.problem.head_dim = 576;
       s.segment.k_stride = {2880, 600, 576};
     },
     bad,
     {"k_stride", "600", "multiples of 576"}},
    {"scales of a type that has none",
     [](Setup& s) { s.segment.k_scale_stride = {5, 1, 1}; },
     bad,
     {"k_scale_stride is given", "i8, i4, f8_e4m3fn_token, nvfp4 and mla_584"}},
};

// Of attn_run.
const Case runs[] = {
    {"v", [](Setup& s) { s.segment_args.v = s.k.data(); }, bad, {"v is given", "v_in_k: NULL"}},
    {"a descale of v",
     [](Setup& s) { s.segment_args.v_descale = s.numbers.data(); },
     bad,
     {"v_descale is given", "v_in_k: NULL"}},
    {"no list",
     [](Setup& s) { s.segment_args.list = nullptr; },
     bad,
     {"list is NULL", "list_size"}},
    {"lengths that nobody reads",
     [](Setup& s) { s.segment_args.list_lengths = s.lengths.data(); },
     bad,
     {"list_lengths is given", "has_list_lengths"}},
    {"a list where the result is",
     [](Setup& s) { s.segment_args.list = reinterpret_cast<const int32_t*>(s.out.data()); },
     bad,
     {"out", "list"}},
};

}  // namespace

TEST_CASE("mla: bad problems") {
  for (const attn_backend backend : {ATTN_BACKEND_REFERENCE, ATTN_BACKEND_CPU}) {
    const attn::context context(backend);
    for (const Case& c : problems) {
      Setup s;
      c.spoil(s);
      attn_plan* plan = nullptr;
      expect(c, attn_plan_create(context.get(), &s.problem, &plan));
      attn_plan_destroy(plan);
    }
  }
}

TEST_CASE("mla: bad runs") {
  for (const attn_backend backend : {ATTN_BACKEND_REFERENCE, ATTN_BACKEND_CPU}) {
    const attn::context context(backend);
    for (const Case& c : runs) {
      Setup s;
      const attn::plan plan(context, s.problem);
      const attn::buffer workspace = plan.make_workspace(context);
      c.spoil(s);
      expect(c, attn_run(plan.get(), &s.args, workspace.data(), workspace.bytes(), nullptr));
    }
    Setup s;
    s.segment.has_list_lengths = 1;
    const attn::plan plan(context, s.problem);
    const attn::buffer workspace = plan.make_workspace(context);
    s.segment_args.list_lengths = s.lengths.data();
    plan.run(s.args, workspace);
    s.lengths[2] = 4;
    const Case c = {
        "a length above the list's", [](Setup&) {}, bad, {"list_lengths[2] is 4", "0 to 3"}};
    expect(c, attn_run(plan.get(), &s.args, workspace.data(), workspace.bytes(), nullptr));
  }
}

// Rows of equal keys: a query's result is that row, whatever its list, and 0 without a key.
TEST_CASE("mla: lists of padded, paged and pooled keys run") {
  for (const attn_backend backend : {ATTN_BACKEND_REFERENCE, ATTN_BACKEND_CPU}) {
    const attn::context context(backend);
    for (const auto& change : std::vector<std::function<void(Setup&)>>{
             [](Setup&) {}, [](Setup& s) { s.page(); }, [](Setup& s) { s.pool(); },
             [](Setup& s) { s.no_list(); }, [](Setup& s) { s.segment.no_positions = 1; },
             [](Setup& s) {
               s.problem.q_layout = ATTN_PACKED;
               s.problem.total_q = 4;
               s.args.cu_seqlens_q = s.cu.data();
             }}) {
      Setup s;
      change(s);
      const attn::plan plan(context, s.problem);
      const attn::buffer workspace = plan.make_workspace(context);
      const uint64_t before = attn_launch_count(plan.kernel());
      plan.run(s.args, workspace);
      CHECK(attn_launch_count(plan.kernel()) == before + 1);
      for (const float x : s.out) CHECK(x == 0.25f);
      attn::check(attn_check(plan.get(), &s.args, nullptr));
    }
  }
}

// A struct of an older header ends before the new fields.
TEST_CASE("mla: callers with a shorter segment") {
  const attn::context context(ATTN_BACKEND_CPU);
  Setup s;
  s.no_list();
  s.segment.v_in_k = 0;
  s.segment.v_type = ATTN_F32;
  s.segment.struct_size = offsetof(attn_segment, list_size);
  s.segment_args.v = s.k.data();
  s.segment_args.struct_size = offsetof(attn_segment_args, list);
  s.problem.head_dim_v = 16;
  s.out.resize(2 * 2 * 4 * 16);
  s.args.out = s.out.data();
  const attn::plan plan(context, s.problem);
  const attn::buffer workspace = plan.make_workspace(context);
  plan.run(s.args, workspace);
  for (const float x : s.out) CHECK(x == 0.25f);
}

TEST_CASE("mla: kernels of devices decline with a reason") {
  const std::pair<uint32_t, const char*> wanted[] = {
      {attn::feature_v_in_k, "v in k"},
      {attn::feature_lists, "lists of keys"},
      {attn::feature_no_positions, "keys without positions"},
      {attn::feature_packed_mask, "block mask with packed q"}};
  for (const attn::Kernel& kernel : attn::catalog()) {
    if (kernel.host || kernel.backend == ATTN_BACKEND_REFERENCE ||
        kernel.backend == ATTN_BACKEND_CPU)
      continue;
    INFO(kernel.name);
    for (const auto& [feature, name] : wanted) {
      // mla_* have nothing but V in K, which no other kernel takes.
      const bool has =
          feature == attn::feature_v_in_k && std::string(kernel.name).starts_with("mla_");
      CHECK(((kernel.limits.features & feature) != 0) == has);
      CHECK(((kernel.limits.demanded_features & feature) != 0) == has);
      CHECK(std::string(attn::feature_name(attn::Feature(feature))) == name);
    }
    const std::string stem = kernel.name;
    const bool rows_of_codes =
        stem.starts_with("mla_") && (stem.ends_with("_656") || stem.ends_with("_e4m3"));
    const bool takes_caches = rows_of_codes || stem.starts_with("decode_sm90_blocks_") ||
                              stem.ends_with("_dequantised") || stem == "kv_append_cuda" ||
                              stem == "kv_roll_cuda";
    CHECK(((kernel.limits.kv_types & attn::cache_types) != 0) == takes_caches);
    CHECK((kernel.op == attn::Op::quantize || !(kernel.limits.out_types & attn::cache_types)));
  }
}

TEST_CASE("mla: masks from lists of blocks") {
  const attn::context context(ATTN_BACKEND_CPU);
  auto shape = attn::make<attn_block_mask_shape>();
  shape.seqlen_q = 100;
  shape.seqlen_kv = 200;
  shape.block_q = shape.block_k = 64;
  const int32_t lists[] = {3, -1, 3, 0, 2, 1};
  attn_block_mask* mask = nullptr;
  attn::check(attn_block_mask_from_lists(context.get(), &shape, lists, 3, &mask));
  attn_block_mask_destroy(mask);
  attn::check(attn_block_mask_from_lists(context.get(), &shape, nullptr, 0, &mask));
  attn_block_mask_destroy(mask);
  const int32_t other_grid[] = {0, 1, 2, 0, 4, 1};
  CHECK(attn_block_mask_from_lists(context.get(), &shape, other_grid, 3, &mask) == bad);
  CHECK(std::string(attn_last_error()) ==
        "entry 1 of the list of block row 1 is 4; accepted: -1 (none) to 3");
  CHECK(attn_block_mask_from_lists(context.get(), &shape, nullptr, 3, &mask) == bad);
  CHECK(std::string(attn_last_error()).find("lists is NULL") == 0);
  CHECK(attn_block_mask_from_lists(context.get(), &shape, lists, -1, &mask) == bad);
}
