// The cpu kernel: blocked online softmax in float32. A work item is a block of query rows of a few
// (batch, kv head); it goes over the tiles of keys that its rows see, of a part of the sequence
// where there are several, and keeps its state in one thread's scratch.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <optional>

#include "core/interrupt.h"
#include "cpu/kernels.h"
#include "cpu/pool.h"
#include "cpu/tile.h"

namespace attn {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr double log2_e = 1.4426950408889634;
constexpr int64_t rows_at_once = 6;  // of TileOps::accumulate

// What one thread does in a nanosecond, multiply-adds; fetching an element of K or V takes as long
// as some.
constexpr double work_per_nanosecond = 120;
constexpr double fetch_cost = 12;

// What the parts of a sequence leave to be merged: each row's largest score in units of the natural
// logarithm, the sum of its weights, the weighted sum of values; and the parts that are done.
struct Parts {
  int64_t rows, row_values, count;  // of a sequence's head; floats of a row; parts
  double* max = nullptr;            // [sequence][part][row]
  float *sum = nullptr, *out = nullptr;
  std::atomic<int32_t>* done = nullptr;  // [sequence][row]: of the block that starts there

  Parts(const Problem& p, const TileShape& shape)
      : rows(std::max<int64_t>(1, p.seqlen_q) * p.group()),
        row_values(shape.value_width),
        count(shape.most_parts) {}

  // As Tile::place.
  size_t place(const Problem& p, char* base) {
    if (count == 1) return 0;
    Place place(base);
    const int64_t sequences = p.batch * p.heads_kv;
    place.take(max, sequences * count * rows);
    place.take(sum, sequences * count * rows);
    place.take(out, sequences * count * rows * row_values);
    place.take(done, sequences * rows);
    if (base) std::uninitialized_fill_n(done, sequences * rows, 0);
    return place.used();
  }
  int64_t at(int64_t sequence, int64_t part, int64_t row) const {
    return (sequence * count + part) * rows + row;
  }
};

// A block of query rows of one (batch, kv head) and one part of its keys.
class Item {
 public:
  Item(const Problem& problem, const Args& args, const TileOps& ops, const TileShape& shape,
       const Tile& tile, const Parts& parts, Interrupt& interrupt, int thread, int64_t b,
       int64_t kv_head, int64_t block, int64_t part)
      : interrupt_(interrupt),
        thread_(thread),
        p_(problem),
        args_(args),
        ops_(ops),
        shape_(shape),
        t_(tile),
        parts_(parts),
        b_(b),
        kv_head_(kv_head),
        query_(query_view(problem, args, b)),
        block_(shape.block(block, query_.length, problem.group())),
        first_row_(block_.first),
        count_(block_.count),
        padded_(ceil_div(count_, shape.panel) * shape.panel),
        part_(part),
        reader_(problem, args, ops, shape, t_, b, kv_head, query_, block_.query),
        seqlen_kv_(reader_.num_keys()),
        first_position_(first_position(problem, args, b, query_.length, seqlen_kv_)),
        band_(sequence_mask(problem, args, b).band(0, first_position_)) {
    if (count_ <= 0) return;
    // Scores stay raw where nothing is added to them; the softmax then applies the scale.
    const float magnitude = std::abs(p_.scale);
    raw_ = p_.softcap == 0 && p_.bias_type == ATTN_DTYPE_NONE && !p_.has(ATTN_ALIBI) &&
           magnitude > 1e-30f && magnitude < 1e30f;
    log2_scale_ = float(raw_ ? magnitude * log2_e : log2_e);
    // One segment's visible keys are a range, which is enough unless their distances count.
    places_ = p_.key_positions() && (p_.num_segments > 1 || p_.has(ATTN_ALIBI));
    cut_keys();
    if (part_ >= num_parts_) return;
    start_rows();
    if (first_key_ < last_key_) {
      load_queries(p_, args_, ops_, shape_, t_, b_, kv_head_, first_row_, count_,
                   raw_ && p_.scale < 0 ? -1.0f : 1.0f);
    }
  }

