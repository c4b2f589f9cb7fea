// Scores of a tile of keys: the products, what ranges hide, softcap and ALiBi.
#pragma once
#include "../common/softmax.cuh"
#include "../common/tanh.cuh"
#include "../ptx/ldmatrix.h"
#include "../ptx/wgmma.h"
#include "../shared/swizzle.h"
#include "warp.cuh"

namespace attn::sm90 {

// Fragments of Q's first panels. The matrix unit then reads less from shared memory, which tiles of
// few keys wait for.
template <Tile tile>
struct KeptQueries {
  unsigned step[4 * tile.q_kept][4];
};
template <Tile tile>
  requires(tile.q_kept == 0)
struct KeptQueries<tile> {};
// q_at: in units of 16 bytes, as the matrix unit takes it.
template <Tile tile>
__device__ __forceinline__ void keep_queries(KeptQueries<tile>& q, const Warp<tile>& warp,
                                             unsigned q_at) {
  if constexpr (tile.q_kept > 0) {
    const unsigned rows = 16 * q_at - warp.shared + address(&warp.control);  // not within_block
#pragma unroll
    for (int d = 0; d < 4 * tile.q_kept; ++d)
      ptx::ldmatrix(q.step[d], rows + d / 4 * Warp<tile>::q_panel +
                                   chunk_offset<128>(16 * warp.warp + warp.lane % 16,
                                                     d % 4 * 2 + warp.lane / 16));
  }
}

// s = Q K^T; to be waited for.
template <bool bf16, Tile tile>
__device__ __forceinline__ void start_scores(Scores<tile>& s, const KeptQueries<tile>& q,
                                             unsigned q_at, unsigned k_at) {
  constexpr int panel = Warp<tile>::panel, q_panel = Warp<tile>::q_panel;
  const unsigned long long a_matrix = ptx::wgmma_descriptor(q_at, 0),
                           b_matrix = ptx::wgmma_descriptor(k_at, 0);
  constexpr int kept = 4 * tile.q_kept;
  if constexpr (kept > 0) {
#pragma unroll
    for (int d = 0; d < kept; ++d)
      ptx::wgmma<bf16, false>(s, q.step[d], b_matrix + ((d / 4 * panel + d % 4 * 32) >> 4), d > 0);
  }
#pragma unroll
  for (int d = kept; d < tile.head_dim / 16; ++d) {
    const unsigned long long b_step = b_matrix + ((d / 4 * panel + d % 4 * 32) >> 4);
    ptx::wgmma<bf16>(s, a_matrix + ((d / 4 * q_panel + d % 4 * 32) >> 4), b_step, d > 0);
  }
  ptx::wgmma_commit();
}

// Of the lane's scores of a row, which are those of keys 8 n and 8 n + 1 from the lane's first
// on, so many are of keys before this one.
template <Tile tile>
__device__ __forceinline__ int scores_before(int key) {
  key = clamp(key, 0, tile.keys);
  return key / 8 * 2 + min(key % 8, 2);
}
// Hides what is not within the ranges of the item, keys from `count` on, of the tile that begins at
// `first`, and those at positions before `from`. As bits, which are moved to predicates seven at a
// time.
template <Tile tile>
__device__ __forceinline__ void hide_out_of_range(Scores<tile>& s,
                                                  const attn_sm90_forward_kernarg& a,
                                                  const Warp<tile>& warp, const Item& item,
                                                  int first, int count, int from = INT_MIN) {
  constexpr int keys = tile.keys;
  const int lane_first = first + warp.lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp.row(item, half);
    const int begin = scores_before<tile>(
        max(number_of(positions_of<tile>(a), row + item.lower), from) - lane_first);
    const int end =
        scores_before<tile>(min(number_of(positions_of<tile>(a), row + item.upper) - lane_first,
                                count - warp.lane % 4 * 2));
#pragma unroll
    for (int word = 0; word < keys / 4; word += 32) {
      const unsigned seen = low_bits(end - word) & ~low_bits(begin - word);
#pragma unroll
      for (int n = word; n < min(word + 32, keys / 4); ++n)
        if (!(seen >> n % 32 & 1)) s[n / 2 * 4 + 2 * half + n % 2] = -infinity();
    }
  }
}

// Hides the keys of tile n that no page has.
template <Tile tile>
__device__ __forceinline__ void hide_absent(Scores<tile>& s, const Warp<tile>& warp, unsigned n) {
  const TileBlocks& blocks = warp.control.blocks[n % tile_slots];
#pragma unroll
  for (int i = 0; i < tile.keys / 8; ++i) {
    const unsigned there = blocks.seen[i / 4] >> (8 * (i % 4) + warp.lane % 4 * 2);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (!(there >> j % 2 & 1)) s[4 * i + j] = -infinity();
  }
}

// Scores of the tile whose first key is at `first` as the softmax takes them, in the log2 domain:
// scaled, with softcap and ALiBi. scale: of any sign.
template <Tile tile>
__device__ __forceinline__ void change_scores(Scores<tile>& s, const attn_sm90_forward_kernarg& a,
                                              const Warp<tile>& warp, const Item& item, int first,
                                              float scale) {
  constexpr int keys = tile.keys;
  const float slope = a.alibi_slopes ? a.alibi_slopes[item.h] * log2_e : 0;
  const float limit = a.softcap * log2_e, into_limit = a.softcap > 0 ? scale / a.softcap : 0;
  const float log2_scale = scale * log2_e;
  const int away = item.q_end - item.seqlen_q - first - warp.lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row_away = warp.row(item, half) + away;
#pragma unroll
    for (int n = 0; n < keys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& x = s[4 * n + 2 * half + i];
        x = a.softcap > 0 ? limit * tanh_accurate(x * into_limit) : x * log2_scale;
        if (a.alibi_slopes) x = fmaf(-slope, fabsf(float(row_away - 8 * n - i)), x);
      }
    }
  }
}

}  // namespace attn::sm90
