// Shared memory: the words by which the producer warpgroup and the consumer warpgroups communicate
// about work items and tiles of keys, and the offsets of tiles.
#pragma once
#include "../common/positions.cuh"
#include "../common/seen_keys.h"
#include "../ptx/address.h"
#include "../ptx/cluster.h"
#include "../ptx/mbarrier.h"
#include "forward_args.h"
#include "live_tiles.cuh"
#include "tiles.h"

namespace attn::sm90 {

using namespace device;

// fp8 takes none.
template <Tile tile>
__device__ __forceinline__ attn_positions positions_of(const attn_sm90_forward_kernarg& a) {
  return tile.element_bytes == 2 ? a.positions : attn_positions{};
}

// A work item, as the producer warpgroup describes it to the consumers.
struct Item {
  int b, h;  // b < 0: there are no more
  int head_kv;
  int row;  // first query
  int seqlen_q;
  int q_end;      // place after the last query's: Skv, without positions
  int q_begin;    // packed q: row of the sequence's query 0
  int low, high;  // keys that some of its queries see; in a cluster, of the queries of all blocks
  int used;       // no query of the sequence (fp8: of the item) sees a key from here on
  int lower, upper;  // query i sees places from i + lower up to i + upper
  struct Segment {
    int end;    // position after the segment's last key
    int row;    // the key at position j is row j + row of the tensor,
    int batch;  // in this entry
  } segment[attn_sm90_max_segments];
  SeenKeys see[max_groups];  // per warpgroup
  // fp8: factors of products of q and k, and of out; with_score: without the descales of K and V.
  float score_scale, out_scale;
  unsigned first_tile;  // flags of its first tile of keys, written before that one's k_full
};

// A tile of keys of an item.
struct KeyTile {
  int first;                      // position of its first key
  int keys;                       // keys of its segment that some query of the item sees
  int used;                       // rows of V from here on belong to no key, or to_be_said
  unsigned next_tile;             // flags of the item's next tile, if any, see live_tiles.cuh
  int row, segment, head, batch;  // its place; segment: its number or one of these
};
// The scales of an fp8 tile, with_score, for each half of its keys.
struct TileScales {
  float score[2], v[2];  // factors of products of q and k, and of V
  int unused;            // rows of V before this one belong to no key
};
enum : int { nowhere = -1, no_more_tiles = -2 };
enum : int { to_be_said = -1 };  // the warps that mask find which rows of V are used
constexpr int max_pieces = 8;    // 16 keys each, of a tile in pages
using ptx::Barrier, ptx::address;
struct Control {
  Barrier item_full[item_slots];
  Barrier q_full[max_stages][max_groups];  // per part of Q; the item's description too
  Barrier q_empty[max_stages][max_groups];
  Barrier k_full[max_stages], k_empty[max_stages], v_full[max_stages], v_empty[max_stages];
  Item item[item_slots];
  KeyTile tile[tile_slots];       // written before k_full
  TileBlocks blocks[tile_slots];  // with a block mask, a bias or pages, of the same tiles
  // The warps have said what they see of the tile: with a bias, and with a block mask if the tile
  // has_unused.
  Barrier said[tile_slots];
  Barrier listed;                 // with a block mask: the items are listed, see item_order.cuh
  Barrier described[tile_slots];  // with a block mask or pages: the tile is written
  // In a cluster: the second block knows the item that the first has taken for both, and has read
  // it.
  Barrier taken, taken_read;
  unsigned taken_item;
  Barrier ending;  // of the item that was described last, few tiles are to be loaded
  // In a cluster: the other block has the place free too.
  Barrier k_there[max_stages], v_there[max_stages];
  Barrier vt_full[max_stages], vt_empty[max_stages];  // fp8: V^T
  union {                                             // of the same tiles
    int page[tile_slots][max_pieces];                 // nowhere: not in any
    TileScales scales[tile_slots];
  };
};
static_assert(sizeof(Control) <= control_bytes);

// Goes around a ring of stages.
template <int stages>
struct RingAt {
  int stage;
  unsigned parity;
  __device__ __forceinline__ void advance() {
    const bool wraps = stage == stages - 1;
    stage = wraps ? 0 : stage + 1;
    parity ^= wraps;
  }
};
// The place of the n-th tile in a ring of stages, and the parity of the phase that fills it.
template <int stages>
struct Ring {
  static __device__ __forceinline__ int stage(unsigned n) { return n % stages; }
  static __device__ __forceinline__ unsigned parity(unsigned n) { return n / stages & 1; }
};

template <Tile tile>
__device__ __forceinline__ int block_of_cluster() {
  return tile.blocks > 1 ? blockIdx.x % tile.blocks : 0;
}
// Barriers of Q, and those that only clusters have.
template <Tile tile>
__device__ __forceinline__ void init_barriers_of_stage(Control& control, int stage) {
  for (Barrier& full : control.q_full[stage]) ptx::mbarrier_init(address(&full), 1);
  for (Barrier& empty : control.q_empty[stage])
    ptx::mbarrier_init(address(&empty), 4 * tile.groups / tile.q_parts());
  if (tile.blocks > 1)
    for (Barrier* there : {&control.k_there[stage], &control.v_there[stage]})
      ptx::mbarrier_init(address(there), 1);
}
template <Tile tile>
__device__ __forceinline__ void init_barriers_of_cluster(Control& control) {
  if (tile.blocks > 1)
    for (Barrier* taken : {&control.taken, &control.taken_read})
      ptx::mbarrier_init(address(taken), 1);
}
// All threads of the block or cluster.
template <Tile tile>
__device__ __forceinline__ void meet_all() {
  if constexpr (tile.blocks > 1)
    ptx::cluster_meet();
  else
    __syncthreads();
}
// In a cluster an address in shared memory has its block's number above these bits. The descriptors
// of wgmma have not; all else needs it.
template <Tile tile>
__device__ __forceinline__ unsigned within_block(unsigned shared) {
  return tile.blocks > 1 ? shared & 0x3ffff : shared;
}

}  // namespace attn::sm90

// The kernel of the variant NAME in VARIANTS, which runs FORWARD; then __cluster_dims__ where its
// tile has several blocks.
#define ATTN_SM90_KERNEL(NAME, VARIANTS, FORWARD, ...)                                          \
  constexpr attn::sm90::Variant NAME##_variant = VARIANTS[attn::find_variant(VARIANTS, #NAME)]; \
  extern "C" __global__ void __launch_bounds__(NAME##_variant.tile.threads(), 1)                \
      __VA_ARGS__ NAME(const __grid_constant__ attn::sm90::Kernarg<NAME##_variant.with> a) {    \
    FORWARD(a);                                                                                 \
  }
