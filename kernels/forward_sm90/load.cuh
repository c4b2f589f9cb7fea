// The warpgroup that loads: queries of items, keys and values tile by tile, through the copy
// engine.
#pragma once
#include <type_traits>

#include "../ptx/load_shared.h"
#include "../ptx/mbarrier.h"
#include "../ptx/tma.h"
#include "config.h"
#include "items.cuh"
#include "query_list.cuh"

namespace attn::sm90 {

template <int columns, int element_bytes = 2>
__device__ __forceinline__ void load_panels(unsigned to, const attn_tensor_map& map, Barrier& full,
                                            int rows, int row, int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < panels(columns, element_bytes); ++panel)
    ptx::tma_load(to + panel * rows * 128, &map, address(&full),
                  panel_columns(element_bytes) * panel, row, head, batch);
}

// For the lanes whose `loads` is true; without a branch, after which lanes would diverge.
template <int columns, int element_bytes = 2>
__device__ __forceinline__ void load_panels_if(unsigned to, const attn_tensor_map& map,
                                               Barrier& full, int rows, int row, int head,
                                               int batch, bool loads) {
#pragma unroll
  for (int panel = 0; panel < panels(columns, element_bytes); ++panel)
    ptx::tma_load_if(to + panel * rows * 128, &map, address(&full),
                     panel_columns(element_bytes) * panel, row, head, batch, loads);
}

template <int columns, int element_bytes = 2>
__device__ __forceinline__ void prefetch_panels(const attn_tensor_map& map, int row, int head,
                                                int batch) {
#pragma unroll
  for (int panel = 0; panel < panels(columns, element_bytes); ++panel)
    ptx::tma_prefetch(&map, panel_columns(element_bytes) * panel, row, head, batch);
}

// Prefetches what the block needs first into L2. Called by one thread before it may read memory, so
// only if no length has to be read.
template <Tile tile>
__device__ __forceinline__ void prefetch_first(const attn_sm90_forward_kernarg& a) {
  const auto& segment = a.segment[0];
  if (a.cu_seqlens_q || segment.cu_seqlens || segment.seqlens || a.kv_begin ||
      a.positions.query_start)
    return;
  if (a.num_segments != 1 || segment.capacity == 0 || a.part_keys > 0) return;
  const QueryTile at = item_queries<tile>(a, blockIdx.x / tile.blocks);
  const int block = block_of_cluster<tile>(), all_row = at.tile * tile.item_rows();
  const int row = all_row + (tile.heads ? 0 : block * tile.rows()), head = at.h / a.group;
  const int last_row = min(all_row + tile.item_rows(), a.seqlen_q) - 1, length = segment.capacity;
  const int low = clamp(a.mask.keys(all_row, a.seqlen_q, length).begin, 0, length);
  const int high = clamp(a.mask.keys(last_row, a.seqlen_q, length).end, 0, length);
  if (low >= high) return;
  const int step = a.down ? -tile.keys : tile.keys;
  const int key =
      (a.down ? low + (high - 1 - low) / tile.keys * tile.keys : low) + block * tile.loaded_keys();
#pragma unroll
  for (int part = 0; part < tile.q_parts(); ++part)
    prefetch_panels<tile.head_dim, tile.element_bytes>(a.q, row + part * tile.q_part_rows(), at.h,
                                                       at.b);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    prefetch_panels<tile.head_dim, tile.element_bytes>(a.map[0].k, key + n * step, head, at.b);
    prefetch_panels<tile.head_dim_v, tile.element_bytes>(a.map[0].v, key + n * step, head, at.b);
  }
}

