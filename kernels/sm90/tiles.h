// The shapes of the blocks of fwd_sm90_*, for their host side and for the kernels.
#ifndef ATTN_KERNELS_SM90_TILES_H
#define ATTN_KERNELS_SM90_TILES_H

#include "../../src/core/mask.h"  // ATTN_HOST_DEVICE

namespace attn::sm90 {

struct Tile {
  int groups;                      // warpgroups that compute, each 64 queries
  int keys;                        // keys of a K/V tile
  int q_stages, k_stages, v_stages;  // tiles in shared memory

  ATTN_HOST_DEVICE constexpr int rows() const { return 64 * groups; }
  ATTN_HOST_DEVICE constexpr int threads() const { return 128 * (groups + 1); }
  // What setmaxnreg leaves the warpgroup that loads and those that compute: together what they start
  // with. One that computes has enough from the start.
  ATTN_HOST_DEVICE constexpr int load_registers() const { return groups == 2 ? 40 : 32; }
  ATTN_HOST_DEVICE constexpr int compute_registers() const { return groups == 2 ? 232 : 160; }
};

// By head_dim as the kernel is compiled for it.
constexpr Tile tile_d64{3, 128, 2, 3, 3};
constexpr Tile tile_d64_short{1, 128, 1, 3, 3};  // where larger ones would leave multiprocessors idle
constexpr Tile tile_d128{2, 128, 2, 3, 2};
constexpr Tile tile_d128_long{2, 176, 1, 2, 2};  // for long sequences: Q has one place, and ends waste more
constexpr Tile tile_d256{2, 80, 1, 2, 2};

constexpr int max_groups = 3;
constexpr int max_stages = 3;
constexpr int item_slots = 4;        // work items between the warpgroup that loads and those that compute
constexpr int tile_slots = 8;        // the same for tiles of keys; more than max_stages
constexpr int control_bytes = 2048;  // barriers and items, before the tiles

// A tile is made of panels of 64 columns, whose rows have 128 bytes.
ATTN_HOST_DEVICE constexpr int panels(int head_dim) { return (head_dim + 63) / 64; }
ATTN_HOST_DEVICE constexpr int kv_bytes(Tile tile, int head_dim) { return tile.keys * panels(head_dim) * 128; }
ATTN_HOST_DEVICE constexpr int q_bytes(Tile tile, int head_dim) { return tile.rows() * panels(head_dim) * 128; }
ATTN_HOST_DEVICE constexpr int q_offset() { return control_bytes; }
ATTN_HOST_DEVICE constexpr int k_offset(Tile tile, int head_dim) {
  return q_offset() + tile.q_stages * q_bytes(tile, head_dim);
}
ATTN_HOST_DEVICE constexpr int v_offset(Tile tile, int head_dim) {
  return k_offset(tile, head_dim) + tile.k_stages * kv_bytes(tile, head_dim);
}
ATTN_HOST_DEVICE constexpr int shared_bytes(Tile tile, int head_dim) {
  return v_offset(tile, head_dim) + tile.v_stages * kv_bytes(tile, head_dim);
}

}  // namespace attn::sm90
#endif
