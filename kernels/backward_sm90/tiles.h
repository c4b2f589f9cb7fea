// The tiles of bwd_sm90_*: the keys that a thread block keeps, and what it has of the queries.
#ifndef ATTN_KERNELS_BACKWARD_SM90_TILES_H
#define ATTN_KERNELS_BACKWARD_SM90_TILES_H

#include "../shared/host_device.h"
#include "order.h"

namespace attn::bwd_sm90 {

constexpr int groups = 2;      // warpgroups that compute
constexpr int max_stages = 3;  // of any tile
constexpr int max_subtiles = 2;
constexpr int control_bytes = 3072;  // barriers, the item, lse and delta, before K

struct Tile {
  int head_dim;  // columns of the products; a smaller head_dim or head_dim_v is padded with zeros
  int subtiles;  // of 64 keys, of each warpgroup. Their dk and dv are in its registers
  int stages;    // tiles of Q and of d_out in shared memory

  constexpr bool operator==(const Tile&) const = default;

  ATTN_HOST_DEVICE constexpr int keys() const { return groups * subtiles * 64; }
  ATTN_HOST_DEVICE constexpr int threads() const { return 128 * (groups + 1); }
  // A panel has 64 columns, rows of 128 bytes.
  ATTN_HOST_DEVICE constexpr int panels() const { return head_dim / 64; }
  ATTN_HOST_DEVICE constexpr int key_panel() const { return keys() * 128; }
  ATTN_HOST_DEVICE constexpr int query_panel() const { return tile_queries * 128; }
  ATTN_HOST_DEVICE constexpr int key_bytes() const { return panels() * key_panel(); }
  ATTN_HOST_DEVICE constexpr int query_bytes() const { return panels() * query_panel(); }
  ATTN_HOST_DEVICE constexpr int ds_bytes() const { return keys() * tile_queries * 2; }
  ATTN_HOST_DEVICE constexpr int dq_bytes() const { return tile_queries * head_dim * 4; }
  ATTN_HOST_DEVICE constexpr int k_offset() const { return control_bytes; }
  ATTN_HOST_DEVICE constexpr int v_offset() const { return k_offset() + key_bytes(); }
  ATTN_HOST_DEVICE constexpr int q_offset() const { return v_offset() + key_bytes(); }
  ATTN_HOST_DEVICE constexpr int d_out_offset() const {
    return q_offset() + stages * query_bytes();
  }
  ATTN_HOST_DEVICE constexpr int ds_offset() const {
    return d_out_offset() + stages * query_bytes();
  }
  ATTN_HOST_DEVICE constexpr int dq_offset() const { return ds_offset() + 2 * ds_bytes(); }
  ATTN_HOST_DEVICE constexpr int shared_bytes() const { return dq_offset() + 2 * dq_bytes(); }
};

// 64 x 128: dk and dv of 64 keys are 128 registers of a thread, and scores and their gradients of
// 64 queries 64 more, in whose place a tile of dq is found.
constexpr Tile tile_d128{.head_dim = 128, .subtiles = 1, .stages = 2};
// 64 x 256: the same registers hold dk and dv of 128 keys, one half after the other is computed,
// and dq is added to half as often.
constexpr Tile tile_d64{.head_dim = 64, .subtiles = 2, .stages = 3};
static_assert(tile_d128.shared_bytes() <= 232448 && tile_d64.shared_bytes() <= 232448);

}  // namespace attn::bwd_sm90
#endif
