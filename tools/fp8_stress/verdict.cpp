#include "fp8_stress/verdict.h"

#include <algorithm>
#include <cmath>

namespace attn::tools {
namespace {

struct Distance {
  int64_t not_finite = 0;
  double max = 0, rms = 0;
};

Distance distance(std::span<const double> a, std::span<const double> truth) {
  Distance result;
  double squares = 0;
  for (size_t i = 0; i < truth.size(); ++i) {
    const double error = std::abs(a[i] - truth[i]);
    if (!std::isfinite(error)) {
      ++result.not_finite;
      continue;
    }
    result.max = std::max(result.max, error);
    squares += error * error;
  }
  const auto finite = static_cast<int64_t>(truth.size()) - result.not_finite;
  if (finite > 0) result.rms = std::sqrt(squares / static_cast<double>(finite));
  return result;
}

}  // namespace

Verdict judge(std::span<const double> out, std::span<const double> truth,
              std::span<const double> model, double max_v) {
  const Distance error = distance(out, truth), allowed = distance(model, truth);
  double squares = 0;
  for (const double x : truth) squares += x * x;
  const double rms = std::sqrt(squares / static_cast<double>(std::max<size_t>(truth.size(), 1)));

  Verdict v;
  v.not_finite = error.not_finite;
  v.max_error = error.max;
  v.share = max_v > 0 ? error.max / max_v : 0;
  if (rms > 0.02 * max_v) v.frobenius = error.rms / rms;
  const double floor = 1.6e-4 * max_v;
  const auto ratio = [&](double e, double of_model) { return e == 0 ? 0 : e / (of_model + floor); };
  v.ratio = std::max(ratio(error.max, allowed.max), ratio(error.rms, allowed.rms));

  const auto expect = [&](bool held, const char* bound) {
    if (!held) v.broken += (v.broken.empty() ? "" : ", ") + std::string(bound);
  };
  // The model's own errors are no kernel's mistake.
  const auto below = [&](double x, double bound, double of_model) {
    v.above = v.above || of_model >= bound;
    return x < std::max(bound, 1.1 * of_model);
  };
  expect(v.not_finite == 0, "not finite");
  expect(below(v.max_error, 0.5, allowed.max), "max error");
  expect(max_v == 0 || below(v.share, 0.04, allowed.max / max_v), "share of max|V|");
  expect(!v.frobenius || below(*v.frobenius, 0.03, allowed.rms / rms), "Frobenius");
  expect(v.ratio <= 1.25, "ratio to the model");
  return v;
}

}  // namespace attn::tools
