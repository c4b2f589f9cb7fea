// Merging partial results by their lse.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/dtype.h"
#include "core/interrupt.h"
#include "cpu/kernels.h"
#include "cpu/pool.h"
#include "problem/operations.h"

namespace attn {
namespace {

// One query row: m = max lse; w = exp(lse_s - m); out = sum(w out_s) / sum(w); lse = m + log(sum
// w).
template <class Real>
void merge_row(const MergeProblem& p, const attn_merge_args& args, int64_t b, int64_t h, int64_t i,
               Interrupt& interrupt, int thread) {
  constexpr Real infinity = std::numeric_limits<Real>::infinity();
  const int64_t lse_at = (b * p.heads_q + h) * p.seqlen_q + i;
  const int64_t by_head = (h * p.batch + b) * p.seqlen_q + i;
  const auto lse_of = [&](int32_t s) { return args.lses[s][s < p.by_head ? by_head : lse_at]; };
  const int64_t part_at = b * p.part_stride.batch + i * p.part_stride.seq + h * p.part_stride.head;
  const int64_t out_at = b * p.out_stride.batch + i * p.out_stride.seq + h * p.out_stride.head;

  Real max = -infinity;
  for (int32_t s = 0; s < p.num_parts; ++s) {
    const Real lse = lse_of(s);
    if (lse > max || std::isnan(lse)) max = lse;
  }
  Real weights = 0;
  for (int32_t s = 0; s < p.num_parts; ++s) {
    const Real lse = lse_of(s);
    if (lse != -infinity) weights += std::exp(lse - max);
  }
  // The row goes through a small buffer, so that sums are not rounded to out_type on the way.
  constexpr int64_t chunk = 128;
  Real sum[chunk], part[chunk];
  for (int64_t d = 0; d < p.head_dim_v; d += chunk) {
    const int64_t n = std::min(chunk, p.head_dim_v - d);
    if (interrupt.stop(thread, n * p.num_parts)) return;
    std::fill_n(sum, n, Real(0));
    for (int32_t s = 0; s < p.num_parts; ++s) {
      const Real lse = lse_of(s);
      if (lse == -infinity) continue;
      const Real weight = std::exp(lse - max);
      decode_row(p.part_type, args.outs[s], part_at + d, n, part);
      for (int64_t k = 0; k < n; ++k) sum[k] += weight * part[k];
    }
    for (int64_t k = 0; k < n; ++k) {
      const Real x = weights == 0 ? 0 : sum[k] / weights;
      encode_element(p.out_type, args.out, out_at + d + k, x, false);
    }
  }
  if (args.lse) args.lse[lse_at] = float(max + std::log(weights));
}

template <class Real>
void merge(const MergeProblem& p, const attn_merge_args& args, ThreadPool& pool,
           Interrupt& interrupt) {
  const int64_t rows = p.batch * p.heads_q * p.seqlen_q;
  const double nanoseconds = double(rows) * p.num_parts * (20.0 + double(p.head_dim_v));
  pool.for_each(
      rows,
      [&](int64_t item, int thread) {
        merge_row<Real>(p, args, item / p.seqlen_q / p.heads_q, item / p.seqlen_q % p.heads_q,
                        item % p.seqlen_q, interrupt, thread);
      },
      &interrupt, pool.worth(nanoseconds));
}

bool always() {
  return true;
}

}  // namespace

const HostKernel merge_reference_kernel = {
    .runs_here = always, .isa = "any", .merge = merge<double>};
const HostKernel merge_cpu_kernel = {.runs_here = always, .isa = "any", .merge = merge<float>};

}  // namespace attn
