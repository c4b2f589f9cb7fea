// Gradients in float64: the formulas of attn.h, one row of dq, of dk and dv, one element of d_bias
// at a time.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/interrupt.h"
#include "cpu/backward_view.h"
#include "cpu/kernels.h"
#include "cpu/pool.h"

namespace attn {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// A thread's rows. The workspace has these of all threads, then delta of all query rows.
struct Scratch {
  double *q, *k, *v, *d_out, *dq, *dk, *dv;

  static int64_t size(const Problem& p) { return 4 * p.head_dim + 3 * p.head_dim_v; }
  Scratch(const Problem& p, double* at) {
    for (double** row : {&q, &k, &dq, &dk}) *row = std::exchange(at, at + p.head_dim);
    for (double** row : {&v, &d_out, &dv}) *row = std::exchange(at, at + p.head_dim_v);
  }
};

int64_t query_rows(const Problem& p) {
  return p.heads_q * (p.q_layout == ATTN_PACKED ? p.total_q : p.batch * p.seqlen_q);
}

size_t workspace_bytes(const AnyProblem& problem, int threads) {
  const Problem& p = static_cast<const BackwardProblem&>(problem).of;
  return size_t(threads * Scratch::size(p) + query_rows(p)) * sizeof(double);
}

double dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t d = 0; d < n; ++d) sum += a[d] * b[d];
  return sum;
}

// The queries and keys of one batch entry and query head.
class Head {
 public:
  Head(const BackwardProblem& problem, const BackwardArgs& args, double* delta, int64_t b,
       int64_t h)
      : b_(problem),
        args_(args),
        p_(problem.of),
        delta_(delta),
        entry_(b),
        h_(h),
        kv_head_(h / p_.group()),
        query_(query_view(p_, args.of, b)),
        gradients_(query_gradients(problem, args, b)),
        keys_(key_view(problem, args, b)),
        scale_(exact_scale(p_)) {}

  int64_t queries() const { return query_.length; }
  int64_t keys() const { return keys_.length; }
  int64_t kv_head() const { return kv_head_; }
  double scale() const { return scale_; }
  double slope_of_bias() const { return p_.has(ATTN_BIAS_SLOPES) ? args_.of.bias_slopes[h_] : 1; }
  int64_t lse_row(int64_t i) const { return query_.lse + h_ * query_.lse_head + i; }
  double lse(int64_t i) const { return args_.of.lse[lse_row(i)]; }
  double& delta(int64_t i) const { return delta_[lse_row(i)]; }
  int64_t dq_row(int64_t i) const {
    return gradients_.dq + i * b_.dq_stride.seq + h_ * b_.dq_stride.head;
  }
  int64_t dk_row(int64_t j) const {
    return keys_.dk + j * b_.dk_stride.seq + kv_head_ * b_.dk_stride.head;
  }
  int64_t dv_row(int64_t j) const {
    return keys_.dv + j * b_.dv_stride.seq + kv_head_ * b_.dv_stride.head;
  }

  void load_query(int64_t i, const Scratch& s) const {
    decode_row(p_.q_type, args_.of.q, query_.q + i * p_.q_stride.seq + h_ * p_.q_stride.head,
               p_.head_dim, s.q);
    decode_row(b_.d_out_type, args_.d_out,
               gradients_.d_out + i * b_.d_out_stride.seq + h_ * b_.d_out_stride.head,
               p_.head_dim_v, s.d_out);
  }
  void load_key(int64_t j, const Scratch& s) const {
    const Segment& kv = b_.kv();
    const attn_segment_args data = args_.of.segment[0];
    decode_row(kv.k_type, data.k, keys_.k + j * kv.k_stride.seq + kv_head_ * kv.k_stride.head,
               p_.head_dim, s.k);
    decode_row(kv.v_type, data.v, keys_.v + j * kv.v_stride.seq + kv_head_ * kv.v_stride.head,
               p_.head_dim_v, s.v);
  }

  double bias(int64_t i, int64_t j) const {
    if (p_.bias_type == ATTN_DTYPE_NONE) return 0;
    const double x = decode_element(p_.bias_type, args_.of.bias,
                                    entry_ * p_.bias_stride[0] + h_ * p_.bias_stride[1] +
                                        i * p_.bias_stride[2] + j * p_.bias_stride[3]);
    return x == -infinity ? x : x * slope_of_bias();
  }
  bool visible(int64_t i, int64_t j) const {
    const KeyRange range = visible_keys(p_, args_.of, entry_, i, queries(), keys());
    if (j < range.begin || j >= range.end) return false;
    if (p_.has(ATTN_BLOCK_MASK) &&
        !block_view(p_, args_.of, entry_, h_, i / p_.block_q, j / p_.block_k)
             .visible(i % p_.block_q, j % p_.block_k, i, j, keys() - queries()))
      return false;
    return bias(i, j) != -infinity;
  }
  bool sees_any(int64_t i) const {
    for (int64_t j = 0; j < keys(); ++j)
      if (visible(i, j)) return true;
    return false;
  }

