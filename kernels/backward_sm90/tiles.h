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
  // Thread blocks of a cluster. Two divide the products by roles: each has 64 of an item's keys,
  // and one of its warpgroups has dv of them, the other dk. They send each other ds, and each finds
  // half of dq's columns from ds of all keys.
  int blocks = 1;
  int dq_places = 2;  // of tiles n % 2 of dq, or of parts of it; or both have one place
  bool biased = false;
  // When d_out v^T of a subtile begins: see run_by_keys().
  bool dp_after_weights = true;

  constexpr bool operator==(const Tile&) const = default;

  ATTN_HOST_DEVICE constexpr bool roles() const { return blocks == 2; }
  ATTN_HOST_DEVICE constexpr int block_keys() const {
    return (roles() ? 1 : groups * subtiles) * 64;
  }
  ATTN_HOST_DEVICE constexpr int keys() const { return blocks * block_keys(); }  // of an item
  ATTN_HOST_DEVICE constexpr int threads() const { return 128 * (groups + 1); }
  // A panel has 64 columns, rows of 128 bytes.
  ATTN_HOST_DEVICE constexpr int panels() const { return head_dim / 64; }
  ATTN_HOST_DEVICE constexpr int key_panel() const { return block_keys() * 128; }
  ATTN_HOST_DEVICE constexpr int query_panel() const { return tile_queries * 128; }
  ATTN_HOST_DEVICE constexpr int key_bytes() const { return panels() * key_panel(); }
  ATTN_HOST_DEVICE constexpr int query_bytes() const { return panels() * query_panel(); }
  // K of the other block's keys: the columns that this block finds dq of.
  ATTN_HOST_DEVICE constexpr int peer_k_bytes() const { return blocks > 1 ? key_bytes() / 2 : 0; }
  ATTN_HOST_DEVICE constexpr int p_bytes() const { return roles() ? 64 * tile_queries * 4 : 0; }
  ATTN_HOST_DEVICE constexpr int ds_bytes() const { return keys() * tile_queries * 2; }
  ATTN_HOST_DEVICE constexpr int ds_places() const { return roles() ? 1 : 2; }
  // Parts of dq's columns, each found by a warpgroup and added on its own.
  ATTN_HOST_DEVICE constexpr int dq_parts() const { return roles() ? groups * blocks : 1; }
  ATTN_HOST_DEVICE constexpr int dq_columns() const { return head_dim / dq_parts(); }
  ATTN_HOST_DEVICE constexpr int dq_bytes() const { return tile_queries * dq_columns() * 4; }
  ATTN_HOST_DEVICE constexpr int k_offset() const { return control_bytes; }
  ATTN_HOST_DEVICE constexpr int v_offset() const { return k_offset() + key_bytes(); }
  ATTN_HOST_DEVICE constexpr int peer_k_offset() const { return v_offset() + key_bytes(); }
  ATTN_HOST_DEVICE constexpr int q_offset() const { return peer_k_offset() + peer_k_bytes(); }
  ATTN_HOST_DEVICE constexpr int d_out_offset() const {
    return q_offset() + stages * query_bytes();
  }
  ATTN_HOST_DEVICE constexpr int p_offset() const {
    return d_out_offset() + stages * query_bytes();
  }
  ATTN_HOST_DEVICE constexpr int ds_offset() const { return p_offset() + p_bytes(); }
  ATTN_HOST_DEVICE constexpr int dq_offset() const {
    return ds_offset() + ds_places() * ds_bytes();
  }
  ATTN_HOST_DEVICE constexpr int dq_place(int which) const {
    return dq_offset() + (dq_places == 1 ? 0 : which * dq_bytes());
  }
  // The bias of a tile in 16 bits: see load_bias().
  ATTN_HOST_DEVICE constexpr int bias_offset() const {
    return dq_offset() + dq_places * dq_bytes();
  }
  ATTN_HOST_DEVICE constexpr int bias_bytes() const {
    return biased ? block_keys() * tile_queries * 2 : 0;
  }
  ATTN_HOST_DEVICE constexpr int shared_bytes() const { return bias_offset() + bias_bytes(); }
};

// 64 x 128: dk and dv of 64 keys are 128 registers of a thread, and scores and their gradients of
// 64 queries 64 more, in whose place a tile of dq is found.
constexpr Tile tile_d128{.head_dim = 128, .subtiles = 1, .stages = 2};
// 64 x 256: the same registers hold dk and dv of 128 keys, one half after the other is computed,
// and dq is added to half as often.
// dp after weights needs registers that it does not have; with more to scores it is 10 % faster.
constexpr Tile tile_d64{.head_dim = 64, .subtiles = 2, .stages = 3, .dp_after_weights = false};
constexpr Tile tile_d64_score{.head_dim = 64, .subtiles = 2, .stages = 3};
// 64 x 2 x 64: dk or dv of 64 keys are 128 registers of a thread. One block would add to dq as
// often as there are 64 keys, and memory takes no more than 1.8 TB/s of that: a pair adds half as
// often. Two stages would need 32 KB more than there are.
constexpr Tile tile_d256{.head_dim = 256, .subtiles = 1, .stages = 1, .blocks = 2};
// The bias needs room.
constexpr Tile tile_d128_bias{
    .head_dim = 128, .subtiles = 1, .stages = 2, .dq_places = 1, .biased = true};
constexpr Tile tile_d64_bias{.head_dim = 64, .subtiles = 2, .stages = 2, .biased = true};
constexpr Tile tile_d256_bias{
    .head_dim = 256, .subtiles = 1, .stages = 1, .blocks = 2, .biased = true};
static_assert(tile_d128_bias.shared_bytes() <= 232448 && tile_d64_bias.shared_bytes() <= 232448 &&
              tile_d256_bias.shared_bytes() <= 232448);
static_assert(tile_d128.shared_bytes() <= 232448 && tile_d64.shared_bytes() <= 232448 &&
              tile_d256.shared_bytes() <= 232448);

}  // namespace attn::bwd_sm90
#endif
