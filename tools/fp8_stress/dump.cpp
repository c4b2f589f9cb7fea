#include "fp8_stress/dump.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <numeric>

#include "core/dtype.h"

namespace attn::tools {
namespace {

constexpr int64_t most_keys = 8;  // shown, those of the largest weights

double value(attn_dtype type, uint8_t code) {
  return attn::value_of(attn::fp8_format(type), code);
}

// Eight elements a line, each its code and its value.
void print_codes(std::FILE* to, attn_dtype type, const uint8_t* codes, int64_t count) {
  for (int64_t d = 0; d < count; ++d) {
    const bool last = d % 8 == 7 || d == count - 1;
    if (d % 8 == 0) std::fprintf(to, "    d %3lld ", static_cast<long long>(d));
    std::fprintf(to, last ? "  %02x %.7g\n" : "  %02x %-13.7g", codes[d], value(type, codes[d]));
  }
}

// The stored bits of an element, as an integer.
unsigned long long bits_of(const Tensor& tensor, int64_t index) {
  const size_t bytes = dtype_bytes(tensor.dtype);
  unsigned long long bits = 0;
  std::memcpy(&bits, tensor.data.get() + static_cast<size_t>(index) * bytes, bytes);
  return bits;
}

}  // namespace

void dump_worst_row(std::FILE* to, const Numerics& rule, const StressInputs& in, const Tensor& out,
                    attn_dtype out_type, std::span<const double> truth,
                    std::span<const double> model) {
  const int64_t dim = in.head_dim, heads = in.heads;
  const auto got = [&](int64_t index) {
    return attn::decode_element(out_type, out.data.get(), index);
  };
  int64_t worst = 0;
  double most = -1;
  for (int64_t n = 0; n < static_cast<int64_t>(truth.size()); ++n) {
    double error = std::abs(got(n) - truth[static_cast<size_t>(n)]);
    if (std::isnan(error)) error = INFINITY;
    if (error > most) most = error, worst = n;
  }
  const int64_t row = worst / (heads * dim), head = worst / dim % heads, column = worst % dim;
  const auto at = [&](const std::vector<uint8_t>& codes, int64_t token) {
    return codes.data() + (token * heads + head) * dim;
  };

  std::vector<double> scores(static_cast<size_t>(in.seqlen_kv));
  const double scale = std::numbers::log2e / std::sqrt(static_cast<double>(dim));
  const uint8_t* q = at(in.q, row);
  for (int64_t j = 0; j < in.seqlen_kv; ++j) {
    double dot = 0;
    for (int64_t d = 0; d < dim; ++d) dot += value(in.type, q[d]) * value(in.type, at(in.k, j)[d]);
    scores[static_cast<size_t>(j)] = scale * dot;
  }
  const double max = *std::max_element(scores.begin(), scores.end());
  std::vector<int64_t> keys(scores.size());
  std::iota(keys.begin(), keys.end(), 0);
  std::stable_sort(keys.begin(), keys.end(), [&](int64_t a, int64_t b) {
    return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
  });
  keys.resize(std::min(keys.size(), static_cast<size_t>(most_keys)));

  const auto number = [](int64_t x) { return static_cast<long long>(x); };
  std::fprintf(to, "  worst element: head %lld, query %lld, d %lld; codes are %s\n", number(head),
               number(row), number(column), attn::dtype_name(in.type));
  std::fprintf(to, "  q\n");
  print_codes(to, in.type, q, dim);
  std::fprintf(
      to,
      "  keys of the largest scores (log2 domain); P = 2^(score - max + %d) against the row's "
      "maximum\n",
      rule.offset);
  for (const int64_t j : keys) {
    const double score = scores[static_cast<size_t>(j)];
    const double exact = std::exp2(score - max + rule.offset);
    std::fprintf(to, "  key %lld: score %.9g, P %.9g", number(j), score, exact);
    if (attn::dtype_is_fp8(rule.weights))
      std::fprintf(to, " stored as %02x %.9g",
                   attn::encode(attn::fp8_format(rule.weights), exact, false),
                   rounded_weight(rule, exact));
    std::fprintf(to, ", v[%lld] %02x %.7g; k\n", number(column), at(in.v, j)[column],
                 value(in.type, at(in.v, j)[column]));
    print_codes(to, in.type, at(in.k, j), dim);
  }
  std::fprintf(to, "  out       bits      %-14s %-14s %-14s error\n", "value", "model", "float64");
  for (int64_t d = 0; d < dim; ++d) {
    const int64_t n = (row * heads + head) * dim + d;
    const double want = truth[static_cast<size_t>(n)];
    std::fprintf(to, "    d %3lld %0*llx  %-14.7g %-14.7g %-14.7g %.3g\n", number(d),
                 static_cast<int>(2 * dtype_bytes(out.dtype)), bits_of(out, n), got(n),
                 model[static_cast<size_t>(n)], want, got(n) - want);
  }
}

}  // namespace attn::tools
