// The float64 reference: the formula, one query row at a time. Every other kernel is compared with
// it.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/interrupt.h"
#include "cpu/kernels.h"
#include "cpu/kv_view.h"
#include "cpu/pool.h"

namespace attn {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

struct Scratch {
  double* scores;  // [most_keys], in the order of visits
  double* q;       // [head_dim]
  double* key;     // [head_dim]
  double* value;   // [head_dim_v]
  double* sum;     // [head_dim_v]

  static int64_t size(const Problem& p) { return p.most_keys + 2 * p.head_dim + 2 * p.head_dim_v; }
  Scratch(const Problem& p, double* at) {
    scores = at;
    q = scores + p.most_keys;
    key = q + p.head_dim;
    value = key + p.head_dim;
    sum = value + p.head_dim_v;
  }
};

// Calls visit(segment, key within it, visit's number, run, key within the run) for each key that
// exists, while it returns true. The number is the key's position, except with lists or keys
// without positions (by_query): there only keys that query i sees are visited.
template <class Visit>
void for_each_key(const Problem& p, const Args& args, int64_t b, int64_t kv_head,
                  const QueryView& query, int64_t i, Visit&& visit) {
  int64_t first = 0;
  for (int64_t s = 0; s < p.num_segments; ++s) {
    const SegmentView segment = p.by_query ? view_of_query(p, args, b, s, first, query, i, kv_head)
                                           : segment_view(p, args, b, s, first);
    for (int64_t begin = 0; begin < segment.length;) {
      const KeyRun run = segment.run(begin, kv_head);
      for (int64_t n = 0; n < run.count && run.k != nullptr; ++n) {
        if (!visit(segment, run.key + n, first + begin + n, run, n)) return;
      }
      begin += run.count;
    }
    first += segment.length;
  }
}

// Query i of head h in batch entry b.
void forward_row(const Problem& p, const Args& args, int64_t b, int64_t h, int64_t i,
                 const QueryView& query, const Scratch& scratch, Interrupt& interrupt, int thread) {
  const int64_t kv_head = h / p.group();
  const int64_t seqlen_kv = sequence_length_kv(p, args, b);
  const int64_t diagonal = first_position(p, args, b, query.length, seqlen_kv);
  const KeyRange range = visible_keys(p, args, b, i, query.length, seqlen_kv);
  // Keys of several segments with positions that the query sees need not be a range.
  const KeyBand band = sequence_mask(p, args, b).band(0, diagonal);
  const double scale = exact_scale(p);

  const auto bias = [&](int64_t j) -> double {
    if (p.bias_type == ATTN_DTYPE_NONE) return 0;
    const double x = decode_element(
        p.bias_type, args.bias,
        b * p.bias_stride[0] + h * p.bias_stride[1] + i * p.bias_stride[2] + j * p.bias_stride[3]);
    return p.has(ATTN_BIAS_SLOPES) && x != -infinity ? x * args.bias_slopes[h] : x;
  };
  const auto visible = [&](int64_t j, int64_t position) {
    if (p.by_query) return true;
    if (j < range.begin || j >= range.end) return false;
    if (p.key_positions() && (position < i + band.lower || position >= i + band.upper))
      return false;
    if (p.tree_keys > 0 && !(tree_bits(p, args, query, i, j, seqlen_kv) & 1)) return false;
    if (p.has(ATTN_BLOCK_MASK) &&
        !block_view(p, args, b, h, i / p.block_q, j / p.block_k)
             .visible(i % p.block_q, j % p.block_k, i, position, diagonal)) {
      return false;
    }
    return bias(j) != -infinity;
  };

  decode_row(p.q_type, args.q, query.q + i * p.q_stride.seq + h * p.q_stride.head, p.head_dim,
             scratch.q);
  const double q_scale = q_descale(p, args, b, kv_head);

  double max = p.has(ATTN_SINKS) ? args.sinks[h] : -infinity;
  for_each_key(
      p, args, b, kv_head, query, i,
      [&](const SegmentView& segment, int64_t key, int64_t j, const KeyRun& run, int64_t n) {
        scratch.scores[j] = -infinity;
        if (interrupt.stop(thread, 16)) return false;
        const int64_t position = segment.places.at(key);
        if (!visible(j, position)) return true;
        if (interrupt.stop(thread, 2 * p.head_dim)) return false;
        read_row(segment.shape->k_type, run.k + n * segment.k_row_bytes,
                 segment.k_scales_of(run, n), p.head_dim, scratch.key);
        double dot = 0;
        for (int64_t d = 0; d < p.head_dim; ++d) dot += scratch.q[d] * scratch.key[d];
        double s = scale * dot * q_scale * segment.k_descale(key, kv_head, p.heads_kv) *
                   segment.k_scale(run, n);
        if (p.softcap > 0) s = p.softcap * std::tanh(s / p.softcap);
        s += bias(j);
        if (p.has(ATTN_ALIBI))
          s -= double(args.alibi_slopes[h]) * std::abs(double(i + diagonal - position));
        scratch.scores[j] = s;
        if (s > max || std::isnan(s)) max = s;
        return true;
      });

  double denominator = p.has(ATTN_SINKS) && max != -infinity ? std::exp(args.sinks[h] - max) : 0;
  std::fill_n(scratch.sum, p.head_dim_v, 0.0);
  for_each_key(
      p, args, b, kv_head, query, i,
      [&](const SegmentView& segment, int64_t key, int64_t j, const KeyRun& run, int64_t n) {
        if (interrupt.stop(thread, 4)) return false;
        if (scratch.scores[j] == -infinity) return true;
        if (interrupt.stop(thread, 2 * p.head_dim_v)) return false;
        const double weight = std::exp(scratch.scores[j] - max);
        denominator += weight;
        read_row(segment.shape->v_type, run.v + n * segment.v_row_bytes,
                 segment.v_scales_of(run, n), p.head_dim_v, scratch.value);
        const double v_scale =
            double(segment.v_descale(key, kv_head, p.heads_kv)) * segment.v_scale(run, n);
        for (int64_t d = 0; d < p.head_dim_v; ++d) {
          scratch.sum[d] += weight * scratch.value[d] * v_scale;
        }
        return true;
      });
  if (interrupt.stopped()) return;

  const int64_t out = query.out + i * p.out_stride.seq + h * p.out_stride.head;
  const double out_scale = p.has(ATTN_OUT_SCALE) ? args.out_scale[0] : 1;
  if (p.has(ATTN_ACCUMULATE)) {
    accumulate_row(static_cast<float*>(args.out) + out,
                   args.lse + query.lse + h * query.lse_head + i, p.head_dim_v,
                   max + std::log(denominator),
                   [&](int64_t d) { return scratch.sum[d] / denominator; });
    return;
  }
  for (int64_t d = 0; d < p.head_dim_v; ++d) {
    const double x = denominator == 0 ? 0 : scratch.sum[d] / denominator;
    encode_result(p.out_type, args.out, out + d, x * out_scale);
  }
  if (args.lse) {
    args.lse[query.lse + h * query.lse_head + i] = float(max + std::log(denominator));
  }
}

size_t workspace_bytes(const AnyProblem& problem, int threads) {
  const auto& p = static_cast<const Problem&>(problem);
  return size_t(threads) * size_t(Scratch::size(p)) * sizeof(double);
}

void forward(const Problem& p, const Args& args, void* workspace, ThreadPool& pool,
             Interrupt& interrupt) {
  write_rows_of_nobody(p, args);
  const int64_t rows = p.batch * p.heads_q * p.seqlen_q;
  const double nanoseconds =
      double(rows) * double(p.most_keys) * (10.0 + 2 * double(p.head_dim + p.head_dim_v));
  auto one = [&](int64_t item, int thread) {
    const int64_t i = item % p.seqlen_q;
    const int64_t h = item / p.seqlen_q % p.heads_q;
    const int64_t b = item / p.seqlen_q / p.heads_q;
    const QueryView query = query_view(p, args, b);
    if (i >= query.length) return;
    const Scratch scratch(p, static_cast<double*>(workspace) + thread * Scratch::size(p));
    forward_row(p, args, b, h, i, query, scratch, interrupt, thread);
  };
  pool.for_each(rows, one, &interrupt, pool.worth(nanoseconds));
}

}  // namespace

const HostKernel reference_kernel = {.runs_here = [] { return true; },
                                     .isa = "any",
                                     .workspace = workspace_bytes,
                                     .forward = forward};

}  // namespace attn
