// What attn_kv_roll refuses, in a sentence.
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "attn/attn.hpp"
#include "catch.h"

namespace {

// One sequence of 7 keys in pages of 2, and room for 6 keys of i8 behind 1.
struct Roll {
  attn_segment recent = attn::make<attn_segment>(), old = attn::make<attn_segment>();
  attn_kv_roll_problem problem = attn::make<attn_kv_roll_problem>();
  attn_segment_args from = attn::make<attn_segment_args>(), to = attn::make<attn_segment_args>();
  attn_kv_roll_args args = attn::make<attn_kv_roll_args>();
  std::vector<float> k = std::vector<float>(5 * 2 * 4, 1), v = k;
  std::vector<signed char> k_old = std::vector<signed char>(7 * 4), v_old = k_old;
  std::vector<uint16_t> k_scale = std::vector<uint16_t>(7), v_scale = k_scale;
  std::vector<int32_t> lengths = {7}, old_lengths = {1}, table = {3, 0, 4, 1, -1};

  Roll() {
    recent.layout = ATTN_PAGED;
    recent.k_type = recent.v_type = ATTN_F32;
    recent.has_seqlens = old.has_seqlens = 1;
    recent.page_size = 2;
    recent.max_pages = recent.num_pages = 5;
    old.k_type = old.v_type = ATTN_I8;
    old.seqlen = 7;
    problem.batch = problem.heads_kv = 1;
    problem.head_dim = 4;
    problem.recent = &recent;
    problem.old = &old;
    problem.keep = 2;
    from.k = k.data();
    from.v = v.data();
    from.seqlens = lengths.data();
    from.block_table = table.data();
    to.k = k_old.data();
    to.v = v_old.data();
    to.k_scale = k_scale.data();
    to.v_scale = v_scale.data();
    to.seqlens = old_lengths.data();
    args.recent = &from;
    args.old = &to;
  }
  Roll(const Roll&) = delete;
};

struct Refusal {
  std::function<void(Roll&)> spoil;
  const char* sentence;
};

}  // namespace

TEST_CASE("kv_roll: a good one runs on reference and cpu") {
  for (const attn_backend backend : {ATTN_BACKEND_REFERENCE, ATTN_BACKEND_CPU}) {
    const attn::context context(backend);
    Roll s;
    attn::plan(context, s.problem).run(s.args);
    CHECK(s.lengths[0] == 3);
    CHECK(s.old_lengths[0] == 5);
    CHECK(s.table == std::vector<int32_t>{4, 1, 3, 0, -1});
    CHECK(s.k_old[4] == 127);  // 1 / (1 / 127)
  }
}

TEST_CASE("kv_roll: old keys and values may be views of one pool of pages") {
  for (const attn_backend backend : {ATTN_BACKEND_REFERENCE, ATTN_BACKEND_CPU}) {
    const attn::context context(backend);
    Roll s;
    std::vector<float> pool(7 * 2 * 4);  // v's pages are k's, one later
    std::vector<int32_t> pages = {0, 2, 4};
    s.old.k_type = s.old.v_type = ATTN_F32;
    s.old.layout = ATTN_PAGED;
    s.old.page_size = 2;
    s.old.max_pages = 3;
    s.old.num_pages = 6;
    s.old.seqlen = 0;
    s.to.k = pool.data();
    s.to.v = pool.data() + 2 * 4;
    s.to.k_scale = s.to.v_scale = nullptr;
    s.to.block_table = pages.data();
    const attn::plan plan(context, s.problem);
    plan.run(s.args);
    CHECK(s.old_lengths[0] == 5);
    // Four keys from place 1 of page 0 on, and their values.
    for (size_t place = 0; place < 14; ++place)
      CHECK(pool[place * 4] ==
            (place == 0 || place == 2 || place == 9 || place > 10 ? 0.0f : 1.0f));
    pages = {0, 1, 4};
    s.lengths[0] = 7, s.old_lengths[0] = 1;
    const attn_status status = attn_run_kv_roll(plan.get(), &s.args, nullptr);
    INFO(attn_last_error());
    CHECK(status == ATTN_INVALID_ARGUMENT);
    CHECK(std::string(attn_last_error()).find("page 1 of old.k and page 0 of old.v") !=
          std::string::npos);
    CHECK(s.old_lengths[0] == 1);
  }
}

TEST_CASE("kv_roll: without sequences, and as little as an older header has") {
  const attn::context context(ATTN_BACKEND_CPU);
  Roll s;
  s.problem.batch = 0;
  attn_kv_roll_args nothing = attn::make<attn_kv_roll_args>();
  attn::plan(context, s.problem).run(nothing);
  CHECK(s.lengths[0] == 7);

  Roll plain;
  plain.problem.struct_size = offsetof(attn_kv_roll_problem, kernel);
  plain.old.k_type = plain.old.v_type = ATTN_F8_E4M3FN;
  plain.old.struct_size = plain.recent.struct_size = offsetof(attn_segment, k_scale_stride);
  plain.from.struct_size = plain.to.struct_size = offsetof(attn_segment_args, k_scale);
  attn::plan(context, plain.problem).run(plain.args);
  CHECK(plain.old_lengths[0] == 5);
}

