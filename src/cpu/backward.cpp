// The cpu kernel of gradients, in float32. A work item has a chunk of keys of one (batch, kv head):
// it keeps their sums of dk and dv and goes over the blocks of query rows that see any of them. dq
// is summed in the workspace; the chunks that add to a block of rows take turns, in the order of
// keys, so no bit depends on who is first. A chunk begins after the ones before it have, in the
// order of items, so the one that is waited for is always under way.
//
// Keys are along the lanes of a panel, see GradientRules. Rows are ordered by query, then by head
// of the group, as in forward.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>

#include "core/interrupt.h"
#include "cpu/backward_view.h"
#include "cpu/kernels.h"
#include "cpu/pool.h"
#include "cpu/tile.h"

namespace attn {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr double log2_e = 1.4426950408889634;
constexpr double work_per_nanosecond = 100;  // multiply-adds of one thread

// Sizes in elements. They follow from the problem, so bits do not change with threads.
struct Shape {
  // Whole tiles of TileOps::scores and add_products; with 128 columns rows and their scores fit
  // into half of a second cache of 1 MB.
  static constexpr int64_t most_rows = 96, most_keys = 192;
  struct Width {
    int64_t dim;
    int vectors;  // of a slab
    int64_t slab, stride;
    Width(int64_t dim, const TileOps& ops) : dim(dim) {
      vectors = even_width(ceil_div(dim, ops.lanes), ops.slab_vectors);
      slab = int64_t(vectors) * ops.lanes;
      stride = round_up(dim, slab);
      // Rows a power of two apart would share few sets of the first cache.
      if (stride % (4 * ops.lanes) == 0) stride += ops.lanes;
    }
  };
  Width qk, v;
  int panel_vectors;
  int64_t panel, keys, rows;
  int64_t chunks;  // of a sequence, at most
  int64_t tokens;  // query tokens of all sequences
  int64_t blocks;  // of rows of a sequence and kv head, at most

  Shape(const BackwardProblem& b, const TileOps& ops)
      : qk(b.of.head_dim, ops), v(b.of.head_dim_v, ops) {
    const Problem& p = b.of;
    const int64_t seqlen = std::max<int64_t>(1, b.kv().seqlen);
    panel_vectors = even_width(ceil_div(seqlen, ops.lanes), ops.panel_vectors);
    panel = int64_t(panel_vectors) * ops.lanes;
    keys = std::min(round_up(seqlen, panel), most_keys / panel * panel);
    const int64_t all_rows = std::max<int64_t>(1, p.seqlen_q * p.group());
    rows = std::min(most_rows, all_rows);
    chunks = ceil_div(b.kv().seqlen, keys);
    tokens = p.q_layout == ATTN_PACKED ? p.total_q : p.batch * p.seqlen_q;
    blocks = ceil_div(p.seqlen_q * p.group(), rows);
  }
  int64_t panels() const { return keys / panel; }
};

// What all threads share.
struct Shared {
  float *lse, *delta;           // [heads_q][tokens]; lse in log2, +inf for a row that sees nothing
  float* dq;                    // [heads_kv][tokens][group][stride]
  std::atomic<int32_t>* turns;  // [batch][heads_kv][blocks]: chunks that have added to a block

  size_t place(const BackwardProblem& b, const Shape& shape, char* base) {
    Place at(base);
    const int64_t rows = b.of.heads_q * shape.tokens;
    at.take(lse, rows);
    at.take(delta, rows);
    const bool sums = b.wants(ATTN_GRAD_Q);
    at.take(dq, sums ? rows * shape.qk.stride : 0);
    const int64_t count = sums ? b.of.batch * b.of.heads_kv * shape.blocks : 0;
    at.take(turns, count);
    if (base) std::uninitialized_fill_n(turns, count, 0);
    return at.used();
  }
};

// One thread's. Rows are stride apart; what is after dim is 0.
struct Scratch {
  // of the chunk of keys
  float *k, *k_turned, *v_turned;  // [keys][stride]; [panels][dim][panel]
  float *dk, *dv;                  // [keys][stride]
  // of the block of rows
  float *q, *d_out;  // [rows][stride]
  float *p, *ds;     // [rows][panel]; [panels][rows][panel]
  float* add;        // [rows][panel]
  float *lse, *delta, *slope, *row;
  float* max;  // [panel], of TileOps::scores, not used
  int32_t *begin, *end, *position, *keys_seen;
  uint8_t *rows_seen, *marks;
  double* bias;  // [rows][keys], sums of d_bias

