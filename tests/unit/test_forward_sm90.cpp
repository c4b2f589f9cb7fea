// What the CUDA forward kernels get from their host side: blocks, workspace, parameters.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "catalog/catalog.h"
#include "catch.h"
#include "hopper.h"
#include "kernels/forward_sm90/forward_args.h"
#include "kernels/forward_sm90/key_walk.h"
#include "problem/problem.h"

using namespace attn;
using test::hopper;

namespace {

constexpr size_t multiprocessors = test::hopper_multiprocessors;

const Kernel& kernel_of(const char* name) {
  const Kernel* kernel = find_kernel(name);
  REQUIRE(kernel);
  return *kernel;
}

Recipe made_recipe(const char* kernel, const Problem& p) {
  Recipe recipe;
  REQUIRE(kernel_of(kernel).recipe(p, hopper(), &recipe).ok());
  REQUIRE(recipe.steps.size() == 1);
  CHECK(recipe.steps[0].image == std::string(kernel));
  return recipe;
}

struct Planned {
  size_t blocks = 0, workspace = 0;
  attn_sm90_mask_kernarg kernarg{};
};

void make(int64_t heads, int64_t seqlen, uint64_t flags, int64_t head_dim, int32_t max_sms,
          Problem* p, attn_dtype type = ATTN_BF16, int64_t group = 1) {
  attn_segment segment{};
  segment.struct_size = sizeof segment;
  segment.k_type = segment.v_type = type;
  segment.seqlen = seqlen;
  attn_problem in{};
  in.struct_size = sizeof in;
  in.batch = 1, in.heads_q = heads, in.heads_kv = heads / group;
  in.head_dim = head_dim, in.seqlen_q = seqlen;
  in.q_type = type, in.out_type = ATTN_BF16;
  in.num_segments = 1, in.segments = &segment;
  in.max_sms = max_sms;
  in.flags = flags;
  if (flags & ATTN_BLOCK_MASK) in.block_q = in.block_k = 128;
  if (flags & ATTN_WINDOW) in.window_left = 1000, in.window_right = -1;
  REQUIRE(make_problem(&in, p).ok());
}

Planned planned(const char* kernel, int64_t heads, int64_t seqlen, uint64_t flags,
                int32_t max_sms = 0) {
  Problem p;
  make(heads, seqlen, flags, 128, max_sms, &p);
  const Recipe recipe = made_recipe(kernel, p);
  const Step& step = recipe.steps[0];
  Planned result;
  result.workspace = recipe.workspace;
  result.blocks = step.launch.grid[0];
  REQUIRE(step.arguments.bytes.size() <= sizeof result.kernarg);
  Args args{};
  attn_segment_args segment_args{};
  args.segment = &segment_args;
  Parameters parameters;
  pack(step, p, &args, &result, &parameters);
  std::memcpy(&result.kernarg, parameters.kernarg, step.arguments.bytes.size());
  CHECK(result.kernarg.taken == static_cast<void*>(&result));
  return result;
}

}  // namespace

TEST_CASE("sm90 forward: the workspace of block masks has room for the items that are sorted",
          "[plan]") {
  const char* kernel = "fwd_sm90_bf16_d128_mask";
  for (const auto& [heads, seqlen, max_sms] :
       {std::tuple{16, 8192, 0}, {1, 133 * 128 + 1, 0}, {3, 1000, 5}, {1, 4096 * 128, 0}}) {
    INFO(heads << " " << seqlen << " " << max_sms);
    const Planned p = planned(kernel, heads, seqlen, ATTN_BLOCK_MASK, max_sms);
    CHECK(p.blocks == (max_sms ? size_t(max_sms) : multiprocessors));
    CHECK(p.kernarg.items == heads * ((unsigned(seqlen) + 127) / 128));
    CHECK(static_cast<void*>(p.kernarg.order) == p.kernarg.taken);
    CHECK(p.workspace == sizeof(attn_sm90_order));
  }
}