// The part of a tile that each block of a cluster loads for all.
template <int columns, Tile tile>
__device__ __forceinline__ void load_tile(unsigned to, const attn_tensor_map& map, Barrier& full,
                                          int row, int head, int batch) {
  if constexpr (tile.blocks == 1) {
    load_panels<columns, tile.element_bytes>(to, map, full, tile.keys, row, head, batch);
  } else {
    static_assert(tile.keys % (8 * tile.blocks) == 0);
    const int first = tile.loaded_keys() * block_of_cluster<tile>();
#pragma unroll
    for (int panel = 0; panel < panels(columns, tile.element_bytes); ++panel)
      ptx::tma_load_to_all(to + panel * tile.keys * 128 + first * 128, &map, address(&full),
                           panel_columns(tile.element_bytes) * panel, row + first, head, batch,
                           (1 << tile.blocks) - 1);
  }
}

struct NoList {
  const attn_sm90_forward_kernarg& a;
};
template <Tile tile, unsigned with>
using ListOf = std::conditional_t<(with & with_pages) != 0, QueryList<tile>, NoList>;

// The item that the first block of a cluster takes for both: the second one is sent it.
// taken: items that have been taken so before. By all lanes of one warp of each block.
template <Tile tile>
__device__ __forceinline__ unsigned next_item_of_both(const attn_sm90_forward_kernarg& a,
                                                      Control& control, unsigned items,
                                                      unsigned taken) {
  static_assert(tile.blocks == 2);
  const bool leads = threadIdx.x % 32 == 0;
  unsigned index = 0;
  if (block_of_cluster<tile>() == 0) {
    ptx::mbarrier_wait(address(&control.taken_read), taken & 1 ^ 1);
    if (leads) {
      index = next_item<tile>(a, items);
      ptx::store_async_at(address(&control.taken_item), address(&control.taken), 1, index);
    }
    return __shfl_sync(0xffffffff, index, 0);
  }
  ptx::mbarrier_arrive_expect_if(address(&control.taken), sizeof(unsigned), leads);
  ptx::mbarrier_wait(address(&control.taken), taken & 1);
  index = *const_cast<volatile unsigned*>(&control.taken_item);
  __syncwarp();
  // Behind the last one the first block may have ended.
  if (leads && index < items) ptx::mbarrier_arrive_at(address(&control.taken_read), 0);
  return index;
}

// One warp takes items, describes them and loads their queries: an item when the one before it is
// ending. Where Q has one place that is before the place is free.
template <Tile tile, unsigned with>
__device__ __forceinline__ void load_items(const Kernarg<with>& a, Control& control,
                                           unsigned shared) {
  using Q = Ring<tile.q_stages>;
  // Nobody reads the item that was in its place any more.
  static_assert(item_slots >= tile.q_stages + 3);
  const bool leads = threadIdx.x % 32 == 0;
  unsigned index = blockIdx.x / tile.blocks;
  const unsigned first = takers<tile>(a).first;
  bool helps = false;
  if constexpr (with & with_pages) helps = a.helped > 0;
  unsigned items = a.items;
  ListOf<tile, with> list{a};
  if constexpr (with & with_pages)
    if (a.lists) items = list.count();
  ItemOrder order;
  bool ordered = false;
  const auto queries = [&](unsigned index) {
    if constexpr (with & with_pages)
      if (a.lists) return list.find(index, items);
    return item_queries<tile>(a, index);
  };
  const auto take = [&](unsigned taken) {
    if constexpr (with & with_mask) {
      if (sorts_items(a)) {
        if (!ordered) {
          ptx::mbarrier_wait(address(&control.listed), 0);
          order.look(*a.order);
          ordered = true;
        }
        index = order.take(a);
        return;
      }
    }
    if constexpr (tile.blocks > 1)
      index = next_item_of_both<tile>(a, control, items, taken - 1);
    else
      index = __shfl_sync(0xffffffff, leads ? next_item<tile>(a, items) : 0, 0);
  };
  for (unsigned taken = 0, count = 0;; ++taken) {
    Item& item = control.item[count % item_slots];
    const int q = Q::stage(count);
    const auto wait_place = [&](int part) {
      ptx::mbarrier_wait(address(&control.q_empty[q][part]), Q::parity(count) ^ 1);
    };
    if (tile.q_stages > 1) wait_place(0);
    // Not before: who is done early shall have the longest item that is left.
    if (count > 0 && items > first) ptx::mbarrier_wait(address(&control.ending), count - 1 & 1);
    if (taken > 0 || helps) take(taken);
    const bool any = index < items;
    if (any) {
      describe<tile>(a, queries(index), item);
      __syncwarp();
      if constexpr (with & with_mask) narrow<tile>(a.block_mask, item);
      if constexpr (with & with_pages || with == with_fp8_and_score) begin_at_tile<tile>(item);
      if constexpr (with & with_fp8) describe_scales<with>(a, item);
      if (item.low >= item.high) {
        store_unseeing<tile>(a, item);
        __syncwarp();
        continue;
      }
    } else {
      ptx::store_shared_if(address(&item.b), ~0u, leads);
    }
    ptx::mbarrier_arrive_if(address(&control.item_full[count % item_slots]), leads);
#pragma unroll
    for (int part = 0; part < tile.q_parts(); ++part) {
      Barrier& full = control.q_full[q][part];
      if (tile.q_stages == 1) wait_place(part);
      if (leads && any) {
        const int row = part * tile.q_part_rows();
        ptx::mbarrier_arrive_expect(address(&full), tile.q_bytes() / tile.q_parts());
        load_panels<tile.head_dim, tile.element_bytes>(
            shared + tile.q_offset() + q * tile.q_bytes() + row * 128, a.q, full, tile.rows(),
            item.q_begin + item.row + row, item.h, a.cu_seqlens_q || a.part_keys > 0 ? 0 : item.b);
      }
      ptx::mbarrier_arrive_if(address(&full), leads && !any);
    }
    if (!any) return;
    ++count;
  }
}