  // Of loaded rows of a visible pair.
  struct Pair {
    double p, ds, dx;  // the weight; gradients of the score, and of scale q k
  };
  Pair pair(int64_t i, int64_t j, const Scratch& s) const {
    if (lse(i) == -infinity) return {0, 0, 0};
    double score = scale_ * dot(s.q, s.k, p_.head_dim), slope = 1;
    if (p_.softcap > 0) {
      const double t = std::tanh(score / p_.softcap);
      score = p_.softcap * t;
      slope = 1 - t * t;
    }
    score += bias(i, j);
    if (p_.has(ATTN_ALIBI))
      score -= double(args_.of.alibi_slopes[h_]) * std::abs(double(i + keys() - queries() - j));
    const double weight = std::exp(score - lse(i));
    const double ds = weight * (dot(s.d_out, s.v, p_.head_dim_v) - delta(i));
    return {weight, ds, ds * slope};
  }

  // d_out . out - d_lse. A row that sees nothing has the constant 0 as out.
  void find_delta(int64_t i, const Scratch& s) const {
    load_query(i, s);
    double sum = 0;
    if (sees_any(i)) {
      decode_row(p_.out_type, args_.of.out,
                 query_.out + i * p_.out_stride.seq + h_ * p_.out_stride.head, p_.head_dim_v, s.v);
      sum = dot(s.d_out, s.v, p_.head_dim_v);
    }
    delta(i) = sum - (args_.d_lse ? args_.d_lse[lse_row(i)] : 0);
  }

 private:
  const BackwardProblem& b_;
  const BackwardArgs& args_;
  const Problem& p_;
  double* const delta_;
  const int64_t entry_, h_, kv_head_;
  const QueryView query_;
  const QueryGradients gradients_;
  const KeyView keys_;
  const double scale_;
};

void store_row(attn_dtype type, void* base, int64_t at, const double* row, int64_t n, bool add) {
  for (int64_t d = 0; d < n; ++d) store_gradient(type, base, at + d, row[d], add);
}

class Backward {
 public:
  Backward(const BackwardProblem& b, const BackwardArgs& args, void* workspace, ThreadPool& pool,
           Interrupt& interrupt)
      : b_(b),
        args_(args),
        p_(b.of),
        scratch_(static_cast<double*>(workspace)),
        delta_(scratch_ + pool.threads() * Scratch::size(p_)),
        pool_(pool),
        interrupt_(interrupt),
        nanoseconds_(double(query_rows(p_)) * double(p_.seqlen_kv) *
                     (20.0 + 4 * double(p_.head_dim + p_.head_dim_v))) {}

  void run() {
    clear_rows_of_nobody(b_, args_);
    const int64_t rows = p_.batch * p_.heads_q * p_.seqlen_q;
    each(rows, [&](int64_t item, const Scratch& s, int) {
      const Head head = this->head(item / p_.seqlen_q);
      const int64_t i = item % p_.seqlen_q;
      if (i < head.queries()) head.find_delta(i, s);
    });
    if (b_.wants(ATTN_GRAD_Q)) {
      each(rows, [&](int64_t item, const Scratch& s, int thread) {
        const Head head = this->head(item / p_.seqlen_q);
        if (item % p_.seqlen_q < head.queries()) find_dq(head, item % p_.seqlen_q, s, thread);
      });
    }
    if (b_.wants(ATTN_GRAD_K | ATTN_GRAD_V)) {
      const int64_t keys = b_.kv().seqlen;
      each(p_.batch * p_.heads_kv * keys, [&](int64_t item, const Scratch& s, int thread) {
        const int64_t kv_head = item / keys % p_.heads_kv, b = item / keys / p_.heads_kv;
        find_dk_dv(b, kv_head, item % keys, s, thread);
      });
    }
    if (b_.wants(ATTN_GRAD_SINKS))
      each(p_.heads_q, [&](int64_t h, const Scratch&, int) { find_d_sinks(h); });
    if (b_.wants(ATTN_GRAD_BIAS)) find_d_bias();
  }

 private:
  Head head(int64_t n) const { return Head(b_, args_, delta_, n / p_.heads_q, n % p_.heads_q); }

  template <class Body>
  void each(int64_t items, Body&& body) {
    pool_.for_each(
        items,
        [&](int64_t item, int thread) {
          if (interrupt_.stop(thread, 100)) return;
          body(item, Scratch(p_, scratch_ + thread * Scratch::size(p_)), thread);
        },
        &interrupt_, pool_.worth(nanoseconds_));
  }
  bool stop(int thread) { return interrupt_.stop(thread, 2 * (p_.head_dim + p_.head_dim_v)); }

