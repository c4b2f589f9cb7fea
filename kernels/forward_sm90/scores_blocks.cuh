// Scores with a block mask: which keys of a tile each row sees.
#pragma once
#include "scores.cuh"

namespace attn::sm90 {

// Words of 32 keys of a tile.
template <Tile tile>
constexpr int key_words = (tile.keys + 31) / 32;
// Per row of the lane, the keys of a tile that it sees.
template <Tile tile>
using Visible = unsigned[2][key_words<tile>];
// There are registers for them beside scores.
template <Tile tile>
constexpr bool finds_visible_early = tile.head_dim_v <= 128;

// Of tile n. Notes which keys are seen.
template <Tile tile>
__device__ __forceinline__ void find_visible(const attn_mask_arrays& mask, const Warp<tile>& warp,
                                             const Item& item, unsigned n, unsigned flags,
                                             Visible<tile>& bits) {
  constexpr int words = key_words<tile>;
  Control& control = warp.control;
  const KeyTile& at = warp.key_tile(n);
  TileBlocks& blocks = control.blocks[n % tile_slots];
  constexpr int rows = finds_visible_early<tile> ? 2 : 1;  // at once
#pragma unroll
  for (int half = 0; half < 2; half += rows) {
    int row[rows];
    unsigned found[rows][words];
#pragma unroll
    for (int n = 0; n < rows; ++n) row[n] = warp.row(item, half + n);
    visible_by_blocks<tile>(mask, &blocks.block[warp.row_group() * mask_blocks<tile>], at.first,
                            row, item.q_end - item.seqlen_q, found);
#pragma unroll
    for (int n = 0; n < rows; ++n) {
      const int away = row[n] - at.first, begin = away + item.lower;
      const int end = row[n] < item.seqlen_q ? min(away + item.upper, at.keys) : 0;
#pragma unroll
      for (int word = 0; word < words; ++word)
        bits[half + n][word] =
            found[n][word] & low_bits(end - 32 * word) & ~low_bits(begin - 32 * word);
    }
  }
#pragma unroll
  for (int word = 0; word < words; ++word) {
    const unsigned seen = __reduce_or_sync(0xffffffff, bits[0][word] | bits[1][word]);
    if (warp.lane == 0) atomicOr(&blocks.seen[word], seen);
  }
  if (flags & has_unused) warp.release(control.said[n % tile_slots]);
}
// Hides the others.
template <Tile tile>
__device__ __forceinline__ void hide_others(Scores<tile>& s, const Warp<tile>& warp,
                                            const Visible<tile>& visible) {
  constexpr int keys = tile.keys;
  const int lane = warp.lane;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int column = 0; column < keys; column += 8) {
      const unsigned bits = visible[half][column / 32] >> lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (!(bits >> (column % 32 + i) & 1)) s[column / 2 + 2 * half + i] = -infinity();
    }
  }
}

}  // namespace attn::sm90