  // The tiles of an item are those from keys_begin() to keys_end(), none if they are the same.
  int64_t keys_begin() const { return first_key_ / shape_.keys * shape_.keys; }
  int64_t keys_end() const { return std::max(last_key_, keys_begin()); }
  // Before the first tile of any head is computed.
  void prefetch_first() const {
    for (const bool values : {false, true}) prefetch(keys_begin(), values);
  }
  // False: the call is to end.
  bool tile(int64_t base) {
    if (stop(count_ * (p_.head_dim + p_.head_dim_v))) return false;
    one_tile(base);
    return true;
  }

  void finish() {
    if (interrupt_.stopped() || count_ <= 0 || part_ >= num_parts_) return;
    if (num_parts_ == 1) {
      for (int64_t row = 0; row < count_; ++row) finish_row(row, row_max(row), t_.sum[row]);
      return;
    }
    for (int64_t row = 0; row < count_; ++row) leave_row(row);
    std::atomic<int32_t>& done = parts_.done[sequence() * parts_.rows + first_row_];
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < num_parts_) return;
    for (int64_t row = 0; row < count_; ++row) merge_row(row);
  }

 private:
  // Before `operations` on each key of a tile.
  bool stop(int64_t operations) const {
    return interrupt_.stop(thread_, shape_.keys * operations / 32);
  }
  // What per-row arrays have for this many rows, see tile_ops.h.
  int64_t lanes(int64_t rows) const { return std::max(rows, shape_.lane_rows); }
  HeadRows rows() const { return {first_row_, p_.group(), kv_head_ * p_.group()}; }
  int64_t query_of(int64_t row) const { return rows().query(row); }
  int64_t head_of(int64_t row) const { return rows().head(row); }

  // Keys or values of a tile, while the one before and the other heads' are computed.
  void prefetch(int64_t base, bool values) const {
    if (!shape_.prefetch || base >= keys_end()) return;
    reader_.prefetch(base, std::max(first_key_ - base, int64_t(0)),
                     std::min(last_key_ - base, shape_.keys), values);
  }
  // The same, one row at a time, together with those of this tile; else all at once.
  Ahead ahead(int64_t base, bool values) const {
    if (!shape_.prefetch || base >= keys_end()) return {};
    const Ahead rows = reader_.ahead(base, std::max(first_key_ - base, int64_t(0)),
                                     std::min(last_key_ - base, shape_.keys), values);
    if (!rows.first) prefetch(base, values);
    return rows;
  }
  int64_t sequence() const { return b_ * p_.heads_kv + kv_head_; }

  KeyRange keys_of_query(int64_t i) const {
    if (block_.query >= 0) return {0, seqlen_kv_};
    return visible_keys(p_, args_, b_, i, query_.length, seqlen_kv_);
  }

  // What the sequence's queries see of its keys becomes parts of whole tiles.
  void cut_keys() {
    // Positions of segments need not increase from one to the next.
    const bool all = p_.key_positions();
    const int64_t begin = all ? 0 : keys_of_query(0).begin / shape_.keys * shape_.keys;
    const int64_t end = all ? seqlen_kv_ : keys_of_query(query_.length - 1).end;
    const int64_t count = std::max<int64_t>(0, end - begin);
    const int64_t tiles = ceil_div(ceil_div(count, shape_.most_parts), shape_.keys);
    const int64_t keys = std::max(shape_.part_keys, tiles * shape_.keys);
    num_parts_ = shape_.most_parts == 1 ? 1 : std::max<int64_t>(1, ceil_div(count, keys));
    part_begin_ = part_ == 0 ? 0 : begin + part_ * keys;
    part_end_ = part_ == num_parts_ - 1 ? seqlen_kv_ : begin + (part_ + 1) * keys;
  }

