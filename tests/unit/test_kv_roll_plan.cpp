// What kv_roll_cuda is launched with: a block for each key that can move, then one for each
// sequence.
#include <cstring>

#include "catalog/catalog.h"
#include "catch.h"
#include "hopper.h"
#include "kernels/cache/kv_append_args.h"
#include "problem/operations.h"

using namespace attn;

TEST_CASE("kv_roll: launches and parameters on CUDA", "[plan]") {
  attn_segment recent{}, old{};
  recent.struct_size = old.struct_size = sizeof(attn_segment);
  recent.layout = ATTN_PAGED;
  recent.k_type = recent.v_type = ATTN_F16;
  recent.has_seqlens = old.has_seqlens = 1;
  recent.page_size = 64;
  recent.max_pages = 10;
  recent.num_pages = 100;
  old.k_type = ATTN_I8;
  old.v_type = ATTN_Q4_0;
  old.seqlen = 5000;
  attn_kv_roll_problem in{};
  in.struct_size = sizeof in;
  in.batch = 3, in.heads_kv = 8, in.head_dim = 128;
  in.recent = &recent;
  in.old = &old;
  in.keep = 100;
  KvRollProblem p;
  REQUIRE(make_kv_roll_problem(&in, &p).ok());
  const Kernel& kernel = *find_kernel("kv_roll_cuda");
  REQUIRE(decline(kernel, p.needs) == "");
  Recipe recipe;
  REQUIRE(kernel.recipe(p, test::hopper(), &recipe).ok());
  REQUIRE(recipe.steps.size() == 2);
  // Of 640 keys 540 can move, 8 pages; a block takes 4.
  CHECK(recipe.steps[0].launch.grid[0] == 3 * 512 / 4);
  CHECK(recipe.steps[1].launch.grid[0] == 3);

  int32_t recent_lengths[3] = {}, old_lengths[3] = {}, table[30] = {};
  KvRollArgs args;
  args.from.seqlens = recent_lengths;
  args.from.block_table = table;
  args.to.seqlens = old_lengths;
  char k_scale[2];
  args.to.k_scale = k_scale;
  for (const Step& step : recipe.steps) {
    CHECK(std::string(step.image) == "kv_roll_cuda");
    Parameters parameters;
    pack(step, p, &args, nullptr, &parameters);
    attn_kv_roll_kernarg r;
    REQUIRE(step.arguments.bytes.size() == sizeof r);
    std::memcpy(static_cast<void*>(&r), parameters.kernarg, sizeof r);
    const attn_kv_append_kernarg& a = r.append;
    const bool second = &step == &recipe.steps[1];
    CHECK(a.lengths_only == second);
    CHECK(a.seqlens_out == (second ? old_lengths : nullptr));
    CHECK(r.recent_seqlens_out == recent_lengths);
    CHECK(r.recent_table == table);
    CHECK(r.recent.page_size == 64);
    CHECK(r.recent.num_pages == 100);
    CHECK(r.recent.max_pages == 10);
    CHECK(r.recent_lengths.seqlens == recent_lengths);
    CHECK(r.recent_lengths.capacity == 640);
    CHECK(a.lengths.seqlens == old_lengths);
    CHECK(a.lengths.capacity == 5000);
    CHECK(r.keep == 100);
    CHECK(a.seqlen_new == 512);
    CHECK(a.units == 8);  // two heads each
    CHECK(a.aligned == 1);
    CHECK(a.row_scales == 1);
    CHECK(a.tensor[0].src_stride[0] == 64 * 8 * 128);
    CHECK(a.tensor[0].scale_stride[1] == 8);
    CHECK(static_cast<void*>(a.tensor[0].scale) == k_scale);
    CHECK(a.tensor[1].dst_type == ATTN_Q4_0);
    CHECK(a.block_table == nullptr);
  }
}
