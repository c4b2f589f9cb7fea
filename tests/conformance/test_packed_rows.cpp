// Rows of packed q that belong to no sequence: out is 0 and lse -inf, whatever the memory held. A
// run's result tells by itself where one behind the last sequence is not (Forward::read); here are
// the kinds of them.
#include <algorithm>
#include <limits>
#include <string>

#include "../catch.h"
#include "backend.h"
#include "head_dims.h"

namespace attn::test {
namespace {

Case packed(std::vector<int32_t> lengths, int64_t of_nobody, int64_t dim, attn_dtype type) {
  Case c;
  c.name = "rows-of-nobody-" + std::to_string(of_nobody) + "-" + std::to_string(dim);
  c.batch = int64_t(lengths.size());
  c.heads_q = 4;
  c.heads_kv = 2;
  c.head_dim = c.head_dim_v = dim;
  c.lengths_q = std::move(lengths);
  c.seqlen_q = *std::max_element(c.lengths_q.begin(), c.lengths_q.end());
  c.thinning = on_all_kernels;
  c.tokens_of_nobody = of_nobody;
  c.out_type = ATTN_F32;
  SegmentCase s;
  s.capacity = 70;
  c.segments = {s};
  return with_type(c, type);
}

// Calls use(kernel, type) for each type of q that a kernel takes.
template <class Use>
int on_every_kernel(bool on_host, Use&& use) {
  int ran = 0;
  for (const Kernel* kernel : kernels_here(Op::forward, true)) {
    if (kernel->host && !on_host) continue;
    for (attn_dtype type : {ATTN_F16, ATTN_BF16, ATTN_F8_E4M3FNUZ}) {
      if (!(kernel->limits.in_types >> type & 1)) continue;
      INFO(kernel->name);
      ran += use(*kernel, type);
    }
  }
  return ran;
}

bool run(const Case& c, const Data& data, const Kernel& kernel, Outputs* got,
         attn_dtype out_type = ATTN_F32, bool want_lse = true) {
  if (!share(kernel, c)) return false;
  INFO(describe(c));
  *got = run_forward(backend_of(kernel.backend), c, data, kernel.name, out_type, want_lse);
  if (declined(kernel, *got)) return false;
  CHECK(got->error == "");
  return got->error.empty();
}

TEST_CASE("rows of nobody: behind the last sequence") {
  const int ran = on_every_kernel(true, [](const Kernel& kernel, attn_dtype type) {
    int ran = 0;
    Outputs got;
    uint64_t number = 0;
    for (const int64_t dim : largest_head_dims(~0u)) {
      for (const int64_t of_nobody : {0, 1, 130, 700}) {
        if (emulated(kernel) && of_nobody == 700 && dim != 64) continue;
        Case c = packed({5, 0, 33}, of_nobody, dim, type);
        c.thinning = fifth_of_many(number++, 20);
        if (!share(kernel, c)) continue;
        const Data data = make_data(c);
        ran += run(c, data, kernel, &got);
        ran += run(c, data, kernel, &got, ATTN_F16, false);
        ran += run(c, data, kernel, &got, ATTN_BF16);
      }
    }
    // Between rows and heads there is room that is nobody's business.
    Case c = packed({70}, 40, 64, type);
    c.out_arrange = Arrange::padded;
    ran += run(c, make_data(c), kernel, &got);
    c.out_arrange = Arrange::head_major;
    c.head_dim_v = 48;
    ran += run(c, make_data(c), kernel, &got);
    return ran;
  });
  CHECK(ran > 0);
}

TEST_CASE("rows of nobody: no sequence has a query, none has a key") {
  const int ran = on_every_kernel(true, [](const Kernel& kernel, attn_dtype type) {
    int ran = 0;
    Outputs got;
    for (const int64_t capacity : {0, 70}) {
      Case c = packed({0, 0}, 50, 64, type);
      c.segments[0].capacity = capacity;
      ran += run(c, make_data(c), kernel, &got);
    }
    return ran;
  });
  CHECK(ran > 0);
}

TEST_CASE("rows of nobody: results in fp8") {
  for (const Kernel* kernel : kernels_here(Op::forward, true)) {
    for (attn_dtype type : {ATTN_F8_E4M3FN, ATTN_F8_E5M2, ATTN_F8_E4M3FNUZ}) {
      Case c = packed({7, 3}, 11, 64, ATTN_F16);
      c.out_type = type;
      Outputs got;
      INFO(kernel->name);
      CHECK(run(c, make_data(c), *kernel, &got, type) == (kernel->host != nullptr));
    }
  }
}

// Where lengths are clamped: what lies in front of the first sequence, and of a longer one than
// there may be what lies behind so many queries.
TEST_CASE("rows of nobody: lengths out of range on a device") {
  uint64_t number = 0;
  const int ran = on_every_kernel(false, [&](const Kernel& kernel, attn_dtype type) {
    const Case c = packed({3, 2, 0, 41}, 100, 64, type);
    Data data = make_data(c);
    Outputs want, got;
    if (!run(c, data, kernel, &want)) return 0;
    // Other lengths than the case's, by which read() finds its rows.
    const auto with = [&](std::vector<int32_t> lengths) {
      Case turn = c;
      turn.thinning = fifth_of_many(number++, 20);
      turn.lengths_q = lengths;
      if (!share(kernel, turn)) return false;
      std::copy(lengths.begin(), lengths.end(), data.cu_seqlens_q.as<int32_t>());
      return run(c, data, kernel, &got);
    };
    // Rows [begin, end) are nobody's, or as with the case's lengths.
    const auto expect = [&](int64_t begin, int64_t end, bool nobodys) {
      size_t wrong = 0;
      for (int64_t row = begin * c.heads_q; row < end * c.heads_q; ++row) {
        const double lse = nobodys ? -std::numeric_limits<double>::infinity() : want.lse[row];
        wrong += got.lse[row] != lse;
        for (int64_t n = row * c.head_dim_v; n < (row + 1) * c.head_dim_v; ++n)
          wrong += got.out[n] != (nobodys ? 0 : want.out[n]);
      }
      CHECK(wrong == 0);
    };
    if (with({3, 3, 5, 5, 46})) {
      expect(0, 3, true);
      expect(3, 46, false);
    }
    if (with({-7, 3, 5, 5, 46})) expect(0, 46, false);
    if (with({0, 45, 45, 45, 45})) expect(41, 46, true);
    if (with({0, 0, 44, 44, 46})) expect(41, 44, true);
    if (with({46, 46, 46, 46, 46})) expect(0, 46, true);
    if (with({0, 0, 0, 0, 0})) expect(0, 46, true);
    if (with({INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX})) expect(0, 46, true);
    if (with({-5, -4, -3, -2, -1})) expect(0, 46, true);
    // Whatever they hold, memory beside the rows stays as it is.
    Forward forward(backend_of(kernel.backend), c, data, kernel.name, ATTN_F32);
    const int32_t garbage[] = {INT32_MIN, 100, 20, INT32_MAX, -3};
    std::copy(std::begin(garbage), std::end(garbage), data.cu_seqlens_q.as<int32_t>());
    forward.fill(c, data);
    const Emulated here({.races_allowed = true});  // two sequences have the same rows
    CHECK(forward.launch(nullptr));
    const std::string error = forward.read().error;
    CHECK((error.empty() || error.find("of nobody") != std::string::npos));
    return 1;
  });
  if (ran == 0) ATTN_SKIP("no device here");
}

}  // namespace
}  // namespace attn::test
