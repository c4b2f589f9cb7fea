// Masks of a bit per query for each of the last keys, in every forward kernel that takes them: the
// trees of drafts that speculative decoding verifies.
#include <algorithm>
#include <cmath>
#include <map>
#include <string>

#include "../catch.h"
#include "backend.h"
#include "core/dtype.h"
#include "formula.h"
#include "head_dims.h"
#include "kernels/shared/mask.h"

namespace attn::test {
namespace {

constexpr attn_dtype q_types[] = {ATTN_BF16, ATTN_BF16, ATTN_F16, ATTN_F32};

Case random_case(uint64_t seed) {
  Case c;
  c.name = "tree-" + std::to_string(seed);
  c.thinning = one_of_many(seed);
  c.seed = seed;
  Draw draw{seed, 151};
  c.batch = 1 + draw(4);
  c.heads_kv = 1 + draw(2);
  const int64_t groups[] = {1, 1, 2, 4, 8};
  const int64_t group = draw.pick(groups);
  c.heads_q = c.heads_kv * group;
  // Up to 16 rows, which all decode kernels take, or up to 48 or more.
  const int64_t rows[] = {1, 8, 16, 16, 48, 200};
  c.seqlen_q = 1 + draw(uint64_t(std::max<int64_t>(1, draw.pick(rows) / group)));
  static const auto dims = head_dims(type_bit(ATTN_F16) | type_bit(ATTN_BF16));
  draw_head_dims(draw, dims, false, &c);
  c.q_type = draw.pick(q_types);
  c.out_type = draw.chance(2) ? ATTN_F32 : c.q_type;
  if (draw.chance(2)) draw_lengths_q(draw, &c);
  const attn_dtype kv_type = draw.chance(2) ? c.q_type : ATTN_F8_E4M3FN;
  const int64_t segments = draw.chance(2) ? 2 + draw(2) : 1;
  for (int64_t n = 0; n < segments; ++n) {
    SegmentCase s;
    const int64_t capacities[] = {1, 5, 64, 70, 130, 200, 333};
    s.capacity = draw.pick(capacities);
    s.k_type = s.v_type = kv_type;
    s.layout = attn_layout(draw(3));
    const int32_t page_sizes[] = {1, 3, 16, 32, 64, 128};
    s.page_size = draw.pick(page_sizes);
    if (s.layout == ATTN_PACKED || !draw.chance(3)) draw_lengths(draw, c.batch, &s);
    if (dtype_is_fp8(kv_type)) s.k_descale = s.v_descale = attn_descale_kind(draw(4));
    if (s.layout == ATTN_PAGED && draw.chance(6)) s.bad_pages = {int32_t(draw(4))};
    c.segments.push_back(s);
  }
  const int64_t sizes[] = {1, 2, 7, 16, 63, 64, 65, 100, 127, 128};
  c.tree_keys = draw.pick(sizes);
  const int densities[] = {1, 2, 2, 3, 10};
  c.tree_density = draw.pick(densities);
  if (draw.chance(2)) c.flags |= draw.chance(5) ? ATTN_CAUSAL_TOP_LEFT : ATTN_CAUSAL;
  if (draw.chance(4)) {
    c.flags |= ATTN_WINDOW;
    c.window_left = draw(150) - 1;
    c.window_right = draw(20) - 1;
  }
  if (draw.chance(5)) c.flags |= ATTN_ALIBI;
  if (draw.chance(3)) c.flags |= ATTN_SINKS;
  if (draw.chance(5)) c.softcap = 3;
  if (draw.chance(8)) c.flags |= ATTN_SPLIT_INVARIANT;
  if (draw.chance(3)) c.max_sms = int32_t(1 + draw(40));
  return c;
}

TEST_CASE("tree: the bits of 64 keys from any position") {
  const uint64_t words[] = {hash(3, 1), hash(3, 2)};
  for (const int64_t keys : {1, 40, 64, 65, 128})
    for (const int64_t seqlen_kv : {0, 20, 300})
      for (int64_t first = seqlen_kv - 260; first < seqlen_kv; ++first) {
        const uint64_t seen = TreeMask{keys}.seen(words[0], words[1], first, seqlen_kv);
        size_t wrong = 0;
        for (int64_t n = 0; n < 64 && first + n < seqlen_kv; ++n) {
          const int64_t bit = first + n - (seqlen_kv - keys);
          wrong += (seen >> n & 1) != (bit < 0 ? 1 : words[bit / 64] >> bit % 64 & 1);
        }
        INFO(keys << " " << seqlen_kv << " " << first);
        CHECK(wrong == 0);
      }
}

TEST_CASE("tree: random problems") {
  const auto kernels = kernels_here(Op::forward, false);
  for (uint64_t seed = 1; seed <= 250; ++seed) check_case(random_case(seed), kernels);
}

// Bias and block masks, which kernels of few queries decline.
TEST_CASE("tree: beside bias and block masks") {
  const auto kernels = kernels_here(Op::forward, false);
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    Case c = random_case(1000 + seed);
    c.lengths_q.clear();
    Draw draw{seed, 152};
    if (draw.chance(2)) {
      c.bias_type = ATTN_F32;
      c.bias_per_head = draw.chance(2);
    }
    if (draw.chance(2)) {
      c.flags |= ATTN_BLOCK_MASK;
      const int32_t blocks[] = {64, 128, 33};
      c.block_q = draw.pick(blocks);
      c.block_k = draw.pick(blocks);
    }
    check_case(c, kernels);
  }
}

Case plain_case(const char* name, attn_dtype type, int64_t queries, int64_t keys) {
  Case c = small(name, queries, keys);
  c.thinning = on_all_kernels;
  c.heads_q = 4;
  c.q_type = c.segments[0].k_type = c.segments[0].v_type = type;
  return c;
}

// Calls check(kernel, type) where the kernel takes q, k and v of the type and has not declined.
template <class Check>
void on_every_tree_kernel(Check&& check) {
  int ran = 0;
  for (const Kernel* kernel : kernels_here(Op::forward, true)) {
    if (!(kernel->limits.features & feature_tree)) continue;
    const attn_dtype type = float_type_of(*kernel);
    INFO(kernel->name);
    ran += check(*kernel, kv_type_of(*kernel, type), type);
  }
  CHECK(ran > 0);
}

// Bits 0 to i for query i are what a causal mask shows of as many keys as there are queries.
TEST_CASE("tree: a chain of tokens is a causal mask") {
  on_every_tree_kernel([](const Kernel& kernel, attn_dtype kv_type, attn_dtype q_type) {
    bool ran = false;
    for (const int64_t queries : {1, 4, 8}) {
      Case causal = plain_case("chain", q_type, queries, 200);
      causal.segments[0].k_type = causal.segments[0].v_type = kv_type;
      causal.flags = ATTN_CAUSAL;
      const Data of_causal = make_data(causal);
      Case tree = causal;
      tree.flags = 0;
      tree.tree_keys = queries;
      Data data = of_causal;
      data.tree = Buffer(size_t(queries) * 16, 0xff);
      for (int64_t i = 0; i < queries; ++i) {
        data.tree.as<uint64_t>()[2 * i] = (uint64_t{2} << i) - 1;
        data.tree.as<uint64_t>()[2 * i + 1] = 0;
      }
      const Outputs got =
          run_forward(backend_of(kernel.backend), tree, data, kernel.name, ATTN_F32);
      if (declined(kernel, got)) continue;
      REQUIRE(got.error == "");
      CHECK(compare(causal, of_causal, kernel, got, reference_answer(causal, of_causal)) == "");
      ran = true;
    }
    return ran;
  });
}

// What a block mask says with a bit per element, from position 0.
TEST_CASE("tree: the same as a dense mask") {
  const auto kernels = kernels_here(Op::forward, true);
  for (const int64_t tree_keys : {1, 30, 64, 77, 128}) {
    Case tree = plain_case("dense", ATTN_F32, 70, 150);
    tree.out_type = ATTN_F32;
    tree.batch = 2;
    tree.tree_keys = tree_keys;
    tree.flags = ATTN_SINKS;
    const Data of_tree = make_data(tree);
    Case dense = tree;
    dense.tree_keys = 0;
    dense.flags |= ATTN_BLOCK_MASK;
    dense.mask_per_batch = true;
    dense.block_q = dense.block_k = 64;
    dense.mask_kinds = {ATTN_BLOCK_PARTIAL};
    Data of_dense = make_data(dense);
    const int64_t rows = 2, columns = 3, words = 2, cells = tree.batch * rows * columns;
    of_dense.segments = of_tree.segments;  // the same keys are there
    of_dense.tree = {};
    of_dense.num_partials = cells;
    of_dense.bits = Buffer(size_t(cells) * 64 * words * 4, 0);
    for (int64_t n = 0; n < cells; ++n) of_dense.index.as<int32_t>()[n] = int32_t(n);
    for (int64_t b = 0; b < tree.batch; ++b)
      for (int64_t i = 0; i < tree.seqlen_q; ++i)
        for (int64_t j = 0; j < tree.keys(b); ++j) {
          const int64_t bit = j - (tree.keys(b) - tree_keys);
          const uint64_t* of_row = of_tree.tree.as<uint64_t>() + 2 * (b * tree.seqlen_q + i);
          if (bit >= 0 && !(of_row[bit / 64] >> bit % 64 & 1)) continue;
          const int64_t cell = (b * rows + i / 64) * columns + j / 64;
          of_dense.bits.as<uint32_t>()[(cell * 64 + i % 64) * words + j % 64 / 32] |= 1u << j % 32;
        }
    for (const Kernel* kernel : kernels) {
      if (!kernel->host) continue;
      INFO(kernel->name << " " << describe(tree));
      Backend& backend = backend_of(kernel->backend);
      const Outputs got = run_forward(backend, tree, of_tree, kernel->name, ATTN_F32),
                    want = run_forward(backend, dense, of_dense, kernel->name, ATTN_F32);
      REQUIRE(got.error == "");
      REQUIRE(want.error == "");
      if (kernel->backend == ATTN_BACKEND_REFERENCE) CHECK(got.bits == want.bits);
      CHECK(compare(tree, of_tree, *kernel, got, want) == "");
    }
  }
}

// A query that sees nothing is 0, and -inf or its sink in lse.
TEST_CASE("tree: no bit, no key") {
  on_every_tree_kernel([](const Kernel& kernel, attn_dtype kv_type, attn_dtype q_type) {
    Case c = plain_case("no-bit", q_type, 3, 20);
    c.segments[0].k_type = c.segments[0].v_type = kv_type;
    c.tree_keys = 20;
    Data data = make_data(c);
    std::fill_n(data.tree.as<uint64_t>(), 6, ~uint64_t{0} << 20);
    const Outputs got = run_forward(backend_of(kernel.backend), c, data, kernel.name, ATTN_F32);
    if (declined(kernel, got)) return false;
    REQUIRE(got.error == "");
    for (const double x : got.out) CHECK(x == 0);
    for (const double x : got.lse) CHECK(x == -INFINITY);
    return true;
  });
}

// ---- whether the checks above would see a mistake ----------------------------------------------

TEST_CASE("tree: planted mistakes are found") {
  const auto kernel = std::find_if(catalog().begin(), catalog().end(), [](const Kernel& k) {
    return std::string(k.name).starts_with("decode_");
  });
  REQUIRE(kernel != catalog().end());
  std::map<std::string, int> found, the_same;
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    if (!share(seed)) continue;
    const Case c = random_case(seed);
    INFO(describe(c));
    const Data data = make_data(c);
    const Outputs want = reference_answer(c, data), right = formula(c, data);
    REQUIRE(compare(c, data, *kernel, right, want) == "");
    // The numbers of all keys, those that the tree hides too.
    Case without = c;
    without.tree_keys = 0;
    const Data all = make_data(without);
    const auto plant = [&](const char* name, const Case& of, auto&& spoil) {
      Data wrong = all;
      wrong.tree = data.tree;
      spoil(wrong.tree.as<uint64_t>(), int64_t(wrong.tree.size() / 8));
      const Outputs answer = formula(of, wrong);
      double change = 0;
      for (size_t n = 0; n < right.lse.size(); ++n)
        if (answer.lse[n] != right.lse[n])
          change = std::max(change, std::isfinite(answer.lse[n]) && std::isfinite(right.lse[n])
                                        ? std::abs(answer.lse[n] - right.lse[n])
                                        : INFINITY);
      if (change < (c.has(ATTN_SPLIT_INVARIANT) ? 1e-2 : 1e-4)) {
        ++the_same[name];
        return;
      }
      INFO(name);
      CHECK(compare(c, data, *kernel, answer, want) != "");
      ++found[name];
    };
    const auto none = [](uint64_t*, int64_t) {};
    plant("the tree ignored", without, none);
    Case other = c;
    other.tree_keys = c.tree_keys - 1;
    plant("a key less", other, none);
    plant("bits off by one", c, [](uint64_t* words, int64_t count) {
      for (int64_t n = 0; n < count; n += 2) {
        words[n + 1] = words[n + 1] << 1 | words[n] >> 63;
        words[n] <<= 1;
      }
    });
    plant("words swapped", c, [](uint64_t* words, int64_t count) {
      for (int64_t n = 0; n < count; n += 2) std::swap(words[n], words[n + 1]);
    });
    plant("the next query's bits", c,
          [](uint64_t* words, int64_t count) { std::rotate(words, words + 2, words + count); });
  }
  if (sanitized) return;
  for (const char* name : {"the tree ignored", "a key less", "bits off by one", "words swapped",
                           "the next query's bits"}) {
    INFO(name << ": found " << found[name] << ", of no weight " << the_same[name]);
    CHECK(found[name] > the_same[name]);
  }
}

}  // namespace
}  // namespace attn::test
