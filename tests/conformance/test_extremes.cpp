// Sinks of every size, and scores of every size that float32 holds: the result is that of the
// scores as float32 rounds them (docs/numerics.md).
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "../catch.h"
#include "backend.h"
#include "core/dtype.h"

namespace attn::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr attn_dtype types[] = {ATTN_F32, ATTN_F16, ATTN_BF16, ATTN_F8_E4M3FNUZ};

// Two query heads have a K/V head, which all kernels take.
Case shape(std::string name, int64_t heads, int64_t dim, int64_t sq, int64_t skv, attn_dtype type) {
  Case c;
  c.name = std::move(name);
  c.heads_q = heads;
  c.heads_kv = heads / 2;
  c.head_dim = c.head_dim_v = dim;
  c.seqlen_q = sq;
  c.out_type = ATTN_F32;
  SegmentCase s;
  s.capacity = skv;
  c.segments = {s};
  return with_type(c, type);
}

// A sum of several is that of all keys with one weight: 1 but for float32 rounding, in kernels that
// round weights to `weight_type` but not those they add up, as far as that type holds it.
void compare_rows(const Data& data, const Outputs& got, const Outputs& want,
                  attn_dtype weight_type = ATTN_F32) {
  const double bound = 4e-6 + (weight_type == ATTN_F32 ? 0 : half_ulp(weight_type, 1));
  REQUIRE(got.error == "");
  REQUIRE(got.out.size() == want.out.size());
  size_t wrong = 0, wrong_lse = 0;
  for (size_t n = 0; n < want.out.size(); ++n)
    wrong += !(std::abs(got.out[n] - want.out[n]) <= bound * data.v_max);
  for (size_t n = 0; n < want.lse.size(); ++n) {
    const bool same = got.lse[n] == want.lse[n];
    wrong_lse +=
        !same && !(std::abs(got.lse[n] - want.lse[n]) <= 1e-6 * std::abs(want.lse[n]) + 1e-5);
  }
  CHECK(wrong == 0);
  CHECK(wrong_lse == 0);
}

// As which the weights that are not 1 are rounded; FP8 kernels' are powers of two here.
attn_dtype weights_of(const Kernel& kernel) {
  const attn_dtype type = kernel.numerics.weights;
  return type == ATTN_F16 || type == ATTN_BF16 ? type : ATTN_F32;
}

constexpr float none = -std::numeric_limits<float>::infinity();  // a sink as if there were none

// ---- sinks -------------------------------------------------------------------------------------