  size_t place(const BackwardProblem& b, const Shape& s, char* base) {
    Place at(base);
    at.take(k, s.keys * s.qk.stride);
    at.take(k_turned, s.keys * s.qk.dim);
    at.take(v_turned, s.keys * s.v.dim);
    at.take(dk, s.keys * s.qk.stride);
    at.take(dv, s.keys * s.v.stride);
    at.take(q, s.rows * s.qk.stride);
    at.take(d_out, s.rows * s.v.stride);
    at.take(p, s.rows * s.panel);
    at.take(ds, s.rows * s.keys);
    at.take(add, s.rows * s.panel);
    for (float** of_rows : {&lse, &delta, &slope}) at.take(*of_rows, s.rows);
    at.take(row, std::max({s.qk.stride, s.v.stride, s.keys}));
    at.take(max, s.panel);
    for (int32_t** of_rows : {&begin, &end, &position}) at.take(*of_rows, s.rows);
    at.take(keys_seen, s.panel);
    at.take(rows_seen, s.rows);
    at.take(marks, s.panel);
    at.take(bias, b.wants(ATTN_GRAD_BIAS) ? s.rows * s.keys : 0);
    return at.used();
  }
};

// Calls visit(first, count) for runs of marks that are not 0.
template <class Mark, class Visit>
void for_each_run(const Mark* marks, int64_t begin, int64_t end, Visit&& visit) {
  for (int64_t n = begin; n < end;) {
    if (!marks[n]) {
      ++n;
      continue;
    }
    const int64_t first = n;
    while (n < end && marks[n]) ++n;
    visit(first, n - first);
  }
}

struct Job {
  const BackwardProblem& b;
  const BackwardArgs& args;
  const TileOps& ops;
  const Shape& shape;
  const Shared& shared;
  Interrupt& interrupt;
};

// A row of a gradient, times `factor`, to its place. Overwrites `row`; `room`: for as many numbers.
void store_gradient_row(const TileOps& ops, attn_dtype type, float* row, float factor, int64_t n,
                        void* base, int64_t index, bool add, float* room) {
  if (add) {
    load_rows(ops, type, static_cast<const char*>(base), 0, 1, index, n, 1, room, 0);
    for (int64_t d = 0; d < n; ++d) row[d] = room[d] + factor * row[d];
    factor = 1;
  }
  store_row(ops, type, row, factor, n, base, index);
}

// The pairs of a block of rows and a chunk of keys of one batch entry.
class Tile : Job {
 public:
  Tile(const Job& job, const Scratch& scratch, int thread)
      : Job(job), t_(scratch), thread_(thread), p_(b.of) {}

  const Scratch& scratch() const { return t_; }
  int64_t first_row() const { return first_row_; }
  int64_t count() const { return count_; }
  int64_t num_keys() const { return num_keys_; }
  HeadRows rows() const { return {first_row_, heads_, first_head_}; }
  int64_t query_of(int64_t row) const { return rows().query(row); }
  int64_t head_of(int64_t row) const { return rows().head(row); }

  // Chunk `chunk` of the keys of (b, kv_head).
  void take_keys(int64_t entry, int64_t kv_head, int64_t chunk) {
    if (entry == entry_ && kv_head == kv_head_ && chunk == chunk_) return;
    entry_ = entry, kv_head_ = kv_head, chunk_ = chunk;
    query_ = query_view(p_, args.of, entry);
    gradients_ = query_gradients(b, args, entry);
    keys_ = key_view(b, args, entry);
    first_key_ = chunk * shape.keys;
    num_keys_ = std::clamp<int64_t>(keys_.length - first_key_, 0, shape.keys);
    if (num_keys_ == 0) return;
    const Segment& kv = b.kv();
    const attn_segment_args data = args.of.segment[0];
    load_keys(kv.v_type, data.v, keys_.v, kv.v_stride, shape.v, t_.dv);
    turn(t_.dv, shape.v, t_.v_turned);
    load_keys(kv.k_type, data.k, keys_.k, kv.k_stride, shape.qk, t_.k);
    turn(t_.k, shape.qk, t_.k_turned);
  }

