// The inner loops of the cpu kernel, compiled once per instruction set. Plain data only: what an
// instruction set's file emits must never be picked by the linker for another one.
//
// A tile is `keys` keys by a panel of query rows. Query rows are along the vector lanes, so the
// maximum and the sum over keys need no shuffles, and keys and values are read in their own order:
//   queries  [dim][panel]   keys  [keys][stride]   scores  [keys][panel]   values  [keys][slab]
// panel and slab are `vectors` vectors wide. All is float32; -inf in scores means not visible.
//
// A panel of few rows is narrower than a vector, a power of two of rows: then a vector of scores
// has several keys, and its lane l is of row l % panel. What is there for each row of a panel is
// there for each lane, in all lanes of a row the same.
#pragma once
#include <stdint.h>

#include "attn/attn.h"

namespace attn {

// What happens to raw scores before the softmax. Null and zero: skip the step.
struct ScoreRules {
  float scale;  // 0: scores stay raw; else the steps below see scale * score
  float softcap;
  const float* slope;          // [panel] ALiBi: minus slope * (|position - key| - nearest)
  const int32_t* position;     // [panel] a row's position, relative to the first key of the tile
  const int32_t* nearest;      // [panel] the distance that counts as 0
  const float* add;            // [keys][panel]; -inf hides the element, whatever its score
  const int32_t *begin, *end;  // [panel] visible keys of a row
  uint8_t* seen;               // [keys] set to 1 where any row of the panel sees the key
};

// Running softmax of a panel, each [panel]. max and the scores are in the same unit.
struct SoftmaxState {
  float* max;
  float* sum;
  float* rescale;  // out: factor for what was summed up so far
};

// Weights and gradients of scores, from scores and products of d_out with values. Here keys are
// along the lanes of a panel: all arrays of pairs are [rows][panel]. Null and zero: skip the step.
struct GradientRules {
  float scale;  // of raw scores
  float softcap;
  bool of_scores;              // gradients of scores before masks, else of scale * q k
  const float* lse;            // [rows], log2; +inf: weights are 0
  const float* delta;          // [rows]
  const float* add;            // -inf hides the element
  const float* slope;          // [rows] ALiBi: minus slope * |position - key|
  const int32_t* position;     // [rows] relative to the panel's first key, as the following
  const int32_t *begin, *end;  // [rows] visible keys
  uint8_t* rows_seen;          // [rows] set to 1 if the row sees a key of the panel
  int32_t* keys_seen;          // [panel] not 0 if a row sees the key
};

// Types that have a factor but seldom.
constexpr bool wide_type(attn_dtype type) {
  return type == ATTN_F32 || type == ATTN_F16 || type == ATTN_BF16;
}

// Rows that are to be on their way to the second cache while others are computed, one for each of
// those: all at once would fill the queues of memory, and computing would wait.
struct Ahead {
  const char* first;  // null: none
  int64_t row_bytes, count;
  int64_t bytes;  // of a row
};

// Stored numbers; the real value is the number times `factor` times the row's scale.
struct Rows {
  const char* first;
  int64_t row_bytes;
  attn_dtype type;
  float factor;
  const float* scales = nullptr;  // of each row; i8 and i4 alone
  Ahead ahead = {};

  // From row n on.
  Rows from(int64_t n) const {
    Rows rest = *this;
    rest.first += n * row_bytes;
    if (scales) rest.scales += n;
    return rest;
  }
};

struct TileOps {
  int lanes;
  int panel_vectors, slab_vectors;  // upper limits of `vectors`
  int value_rows;                   // the same of `rows`
  int few_rows;                     // up to this many rows scores_few is faster
  int few_height;                   // 1, and multiples of this, are panels of few rows
  uint32_t few_types;               // 1 << type

  // Elements [index, index + n) of `rows` rows as float32, exact, times `factor`; index is a
  // multiple of `lanes` in ggml's types, where n is one of 16, and in i4, where n is even. False:
  // the instruction set has no fast way for this type.
  bool (*load_rows)(attn_dtype type, const char* base, int64_t row_bytes, int64_t rows,
                    int64_t index, int64_t n, float factor, float* out, int64_t out_stride);
  // Rounds as core/dtype.h does. Null where the instruction set has no fast way.
  void (*f32_to_f16)(const float* in, uint16_t* out, int64_t n);
  void (*f32_to_bf16)(const float* in, uint16_t* out, int64_t n);

  // scores = keys x queries; max gets each row's largest score.
  void (*scores)(int vectors, const float* queries, const float* keys, int64_t key_stride,
                 int64_t dim, int64_t num_keys, float* scores, float* max);
  // The same for a panel of few rows: queries [panel][query_stride], dim a multiple of `lanes`. The
  // last vector of scores is completed by hidden ones. Keys are of one of few_types.
  void (*scores_few)(int64_t panel, const float* queries, int64_t query_stride, const Rows& keys,
                     int64_t dim, int64_t num_keys, float* scores, float* max);
  // Applies the rules to keys [first, first + num_keys) of the tile, `scores` being those of
  // `first`.
  void (*apply_rules)(int64_t panel, const ScoreRules& rules, int64_t first, int64_t num_keys,
                      float* scores, float* max);
  // scores -> weights 2^(log2_scale * (score - running max)), hidden ones exactly 0.
  void (*softmax)(int64_t panel, float log2_scale, int64_t num_keys, float* scores,
                  const float* max, const SoftmaxState& state);
  // out[row] = out[row] * rescale[row] + weights[.][row] x values for rows of one panel; the values
  // of a key are value_stride after those of the previous key.
  void (*accumulate)(int vectors, int rows, const float* weights, int64_t panel,
                     const float* values, int64_t value_stride, int64_t num_keys,
                     const float* rescale, float* out, int64_t out_stride);
  // The same for a panel of few rows: values [index, index + vectors) of rows
  // of one of few_types, whose factor is 1 if it is wide.
  void (*accumulate_few)(int vectors, int64_t panel, const float* weights, const Rows& values,
                         int64_t index, int64_t num_keys, const float* rescale, float* out,
                         int64_t out_stride);
  // scores -> weights 2^(log2(e) * score - lse), products -> gradients; both exactly 0 where
  // hidden.
  void (*gradients)(int vectors, const GradientRules& rules, int64_t rows, float* scores,
                    float* products);
  // out[row] += sum over n < count of weights[row * row_step + n * step] * values[n]. One of the
  // steps is 1.
  void (*add_products)(int vectors, int rows, const float* weights, int64_t row_step, int64_t step,
                       const float* values, int64_t value_stride, int64_t count, float* out,
                       int64_t out_stride);
  // out = in * factor, row by row of n elements.
  void (*multiply)(int64_t rows, const float* in, int64_t in_stride, float factor, int64_t n,
                   float* out, int64_t out_stride);

  // Runs `rounds` rounds of fused multiply-adds on registers; returns how many float operations
  // those were. *sink keeps the work alive.
  double (*fma_rounds)(int64_t rounds, float* sink);
};

extern const TileOps tile_ops_avx512, tile_ops_avx2, tile_ops_baseline;

}  // namespace attn
