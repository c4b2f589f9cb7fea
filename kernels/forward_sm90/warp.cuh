// A warp that computes: 16 of the 64 queries of its warpgroup.
#pragma once
#include "../ptx/mbarrier.h"
#include "../ptx/warpgroup.h"
#include "control.cuh"

namespace attn::sm90 {

// As wgmma leaves the scores of 16 queries and a tile of keys in a lane: s[4 n + 2 half + i] is
// that of row lane / 4 + 8 half and key 8 n + lane % 4 * 2 + i. Then weights.
template <Tile tile>
using Scores = float[tile.keys / 2];

template <Tile tile>
struct Warp {
  static constexpr int keys = tile.keys, panel = keys * 128, q_panel = tile.rows() * 128;
  using Q = Ring<tile.q_stages>;
  using K = Ring<tile.k_stages>;
  using V = Ring<tile.v_stages>;

  Control& control;
  const unsigned shared;  // within_block
  const int group;        // which of the warpgroups that compute
  const int warp, lane;

  // Which queries the warpgroup has.
  __device__ __forceinline__ int row_group() const { return tile.halves ? 0 : group; }

  // Named barriers 1..groups: whose turn it is.
  __device__ __forceinline__ void wait_turn() const {
    if constexpr (tile.groups > 1) ptx::barrier_wait(1 + group, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (tile.groups > 1) ptx::barrier_arrive(1 + (group + 1) % tile.groups, 256);
  }
  __device__ __forceinline__ void release(Barrier& empty) const {
    if (lane == 0) ptx::mbarrier_arrive(address(&empty));
  }

  __device__ __forceinline__ const Item& item(unsigned index) const {
    return control.item[index % item_slots];
  }
  __device__ __forceinline__ const KeyTile& key_tile(unsigned n) const {
    return control.tile[n % tile_slots];
  }
  __device__ __forceinline__ const TileScales& scales(unsigned n) const {
    return control.scales[n % tile_slots];
  }
  // Places in shared memory, in units of 16 bytes.
  __device__ __forceinline__ unsigned k_of(int stage) const {
    return (shared + tile.k_offset()) / 16 + stage * (tile.k_bytes() / 16);
  }
  __device__ __forceinline__ unsigned v_of(int stage) const {
    return (shared + tile.v_offset()) / 16 + stage * (tile.v_bytes() / 16);
  }
  // Of the columns that the warpgroup sums.
  __device__ __forceinline__ unsigned v_of_sums(int stage) const {
    return v_of(stage) + (tile.halves ? group * (panels(tile.sum_columns()) * panel / 16) : 0);
  }
  __device__ __forceinline__ unsigned q_at(unsigned index) const {
    return (shared + tile.q_offset()) / 16 +
           (Q::stage(index) * tile.q_bytes() + row_group() * 64 * 128) / 16;
  }
  __device__ __forceinline__ unsigned k_at(unsigned n) const { return k_of(K::stage(n)); }
  __device__ __forceinline__ unsigned v_at(unsigned n) const { return v_of(V::stage(n)); }
  __device__ __forceinline__ unsigned vt_of(int stage) const {
    return (shared + tile.vt_offset()) / 16 + stage * (tile.vt_bytes() / 16);
  }

  __device__ __forceinline__ int q_part() const { return tile.q_parts() > 1 ? group : 0; }
  // Q of an item is in shared memory until release_q. False: there is no such item.
  __device__ __forceinline__ bool take_item(unsigned index) const {
    ptx::mbarrier_wait(address(&control.q_full[Q::stage(index)][q_part()]), Q::parity(index));
    if (item(index).b < 0) return false;
    return true;
  }
  __device__ __forceinline__ void release_q(unsigned index) const {
    release(control.q_empty[Q::stage(index)][q_part()]);
  }

  // Row of the lane in the sequence.
  __device__ __forceinline__ int row(const Item& item, int half) const {
    return item.row + 64 * row_group() + 16 * warp + lane / 4 + 8 * half;
  }
};

}  // namespace attn::sm90
