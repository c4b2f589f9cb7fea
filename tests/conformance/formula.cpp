#include "formula.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/dtype.h"

namespace attn::test {
namespace {

// With the digits that f16 has of normal numbers.
double with_digits_of_f16(double x) {
  int exponent = 0;
  const double digits = std::frexp(x, &exponent);
  return std::ldexp(rounded(ATTN_F16, digits), exponent);
}

// In four sums, which need not wait for each other: most of a test's time is spent here.
double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sums[4] = {};
  size_t d = 0;
  for (; d + 4 <= a.size(); d += 4)
    for (size_t n = 0; n < 4; ++n) sums[n] += a[d + n] * b[d + n];
  for (; d < a.size(); ++d) sums[0] += a[d] * b[d];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Each key's tile, if a segment is cut from its first key on into tiles of this many keys; 0: all
// are one tile.
std::vector<int64_t> tiles_of_keys(const Case& c, int64_t b, int keys_of_tile) {
  std::vector<int64_t> tiles;
  int64_t tile = 0;
  for (const SegmentCase& s : c.segments) {
    for (int64_t j = 0; j < s.length(b); ++j) {
      if (keys_of_tile > 0 && j % keys_of_tile == 0) ++tile;
      tiles.push_back(tile);
    }
  }
  return tiles;
}

// as: nullptr rounds nothing.
Outputs compute(const Case& c, const Data& data, const Rounding* as, const Planted& mistake = {}) {
  Outputs answer;
  const double scale = c.scale != 0 ? double(c.scale) : 1 / std::sqrt(double(c.head_dim));
  const double log2_e = 1 / std::log(2.0);
  const bool round = as, fp8 = round && dtype_is_fp8(c.q_type);
  const bool whole = round && as->split_invariant, lags = round && as->lag > 0;
  for (int64_t b = 0; b < c.batch; ++b) {
    const std::vector<int64_t> tiles = tiles_of_keys(c, b, lags ? as->keys : 0);
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
          double s = scale * dot(q, k);
          if (c.softcap > 0) s = c.softcap * std::tanh(s / c.softcap);
          s += bias_at(c, data, b, h, i, j);
          if (c.has(ATTN_ALIBI)) {
            s -= data.slopes.as<float>()[h] *
                 std::abs(double(c.query_position(b, i) - c.key_position(b, j)));
          }
          const bool among = wrong && j >= mistake.begin && j < mistake.end;
          for (int n = among ? mistake.times : 1; n > 0; --n) seen.emplace_back(s, first_key + j);
          max = std::max(max, s);
        }
        const double reference = whole ? std::ceil(max * log2_e) / log2_e : max;
        double sum = c.has(ATTN_SINKS) ? std::exp(data.sinks.as<float>()[h] - reference) : 0;
        if (wrong) sum *= mistake.sink_times;
        // fp8: 2^7 times the weight in e4m3fnuz, whose largest value is 240.
        const auto rounded_weight = [&](double exact) {
          return fp8     ? rounded(ATTN_F8_E4M3FNUZ, 128 * exact) / 128
                 : round ? rounded(c.q_type, exact)
                         : exact;
        };
        std::vector<double> weights;
        if (lags && as->last_tile_first) std::reverse(seen.begin(), seen.end());
        const auto tile_of = [&](size_t n) { return tiles[size_t(seen[n].second - first_key)]; };
        double m = lags ? -std::numeric_limits<double>::max() : reference;
        for (size_t begin = 0, end; begin < seen.size(); begin = end) {
          double largest = -INFINITY;
          for (end = begin; end < seen.size() && tile_of(end) == tile_of(begin); ++end)
            largest = std::max(largest, seen[end].first);
          if (lags && largest > m + as->lag / log2_e) m = largest;
          const double factor = std::exp(m - reference);
          for (size_t n = begin; n < end; ++n) {
            const double exact = std::exp(seen[n].first - m), weight = rounded_weight(exact);
            weights.push_back(weight * factor);
            sum += (whole || fp8 ? weight : exact) * factor;
          }
          if (!lags || !as->rounded_largest) continue;
          const double exact = std::exp(largest - m);
          sum += (rounded_weight(exact) - exact) * factor;
        }
        std::vector<double> x(size_t(c.head_dim_v), 0.0);
        for (size_t n = 0; n < seen.size(); ++n) {
          const int64_t row = seen[n].second;
          const double* const v = data.v_real[row].data();
          if (round && as->scaled_weights && !data.v_scales[row].empty()) {
            const std::vector<double>& scales = data.v_scales[row];
            const size_t blocks = scales.size() / 2;
            for (size_t i = 0; i < blocks; ++i) {
              const double scale = scales[2 * i], min = scales[2 * i + 1];
              double weight = weights[n];
              if (scale != 0) weight = with_digits_of_f16(weight * scale) / scale;
              const size_t end = (i + 1) * x.size() / blocks;
              for (size_t d = i * x.size() / blocks; d < end; ++d)
                x[d] += (weight * (v[d] - min) + weights[n] * min) / sum;
            }
          } else {
            const double weight = weights[n] / sum;
            for (size_t d = 0; d < x.size(); ++d) x[d] += weight * v[d];
          }
        }
        for (const double out : x) answer.out.push_back(round ? rounded(c.out_type, out) : out);
        answer.lse.push_back(sum == 0 ? -INFINITY : float(reference + std::log(sum)));
      }
    }
  }
  return answer;
}

}  // namespace

Outputs formula(const Case& c, const Data& data) {
  return compute(c, data, nullptr);
}
Outputs formula_with(const Planted& mistake, const Case& c, const Data& data) {
  return compute(c, data, nullptr, mistake);
}

Rounding rounding_of(const Case& c, const Numerics& numerics) {
  const bool split_invariant = c.has(ATTN_SPLIT_INVARIANT) || numerics.always_split_invariant;
  Rounding as = {.split_invariant = split_invariant, .scaled_weights = numerics.scaled_weights};
  // Powers of two change no rounding; tools/fp8_stress has a model of fp8.
  if (split_invariant || dtype_is_fp8(c.q_type) || numerics.lag == 0) return as;
  const bool causal = c.has(ATTN_CAUSAL) || c.has(ATTN_CAUSAL_TOP_LEFT);
  as.lag = numerics.lag;
  as.keys = numerics.keys;
  as.last_tile_first = numerics.last_tile_first || (causal && numerics.causal_last_first);
  as.rounded_largest = numerics.rounded_largest;
  return as;
}
Outputs rounded_formula(const Case& c, const Data& data, const Rounding& as) {
  return compute(c, data, &as);
}

}  // namespace attn::test
