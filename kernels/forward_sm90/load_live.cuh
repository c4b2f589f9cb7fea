// Loading with a block mask: only the tiles that it leaves.
#pragma once
#include "../ptx/uniform.h"
#include "load.cuh"

namespace attn::sm90 {

// With a block mask one warp finds the tiles that it leaves, two ahead of the one whose keys it
// loads, and another loads the values, which the search would delay. All lanes of both
// take the same path, and the first acts for them. An item that sees nothing has one EMPTY tile.
template <Tile tile>
__device__ __forceinline__ void load_live_keys(const attn_sm90_mask_kernarg& a, Control& control,
                                               unsigned shared) {
  const bool leads = threadIdx.x % 32 == 0;
  RingAt<tile.k_stages> k{0, 0};  // of the next tile to be loaded
  const auto wait_place = [&] {
    ptx::mbarrier_wait(address(&control.k_empty[k.stage]), k.parity ^ 1);
  };
  const auto describe = [&](unsigned index, const KeyTile& described) {
    if (leads) control.tile[index % tile_slots] = described;
    ptx::mbarrier_arrive_if(address(&control.described[index % tile_slots]), leads);
  };
  unsigned n = 0;  // tiles found
  for (unsigned count = 0;; ++count) {
    Item& item = control.item[count % item_slots];
    ptx::mbarrier_wait(address(&control.item_full[count % item_slots]), count / item_slots & 1);
    if (item.b < 0) break;
    LiveTiles<tile, Item> tiles(a.block_mask, item, a.down);
    LiveTile at{}, next{};
    at.keys = next.keys = -1;  // not found yet
    for (bool ends = false;; ++n) {
      const LiveTile after = tiles.find(control.blocks[n % tile_slots]);
      if (!ends && (after.keys == 0 || is_ending<tile>(item, a.down, after.first))) {
        ptx::mbarrier_arrive_if(address(&control.ending), leads);
        ends = true;
      }
      const unsigned flags = next.flags | (after.keys > 0 ? 0 : last_tile * for_all_groups);
      if (at.keys >= 0) {
        const bool any = at.keys > 0;
        const int segment = ptx::uniform(at.segment), first = ptx::uniform(at.first);
        KeyTile described;
        described.first = first;
        described.keys = at.keys;
        described.used = at.flags & has_unused ? to_be_said : at.keys;
        described.next_tile = next.keys > 0 ? flags : 0;
        described.row = first + item.segment[segment].row;
        described.segment = any ? segment : nowhere;
        described.head = item.head_kv;
        described.batch = item.segment[segment].batch;
        wait_place();
        Barrier& full = control.k_full[k.stage];
        load_panels_if<tile.head_dim, tile.element_bytes>(
            shared + tile.k_offset() + k.stage * tile.k_bytes(), a.map[segment].k, full, tile.keys,
            described.row, described.head, described.batch, leads && any);
        describe(n - 2, described);
        ptx::mbarrier_arrive_expect_if(address(&full), any ? tile.k_bytes() : 0, leads);
        k.advance();
        __syncwarp();  // the places of tiles that have been waited for may be filled again
        if (next.keys == 0) break;
      } else if (next.keys >= 0) {
        if (leads) item.first_tile = flags;
      }
      at = next;
      next = after;
    }
    --n;  // `next` was none
  }
  wait_place();
  KeyTile none{};
  none.segment = no_more_tiles;
  describe(n, none);
}

// The values of the tiles that have been described, one after the other, by all lanes of one warp.
template <Tile tile>
struct LiveValues {
  const attn_sm90_mask_kernarg& a;
  Control& control;
  const unsigned shared;
  unsigned n = 0;
  RingAt<tile.v_stages> v{0, 0};

  // False: there are no more.
  __device__ __forceinline__ bool load() {
    const bool leads = threadIdx.x % 32 == 0;
    ptx::mbarrier_wait(address(&control.described[n % tile_slots]), n / tile_slots & 1);
    const KeyTile& at = control.tile[n % tile_slots];
    const int segment = ptx::uniform(at.segment), row = ptx::uniform(at.row);
    const int head = ptx::uniform(at.head), batch = ptx::uniform(at.batch);
    const bool any = segment >= 0, more = segment != no_more_tiles;
    if (!more && tile.vt_stages == 0) return false;  // else those who transpose V are told
    ptx::mbarrier_wait(address(&control.v_empty[v.stage]), v.parity ^ 1);
    Barrier& full = control.v_full[v.stage];
    ptx::mbarrier_arrive_expect_if(address(&full), any ? tile.v_bytes() : 0, leads);
    load_panels_if<tile.head_dim_v, tile.element_bytes>(
        shared + tile.v_offset() + v.stage * tile.v_bytes(), a.map[any ? segment : 0].v, full,
        tile.keys, row, head, batch, leads && any);
    v.advance();
    ++n;
    return more;
  }
};
template <Tile tile>
__device__ __forceinline__ void load_live_values(const attn_sm90_mask_kernarg& a, Control& control,
                                                 unsigned shared) {
  LiveValues<tile> values{a, control, shared};
  while (values.load()) {
  }
}

}  // namespace attn::sm90