// Loads tiles of keys and values. V of a tile is loaded after K of a later one, in the order in
// which their stages become free.
template <Tile tile>
struct Loader {
  // fp8: a stage of V is free as soon as the previous tile is transposed.
  static constexpr unsigned behind = tile.vt_stages > 0 ? 0 : tile.k_stages - tile.v_stages + 1;

  const attn_sm90_forward_kernarg& a;
  Control& control;
  const unsigned shared;
  unsigned count = 0, values = 0;      // tiles whose K, and whose V, have been requested
  RingAt<tile.k_stages> next_k{0, 0};  // the stages of the next ones
  RingAt<tile.v_stages> next_v{0, 0};

  // The next tile, which begins at position `first` of a segment. tell: writes keys, used and
  // next_tile. It runs while the loader would wait for a stage; for the first tile of an item,
  // which consumers wait for, it runs after the copy has been started.
  template <class Tell>
  __device__ __forceinline__ void load(const Item& item, int segment_index, int first, bool begins,
                                       const Tell& tell) {
    const Item::Segment segment = item.segment[segment_index];
    const int k = next_k.stage;
    Barrier& full = control.k_full[k];
    KeyTile at{};
    at.first = first;
    at.row = first + segment.row;
    at.segment = segment_index;
    at.head = item.head_kv;
    at.batch = segment.batch;
    if (!begins) tell(at);
    wait_free(control.k_empty[k], control.k_there[k], next_k.parity);
    next_k.advance();
    load_tile<tile.head_dim, tile>(shared + tile.k_offset() + k * tile.k_bytes(),
                                   a.map[segment_index].k, full, at.row, at.head, at.batch);
    if (begins) tell(at);
    control.tile[count++ % tile_slots] = at;
    ptx::mbarrier_arrive_expect(address(&full), tile.k_bytes());
    if (values + behind < count) load_values();
  }
  // Until the item is described. What is left of V does not wait for it, unless another block loads
  // half of it, whose thread may see the item sooner: both load in the same order.
  __device__ __forceinline__ void wait_item(unsigned index) {
    const unsigned full = address(&control.item_full[index % item_slots]);
    const unsigned parity = index / item_slots & 1;
    if (tile.blocks == 1 && !ptx::mbarrier_test(full, parity)) finish(count);
    ptx::mbarrier_wait(full, parity);
  }
  // Until a place is free for the phase of this parity; in a cluster in both blocks, each of which
  // fills half of it in both.
  __device__ __forceinline__ static void wait_free(Barrier& empty, Barrier& there,
                                                   unsigned parity) {
    ptx::mbarrier_wait(address(&empty), parity ^ 1);
    if constexpr (tile.blocks > 1) {
      static_assert(tile.blocks == 2);
      ptx::mbarrier_arrive_at(address(&there), block_of_cluster<tile>() ^ 1);
      ptx::mbarrier_wait(address(&there), parity);
    }
  }
  __device__ __forceinline__ void finish(unsigned behind_values) {
#pragma unroll 1
    while (values < behind_values) load_values();
  }
  // fp8: tells those who transpose V that there is no more.
  __device__ __forceinline__ void end_values() {
    wait_free(control.v_empty[next_v.stage], control.v_there[next_v.stage], next_v.parity);
    control.tile[count % tile_slots].segment = no_more_tiles;
    ptx::mbarrier_arrive(address(&control.v_full[next_v.stage]));
  }
  // V of the next tile.
  __device__ __forceinline__ void load_values() {
    const KeyTile at = control.tile[values++ % tile_slots];
    const int v = next_v.stage;
    wait_free(control.v_empty[v], control.v_there[v], next_v.parity);
    next_v.advance();
    Barrier& full = control.v_full[v];
    ptx::mbarrier_arrive_expect(address(&full), tile.v_bytes());
    load_tile<tile.head_dim_v, tile>(shared + tile.v_offset() + v * tile.v_bytes(),
                                     a.map[at.segment].v, full, at.row, at.head, at.batch);
  }
};

