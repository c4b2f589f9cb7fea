// Scores: Q K, then what softcap, bias, ALiBi and masks make of them.
#pragma once
#include "../common/block_mask.cuh"
#include "../common/tanh.cuh"
#include "../ptx/ldmatrix.h"
#include "block.cuh"
#include "fragment.h"
#include "load.cuh"
#include "state.cuh"

namespace attn::sm80 {

using namespace device;

// A warp's fragments of Q: of all of head_dim, or of one step of it at a time.
template <class Shape>
struct Queries {
  static constexpr bool kept = Shape::tile.q_in_registers;
  unsigned fragment[Shape::row_tiles][kept ? Shape::d_steps : 1][4];

  // `at`: the lane's place in the first of the warp's rows.
  __device__ __forceinline__ void read_step(unsigned at, int d) {
#pragma unroll
    for (int m = 0; m < Shape::row_tiles; ++m)
      ptx::ldmatrix(fragment[m][kept ? d : 0],
                    (at ^ line_step(d)) + d / 4 * 128 + m * 16 * Shape::pitch);
  }
};

// s = Q K. q_at, k_at: the lane's places in the warp's queries and in the tile of keys.
template <class Shape>
__device__ __forceinline__ void multiply_keys(State<Shape>& state, Queries<Shape>& q, unsigned q_at,
                                              unsigned k_at) {
#pragma unroll
  for (int m = 0; m < Shape::row_tiles; ++m)
#pragma unroll
    for (int n = 0; n < Shape::key_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) state.s[m][n][i] = 0;
#pragma unroll
  for (int d = 0; d < Shape::d_steps; ++d) {
    if (!q.kept) q.read_step(q_at, d);
#pragma unroll
    for (int n = 0; n < Shape::key_tiles; n += 2) {
      unsigned k[4];
      ptx::ldmatrix(k, (k_at ^ line_step(d)) + d / 4 * 128 + n * 8 * Shape::pitch);
#pragma unroll
      for (int m = 0; m < Shape::row_tiles; ++m) {
        Shape::Element::mma(state.s[m][n], q.fragment[m][q.kept ? d : 0], k[0], k[1]);
        Shape::Element::mma(state.s[m][n + 1], q.fragment[m][q.kept ? d : 0], k[2], k[3]);
      }
    }
  }
}

// A tile of keys as its scores need it.
struct TileOfKeys {
  int first, count;      // position of its first key, and its keys
  int mask = mask_full;  // what mask_block says about it for the warp's queries
};

// Which keys of a tile one query sees.
template <class Shape>
struct SeenColumns {
  int begin, end;
  unsigned bits[Shape::keys / 32];  // masked, paged: of the lane's first column and those after it
};

template <class Shape>
__device__ __forceinline__ SeenColumns<Shape> seen_columns(const Loader<Shape>& loader,
                                                           const TileOfKeys& tile, int row) {
  constexpr int keys = Shape::keys;
  const auto& a = loader.a;
  const Block& block = loader.block;
  const int lane = threadIdx.x % 32;
  const KeyRange r = block.row_keys(a, row);
  SeenColumns<Shape> seen;
  seen.begin = clamp(r.begin - tile.first, 0, keys);
  seen.end = row < block.seqlen_q ? clamp(r.end - tile.first, 0, tile.count) : 0;
  if constexpr (Shape::masked) {
    const int block_q = 1 << a.block_mask.block_q_log2, block_k = 1 << a.block_mask.block_k_log2;
    if (tile.mask == mask_causal) seen.end = min(seen.end, row + block.diagonal + 1 - tile.first);
#pragma unroll
    for (int n = 0; n < keys / 32; ++n) {
      seen.bits[n] = ~0u;
      if (tile.mask >= 0 && row < block.seqlen_q)
        seen.bits[n] = mask_word(a.block_mask, tile.mask, row & (block_q - 1),
                                 (tile.first & (block_k - 1)) + 32 * n) >>
                       fragment_column(0, lane);
    }
  }
  if constexpr (Shape::paged) {
#pragma unroll
    for (int n = 0; n < keys / 32; ++n)
      seen.bits[n] =
          shared_places<keys>().there[loader.number() ^ 1][n] >> fragment_column(0, lane);
  }
  return seen;
}

// paged: whether the pages of all keys of tile `number` are in the pool.
template <class Shape>
__device__ __forceinline__ bool all_there(int number) {
  unsigned all = ~0u;
  if constexpr (Shape::paged) {
#pragma unroll
    for (int n = 0; n < Shape::keys / 32; ++n) all &= shared_places<Shape::keys>().there[number][n];
  }
  return all == ~0u;
}

// The score of query `row` and key j.
template <class Shape>
__device__ __forceinline__ float modified_score(const attn_sm80_forward_kernarg& a,
                                                const Block& block, float dot, int row, int j) {
  float x = dot * a.scale;
  if (a.softcap > 0) x = a.softcap * tanh_accurate(x / a.softcap);
  if (Shape::biased && a.bias) {
    const long long at = block.b * a.bias_stride[0] + block.h * a.bias_stride[1] +
                         row * a.bias_stride[2] + j * a.bias_stride[3];
    const float bias = a.bias_type == attn_element_f32
                           ? static_cast<const float*>(a.bias)[at]
                           : Shape::Element::unpack(static_cast<const unsigned short*>(a.bias)[at]);
    if (bias == -infinity()) return bias;  // not seen, whatever the key holds
    x += bias;
  }
  if (a.alibi_slopes) x -= a.alibi_slopes[block.h] * fabsf(float(row + block.diagonal - j));
  return x;
}

// The query of a fragment's row. warp_row: the warp's first query.
template <class Shape>
__device__ __forceinline__ int query_at(const Block& block, int warp_row, int m, int half,
                                        int lane) {
  if constexpr (!Shape::masked) return warp_row + 16 * m + fragment_row(half, lane);
  const int thread = thread_number();
  return block.row + Shape::row_warp(thread / 32) * Shape::warp_rows + 16 * m +
         fragment_row(half, thread % 32);
}

// Scores of unseen keys become -inf, the others what softcap, bias and ALiBi make of them.
template <class Shape>
__device__ __forceinline__ void modify_scores(State<Shape>& state, const Loader<Shape>& loader,
                                              const TileOfKeys& tile, int warp_row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < Shape::row_tiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = query_at<Shape>(loader.block, warp_row, m, half, lane);
      const auto [begin, end, bits] = seen_columns(loader, tile, row);
#pragma unroll
      for (int n = 0; n < Shape::key_tiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = 8 * n + fragment_column(i, lane);
          float& s = state.s[m][n][2 * half + i];
          if (column < begin || column >= end ||
              ((Shape::masked || Shape::paged) && !(bits[n / 4] >> (8 * n % 32 + i) & 1)))
            s = -infinity();
          else if (Shape::score)
            s = log2_e * modified_score<Shape>(loader.a, loader.block, s, row, tile.first + column);
        }
      }
    }
  }
}

}  // namespace attn::sm80
