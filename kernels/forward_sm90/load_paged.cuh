// Loads K and V from pages: TMA boxes from each page that a tile touches.
// Tiles are cut from a segment's first key on, so that a box, whose keys divide tile and page, lies
// in one page. A segment that is not paged is one page with boxes of whole tiles.
#pragma once
#include "../ptx/uniform.h"
#include "load.cuh"

namespace attn::sm90 {

// Pages are known for 16 keys of a tile each, one to a lane.
template <Tile tile>
constexpr int pieces = tile.keys / 16;
// Lanes of the loading warp that write down a tile of keys. Each arrives itself at the barriers
// that announce it.
template <Tile tile>
constexpr int describing_lanes = pieces<tile> > key_words<tile> ? pieces<tile> : key_words<tile>;

// The page of the lane's keys, as the table has it. Entries for keys from walk.used on are not
// read. Entries for keys before first_seen(item) are read where a tile begins earlier, and may be
// anything: keys_there() leaves these keys out, so their scores are hidden and their V is cleared.
template <Tile tile>
__device__ __forceinline__ int look_up(const attn_sm90_paged_kernarg& a, const Item& item,
                                       const ItemWalk<tile>& walk) {
  const int key = 16 * (threadIdx.x % 32), segment = walk.at.segment;
  if (key >= min(walk.used, tile.keys)) return nowhere;
  const attn_pages& pages = a.pages[segment];
  if (!pages.block_table) return 0;
  const unsigned row = walk.at.first + item.segment[segment].row + key;
  return pages.block_table[item.segment[segment].batch * (long long)pages.max_pages +
                           row / pages.page_size];
}
// A bit for each lane whose page there is.
__device__ __forceinline__ unsigned pages_there(const attn_pages& pages, int page) {
  return __ballot_sync(0xffffffff, unsigned(page) < unsigned(pages.num_pages));
}

// A tile's flags: if some of its keys do not exist, it is not fully visible.
template <Tile tile>
__device__ __forceinline__ unsigned paged_flags(const Item& item, const ItemWalk<tile>& walk,
                                                unsigned there) {
  const int keys = min(walk.used, tile.keys);
  if (there == low_bits((keys + 15) / 16) && walk.at.first >= first_seen(item)) [[likely]]
    return walk.flags;
  return walk.flags & ~(sees_all * for_all_groups) | has_unused * for_all_groups;
}
// 32 keys of a tile: those that are there, and not before `begin` or from `end` on.
__device__ __forceinline__ unsigned keys_there(unsigned there, int word, int begin, int end) {
  const unsigned both = there >> 2 * word;
  return ((both & 1 ? 0xffff : 0) | (both & 2 ? 0xffff0000 : 0)) & low_bits(end - 32 * word) &
         ~low_bits(begin - 32 * word);
}

// A panel of a box, which a lane asks for; some lanes ask for nothing. By all lanes of one warp.
template <int columns, Tile tile>
struct Box {
  bool asks;
  int panel, key;      // its first key in the tile
  int row, batch;      // its place, in a page or not
  unsigned all_bytes;  // of all lanes

