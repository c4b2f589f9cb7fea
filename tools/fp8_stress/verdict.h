// The bounds of the stress test.
#pragma once

#include <optional>
#include <span>
#include <string>

namespace attn::tools {

struct Verdict {
  int64_t not_finite = 0;           // elements; all other figures are over the rest
  double max_error = 0;             // |out - truth|
  double share = 0;                 // max_error over max|V|
  std::optional<double> frobenius;  // relative, where the truth's rms is above 2 % of max|V|
  // The larger of e / (model's e + 1.6e-4 max|V|) for e the largest and the rms error: 1.25 times
  // the model's error plus 2e-4 of max|V| is 1.25.
  double ratio = 0;
  bool above = false;  // the model itself is above the fixed part of a bound
  std::string broken;  // which bounds, "" if none: the case passes
};

// truth: float64; model: model_output(); each as long as out.
Verdict judge(std::span<const double> out, std::span<const double> truth,
              std::span<const double> model, double max_v);

}  // namespace attn::tools