TEST_CASE("sm90 forward: who takes items as they come needs their number alone", "[plan]") {
  CHECK(planned("fwd_sm90_bf16_d128", 16, 8192, 0).workspace == sizeof(unsigned));
  // Each block has one item.
  CHECK(planned("fwd_sm90_bf16_d128_mask", 1, 132 * 128, ATTN_BLOCK_MASK).workspace == 0);
  CHECK(planned("fwd_sm90_bf16_d128", 1, 132 * 128, 0).workspace == 0);
}

TEST_CASE("CUDA forward: rows of nobody are stored where no sequence can have a query", "[plan]") {
  for (const std::string kernel :
       {"fwd_sm80_bf16_d128", "fwd_sm80_bf16_d128_score", "fwd_sm90_bf16_d128",
        "fwd_sm90_bf16_d128_pair", "fwd_sm90_bf16_d128_paged"}) {
    for (const int64_t total : {0, 7}) {
      attn_segment segment{};
      segment.struct_size = sizeof segment;
      segment.k_type = segment.v_type = ATTN_BF16;
      segment.seqlen = 100;
      attn_problem in{};
      in.struct_size = sizeof in;
      in.batch = 2, in.heads_q = in.heads_kv = 3;
      in.head_dim = 128, in.total_q = total;
      in.q_layout = ATTN_PACKED;
      in.q_type = ATTN_BF16;
      in.num_segments = 1, in.segments = &segment;
      Problem p;
      REQUIRE(make_problem(&in, &p).ok());
      const Recipe recipe = made_recipe(kernel.c_str(), p);
      const uint32_t blocks = kernel.ends_with("_pair") ? 2 : 1;
      CHECK(recipe.steps[0].launch.grid[0] == (total > 0 ? blocks : 0));
    }
  }
}

TEST_CASE("sm90 forward: boxes of the copy engine lie in one page", "[plan]") {
  struct Paged {
    const char* kernel;
    int64_t head_dim;
    int keys;  // of a tile
  };
  for (const Paged& of : {Paged{"fwd_sm90_bf16_d64_paged", 64, 128},
                          {"fwd_sm90_bf16_d128_paged", 128, 128},
                          {"fwd_sm90_bf16_d256_paged", 256, 80},
                          {"fwd_sm90_bf16_d64_score_paged", 64, 80},
                          {"fwd_sm90_bf16_d128_score_paged", 128, 96},
                          {"fwd_sm90_bf16_d256_score_paged", 256, 64},
                          {"fwd_sm90_bf16_d512_paged", 512, 32}}) {
    for (const int32_t page_size : {16, 32, 48, 64, 80, 128, 1024}) {
      INFO(of.kernel << " " << page_size);
      attn_segment segments[2]{};
      for (attn_segment& s : segments) {
        s.struct_size = sizeof s;
        s.k_type = s.v_type = ATTN_BF16;
      }
      segments[0].layout = ATTN_PAGED;
      segments[0].page_size = page_size;
      segments[0].max_pages = 3;
      segments[0].num_pages = page_size == 48 ? 0 : 7;
      segments[1].seqlen = 100;
      attn_problem in{};
      in.struct_size = sizeof in;
      in.batch = 2, in.heads_q = in.heads_kv = 3;
      in.head_dim = of.head_dim, in.seqlen_q = 300;
      in.q_type = ATTN_BF16;
      in.num_segments = 2, in.segments = segments;
      Problem p;
      REQUIRE(make_problem(&in, &p).ok());
      const Recipe recipe = made_recipe(of.kernel, p);
      const Step& step = recipe.steps[0];
      const int box = std::gcd(page_size, of.keys);
      REQUIRE(step.maps.size() == 5);
      for (const int n : {1, 2}) {  // K, V
        CHECK(step.maps[size_t(n)].box[1] == box);
        CHECK(step.maps[size_t(n)].size[1] == page_size);
        // The driver takes no size of 0.
        CHECK(step.maps[size_t(n)].size[3] == std::max<int64_t>(1, segments[0].num_pages));
        CHECK(step.maps[size_t(n) + 2].box[1] == of.keys);
      }
      const int32_t table[2 * 3] = {};
      attn_segment_args segment_args[2]{};
      segment_args[0].block_table = table;
      Args args{};
      args.segment = segment_args;
      Parameters parameters;
      pack(step, p, &args, nullptr, &parameters);
      REQUIRE(step.arguments.bytes.size() == sizeof(attn_sm90_paged_kernarg));
      attn_sm90_paged_kernarg a;
      std::memcpy(&a, parameters.kernarg, sizeof a);
      CHECK(a.pages[0].block_table == table);
      CHECK(a.pages[0].num_pages == segments[0].num_pages);
      CHECK(a.pages[0].page_size == page_size);
      CHECK(a.pages[0].max_pages == 3);
      CHECK(a.box_keys[0] == box);
      CHECK(a.pages[1].block_table == nullptr);
      CHECK(a.pages[1].num_pages == 1);
      CHECK(a.box_keys[1] == of.keys);
    }
  }
}