  // Rows [first_row, first_row + count) of `heads` heads from first_head on. False: they see none
  // of the chunk's keys.
  bool take_rows(int64_t first_head, int64_t heads, int64_t first_row, int64_t count) {
    first_head_ = first_head, heads_ = heads, first_row_ = first_row, count_ = count;
    bool any = false;
    for (int64_t row = 0; row < count; ++row) {
      const int64_t i = query_of(row), h = head_of(row), at = h * shape.tokens + query_.row + i;
      const KeyRange range = visible_keys(p_, args.of, entry_, i, query_.length, keys_.length);
      t_.lse[row] = shared.lse[at];
      t_.delta[row] = shared.delta[at];
      const int64_t begin = std::clamp<int64_t>(range.begin - first_key_, 0, num_keys_),
                    end = std::clamp<int64_t>(range.end - first_key_, 0, num_keys_);
      const bool none = begin >= end || t_.lse[row] == infinity;
      t_.begin[row] = none ? 0 : int32_t(begin);
      t_.end[row] = none ? 0 : int32_t(end);
      any |= !none;
      if (p_.has(ATTN_ALIBI)) t_.slope[row] = args.of.alibi_slopes[h];
    }
    if (!any) return false;
    load_queries(p_.q_type, args.of.q, query_.q, p_.q_stride, shape.qk, t_.q);
    load_queries(b.d_out_type, args.d_out, gradients_.d_out, b.d_out_stride, shape.v, t_.d_out);
    return true;
  }

  bool stop() {
    return interrupt.stop(thread_, count_ * num_keys_ * (3 * shape.qk.dim + 2 * shape.v.dim) / 32);
  }

  // Weights to p, gradients of scores to ds of the panel. of_scores: as GradientRules. False:
  // nothing of the panel is visible.
  bool weigh(int64_t panel, bool of_scores) {
    const int64_t base = panel * shape.panel;
    row_begin_ = count_, row_end_ = 0;
    all_ = true;
    for (int64_t row = 0; row < count_; ++row) {
      if (t_.begin[row] >= base + shape.panel || t_.end[row] <= base) continue;
      row_begin_ = std::min(row_begin_, row);
      row_end_ = row + 1;
    }
    if (row_begin_ >= row_end_) return false;
    for (int64_t row = row_begin_; row < row_end_; ++row)
      all_ &= t_.begin[row] <= base && t_.end[row] >= base + shape.panel;
    bool add = false;
    if (!fill_add(base, &add)) return false;

    const int64_t first = row_begin_, rows = row_end_ - row_begin_;
    float* const p = t_.p + first * shape.panel;
    float* const ds = ds_of(panel) + first * shape.panel;
    ops.scores(shape.panel_vectors, t_.k_turned + base * shape.qk.dim,
               t_.q + first * shape.qk.stride, shape.qk.stride, shape.qk.dim, rows, p, t_.max);
    ops.scores(shape.panel_vectors, t_.v_turned + base * shape.v.dim,
               t_.d_out + first * shape.v.stride, shape.v.stride, shape.v.dim, rows, ds, t_.max);
    GradientRules rules{};
    rules.scale = p_.scale;
    rules.softcap = p_.softcap;
    rules.of_scores = of_scores;
    rules.lse = t_.lse + first;
    rules.delta = t_.delta + first;
    if (add) rules.add = t_.add + first * shape.panel;
    if (p_.has(ATTN_ALIBI)) {
      rules.slope = t_.slope + first;
      rules.position = t_.position + first;
      const int64_t diagonal = keys_.length - query_.length - first_key_ - base;
      for (int64_t row = first; row < row_end_; ++row)
        t_.position[row] = int32_t(query_of(row) + diagonal);
    }
    int32_t begin[Shape::most_rows], end[Shape::most_rows];
    if (!all_) {
      for (int64_t n = 0; n < rows; ++n) {
        begin[n] = t_.begin[first + n] - int32_t(base);
        end[n] = t_.end[first + n] - int32_t(base);
      }
      rules.begin = begin;
      rules.end = end;
    }
    // What no pair of the panel has must not be read: it may be NaN.
    rules.rows_seen = t_.rows_seen + first;
    rules.keys_seen = t_.keys_seen;
    std::fill_n(t_.rows_seen + first, rows, uint8_t(1));
    std::fill_n(t_.keys_seen, shape.panel, 1);
    ops.gradients(shape.panel_vectors, rules, rows, p, ds);
    return true;
  }

  // dv += p^T d_out, dk += ds^T q.
  void add_keys(int64_t panel) {
    const int64_t base = panel * shape.panel;
    const int64_t keys = std::min(shape.panel, num_keys_ - base);
    for_each_run(t_.rows_seen, row_begin_, row_end_, [&](int64_t row, int64_t rows) {
      if (b.wants(ATTN_GRAD_V))
        add_products(keys, t_.p + row * shape.panel, 1, shape.panel, shape.v,
                     t_.d_out + row * shape.v.stride, rows, t_.dv + base * shape.v.stride);
      if (b.wants(ATTN_GRAD_K))
        add_products(keys, ds_of(panel) + row * shape.panel, 1, shape.panel, shape.qk,
                     t_.q + row * shape.qk.stride, rows, t_.dk + base * shape.qk.stride);
    });
  }