  void start_rows() {
    first_key_ = seqlen_kv_;
    last_key_ = 0;
    for (int64_t row = 0; row < padded_; ++row) {
      KeyRange range{0, 0};
      if (row < count_) range = keys_of_query(query_of(row));
      range.begin = std::max<int64_t>(range.begin, part_begin_);
      range.end = std::min<int64_t>(range.end, part_end_);
      if (range.end <= range.begin) range = {0, 0};
      t_.begin[row] = range.begin;
      t_.end[row] = range.end;
      if (range.end > 0) {
        first_key_ = std::min<int64_t>(first_key_, range.begin);
        last_key_ = std::max<int64_t>(last_key_, range.end);
      }
      // Bias and ALiBi count from the row's largest, else their size could round the scores away.
      if (p_.bias_type != ATTN_DTYPE_NONE) t_.bias_base[row] = row < count_ ? largest_bias(row) : 0;
      if (p_.has(ATTN_ALIBI)) {
        t_.nearest[row] = nearest_key(row);
        t_.slope[row] = row < count_ ? args_.alibi_slopes[head_of(row)] : 0;
      }
    }
    for (int64_t row = padded_; row < lanes(padded_); ++row) {  // of few rows
      t_.nearest[row] = t_.nearest[row - padded_];
      t_.slope[row] = t_.slope[row - padded_];
    }
    std::fill_n(t_.max, lanes(padded_), -infinity);
    std::fill_n(t_.sum, lanes(padded_), 0.0f);
    std::fill_n(t_.out, padded_ * shape_.value_width, 0.0f);
  }

  int64_t position_of(int64_t row) const { return first_position_ + query_of(row); }
  // The distance of the nearest visible key.
  int32_t nearest_key(int64_t row) const {
    const int64_t position = position_of(row);
    int64_t least = std::numeric_limits<int32_t>::max();
    if (!p_.key_positions()) {
      const int64_t visible = std::max(t_.begin[row], std::min(position, t_.end[row] - 1));
      return int32_t(std::min(least, std::abs(position - visible)));
    }
    for_each_place(t_.begin[row], t_.end[row], [&](int64_t, int64_t at) {
      if (sees(row, at)) least = std::min(least, std::abs(position - at));
    });
    return int32_t(least);
  }
  // Whether the row's band has this position. Biases and block masks are not in it.
  bool sees(int64_t row, int64_t at) const {
    return at >= query_of(row) + band_.lower && at < query_of(row) + band_.upper;
  }
  // Calls visit(key, position) for keys [begin, end) of the sequence.
  template <class Visit>
  void for_each_place(int64_t begin, int64_t end, Visit&& visit) const {
    if (!p_.key_positions()) {
      for (int64_t key = begin; key < end; ++key) visit(key, key);
      return;
    }
    int64_t first = 0;
    for (int64_t s = 0; s < p_.num_segments && first < end; ++s) {
      const SegmentView segment = segment_view(p_, args_, b_, s, first);
      for (int64_t key = std::max(begin, first); key < std::min(end, first + segment.length); ++key)
        visit(key, segment.places.at(key - first));
      first += segment.length;
    }
  }
  // Positions and ALiBi of segments that say where their keys are.
  void add_places(int64_t base, int64_t begin, int64_t end) {
    for_each_place(base + begin, base + end, [&](int64_t key, int64_t at) {
      for (int64_t row = 0; row < count_; ++row) {
        if (!sees(row, at)) {
          add_at(row, key - base) = -infinity;
        } else if (p_.has(ATTN_ALIBI)) {
          const int64_t further = std::abs(position_of(row) - at) - t_.nearest[row];
          add_at(row, key - base) -= t_.slope[row] * float(further);
        }
      }
    });
  }

  // The part of a tile that some of rows [row, row + count) see; begin >= end if there is none.
  struct Keys {
    int64_t begin, end;
    bool all;  // every row sees all of it
  };
  Keys keys_of(int64_t row, int64_t count, int64_t base) const {
    Keys keys{shape_.keys, 0, true};
    for (int64_t r = row; r < std::min(row + count, count_); ++r) {
      const int64_t begin = std::max<int64_t>(t_.begin[r] - base, 0);
      const int64_t end = std::min(t_.end[r] - base, shape_.keys);
      if (begin >= end) continue;
      keys.begin = std::min(keys.begin, begin);
      keys.end = std::max(keys.end, end);
    }
    for (int64_t r = row; r < std::min(row + count, count_); ++r) {
      keys.all &= t_.begin[r] - base <= keys.begin && t_.end[r] - base >= keys.end;
    }
    return keys;
  }

