// Shared memory: the words by which the warps communicate, and a warp that computes.
#pragma once
#include "../ptx/address.h"
#include "../ptx/cluster.h"
#include "../ptx/mbarrier.h"
#include "backward_args.h"
#include "tiles.h"

namespace attn::bwd_sm90 {

using ptx::Barrier, ptx::address;

// A work item: a block of keys of one sequence and query head. It goes over the tiles of queries.
struct Item {
  int b, head, head_kv;  // b < 0: there are no more
  int block;
  Sequence sequence;
  Range tiles;
  int key_block;                       // its number among all sequences'
  int first_tile;                      // the sequence's number 0, see order.h
  int q_row, q_batch, k_row, k_batch;  // the sequence's rows in the tensors
  // Rows of the block, or of the first and last tile, hold what is not to be used.
  bool clears_keys, clears_first, clears_last;
  struct {
    int first, last;
  } whole[groups * max_subtiles];

  __device__ __forceinline__ bool clears(int tile) const {
    return (tile == tiles.first && clears_first) || (tile == tiles.last && clears_last);
  }
};
enum {
  item_slots = 2,
  item_readers = 4 * groups + 3  // warps
};

// What becomes of dq of a tile.
struct DqTile {
  int last;      // of the enumeration below
  int rows;      // of the tile, that exist
  long long at;  // dq's element of the first row
};
// Whether this block is the last one that adds to the tile, and so stores dq; and the first as
// well.
enum { not_last, only, last };

struct Control {
  Barrier item_full[item_slots], item_empty[item_slots];
  Barrier k_full, k_empty, v_full, v_empty;
  // The stats of a tile come with q.
  Barrier q_full[max_stages], q_empty[max_stages], d_out_full[max_stages], d_out_empty[max_stages];
  // Where rows are to be cleared first: q and d_out, or k and v, are there. Two arrivals.
  Barrier queries_raw[max_stages], keys_raw;
  // Of tiles n % 2. One warpgroup finds dq of the even tiles, the other that of the odd ones; and
  // there is a warp for each that adds them to memory. In a cluster: of parts of dq, of which each
  // warpgroup and warp has one; ds has one place.
  Barrier ds_full[2], ds_empty[2];
  // dq's place is free, or has the sum so far; dq has been written there, or stored.
  Barrier dq_empty[2], dq_full[2];
  DqTile dq[2];             // written before dq_empty
  Barrier p_full, p_empty;  // in a cluster
  // In a cluster: the second block knows the item that the first has taken for both, and has read
  // it.
  Barrier taken, taken_read;
  unsigned taken_item;
  Item item[item_slots];
  // With a bias: keys of the item whose rows of K are not finite, a bit each. The rows are 0.
  unsigned poisoned[groups * max_subtiles * 2];
  alignas(128) float lse[max_stages][tile_queries];
  alignas(128) float delta[max_stages][tile_queries];
  Barrier bias_full, bias_empty;  // of a copied bias
};
static_assert(sizeof(Control) <= control_bytes);

template <Tile tile>
__device__ __forceinline__ void init_barriers(Control& c) {
  constexpr int warps = 4 * groups;
  const auto init = [](Barrier& barrier, int count) {
    ptx::mbarrier_init(address(&barrier), count);
  };
  for (int i = 0; i < item_slots; ++i) init(c.item_full[i], 1), init(c.item_empty[i], item_readers);
  for (Barrier* full : {&c.k_full, &c.v_full}) init(*full, 1);
  init(c.keys_raw, 2);
  for (Barrier* empty : {&c.k_empty, &c.v_empty}) init(*empty, warps);
  for (int i = 0; i < max_stages; ++i) {
    for (Barrier* full : {&c.q_full[i], &c.d_out_full[i]}) init(*full, 1);
    init(c.queries_raw[i], 2);
    for (Barrier* empty : {&c.q_empty[i], &c.d_out_empty[i]}) init(*empty, warps);
  }
  for (int i = 0; i < 2; ++i) {
    init(c.ds_full[i], tile.roles() ? 4 : warps);
    init(c.ds_empty[i], tile.roles() ? tile.blocks * warps : 4);
    init(c.dq_full[i], 4), init(c.dq_empty[i], 1);
  }
  init(c.p_full, 4), init(c.p_empty, 4);
  if constexpr (tile.biased) init(c.bias_full, 32), init(c.bias_empty, tile.roles() ? 4 : warps);
  init(c.taken, 1), init(c.taken_read, 1);
  ptx::mbarrier_init_fence();
}

template <Tile tile>
__device__ __forceinline__ int block_of_cluster() {
  return tile.blocks > 1 ? blockIdx.x % tile.blocks : 0;
}
// All threads of the block or cluster.
template <Tile tile>
__device__ __forceinline__ void meet_all() {
  if constexpr (tile.blocks > 1)
    ptx::cluster_meet();
  else
    __syncthreads();
}

// The place of the n-th tile in a ring of stages, and the parity of the phase that fills it.
template <int stages>
struct Ring {
  static __device__ __forceinline__ int stage(unsigned n) { return n % stages; }
  static __device__ __forceinline__ unsigned parity(unsigned n) { return n / stages & 1; }
};

using ItemRing = Ring<item_slots>;
// An item, which stays where it is until it is released.
__device__ __forceinline__ const Item& wait_item(Control& c, unsigned count) {
  const int slot = ItemRing::stage(count);
  ptx::mbarrier_wait(address(&c.item_full[slot]), ItemRing::parity(count));
  return c.item[slot];
}
__device__ __forceinline__ Barrier& item_empty(Control& c, unsigned count) {
  return c.item_empty[ItemRing::stage(count)];
}

}  // namespace attn::bwd_sm90
