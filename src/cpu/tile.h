// One thread's scratch for the cpu kernel and how the caller's data gets into it.
#pragma once
#include <cstdint>

#include "cpu/kv_view.h"
#include "cpu/place.h"
#include "cpu/simd/tile_ops.h"
#include "problem/problem.h"

namespace attn {

constexpr int64_t most_tile_keys = 128;

// The width, at most `limit`, that splits `vectors` most evenly.
int even_width(int64_t vectors, int limit);

// Sizes of a work item, in elements. What a row computes depends on those alone that follow from
// the problem, so bits do not change with the number of threads.
struct TileShape {
  static constexpr int64_t most_rows = 192, most_heads = 8;
  int panel_vectors, slab_vectors;
  int64_t panel, slab;  // their widths; few_rows: panel is narrower than a vector
  int64_t lane_rows;    // a panel in whole vectors
  int64_t keys;         // of a tile; from the problem
  int64_t most_parts;   // into which the keys of a sequence are cut; from the problem
  int64_t part_keys;    // of a part at least, whole tiles; from the problem
  int64_t heads;        // KV heads of a work item
  int64_t rows;         // query rows of a work item in each, whole panels
  int64_t key_stride;   // between keys of the K tile
  int64_t value_width;  // head_dim_v in whole slabs
  bool few_rows;        // scores_few serves all rows; from the problem
  bool prefetch;        // few rows wait for memory
  int64_t query_rows;   // rows that visit the same keys, of which an item has some: all of a
                        // sequence, or with Problem::by_query those of a query
  int64_t queries;      // groups of such rows in a sequence, at most
  bool values_in_keys;  // each segment has v_in_k

  // The rows [first, first + count) of a block of a sequence of `length` queries, which visits the
  // keys of query `query`; -1: of all.
  struct Block {
    int64_t first, count, query;
  };
  int64_t blocks() const { return queries * ceil_div(query_rows, rows); }
  Block block(int64_t n, int64_t length, int64_t group) const {
    const int64_t of_query = ceil_div(query_rows, rows), query = n / of_query,
                  first = n % of_query * rows;
    const int64_t end = queries == 1 && !by_query ? length * group : group;
    if (query >= length) return {0, 0, -1};
    return {query * group + first, std::min(rows, end - first), by_query ? query : -1};
  }

  TileShape(const Problem& problem, const TileOps& ops, int threads);

 private:
  bool by_query;
};

// Query rows are ordered by query, then by head of the group, so that a K/V tile serves the whole
// group.
struct Tile {
  float* keys;    // [tile keys][key_stride]
  float* values;  // [slabs][tile keys][slab], in the place of the keys, which are done with then
  float* scores;  // [rows / panel][tile keys][panel]
  float* add;     // the same, see ScoreRules
  float* row;     // one row of q
  // per query row; few_rows: but for begin and end per lane
  float *rescale, *tile_max;
  int32_t *tile_begin, *tile_end, *position;
  // per key of the tile
  uint8_t *wanted, *seen;
  float* scale;  // of keys, then of values that are still in the caller's memory
  // what is kept from tile to tile, for each head
  float* queries;  // [rows / panel][dim][panel]; few_rows: [panel][key_stride]
  float* out;      // [rows][value_width]
  // per query row
  float *max, *sum, *slope, *bias_base;
  int64_t *begin, *end;  // visible keys of the sequence
  int32_t* nearest;

  // Bytes of one thread's scratch; with base not null also sets the pointers, for this head of the
  // work item.
  size_t place(const Problem& problem, const TileShape& shape, char* base, int64_t head = 0);
};

// Elements [index, index + n) of `rows` rows as float32 times `factor`.
void load_rows(const TileOps& ops, attn_dtype type, const char* base, int64_t row_bytes,
               int64_t rows, int64_t index, int64_t n, float factor, float* out,
               int64_t out_stride);
// float32 times `factor`, rounded once into a row of any output type. Overwrites `in`.
void store_row(const TileOps& ops, attn_dtype type, float* in, float factor, int64_t n, void* base,
               int64_t index);

// Loads the tiles of one sequence and head in ascending order.
class KeyReader {
 public:
  // `i`: the query whose keys are read; -1: all.
  KeyReader(const Problem& problem, const Args& args, const TileOps& ops, const TileShape& shape,
            const Tile& tile, int64_t b, int64_t kv_head, const QueryView& query, int64_t i)
      : p_(problem),
        args_(args),
        ops_(ops),
        shape_(shape),
        t_(tile),
        b_(b),
        kv_head_(kv_head),
        query_(query),
        i_(i),
        view_(view_of(0, 0)) {}

  // The keys of all segments, in lists those that do not exist as well.
  int64_t num_keys() const;

  // Finds those of keys [base + begin, base + end) that `wanted` marks; the others become zeros and
  // are not read. `exist` is false if a wanted key does not exist (a bad page): its mark is taken
  // away. The rows are in the tile, as f32, or still in the caller's memory: for few_rows as
  // stored.
  Rows load_keys(int64_t base, int64_t begin, int64_t end, uint8_t* wanted, bool* exist);
  // The values of the same keys; the rows of the tile's first slab if they are in the tile.
  Rows load_values(int64_t base, int64_t begin, int64_t end, const uint8_t* wanted);
  // Prefetches the keys, or the values, into L2, because the tiles of all heads of an item do not
  // fit in L1.
  void prefetch(int64_t base, int64_t begin, int64_t end, bool values) const;
  // The same rows, for those who compute others meanwhile; none where they are not one run.
  Ahead ahead(int64_t base, int64_t begin, int64_t end, bool values) const;

 private:
  // Puts the scales of keys from c on into the tile; null for null, as all types but i8 and i4
  // have.
  const float* load_scales(const char* scales, int64_t stride, int64_t c, int64_t count) const;
  // `first`: the keys of the segments before s.
  SegmentView view_of(int64_t s, int64_t first) const {
    return i_ < 0 ? segment_view(p_, args_, b_, s, first)
                  : view_of_query(p_, args_, b_, s, first, query_, i_, kv_head_);
  }
  // Calls visit(view, key within the segment, key of the tile, run, count) for runs of keys with
  // one descale.
  template <class Visit>
  void for_each_run(int64_t base, int64_t begin, int64_t end, Visit&& visit) const;
  // To the segment of the key at this position, from which runs are found.
  void seek(int64_t position);

  const Problem& p_;
  const Args& args_;
  const TileOps& ops_;
  const TileShape& shape_;
  const Tile& t_;
  const int64_t b_, kv_head_;
  const QueryView query_;
  const int64_t i_;
  int64_t segment_ = 0;
  SegmentView view_;
};

// Query rows [first_row, first_row + count) of (b, kv_head); the rest of tile.queries becomes zero.
void load_queries(const Problem& problem, const Args& args, const TileOps& ops,
                  const TileShape& shape, const Tile& tile, int64_t b, int64_t kv_head,
                  int64_t first_row, int64_t count, float factor);

// The bias of query i of head h of batch entry b and keys [key, key + count), with its slope.
void read_bias(const Problem& problem, const Args& args, const TileOps& ops, int64_t b, int64_t h,
               int64_t i, int64_t key, int64_t count, float* out);

}  // namespace attn
