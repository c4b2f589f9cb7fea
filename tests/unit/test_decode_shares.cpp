// How many blocks decode_sm90_*_r8 launch, and so how they share the keys.
#include <cstring>
#include <tuple>

#include "catalog/catalog.h"
#include "catch.h"
#include "hopper.h"
#include "kernels/decode/decode_args.h"
#include "problem/problem.h"

using namespace attn;
using test::hopper;

namespace {

// 8 K/V heads for 32 of q, one query of each sequence.
Step step_of(const char* kernel, int64_t batch, int64_t keys, int64_t head_dim,
             int64_t heads_kv = 8) {
  attn_segment segment{};
  segment.struct_size = sizeof segment;
  segment.k_type = segment.v_type = ATTN_BF16;
  segment.seqlen = keys;
  attn_problem in{};
  in.struct_size = sizeof in;
  in.batch = batch, in.heads_q = 4 * heads_kv, in.heads_kv = heads_kv;
  in.head_dim = head_dim, in.seqlen_q = 1;
  in.q_type = ATTN_BF16;
  in.num_segments = 1;
  in.segments = &segment;
  Problem p;
  REQUIRE(make_problem(&in, &p).ok());
  Recipe recipe;
  REQUIRE(find_kernel(kernel)->recipe(p, hopper(), &recipe).ok());
  return recipe.steps.at(0);
}
uint32_t blocks_of(int64_t batch, int64_t keys, int64_t heads_kv = 8) {
  return step_of("decode_sm90_bf16_d128_r8", batch, keys, 128, heads_kv).launch.grid[0];
}

constexpr uint32_t twice = 2 * test::hopper_multiprocessors, columns = 8;
static_assert(twice / columns == 33);

}  // namespace

TEST_CASE("decode shares: blocks end where heads do, if that costs few of them", "[plan]") {
  CHECK(blocks_of(1, 131072) == columns * 33);
  CHECK(blocks_of(16, 8192) == columns * 32);   // two blocks for a head
  CHECK(blocks_of(64, 8192) == columns * 32);   // two heads for a block
  CHECK(blocks_of(128, 4096) == columns * 32);  // four
  CHECK(blocks_of(66, 8192) == columns * 33);   // two, without that
  CHECK(blocks_of(11, 8192) == columns * 33);   // three blocks for a head
  CHECK(blocks_of(17, 8192) == columns * 33);   // one would leave half of them idle
  CHECK(blocks_of(45, 8192) == columns * 33);   // two would leave a third
}

TEST_CASE("decode shares: with few keys a block on each multiprocessor, but with many heads two",
          "[plan]") {
  CHECK(blocks_of(1, 8192) == columns * 16);
  CHECK(blocks_of(1, 16384) == columns * 33);
  CHECK(blocks_of(16, 256) == columns * 16);
  CHECK(blocks_of(33, 256) == columns * 33);
  CHECK(blocks_of(64, 256) == columns * 32);
}

// Two warps that load in turns, each of which waits for the unit before the last, would load into
// the same place.
TEST_CASE("decode shares: a single stage is one warp's to load", "[plan]") {
  for (const auto& [kernel, head_dim, stages, loaders] :
       {std::tuple{"decode_sm80_bf16_d256", 256, 3, 2}, {"decode_sm80_bf16_d512", 512, 1, 1}}) {
    INFO(kernel);
    const Step step = step_of(kernel, 4, 8192, head_dim);
    REQUIRE(step.arguments.bytes.size() == sizeof(attn_decode_kernarg));
    attn_decode_kernarg a;
    std::memcpy(&a, step.arguments.bytes.data(), sizeof a);
    CHECK(a.stages == stages);
    CHECK(a.loaders == loaders);
  }
}

// Rows one by one take a second loading warp. They are for wide rows of 16 bits, and for blocks
// that have a while to go.
TEST_CASE("decode shares: wide rows of many units are loaded one by one", "[plan]") {
  const auto warps_of = [](const char* kernel, int64_t batch, int64_t keys, int64_t head_dim) {
    return step_of(kernel, batch, keys, head_dim).launch.block[0] / 32;
  };
  CHECK(warps_of("decode_sm90_bf16_d128_r8", 64, 8192, 128) == 6);
  CHECK(warps_of("decode_sm90_bf16_d128_r8", 1, 32768, 128) == 6);
  CHECK(warps_of("decode_sm90_bf16_d256_r8", 16, 1024, 256) == 6);
  CHECK(warps_of("decode_sm90_bf16_d128_r8", 1, 8192, 128) == 5);
  CHECK(warps_of("decode_sm90_bf16_d64_r8", 64, 8192, 64) == 5);
  CHECK(warps_of("decode_sm90_bf16_d256_r8", 64, 8192, 192) == 5);
  CHECK(warps_of("decode_sm90_bf16_d512_r8", 64, 8192, 512) == 5);
}