TEST_CASE("sinks: a row without a key has its sink as lse, whatever its size") {
  const std::vector<float> sinks = {none, -3e38f, -1e30f, -1e4f, -88,  -87,   -1,    -1e-40f,
                                    0,    1e-40f, 1,      88,    1e4f, 1e20f, 1e30f, 3e38f};
  uint64_t number = 0;
  for (attn_dtype type : types) {
    // The first 20 rows see nothing; some of the others see one tile of keys, some two.
    Case c = shape("sinks-" + std::to_string(type), int64_t(sinks.size()), 64, 110, 90, type);
    c.thinning = many_on_all_kernels(number++);
    c.flags = ATTN_CAUSAL | ATTN_SINKS;
    c.scale = 0.125f;
    Data data = make_data(c);
    for (size_t h = 0; h < sinks.size(); ++h) data.sinks.as<float>()[h] = sinks[h];
    for (const Kernel* kernel : kernels_here(Op::forward, true)) {
      if (!share(*kernel, c)) continue;
      const Outputs got = run_forward(backend_of(kernel->backend), c, data, kernel->name, ATTN_F32);
      if (declined(*kernel, got)) continue;
      INFO(kernel->name << " " << describe(c));
      REQUIRE(got.error == "");
      size_t wrong = 0;
      for (size_t row = 0; row < 20 * sinks.size(); ++row) {
        wrong += got.lse[row] != sinks[row % sinks.size()];
        for (size_t d = 0; d < 64; ++d) wrong += got.out[row * 64 + d] != 0;
      }
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("sinks: rows with keys, sinks far above and below their scores") {
  const std::vector<float> sinks = {none, -1e30f, -1e4f, -400, -200, -1e-40f, 0, 200, 1e4f, 1e30f};
  uint64_t number = 0;
  for (attn_dtype type : types) {
    Case c = shape("far-sinks-" + std::to_string(type), int64_t(sinks.size()), 64, 20, 90, type);
    c.thinning = many_on_all_kernels(number++);
    c.values = Values::uniform;  // all scores 0, all weights exact
    Data data = make_data(c);
    const Outputs none = reference_answer(c, data);
    c.flags = ATTN_SINKS;
    data = make_data(c);
    for (size_t h = 0; h < sinks.size(); ++h) data.sinks.as<float>()[h] = sinks[h];
    Outputs want = none;
    for (size_t row = 0; row < want.lse.size(); ++row) {
      const double keys = 90, sink = sinks[row % sinks.size()];
      const double most = std::max(0.0, sink);
      const double sum = keys * std::exp(-most) + std::exp(sink - most);
      want.lse[row] = most + std::log(sum);
      for (size_t d = 0; d < 64; ++d) want.out[row * 64 + d] *= keys * std::exp(-most) / sum;
    }
    for (const Kernel* kernel : kernels_here(Op::forward, true)) {
      if (!share(*kernel, c)) continue;
      const Outputs got = run_forward(backend_of(kernel->backend), c, data, kernel->name, ATTN_F32);
      if (declined(*kernel, got)) continue;
      INFO(kernel->name << " " << describe(c));
      compare_rows(data, got, want);
    }
  }
}

// ---- scores ------------------------------------------------------------------------------------

// q is 8, -8 or 0 in dim 0, k what `key` says, all else 0.
template <class Key>
Data one_dim(const Case& c, const Key& key) {
  Data data = make_data(c);
  const auto put = [](Buffer& to, const View& view, int64_t s, int64_t h, int64_t dim, float x) {
    for (int64_t d = 0; d < dim; ++d)
      encode_element(view.type, to.data(), view.at(0, s, h) + d, d == 0 ? x : 0, true);
  };
  constexpr float q[] = {8, -8, 0};
  for (int64_t h = 0; h < c.heads_q; ++h)
    for (int64_t i = 0; i < c.seqlen_q; ++i) put(data.q, data.q_view, i, h, c.head_dim, q[i % 3]);
  for (int64_t h = 0; h < c.heads_kv; ++h)
    for (int64_t j = 0; j < c.keys(0); ++j)
      put(data.segments[0].k, data.segments[0].k_view, j, h, c.head_dim, key(j));
  return data;
}

// Of the keys that a row sees those with the largest score, all others being far below it.
template <class Key>
Outputs largest_wins(const Case& c, const Data& data, const Key& key) {
  Outputs want;
  for (int64_t i = 0; i < c.seqlen_q; ++i) {
    for (int64_t h = 0; h < c.heads_q; ++h) {
      double largest = -infinity, count = 0;
      std::vector<double> sum(size_t(c.head_dim_v), 0);
      for (int64_t j = 0; j < c.keys(0); ++j) {
        if (!visible(c, data, 0, h, i, j)) continue;
        const double s = i % 3 == 2 ? 0 : (i % 3 == 0 ? 8.0 : -8.0) * key(j) * double(c.scale);
        if (s > largest) {
          largest = s;
          count = 0;
          std::fill(sum.begin(), sum.end(), 0.0);
        }
        if (s < largest) continue;
        ++count;
        for (size_t d = 0; d < sum.size(); ++d)
          sum[d] += data.v_real[size_t(h / 2 * data.most_keys + j)][d];
      }
      for (double x : sum) want.out.push_back(count == 0 ? 0 : x / count);
      want.lse.push_back(count == 0 ? -infinity : largest + std::log(count));
    }
  }
  return want;
}

TEST_CASE("scores: the largest wins, whatever its size") {
  constexpr int64_t skv = 200;
  uint64_t number = 0;
  // Many sizes; one key above (or below) all others, in the first tile, in a later one and in the
  // last.
  struct Pattern {
    const char* name;
    int64_t stands_out;
  };
  for (const Pattern& pattern :
       {Pattern{"many", -1}, {"first", 3}, {"later", 100}, {"last", skv - 1}}) {
    const auto key = [&](int64_t j) {
      if (pattern.stands_out >= 0) return j == pattern.stands_out ? 4.0f : 0.0f;
      return 0.25f * float(1 + j * 7 % 13);
    };
    for (const int exponent : {10, 18, 20, 22, 24, 28, 40, 116}) {
      for (const float sign : {1.0f, -1.0f}) {
        for (attn_dtype type : types) {
          for (uint32_t flags : {0u, uint32_t(ATTN_CAUSAL), uint32_t(ATTN_BLOCK_MASK),
                                 uint32_t(ATTN_SPLIT_INVARIANT)}) {
            Case c = shape(std::string("scores-") + pattern.name + "-" + std::to_string(exponent),
                           2, 64, 70, skv, type);
            c.thinning = fifth_of_many(number++, 60);
            c.flags = flags;
            c.scale = sign * std::ldexp(1.3f, exponent);
            c.mask_kinds = {ATTN_BLOCK_FULL,  ATTN_BLOCK_PARTIAL, ATTN_BLOCK_CAUSAL,
                            ATTN_BLOCK_EMPTY, ATTN_BLOCK_PARTIAL, ATTN_BLOCK_FULL,
                            ATTN_BLOCK_FULL};
            const auto kernels = sharing(kernels_here(Op::forward, true), c);
            if (kernels.empty()) continue;
            const Data data = one_dim(c, key);
            const Outputs want = largest_wins(c, data, key);
            for (const Kernel* kernel : kernels) {
              if (kernel->host && flags == ATTN_SPLIT_INVARIANT) continue;  // is no other way there
              if (emulated(*kernel) && exponent == 10) continue;
              if (exponent + 6 > kernel->numerics.largest_score) continue;  // q k is up to 32
              const Outputs got =
                  run_forward(backend_of(kernel->backend), c, data, kernel->name, ATTN_F32);
              if (declined(*kernel, got)) continue;
              INFO(kernel->name << " " << describe(c));
              compare_rows(data, got, want, weights_of(*kernel));
            }
          }
        }
      }
    }
  }
}

// Numbers in ascending order that every type of q and k holds, both forms of e4m3 included.
std::vector<double> ascending() {
  std::vector<double> values = {0};
  for (int exponent = -6; exponent <= 7; ++exponent) {
    for (int m = 8; m < 16; ++m) {
      values.push_back(std::ldexp(m, exponent - 3));
      values.push_back(-values.back());
    }
  }
  std::sort(values.begin(), values.end());
  return values;
}

TEST_CASE("scores: each key is above all before it, whatever their size") {
  constexpr int64_t keys = 200;  // of 225 numbers, those around 0
  const std::vector<double> values = ascending();
  const auto value = [&](int64_t j) { return values[size_t(j + 12)]; };
  uint64_t number = 0;
  for (const int exponent : {16, 18, 26, 40, 115}) {
    for (const double sign : {1.0, -1.0}) {
      for (attn_dtype type : {ATTN_F32, ATTN_BF16, ATTN_F8_E4M3FN, ATTN_F8_E4M3FNUZ}) {
        Case c = shape("ramp-" + std::to_string(exponent), 2, 64, keys, keys, type);
        c.thinning = many_on_all_kernels(number++);
        c.flags = ATTN_CAUSAL;
        c.values = Values::uniform;
        c.scale = float(std::ldexp(sign, exponent));
        Data data = make_data(c);
        const auto put = [&](Buffer& to, const View& view, int64_t row, int64_t head, double x) {
          for (int64_t d = 0; d < 64; ++d)
            encode_element(type, to.data(), view.at(0, row, head) + d, d == 0 ? x : 0, false);
        };
        // Head 0: the newest key is the largest. Head 1: the first is.
        Outputs want;
        for (int64_t i = 0; i < keys; ++i) {
          for (int64_t h = 0; h < 2; ++h) {
            const double q = h == 0 ? 1 : -1;
            const int64_t top = h == 0 ? i : 0;
            put(data.q, data.q_view, i, h, q * sign);
            want.lse.push_back(std::ldexp(q * value(top), exponent));
            const auto& v = data.v_real[size_t(top)];
            want.out.insert(want.out.end(), v.begin(), v.end());
          }
          put(data.segments[0].k, data.segments[0].k_view, i, 0, value(i));
        }
        for (const Kernel* kernel : kernels_here(Op::forward, true)) {
          if (!share(*kernel, c)) continue;
          if (exponent + 9 > kernel->numerics.largest_score) continue;  // k is up to 240
          const Outputs got =
              run_forward(backend_of(kernel->backend), c, data, kernel->name, ATTN_F32);
          if (declined(*kernel, got)) continue;
          INFO(kernel->name << " " << describe(c));
          compare_rows(data, got, want, weights_of(*kernel));
        }
      }
    }
  }
}

}  // namespace
}  // namespace attn::test