  // dq += ds k of the panel that has just been weighed; `dq`: of the block's first row.
  struct SeenKeys {
    int64_t row_begin, row_end;
    uint8_t seen[64];
  };
  SeenKeys seen_keys() const {
    SeenKeys keys{row_begin_, row_end_, {}};
    for (int64_t c = 0; c < shape.panel; ++c) keys.seen[c] = t_.keys_seen[c] != 0;
    return keys;
  }
  void add_queries(int64_t panel, const SeenKeys& keys, float* dq) const {
    for_each_run(keys.seen, 0, shape.panel, [&](int64_t key, int64_t count) {
      add_products(keys.row_end - keys.row_begin, ds_of(panel) + keys.row_begin * shape.panel + key,
                   shape.panel, 1, shape.qk, t_.k + (panel * shape.panel + key) * shape.qk.stride,
                   count, dq + keys.row_begin * shape.qk.stride);
    });
  }

  // Of the chunk's keys.
  void start_keys() {
    std::fill_n(t_.dk, shape.keys * shape.qk.stride, 0.0f);
    std::fill_n(t_.dv, shape.keys * shape.v.stride, 0.0f);
  }
  void store_keys() {
    for (int64_t c = 0; c < num_keys_; ++c) {
      const int64_t j = first_key_ + c;
      if (b.wants(ATTN_GRAD_K))
        store_gradient_row(ops, b.dk_type, t_.dk + c * shape.qk.stride, p_.scale, shape.qk.dim,
                           args.dk, keys_.dk + j * b.dk_stride.seq + kv_head_ * b.dk_stride.head,
                           b.adds(ATTN_GRAD_K), t_.row);
      if (b.wants(ATTN_GRAD_V))
        store_gradient_row(ops, b.dv_type, t_.dv + c * shape.v.stride, 1, shape.v.dim, args.dv,
                           keys_.dv + j * b.dv_stride.seq + kv_head_ * b.dv_stride.head,
                           b.adds(ATTN_GRAD_V), t_.row);
    }
  }
  // Of the block's rows.
  void store_queries(float* dq) {
    for (int64_t row = 0; row < count_; ++row)
      store_gradient_row(
          ops, b.dq_type, dq + row * shape.qk.stride, p_.scale, shape.qk.dim, args.dq,
          gradients_.dq + query_of(row) * b.dq_stride.seq + head_of(row) * b.dq_stride.head,
          b.adds(ATTN_GRAD_Q), t_.row);
  }

  float* ds_of(int64_t panel) const { return t_.ds + panel * shape.rows * shape.panel; }
  int64_t panels() const { return ceil_div(num_keys_, shape.panel); }
  int64_t row_begin() const { return row_begin_; }
  int64_t row_end() const { return row_end_; }

 private:
  void add_products(int64_t rows, const float* weights, int64_t row_step, int64_t step,
                    const Shape::Width& width, const float* values, int64_t count,
                    float* out) const {
    for (int64_t column = 0; column < width.dim; column += width.slab)
      for (int64_t row = 0; row < rows; row += ops.value_rows)
        ops.add_products(width.vectors, int(std::min<int64_t>(ops.value_rows, rows - row)),
                         weights + row * row_step, row_step, step, values + column, width.stride,
                         count, out + row * width.stride + column, width.stride);
  }

  // The rest of each row, and rows after the last key, become 0.
  void load_keys(attn_dtype type, const void* base, int64_t first, const attn_strides& stride,
                 const Shape::Width& width, float* to) const {
    first += first_key_ * stride.seq + kv_head_ * stride.head;
    load_rows(ops, type, static_cast<const char*>(base) + dtype_bytes(type, first),
              dtype_bytes(type, stride.seq), num_keys_, 0, width.dim, 1, to, width.stride);
    for (int64_t c = 0; c < shape.keys; ++c)
      std::fill(to + c * width.stride + (c < num_keys_ ? width.dim : 0),
                to + (c + 1) * width.stride, 0.0f);
  }
  void load_queries(attn_dtype type, const void* base, int64_t first, const attn_strides& stride,
                    const Shape::Width& width, float* to) const {
    for (int64_t row = 0; row < count_; ++row) {
      float* out = to + row * width.stride;
      load_rows(ops, type, static_cast<const char*>(base), 0, 1,
                first + query_of(row) * stride.seq + head_of(row) * stride.head, width.dim, 1, out,
                0);
      std::fill(out + width.dim, out + width.stride, 0.0f);
    }
  }
  void turn(const float* rows, const Shape::Width& width, float* to) const {
    for (int64_t c = 0; c < panels() * shape.panel; ++c) {
      float* out = to + c / shape.panel * shape.panel * width.dim + c % shape.panel;
      for (int64_t d = 0; d < width.dim; ++d) out[d * shape.panel] = rows[c * width.stride + d];
    }
  }