TEST_CASE("kv_roll: runs and names of other operations") {
  const attn::context context(ATTN_BACKEND_CPU);
  Roll s;
  const attn::plan plan(context, s.problem);
  CHECK(std::string(plan.kernel()) == "kv_roll_cpu");
  const attn_kv_append_args append = attn::make<attn_kv_append_args>();
  CHECK(attn_run_kv_append(plan.get(), &append, nullptr) == ATTN_INVALID_ARGUMENT);
  CHECK(std::string(attn_last_error()).find("kv_roll") != std::string::npos);
  s.problem.kernel = "kv_append_cpu";
  attn_plan* made = nullptr;
  CHECK(attn_plan_create_kv_roll(context.get(), &s.problem, &made) == ATTN_INVALID_ARGUMENT);
  CHECK(std::string(attn_last_error()).find("not a kv_roll kernel") != std::string::npos);
}

TEST_CASE("kv_roll: problems that it does not take, in a sentence") {
  const Refusal refusals[] = {
      {[](Roll& s) { s.problem.recent = nullptr; }, "recent is NULL; accepted: a segment"},
      {[](Roll& s) { s.recent.layout = ATTN_PADDED; }, "recent.layout is 0; accepted: paged (2)"},
      {[](Roll& s) { s.recent.has_seqlens = 0; }, "recent.has_seqlens is 0; accepted: 1"},
      {[](Roll& s) { s.recent.k_type = ATTN_Q8_0; },
       "recent.k_type is q8_0; accepted: f32, f16, bf16"},
      {[](Roll& s) { s.recent.v_type = ATTN_F16; },
       "recent.v_type is f16; accepted: recent.k_type, f32"},
      {[](Roll& s) { s.recent.k_descale = ATTN_DESCALE_HEAD; },
       "recent.k_descale is 2, recent.v_descale 0; accepted: none (0)"},
      {[](Roll& s) { s.old.layout = ATTN_PACKED; },
       "old.layout is packed (1); accepted: padded (0), paged (2)"},
      {[](Roll& s) { s.old.has_seqlens = 0; }, "old.has_seqlens is 0; accepted: 1"},
      {[](Roll& s) {
         s.recent.page_size = s.recent.max_pages = 1 << 15;
         s.recent.k_stride = s.recent.v_stride = {1, 4, 4};
         s.old.layout = ATTN_PAGED;
         s.old.page_size = s.old.max_pages = 1 << 15;
         s.old.num_pages = 1;
         s.old.seqlen = 0;
         s.problem.batch = 1 << 30, s.problem.heads_kv = 8;
       },
       "1152886320234758144 keys that can move, of 8 heads; accepted: below 2^60 rows"},
      {[](Roll& s) { s.problem.keep = -1; }, "keep is -1; accepted: 0 to 2147483647"},
      {[](Roll& s) { s.old.k_type = ATTN_Q8_0; },
       "old.k: head_dim 4 is not a multiple of 32 (q8_0)"},
  };
  const attn::context context(ATTN_BACKEND_CPU);
  for (const Refusal& r : refusals) {
    Roll s;
    r.spoil(s);
    attn_plan* plan = nullptr;
    CHECK(attn_plan_create_kv_roll(context.get(), &s.problem, &plan) == ATTN_INVALID_ARGUMENT);
    CHECK(std::string(attn_last_error()) == r.sentence);
  }
}

TEST_CASE("kv_roll: arguments that it does not take, in a sentence") {
  const Refusal refusals[] = {
      {[](Roll& s) { s.args.old = nullptr; },
       "args.old is NULL; accepted: the segment's arguments"},
      {[](Roll& s) { s.to.k_scale = nullptr; },
       "old: k_scale is NULL; accepted: an address (the scales of keys of a type that has scales)"},
      {[](Roll& s) { s.lengths[0] = 11; }, "recent.seqlens[0] is 11; accepted: 0 to 10"},
      {[](Roll& s) { s.table[1] = 5; }, "recent.block_table[0, 1] is 5; accepted: 0 to 4"},
      {[](Roll& s) { s.to.seqlens = s.from.seqlens; }, nullptr},
  };
  const attn::context context(ATTN_BACKEND_CPU);
  for (const Refusal& r : refusals) {
    Roll s;
    const attn::plan plan(context, s.problem);
    r.spoil(s);
    CHECK(attn_run_kv_roll(plan.get(), &s.args, nullptr) == ATTN_INVALID_ARGUMENT);
    if (r.sentence) CHECK(std::string(attn_last_error()) == r.sentence);
    CHECK(s.old_lengths[0] == 1);
  }
}
