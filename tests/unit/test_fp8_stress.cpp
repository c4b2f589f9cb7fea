// The stress test itself: its inputs, its model of FP8 weights, its bounds and what they find in
// the model. That kernels with planted bugs fail it is tests/cli/test_stress.py.
#include <cmath>
#include <set>
#include <string>

#include "../catch.h"
#include "attn/attn.hpp"
#include "catalog/catalog.h"
#include "core/dtype.h"
#include "fp8_stress/self_check.h"
#include "fp8_stress/verdict.h"

namespace attn::tools {
namespace {

constexpr Numerics exact_rule{.rows = 32};

double value(const StressInputs& in, uint8_t code) {
  return attn::value_of(attn::fp8_format(in.type), code);
}
double largest_v(const StressInputs& in) {
  double most = 0;
  for (uint8_t code : in.v) most = std::max(most, std::abs(value(in, code)));
  return most;
}
StressCase case_of(const StressOptions& options, const std::string& name) {
  for (StressCase& c : stress_cases(options))
    if (c.name == name) return std::move(c);
  throw std::logic_error(name);
}

// The reference's answer, in float64.
std::vector<double> reference(const StressInputs& in) {
  const attn::context context(ATTN_BACKEND_REFERENCE);
  auto segment = make<attn_segment>();
  segment.k_type = segment.v_type = in.type;
  segment.seqlen = in.seqlen_kv;
  auto p = make<attn_problem>();
  p.batch = 1;
  p.heads_q = p.heads_kv = in.heads;
  p.head_dim = in.head_dim;
  p.seqlen_q = in.seqlen_q;
  p.q_type = in.type;
  p.out_type = ATTN_F64;
  p.num_segments = 1;
  p.segments = &segment;
  const attn::plan plan(context, p);
  const attn::buffer workspace = plan.make_workspace(context);
  std::vector<double> out(in.q.size());
  auto kv = make<attn_segment_args>();
  kv.k = in.k.data();
  kv.v = in.v.data();
  auto args = make<attn_args>();
  args.q = in.q.data();
  args.out = out.data();
  args.num_segments = 1;
  args.segments = &kv;
  plan.run(args, workspace);
  return out;
}

TEST_CASE("fp8 stress: every kernel that takes FP8 has a rule for its weights") {
  constexpr uint32_t fp8 = type_bit(ATTN_F8_E4M3FN) | type_bit(ATTN_F8_E4M3FNUZ);
  for (const Kernel& kernel : attn::catalog()) {
    if (kernel.op != Op::forward || !(kernel.limits.in_types & fp8)) continue;
    INFO(kernel.name);
    const Numerics& rule = kernel.numerics;
    CHECK((rule.weights == ATTN_DTYPE_NONE) == (kernel.host != nullptr));
    // A row's maximum may be the lag above m: its weight must stay finite.
    CHECK(std::isfinite(rounded_weight(rule, std::exp2(rule.offset + rule.lag))));
  }
}

TEST_CASE("fp8 stress: cases and their inputs") {
  StressOptions options;
  const auto cases = stress_cases(options);
  std::set<std::string> names;
  int matrix = 0;
  for (const StressCase& c : cases) {
    names.insert(c.name);
    matrix += selected(c, "matrix");
  }
  CHECK(cases.size() == 23 + 4 * 4 * 4 * 3);
  CHECK(names.size() == cases.size());
  CHECK(matrix == 192);

  options.heads = 2;
  options.head_dim = 64;
  options.seqlen = 7;
  const auto codes = [&](const char* name, attn_dtype type = ATTN_F8_E4M3FNUZ) {
    return make_inputs(case_of(options, name), options, type);
  };
  // Element (row, head, d) of q.
  const auto q = [&](const StressInputs& in, int64_t row, int64_t head, int64_t d) {
    return value(in, in.q[size_t((row * in.heads + head) * in.head_dim + d)]);
  };
  const StressInputs rows = codes("matrix/row-column-uniform/4");
  CHECK(rows.q.size() == 7 * 2 * 64);
  CHECK((q(rows, 0, 0, 9) == 0 && q(rows, 3, 1, 5) == 2 && q(rows, 6, 0, 63) == 4));
  CHECK(value(rows, rows.k[3 * 2 * 64 + 63]) == 4);
  CHECK(value(rows, rows.v[200]) == 4);
  const StressInputs hot = codes("one-hot/4/random");
  for (int64_t d = 0; d < 64; ++d) CHECK(q(hot, 5, 1, d) == (d == 5 ? 4 : 0));
  const StressInputs sequence = codes("sequential/16", ATTN_F8_E4M3FN);
  CHECK(q(sequence, 3, 0, 32) == 8);  // 16 * (3 * 64 + 32) / (7 * 64)
  CHECK(sequence.q == sequence.v);

  options.seed = 2;
  CHECK(codes("sequential/16").q != sequence.q);  // another type
  CHECK(codes("one-hot/4/random").q == hot.q);
  CHECK(codes("one-hot/4/random").v != hot.v);
  const StressInputs normal = codes("normal/1");
  CHECK(normal.q == codes("normal/1").q);
  CHECK(normal.q != normal.k);
  CHECK(normal.k != normal.v);

  // One key, at another place in each head, has the score that the name says.
  options.heads = 4;
  for (int64_t head_dim : {64, 128}) {
    options.head_dim = head_dim;
    const StressInputs sink = codes("sink/8/512");
    for (int64_t head = 0; head < 4; ++head) {
      int keys = 0;
      for (int64_t j = 0; j < 512; ++j) {
        double score = 0;
        for (int64_t d = 0; d < head_dim; ++d)
          score += value(sink, sink.k[size_t((j * 4 + head) * head_dim + d)]);
        keys += score != 0;
        if (score != 0) CHECK(std::abs(score / std::sqrt(double(head_dim)) - 8) < 0.01);
      }
      CHECK(keys == 1);
    }
  }
}

TEST_CASE("fp8 stress: the model without rounding is the reference") {
  ThreadPool pool(0);
  StressOptions options;
  options.seqlen = 77;
  options.heads = 2;
  options.head_dim = 64;
  for (const char* name : {"normal/3", "sparse", "sink/8/512", "matrix/row-row-random/4"}) {
    INFO(name);
    const StressInputs in = make_inputs(case_of(options, name), options, ATTN_F8_E4M3FNUZ);
    const std::vector<double> want = reference(in);
    for (bool last_first : {false, true}) {
      Numerics rule = exact_rule;
      rule.last_tile_first = last_first;
      const std::vector<double> got = model_output(rule, in, ATTN_F64, pool);
      REQUIRE(got.size() == want.size());
      double error = 0;
      for (size_t n = 0; n < got.size(); ++n) error = std::max(error, std::abs(got[n] - want[n]));
      CHECK(error < 1e-12);
    }
  }
}

// Two keys in two tiles of one key each, scores x0 and x1 in the log2 domain, values 1 and 0.
double weight_of_first(Numerics rule, double x0, double x1) {
  rule.keys = 1;
  rule.last_tile_first = false;
  ThreadPool pool(1);
  StressInputs in{ATTN_F8_E4M3FNUZ, 1, 2, 1, 1, {}, {}, {}};
  const auto code = [](double x) { return uint8_t(attn::encode(attn::e4m3fnuz_format, x, false)); };
  in.q = {code(1)};
  in.k = {code(x0), code(x1)};
  in.v = {code(1), code(0)};
  return model_output(rule, in, ATTN_F64, pool)[0];
}

TEST_CASE("fp8 stress: the model's weights, worked out by hand") {
  const Numerics rule = attn::find_kernel("fwd_gfx942_fp8_d128")->numerics;
  CHECK(rule.offset == 7);
  const double log2_e = 1 / std::log(2.0);
  const auto p = [](double x) {  // nearest of three bits, ties to even, for P from 2^-7 up
    const double unit = std::exp2(std::floor(x) - 3);
    return std::nearbyint(std::exp2(x) / unit) * unit;
  };
  // The first is the larger: m stays, and the second is rounded against it.
  CHECK(std::abs(weight_of_first(rule, 1, 0) - 128 / (128 + p(7 - log2_e))) < 1e-12);
  // The second is larger by less than the lag: m stays, and its weight is above 2^7.
  CHECK(std::abs(weight_of_first(rule, 0, 0.5) - 128 / (128 + p(7 + 0.5 * log2_e))) < 1e-12);
  // By more: the first, rounded as 2^7, is scaled without being rounded again.
  CHECK(std::abs(weight_of_first(rule, 0, 1) -
                 std::exp2(7 - log2_e) / (std::exp2(7 - log2_e) + 128)) < 1e-12);
  Numerics unrounded = rule;
  unrounded.rounded_sums = false;
  CHECK(std::abs(weight_of_first(unrounded, 1, 0) - 128 / (128 + std::exp2(7 - log2_e))) < 1e-12);
  // Of two values: what the first lacks, rounded, is the second.
  Numerics two = rule;
  two.weight_parts = 2;
  CHECK(rounded_weight(rule, 131) == 128);
  CHECK(rounded_weight(two, 131) == 131);
  CHECK(rounded_weight(two, 135.9) == 136);
  CHECK(rounded_weight(two, 133.1) == 133);
}

TEST_CASE("fp8 stress: the model passes where its own error is above a fixed bound") {
  ThreadPool pool(0);
  const Numerics& rule = attn::find_kernel("fwd_gfx942_fp8_d128")->numerics;
  struct {
    int64_t head_dim;
    uint64_t seed;
    const char* name;
  } const choices[] = {{64, 4, "matrix/column-random-random/1"},
                       {64, 90210, "matrix/column-random-random/1"},
                       {128, 1, "uniform/-1..1"},
                       {128, 4, "matrix/uniform-random-random/1"},
                       {128, 6, "matrix/uniform-random-random/1"}};
  for (const auto& [head_dim, seed, name] : choices) {
    INFO(name << ", head_dim " << head_dim << ", seed " << seed);
    const StressOptions options{173, 1, head_dim, seed};
    const StressInputs in = make_inputs(case_of(options, name), options, ATTN_F8_E4M3FNUZ);
    const auto truth = model_output(exact_rule, in, ATTN_F64, pool);
    const auto model = model_output(rule, in, ATTN_F32, pool);
    const Verdict verdict = judge(model, truth, model, largest_v(in));
    REQUIRE(verdict.frobenius);
    CHECK(*verdict.frobenius > 0.03);
    CHECK(verdict.above);
    CHECK(verdict.broken == "");
  }
}

// attn-fp8-stress --self-check has many choices.
TEST_CASE("fp8 stress: the model passes every case, each planted bug fails one") {
  ThreadPool pool(0);
  const Numerics& rule = attn::find_kernel("fwd_gfx942_fp8_d128")->numerics;
  for (const int64_t seqlen : {3, 96}) {
    const SelfCheck found = self_check(rule, {seqlen, 2, 16, 5}, pool);
    CHECK(found.cases == 215);
    CHECK(found.broken.empty());
    for (size_t n = 0; n < found.bugs.size(); ++n) {
      INFO(planted_bugs[n].name << ", seqlen " << seqlen);
      // One tile has no other maximum than its own.
      const bool can_show = planted_bugs[n].bug != Bug::tile_maximum || seqlen > rule.keys;
      CHECK(found.bugs[n].changes == can_show);
      CHECK(found.bugs[n].failed.empty() != can_show);
    }
  }
}

TEST_CASE("fp8 stress: random choices") {
  std::set<int64_t> heads, dims, seqlens;
  std::set<uint64_t> seeds;
  for (uint64_t n = 0; n < 300; ++n) {
    const StressOptions choice = random_choice(1, n);
    REQUIRE((choice.seqlen >= 1 && choice.seqlen <= 320));
    heads.insert(choice.heads);
    dims.insert(choice.head_dim);
    seqlens.insert((choice.seqlen + 63) / 64);
    seeds.insert(choice.seed);
    CHECK(random_choice(1, n).seed == choice.seed);
    CHECK(random_choice(2, n).seed != choice.seed);
  }
  CHECK(heads == std::set<int64_t>{1, 2, 3, 4});
  CHECK(dims == std::set<int64_t>{16, 32, 48, 64, 80, 96, 112, 128});
  CHECK(seqlens.size() == 5);
  CHECK(seeds.size() == 300);
}

TEST_CASE("fp8 stress: the bounds") {
  const std::vector<double> truth(100, 1.0);
  const auto broken = [&](double error, double model_error, double max_v) {
    std::vector<double> out = truth, model = truth;
    for (double& x : out) x += error;
    for (double& x : model) x += model_error;
    return judge(out, truth, model, max_v).broken;
  };
  CHECK(broken(0, 0, 1) == "");
  CHECK(broken(0.0249, 0.02, 1) == "");
  CHECK(broken(0.0253, 0.02, 1) == "ratio to the model");
  CHECK(broken(1.9e-4, 0, 1) == "");
  CHECK(broken(2.1e-4, 0, 1) == "ratio to the model");
  CHECK(broken(0.031, 0.027, 1) == "Frobenius");
  CHECK(broken(0.031, 0.027, 60) == "");  // rms 1 is below 2 % of 60
  CHECK(broken(0.041, 0.037, 1) == "share of max|V|, Frobenius");
  CHECK(broken(0.51, 0.45, 60) == "max error");
  CHECK(broken(-0.51, 0.45, 60) == "max error");
  // Where the model is above one of these, 1.1 times its figure.
  CHECK(broken(0.035, 0.032, 1) == "");
  CHECK(broken(0.036, 0.032, 1) == "Frobenius");
  CHECK(broken(0.044, 0.0405, 1) == "");
  CHECK(broken(0.045, 0.0405, 1) == "share of max|V|, Frobenius");
  CHECK(broken(0.58, 0.53, 60) == "");
  CHECK(broken(0.59, 0.53, 60) == "max error");
  CHECK(broken(3, 3, 1) == "");

  std::vector<double> out = truth;
  out[7] = -INFINITY;
  const Verdict verdict = judge(out, truth, truth, 1);
  CHECK(verdict.not_finite == 1);
  CHECK(verdict.broken == "not finite");
}

}  // namespace
}  // namespace attn::tools
