// The numbers of a kernel that follow from its variant.
#pragma once
#include "tiles.h"
#include "variants.h"

namespace attn::sm80 {

// head_dim: the columns of both products; a smaller one is padded with zeros.
template <class Element_, int head_dim_, unsigned with_,
          Tile tile_ = tile_of(head_dim_, with_& with_score)>
struct Shape {
  using Element = Element_;  // of q, k and v
  using Arguments = Kernarg<with_>;
  static constexpr int head_dim = head_dim_;
  static constexpr unsigned with = with_;
  static constexpr bool score = with & with_score, masked = with & with_mask,
                        paged = with & with_pages, biased = score && !paged;
  static constexpr Tile tile = tile_;

  static constexpr int threads = tile.threads(), keys = tile.keys;
  static constexpr int pitch = pitch_bytes(head_dim), kv_bytes = tile_bytes(tile, head_dim);
  static constexpr int warp_rows = tile.rows / tile.warps;

  // Products of mma.sync in a warp's share: of queries, of keys, of head_dim in Q K and in P V.
  static constexpr int row_tiles = warp_rows / 16, key_tiles = keys / 8;
  static constexpr int d_steps = head_dim / 16, v_tiles = head_dim / 8;
};

// Columns from 16 * d on are in line d / 4 of their row, at ^ line_step(d).
__device__ __forceinline__ constexpr int line_step(int d) {
  return d % 4 * 32;
}

}  // namespace attn::sm80
