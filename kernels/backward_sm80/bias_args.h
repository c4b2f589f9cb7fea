// The parameter struct of bwd_bias_cuda, and how its thread blocks share the sums.
#ifndef ATTN_KERNELS_BACKWARD_SM80_BIAS_ARGS_H
#define ATTN_KERNELS_BACKWARD_SM80_BIAS_ARGS_H

#include "backward_args.h"

namespace attn::bwd_sm80 {

// Scores come in tiles of 64 queries and 64 keys, and so does d_bias. A tile of d_bias is a sum
// over tiles of scores: over all in the dimensions in which d_bias has one element. Dimensions:
// batch, heads of queries, queries, keys.
struct BiasSums {
  int extent[4];  // elements of d_bias: all of a dimension, or 1
  int kept[4];    // tiles of d_bias
  int summed[4];  // tiles of scores that each is a sum of. Where this is above 1, kept is 1
  // Thread blocks that share the sum of a tile, so that enough of them run where d_bias has few
  // tiles. Each has a range of its tiles of scores.
  int parts;

  ATTN_HOST_DEVICE static constexpr long long count(const int (&n)[4]) {
    return (long long)n[0] * n[1] * n[2] * n[3];
  }
  // What number `index` of a grid is in each dimension; the last one is the fastest.
  ATTN_HOST_DEVICE static constexpr void split(const int (&n)[4], long long index, int (&at)[4]) {
    for (int i = 3; i >= 0; --i) {
      at[i] = int(index % n[i]);
      index /= n[i];
    }
  }
  // Where a part begins. Part `parts` begins at the end.
  ATTN_HOST_DEVICE constexpr long long begin(int part) const {
    const long long all = count(summed);
    return all / parts * part + (all % parts < part ? all % parts : part);
  }
};

constexpr int bias_tile = 64;
constexpr int bias_threads = 128;
constexpr int bias_stages = 3;                     // of what is copied
constexpr int bias_chunk_bytes = bias_tile * 128;  // 64 columns of 64 rows
constexpr int bias_shared_bytes = bias_stages * 2 * bias_chunk_bytes;
constexpr int bias_static_shared_bytes = 1024;  // at most, beside these

}  // namespace attn::bwd_sm80

struct attn_backward_bias_kernarg {
  attn_bwd_sm80_kernarg of;  // without items, dq, dk and dv
  int element;               // the type of q, k, v and d_out
  void* d_bias;
  long long stride[4];  // elements: batch, head, q, kv
  int type, add;        // shared/types.h; to what is there
  // With several parts: their sums, [parts][elements of d_bias], which a second launch adds.
  float* part_sums;
  int adds_parts;  // this is the second launch
  attn::bwd_sm80::BiasSums sums;
};

#endif