  void one_tile(int64_t base) {
    const int64_t begin = std::max(first_key_ - base, int64_t(0));
    const int64_t end = std::min(last_key_ - base, shape_.keys);
    std::fill_n(t_.wanted, shape_.keys, uint8_t(1));
    bool masked = false;
    if (p_.has(ATTN_BLOCK_MASK) && !mark_blocks(base, begin, end, &masked)) return;
    bool all_exist;
    Rows k = reader_.load_keys(base, begin, end, t_.wanted, &all_exist);
    const bool in_tile =
        k.first == reinterpret_cast<const char*>(t_.keys + begin * shape_.key_stride);
    if (shape_.few_rows) {
      k.ahead = ahead(base + shape_.keys, false);
    } else {
      prefetch(base + shape_.keys, false);
    }
    const bool tree = p_.tree_keys > 0 && base + end > seqlen_kv_ - p_.tree_keys;
    const bool add = masked || tree || !all_exist || p_.bias_type != ATTN_DTYPE_NONE || places_;
    if (add) {
      fill_add(base, begin, end, masked, all_exist);
      if (places_) add_places(base, begin, end);
      if (tree) add_tree(base, begin, end);
      std::fill_n(t_.seen, shape_.keys, uint8_t(0));
    }
    for (int64_t row = 0; row < padded_; row += shape_.panel) {
      score_panel(row, base, begin, k, add);
    }
    if (shape_.values_in_keys && in_tile)
      return accumulate_keys(base, begin, end, add ? t_.seen : t_.wanted);
    Rows v = reader_.load_values(base, begin, end, add ? t_.seen : t_.wanted);
    if (v.first != reinterpret_cast<const char*>(t_.values + begin * shape_.slab)) {
      v.ahead = ahead(base + shape_.keys, true);
      accumulate_stored(base, begin, v);
      return;
    }
    prefetch(base + shape_.keys, true);
    accumulate_tile(base, t_.values, shape_.slab * shape_.keys, shape_.slab);
  }

  // The values are the first columns of the keys in the tile; a value that no query sees may be a
  // NaN.
  void accumulate_keys(int64_t base, int64_t begin, int64_t end, const uint8_t* seen) {
    for (int64_t c = begin; c < end; ++c)
      if (!seen[c]) std::fill_n(t_.keys + c * shape_.key_stride, shape_.key_stride, 0.0f);
    accumulate_tile(base, t_.keys, shape_.slab, shape_.key_stride);
  }

  // Values in the tile: a slab's are slab_step after those of the one before, a key's `stride`.
  void accumulate_tile(int64_t base, const float* slabs, int64_t slab_step, int64_t stride) {
    for (int64_t column = 0; column < shape_.value_width; column += shape_.slab) {
      const float* values = slabs + column / shape_.slab * slab_step;
      for (int64_t panel = 0; panel < padded_; panel += shape_.panel) {
        const int64_t panel_end = std::min(panel + shape_.panel, count_);
        for (int64_t row = panel; row < panel_end; row += rows_at_once) {
          const int64_t rows = std::min(rows_at_once, panel_end - row);
          const Keys keys = keys_of(row, rows, base);
          if (keys.begin >= keys.end) continue;
          ops_.accumulate(
              shape_.slab_vectors, int(rows),
              t_.scores + panel * shape_.keys + keys.begin * shape_.panel + (row - panel),
              shape_.panel, values + keys.begin * stride, stride, keys.end - keys.begin,
              t_.rescale + row, t_.out + row * shape_.value_width + column, shape_.value_width);
        }
      }
    }
  }

  // Few rows; values in the caller's memory.
  void accumulate_stored(int64_t base, int64_t begin, Rows values) {
    const Keys keys = keys_of(0, count_, base);
    if (keys.begin >= keys.end) return;
    values = values.from(keys.begin - begin);
    for (int64_t column = 0; column < shape_.value_width; column += shape_.slab) {
      ops_.accumulate_few(shape_.slab_vectors, shape_.panel, t_.scores + keys.begin * shape_.panel,
                          values, column, keys.end - keys.begin, t_.rescale, t_.out + column,
                          shape_.value_width);
      values.ahead = {};
    }
  }

