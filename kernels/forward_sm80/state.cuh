// What a warp keeps in registers.
#pragma once
#include "../common/element.cuh"
#include "shape.cuh"

namespace attn::sm80 {

using namespace device;

// The scores of one warp's queries against a tile of keys, and what becomes of them.
template <class Shape>
struct State {
  static constexpr int row_tiles = Shape::row_tiles, key_tiles = Shape::key_tiles,
                       v_tiles = Shape::v_tiles;
  static constexpr bool words_per_key = Shape::biased && !Shape::masked;

  float s[row_tiles][key_tiles][4];         // scores, as mma leaves them
  unsigned p[row_tiles][key_tiles / 2][4];  // their weights, as mma takes them
  float o[row_tiles][v_tiles][4];           // sums of weight * v
  // Per row, in the log2 domain: weights are 2^(score - reference). -inf: the row has seen nothing.
  float reference[row_tiles][2];
  float sum[row_tiles][2];  // of the weights in the lane's columns

  // biased, masked: which of the keys that the lane has some of the warp's queries see. Values of
  // the others, which a bias of -inf or a mask can take away from all queries, may be anything:
  // they are taken as zero. 0xffff per key; masked: one bit, for there are few registers.
  unsigned seen[words_per_key ? key_tiles : 1];
  static constexpr unsigned all_seen = (1u << 2 * key_tiles) - 1;

  __device__ __forceinline__ State() {
    if (words_per_key) {
#pragma unroll
      for (int n = 0; n < key_tiles; ++n) seen[words_per_key ? n : 0] = 0xffffffff;
    }
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        reference[m][half] = -infinity();
        sum[m][half] = 0;
      }
#pragma unroll
      for (int n = 0; n < v_tiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[m][n][i] = 0;
    }
  }

  // 0xffff for each of the two keys of tile n that are seen.
  __device__ __forceinline__ unsigned seen_words(int n) const {
    return (seen[0] >> 2 * n & 1) * 0xffffu | (seen[0] >> (2 * n + 1) & 1) * 0xffff0000u;
  }

  __device__ __forceinline__ void find_unseen() {
    const unsigned same_keys = 0x11111111u << threadIdx.x % 4;
    if (Shape::masked) seen[0] = 0;
#pragma unroll
    for (int n = 0; n < key_tiles; ++n) {
      unsigned words = 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        bool sees = false;
#pragma unroll
        for (int m = 0; m < row_tiles; ++m)
          sees = sees || s[m][n][i] != -infinity() || s[m][n][2 + i] != -infinity();
        const unsigned ones = Shape::masked ? 1u << (2 * n + i) : 0xffffu << 16 * i;
        words |= (__ballot_sync(0xffffffff, sees) & same_keys) != 0 ? ones : 0;
      }
      if (Shape::masked)
        seen[0] |= words;
      else
        seen[words_per_key ? n : 0] = words;
    }
  }
};

}  // namespace attn::sm80