  // Bias, and -inf where the block mask hides, of the rows [row_begin_, row_end_) and the panel
  // from key `base` of the chunk on. False: the block mask hides all.
  bool fill_add(int64_t base, bool* used) {
    const int64_t count = std::min(shape.panel, num_keys_ - base), first = first_key_ + base;
    if (p_.has(ATTN_BLOCK_MASK)) {
      bool any = false, full = true;
      for_each_block(first, count, [&](int64_t, int64_t, int64_t, int64_t, const BlockView& block) {
        any |= block.kind != ATTN_BLOCK_EMPTY;
        full &= block.kind == ATTN_BLOCK_FULL;
      });
      if (!any) return false;
      *used = !full;
    }
    const bool masked = *used, bias = p_.bias_type != ATTN_DTYPE_NONE;
    *used |= bias;
    if (!*used) return true;
    for (int64_t row = row_begin_; row < row_end_; ++row) {
      float* out = t_.add + row * shape.panel;
      if (bias)
        read_bias(row, first, count, out);
      else
        std::fill_n(out, count, 0.0f);
      std::fill(out + count, out + shape.panel, -infinity);
    }
    if (!masked) return true;
    const int64_t diagonal = keys_.length - query_.length;
    for_each_block(
        first, count,
        [&](int64_t row, int64_t rows, int64_t key, int64_t key_end, const BlockView& block) {
          if (block.kind == ATTN_BLOCK_FULL) return;
          const int64_t i = query_of(row);
          for (int64_t j = key; j < key_end; ++j) {
            if (block.visible(i % p_.block_q, j % p_.block_k, i, j, diagonal)) continue;
            for (int64_t r = row; r < row + rows; ++r)
              t_.add[r * shape.panel + j - first] = -infinity;
          }
        });
    return true;
  }

  template <class Visit>
  void for_each_block(int64_t first, int64_t count, Visit&& visit) const {
    attn::for_each_block(p_, args.of, entry_, rows(), row_begin_, row_end_, first, first + count,
                         visit);
  }

  void read_bias(int64_t row, int64_t key, int64_t count, float* out) const {
    attn::read_bias(p_, args.of, ops, entry_, head_of(row), query_of(row), key, count, out);
  }

  const Scratch t_;
  const int thread_;
  const Problem& p_;
  int64_t entry_ = -1, kv_head_ = -1, chunk_ = -1;
  QueryView query_{};
  QueryGradients gradients_{};
  KeyView keys_{};
  int64_t first_key_ = 0, num_keys_ = 0;
  int64_t first_head_ = 0, heads_ = 1, first_row_ = 0, count_ = 0;
  int64_t row_begin_ = 0, row_end_ = 0;  // of the block's rows, those that see the panel
  bool all_ = false;                     // each of them sees all of it
};

class Backward : Job {
 public:
  Backward(const Job& job, char* scratch, size_t scratch_bytes, ThreadPool& pool)
      : Job(job), p_(b.of), scratch_(scratch), scratch_bytes_(scratch_bytes), pool_(pool) {
    const double rows = double(p_.heads_q) * double(shape.tokens);
    row_nanoseconds_ = rows * double(20 + 2 * p_.head_dim_v);
    pair_nanoseconds_ = rows * double(p_.seqlen_kv) * double(3 * p_.head_dim + 2 * p_.head_dim_v) /
                        work_per_nanosecond;
  }

  void run() {
    clear_rows_of_nobody(b, args);
    const int64_t sequences = p_.batch * p_.heads_kv;
    each(sequences * shape.blocks, row_nanoseconds_, [&](int64_t item, int thread) {
      prepare(item / shape.blocks / p_.heads_kv, item / shape.blocks % p_.heads_kv,
              item % shape.blocks, thread);
    });
    if (b.wants(ATTN_GRAD_SINKS))
      each(p_.heads_q, row_nanoseconds_,
           [&](int64_t head, int thread) { find_d_sinks(head, thread); });
    if (b.wants(ATTN_GRAD_Q | ATTN_GRAD_K | ATTN_GRAD_V)) {
      // The first chunks, which under a causal mask most rows see, go first.
      each(sequences * shape.chunks, pair_nanoseconds_, [&](int64_t item, int thread) {
        chunk(item % sequences / p_.heads_kv, item % p_.heads_kv, item / sequences, thread);
      });
    }
    if (b.wants(ATTN_GRAD_BIAS)) find_d_bias();
  }