  void score_panel(int64_t row, int64_t base, int64_t begin, Rows k, bool add) {
    const Keys keys = keys_of(row, shape_.panel, base);
    if (keys.begin >= keys.end) return;
    const int64_t num_keys = keys.end - keys.begin;
    float* scores = t_.scores + row * shape_.keys + keys.begin * shape_.panel;
    k = k.from(keys.begin - begin);
    if (shape_.few_rows) {
      ops_.scores_few(shape_.panel, t_.queries, shape_.key_stride, k, shape_.key_stride, num_keys,
                      scores, t_.tile_max + row);
    } else {
      ops_.scores(shape_.panel_vectors, t_.queries + row * p_.head_dim,
                  reinterpret_cast<const float*>(k.first), k.row_bytes / int64_t(sizeof(float)),
                  p_.head_dim, num_keys, scores, t_.tile_max + row);
    }
    if (!raw_ || add || !keys.all) {
      ScoreRules rules{};
      if (!raw_) rules.scale = p_.scale;
      rules.softcap = p_.softcap;
      if (p_.has(ATTN_ALIBI) && !places_) {
        rules.slope = t_.slope + row;
        rules.position = t_.position + row;
        rules.nearest = t_.nearest + row;
        for (int64_t n = 0; n < shape_.lane_rows; ++n) {
          t_.position[row + n] = int32_t(position_of(row + n % shape_.panel) - base);
        }
      }
      if (!keys.all) {
        rules.begin = t_.tile_begin + row;
        rules.end = t_.tile_end + row;
        for (int64_t n = 0; n < shape_.lane_rows; ++n) {
          const int64_t r = row + n % shape_.panel;
          t_.tile_begin[row + n] = int32_t(std::clamp<int64_t>(t_.begin[r] - base, 0, shape_.keys));
          t_.tile_end[row + n] = int32_t(std::clamp<int64_t>(t_.end[r] - base, 0, shape_.keys));
        }
      }
      if (add) {
        rules.add = t_.add + row * shape_.keys;
        rules.seen = t_.seen;
      }
      ops_.apply_rules(shape_.panel, rules, keys.begin, num_keys, scores, t_.tile_max + row);
    }
    ops_.softmax(shape_.panel, log2_scale_, num_keys, scores, t_.tile_max + row,
                 {t_.max + row, t_.sum + row, t_.rescale + row});
  }

  // Of the keys [begin, end) of the tile, counted in it.
  template <class Visit>
  void for_each_block(int64_t base, int64_t begin, int64_t end, Visit&& visit) const {
    attn::for_each_block(
        p_, args_, b_, rows(), 0, count_, base + begin, base + end,
        [&](int64_t row, int64_t rows, int64_t key, int64_t last, const BlockView& block) {
          visit(row, rows, key - base, last - base, block);
        });
  }

  // Clears `wanted` where all blocks are EMPTY. False: nothing of the tile is visible.
  bool mark_blocks(int64_t base, int64_t begin, int64_t end, bool* masked) {
    std::fill_n(t_.wanted, shape_.keys, uint8_t(0));
    bool any = false;
    for_each_block(base, begin, end,
                   [&](int64_t, int64_t, int64_t key, int64_t key_end, const BlockView& block) {
                     if (block.kind != ATTN_BLOCK_FULL) *masked = true;
                     if (block.kind == ATTN_BLOCK_EMPTY) return;
                     any = true;
                     std::fill(t_.wanted + key, t_.wanted + key_end, uint8_t(1));
                   });
    return any;
  }

  void read_bias(int64_t row, int64_t key, int64_t count, float* out) const {
    attn::read_bias(p_, args_, ops_, b_, head_of(row), query_of(row), key, count, out);
  }

