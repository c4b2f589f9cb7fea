// Which kernels decode latent caches on Hopper, and by how many launches.
#include "catalog/catalog.h"
#include "catch.h"
#include "hopper.h"
#include "problem/problem.h"

using namespace attn;
using test::chosen;
using test::hopper;

namespace {

struct Input {
  attn_segment segment{};
  attn_problem problem{};
  Input(int64_t batch, int64_t keys, int64_t heads, int64_t queries = 1) {
    segment.struct_size = sizeof segment;
    segment.k_type = ATTN_BF16;
    segment.layout = ATTN_PAGED;
    segment.page_size = 64;
    segment.num_pages = batch * keys / 64;
    segment.max_pages = int32_t(keys / 64);
    segment.v_in_k = 1;
    problem.struct_size = sizeof problem;
    problem.batch = batch, problem.heads_q = heads, problem.heads_kv = 1;
    problem.head_dim = 576, problem.head_dim_v = 512, problem.seqlen_q = queries;
    problem.q_type = ATTN_BF16;
    problem.flags = ATTN_CAUSAL;
    problem.num_segments = 1;
    problem.segments = &segment;
  }
  std::string kernel() const {
    Problem p;
    const Status status = make_problem(&problem, &p);
    return status.ok() ? chosen(p) : status.text;
  }
  // Thread blocks of each launch of the kernel.
  std::vector<uint32_t> blocks(const char* kernel) const {
    Problem p;
    REQUIRE(make_problem(&problem, &p).ok());
    Recipe recipe;
    const Status status = find_kernel(kernel)->recipe(p, hopper(), &recipe);
    INFO(status.text);
    REQUIRE(status.ok());
    std::vector<uint32_t> found;
    for (const Step& step : recipe.steps)
      found.push_back(step.launch.grid[0] * step.launch.grid[1] * step.launch.grid[2]);
    return found;
  }
};

}  // namespace

TEST_CASE("mla: the kernel follows from rows and options", "[plan]") {
  const auto of_rows = [](int rows) { return "mla_sm90_bf16_d576_r" + std::to_string(rows); };
  CHECK(Input(64, 8192, 8).kernel() == of_rows(8));
  CHECK(Input(64, 8192, 16).kernel() == of_rows(64));
  CHECK(Input(65, 8192, 16).kernel() == of_rows(16));
  // Few units, at most two for each of 132 multiprocessors.
  CHECK(Input(1, 264 * 64, 8).kernel() == of_rows(64));
  CHECK(Input(1, 265 * 64, 8).kernel() == of_rows(8));
  CHECK(Input(132, 128, 16).kernel() == of_rows(64));
  CHECK(Input(133, 128, 16).kernel() == of_rows(16));
  CHECK(Input(64, 8192, 16, 2).kernel() == of_rows(64));
  CHECK(Input(64, 8192, 64).kernel() == of_rows(64));
  CHECK(Input(64, 8192, 128).kernel() == of_rows(64));
  CHECK(Input(64, 8192, 128, 2).kernel() == of_rows(64));
  CHECK(Input(64, 8192, 48, 4).kernel() == of_rows(64));
  // Pages of any size.
  Input in(64, 8192, 128);
  in.problem.segments = &in.segment;
  in.segment.page_size = 16;
  in.segment.max_pages *= 4, in.segment.num_pages *= 4;
  CHECK(in.kernel() == of_rows(64) + "_pages");
  in = Input(1, 8192, 16);
  in.problem.segments = &in.segment;
  in.segment.page_size = 16;
  in.segment.max_pages *= 4, in.segment.num_pages *= 4;
  CHECK(in.kernel() == of_rows(16) + "_pages");
  // What the kernels of 64 rows do not take.
  in = Input(64, 8192, 128);
  in.problem.segments = &in.segment;
  in.problem.softcap = 3;
  CHECK(in.kernel() == of_rows(32));
  in = Input(64, 8192, 128);
  in.problem.segments = &in.segment;
  in.problem.fixed_split = 512;
  CHECK(in.kernel() == of_rows(32));
  // V of its own.
  in = Input(64, 8192, 16);
  in.problem.segments = &in.segment;
  in.segment.v_in_k = 0;
  in.segment.v_type = ATTN_BF16;
  in.problem.kernel = "mla_sm90_bf16_d576_r16";
  CHECK(in.kernel() == "no v in k (mla_sm90_bf16_d576_r16)");
}

TEST_CASE("mla: blocks take whole sequences if that costs few of them", "[plan]") {
  using Blocks = std::vector<uint32_t>;
  const char* const kernel = "mla_sm90_bf16_d576_r64";
  // 64 sequences and two row tiles: 64 of 66 blocks for each, and nothing to merge but where
  // lengths differ.
  CHECK(Input(64, 8192, 128).blocks(kernel)[0] == 128);
  CHECK(Input(1, 65536, 128).blocks(kernel)[0] == 132);
  CHECK(Input(128, 4096, 128).blocks(kernel)[0] == 128);
  // Columns of one block share nothing, so there is no second launch.
  CHECK(Input(1, 64, 128).blocks(kernel) == Blocks{2});
  CHECK(Input(1, 640, 128).blocks(kernel).size() == 2);
}

// Four of 256 threads have room on each of 132 multiprocessors.
TEST_CASE("mla: blocks that merge are on the device at once", "[plan]") {
  const auto merging = [](const Input& in) { return in.blocks("mla_sm90_bf16_d576_r64")[1]; };
  // Sequences, parts of their rows for a block, halves of the columns.
  CHECK(merging(Input(64, 8192, 64)) == 64 * 4 * 2);
  CHECK(merging(Input(64, 8192, 16)) == 64 * 2 * 2);
  // With two row tiles a block has all rows of one.
  CHECK(merging(Input(128, 4096, 128)) == 2 * 128 * 2);
  // Warps share a row: of two row tiles 64, quarters of the columns.
  CHECK(merging(Input(1, 65536, 128)) == 2 * 64 * 4);
  // More than eight sequences for each block: of each of two columns the blocks that end them.
  CHECK(merging(Input(4096, 2048, 128)) == 2 * 66 * 2 * 2);
}

TEST_CASE("mla: more row tiles than 32 bits have places for are refused", "[plan]") {
  constexpr const char* kernel = "mla_sm90_bf16_d576_r64";
  constexpr int64_t most = UINT32_MAX / 132;  // of 132 columns
  for (const int64_t heads : {most, most + 1}) {
    Input in(1, 64, heads);
    in.problem.heads_kv = heads;
    Problem p;
    REQUIRE(make_problem(&in.problem, &p).ok());
    Recipe recipe;
    const Status status = find_kernel(kernel)->recipe(p, hopper(), &recipe);
    INFO(status.text);
    CHECK(status.ok() == (heads == most));
    if (heads > most) {
      CHECK(status.text.find(std::to_string(heads)) != std::string::npos);
      CHECK(status.text.ends_with("accepted: up to " + std::to_string(most)));
    }
  }
}
