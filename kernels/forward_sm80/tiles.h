// The shapes of the blocks of fwd_sm80_*, for their host side and for the kernels.
#ifndef ATTN_KERNELS_FORWARD_SM80_TILES_H
#define ATTN_KERNELS_FORWARD_SM80_TILES_H

#include "../shared/host_device.h"

namespace attn::sm80 {

// What a kernel can do besides causal masks and windows. Pages and block masks exclude each other.
enum : unsigned {
  with_score = 1,  // softcap, ALiBi and, without pages, bias
  with_mask = 2,   // block masks
  with_pages = 4,  // paged K and V
};

struct Tile {
  int rows;             // queries of a block
  int keys;             // keys of a K/V tile
  int warps;            // each has rows / row_warps() queries: 16 or 32
  int stages;           // K/V tiles in shared memory
  bool q_in_registers;  // else fragments of Q are read again for every tile
  int blocks;           // per multiprocessor at least
  bool halves = false;  // two warps have the same queries, and sum half of V's columns each

  ATTN_HOST_DEVICE constexpr int threads() const { return 32 * warps; }
  // Warps that differ in their queries.
  ATTN_HOST_DEVICE constexpr int row_warps() const { return halves ? warps / 2 : warps; }
};

// By head_dim as the kernel is compiled for it. score: with softcap, bias and ALiBi, which need
// registers. Pages need no other tiles: their places wait in shared memory.
ATTN_HOST_DEVICE constexpr Tile tile_of(int head_dim, bool score) {
  if (head_dim <= 64)
    return {.rows = 128, .keys = 64, .warps = 4, .stages = 2, .q_in_registers = true, .blocks = 2};
  if (head_dim <= 128)
    return {.rows = 128,
            .keys = score ? 32 : 64,
            .warps = 4,
            .stages = score ? 1 : 2,
            .q_in_registers = false,
            .blocks = 2};
  // 96 KB of shared memory or less, which all devices have.
  if (head_dim <= 256)
    return {.rows = 64, .keys = 64, .warps = 4, .stages = 1, .q_in_registers = false, .blocks = 2};
  if (head_dim <= 320)
    return {.rows = 64, .keys = 32, .warps = 4, .stages = 1, .q_in_registers = false, .blocks = 2};
  return {.rows = 32,
          .keys = 32,
          .warps = 4,
          .stages = 1,
          .q_in_registers = false,
          .blocks = 2,
          .halves = true};
}

// At most, beside the tiles.
ATTN_HOST_DEVICE constexpr int static_shared_bytes(unsigned with) {
  return with & with_mask ? 3072 : with & with_pages ? 2048 : 1024;
}

// Rows in shared memory are whole 128-byte lines.
ATTN_HOST_DEVICE constexpr int pitch_bytes(int head_dim) {
  return (head_dim + 63) / 64 * 128;
}
ATTN_HOST_DEVICE constexpr int tile_bytes(Tile tile, int head_dim) {
  return tile.keys * pitch_bytes(head_dim);
}
ATTN_HOST_DEVICE constexpr int q_bytes(Tile tile, int head_dim) {
  return tile.rows * pitch_bytes(head_dim);
}

// K tiles, V tiles, Q. If Q moves on to registers, it shares the memory of later tiles: of the
// second stage, or with one stage of V.
ATTN_HOST_DEVICE constexpr int q_offset(Tile tile, int head_dim, int head_dim_v) {
  const int stage = tile_bytes(tile, head_dim) + tile_bytes(tile, head_dim_v);
  const int tiles = tile.stages * stage;
  return tile.q_in_registers ? tiles - (tile.stages == 1 ? tile_bytes(tile, head_dim_v) : stage)
                             : tiles;
}
ATTN_HOST_DEVICE constexpr int shared_bytes(Tile tile, int head_dim, int head_dim_v) {
  const int tiles = tile.stages * (tile_bytes(tile, head_dim) + tile_bytes(tile, head_dim_v));
  const int q_end = q_offset(tile, head_dim, head_dim_v) + q_bytes(tile, head_dim);
  return q_end > tiles ? q_end : tiles;
}

}  // namespace attn::sm80
#endif