  // The largest bias in the row's range. 0 if all are -inf, and where it is so large that scores
  // vanish next to it in float64 as well: there the sum's rounding is the answer.
  float largest_bias(int64_t row) const {
    constexpr int64_t chains = 16;  // so that it becomes vector code
    float top[chains];
    std::fill_n(top, chains, -infinity);
    for (int64_t key = t_.begin[row]; key < t_.end[row]; key += most_tile_keys) {
      if (stop(32)) return 0;
      float bias[most_tile_keys];
      const int64_t count = std::min(most_tile_keys, t_.end[row] - key);
      read_bias(row, key, count, bias);
      std::fill(bias + count, bias + most_tile_keys, -infinity);
      for (int64_t n = 0; n < count; n += chains) {
        for (int64_t c = 0; c < chains; ++c) top[c] = bias[n + c] > top[c] ? bias[n + c] : top[c];
      }
    }
    const float largest = *std::max_element(top, top + chains);
    return std::abs(largest) < 1e12f ? largest : 0;
  }

  float& add_at(int64_t row, int64_t key) {
    return t_.add[row / shape_.panel * shape_.panel * shape_.keys + key * shape_.panel +
                  row % shape_.panel];
  }

  void fill_add(int64_t base, int64_t begin, int64_t end, bool masked, bool all_exist) {
    for (int64_t row = 0; row < padded_; ++row) {
      float* at = &add_at(row, begin);
      const int64_t count = end - begin, panel = shape_.panel;
      if (row >= count_ || p_.bias_type == ATTN_DTYPE_NONE) {
        const float all = row < count_ ? 0 : -infinity;
        for (int64_t n = 0; n < count; ++n) at[n * panel] = all;
      } else {
        float bias[most_tile_keys];
        read_bias(row, base + begin, count, bias);
        for (int64_t n = 0; n < count; ++n) at[n * panel] = bias[n] - t_.bias_base[row];
      }
    }
    if (masked) {
      for_each_block(
          base, begin, end,
          [&](int64_t row, int64_t rows, int64_t key, int64_t key_end, const BlockView& block) {
            if (block.kind == ATTN_BLOCK_FULL) return;
            const int64_t i = query_of(row);
            for_each_place(base + key, base + key_end, [&](int64_t j, int64_t at) {
              if (block.visible(i % p_.block_q, j % p_.block_k, i, at, first_position_)) return;
              for (int64_t r = row; r < row + rows; ++r) add_at(r, j - base) = -infinity;
            });
          });
    }
    if (!all_exist) {
      for (int64_t c = begin; c < end; ++c) {
        if (t_.wanted[c]) continue;
        for (int64_t row = 0; row < count_; ++row) add_at(row, c) = -infinity;
      }
    }
  }

  void add_tree(int64_t base, int64_t begin, int64_t end) {
    for (int64_t row = 0; row < count_; ++row) {
      for (int64_t first = begin; first < end; first += 64) {
        const uint64_t seen = tree_bits(p_, args_, query_, query_of(row), base + first, seqlen_kv_);
        for (int64_t c = first; c < std::min(end, first + 64); ++c) {
          if (!(seen >> (c - first) & 1)) add_at(row, c) = -infinity;
        }
      }
    }
  }

  // In units of the natural logarithm.
  double row_max(int64_t row) const {
    if (t_.sum[row] == 0) return -infinity;
    double max = double(t_.max[row]) * (raw_ ? std::abs(double(p_.scale)) : 1);
    if (p_.bias_type != ATTN_DTYPE_NONE) max += t_.bias_base[row];
    if (p_.has(ATTN_ALIBI)) max -= double(t_.slope[row]) * t_.nearest[row];
    return max;
  }

  void leave_row(int64_t row) {
    const int64_t at = parts_.at(sequence(), part_, first_row_ + row);
    parts_.max[at] = row_max(row);
    parts_.sum[at] = t_.sum[row];
    float* out = parts_.out + at * parts_.row_values;
    // A NaN of V may have got into the sum with weight 0.
    if (t_.sum[row] == 0) {
      std::fill_n(out, parts_.row_values, 0.0f);
    } else {
      std::copy_n(t_.out + row * parts_.row_values, parts_.row_values, out);
    }
  }