 private:
  template <class Body>
  void each(int64_t items, double nanoseconds, Body&& body) {
    pool_.for_each(items, body, &interrupt, pool_.worth(nanoseconds));
  }
  Scratch scratch_of(int thread) const {
    Scratch t;
    t.place(b, shape, scratch_ + size_t(thread) * scratch_bytes_);
    return t;
  }
  int64_t rows_of(const QueryView& query) const { return query.length * p_.group(); }

  // The chunks of keys that any row of a block sees: first to last, none if last < first.
  struct Chunks {
    int64_t first, last;
    bool has(int64_t chunk) const { return first <= chunk && chunk <= last; }
  };
  Chunks chunks_of(int64_t entry, int64_t first_row, int64_t count, int64_t queries,
                   int64_t keys) const {
    int64_t begin = keys, end = 0;
    for (int64_t i = first_row / p_.group(); i <= (first_row + count - 1) / p_.group(); ++i) {
      const KeyRange range = visible_keys(p_, args.of, entry, i, queries, keys);
      if (range.begin >= range.end) continue;
      begin = std::min<int64_t>(begin, range.begin);
      end = std::max<int64_t>(end, range.end);
    }
    return begin < end ? Chunks{begin / shape.keys, (end - 1) / shape.keys} : Chunks{0, -1};
  }

  // lse and delta of a block of rows; dq of rows that no chunk will store.
  void prepare(int64_t entry, int64_t kv_head, int64_t block, int thread) {
    const QueryView query = query_view(p_, args.of, entry);
    const int64_t first = block * shape.rows, count = std::min(shape.rows, rows_of(query) - first);
    if (count <= 0 || interrupt.stop(thread, count * shape.v.dim * 4)) return;
    const Scratch t = scratch_of(thread);
    const QueryGradients gradients = query_gradients(b, args, entry);
    const int64_t keys = key_view(b, args, entry).length;
    for (int64_t row = first; row < first + count; ++row) {
      const int64_t i = row / p_.group(), h = kv_head * p_.group() + row % p_.group();
      const int64_t at = query.lse + h * query.lse_head + i;
      const float lse = args.of.lse[at];
      const KeyRange range = visible_keys(p_, args.of, entry, i, query.length, keys);
      double delta = 0;
      if (range.begin < range.end && lse != -infinity) {
        load_rows(ops, p_.out_type, static_cast<const char*>(args.of.out), 0, 1,
                  query.out + i * p_.out_stride.seq + h * p_.out_stride.head, shape.v.dim, 1, t.row,
                  0);
        load_rows(ops, b.d_out_type, static_cast<const char*>(args.d_out), 0, 1,
                  gradients.d_out + i * b.d_out_stride.seq + h * b.d_out_stride.head, shape.v.dim,
                  1, t.d_out, 0);
        // A row from which masks hide all keys has out 0, and nothing depends on its d_out.
        const bool none = p_.has(ATTN_SINKS) && lse == args.of.sinks[h] &&
                          std::all_of(t.row, t.row + shape.v.dim, [](float x) { return x == 0; });
        for (int64_t d = 0; d < shape.v.dim && !none; ++d) delta += double(t.row[d]) * t.d_out[d];
      }
      if (args.d_lse) delta -= args.d_lse[at];
      const int64_t to = h * shape.tokens + query.row + i;
      shared.delta[to] = float(delta);
      shared.lse[to] = lse == -infinity ? infinity : float(double(lse) * log2_e);
    }
    if (!b.wants(ATTN_GRAD_Q) || b.adds(ATTN_GRAD_Q)) return;
    const Chunks seen = chunks_of(entry, first, count, query.length, keys);
    for (int64_t row = first; row < first + count && seen.last < seen.first; ++row) {
      std::fill_n(t.row, shape.qk.dim, 0.0f);
      store_row(ops, b.dq_type, t.row, 1, shape.qk.dim, args.dq,
                gradients.dq + row / p_.group() * b.dq_stride.seq +
                    (kv_head * p_.group() + row % p_.group()) * b.dq_stride.head);
    }
  }

