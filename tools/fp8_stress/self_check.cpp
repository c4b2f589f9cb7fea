#include "fp8_stress/self_check.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "core/dtype.h"
#include "fp8_stress/verdict.h"

namespace attn::tools {
namespace {

// Queries that are all the same have one result, and one row has the figures of all.
void drop_repeated_queries(StressInputs& in) {
  const auto row = in.heads * in.head_dim;
  for (int64_t i = 1; i < in.seqlen_q; ++i)
    if (!std::equal(in.q.begin(), in.q.begin() + row, in.q.begin() + i * row)) return;
  in.seqlen_q = 1;
  in.q.resize(static_cast<size_t>(row));
}

}  // namespace

SelfCheck self_check(const Numerics& rule, const StressOptions& options, ThreadPool& pool) {
  Numerics exact = rule;
  exact.weights = ATTN_DTYPE_NONE;
  SelfCheck result;
  for (const StressCase& c : stress_cases(options)) {
    StressInputs in = make_inputs(c, options, rule.weights);
    drop_repeated_queries(in);
    double max_v = 0;
    for (const uint8_t code : in.v)
      max_v = std::max(
          max_v, std::abs(static_cast<double>(attn::value_of(attn::fp8_format(in.type), code))));
    const std::vector<double> truth = model_output(exact, in, ATTN_F64, pool);
    const std::vector<double> model = model_output(rule, in, ATTN_F32, pool);
    const Verdict verdict = judge(model, truth, model, max_v);
    ++result.cases;
    result.above += verdict.above;
    if (!verdict.broken.empty()) result.broken.push_back(c.name + ": " + verdict.broken);
    for (size_t n = 0; n < result.bugs.size(); ++n) {
      BugCheck& bug = result.bugs[n];
      if (!bug.failed.empty()) continue;
      const std::vector<double> out = model_output(rule, in, ATTN_F32, pool, planted_bugs[n].bug);
      bug.changes = bug.changes || out != model;
      if (!judge(out, truth, model, max_v).broken.empty()) bug.failed = c.name;
    }
  }
  return result;
}

StressOptions random_choice(uint64_t seed, uint64_t index) {
  std::seed_seq words{seed >> 32, seed & 0xffffffff, index};
  std::mt19937_64 random(words);
  const auto below = [&](uint64_t count) { return static_cast<int64_t>(random() % count); };
  StressOptions options;
  const double share = static_cast<double>(random() >> 11) * 0x1p-53;
  options.seqlen = 1 + static_cast<int64_t>(320 * share * share);
  options.heads = 1 + below(4);
  options.head_dim = 16 * (1 + below(8));
  options.seed = random();
  return options;
}

}  // namespace attn::tools
