// The head dimensions of generated cases: those that kernels take, whatever they are.
#include <algorithm>
#include <set>

#include "../catch.h"
#include "conformance/head_dims.h"

namespace attn::test {
namespace {

Kernel row(const char* name, attn_dtype type, Sizes qk, Sizes v) {
  Kernel kernel{.name = name, .op = Op::forward, .backend = ATTN_BACKEND_CUDA};
  kernel.limits.in_types = kernel.limits.kv_types = type_bit(type);
  kernel.limits.head_dim = qk;
  kernel.limits.head_dim_v = v;
  return kernel;
}

// What so many draws of the rows' dimensions are.
std::set<std::pair<int64_t, int64_t>> drawn(const std::vector<HeadDims>& of, bool apart) {
  std::set<std::pair<int64_t, int64_t>> found;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    Draw draw{seed, 1};
    Case c;
    draw_head_dims(draw, of, apart, &c);
    found.insert({c.head_dim, c.head_dim_v});
  }
  return found;
}

TEST_CASE("head dimensions: a planted kernel's own limits are reached and kept") {
  for (const auto& [qk, v] : {std::pair{Sizes{64, 512}, Sizes{64, 512}},
                              {Sizes{96, 96}, Sizes{96, 96}},
                              {Sizes{8, 40}, Sizes{8, 40}},
                              {Sizes{16, 576}, Sizes{32, 512}}}) {
    const Kernel rows[] = {row("planted", ATTN_BF16, qk, v)};
    INFO(qk.multiple << " to " << qk.max << ", " << v.multiple << " to " << v.max);
    const auto dims = head_dims(type_bit(ATTN_BF16), ~0u, 1, rows);
    REQUIRE(dims.size() == 1);
    for (const bool apart : {false, true}) {
      const auto found = drawn(dims, apart);
      std::set<int64_t> of_qk, of_v;
      for (const auto& [head_dim, head_dim_v] : found) {
        of_qk.insert(head_dim), of_v.insert(head_dim_v);
        CHECK(head_dim % qk.multiple == 0);
        CHECK(head_dim_v % v.multiple == 0);
        if (!apart && head_dim <= v.max && head_dim % v.multiple == 0)
          CHECK(head_dim_v == head_dim);
      }
      CHECK(*of_qk.rbegin() == qk.max);
      CHECK(*of_v.rbegin() == v.max);
      CHECK(*of_qk.begin() == qk.multiple);
      CHECK(of_qk.size() >= size_t(std::min<int64_t>(3, qk.max / qk.multiple)));
    }
    CHECK(largest_head_dims(type_bit(ATTN_BF16), rows) ==
          std::vector<int64_t>{std::min(qk.max, v.max)});
  }
}

TEST_CASE("head dimensions: of the kernels that take the types, in steps of a block") {
  const Kernel rows[] = {row("a", ATTN_BF16, {8, 64}, {8, 64}),
                         row("b", ATTN_F16, {8, 64}, {8, 64}),
                         row("c", ATTN_F8_E4M3FN, {16, 80}, {16, 80})};
  CHECK(head_dims(type_bit(ATTN_BF16) | type_bit(ATTN_F16), ~0u, 1, rows).size() == 1);
  CHECK(head_dims(type_bit(ATTN_F32), ~0u, 1, rows).empty());
  CHECK(largest_head_dims(~0u, rows) == std::vector<int64_t>{64, 80});
  const auto blocks = head_dims(type_bit(ATTN_F8_E4M3FN), ~0u, 32, rows);
  REQUIRE(blocks.size() == 1);
  CHECK(blocks[0].qk.multiple == 32);
  CHECK(blocks[0].qk.max == 64);
}

TEST_CASE("head dimensions: each kernel of the catalog has its largest among them") {
  for (const Kernel& kernel : catalog()) {
    if (kernel.op != Op::forward || kernel.host || kernel.backend == ATTN_BACKEND_REFERENCE)
      continue;
    if (kernel.limits.demanded_features) continue;  // of latent caches: test_mla.cpp has its sizes
    const auto dims = head_dims(kernel.limits.in_types, kernel.limits.kv_types);
    INFO(kernel.name);
    CHECK(std::any_of(dims.begin(), dims.end(), [&](const HeadDims& d) {
      return d.qk.max == kernel.limits.head_dim.max && d.v.max == kernel.limits.head_dim_v.max;
    }));
  }
}

}  // namespace
}  // namespace attn::test