  void find_dq(const Head& head, int64_t i, const Scratch& s, int thread) {
    std::fill_n(s.dq, p_.head_dim, 0.0);
    head.load_query(i, s);
    for (int64_t j = 0; j < head.keys(); ++j) {
      if (!head.visible(i, j)) continue;
      if (stop(thread)) return;
      head.load_key(j, s);
      const double dx = head.scale() * head.pair(i, j, s).dx;
      for (int64_t d = 0; d < p_.head_dim; ++d) s.dq[d] += dx * s.k[d];
    }
    store_row(b_.dq_type, args_.dq, head.dq_row(i), s.dq, p_.head_dim, b_.adds(ATTN_GRAD_Q));
  }

  void find_dk_dv(int64_t b, int64_t kv_head, int64_t j, const Scratch& s, int thread) {
    const int64_t group = p_.group();
    std::fill_n(s.dk, p_.head_dim, 0.0);
    std::fill_n(s.dv, p_.head_dim_v, 0.0);
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
      const Head head(b_, args_, delta_, b, h);
      if (j >= head.keys()) return;
      head.load_key(j, s);
      for (int64_t i = 0; i < head.queries(); ++i) {
        if (!head.visible(i, j)) continue;
        if (stop(thread)) return;
        head.load_query(i, s);
        const Head::Pair pair = head.pair(i, j, s);
        for (int64_t d = 0; d < p_.head_dim; ++d) s.dk[d] += head.scale() * pair.dx * s.q[d];
        for (int64_t d = 0; d < p_.head_dim_v; ++d) s.dv[d] += pair.p * s.d_out[d];
      }
    }
    const Head head(b_, args_, delta_, b, kv_head * group);
    if (b_.wants(ATTN_GRAD_K))
      store_row(b_.dk_type, args_.dk, head.dk_row(j), s.dk, p_.head_dim, b_.adds(ATTN_GRAD_K));
    if (b_.wants(ATTN_GRAD_V))
      store_row(b_.dv_type, args_.dv, head.dv_row(j), s.dv, p_.head_dim_v, b_.adds(ATTN_GRAD_V));
  }

  void find_d_sinks(int64_t h) {
    double sum = 0;
    for (int64_t b = 0; b < p_.batch; ++b) {
      const Head head(b_, args_, delta_, b, h);
      for (int64_t i = 0; i < head.queries(); ++i)
        if (head.lse(i) != -infinity)
          sum -= std::exp(double(args_.of.sinks[h]) - head.lse(i)) * head.delta(i);
    }
    store_gradient(ATTN_F32, args_.d_sinks, h, sum, b_.adds(ATTN_GRAD_SINKS));
  }

  void find_d_bias() {
    const int64_t extent[4] = {p_.batch, p_.heads_q, p_.seqlen_q, p_.seqlen_kv};
    int64_t own[4], summed[4];  // of an element: those of d_bias, and those that it is a sum over
    for (int n = 0; n < 4; ++n) {
      own[n] = b_.d_bias_stride[n] == 0 ? std::min<int64_t>(1, extent[n]) : extent[n];
      summed[n] = b_.d_bias_stride[n] == 0 ? extent[n] : 1;
    }
    each(own[0] * own[1] * own[2] * own[3], [&](int64_t item, const Scratch& s, int thread) {
      int64_t first[4], at = 0;
      for (int n = 3; n >= 0; --n) {
        first[n] = item % own[n];
        item /= own[n];
        at += first[n] * b_.d_bias_stride[n];
      }
      double sum = 0;
      for (int64_t b = first[0]; b < first[0] + summed[0]; ++b) {
        for (int64_t h = first[1]; h < first[1] + summed[1]; ++h) {
          const Head head(b_, args_, delta_, b, h);
          for (int64_t i = first[2]; i < std::min(first[2] + summed[2], head.queries()); ++i) {
            for (int64_t j = first[3]; j < std::min(first[3] + summed[3], head.keys()); ++j) {
              if (!head.visible(i, j)) continue;
              if (stop(thread)) return;
              head.load_query(i, s);
              head.load_key(j, s);
              sum += head.slope_of_bias() * head.pair(i, j, s).ds;
            }
          }
        }
      }
      store_gradient(b_.d_bias_type, args_.d_bias, at, sum, b_.adds(ATTN_GRAD_BIAS));
    });
  }

  const BackwardProblem& b_;
  const BackwardArgs& args_;
  const Problem& p_;
  double *const scratch_, *const delta_;
  ThreadPool& pool_;
  Interrupt& interrupt_;
  const double nanoseconds_;  // of one thread, for a pass
};

void backward(const BackwardProblem& problem, const BackwardArgs& args, void* workspace,
              ThreadPool& pool, Interrupt& interrupt) {
  Backward(problem, args, workspace, pool, interrupt).run();
}

}  // namespace

const HostKernel backward_reference_kernel = {.runs_here = [] { return true; },
                                              .isa = "any",
                                              .workspace = workspace_bytes,
                                              .backward = backward};

}  // namespace attn
