// Descales of q, k and v from float32's smallest subnormal to 1e32, per tensor, head and block of
// keys, on every kernel that takes fp8: beside the formula in float64, row by row, since what a row
// does not see must not cost it a digit.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <string>

#include "../catch.h"
#include "backend.h"
#include "core/dtype.h"
#include "formula.h"

namespace attn::test {
namespace {

// Blocks of keys have these in turn, head h and the tensor number h and 0.
struct Extreme {
  float q;
  std::vector<float> k, v;
};
const std::vector<Extreme>& extremes() {
  static const std::vector<Extreme> all = {
      // Of V. A quotient of neighbours may be beyond float32, or one of them subnormal, or 0.
      {0.5f, {0.5f}, {1e-40f, 1, 1}},
      {0.5f, {0.5f}, {1, 1, 1e-40f}},
      {0.5f, {0.5f}, {1e-38f, 1}},
      {0.5f, {0.5f}, {1, 1e-38f}},
      {0.5f, {0.5f}, {1e-19f, 1e19f}},
      {0.5f, {0.5f}, {1e19f, 1e-19f}},
      {0.5f, {0.5f}, {1e-30f, 1e30f, 1}},
      {0.5f, {0.5f}, {1, 1e30f, 1e-30f}},
      {0.5f, {0.5f}, {1e32f, 1e-32f}},
      {0.5f, {0.5f}, {4.2e-40f, 1e-45f}},
      {0.5f, {0.5f}, {1e-38f, 3e-39f}},
      {0.5f, {0.5f}, {1e-42f, 2e-42f}},
      {0.5f, {0.5f}, {1e32f, 3e31f}},
      {0.5f, {0.5f}, {0, 1e-30f, 1e30f}},
      {0.5f, {0.5f}, {1e-40f, 0, 1}},
      {0.5f, {0.5f}, {-1e-30f, 1e30f, -1}},
      {0.5f, {0.5f}, {-1e30f, -1e-40f}},
      // Drifts from block to block, by 2^30 each.
      {0.5f, {0.5f}, {1, 1e9f, 1e18f, 1e27f, 1e18f}},
      {0.5f, {0.5f}, {1, 1e-9f, 1e-18f, 1e-27f, 1e-36f}},
      // Of Q and K, whose product is a number, or 0 beside it, or so large that a block has it all.
      {1e-30f, {1e30f, 5e29f}, {1, 0.5f}},
      {1e30f, {1e-30f, 5e-31f}, {1, 0.5f}},
      {1e-36f, {1e35f, 2e35f}, {1, 0.5f}},
      {1e36f, {1e-37f, 2e-37f}, {1, 0.5f}},
      {1e-40f, {1e-40f, 1}, {1, 0.5f}},
      {0.5f, {1e-45f, 0.5f}, {1, 0.5f}},
      {0.5f, {0, 0.5f, 1e-40f}, {1, 0.5f}},
      {0.5f, {-0.5f, 0.5f}, {1, 0.5f}},
      {-1e-20f, {1e19f, -1e19f}, {1, 0.5f}},
      {1e14f, {1e14f, 1e13f}, {1, 0.5f}},
      {1, {1e28f, 1e-28f}, {1e-30f, 1e30f}},
      {1, {1e-28f, 1e28f}, {1e-30f, 1e30f}},
  };
  return all;
}

float largest_product(const Extreme& e) {
  float largest = 0;
  for (const float k : e.k) largest = std::max(largest, std::abs(e.q * k));
  return largest;
}

struct Shape {
  const char* name;
  int64_t seqlen_q, seqlen;
  uint32_t flags;
  bool first_block_apart;  // of 128 keys too
};
// Rows that see all; that see the last block of keys and that do not; the first, or the last alone.
constexpr Shape shapes[] = {{"all", 9, 260, 0, false},
                            {"edge", 9, 133, ATTN_CAUSAL, true},
                            {"causal", 150, 150, ATTN_CAUSAL, true},
                            {"window", 150, 300, ATTN_WINDOW | ATTN_CAUSAL, false}};

constexpr double v_codes[] = {1, -0.5, 2, 0.75, 1.5, -1.25};
double v_code(int64_t key, int64_t d) {
  return v_codes[hash(11, uint64_t(key), uint64_t(d)) % std::size(v_codes)];
}

Case case_of(const Shape& shape, attn_dtype q_type, attn_dtype kv_type, attn_descale_kind kind,
             int32_t block) {
  Case c;
  c.name = std::string("extreme-") + shape.name + "-" + std::to_string(int(kind)) + "-" +
           std::to_string(block);
  c.heads_q = c.heads_kv = kind == ATTN_DESCALE_HEAD ? 2 : 1;
  c.seqlen_q = shape.seqlen_q;
  c.q_type = q_type;
  c.out_type = ATTN_F32;
  c.flags = shape.flags;
  if (shape.flags & ATTN_WINDOW) c.window_left = 40, c.window_right = -1;
  if (dtype_is_fp8(q_type)) c.q_descale = kind == ATTN_DESCALE_BLOCK ? ATTN_DESCALE_TENSOR : kind;
  SegmentCase s;
  s.k_type = s.v_type = kv_type;
  s.capacity = shape.seqlen;
  s.k_descale = s.v_descale = kind;
  s.descale_block_keys = block;
  c.segments = {s};
  return c;
}

float pick(const std::vector<float>& values, int64_t n) {
  return values[size_t(n) % values.size()];
}

// `data` of `c`, with codes of q and k that are 1, so that blocks of keys weigh alike in
// themselves.
Data data_of(const Case& c, Data data, const Extreme& e) {
  SegmentData& s = data.segments[0];
  const SegmentCase& of = c.segments[0];
  for (int64_t h = 0; h < c.heads_q; ++h) {
    for (int64_t i = 0; i < c.seqlen_q; ++i)
      for (int64_t d = 0; d < c.head_dim; ++d)
        encode_element(c.q_type, data.q.data(), data.q_view.at(0, i, h) + d, 1, false);
    for (int64_t j = 0; j < of.capacity; ++j) {
      for (int64_t d = 0; d < c.head_dim; ++d)
        encode_element(of.k_type, s.k.data(), s.k_view.at(0, j, h) + d, 1, false);
      for (int64_t d = 0; d < c.head_dim_v; ++d)
        encode_element(of.v_type, s.v.data(), s.v_view.at(0, j, h) + d, v_code(j, d), false);
    }
  }
  const auto fill = [](Buffer& to, const std::vector<float>& from) {
    for (size_t n = 0; n < to.size() / sizeof(float); ++n)
      to.as<float>()[n] = pick(from, int64_t(n));
  };
  fill(data.q_descale, {e.q});
  fill(s.k_descale, e.k);
  fill(s.v_descale, e.v);
  return data;
}

// "" or what differs first.
std::string wrong_row(const Case& c, const Extreme& e, const Kernel& kernel, const Outputs& got) {
  const SegmentCase& s = c.segments[0];
  const bool of_blocks = s.k_descale == ATTN_DESCALE_BLOCK;
  const double scale = 1 / std::sqrt(double(c.head_dim));
  const auto number = [&](int64_t h, int64_t j) {
    return of_blocks ? j / s.descale_block_keys : s.k_descale == ATTN_DESCALE_HEAD ? h : 0;
  };
  // As docs/numerics.md has it of kernels that round K and V to q's type first.
  const bool rounds_kv = rounds_kv_of(kernel, c.seqlen_q, c.heads_q / c.heads_kv);
  const auto as_computed_with = [&](float x) {
    return rounds_kv ? rounded(kernel.numerics.weights, double(x)) : double(x);
  };
  for (int64_t i = 0; i < c.seqlen_q; ++i) {
    for (int64_t h = 0; h < c.heads_q; ++h) {
      const double q = c.q_descale == ATTN_DESCALE_NONE ? 1 : double(e.q);
      std::vector<std::pair<int64_t, double>> seen;
      double max = -INFINITY, sum = 0, largest = 0;
      for (int64_t j = 0; j < s.capacity; ++j) {
        const int64_t diagonal = i + s.capacity - c.seqlen_q;
        if (c.has(ATTN_CAUSAL) && j > diagonal) continue;
        if (c.has(ATTN_WINDOW) && j < diagonal - c.window_left) continue;
        const double k = as_computed_with(pick(e.k, number(h, j)));
        seen.emplace_back(j, scale * double(c.head_dim) * q * k);
        max = std::max(max, seen.back().second);
        largest = std::max(largest, std::abs(double(pick(e.v, number(h, j)))));
      }
      for (auto& [j, weight] : seen) sum += weight = std::exp(weight - max);  // it was a score
      const size_t row = size_t(i * c.heads_q + h);
      for (int64_t d = 0; d < c.head_dim_v; ++d) {
        // Weights have three bits of mantissa, and those below 2^-17 are 0. A sum spans 2^90.
        double want = 0, allowed = 1.5e-45 + largest * std::ldexp(1, -90);
        for (const auto& [j, unscaled] : seen) {
          const double weight = unscaled / sum;
          const double v = as_computed_with(pick(e.v, number(h, j)) * float(v_code(j, d)));
          want += weight * v;
          allowed += (weight / 8 + std::ldexp(1, -17) / sum) * std::abs(v);
        }
        const double x = got.out[row * size_t(c.head_dim_v) + size_t(d)];
        if (!(std::abs(x - want) <= allowed))
          return "out of row " + std::to_string(i) + " head " + std::to_string(h) + " dim " +
                 std::to_string(d) + " is " + std::to_string(x / want) + " times " +
                 std::to_string(want) + " = 2^" + std::to_string(std::log2(std::abs(want)));
      }
      const double lse = max + std::log(sum);
      if (!(std::abs(got.lse[row] - lse) <= std::log(17.0 / 16) + 1e-5 * std::abs(lse)))
        return "lse of row " + std::to_string(i) + " is " + std::to_string(got.lse[row]) +
               ", not " + std::to_string(lse);
    }
  }
  return "";
}

TEST_CASE("descales: from the smallest to the largest, on every kernel of fp8") {
  int ran = 0;
  std::vector<std::string> names;
  for (const Kernel* kernel : kernels_here(Op::forward, true)) {
    int of_kernel = 0;
    uint64_t number = 0;
    for (const attn_dtype type : {ATTN_F8_E4M3FN, ATTN_F8_E4M3FNUZ, ATTN_F8_E5M2}) {
      if (!(kernel->limits.kv_types & type_bit(type))) continue;
      attn_dtype q_type = ATTN_F8_E4M3FN;
      for (const attn_dtype of : {ATTN_F16, ATTN_BF16, type})
        if (kernel->limits.in_types & type_bit(of)) q_type = of;
      for (const attn_descale_kind kind :
           {ATTN_DESCALE_TENSOR, ATTN_DESCALE_HEAD, ATTN_DESCALE_BLOCK}) {
        for (const int32_t block : {64, 128}) {
          if (kind != ATTN_DESCALE_BLOCK && block != 64) continue;
          for (const Shape& shape : shapes) {
            if (block == 128 && !shape.first_block_apart) continue;
            if (kind != ATTN_DESCALE_BLOCK && shape.flags) continue;
            Case c = case_of(shape, q_type, type, kind, block);
            if (kernel->limits.demands & ATTN_BLOCK_MASK) {
              c.flags |= ATTN_BLOCK_MASK;
              c.mask_kinds = {ATTN_BLOCK_FULL};
            }
            if (kernel->limits.demands & ATTN_FP8_PRECISE) c.flags |= ATTN_FP8_PRECISE;
            c.thinning.sanitized = 20;
            c.thinning.emulated = kind == ATTN_DESCALE_TENSOR ? Thinning::all : Thinning::no_other;
            std::optional<Data> made;  // for all extremes, which it does not depend on
            for (size_t n = 0; n < extremes().size(); ++n) {
              const Extreme& e = extremes()[n];
              c.thinning.number = number++;
              if (!share(*kernel, c)) continue;
              // docs/numerics.md: their weights may overflow where scores have no fractions.
              if (kernel->backend == ATTN_BACKEND_CUDA && largest_product(e) > 1e6f) continue;
              // Without a descale of q its scores would be those of another problem.
              if (!dtype_is_fp8(q_type) && e.q != 0.5f && e.q != 1) continue;
              if (!made) made = make_data(c);
              const Data data = data_of(c, *made, e);
              const Outputs got =
                  run_forward(backend_of(kernel->backend), c, data, kernel->name, c.out_type);
              if (declined(*kernel, got)) break;
              INFO(kernel->name << " " << dtype_name(type) << " " << c.name << ", number " << n);
              CHECK(got.error == "");
              if (got.error.empty()) CHECK(wrong_row(c, e, *kernel, got) == "");
              ++of_kernel;
            }
          }
        }
      }
    }
    if (of_kernel > 0) names.push_back(std::string(kernel->name) + " " + std::to_string(of_kernel));
    ran += of_kernel;
  }
  std::cout << "descales: extremes ran on";
  for (const std::string& name : names) std::cout << ", " << name;
  std::cout << std::endl;
  CHECK(ran > 0);
}

// Of one block of keys, the first, a middle or the last one, beside blocks of any size: rows that
// see it are inf or NaN, lse of those of V is what it was.
TEST_CASE("descales: inf and NaN of a block reach the rows that see it") {
  int ran = 0;
  for (const Kernel* kernel : kernels_here(Op::forward, false)) {
    const attn_dtype type =
        kernel->limits.kv_types & type_bit(ATTN_F8_E4M3FN) ? ATTN_F8_E4M3FN : ATTN_F8_E4M3FNUZ;
    if (!(kernel->limits.kv_types & type_bit(type))) continue;
    attn_dtype q_type = ATTN_F8_E4M3FN;
    for (const attn_dtype of : {ATTN_F16, ATTN_BF16, type})
      if (kernel->limits.in_types & type_bit(of)) q_type = of;
    uint64_t number = 0;
    for (const Shape& shape : shapes) {
      Case c = case_of(shape, q_type, type, ATTN_DESCALE_BLOCK, 64);
      c.thinning = on_all_kernels_in_turn(number++);
      if (!share(*kernel, c)) continue;
      const int64_t blocks = (shape.seqlen + 63) / 64;
      for (const Extreme& e :
           {Extreme{0.5f, {0.5f}, {1}}, Extreme{0.5f, {0.5f}, {1e-40f, 1e30f}}}) {
        const Data usual = data_of(c, make_data(c), e);
        const Outputs without =
            run_forward(backend_of(kernel->backend), c, usual, kernel->name, c.out_type);
        if (declined(*kernel, without)) break;
        for (const int64_t block : {int64_t{0}, blocks / 2, blocks - 1}) {
          for (const float bad : {HUGE_VALF, -HUGE_VALF, std::nanf("")}) {
            for (const bool of_v : {true, false}) {
              Data data = usual;
              (of_v ? data.segments[0].v_descale : data.segments[0].k_descale).as<float>()[block] =
                  bad;
              const Outputs got =
                  run_forward(backend_of(kernel->backend), c, data, kernel->name, c.out_type);
              INFO(kernel->name << " " << c.name << " block " << block << " of " << blocks << " is "
                                << bad << (of_v ? " of V" : " of K"));
              REQUIRE(got.error == "");
              const Outputs want = reference_answer(c, data);
              size_t finite = 0, lse = 0;
              for (size_t n = 0; n < want.out.size(); ++n)
                finite += !std::isfinite(want.out[n]) && std::isfinite(got.out[n]);
              for (size_t n = 0; of_v && n < want.lse.size(); ++n)
                lse += got.lse[n] != without.lse[n];
              CHECK(finite == 0);
              CHECK(lse == 0);
              ++ran;
            }
          }
        }
      }
    }
  }
  CHECK(ran > 0);
}

}  // namespace
}  // namespace attn::test