// Whether few tiles of the item are to be loaded, the next one from `first` on: then another is
// taken.
template <Tile tile>
__device__ __forceinline__ bool is_ending(const Item& item, bool down, int first) {
  const int keys = down ? first + tile.keys - item.low : item.high - first;
  return keys <= 4 * tile.keys;
}

// One thread loads the keys and values of the items.
template <Tile tile, unsigned with>
__device__ __forceinline__ void load_keys(const Kernarg<with>& a, Control& control,
                                          unsigned shared) {
  Loader<tile> loader{a, control, shared};
  for (unsigned count = 0;; ++count) {
    Item& item = control.item[count % item_slots];
    loader.wait_item(count);
    if (item.b < 0) break;
    const unsigned item_begin = loader.count;
    ItemWalk<tile> walk(item, a.down);
    for (bool begins = true, ending = false, more = true; more; begins = false) {
      const int first = walk.at.first;
      if (!ending && is_ending<tile>(item, a.down, first)) {
        ptx::mbarrier_arrive(address(&control.ending));
        ending = true;
      }
      if constexpr (with == with_bias)
        for (unsigned& word : control.blocks[loader.count % tile_slots].seen) word = 0;
      loader.load(item, walk.at.segment, first, begins, [&](KeyTile& described) {
        if (begins) {
          walk.look(item);
          item.first_tile = walk.flags;
        }
        described.keys = walk.keys;
        described.used = walk.used;
        if constexpr (with == with_fp8_and_score)
          describe_scales<tile>(a, item, described, control.scales[loader.count % tile_slots]);
        more = walk.next(item);
        described.next_tile = walk.flags;
      });
    }
    // In a cluster V of the item before is loaded by now, which the place of the next one's Q waits
    // for, however few tiles this one has.
    if constexpr (tile.blocks > 1) loader.finish(item_begin);
  }
  loader.finish(loader.count);
  if constexpr (tile.vt_stages > 0) loader.end_values();
}

}  // namespace attn::sm90
