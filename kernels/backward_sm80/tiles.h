// The shapes of the blocks of bwd_sm80_*, for their host side and for the kernels.
#ifndef ATTN_KERNELS_BACKWARD_SM80_TILES_H
#define ATTN_KERNELS_BACKWARD_SM80_TILES_H

#include "../forward_sm80/tiles.h"

namespace attn::bwd_sm80 {

using sm80::Tile, sm80::with_mask, sm80::with_score;

// A block keeps `rows` queries, or keys, in shared memory and walks over tiles of `keys` keys, or
// queries. Its sums for 16 rows take head_dim / 2 registers of each thread, with dk and dv twice
// as many. The rest is for the scores and their gradients, `keys` / 2 each. Two blocks share a
// multiprocessor, so that one computes while the other waits.
ATTN_HOST_DEVICE constexpr Tile tile_of(int head_dim, bool score) {
  // 32 rows of a warp halve what it reads of the walked tiles; there are registers for that only
  // here, and not with a score's terms.
  if (head_dim <= 64 && !score)
    return {.rows = 128, .keys = 32, .warps = 4, .stages = 2, .q_in_registers = false, .blocks = 2};
  if (head_dim <= 128)
    return {.rows = 64,
            .keys = score ? 32 : 64,
            .warps = 4,
            .stages = 2,
            .q_in_registers = false,
            .blocks = 2};
  return {.rows = 64, .keys = 32, .warps = 4, .stages = 1, .q_in_registers = false, .blocks = 2};
}

// Whether the sums of dk and dv fit in registers together. If not, dv has blocks of its own.
ATTN_HOST_DEVICE constexpr bool both_sums(int head_dim) {
  return head_dim <= 128;
}

// Both arrays that stay, the stages of both that are walked over, and for keys as many stages of
// the walked queries' lse2 and delta.
ATTN_HOST_DEVICE constexpr int walked_at(Tile tile, int head_dim) {
  return 2 * sm80::q_bytes(tile, head_dim);
}
ATTN_HOST_DEVICE constexpr int stats_at(Tile tile, int head_dim) {
  return walked_at(tile, head_dim) + 2 * tile.stages * sm80::tile_bytes(tile, head_dim);
}
ATTN_HOST_DEVICE constexpr int shared_bytes(Tile tile, int head_dim) {
  return stats_at(tile, head_dim) + tile.stages * 2 * tile.keys * 4;
}
constexpr int static_shared_bytes = 1024;  // at most, beside these

}  // namespace attn::bwd_sm80
#endif