  void find_d_sinks(int64_t head, int thread) {
    double sum = 0;
    for (int64_t entry = 0; entry < p_.batch; ++entry) {
      const QueryView query = query_view(p_, args.of, entry);
      if (interrupt.stop(thread, query.length * 8)) return;
      const int64_t at = head * shape.tokens + query.row;
      for (int64_t i = 0; i < query.length; ++i) {
        const double lse = args.of.lse[query.lse + head * query.lse_head + i];
        if (lse != -infinity)
          sum -= std::exp(double(args.of.sinks[head]) - lse) * double(shared.delta[at + i]);
      }
    }
    store_gradient(ATTN_F32, args.d_sinks, head, sum, b.adds(ATTN_GRAD_SINKS));
  }

  // Waits until the chunks before have added to a block. False: the call is to end.
  bool wait_for(const std::atomic<int32_t>& turn, int64_t number, int thread) {
    while (turn.load(std::memory_order_acquire) != number) {
      if (interrupt.stop(thread, 1000)) return false;
      std::this_thread::yield();
    }
    return true;
  }

  void chunk(int64_t entry, int64_t kv_head, int64_t number, int thread) {
    const QueryView query = query_view(p_, args.of, entry);
    const int64_t keys = key_view(b, args, entry).length;
    if (number * shape.keys >= keys) return;
    Tile tile(*this, scratch_of(thread), thread);
    tile.take_keys(entry, kv_head, number);
    tile.start_keys();
    const int64_t sequence = entry * p_.heads_kv + kv_head;
    for (int64_t block = 0; block * shape.rows < rows_of(query); ++block) {
      const int64_t first = block * shape.rows,
                    count = std::min(shape.rows, rows_of(query) - first);
      const Chunks seen = chunks_of(entry, first, count, query.length, keys);
      if (!seen.has(number)) continue;
      const bool any = tile.take_rows(kv_head * p_.group(), p_.group(), first, count);
      if (tile.stop()) return;
      Tile::SeenKeys keys_of_panel[Shape::most_keys / 4];
      for (int64_t panel = 0; panel < tile.panels(); ++panel) {
        keys_of_panel[panel].row_end = -1;
        if (!any || !tile.weigh(panel, false)) continue;
        keys_of_panel[panel] = tile.seen_keys();
        tile.add_keys(panel);
      }
      if (!b.wants(ATTN_GRAD_Q)) continue;
      std::atomic<int32_t>& turn = shared.turns[sequence * shape.blocks + block];
      if (!wait_for(turn, number - seen.first, thread)) return;
      float* dq =
          shared.dq + ((kv_head * shape.tokens + query.row) * p_.group() + first) * shape.qk.stride;
      if (number == seen.first) std::fill_n(dq, count * shape.qk.stride, 0.0f);
      for (int64_t panel = 0; panel < tile.panels(); ++panel)
        if (keys_of_panel[panel].row_end >= 0) tile.add_queries(panel, keys_of_panel[panel], dq);
      if (number == seen.last) tile.store_queries(dq);
      turn.store(int32_t(number - seen.first + 1), std::memory_order_release);
    }
    tile.store_keys();
  }