// docs/log has what was measured.
TEST_CASE("sm90 forward: which problems the tiles of 176 keys and clusters get", "[plan]") {
  const auto takes = [](const std::string& kernel, int64_t seqlen, uint64_t flags = 0,
                        int64_t head_dim = 128, int64_t group = 1) {
    Problem p;
    const bool fp8 = kernel.find("fp8") != std::string::npos;
    make(16, seqlen, flags, head_dim, 0, &p, fp8 ? ATTN_F8_E4M3FN : ATTN_BF16, group);
    return made_recipe(kernel.c_str(), p).passed_over.empty();
  };
  CHECK(takes("fwd_sm90_bf16_d128_pair", 8192));
  CHECK(!takes("fwd_sm90_bf16_d128_pair", 4096));
  CHECK(!takes("fwd_sm90_bf16_d128_pair", 16384 + 128));
  CHECK(!takes("fwd_sm90_bf16_d128_pair", 16384, ATTN_CAUSAL));
  CHECK(!takes("fwd_sm90_bf16_d128_pair", 16384, ATTN_CAUSAL_TOP_LEFT));
  CHECK(!takes("fwd_sm90_bf16_d128_pair", 16384, ATTN_WINDOW));
  CHECK(takes("fwd_sm90_bf16_d256_pair", 4096, 0, 256));
  CHECK(!takes("fwd_sm90_bf16_d256_pair", 2048, 0, 256));
  CHECK(!takes("fwd_sm90_bf16_d256_pair", 4096, ATTN_WINDOW, 256));
  CHECK(takes("fwd_sm90_bf16_d128_long", 8192, ATTN_CAUSAL));
  CHECK(!takes("fwd_sm90_bf16_d128_long", 4096, ATTN_CAUSAL));
  CHECK(!takes("fwd_sm90_bf16_d128_long", 16384));
  CHECK(takes("fwd_sm90_bf16_d128_heads", 8192, ATTN_CAUSAL, 128, 2));
  CHECK(takes("fwd_sm90_bf16_d128_heads", 8192 + 128, 0, 128, 8));
  CHECK(!takes("fwd_sm90_bf16_d128_heads", 4096, ATTN_CAUSAL, 128, 2));
  CHECK(!takes("fwd_sm90_bf16_d128_heads", 8192, ATTN_WINDOW, 128, 2));
  CHECK(takes("fwd_sm90_bf16_d512", 8192, 0, 512, 2));
  CHECK(!takes("fwd_sm90_bf16_d512_heads", 8192, 0, 512, 2));
  CHECK(takes("fwd_sm90_fp8_d128_heads", 2048, ATTN_CAUSAL, 128, 2));
  CHECK(!takes("fwd_sm90_fp8_d128_heads", 1024, 0, 128, 2));
  CHECK(takes("fwd_sm90_fp8_d256_pair", 2048, 0, 256));
  CHECK(!takes("fwd_sm90_fp8_d256_pair", 2048 + 128, 0, 256));
  CHECK(!takes("fwd_sm90_fp8_d256_pair", 4096, ATTN_CAUSAL, 256));
  CHECK(takes("fwd_sm90_fp8_d256_pair", 8192, ATTN_CAUSAL, 256));
}