  // In the order of the parts, whoever computed them.
  void merge_row(int64_t row) {
    const int64_t first = parts_.at(sequence(), 0, first_row_ + row);
    double max = -infinity, sum = 0;
    for (int64_t part = 0; part < num_parts_; ++part) {
      max = std::max(max, parts_.max[first + part * parts_.rows]);
    }
    const float one = 1;
    const int64_t stride = parts_.rows * parts_.row_values;
    std::fill_n(t_.out + row * parts_.row_values, parts_.row_values, 0.0f);
    constexpr int64_t at_once = 64;
    for (int64_t part = 0; part < num_parts_; part += at_once) {
      const int64_t count = std::min(at_once, num_parts_ - part);
      float weight[at_once];
      for (int64_t n = 0; n < count; ++n) {
        const int64_t at = first + (part + n) * parts_.rows;
        weight[n] = max == -infinity ? 0 : float(std::exp(parts_.max[at] - max));
        sum += double(weight[n]) * parts_.sum[at];
      }
      const float* out = parts_.out + (first + part * parts_.rows) * parts_.row_values;
      for (int64_t column = 0; column < parts_.row_values; column += shape_.slab) {
        ops_.accumulate(shape_.slab_vectors, 1, weight, 1, out + column, stride, count, &one,
                        t_.out + row * parts_.row_values + column, parts_.row_values);
      }
    }
    finish_row(row, max, sum);
  }

  void finish_row(int64_t row, double max, double sum) {
    const int64_t head = head_of(row), i = query_of(row);
    const bool none = sum == 0;
    double factor = 1;
    if (p_.has(ATTN_SINKS)) {
      const double sink = args_.sinks[head];
      const double both = std::max(max, sink);
      if (both != -infinity) {
        factor = std::exp(max - both);
        sum = sum * factor + std::exp(sink - both);
        max = both;
      }
    }
    float* out = t_.out + row * shape_.value_width;
    float* lse = args_.lse ? args_.lse + query_.lse + head * query_.lse_head + i : nullptr;
    const int64_t at = query_.out + i * p_.out_stride.seq + head * p_.out_stride.head;
    if (p_.has(ATTN_ACCUMULATE)) {
      const double scale = none ? 0 : factor / sum;
      accumulate_row(static_cast<float*>(args_.out) + at, lse, p_.head_dim_v, max + std::log(sum),
                     [&](int64_t d) { return none ? 0 : scale * out[d]; });
      return;
    }
    if (none) {
      // A NaN of V may have got here with weight 0.
      std::fill_n(out, p_.head_dim_v, 0.0f);
      factor = 0;
    } else {
      factor /= sum;
      if (p_.has(ATTN_OUT_SCALE)) factor *= args_.out_scale[0];
    }
    store_row(ops_, p_.out_type, out, float(factor), p_.head_dim_v, args_.out, at);
    if (lse) *lse = float(max + std::log(sum));
  }

  Interrupt& interrupt_;
  const int thread_;
  const Problem& p_;
  const Args& args_;
  const TileOps& ops_;
  const TileShape& shape_;
  const Tile t_;
  const Parts& parts_;
  const int64_t b_, kv_head_;
  const QueryView query_;
  const TileShape::Block block_;
  const int64_t first_row_, count_;
  const int64_t padded_;  // count_ in whole panels
  const int64_t part_;
  KeyReader reader_;
  const int64_t seqlen_kv_;                // Skv, or the keys that the block's query visits
  const int64_t first_position_;           // of query 0
  const KeyBand band_;                     // of positions
  int64_t num_parts_ = 1;                  // of the sequence
  int64_t part_begin_ = 0, part_end_ = 0;  // keys
  int64_t first_key_ = 0, last_key_ = 0;   // the range of keys that any row of the item sees
  bool raw_ = false, places_ = false;
  float log2_scale_ = 0;
};

// How many of `threads` pay for the problem.
int paying_threads(const Problem& p, int threads) {
  const double rows = double(p.seqlen_q) * double(p.group());
  const double fetches =
      p.by_query ? double(p.seqlen_q) : std::ceil(rows / TileShape::most_rows);  // of all keys
  const double work = double(p.batch * p.heads_kv) * double(p.most_keys) *
                      double(p.head_dim + p.head_dim_v) * (rows + fetch_cost * fetches);
  return ThreadPool::worth(work / work_per_nanosecond, threads);
}

