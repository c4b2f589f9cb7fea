// Gradients: the reference against the formula and central differences, every kernel against the
// formula.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>

#include "backward_case.h"
#include "random_families.h"

namespace attn::test {
namespace {

Case shape(const char* name, int64_t batch, int64_t heads_q, int64_t heads_kv, int64_t dim,
           int64_t sq, int64_t skv) {
  Case c = small(name, sq, skv);
  c.batch = batch;
  c.heads_q = heads_q;
  c.heads_kv = heads_kv;
  c.head_dim = c.head_dim_v = dim;
  return c;
}

struct Named {
  const char* name;
  void (*change)(BackwardCase* bc);
};
// Each option by itself; sizes are those of a case with 2 x 4/2 heads, 7 queries and 9 keys, or
// larger.
const Named features[] = {
    {"plain", [](BackwardCase*) {}},
    {"causal", [](BackwardCase* bc) { bc->c.flags = ATTN_CAUSAL; }},
    {"top left", [](BackwardCase* bc) { bc->c.flags = ATTN_CAUSAL_TOP_LEFT; }},
    {"more queries than keys",
     [](BackwardCase* bc) {
       bc->c.flags = ATTN_CAUSAL;
       std::swap(bc->c.seqlen_q, bc->c.segments[0].capacity);
     }},
    {"window",
     [](BackwardCase* bc) {
       bc->c.flags = ATTN_WINDOW;
       bc->c.window_left = 2, bc->c.window_right = 1;
     }},
    {"window and causal",
     [](BackwardCase* bc) {
       bc->c.flags = ATTN_WINDOW | ATTN_CAUSAL;
       bc->c.window_left = 3, bc->c.window_right = -1;
     }},
    {"softcap", [](BackwardCase* bc) { bc->c.softcap = 1.5f; }},
    {"negative scale", [](BackwardCase* bc) { bc->c.scale = -0.3f; }},
    {"ALiBi", [](BackwardCase* bc) { bc->c.flags = ATTN_ALIBI; }},
    {"sinks", [](BackwardCase* bc) { bc->c.flags = ATTN_SINKS; }},
    {"sinks, causal, more queries than keys",
     [](BackwardCase* bc) {
       bc->c.flags = ATTN_SINKS | ATTN_CAUSAL;
       std::swap(bc->c.seqlen_q, bc->c.segments[0].capacity);
     }},
    {"bias", [](BackwardCase* bc) { bc->c.bias_type = ATTN_F32; }},
    {"bias for all heads",
     [](BackwardCase* bc) {
       bc->c.bias_type = ATTN_F32;
       bc->c.bias_per_batch = bc->c.bias_per_head = false;
     }},
    {"bias for all queries",
     [](BackwardCase* bc) {
       bc->c.bias_type = ATTN_F32;
       bc->c.bias_per_query = false;
     }},
    {"bias with slopes and softcap",
     [](BackwardCase* bc) {
       bc->c.bias_type = ATTN_F32;
       bc->c.flags = ATTN_BIAS_SLOPES;
       bc->c.softcap = 2;
     }},
    {"bias, its gradient summed over queries and keys",
     [](BackwardCase* bc) {
       bc->c.bias_type = ATTN_F32;
       bc->sums = {false, false, true, true};
     }},
    {"bias, its gradient a sum of nothing",
     [](BackwardCase* bc) {
       bc->c.bias_type = ATTN_F32;
       bc->c.bias_per_head = false;
       bc->sums = {false, false, false, false};
     }},
    {"block mask",
     [](BackwardCase* bc) {
       bc->c.flags = ATTN_BLOCK_MASK;
       bc->c.block_q = 3, bc->c.block_k = 4;
       bc->c.mask_per_head = true;
     }},
    {"block mask and sinks",
     [](BackwardCase* bc) {
       bc->c.flags = ATTN_BLOCK_MASK | ATTN_SINKS;
       bc->c.block_q = 1, bc->c.block_k = 5;
       bc->c.mask_kinds = {ATTN_BLOCK_EMPTY, ATTN_BLOCK_EMPTY, ATTN_BLOCK_FULL, ATTN_BLOCK_PARTIAL};
     }},
    {"lengths",
     [](BackwardCase* bc) {
       bc->c.flags = ATTN_CAUSAL;
       bc->c.segments[0].lengths = {3, int32_t(bc->c.segments[0].capacity)};
     }},
    {"a sequence without keys",
     [](BackwardCase* bc) {
       bc->c.flags = ATTN_SINKS;
       bc->c.segments[0].lengths = {0, int32_t(bc->c.segments[0].capacity) - 1};
     }},
    {"packed",
     [](BackwardCase* bc) {
       const auto sq = int32_t(bc->c.seqlen_q), skv = int32_t(bc->c.segments[0].capacity);
       bc->c.flags = ATTN_CAUSAL | ATTN_SINKS;
       bc->c.lengths_q = {sq, sq / 2};
       bc->c.segments[0].layout = ATTN_PACKED;
       bc->c.segments[0].lengths = {skv - 1, skv};
     }},
    {"packed q over padded keys",
     [](BackwardCase* bc) {
       const auto sq = int32_t(bc->c.seqlen_q);
       bc->c.lengths_q = {0, sq};
       bc->c.segments[0].lengths = {2, int32_t(bc->c.segments[0].capacity)};
     }},
    {"other dimension of v", [](BackwardCase* bc) { bc->c.head_dim_v = bc->c.head_dim + 5; }},
};

BackwardCase with_feature(Case c, const Named& feature) {
  BackwardCase bc;
  bc.c = std::move(c);
  feature.change(&bc);
  const bool d_lse = bc.d_lse;
  const auto sums = bc.sums;
  bc = backward_of(bc.c);
  bc.d_lse = d_lse;
  bc.sums = sums;
  return bc;
}

// dL/dx by the difference of L at x + h and x - h, x being any number that L is computed from.
template <class Number, class Set>
double central_difference(const BackwardCase& bc, BackwardData& data, Number& x, Set&& set) {
  const Number before = x;
  const double h = 1e-4;
  set(x, Number(before + h));
  const double above = x, right = formula_loss(bc, data);
  set(x, Number(before - h));
  const double below = x, left = formula_loss(bc, data);
  x = before;
  return (right - left) / (above - below);
}

Backend& reference() {
  return backend_of(ATTN_BACKEND_REFERENCE);
}

TEST_CASE("backward: the formula is the derivative, by central differences in float64") {
  uint64_t seed = 1;
  for (const Named& feature : features) {
    for (const bool d_lse : {false, true}) {
      BackwardCase bc = with_feature(shape(feature.name, 2, 4, 2, 6, 7, 9), feature);
      bc.c.seed = seed++;
      bc.d_lse = d_lse;
      INFO(describe(bc));
      BackwardData data = make_backward_data(bc);
      // out in float64; lse is float32, so P is off by up to 2^-24 of lse.
      const BackwardRun run = run_backward(reference(), bc, data, "bwd_reference", ATTN_F64);
      REQUIRE(run.got.error == "");
      const BackwardTruth truth = formula_backward(bc, data, run.forward);
      const auto plain = [](auto& x, auto value) { x = value; };
      const auto agree = [&](const char* name, double got, double want, double size) {
        INFO(name << " is " << got << ", by differences " << want << " of " << size);
        CHECK(std::abs(got - want) <= 2e-6 * size + 1e-6);
      };
      Draw draw{bc.c.seed, 7};
      Data& of = data.forward;
      const auto some = [&](const char* name, std::vector<std::vector<double>>& rows,
                            const std::vector<double>& got, const std::vector<double>& size) {
        for (int n = 0; n < 12; ++n) {
          const size_t row = size_t(draw(rows.size()));
          if (rows[row].empty()) continue;
          const size_t d = size_t(draw(rows[row].size())), at = row * rows[row].size() + d;
          agree(name, got[at], central_difference(bc, data, rows[row][d], plain), size[at]);
        }
      };
      some("dq", of.q_real, truth.exact.dq, truth.magnitude.dq);
      some("dk", of.k_real, truth.exact.dk, truth.magnitude.dk);
      some("dv", of.v_real, truth.exact.dv, truth.magnitude.dv);
      for (size_t h = 0; h < truth.exact.d_sinks.size(); ++h)
        agree("d_sinks", truth.exact.d_sinks[h],
              central_difference(bc, data, of.sinks.as<float>()[h], plain),
              10 + truth.magnitude.d_sinks[h]);
      // Elements of bias are those of d_bias where nothing else is summed.
      if (bc.sums) continue;
      for (int n = 0; n < 12 && !truth.exact.d_bias.empty(); ++n) {
        const size_t at = size_t(draw(truth.exact.d_bias.size()));
        float& x = of.bias.as<float>()[at];
        if (std::isinf(x)) continue;
        agree("d_bias", truth.exact.d_bias[at], central_difference(bc, data, x, plain),
              10 + truth.magnitude.d_bias[at]);
      }
    }
  }
}

TEST_CASE("backward: the reference is the formula") {
  uint64_t seed = 100;
  for (const Named& feature : features) {
    for (const attn_dtype type : {ATTN_F32, ATTN_F16, ATTN_BF16}) {
      BackwardCase bc = with_feature(shape(feature.name, 2, 4, 2, 6, 7, 9), feature);
      bc.c = with_type(bc.c, type);
      bc.c.out_type = type;
      bc.c.seed = seed++;
      bc.d_lse = seed % 2;
      bc.gradient_type = seed % 3 ? ATTN_F64 : ATTN_DTYPE_NONE;
      if (bc.c.bias_type && seed % 3) bc.d_bias_type = ATTN_F64;
      const BackwardData data = make_backward_data(bc);
      INFO(describe(bc));
      const BackwardRun run = run_backward(reference(), bc, data, "bwd_reference");
      REQUIRE(run.got.error == "");
      CHECK(compare(bc, data, *find_kernel("bwd_reference"), run.got,
                    formula_backward(bc, data, run.forward)) == "");
    }
  }
}

TEST_CASE("backward: every option on every kernel") {
  // More rows and keys than a tile has. The reference has a test of its own.
  constexpr attn_dtype types[] = {ATTN_F32, ATTN_F16, ATTN_BF16};
  uint64_t seed = 200;
  for (const Named& feature : features) {
    const attn_dtype type = types[seed % 3];
    BackwardCase bc = with_feature(shape(feature.name, 2, 4, 2, 40, 110, 210), feature);
    bc.c = with_type(bc.c, type);
    bc.c.out_type = type;
    bc.c.seed = seed++;
    bc.d_lse = seed % 2;
    bc.gradient_type = seed % 4 == 0 ? ATTN_F32 : ATTN_DTYPE_NONE;
    if (sanitized && seed % 8) continue;
    check_backward(bc, false);
  }
}

// On devices: types, dimensions, strides and sizes of mask blocks that kernels of matrix units
// take.
std::vector<const Kernel*> device_kernels() {
  std::vector<const Kernel*> kernels = kernels_here(Op::backward, false);
  std::erase_if(kernels, [](const Kernel* kernel) { return kernel->host; });
  return kernels;
}

TEST_CASE("backward: every option on devices") {
  uint64_t seed = 300;
  for (const Named& feature : features) {
    for (const attn_dtype type : {ATTN_F16, ATTN_BF16}) {
      BackwardCase bc = with_feature(shape(feature.name, 2, 4, 2, 48, 150, 210), feature);
      bc.c.head_dim_v = (bc.c.head_dim_v + 7) / 8 * 8;
      if (bc.c.has(ATTN_BLOCK_MASK)) bc.c.block_q = 64, bc.c.block_k = seed % 2 ? 64 : 128;
      bc.c = with_type(bc.c, type);
      bc.c.out_type = type;
      bc.c.seed = seed++;
      bc.d_lse = seed % 2;
      bc.gradient_type = seed % 3 == 0 ? ATTN_F32 : ATTN_DTYPE_NONE;
      check_backward(bc, device_kernels());
    }
  }
}

TEST_CASE("backward: head dimensions on devices") {
  uint64_t seed = 400;
  for (int64_t dim = 8; dim <= 256; dim += 8, ++seed) {
    Case c = shape("head_dim", 1, 4, seed % 3 ? 1 : 4, dim, 130 + int64_t(seed % 50), 200);
    c.head_dim_v = seed % 2 ? dim : 264 - dim;
    c.flags = seed % 4 == 0 ? 0 : ATTN_CAUSAL;
    if (seed % 5 == 0) {
      c.flags |= ATTN_BLOCK_MASK;
      c.block_q = 64, c.block_k = 64;
    }
    if (seed % 3 == 0) c.softcap = 5;
    c = with_type(c, seed % 2 ? ATTN_BF16 : ATTN_F16);
    c.out_type = c.q_type;
    c.seed = seed;
    check_backward(backward_of(c), device_kernels());
  }
}

// Blocks of up to 256 keys, several groups of which add to a tile of dq.
TEST_CASE("backward: many blocks of keys on devices") {
  uint64_t seed = 450;
  for (const auto& [dim, keys] : {std::pair<int64_t, int64_t>{64, 1310}, {128, 2590}, {256, 1310}})
    for (const uint32_t flags :
         {0u, uint32_t{ATTN_CAUSAL}, uint32_t{ATTN_WINDOW}, uint32_t{ATTN_ALIBI | ATTN_CAUSAL}}) {
      Case c = shape("blocks of keys", 1, 2, 1, dim, 200, keys);
      c.flags = flags;
      if (c.has(ATTN_ALIBI)) c.softcap = 3;
      if (c.has(ATTN_WINDOW)) c.window_left = 500, c.window_right = 10;
      c = with_type(c, seed % 2 ? ATTN_BF16 : ATTN_F16);
      c.out_type = c.q_type;
      c.seed = seed++;
      check_backward(backward_of(c), device_kernels());
    }
}

// d_bias with every choice of the dimensions that it sums over, and with every way in which the
// bias itself repeats, over several tiles of queries and keys. Where few tiles of d_bias are left,
// thread blocks share a sum.
TEST_CASE("backward: the gradient of a bias on devices") {
  uint64_t seed = 480;
  for (unsigned sums = 0; sums < 16; ++sums) {
    for (unsigned repeats = 0; repeats < 8; ++repeats) {
      ++seed;
      if (sums != 0 && repeats != (sums & 7)) continue;
      if (sanitized && seed % 6) continue;
      const int64_t dims[] = {64, 128, 40, 256};
      Case c = shape("bias", 3, 4, seed % 2 ? 2 : 4, dims[seed % 4], 70 + int64_t(seed % 80),
                     130 + int64_t(seed % 200));
      const uint32_t flags[] = {0,
                                ATTN_CAUSAL,
                                ATTN_WINDOW,
                                ATTN_CAUSAL | ATTN_SINKS,
                                ATTN_CAUSAL_TOP_LEFT,
                                ATTN_BLOCK_MASK,
                                ATTN_ALIBI};
      c.flags = flags[seed % 7];
      if (c.has(ATTN_WINDOW)) c.window_left = 50, c.window_right = 20;
      if (c.has(ATTN_BLOCK_MASK)) c.block_q = 64, c.block_k = 64;
      if (seed % 5 == 0) c.softcap = 3;
      if (seed % 3 == 0) c.segments[0].lengths = {int32_t(c.segments[0].capacity), 0, 77};
      if (seed % 6 == 1) c.segments[0].layout = ATTN_PACKED, c.segments[0].lengths = {60, 5, 101};
      c = with_type(c, seed / 4 % 2 ? ATTN_BF16 : ATTN_F16);
      c.out_type = c.q_type;
      c.bias_type = seed % 3 == 1 ? c.q_type : ATTN_F32;
      c.bias_per_batch = !(repeats & 1), c.bias_per_head = !(repeats & 2);
      c.bias_per_query = !(repeats & 4);
      if (seed % 8 == 3) c.bias_key_stride = 2, c.bias_first = 3;
      c.seed = seed;
      BackwardCase bc = backward_of(c);
      bc.d_lse = seed % 2;
      if (seed % 5 < 3) bc.d_bias_type = ATTN_F32;
      if (sums != 0 && sums != 15)
        bc.sums = {(sums & 1) != 0, (sums & 2) != 0, (sums & 4) != 0, (sums & 8) != 0};
      if (seed % 5 == 1) bc.accumulate = ATTN_GRAD_BIAS;
      check_backward(bc, device_kernels());
    }
  }
}

// 1536 tiles of scores for one of d_bias, which no more than 512 thread blocks share: each goes
// over three.
TEST_CASE("backward: the gradient of a bias, several tiles of scores for a block") {
  uint64_t seed = 790;
  for (const attn_dtype type : {ATTN_F16, ATTN_BF16})
    for (const int64_t dim : {64, 128}) {
      Case c = with_type(shape("tiles", 48, 32, 32, dim, 20, 30), type);
      c.out_type = c.bias_type = type;
      c.bias_per_batch = c.bias_per_head = false;
      c.seed = ++seed;
      check_backward(backward_of(c), device_kernels());
    }
}

// Kernels of Hopper copy a bias of 16 bits whose rows are at multiples of 16 bytes, 8 keys at a
// time. Sequences end within the 8.
TEST_CASE("backward: a bias of each batch entry and head on devices") {
  uint64_t seed = 800;
  for (const int64_t dim : {64, 128, 256})
    for (const attn_dtype type : {ATTN_F16, ATTN_BF16})
      for (const attn_dtype bias_type : {type, ATTN_F32}) {
        ++seed;
        if (sanitized && seed % 3) continue;
        Case c = shape("rows", 3, 4, 2, dim, 150, 328);
        c.flags = seed % 3 == 0 ? ATTN_CAUSAL : 0;
        c.segments[0].lengths = {328, 0, 77};
        if (seed % 5 < 2) c.segments[0].layout = ATTN_PACKED, c.segments[0].lengths = {60, 5, 301};
        c = with_type(c, type);
        c.out_type = type;
        c.bias_type = bias_type;
        c.seed = seed;
        check_backward(backward_of(c), device_kernels());
      }
}

// A key whose K or V is NaN, and which a bias hides from all queries but one, reaches the gradients
// of that one; so does a query whose d_out is NaN and which sees one key only.
TEST_CASE("backward: NaN stays with those whom a bias lets see it") {
  for (const Kernel* kernel : device_kernels()) {
    if (!(kernel->limits.features & feature_bias)) continue;
    for (const char* what : {"k", "v", "d_out"}) {
      const bool of_key = what[0] != 'd';
      Case c = shape("nan", 1, 2, 1, kernel->limits.head_dim.max, 400, 600);
      c = with_type(c, float_type_of(*kernel));
      c.out_type = c.q_type;
      c.bias_type = ATTN_F32;
      if (kernel->limits.demands & ATTN_BLOCK_MASK) c.flags |= ATTN_BLOCK_MASK;
      c.block_q = c.block_k = 64;
      c.mask_kinds = {ATTN_BLOCK_FULL};
      const BackwardCase bc = backward_of(c);
      BackwardData data = make_backward_data(bc);
      Data& of = data.forward;
      const int64_t row = 330, key = 130;
      float* const bias = of.bias.as<float>();
      const int64_t at = of.bias_stride[1] + row * of.bias_stride[2];  // of head 1
      for (int64_t n = key; of_key && n < 2 * of.bias_stride[1]; n += of.bias_stride[2])
        bias[n] = -INFINITY;
      for (int64_t j = 0; !of_key && j < c.capacity(); ++j) bias[at + j] = -INFINITY;
      bias[at + key] = 0;
      if (of_key) {
        SegmentData& kv = of.segments[0];
        const View& view = what[0] == 'k' ? kv.k_view : kv.v_view;
        encode_element(view.type, (what[0] == 'k' ? kv.k : kv.v).data(), view.at(0, key, 0) + 3,
                       NAN, false);
        (what[0] == 'k' ? of.k_real : of.v_real)[size_t(key)][3] = NAN;
      } else {
        encode_element(data.d_out_view.type, data.d_out.data(), data.d_out_view.at(0, row, 1) + 3,
                       NAN, false);
        data.d_out_real[size_t(c.seqlen_q + row)][3] = NAN;
      }
      const BackwardRun run = run_backward(backend_of(kernel->backend), bc, data, kernel->name);
      if (declined(*kernel, run)) continue;
      INFO(kernel->name << " " << what);
      REQUIRE(run.got.error == "");
      const BackwardTruth want = formula_backward(bc, data, run.forward);
      // Blocks have up to 128 queries and 256 keys. The out of a query that sees V is NaN, and then
      // dv of all keys that the query sees may be.
      size_t wrong = 0, missing = 0;
      const auto check = [&](const std::vector<double>& got, const std::vector<double>& exact,
                             int64_t rows, int64_t width, int64_t place, int64_t block) {
        for (size_t n = 0; n < got.size(); ++n) {
          const int64_t here = int64_t(n) / width % rows;
          if (std::isnan(exact[n]))
            missing += !std::isnan(got[n]);
          else if (here / block != place / block)
            wrong += std::isnan(got[n]);
        }
      };
      check(run.got.dq, want.exact.dq, c.seqlen_q, c.head_dim, row, 128);
      check(run.got.dk, want.exact.dk, c.capacity(), c.head_dim, key, 256);
      check(run.got.dv, want.exact.dv, c.capacity(), c.head_dim_v, key,
            what[0] == 'v' ? c.capacity() : 256);
      check(run.got.d_bias, want.exact.d_bias, c.seqlen_q, c.capacity(), row, 1);
      CHECK(wrong == 0);
      CHECK(missing == 0);
    }
  }
}

// As frameworks hide keys, here all of them. P has no right bits then, but is finite.
TEST_CASE("backward: a bias of the lowest number leaves gradients finite on devices") {
  for (const Kernel* kernel : device_kernels()) {
    if (!(kernel->limits.features & feature_bias)) continue;
    Case c = shape("lowest", 1, 2, 1, kernel->limits.head_dim.max, 100, 150);
    c = with_type(c, float_type_of(*kernel));
    c.out_type = c.q_type;
    c.bias_type = ATTN_F32;
    c.bias_value = std::numeric_limits<float>::lowest();
    const BackwardCase bc = backward_of(c);
    const BackwardRun run =
        run_backward(backend_of(kernel->backend), bc, make_backward_data(bc), kernel->name);
    if (declined(*kernel, run)) continue;
    INFO(kernel->name);
    REQUIRE(run.got.error == "");
    for (const auto* all : {&run.got.dq, &run.got.dk, &run.got.dv, &run.got.d_bias})
      CHECK(std::all_of(all->begin(), all->end(), [](double x) { return std::isfinite(x); }));
  }
}

TEST_CASE("backward: gradients are added to what is there") {
  for (const attn_dtype type : {ATTN_F32, ATTN_BF16}) {
    for (uint32_t gradients = 1; gradients < 32; ++gradients) {
      Case c = shape("accumulate", 2, 4, 2, 24, 30, 50);
      c.flags = ATTN_CAUSAL | ATTN_SINKS;
      c.bias_type = ATTN_F32;
      c.bias_per_batch = false;
      c.segments[0].lengths = {50, 31};
      c = with_type(c, type);
      c.out_type = type;
      BackwardCase bc = backward_of(c);
      bc.gradients = gradients;
      bc.accumulate = gradients & uint32_t(hash(3, gradients));
      bc.gradient_type = gradients % 2 ? ATTN_F32 : ATTN_DTYPE_NONE;
      if (sanitized && gradients % 8 != 7) continue;
      check_backward(bc);
    }
  }
}

// Two runs over halves of the keys, with the out and lse of the whole: the gradients of the whole.
TEST_CASE("backward: a part of the keys with the lse of all has its part of the gradients") {
  BackwardCase bc = backward_of(shape("ring", 1, 2, 1, 8, 5, 12));
  bc.gradient_type = ATTN_F64;
  const BackwardData data = make_backward_data(bc);
  const BackwardRun whole = run_backward(reference(), bc, data, "bwd_reference");
  REQUIRE(whole.got.error == "");
  std::vector<double> dq(whole.got.dq.size());
  for (const int64_t first : {0, 6}) {
    // The same buffers, half as many keys.
    auto p = attn_problem{};
    p.struct_size = sizeof p;
    p.batch = 1, p.heads_q = 2, p.heads_kv = 1, p.head_dim = 8, p.seqlen_q = 5;
    p.q_type = ATTN_F32;
    attn_segment segment{};
    segment.struct_size = sizeof segment;
    segment.k_type = segment.v_type = ATTN_F32;
    segment.seqlen = 6;
    p.num_segments = 1, p.segments = &segment;
    std::vector<float> out(whole.forward.out.begin(), whole.forward.out.end()),
        lse(whole.forward.lse.size());
    for (size_t row = 0; row < lse.size(); ++row)  // [i, h] becomes [h, i]
      lse[row % 2 * 5 + row / 2] = float(whole.forward.lse[row]);
    attn_segment_args segment_args{};
    segment_args.struct_size = sizeof segment_args;
    segment_args.k = data.forward.segments[0].k.as<float>() + 8 * first;
    segment_args.v = data.forward.segments[0].v.as<float>() + 8 * first;
    attn_args args{};
    args.struct_size = sizeof args;
    args.q = data.forward.q.data();
    args.out = out.data(), args.lse = lse.data();
    args.num_segments = 1, args.segments = &segment_args;
    attn_backward_problem bp{};
    bp.struct_size = sizeof bp;
    bp.forward = &p;
    bp.dq_type = bp.dk_type = bp.dv_type = ATTN_F64;
    attn_plan* plan = nullptr;
    REQUIRE(attn_plan_create_backward(reference().context, &bp, &plan) == ATTN_OK);
    attn_backward_args ba{};
    ba.struct_size = sizeof ba;
    ba.forward = &args;
    ba.d_out = data.d_out.data();
    std::vector<double> part_q(dq.size()), part_k(48), part_v(48);
    ba.dq = part_q.data(), ba.dk = part_k.data(), ba.dv = part_v.data();
    void* workspace = nullptr;
    REQUIRE(attn_alloc(reference().context, attn_plan_workspace(plan), &workspace) == ATTN_OK);
    const attn_status status =
        attn_run_backward(plan, &ba, workspace, attn_plan_workspace(plan), nullptr);
    attn_free(reference().context, workspace);
    attn_plan_destroy(plan);
    INFO(attn_last_error());
    REQUIRE(status == ATTN_OK);
    // q and dq here are [i, h], those of the whole [h, i].
    for (size_t i = 0; i < 5; ++i)
      for (size_t h = 0; h < 2; ++h)
        for (size_t d = 0; d < 8; ++d) dq[(h * 5 + i) * 8 + d] += part_q[(i * 2 + h) * 8 + d];
    for (size_t n = 0; n < 48; ++n) {
      CHECK(std::abs(part_k[n] - whole.got.dk[size_t(first) * 8 + n]) < 1e-12);
      CHECK(std::abs(part_v[n] - whole.got.dv[size_t(first) * 8 + n]) < 1e-12);
    }
  }
  for (size_t n = 0; n < dq.size(); ++n) CHECK(std::abs(dq[n] - whole.got.dq[n]) < 1e-12);
}

// A NaN in one row of d_out reaches the gradients of the row and of the keys that it sees, and of
// nobody else whom no tile joins to it.
TEST_CASE("backward: NaN stays with those who see it") {
  for (const Kernel* kernel : kernels_here(Op::backward, true)) {
    Case c = shape("nan", 2, 2, 2, 16, 600, 600);
    c.flags = ATTN_WINDOW | ATTN_CAUSAL;
    c.window_left = 10;
    if (kernel->backend == ATTN_BACKEND_REFERENCE) c.seqlen_q = c.segments[0].capacity = 60;
    if (!kernel->host) {
      c = with_type(c, float_type_of(*kernel));
      c.out_type = c.q_type;
      if (kernel->limits.demands & ATTN_BLOCK_MASK) c.flags |= ATTN_BLOCK_MASK;
      c.block_q = c.block_k = 64;
      c.mask_kinds = {ATTN_BLOCK_FULL};
    }
    const BackwardCase bc = backward_of(c);
    BackwardData data = make_backward_data(bc);
    const int64_t i = 20;
    encode_element(data.d_out_view.type, data.d_out.data(), data.d_out_view.at(0, i, 1) + 3, NAN,
                   false);
    data.d_out_real[size_t(c.seqlen_q + i)][3] = NAN;
    const BackwardRun run = run_backward(backend_of(kernel->backend), bc, data, kernel->name);
    if (declined(*kernel, run)) continue;
    INFO(kernel->name);
    REQUIRE(run.got.error == "");
    const BackwardTruth want = formula_backward(bc, data, run.forward);
    // Tiles are at most 256 rows and keys; what they hold together may be NaN as well.
    const int64_t reach = kernel->backend == ATTN_BACKEND_REFERENCE ? 0 : 512;
    size_t wrong = 0;
    const auto check = [&](const std::vector<double>& got, const std::vector<double>& exact) {
      for (size_t n = 0; n < got.size(); ++n) {
        const auto row = int64_t(n / 16) % c.seqlen_q, plane = int64_t(n / 16) / c.seqlen_q;
        if (std::isnan(exact[n])
                ? !std::isnan(got[n])
                : std::isnan(got[n]) && (plane != 1 || reach == 0 || row >= i + reach))
          ++wrong;
      }
    };
    check(run.got.dq, want.exact.dq);
    check(run.got.dk, want.exact.dk);
    check(run.got.dv, want.exact.dv);
    CHECK(wrong == 0);
  }
}

Case random_case(uint64_t seed) {
  Draw draw{seed, 31};
  Case c = small("random", 1, 1);
  c.seed = seed;
  const int64_t dims[] = {1, 7, 16, 24, 32, 40, 64, 72, 80, 128, 130};
  const int64_t lengths[] = {1, 2, 3, 17, 48, 63, 64, 65, 96, 97, 130, 200, 257};
  c.batch = 1 + draw(3);
  c.heads_kv = 1 + draw(2);
  c.heads_q = c.heads_kv * (1 + draw(4));
  c.head_dim = draw.pick(dims);
  c.head_dim_v = draw.chance(3) ? draw.pick(dims) : c.head_dim;
  c.seqlen_q = draw.pick(lengths);
  SegmentCase& s = c.segments[0];
  s.capacity = draw.pick(lengths);
  const attn_dtype types[] = {ATTN_F32, ATTN_F16, ATTN_BF16};
  c.q_type = s.k_type = s.v_type = draw.pick(types);
  c.out_type = draw.chance(3) ? ATTN_F32 : c.q_type;
  const Arrange arranges[] = {Arrange::contiguous, Arrange::padded,   Arrange::head_major,
                              Arrange::odd,        Arrange::reversed, Arrange::flipped};
  c.q_arrange = draw.pick(arranges);
  c.out_arrange = draw.pick(arranges);
  s.arrange =
      draw.chance(6) && c.head_dim == c.head_dim_v ? Arrange::interleaved : draw.pick(arranges);
  const bool packed_q = draw.chance(3);
  if (packed_q) draw_lengths_q(draw, &c);
  if (draw.chance(3)) s.layout = ATTN_PACKED;
  if (s.layout == ATTN_PACKED || draw.chance(3)) draw_lengths(draw, c.batch, &s);
  if (draw.chance(2)) c.flags |= draw.chance(3) ? ATTN_CAUSAL_TOP_LEFT : ATTN_CAUSAL;
  if (draw.chance(4)) {
    c.flags |= ATTN_WINDOW;
    c.window_left = draw(60) - 1;
    c.window_right = draw(20) - 1;
  }
  if (draw.chance(4)) c.flags |= ATTN_ALIBI;
  if (draw.chance(3)) c.flags |= ATTN_SINKS;
  if (draw.chance(4)) c.softcap = 3;
  if (draw.chance(5)) c.scale = draw.chance(2) ? 0.25f : -0.1f;
  if (!packed_q && draw.chance(3)) {
    c.bias_type = draw.chance(2) ? c.q_type : draw.chance(2) ? ATTN_F16 : ATTN_F32;
    c.bias_per_batch = draw.chance(2);
    c.bias_per_head = draw.chance(2);
    c.bias_per_query = !draw.chance(4);
    if (draw.chance(3)) c.flags |= ATTN_BIAS_SLOPES;
    if (draw.chance(4)) c.bias_key_stride = 2, c.bias_first = 3;
  }
  if (!packed_q && draw.chance(4)) {
    c.flags |= ATTN_BLOCK_MASK;
    const int32_t sizes[] = {64, 128, 16, 33, 1};
    c.block_q = draw.pick(sizes);
    c.block_k = draw.pick(sizes);
    c.mask_per_batch = draw.chance(2);
    c.mask_per_head = draw.chance(2);
  }
  const double sigmas[] = {0.5, 1, 1, 2};
  c.sigma = draw.pick(sigmas);
  return c;
}

BackwardCase random_backward(uint64_t seed) {
  Draw draw{seed, 32};
  BackwardCase bc = backward_of(random_case(seed));
  const Arrange arranges[] = {Arrange::contiguous, Arrange::padded,   Arrange::head_major,
                              Arrange::odd,        Arrange::reversed, Arrange::flipped};
  bc.d_out_arrange = draw.pick(arranges);
  bc.gradient_arrange = draw.pick(arranges);
  bc.d_lse = draw.chance(2);
  if (draw.chance(3)) bc.gradient_type = ATTN_F32;
  if (draw.chance(4)) bc.d_out_type = ATTN_F32;
  if (draw.chance(4)) bc.gradients &= uint32_t(1 + draw(31));
  if (bc.gradients == 0) bc.gradients = ATTN_GRAD_V;
  if (draw.chance(4)) bc.accumulate = bc.gradients & uint32_t(draw(32));
  if (bc.wants(ATTN_GRAD_BIAS) && draw.chance(3)) {
    bc.sums = {draw.chance(2), draw.chance(2), draw.chance(2), draw.chance(2)};
    if (!(*bc.sums)[0] || !(*bc.sums)[1] || !(*bc.sums)[2] || !(*bc.sums)[3]) {
      if (draw.chance(2)) bc.d_bias_type = ATTN_F32;
    } else {
      bc.sums.reset();  // zeros in all strides mean something else
    }
  }
  return bc;
}

TEST_CASE("backward: random problems") {
  constexpr uint64_t first = 5000, count = 120;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    if (sanitized && seed % 10) continue;
    check_backward(random_backward(seed), seed % 10 == 0);
  }
}

// A random problem that kernels of devices take.
BackwardCase random_on_devices(uint64_t seed) {
  Draw draw{seed, 33};
  BackwardCase bc = random_backward(seed);
  Case& c = bc.c;
  const auto fit = [&](int64_t dim) {
    return std::min<int64_t>(256, (dim + 7) / 8 * 8 << draw(2));
  };
  const bool same = c.head_dim == c.head_dim_v;
  c.head_dim = fit(c.head_dim);
  c.head_dim_v = same ? c.head_dim : fit(c.head_dim_v);
  const attn_dtype type = draw.chance(2) ? ATTN_BF16 : ATTN_F16;
  const bool narrow_bias = c.bias_type && c.bias_type != ATTN_F32;
  c.q_type = c.segments[0].k_type = c.segments[0].v_type = type;
  if (c.bias_type) c.bias_type = narrow_bias ? type : ATTN_F32;
  c.out_type = draw.chance(4) ? ATTN_F32 : type;
  bc.d_out_type = type;
  c.flags &= ~uint32_t(ATTN_BIAS_SLOPES);
  for (Arrange* arrange : {&c.q_arrange, &c.out_arrange, &c.segments[0].arrange})  // of forward too
    if (*arrange == Arrange::reversed || *arrange == Arrange::flipped) *arrange = Arrange::padded;
  for (Arrange* arrange : {&c.q_arrange, &c.out_arrange, &c.segments[0].arrange, &bc.d_out_arrange,
                           &bc.gradient_arrange})
    if (*arrange == Arrange::odd) *arrange = Arrange::padded;
  c.block_q = draw.chance(2) ? 64 : 128;
  c.block_k = draw.chance(2) ? 64 : 128;
  return bc;
}

TEST_CASE("backward: random problems on devices") {
  for (uint64_t seed = 7000; seed < 7100 && !device_kernels().empty(); ++seed)
    check_backward(random_on_devices(seed), device_kernels());
}
TEST_CASE("backward: random problems on devices, the second hundred") {
  for (uint64_t seed = 7100; seed < 7200 && !device_kernels().empty(); ++seed)
    check_backward(random_on_devices(seed), device_kernels());
}

// On the kernel that is chosen, of a device if there is one. ATTN_GRADIENTS=N,FIRST: N problems
// from number FIRST on, by default 60.
TEST_CASE("backward: as exact as plain operators") {
  Backend& backend =
      backend_of(device_kernels().empty() ? ATTN_BACKEND_CPU : device_kernels()[0]->backend);
  const char* wanted = std::getenv("ATTN_GRADIENTS");
  char* end = nullptr;
  const uint64_t count = wanted ? std::strtoull(wanted, &end, 10) : 60,
                 first = end && *end == ',' ? std::strtoull(end + 1, nullptr, 10) : 0;
  std::map<std::string, int> ran;
  for (uint64_t seed = 8000 + first; seed < 8000 + first + count; ++seed) {
    Draw draw{seed, 34};
    BackwardCase bc = random_on_devices(seed);
    bc.accumulate = 0;
    SegmentCase& s = bc.c.segments[0];
    if (draw.chance(5) && bc.c.lengths_q.empty() && s.lengths.empty()) {  // many blocks of keys
      bc.c.batch = 1;
      s.capacity = 300 + draw(700);
    }
    const BackwardData data = make_backward_data(bc);
    const BackwardRun run = run_backward(backend, bc, data, nullptr);
    INFO(run.kernel << " " << describe(bc));
    REQUIRE(run.got.error == "");
    ++ran[run.kernel];
    CHECK(compare_with_plain_operators(bc, data, run) == "");
  }
  for (const auto& [kernel, times] : ran)
    if (wanted) std::printf("%s: %d problems\n", kernel.c_str(), times);
}

// Runs the kernel under each limit of multiprocessors, and checks that bits are equal, unless it
// declines.
void check_equal_bits(const Kernel& kernel, BackwardCase bc, const BackwardData& data,
                      const std::vector<int>& max_sms) {
  std::vector<unsigned char> first;
  for (const int most : max_sms) {
    bc.c.max_sms = most;
    const BackwardRun run = run_backward(backend_of(kernel.backend), bc, data, kernel.name);
    if (declined(kernel, run)) return;
    INFO(kernel.name << " " << describe(bc));
    REQUIRE(run.got.error == "");
    if (first.empty()) first = run.got.bits;
    CHECK((run.got.bits == first));  // not printed
  }
}

TEST_CASE("backward: equal bits in every run on devices") {
  for (uint64_t seed = 7200; seed < 7212; ++seed) {
    BackwardCase bc = random_on_devices(seed);
    if (seed % 3 == 0) {  // many tiles
      Case c = shape("runs", 2, 8, 2, seed % 2 ? 128 : seed % 4 ? 64 : 256, 700, 900);
      c.flags = seed % 2 ? ATTN_CAUSAL | ATTN_SINKS : ATTN_SINKS;
      c = with_type(c, seed % 4 ? ATTN_BF16 : ATTN_F16);
      c.out_type = c.q_type;
      bc = backward_of(c);
    }
    const BackwardData data = make_backward_data(bc);
    for (const Kernel* kernel : device_kernels())
      check_equal_bits(*kernel, bc, data, {0, 5, 25, 45});
  }
}

TEST_CASE("backward: equal bits in 100 runs with a bias") {
  for (const int64_t dim : {64, 128, 256}) {
    Case c = shape("bias", 2, 4, 2, dim, 300, 700);
    c = with_type(c, dim == 128 ? ATTN_F16 : ATTN_BF16);
    c.out_type = c.q_type;
    c.bias_type = ATTN_F32;
    c.bias_per_batch = c.bias_per_head = dim == 64;
    c.bias_per_query = dim != 256;
    const BackwardCase bc = backward_of(c);
    const BackwardData data = make_backward_data(bc);
    std::vector<int> max_sms(100);
    for (size_t n = 0; n < 100; n += 5) max_sms[n] = int(n) + 2;
    for (const Kernel* kernel : device_kernels()) check_equal_bits(*kernel, bc, data, max_sms);
  }
}

// More items than multiprocessors, and several groups of blocks that add to a tile of dq.
TEST_CASE("backward: equal bits on any number of multiprocessors") {
  for (const int64_t dim : {64, 128, 256}) {
    for (const bool causal : {false, true}) {
      Case c = shape("multiprocessors", 1, 4, 2, dim, 600, 8 * dim + 300);
      c.flags = causal ? ATTN_CAUSAL : 0;
      c = with_type(c, causal ? ATTN_BF16 : ATTN_F16);
      c.out_type = c.q_type;
      const BackwardCase bc = backward_of(c);
      const BackwardData data = make_backward_data(bc);
      for (const Kernel* kernel : device_kernels())
        if (!kernel->limits.demands && kernel->limits.head_dim.max <= std::max<int64_t>(dim, 128))
          check_equal_bits(*kernel, bc, data, {0, 7, 40, 100, 0, 0, 2, 1});  // pairs decline 1
    }
  }
}

TEST_CASE("backward: equal bits on every device") {
  std::vector<std::unique_ptr<Backend>> devices;
  for (int n = 0; !device_kernels().empty() && !stand_in(); ++n) {
    auto device = std::make_unique<Backend>(ATTN_BACKEND_CUDA, 0, n);
    if (!device->context) break;
    devices.push_back(std::move(device));
  }
  if (devices.size() < 2) ATTN_SKIP("it needs several CUDA devices");
  std::printf("%d CUDA devices\n", int(devices.size()));
  for (const int64_t dim : {64, 128, 256}) {
    for (const bool biased : {false, true}) {
      Case c = shape("devices", 2, 4, 2, dim, 500, 900);
      c.flags = ATTN_CAUSAL | ATTN_SINKS;
      c = with_type(c, ATTN_BF16);
      c.out_type = c.q_type;
      if (biased) c.bias_type = ATTN_F32, c.bias_per_batch = false;
      const BackwardCase bc = backward_of(c);
      const BackwardData data = make_backward_data(bc);
      for (const Kernel* kernel : device_kernels()) {
        if (kernel->backend != ATTN_BACKEND_CUDA) continue;
        const BackwardRun first = run_backward(*devices[0], bc, data, kernel->name);
        if (declined(*kernel, first)) continue;
        INFO(kernel->name << " " << describe(bc));
        REQUIRE(first.got.error == "");
        for (size_t n = 1; n < devices.size(); ++n)
          CHECK((run_backward(*devices[n], bc, data, kernel->name).got.bits == first.got.bits));
      }
    }
  }
}

TEST_CASE("backward: equal bits for any number of threads") {
  for (uint64_t seed = 6000; seed < (sanitized ? 6003 : 6040); ++seed) {
    BackwardCase bc = random_backward(seed);
    if (seed % 4 == 0) {  // many tiles
      bc = backward_of(shape("threads", 1, 4, 2, 32, 500, 700));
      bc.c.flags = seed % 8 ? ATTN_CAUSAL : 0;
      bc.c.seed = seed;
    }
    const BackwardData data = make_backward_data(bc);
    for (const Kernel* kernel : kernels_here(Op::backward, false)) {
      if (!kernel->host) continue;
      std::vector<unsigned char> first;
      for (const int threads : {1, 2, 3, 7}) {
        static std::map<int, std::unique_ptr<Backend>> backends;
        auto& backend = backends[threads];
        if (!backend) backend = std::make_unique<Backend>(ATTN_BACKEND_CPU, threads);
        const BackwardRun run = run_backward(*backend, bc, data, kernel->name);
        INFO(kernel->name << " " << threads << " threads " << describe(bc));
        REQUIRE(run.got.error == "");
        if (first.empty()) first = run.got.bits;
        CHECK((run.got.bits == first));  // not printed
      }
    }
  }
}

// Lengths in device memory may be anything: nothing outside the arrays is read or written. What
// sanitizers see is tests/device/sanitize.sh's.
TEST_CASE("backward: lengths out of range on devices") {
  for (const bool packed_kv : {false, true}) {
    Case c = shape("garbage", 3, 4, 2, 64, 90, 130);
    c.flags = ATTN_CAUSAL | ATTN_SINKS;
    c.lengths_q = {90, 10, 60};
    c.segments[0].lengths = {130, 0, 77};
    if (packed_kv) c.segments[0].layout = ATTN_PACKED;
    c = with_type(c, ATTN_BF16);
    c.out_type = ATTN_BF16;
    const BackwardCase bc = backward_of(c);
    const BackwardData data = make_backward_data(bc);
    for (const std::vector<int32_t>& values : {std::vector<int32_t>{-5, 1 << 30, 3, 200},
                                               {1 << 30, -(1 << 30), 7, 9},
                                               {0, 90, 90, 90}}) {
      Data garbage = data.forward;
      SegmentData& kv = garbage.segments[0];
      for (size_t n = 0; n < 4; ++n) {
        garbage.cu_seqlens_q.as<int32_t>()[n] = values[n];
        if (packed_kv) kv.cu_seqlens.as<int32_t>()[n] = values[3 - n];
        if (!packed_kv && n < 3) kv.seqlens.as<int32_t>()[n] = values[n];
      }
      for (const Kernel* kernel : device_kernels()) {
        const BackwardRun run =
            run_backward(backend_of(kernel->backend), bc, data, kernel->name, c.out_type, &garbage);
        if (declined(*kernel, run)) continue;
        INFO(kernel->name << " " << describe(bc));
        CHECK(run.got.error == "");
      }
    }
  }
}

}  // namespace
}  // namespace attn::test
