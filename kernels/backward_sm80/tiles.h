// The shapes of the blocks of bwd_sm80_*, for their host side and for the kernels.
#ifndef ATTN_KERNELS_BACKWARD_SM80_TILES_H
#define ATTN_KERNELS_BACKWARD_SM80_TILES_H

#include "../forward_sm80/tiles.h"

namespace attn::bwd_sm80 {

using sm80::with_mask, sm80::with_score;

struct Tile {
  int rows;    // keys, or queries, that a block keeps in shared memory
  int keys;    // queries, or keys, of a tile that it walks over
  int copied;  // of these, that are copied at once: one or more tiles
  int warps;   // each has rows / warps rows: 16 or 32
  int stages;  // of what is copied
  int blocks;  // per multiprocessor at least

  ATTN_HOST_DEVICE constexpr int threads() const { return 32 * warps; }
  // As forward_sm80's products take it.
  ATTN_HOST_DEVICE constexpr sm80::Tile products() const {
    return {rows, keys, warps, stages, false, blocks};
  }
};

// The sums of 16 rows take head_dim / 2 registers of each thread, with dk and dv twice as many. The
// rest is for the scores and their gradients, `keys` / 2 each. Two blocks share a multiprocessor,
// so that one computes while the other waits; in 99 KB, which sm_86 and later have, one fits.
ATTN_HOST_DEVICE constexpr Tile tile_of(bool of_keys, int head_dim, bool score) {
  // 32 rows of a warp halve what it reads of the walked tiles, where there are registers for them.
  // With two tiles a copy its threads wait for each other half as often.
  if (!score && head_dim <= (of_keys ? 64 : 128))
    return {.rows = 128,
            .keys = of_keys || head_dim > 64 ? 32 : 64,
            .copied = head_dim <= 64 ? 64 : 32,
            .warps = 4,
            .stages = 2,
            .blocks = 2};
  const int keys = score || head_dim > 128 ? 32 : 64;
  return {.rows = 64,
          .keys = keys,
          .copied = keys,
          .warps = 4,
          .stages = head_dim > 128 ? 1 : 2,
          .blocks = 2};
}

// Whether the sums of dk and dv fit in registers together. If not, dv has blocks of its own.
ATTN_HOST_DEVICE constexpr bool both_sums(int head_dim) {
  return head_dim <= 128;
}

// Both arrays that stay, the stages of both that are walked over, and for keys as many stages of
// the walked queries' lse2 and delta.
ATTN_HOST_DEVICE constexpr int rows_bytes(Tile tile, int head_dim) {
  return tile.rows * sm80::pitch_bytes(head_dim);
}
ATTN_HOST_DEVICE constexpr int walked_bytes(Tile tile, int head_dim) {
  return tile.copied * sm80::pitch_bytes(head_dim);
}
ATTN_HOST_DEVICE constexpr int walked_at(Tile tile, int head_dim) {
  return 2 * rows_bytes(tile, head_dim);
}
ATTN_HOST_DEVICE constexpr int stats_at(Tile tile, int head_dim) {
  return walked_at(tile, head_dim) + 2 * tile.stages * walked_bytes(tile, head_dim);
}
ATTN_HOST_DEVICE constexpr int shared_bytes(int head_dim, bool score) {
  int most = 0;
  for (const bool of_keys : {false, true}) {
    const Tile tile = tile_of(of_keys, head_dim, score);
    const int bytes = stats_at(tile, head_dim) + tile.stages * 2 * tile.copied * 4;
    most = bytes > most ? bytes : most;
  }
  return most;
}
constexpr int static_shared_bytes = 1024;  // at most, beside these

}  // namespace attn::bwd_sm80
#endif