size_t workspace_bytes(const Problem& problem, const TileOps& ops, int threads) {
  const TileShape shape(problem, ops, paying_threads(problem, threads));
  return size_t(threads) * Tile().place(problem, shape, nullptr) +
         Parts(problem, shape).place(problem, nullptr);
}

void run_forward(const Problem& p, const Args& args, const TileOps& ops, void* workspace,
                 ThreadPool& pool, Interrupt& interrupt) {
  write_rows_of_nobody(p, args);
  if (p.batch == 0) return;  // there is no workspace
  const int threads = paying_threads(p, pool.threads());
  const TileShape shape(p, ops, threads);
  const size_t bytes = Tile().place(p, shape, nullptr);
  Parts parts(p, shape);
  parts.place(p, static_cast<char*>(workspace) + size_t(pool.threads()) * bytes);
  const int64_t blocks = p.seqlen_q == 0 ? 0 : shape.blocks();
  const int64_t heads = ceil_div(p.heads_kv, shape.heads);
  // The items of a sequence follow each other, its keys stay in the cache. Under a causal mask the
  // last rows see most: they go first.
  auto one = [&](int64_t item, int thread) {
    const int64_t block = blocks - 1 - item % blocks;
    const int64_t first_head = item / blocks % heads * shape.heads;
    const int64_t part = item / blocks / heads % parts.count;
    const int64_t b = item / blocks / heads / parts.count;
    const int64_t num_heads = std::min(shape.heads, p.heads_kv - first_head);
    std::optional<Item> items[TileShape::most_heads];
    for (int64_t n = 0; n < num_heads; ++n) {
      Tile tile;
      tile.place(p, shape, static_cast<char*>(workspace) + size_t(thread) * bytes, n);
      items[n].emplace(p, args, ops, shape, tile, parts, interrupt, thread, b, first_head + n,
                       block, part);
    }
    for (int64_t n = 0; n < num_heads; ++n) items[n]->prefetch_first();
    // All heads see the same tiles.
    for (int64_t base = items[0]->keys_begin(); base < items[0]->keys_end(); base += shape.keys) {
      for (int64_t n = 0; n < num_heads; ++n) {
        if (!items[n]->tile(base)) return;
      }
    }
    for (int64_t n = 0; n < num_heads; ++n) items[n]->finish();
  };
  pool.for_each(blocks * heads * parts.count * p.batch, one, &interrupt, threads);
}

double measure_fma_rate(const TileOps& ops, ThreadPool& pool) {
  // About 50 us a piece, so that no thread waits long for the last one.
  constexpr int64_t rounds = 20000, pieces_per_thread = 40;
  const int64_t pieces = pool.threads() * pieces_per_thread;
  const auto start = std::chrono::steady_clock::now();
  pool.for_each(pieces, [&](int64_t, int) {
    float sink = 1;
    ops.fma_rounds(rounds, &sink);
  });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  float sink = 1;
  return ops.fma_rounds(rounds, &sink) * double(pieces) / seconds.count();
}

// The kernel of one instruction set.
template <const TileOps& ops>
constexpr HostKernel kernel(const char* isa, bool (*runs_here)()) {
  return {
      .runs_here = runs_here,
      .isa = isa,
      .workspace =
          [](const AnyProblem& problem, int threads) {
            return workspace_bytes(static_cast<const Problem&>(problem), ops, threads);
          },
      .forward =
          [](const Problem& problem, const Args& args, void* workspace, ThreadPool& pool,
             Interrupt& interrupt) { run_forward(problem, args, ops, workspace, pool, interrupt); },
      .fma_rate = [](ThreadPool& pool) { return measure_fma_rate(ops, pool); }};
}

}  // namespace

#ifdef __x86_64__
// These ask the processor and the operating system. F16C is older than AVX2 and cannot be asked for
// with every compiler.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512cd");
}

constinit const HostKernel cpu_avx2_kernel = kernel<tile_ops_avx2>("avx2", has_avx2);
constinit const HostKernel cpu_avx512_kernel = kernel<tile_ops_avx512>("avx512", has_avx512);
#endif
constinit const HostKernel cpu_baseline_kernel =
    kernel<tile_ops_baseline>("any", [] { return true; });

}  // namespace attn
