#include "fp8_stress/model.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <numeric>

#include "core/dtype.h"

namespace attn::tools {
namespace {

// Values of codes, with the elements of one head together: [heads, seqlen, head_dim].
std::vector<float> values_by_head(const std::vector<uint8_t>& codes, const StressInputs& in,
                                  int64_t seqlen, attn_dtype type) {
  float value_of[256];
  for (int code = 0; code < 256; ++code)
    value_of[code] =
        static_cast<float>(attn::value_of(attn::fp8_format(type), static_cast<uint8_t>(code)));
  std::vector<float> values(codes.size());
  size_t from = 0;
  for (int64_t row = 0; row < seqlen; ++row)
    for (int64_t head = 0; head < in.heads; ++head)
      for (int64_t d = 0; d < in.head_dim; ++d)
        values[static_cast<size_t>((head * seqlen + row) * in.head_dim + d)] =
            value_of[codes[from++]];
  return values;
}

// What the matrix unit makes of a sum and the products of one instruction: each of them loses what
// is below 2^-bits of the largest one's power of two, and so does what they add up to of its own.
// bits 0: nothing.
double add_products(double sum, const double* product, int64_t count, int bits) {
  if (bits == 0) return std::accumulate(product, product + count, sum);
  double largest = std::abs(sum);
  for (int64_t n = 0; n < count; ++n) largest = std::max(largest, std::abs(product[n]));
  if (largest == 0) return 0;
  double unit = std::ldexp(1.0, std::ilogb(largest) - bits);
  const double per_unit = 1 / unit;
  // Conversions cut, and no number of units reaches 2^(bits + 1).
  auto units = static_cast<int32_t>(sum * per_unit);
  for (int64_t n = 0; n < count; ++n) units += static_cast<int32_t>(product[n] * per_unit);
  for (; std::abs(units) >> (bits + 1); unit *= 2) units /= 2;
  return units * unit;
}
constexpr int64_t products_at_once = 32;  // of a wgmma of fp8

// sum + that of a[n] * b[n * b_step], n < count, as that unit finds it.
double sum_of_products(const double* a, const float* b, int64_t b_step, int64_t count, int bits,
                       double sum = 0) {
  double product[products_at_once];
  for (int64_t first = 0; first < count; first += products_at_once) {
    const int64_t here = std::min(products_at_once, count - first);
    for (int64_t n = 0; n < here; ++n)
      product[n] = a[first + n] * static_cast<double>(b[(first + n) * b_step]);
    sum = add_products(sum, product, here, bits);
  }
  return sum;
}

// The state of one query row. Weights are relative to m but for a bug's.
struct Row {
  double m = -std::numeric_limits<double>::infinity(), weights_m = m, sum = 0, late = 0;
  std::vector<double> out;   // [head_dim]
  std::vector<double> x;     // [keys of a tile]: scores, then weights
  std::vector<double> rest;  // of weights that are sums of two values what x lacks
};

}  // namespace

namespace {

double rounded_to(attn_dtype type, double exact) {
  const attn::SmallFloat& format = attn::fp8_format(type);
  return attn::value_of(format, attn::encode(format, exact, false));
}

}  // namespace

double rounded_weight(const Numerics& rule, double exact) {
  if (!attn::dtype_is_fp8(rule.weights)) return exact;
  const double first = rounded_to(rule.weights, exact);
  return rule.weight_parts > 1 ? first + rounded_to(rule.weights, exact - first) : first;
}

std::vector<double> model_output(const Numerics& kernel_rule, const StressInputs& in,
                                 attn_dtype out_type, ThreadPool& pool, Bug bug) {
  Numerics rule = kernel_rule;
  if (bug == Bug::small_weights) rule.offset = 3;
  if (bug == Bug::late_sum) rule.rounded_sums = false;
  const attn_dtype in_type = bug == Bug::ocp_codes ? ATTN_F8_E4M3FN : in.type;
  const int64_t dim = in.head_dim, keys = rule.keys;
  const double scale = std::numbers::log2e / std::sqrt(static_cast<double>(dim));
  const std::vector<float> q = values_by_head(in.q, in, in.seqlen_q, in_type);
  const std::vector<float> k = values_by_head(in.k, in, in.seqlen_kv, in_type);
  const std::vector<float> v = values_by_head(in.v, in, in.seqlen_kv, in_type);
  const int64_t tiles = (in.seqlen_kv + keys - 1) / keys;
  const int64_t groups = (in.seqlen_q + rule.rows - 1) / rule.rows;
  std::vector<double> out(in.q.size());

  pool.for_each(in.heads * groups, [&](int64_t item, int) {
    const int64_t head = item / groups, first_row = item % groups * rule.rows;
    const int64_t count = std::min<int64_t>(rule.rows, in.seqlen_q - first_row);
    std::vector<Row> rows(static_cast<size_t>(count));
    for (Row& row : rows) {
      row.out.resize(static_cast<size_t>(dim));
      row.x.resize(static_cast<size_t>(keys));
      row.rest.resize(static_cast<size_t>(keys));
    }
    std::vector<double> k_columns(static_cast<size_t>(dim * keys));  // [head_dim, keys]
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t first_key = (rule.last_tile_first ? tiles - 1 - t : t) * keys;
      const int64_t here = std::min(keys, in.seqlen_kv - first_key);
      const float* k_tile = &k[static_cast<size_t>((head * in.seqlen_kv + first_key) * dim)];
      const float* v_tile = &v[static_cast<size_t>((head * in.seqlen_kv + first_key) * dim)];
      for (int64_t j = 0; j < here && rule.sum_bits == 0; ++j)
        for (int64_t d = 0; d < dim; ++d)
          k_columns[static_cast<size_t>(d * keys + j)] = k_tile[j * dim + d];

      bool moves = false;
      for (int64_t r = 0; r < count; ++r) {
        Row& row = rows[static_cast<size_t>(r)];
        const float* q_row = &q[static_cast<size_t>((head * in.seqlen_q + first_row + r) * dim)];
        double* x = row.x.data();
        std::fill_n(x, here, 0.0);
        if (rule.sum_bits > 0) {
          const std::vector<double> exact(q_row, q_row + dim);
          const int64_t part = rule.score_part > 0 ? rule.score_part : dim;
          for (int64_t j = 0; j < here; ++j)
            for (int64_t d = 0; d < dim; d += part)
              x[j] += scale * sum_of_products(&exact[static_cast<size_t>(d)], k_tile + j * dim + d,
                                              1, std::min(part, dim - d), rule.sum_bits);
        }
        for (int64_t d = 0; d < dim && rule.sum_bits == 0; ++d) {
          const double factor = scale * static_cast<double>(q_row[d]);
          const double* column = &k_columns[static_cast<size_t>(d * keys)];
          for (int64_t j = 0; j < here; ++j) x[j] += factor * column[j];
        }
        moves = moves || *std::max_element(x, x + here) - row.weights_m > rule.lag;
      }
      for (Row& row : rows) {
        double *x = row.x.data(), *rest = row.rest.data();
        if (moves) {
          const double tile_m = *std::max_element(x, x + here), m = std::max(row.m, tile_m);
          const double factor = std::exp2(row.m - m);
          row.m = m;
          row.weights_m = bug == Bug::tile_maximum ? tile_m : m;
          row.sum *= factor;
          for (double& o : row.out) o *= factor;
        }
        row.sum += row.late;
        row.late = 0;
        double& sum = bug == Bug::late_sum ? row.late : row.sum;
        const bool ones =
            rule.rounded_sums && rule.sum_bits > 0;  // weights are added like products
        for (int64_t j = 0; j < here; ++j) {
          const bool dropped = bug == Bug::dropped_key && j == 5;
          const double exact = dropped ? 0 : std::exp2(x[j] - row.weights_m + rule.offset);
          const double weight = rounded_weight(rule, exact);
          x[j] = rule.weight_parts > 1 ? rounded_to(rule.weights, exact) : weight;
          rest[j] = weight - x[j];
          if (!ones) sum += rule.rounded_sums ? weight : exact;
        }
        const auto weighted = [&](const float* values, int64_t step) {
          double total = 0;
          if (rule.weight_parts > 1)
            total = sum_of_products(rest, values, step, here, rule.sum_bits);
          return sum_of_products(x, values, step, here, rule.sum_bits, total);
        };
        constexpr float one = 1;
        if (ones) sum += weighted(&one, 0);
        if (bug == Bug::swapped_keys && here > 1) std::swap(x[0], x[1]);
        for (int64_t d = 0; d < dim && rule.sum_bits > 0; ++d)
          row.out[static_cast<size_t>(d)] += weighted(v_tile + d, dim);
        for (int64_t j = 0; j < here && rule.sum_bits == 0; ++j) {
          const double p = x[j] + rest[j];
          const float* value = v_tile + j * dim;
          double* out_row = row.out.data();
          for (int64_t d = 0; d < dim; ++d) out_row[d] += p * value[d];
        }
      }
    }
    for (int64_t r = 0; r < count; ++r) {
      const Row& row = rows[static_cast<size_t>(r)];
      const double sum = row.sum + row.late;
      for (int64_t d = 0; d < dim; ++d) {
        unsigned char stored[8];
        attn::encode_element(out_type, stored, 0, row.out[static_cast<size_t>(d)] / sum, true);
        out[static_cast<size_t>(((first_row + r) * in.heads + head) * dim + d)] =
            attn::decode_element(out_type, stored, 0);
      }
    }
  });
  return out;
}

}  // namespace attn::tools
