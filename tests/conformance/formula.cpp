#include "formula.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/dtype.h"

namespace attn::test {
namespace {

// With the digits that f16 has of normal numbers.
double with_digits_of_f16(double x) {
  int exponent = 0;
  const double digits = std::frexp(x, &exponent);
  return std::ldexp(rounded(ATTN_F16, digits), exponent);
}

Outputs compute(const Case& c, const Data& data, bool round, bool split_invariant = false,
                bool scaled_weights = false, const Planted& mistake = {}) {
  Outputs answer;
  const double scale = c.scale != 0 ? double(c.scale) : 1 / std::sqrt(double(c.head_dim));
  const double log2_e = 1 / std::log(2.0);
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t i = 0; i < c.queries(b); ++i) {
      for (int64_t h = 0; h < c.heads_q; ++h) {
        const auto& q = data.q_real[(b * c.heads_q + h) * c.seqlen_q + i];
        const int64_t kv_head = h / (c.heads_q / c.heads_kv);
        const int64_t first_key = (b * c.heads_kv + kv_head) * data.most_keys;
        const bool wrong = b == mistake.b && kv_head == mistake.kv_head;
        std::vector<std::pair<double, int64_t>> seen;  // scores, and which rows of V
        double max = c.has(ATTN_SINKS) ? data.sinks.as<float>()[h] : -INFINITY;
        for (int64_t j = 0; j < c.keys(b); ++j) {
          if (!visible(c, data, b, h, i, j)) continue;
          const auto& k = data.k_real[first_key + j];
          double s = scale * std::inner_product(q.begin(), q.end(), k.begin(), 0.0);
          if (c.softcap > 0) s = c.softcap * std::tanh(s / c.softcap);
          s += bias_at(c, data, b, h, i, j);
          if (c.has(ATTN_ALIBI)) {
            s -= data.slopes.as<float>()[h] * std::abs(double(i + c.keys(b) - c.queries(b) - j));
          }
          const bool among = wrong && j >= mistake.begin && j < mistake.end;
          for (int n = among ? mistake.times : 1; n > 0; --n) seen.emplace_back(s, first_key + j);
          max = std::max(max, s);
        }
        // fp8: 2^7 times the weight in e4m3fnuz, whose largest value is 240.
        const bool fp8 = round && dtype_is_fp8(c.q_type);
        const bool whole = round && split_invariant;
        const double reference = whole ? std::ceil(max * log2_e) / log2_e : max;
        double sum = c.has(ATTN_SINKS) ? std::exp(data.sinks.as<float>()[h] - reference) : 0;
        if (wrong) sum *= mistake.sink_times;
        std::vector<double> weights;
        for (const auto& [s, row] : seen) {
          const double exact = std::exp(s - reference);
          weights.push_back(fp8     ? rounded(ATTN_F8_E4M3FNUZ, 128 * exact) / 128
                            : round ? rounded(c.q_type, exact)
                                    : exact);
          sum += whole || fp8 ? weights.back() : exact;
        }
        for (int64_t d = 0; d < c.head_dim_v; ++d) {
          double x = 0;
          for (size_t n = 0; n < seen.size(); ++n) {
            const int64_t row = seen[n].second;
            double weight = weights[n];
            if (scaled_weights && !data.v_scales[row].empty()) {
              const std::vector<double>& scales = data.v_scales[row];
              const double v_scale = scales[size_t(d) * scales.size() / size_t(c.head_dim_v)];
              if (v_scale != 0) weight = with_digits_of_f16(weight * v_scale) / v_scale;
            }
            x += weight / sum * data.v_real[row][d];
          }
          answer.out.push_back(round ? rounded(c.out_type, x) : x);
        }
        answer.lse.push_back(sum == 0 ? -INFINITY : float(reference + std::log(sum)));
      }
    }
  }
  return answer;
}

}  // namespace

Outputs formula(const Case& c, const Data& data) {
  return compute(c, data, false);
}
Outputs formula_with(const Planted& mistake, const Case& c, const Data& data) {
  return compute(c, data, false, false, false, mistake);
}
Outputs rounded_formula(const Case& c, const Data& data, bool split_invariant,
                        bool scaled_weights) {
  return compute(c, data, true, split_invariant, scaled_weights);
}

}  // namespace attn::test