TEST_CASE("sm90 forward: a cluster of heads takes what two of them have in common", "[plan]") {
  const char* kernel = "fwd_sm90_bf16_d128_heads";
  Problem even, odd;
  make(12, 8192, ATTN_CAUSAL, 128, 0, &even, ATTN_BF16, 6);
  make(6, 8192, ATTN_CAUSAL, 128, 0, &odd, ATTN_BF16, 3);
  CHECK(decline(kernel_of(kernel), even.needs) == "");
  CHECK(decline(kernel_of(kernel), odd.needs) == "heads_q / heads_kv 3 is not a multiple of 2");
  Recipe recipe;
  REQUIRE(kernel_of(kernel).recipe(even, hopper(), &recipe).ok());
  CHECK(recipe.steps[0].launch.grid[0] == multiprocessors);
  CHECK(recipe.workspace == sizeof(unsigned));
}

TEST_CASE("sm90 forward: pairs that stand together have K and V of 32 MiB at most", "[plan]") {
  for (const uint64_t flags : {0, int(ATTN_CAUSAL), int(ATTN_BLOCK_MASK)})
    for (const int64_t heads : {1, 2, 7, 33, 131, 1024})
      for (const int64_t seqlen : {1, 300, 1024, 1100, 2048, 8192, 100000})
        for (const int32_t max_sms : {0, 1, 200}) {
          INFO(flags << " " << heads << " " << seqlen << " " << max_sms);
          const char* kernel =
              flags & ATTN_BLOCK_MASK ? "fwd_sm90_bf16_d128_mask" : "fwd_sm90_bf16_d128";
          const attn_sm90_mask_kernarg a = planned(kernel, heads, seqlen, flags, max_sms).kernarg;
          const int64_t most = std::max<int64_t>(1, (32 << 20) / (seqlen * 2 * 128 * 2));
          CHECK(a.chunk >= 1);
          CHECK(a.chunk <= (flags & ATTN_CAUSAL ? std::min(heads, most) : 1));
          CHECK((flags & ATTN_CAUSAL && heads <= most ? a.chunk == heads : true));
          CHECK(a.down == (flags & ATTN_CAUSAL ? 1 : 0));
        }
}

// Each key of the item lies in one tile, tiles lie in one segment and follow each other the one way
// or the other, and only the last one ends the walk.
TEST_CASE("sm90 forward: the walk over keys, up and down", "[plan]") {
  struct Item {
    int low, high;
    struct {
      int end;
    } segment[attn_sm90_max_segments];
  };
  constexpr int keys = 80;
  std::mt19937 random(7);
  const auto up_to = [&](int most) { return int(random() % (most + 1)); };
  for (int i = 0; i < 5000; ++i) {
    Item item{};
    const int segments = 1 + up_to(attn_sm90_max_segments - 1);
    int length = 0;
    for (int s = 0; s < segments; ++s)
      item.segment[s].end = length += up_to(3) == 0 ? 0 : up_to(3 * keys);
    if (length == 0) continue;
    item.low = up_to(2) == 0 ? 0 : up_to(length - 1);
    item.high = up_to(2) == 0 ? length : item.low + 1 + up_to(length - item.low - 1);
    for (const bool down : {false, true}) {
      std::vector<int> seen(length, 0), first;
      sm90::KeyWalk<keys> at(item, down);
      for (;; at.next(item)) {
        REQUIRE(at.count() > 0);
        REQUIRE(at.count() <= keys);
        REQUIRE(at.segment < segments);
        const int begin = std::max(item.low, at.segment > 0 ? item.segment[at.segment - 1].end : 0);
        REQUIRE((at.first - begin) % keys == 0);
        REQUIRE(at.first >= begin);
        REQUIRE(at.first + at.count() <= std::min(item.high, item.segment[at.segment].end));
        if (!first.empty()) REQUIRE((down ? at.first < first.back() : at.first > first.back()));
        first.push_back(at.first);
        for (int n = 0; n < at.count(); ++n) ++seen[at.first + n];
        if (at.ends(item)) break;
      }
      std::vector<int> once(length, 0);
      std::fill(once.begin() + item.low, once.begin() + item.high, 1);
      REQUIRE(seen == once);
    }
  }
}
