// The numbers of a kernel that follow from its variant.
#pragma once
#include "tiles.h"
#include "variants.h"

namespace attn::sm80 {

// head_dim, head_dim_v: the columns of the products; smaller ones are padded with zeros.
template <class Element_, int head_dim_, unsigned with_,
          Tile tile_ = tile_of(head_dim_, with_& with_score), int head_dim_v_ = head_dim_>
struct Shape {
  using Element = Element_;  // of q, k and v
  using Arguments = Kernarg<with_>;
  static constexpr int head_dim = head_dim_, head_dim_v = head_dim_v_;
  static constexpr unsigned with = with_;
  static constexpr bool score = with & with_score, masked = with & with_mask,
                        paged = with & with_pages, biased = score && !paged;
  static constexpr Tile tile = tile_;

  static constexpr int threads = tile.threads(), keys = tile.keys;
  static constexpr int pitch = pitch_bytes(head_dim), v_pitch = pitch_bytes(head_dim_v);
  static constexpr int k_bytes = tile_bytes(tile, head_dim),
                       stage_bytes = k_bytes + tile_bytes(tile, head_dim_v);
  static constexpr int warp_rows = tile.rows / tile.row_warps();

  // Products of mma.sync in a warp's share: of queries, of keys, of head_dim in Q K and in P V.
  static constexpr int row_tiles = warp_rows / 16, key_tiles = keys / 8;
  static constexpr int d_steps = head_dim / 16, v_tiles = head_dim_v / 8 / (tile.halves ? 2 : 1);

  // Which queries and which columns of V a warp has.
  __device__ __forceinline__ static int row_warp(int warp) {
    return tile.halves ? warp % tile.row_warps() : warp;
  }
  __device__ __forceinline__ static int first_column(int warp) {
    return tile.halves ? warp / tile.row_warps() * (head_dim_v / 2) : 0;
  }
};

// Columns from 16 * d on are in line d / 4 of their row, at ^ line_step(d).
__device__ __forceinline__ constexpr int line_step(int d) {
  return d % 4 * 32;
}

}  // namespace attn::sm80