  __device__ __forceinline__ Box(const attn_sm90_paged_kernarg& a, const KeyTile& at,
                                 const int (&pages_of_tile)[max_pieces]) {
    constexpr int width = panels(columns);
    static_assert(pieces<tile> <= max_pieces && pieces<tile> * width <= 32);
    const int lane = threadIdx.x % 32, keys = a.box_keys[at.segment];
    const attn_pages& pages = a.pages[at.segment];
    panel = lane % width;
    key = lane / width * keys;
    const int page = key < tile.keys ? pages_of_tile[key / 16] : nowhere;
    asks = page != nowhere;
    row = at.row + key;
    batch = at.batch;
    if (pages.block_table) {
      row = unsigned(row) % pages.page_size;
      batch = page;
    }
    all_bytes = __popc(__ballot_sync(0xffffffff, asks)) * keys * 128;
  }
  __device__ __forceinline__ void load(unsigned to, const attn_tensor_map& map, Barrier& full,
                                       int head) const {
    if (asks)
      ptx::tma_load(to + (panel * tile.keys + key) * 128, &map, address(&full), 64 * panel, row,
                    head, batch);
    __syncwarp();
  }
};

// One warp loads the keys and finds the pages, one tile ahead; another loads the values. All lanes
// of both go one way.
template <Tile tile>
__device__ __forceinline__ void load_paged_keys(const attn_sm90_paged_kernarg& a, Control& control,
                                                unsigned shared) {
  const int lane = threadIdx.x % 32;
  const bool leads = lane == 0, describes = lane < describing_lanes<tile>;
  RingAt<tile.k_stages> k{0, 0};  // of the next tile
  const auto wait_place = [&] {
    ptx::mbarrier_wait(address(&control.k_empty[k.stage]), k.parity ^ 1);
  };
  unsigned n = 0;
  for (unsigned count = 0;; ++count) {
    Item& item = control.item[count % item_slots];
    ptx::mbarrier_wait(address(&control.item_full[count % item_slots]), count / item_slots & 1);
    if (item.b < 0) break;
    ItemWalk<tile> walk(item, a.down);
    walk.look(item);
    int page = look_up<tile>(a, item, walk);
    unsigned there = pages_there(a.pages[walk.at.segment], page);
    if (leads) item.first_tile = paged_flags<tile>(item, walk, there);
    __syncwarp();
    for (bool ending = false, more = true; more; ++n) {
      const unsigned slot = n % tile_slots;
      const int segment = ptx::uniform(walk.at.segment), first = ptx::uniform(walk.at.first);
      KeyTile at;
      at.first = first;
      at.keys = walk.keys;
      at.used = walk.used;
      at.next_tile = 0;
      at.row = first + item.segment[segment].row;
      at.segment = segment;
      at.head = item.head_kv;
      at.batch = item.segment[segment].batch;
      if (lane < pieces<tile>) control.page[slot][lane] = there >> lane & 1 ? page : nowhere;
      if (lane < key_words<tile>)
        control.blocks[slot].seen[lane] =
            keys_there(there, lane, first_seen(item) - first, walk.used);
      __syncwarp();
      if (!ending && is_ending<tile>(item, a.down, first)) {
        ptx::mbarrier_arrive_if(address(&control.ending), leads);
        ending = true;
      }
      more = walk.next(item);
      if (more) page = look_up<tile>(a, item, walk);  // comes while the place is waited for
      const Box<tile.head_dim, tile> box(a, at, control.page[slot]);
      wait_place();
      __syncwarp();
      Barrier& full = control.k_full[k.stage];
      box.load(shared + tile.k_offset() + k.stage * tile.k_bytes(), a.map[segment].k, full,
               at.head);
      if (more) {
        there = pages_there(a.pages[walk.at.segment], page);
        at.next_tile = paged_flags<tile>(item, walk, there);
      }
      if (leads) control.tile[slot] = at;
      __syncwarp();
      ptx::mbarrier_arrive_if(address(&control.described[slot]), describes);
      ptx::mbarrier_arrive_if(address(&full), describes && !leads);
      ptx::mbarrier_arrive_expect_if(address(&full), box.all_bytes, leads);
      k.advance();
    }
  }
  wait_place();
  if (leads) control.tile[n % tile_slots].segment = no_more_tiles;
  ptx::mbarrier_arrive_if(address(&control.described[n % tile_slots]), describes);
}

template <Tile tile>
__device__ __forceinline__ void load_paged_values(const attn_sm90_paged_kernarg& a,
                                                  Control& control, unsigned shared) {
  const bool leads = threadIdx.x % 32 == 0;
  RingAt<tile.v_stages> v{0, 0};
  for (unsigned n = 0;; ++n) {
    const unsigned slot = n % tile_slots;
    ptx::mbarrier_wait(address(&control.described[slot]), n / tile_slots & 1);
    const KeyTile& at = control.tile[slot];
    const int segment = ptx::uniform(at.segment);
    if (segment == no_more_tiles) return;
    const Box<tile.head_dim_v, tile> box(a, at, control.page[slot]);
    ptx::mbarrier_wait(address(&control.v_empty[v.stage]), v.parity ^ 1);
    __syncwarp();
    Barrier& full = control.v_full[v.stage];
    box.load(shared + tile.v_offset() + v.stage * tile.v_bytes(), a.map[segment].v, full, at.head);
    ptx::mbarrier_arrive_expect_if(address(&full), box.all_bytes, leads);
    v.advance();
  }
}

}  // namespace attn::sm90