  // An item has the elements of one plane of d_bias and a chunk of keys, or all where they are
  // summed.
  void find_d_bias() {
    const int64_t extent[4] = {p_.batch, p_.heads_q, p_.seqlen_q, p_.seqlen_kv};
    bool summed[4];
    for (int n = 0; n < 4; ++n) summed[n] = b.d_bias_stride[n] == 0;
    const int64_t own_batch = summed[0] ? 1 : extent[0], own_heads = summed[1] ? 1 : extent[1],
                  own_chunks = summed[3] ? std::min<int64_t>(1, shape.chunks) : shape.chunks;
    each(own_batch * own_heads * own_chunks, pair_nanoseconds_, [&](int64_t item, int thread) {
      const int64_t first_chunk = item % own_chunks, first_head = item / own_chunks % own_heads,
                    first_entry = item / own_chunks / own_heads;
      const int64_t end_chunk = summed[3] ? shape.chunks : first_chunk + 1,
                    end_head = summed[1] ? extent[1] : first_head + 1,
                    end_entry = summed[0] ? extent[0] : first_entry + 1;
      Tile tile(*this, scratch_of(thread), thread);
      double* const sums = tile.scratch().bias;
      const int64_t columns =
          summed[3] ? 1 : std::min(shape.keys, extent[3] - first_chunk * shape.keys);
      const auto store = [&](int64_t first_row, int64_t rows) {
        for (int64_t row = 0; row < rows; ++row)
          store_bias(sums + row * shape.keys, columns,
                     first_entry * b.d_bias_stride[0] + first_head * b.d_bias_stride[1] +
                         (first_row + row) * b.d_bias_stride[2] +
                         first_chunk * shape.keys * b.d_bias_stride[3],
                     tile.scratch().row);
      };
      if (summed[2]) std::fill_n(sums, shape.keys, 0.0);
      for (int64_t first_row = 0; first_row < extent[2]; first_row += shape.rows) {
        const int64_t rows = std::min(shape.rows, extent[2] - first_row);
        if (!summed[2]) std::fill_n(sums, rows * shape.keys, 0.0);
        for (int64_t chunk = first_chunk; chunk < end_chunk; ++chunk) {
          for (int64_t entry = first_entry; entry < end_entry; ++entry) {
            for (int64_t head = first_head; head < end_head; ++head) {
              tile.take_keys(entry, head / p_.group(), chunk);
              if (tile.num_keys() == 0 || !tile.take_rows(head, 1, first_row, rows)) continue;
              if (tile.stop()) return;
              add_bias(tile, summed[2], summed[3],
                       p_.has(ATTN_BIAS_SLOPES) ? args.of.bias_slopes[head] : 1);
            }
          }
        }
        if (!summed[2]) store(first_row, rows);
      }
      if (summed[2] && extent[2] > 0) store(0, 1);
    });
  }
  void add_bias(Tile& tile, bool sum_rows, bool sum_keys, float slope) {
    double* const sums = tile.scratch().bias;
    for (int64_t panel = 0; panel < tile.panels(); ++panel) {
      if (!tile.weigh(panel, true)) continue;
      for (int64_t row = tile.row_begin(); row < tile.row_end(); ++row) {
        const float* ds = tile.ds_of(panel) + row * shape.panel;
        double* to =
            sums + (sum_rows ? 0 : row * shape.keys) + (sum_keys ? 0 : panel * shape.panel);
        for (int64_t c = 0; c < shape.panel; ++c) to[sum_keys ? 0 : c] += double(slope) * ds[c];
      }
    }
  }
  void store_bias(const double* sums, int64_t count, int64_t index, float* row) {
    const bool add = b.adds(ATTN_GRAD_BIAS);
    if (b.d_bias_stride[3] == 1 && !add) {
      for (int64_t c = 0; c < count; ++c) row[c] = float(sums[c]);
      return store_row(ops, b.d_bias_type, row, 1, count, args.d_bias, index);
    }
    for (int64_t c = 0; c < count; ++c)
      store_gradient(b.d_bias_type, args.d_bias, index + c * b.d_bias_stride[3], sums[c], add);
  }

  const Problem& p_;
  char* const scratch_;
  const size_t scratch_bytes_;
  ThreadPool& pool_;
  double row_nanoseconds_, pair_nanoseconds_;  // of one thread, for all rows or pairs
};

size_t workspace_bytes(const BackwardProblem& b, const TileOps& ops, int threads) {
  const Shape shape(b, ops);
  return size_t(threads) * Scratch().place(b, shape, nullptr) + Shared().place(b, shape, nullptr);
}

void run_backward(const BackwardProblem& b, const BackwardArgs& args, const TileOps& ops,
                  void* workspace, ThreadPool& pool, Interrupt& interrupt) {
  const Shape shape(b, ops);
  const size_t bytes = Scratch().place(b, shape, nullptr);
  char* const base = static_cast<char*>(workspace);
  Shared shared;
  shared.place(b, shape, base + size_t(pool.threads()) * bytes);
  Backward({b, args, ops, shape, shared, interrupt}, base, bytes, pool).run();
}

template <const TileOps& ops>
constexpr HostKernel kernel(const char* isa, bool (*runs_here)()) {
  return {.runs_here = runs_here,
          .isa = isa,
          .workspace =
              [](const AnyProblem& problem, int threads) {
                return workspace_bytes(static_cast<const BackwardProblem&>(problem), ops, threads);
              },
          .backward =
              [](const BackwardProblem& problem, const BackwardArgs& args, void* workspace,
                 ThreadPool& pool, Interrupt& interrupt) {
                run_backward(problem, args, ops, workspace, pool, interrupt);
              }};
}

}  // namespace

#ifdef __x86_64__
constinit const HostKernel backward_avx2_kernel = kernel<tile_ops_avx2>("avx2", has_avx2);
constinit const HostKernel backward_avx512_kernel = kernel<tile_ops_avx512>("avx512", has_avx512);
#endif
constinit const HostKernel backward_baseline_kernel =
    kernel<tile_ops_baseline>("any", [] { return true; });

}  // namespace attn
