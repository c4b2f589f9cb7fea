// Attention forward with wgmma and the copy engine. A block stays on its multiprocessor and takes
// work items, tiles of queries of one head, one after the other. One warpgroup loads; each of the
// others has 64 of the queries: their scores, weights, sums and softmax are in its registers. The
// tiles of keys of all items form one sequence: the scores of the next tile are computed together
// with the sums of the current one, across the border of two items too. The warpgroups take turns,
// so that one computes its softmax while the other's products run.
#pragma once
#include "../common/element.cuh"
#include "../common/lengths.cuh"
#include "../common/no_keys.cuh"
#include "../common/softmax.cuh"
#include "../common/store.cuh"
#include "../common/tanh.cuh"
#include "../ptx/cluster.h"
#include "../ptx/cp_async.h"
#include "../ptx/ex2.h"
#include "../ptx/grid.h"
#include "../ptx/load_shared.h"
#include "../ptx/max.h"
#include "../ptx/mbarrier.h"
#include "../ptx/tma.h"
#include "../ptx/uniform.h"
#include "../ptx/warpgroup.h"
#include "../ptx/wgmma.h"
#include "forward_args.h"
#include "item_order.cuh"
#include "key_walk.h"
#include "live_tiles.cuh"
#include "tiles.h"

namespace attn::sm90 {

using namespace device;

// What a kernel can do beyond masks of ranges.
enum : unsigned {
  plain = 0,
  with_score = 1,              // softcap, ALiBi, a scale that is not above 0
  with_mask = 2,               // block masks
  with_bias = 4 | with_score,  // a bias beside those
};

template <unsigned with>
struct KernargOf {
  using type = attn_sm90_forward_kernarg;
};
template <>
struct KernargOf<with_mask> {
  using type = attn_sm90_mask_kernarg;
};
template <>
struct KernargOf<with_bias> {
  using type = attn_sm90_bias_kernarg;
};
template <unsigned with>
using Kernarg = typename KernargOf<with>::type;

// Shared memory
// ------------------------------------------------------------------------------------------------

// A work item as the warpgroup that loads describes it to the others.
struct Item {
  int b, h;  // b < 0: there are no more
  int head_kv;
  int row;  // first query
  int seqlen_q, seqlen_kv;
  int q_begin;    // packed q: row of the sequence's query 0
  int low, high;  // keys that some of its queries see; in a cluster, of the queries of all blocks
  int used;       // keys from here on are not seen by any query of the sequence
  int lower, upper;  // query i sees keys from i + lower up to i + upper
  struct Segment {
    int end;    // position behind the segment's last key
    int row;    // the key at position j lies in row j + row of the tensor,
    int batch;  // in this entry
  } segment[attn_sm90_max_segments];
  int4
      see[max_groups];  // per warpgroup: keys [x, y) are seen by some of its queries, [z, w) by all
  unsigned first_tile;  // flags of its first tile of keys, written before that one's k_full
};

// A tile of keys of an item.
struct KeyTile {
  int first;                      // position of its first key
  int keys;                       // that some query of the item sees, of its segment
  int used;                       // rows of V from here on are nobody's
  unsigned next_tile;             // flags of the item's next tile, if any, see live_tiles.cuh
  int row, segment, head, batch;  // where it lies; segment: its number or one of these
};
enum : int { nowhere = -1, no_more_tiles = -2 };
using Barrier = unsigned long long;
struct Control {
  Barrier item_full[item_slots];
  Barrier q_full[max_stages][max_groups];  // per part of Q; the item's description too
  Barrier q_empty[max_stages][max_groups];
  Barrier k_full[max_stages], k_empty[max_stages], v_full[max_stages], v_empty[max_stages];
  Item item[item_slots];
  KeyTile tile[tile_slots];       // written before k_full
  TileBlocks blocks[tile_slots];  // with a block mask or a bias, of the same tiles
  // The warps have said what they see of the tile: with a bias, and with a block mask if the tile
  // has_unused.
  Barrier said[tile_slots];
  Barrier listed;                 // with a block mask: the items are listed, see item_order.cuh
  Barrier described[tile_slots];  // with a block mask: the tile is written
  Barrier ending;                 // of the item that was described last, few tiles are to be loaded
  // In a cluster: the other block has the place free too.
  Barrier k_there[max_stages], v_there[max_stages];
};
static_assert(sizeof(Control) <= control_bytes);

__device__ __forceinline__ unsigned address(const void* p) {
  return unsigned(__cvta_generic_to_shared(p));
}

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
// Where the n-th tile of a ring of stages lies, and the parity of the phase that fills it.
template <int stages>
struct Ring {
  static __device__ __forceinline__ int stage(unsigned n) { return n % stages; }
  static __device__ __forceinline__ unsigned parity(unsigned n) { return n / stages & 1; }
};

// Producer
// -----------------------------------------------------------------------------------------------------

// The item that a block takes after its first: one that no other has taken. Whoever takes the last
// one leaves the counter as it was.
__device__ __forceinline__ unsigned next_item(const attn_sm90_forward_kernarg& a) {
  if (a.items <= gridDim.x) return a.items;
  const unsigned before = atomicAdd(a.taken, 1);
  if (before == a.items - 1) *a.taken = 0;
  return gridDim.x + before;
}

template <Tile tile>
__device__ __forceinline__ int block_of_cluster() {
  return tile.blocks > 1 ? blockIdx.x % tile.blocks : 0;
}
// In a cluster an address in shared memory has its block's number above these bits. The descriptors
// of wgmma have not; all else needs it.
template <Tile tile>
__device__ __forceinline__ unsigned within_block(unsigned shared) {
  return tile.blocks > 1 ? shared & 0x3ffff : shared;
}

template <Tile tile>
__device__ __forceinline__ unsigned tile_flags(const Item& item, const KeyWalk<tile.keys>& at) {
  unsigned flags = at.ends(item) ? last_tile * for_all_groups : 0;
  if (min(item.segment[at.segment].end, item.used) < at.first + tile.keys)
    flags |= has_unused * for_all_groups;
#pragma unroll
  for (int g = 0; g < tile.groups; ++g) {
    const int4 see = item.see[g];
    const bool whole = at.first + tile.keys <= at.end;
    if (at.first < see.y && at.first + at.count() > see.x) flags |= sees_some << 4 * g;
    if (whole && at.first >= see.z && at.first + tile.keys <= see.w) flags |= sees_all << 4 * g;
  }
  return flags;
}

// The walk over an item's tiles with what is said of each.
template <Tile tile>
struct ItemWalk {
  KeyWalk<tile.keys> at;
  int keys, used;  // see KeyTile
  unsigned flags;
  // The following tiles of the segment that begin at these positions, both included, are seen whole
  // by all and not the last one on the way: most tiles, which two comparisons tell.
  int low, high;

  // Before `look` only `at` may be used.
  __device__ __forceinline__ ItemWalk(const Item& item, bool down) : at(item, down) {}
  __device__ __forceinline__ void look(const Item& item) {
    const int behind_used = min(item.segment[at.segment].end, item.used);
    keys = at.count();
    used = behind_used - at.first;
    flags = tile_flags<tile>(item, at);
    low = at.step < 0 ? at.last + 1 : at.first;
    high = min(at.end, behind_used) - tile.keys;
    if (at.step > 0) high = min(high, at.last - 1);
#pragma unroll
    for (int g = 0; g < tile.groups; ++g) {
      low = max(low, item.see[g].z);
      high = min(high, item.see[g].w - tile.keys);
    }
  }
  // false: there is none.
  __device__ __forceinline__ bool next(const Item& item) {
    const int first = at.first + at.step;
    if (first >= low && first <= high) [[likely]] {
      at.first = first;
      keys = used = tile.keys;
      flags = seen_whole<tile>;
      return true;
    }
    if (at.ends(item)) return false;
    at.next(item);
    look(item);
    return true;
  }
};

// By all lanes of one warp. index: of the cluster's item, of which each block has a part.
template <Tile tile>
__device__ __forceinline__ void describe(const attn_sm90_forward_kernarg& a, unsigned index,
                                         Item& item) {
  constexpr int rows = tile.rows(), all_rows = tile.item_rows();
  const int lane = threadIdx.x % 32;
  const QueryTile at = item_queries<tile>(a, index);
  const Span queries = a.cu_seqlens_q ? packed_span(a.cu_seqlens_q, at.b, a.total_q, a.seqlen_q)
                                      : Span{0, a.seqlen_q};
  int length = 0;
  for (int i = 0; i < a.num_segments; ++i) {
    const Span span = segment_span(a.segment[i], at.b);
    const int row = int(span.begin) - length;
    length += span.length;
    if (lane == 0) item.segment[i] = {length, row, a.segment[i].cu_seqlens ? 0 : at.b};
  }
  constexpr int unbounded = 1 << 30;
  const KeyBand band = a.mask.band(queries.length, length);
  const int lower = clamp(band.lower, -unbounded, unbounded);
  const int upper = clamp(band.upper, -unbounded, unbounded);
  // Lane g finds what warpgroup g sees, the next one what the item sees, the next the sequence.
  const int all_row = at.tile * all_rows, item_row = all_row + rows * block_of_cluster<tile>();
  const int row = lane < tile.groups ? item_row + 64 * lane : lane == tile.groups ? all_row : 0;
  const int behind = min(lane < tile.groups    ? row + 64
                         : lane == tile.groups ? all_row + all_rows
                                               : queries.length,
                         queries.length);
  int4 see = make_int4(0, 0, 0, 0);
  if (row < behind)
    see = make_int4(clamp(row + lower, 0, length), clamp(behind - 1 + upper, 0, length),
                    clamp(behind - 1 + lower, 0, length), clamp(row + upper, 0, length));
  // Lane 0 writes all of it, for it alone says that it is there.
  const auto of = [](int x, int lane) { return __shfl_sync(0xffffffff, x, lane); };
#pragma unroll
  for (int g = 0; g < tile.groups; ++g) {
    const int4 sees = make_int4(of(see.x, g), of(see.y, g), of(see.z, g), of(see.w, g));
    if (lane == 0) item.see[g] = sees;
  }
  const int low = of(see.x, tile.groups), high = of(see.y, tile.groups);
  const int used = of(see.y, tile.groups + 1);
  if (lane == 0) {
    item.low = low;
    item.high = high;
    item.used = used;
    item.b = at.b;
    item.h = at.h;
    item.head_kv = at.h / a.group;
    item.row = item_row;
    item.q_begin = int(queries.begin);
    item.seqlen_q = queries.length;
    item.seqlen_kv = length;
    item.lower = lower;
    item.upper = upper;
  }
}

// The rows of an item that sees no key, by one warp.
template <Tile tile>
__device__ __forceinline__ void store_unseeing(const attn_sm90_forward_kernarg& a,
                                               const Item& item) {
  const int behind = min(item.row + tile.rows(), item.seqlen_q);
  for (int row = item.row; row < behind; ++row) {
    const long long at = (a.cu_seqlens_q ? 0 : item.b * a.out_stride[0]) +
                         ((long long)item.q_begin + row) * a.out_stride[1] +
                         item.h * a.out_stride[2];
    const long long lse_at = a.cu_seqlens_q
                                 ? item.h * a.total_q + item.q_begin + row
                                 : (item.b * (long long)a.heads_q + item.h) * a.seqlen_q + row;
    store_no_keys(a, at, lse_at, a.sinks ? a.sinks[item.h] : -infinity());
  }
}

template <int columns>
__device__ __forceinline__ void load_panels(unsigned to, const attn_tensor_map& map, Barrier& full,
                                            int rows, int row, int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < panels(columns); ++panel)
    ptx::tma_load(to + panel * rows * 128, &map, address(&full), 64 * panel, row, head, batch);
}

// By those lanes for which `loads` is true; no branch, after which lanes would go on apart.
template <int columns>
__device__ __forceinline__ void load_panels_if(unsigned to, const attn_tensor_map& map,
                                               Barrier& full, int rows, int row, int head,
                                               int batch, bool loads) {
#pragma unroll
  for (int panel = 0; panel < panels(columns); ++panel)
    ptx::tma_load_if(to + panel * rows * 128, &map, address(&full), 64 * panel, row, head, batch,
                     loads);
}

template <int columns>
__device__ __forceinline__ void prefetch_panels(const attn_tensor_map& map, int row, int head,
                                                int batch) {
#pragma unroll
  for (int panel = 0; panel < panels(columns); ++panel)
    ptx::tma_prefetch(&map, 64 * panel, row, head, batch);
}

// Asks for what the block needs first, in L2: by one thread, before it may read memory, so only
// where no length lies there.
template <Tile tile>
__device__ __forceinline__ void prefetch_first(const attn_sm90_forward_kernarg& a) {
  const auto& segment = a.segment[0];
  if (a.cu_seqlens_q || segment.cu_seqlens || segment.seqlens) return;
  if (a.num_segments != 1 || segment.capacity == 0) return;
  const QueryTile at = item_queries<tile>(a, blockIdx.x / tile.blocks);
  const int block = block_of_cluster<tile>(), all_row = at.tile * tile.item_rows();
  const int row = all_row + block * tile.rows(), head = at.h / a.group;
  const int last_row = min(all_row + tile.item_rows(), a.seqlen_q) - 1, length = segment.capacity;
  const int low = clamp(a.mask.keys(all_row, a.seqlen_q, length).begin, 0, length);
  const int high = clamp(a.mask.keys(last_row, a.seqlen_q, length).end, 0, length);
  if (low >= high) return;
  const int step = a.down ? -tile.keys : tile.keys;
  const int key =
      (a.down ? low + (high - 1 - low) / tile.keys * tile.keys : low) + block * tile.loaded_keys();
#pragma unroll
  for (int part = 0; part < tile.q_parts(); ++part)
    prefetch_panels<tile.head_dim>(a.q, row + part * tile.q_part_rows(), at.h, at.b);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    prefetch_panels<tile.head_dim>(a.map[0].k, key + n * step, head, at.b);
    prefetch_panels<tile.head_dim_v>(a.map[0].v, key + n * step, head, at.b);
  }
}

// The part of a tile that each block of a cluster loads for all.
template <int columns, Tile tile>
__device__ __forceinline__ void load_tile(unsigned to, const attn_tensor_map& map, Barrier& full,
                                          int row, int head, int batch) {
  if constexpr (tile.blocks == 1) {
    load_panels<columns>(to, map, full, tile.keys, row, head, batch);
  } else {
    static_assert(tile.keys % (8 * tile.blocks) == 0);
    const int first = tile.loaded_keys() * block_of_cluster<tile>();
#pragma unroll
    for (int panel = 0; panel < panels(columns); ++panel)
      ptx::tma_load_to_all(to + panel * tile.keys * 128 + first * 128, &map, address(&full),
                           64 * panel, row + first, head, batch, (1 << tile.blocks) - 1);
  }
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
  ItemOrder order;
  bool ordered = false;
  const auto take = [&] {
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
    if (tile.blocks > 1)
      index += gridDim.x / tile.blocks;
    else
      index = __shfl_sync(0xffffffff, leads ? next_item(a) : 0, 0);
  };
  for (unsigned taken = 0, count = 0;; ++taken) {
    Item& item = control.item[count % item_slots];
    const int q = Q::stage(count);
    const auto wait_place = [&](int part) {
      ptx::mbarrier_wait(address(&control.q_empty[q][part]), Q::parity(count) ^ 1);
    };
    if (tile.q_stages > 1) wait_place(0);
    // Not before: who is done early shall have the longest item that is left.
    if (count > 0 && a.items > gridDim.x)
      ptx::mbarrier_wait(address(&control.ending), count - 1 & 1);
    if (taken > 0) take();
    const bool any = index < a.items;
    if (any) {
      describe<tile>(a, index, item);
      __syncwarp();
      if constexpr (with & with_mask) narrow<tile>(a.block_mask, item);
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
        load_panels<tile.head_dim>(shared + tile.q_offset() + q * tile.q_bytes() + row * 128, a.q,
                                   full, tile.rows(), item.q_begin + item.row + row, item.h,
                                   a.cu_seqlens_q ? 0 : item.b);
      }
      ptx::mbarrier_arrive_if(address(&full), leads && !any);
    }
    if (!any) return;
    ++count;
  }
}

// Loads tiles of keys and values. V of a tile is loaded behind K of a later one, in the order in
// which their places become free.
template <Tile tile>
struct Loader {
  static constexpr unsigned behind = tile.k_stages - tile.v_stages + 1;

  const attn_sm90_forward_kernarg& a;
  Control& control;
  const unsigned shared;
  unsigned count = 0, values = 0;      // tiles whose K and whose V are under way
  RingAt<tile.k_stages> next_k{0, 0};  // where the next ones lie
  RingAt<tile.v_stages> next_v{0, 0};

  // The next tile, which begins at position `first` of a segment. tell: writes keys, used and
  // next_tile, which it finds while there is no place; for the first tile of an item, which is
  // waited for, while the copy engine works.
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
    if (tile.blocks == 1 && !ptx::mbarrier_test(full, parity)) finish();
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
  __device__ __forceinline__ void finish() {
#pragma unroll 1
    while (values < count) load_values();
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
template <Tile tile, bool biased>
__device__ __forceinline__ void load_keys(const attn_sm90_forward_kernarg& a, Control& control,
                                          unsigned shared) {
  Loader<tile> loader{a, control, shared};
  for (unsigned count = 0;; ++count) {
    Item& item = control.item[count % item_slots];
    loader.wait_item(count);
    if (item.b < 0) break;
    ItemWalk<tile> walk(item, a.down);
    for (bool begins = true, ending = false, more = true; more; begins = false) {
      const int first = walk.at.first;
      if (!ending && is_ending<tile>(item, a.down, first)) {
        ptx::mbarrier_arrive(address(&control.ending));
        ending = true;
      }
      if constexpr (biased)
        for (unsigned& word : control.blocks[loader.count % tile_slots].seen) word = 0;
      loader.load(item, walk.at.segment, first, begins, [&](KeyTile& described) {
        if (begins) {
          walk.look(item);
          item.first_tile = walk.flags;
        }
        described.keys = walk.keys;
        described.used = walk.used;
        more = walk.next(item);
        described.next_tile = walk.flags;
      });
    }
  }
  loader.finish();
}

// With a block mask one warp finds the tiles that it leaves, two ahead of the one whose keys it
// loads, and another loads the values, which would come late behind the search. All lanes of both
// go one way, and the first acts for them. An item that sees nothing has one tile, which nobody
// sees.
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
        described.keys = described.used = at.keys;
        described.next_tile = next.keys > 0 ? flags : 0;
        described.row = first + item.segment[segment].row;
        described.segment = any ? segment : nowhere;
        described.head = item.head_kv;
        described.batch = item.segment[segment].batch;
        wait_place();
        Barrier& full = control.k_full[k.stage];
        load_panels_if<tile.head_dim>(shared + tile.k_offset() + k.stage * tile.k_bytes(),
                                      a.map[segment].k, full, tile.keys, described.row,
                                      described.head, described.batch, leads && any);
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

template <Tile tile>
__device__ __forceinline__ void load_live_values(const attn_sm90_mask_kernarg& a, Control& control,
                                                 unsigned shared) {
  const bool leads = threadIdx.x % 32 == 0;
  RingAt<tile.v_stages> v{0, 0};
  for (unsigned n = 0;; ++n) {
    ptx::mbarrier_wait(address(&control.described[n % tile_slots]), n / tile_slots & 1);
    const KeyTile& at = control.tile[n % tile_slots];
    const int segment = ptx::uniform(at.segment), row = ptx::uniform(at.row);
    const int head = ptx::uniform(at.head), batch = ptx::uniform(at.batch);
    if (segment == no_more_tiles) return;
    const bool any = segment >= 0;
    ptx::mbarrier_wait(address(&control.v_empty[v.stage]), v.parity ^ 1);
    Barrier& full = control.v_full[v.stage];
    ptx::mbarrier_arrive_expect_if(address(&full), any ? tile.v_bytes() : 0, leads);
    load_panels_if<tile.head_dim_v>(shared + tile.v_offset() + v.stage * tile.v_bytes(),
                                    a.map[any ? segment : 0].v, full, tile.keys, row, head, batch,
                                    leads && any);
    v.advance();
  }
}

// Consumer
// -----------------------------------------------------------------------------------------------------

// Of one row of the lane's two, in the log2 domain.
struct RowState {
  float reference;  // weights are 2^(score - reference); `lowest`: the row has seen nothing
  float sum;        // of the weights in the lane's columns
  float rounding;   // what the products have beyond that, see start_weights
};

template <class T, Tile tile, unsigned with>
struct Consumer {
  static constexpr bool score = with & with_score, masked = with & with_mask,
                        biased = with == with_bias;
  static constexpr bool may_split = score;  // takes split_invariant, which costs the others time
  static constexpr bool bf16 = T::type == attn_element_bf16;
  static constexpr int keys = tile.keys, d_steps = tile.head_dim / 16, key_steps = keys / 16;
  static constexpr int panel = keys * 128, q_panel = tile.rows() * 128;
  using Q = Ring<tile.q_stages>;
  using K = Ring<tile.k_stages>;
  using V = Ring<tile.v_stages>;

  const Kernarg<with>& a;
  Control& control;
  const unsigned shared;  // within_block
  const int group;        // which of the warpgroups that compute
  const int warp, lane;

  using Scores = float[keys / 2];  // as wgmma leaves them, then weights
  unsigned p[key_steps][4];        // weights of the tile before, as wgmma takes them
  float o[tile.head_dim_v / 2];    // sums of weight * v
  RowState row_state[2];
  bool negative;  // the reference of some row of the warp
  bool unseen;    // with a bias: some of the tile's keys are not seen by any of the warp's queries
  unsigned said_parity = 0;  // with a block mask: of the next phase of each control.said

  // Named barriers 1..groups: whose turn it is.
  __device__ __forceinline__ void wait_turn() {
    if constexpr (tile.groups > 1) ptx::barrier_wait(1 + group, 256);
  }
  __device__ __forceinline__ void pass_turn() {
    if constexpr (tile.groups > 1) ptx::barrier_arrive(1 + (group + 1) % tile.groups, 256);
  }
  __device__ __forceinline__ void release(Barrier& empty) {
    if (lane == 0) ptx::mbarrier_arrive(address(&empty));
  }

  __device__ __forceinline__ const Item& item(unsigned index) const {
    return control.item[index % item_slots];
  }
  __device__ __forceinline__ const KeyTile& key_tile(unsigned n) const {
    return control.tile[n % tile_slots];
  }
  // Places in shared memory, in units of 16 bytes.
  __device__ __forceinline__ unsigned k_of(int stage) const {
    return (shared + tile.k_offset()) / 16 + stage * (tile.k_bytes() / 16);
  }
  __device__ __forceinline__ unsigned v_of(int stage) const {
    return (shared + tile.v_offset()) / 16 + stage * (tile.v_bytes() / 16);
  }
  __device__ __forceinline__ unsigned q_at(unsigned index) const {
    return (shared + tile.q_offset()) / 16 +
           (Q::stage(index) * tile.q_bytes() + group * 64 * 128) / 16;
  }
  __device__ __forceinline__ unsigned k_at(unsigned n) const { return k_of(K::stage(n)); }
  __device__ __forceinline__ unsigned v_at(unsigned n) const { return v_of(V::stage(n)); }

  __device__ __forceinline__ int q_part() const { return tile.q_parts() > 1 ? group : 0; }
  // Q of an item is in shared memory until release_q. False: there is no such item.
  __device__ __forceinline__ bool take_item(unsigned index) {
    ptx::mbarrier_wait(address(&control.q_full[Q::stage(index)][q_part()]), Q::parity(index));
    if (item(index).b < 0) return false;
    return true;
  }
  __device__ __forceinline__ void release_q(unsigned index) {
    release(control.q_empty[Q::stage(index)][q_part()]);
  }

  // s = Q K^T; to be waited for.
  __device__ __forceinline__ void start_scores(Scores& s, unsigned q_at, unsigned k_at) {
    const unsigned long long a_matrix = ptx::wgmma_descriptor(q_at, 0),
                             b_matrix = ptx::wgmma_descriptor(k_at, 0);
#pragma unroll
    for (int d = 0; d < d_steps; ++d) {
      const unsigned long long b_step = b_matrix + ((d / 4 * panel + d % 4 * 32) >> 4);
      ptx::wgmma<bf16>(s, a_matrix + ((d / 4 * q_panel + d % 4 * 32) >> 4), b_step, d > 0);
    }
    ptx::wgmma_commit();
  }
  // o += P V; to be waited for. Without `add` o starts at 0.
  __device__ __forceinline__ void start_sums(unsigned v_at, bool add) {
    const unsigned long long b_matrix = ptx::wgmma_descriptor(v_at, panel);
#pragma unroll
    for (int step = 0; step < key_steps; ++step)
      ptx::wgmma<bf16, true>(o, p[step], b_matrix + (step * 2048 >> 4), step > 0 || add);
    ptx::wgmma_commit();
  }

  // The same, waited for.
  __device__ __forceinline__ void add_sums(unsigned v_at, bool add) {
    ptx::pin(o);
    ptx::wgmma_fence();
    start_sums(v_at, add);
    ptx::wgmma_wait<0>();
    ptx::pin(o);
  }

  // V rows of keys that no query of the sequence sees, with a block mask or a bias no query of the
  // item, may hold anything, and 0 * NaN is NaN: they become zero. With a bias the warps that see
  // all keys do not wait for the others, which find that there is nothing to do.
  __device__ __forceinline__ void clear_unused(unsigned n) {
    const auto meet = [] { ptx::barrier_wait(1 + tile.groups, 128 * tile.groups); };
    const unsigned v = 16 * v_at(n) - shared + address(&control);  // not within_block
    unsigned seen[words];
#pragma unroll
    for (int word = 0; word < words; ++word) seen[word] = low_bits(key_tile(n).used - 32 * word);
    if (masked || biased) {
      const unsigned slot = n % tile_slots;
      ptx::mbarrier_wait(address(&control.said[slot]),
                         (biased ? n / tile_slots : said_parity >> slot) & 1);
      said_parity ^= 1u << slot;
      bool all = true;
#pragma unroll
      for (int word = 0; word < words; ++word) {
        // By lane 0, which alone gives the place free.
        if (lane == 0) seen[word] = control.blocks[slot].seen[word];
        seen[word] = __shfl_sync(0xffffffff, seen[word], 0);
        all = all && seen[word] == low_bits(keys - 32 * word);
      }
      if (all) return;
    }
#pragma unroll
    for (int word = 0; word < words; ++word) {
      const int chunks = 8 * min(32, keys - 32 * word);
#pragma unroll 1
      for (int i = threadIdx.x - 128; i < chunks; i += 128 * tile.groups) {
        if (seen[word] >> i / 8 & 1) continue;
#pragma unroll
        for (int column = 0; column < panels(tile.head_dim_v); ++column)
          asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(v + column * panel +
                                                                        (256 * word + i) * 16),
                       "r"(0)
                       : "memory");
      }
    }
    ptx::fence_async_shared();
    meet();
  }

  static constexpr float lowest = -3.402823466e38f;  // not -inf: differences of it are no NaN
  __device__ __forceinline__ void start_softmax() {
    row_state[0] = row_state[1] = {lowest, 0, 0};
    negative = true;
  }
  __device__ __forceinline__ void look_at_references() {
    negative = __any_sync(0xffffffff, (__float_as_int(row_state[0].reference) |
                                       __float_as_int(row_state[1].reference)) < 0);
  }

  // Row of the lane in the sequence.
  __device__ __forceinline__ int row(const Item& item, int half) const {
    return item.row + 64 * group + 16 * warp + lane / 4 + 8 * half;
  }

  // Of the lane's scores of a row, which are those of keys 8 n and 8 n + 1 from the lane's first
  // on, so many are of keys before this one.
  __device__ __forceinline__ static int scores_before(int key) {
    key = clamp(key, 0, keys);
    return key / 8 * 2 + min(key % 8, 2);
  }
  // As bits, which are moved to predicates seven at a time.
  __device__ __forceinline__ void mask(Scores& s, const Item& item, int first, int count) {
    const int lane_first = first + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = this->row(item, half);
      const int begin = scores_before(row + item.lower - lane_first);
      const int end = scores_before(min(row + item.upper - lane_first, count - lane % 4 * 2));
#pragma unroll
      for (int word = 0; word < keys / 4; word += 32) {
        const unsigned seen = low_bits(end - word) & ~low_bits(begin - word);
#pragma unroll
        for (int n = word; n < min(word + 32, keys / 4); ++n)
          if (!(seen >> n % 32 & 1)) s[n / 2 * 4 + 2 * half + n % 2] = -infinity();
      }
    }
  }

  // With a block mask: per row of the lane, the keys of a tile that it sees.
  static constexpr int words = (keys + 31) / 32;
  using Visible = unsigned[2][words];
  static constexpr bool early = tile.head_dim_v <= 128;  // there are registers for it beside scores

  // Of tile n. Notes which keys are seen.
  __device__ __forceinline__ void find_visible(const Item& item, unsigned n, unsigned flags,
                                               Visible& bits) {
    const KeyTile& at = key_tile(n);
    TileBlocks& blocks = control.blocks[n % tile_slots];
    constexpr int rows = early ? 2 : 1;  // at once
#pragma unroll
    for (int half = 0; half < 2; half += rows) {
      int row[rows];
      unsigned found[rows][words];
#pragma unroll
      for (int n = 0; n < rows; ++n) row[n] = this->row(item, half + n);
      visible_by_blocks<tile>(a.block_mask, &blocks.block[group * mask_blocks<tile>], at.first, row,
                              item.seqlen_kv - item.seqlen_q, found);
#pragma unroll
      for (int n = 0; n < rows; ++n) {
        const int away = row[n] - at.first, begin = away + item.lower;
        const int end = row[n] < item.seqlen_q ? min(away + item.upper, at.keys) : 0;
#pragma unroll
        for (int word = 0; word < words; ++word)
          bits[half + n][word] =
              found[n][word] & low_bits(end - 32 * word) & ~low_bits(begin - 32 * word);
      }
    }
#pragma unroll
    for (int word = 0; word < words; ++word) {
      const unsigned seen = __reduce_or_sync(0xffffffff, bits[0][word] | bits[1][word]);
      if (lane == 0) atomicOr(&blocks.seen[word], seen);
    }
    if (flags & has_unused) release(control.said[n % tile_slots]);
  }
  // Hides the others.
  __device__ __forceinline__ void mask(Scores& s, const Visible& visible) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int column = 0; column < keys; column += 8) {
        const unsigned bits = visible[half][column / 32] >> lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (!(bits >> (column % 32 + i) & 1)) s[column / 2 + 2 * half + i] = -infinity();
      }
    }
  }

  // Scores of the tile whose first key is at `first` as the softmax takes them, in the log2 domain.
  __device__ __forceinline__ void modify(Scores& s, const Item& item, int first) {
    const float slope = a.alibi_slopes ? a.alibi_slopes[item.h] * log2_e : 0;
    const float limit = a.softcap * log2_e, into_limit = a.softcap > 0 ? a.scale / a.softcap : 0;
    const float unit = a.scale * log2_e;
    const int away = item.seqlen_kv - item.seqlen_q - first - lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row_away = this->row(item, half) + away;
#pragma unroll
      for (int n = 0; n < keys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[4 * n + 2 * half + i];
          x = a.softcap > 0 ? limit * tanh_accurate(x * into_limit) : x * unit;
          if (a.alibi_slopes) x = fmaf(-slope, fabsf(float(row_away - 8 * n - i)), x);
        }
      }
    }
  }

  // The lane keeps the bias of its scores in shared memory, where no other lane reads it: pairs of
  // neighbours, those of one row behind those of the other. Here lies the first pair, the next one
  // bias_step further.
  template <int element_bytes>
  __device__ __forceinline__ unsigned bias_at() const {
    return shared + tile.bias_offset() + (4 * group + warp) * (16 * keys * 4) +
           lane * (2 * element_bytes);
  }
  template <int element_bytes>
  static constexpr int bias_step = 32 * 2 * element_bytes;

  // Brings the bias of tile n; to be waited for. The bias of keys past the item's last is not read;
  // rows past the sequence get that of its last.
  __device__ __forceinline__ void load_bias(const Item& item, unsigned n) const {
    if constexpr (biased) {
      if (!a.bias) return;
      const KeyTile& at = key_tile(n);
      const int column = lane % 4 * 2, count = at.keys - column;
      const long long next = a.bias_stride[3];
      const long long begin =
          item.b * a.bias_stride[0] + item.h * a.bias_stride[1] + (at.first + column) * next;
      const bool pairs = a.bias_pairs && ((at.first | at.keys) & 1) == 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = min(this->row(item, half), item.seqlen_q - 1);
        const long long offset = begin + row * a.bias_stride[2];
        if (a.bias_type == attn_element_f32) {
          const float* from = static_cast<const float*>(a.bias) + offset;
          unsigned to = bias_at<4>() + half * (keys / 8 * bias_step<4>);
          if (pairs) {
#pragma unroll
            for (int n = 0; n < keys / 8; ++n)
              ptx::cp_async_if<8>(to + n * bias_step<4>, from + 8 * n, 8 * n < count);
          } else {
#pragma unroll 1
            for (int n = 0; n < keys; n += 8) {
              ptx::cp_async_if<4>(to, from, n < count);
              ptx::cp_async_if<4>(to + 4, from + next, n + 1 < count);
              from += 8 * next;
              to += bias_step<4>;
            }
          }
        } else {
          const unsigned short* from = static_cast<const unsigned short*>(a.bias) + offset;
          unsigned to = bias_at<2>() + half * (keys / 8 * bias_step<2>);
          if (pairs) {
#pragma unroll
            for (int n = 0; n < keys / 8; ++n)
              ptx::cp_async_if<4>(to + n * bias_step<2>, from + 8 * n, 8 * n < count);
          } else {
#pragma unroll 1
            for (int n = 0; n < keys; n += 8) {
              const unsigned low = n < count ? from[0] : 0, high = n + 1 < count ? from[next] : 0;
              ptx::store_shared(to, low | high << 16);
              from += 8 * next;
              to += bias_step<2>;
            }
          }
        }
      }
    }
  }
  // Adds it to scores in the log2 domain. A key whose bias is -inf is not seen, whatever it holds;
  // a finite one hides nothing, so its product is kept finite.
  __device__ __forceinline__ void add_bias(Scores& s) const {
    if constexpr (biased) {
      if (!a.bias) return;
      ptx::cp_async_wait_all();
      const auto add = [&](float& x, float b) {
        x = b == -infinity() ? b : fmaf(ptx::max_nan(b, lowest_bias), log2_e, x);
      };
      if (a.bias_type == attn_element_f32) {
        const unsigned from = bias_at<4>();
#pragma unroll
        for (int i = 0; i < keys / 4; ++i) {
          const int n = i % (keys / 8), half = i / (keys / 8);
          const uint2 pair = ptx::load_shared_pair(from + i * bias_step<4>);
          add(s[4 * n + 2 * half], __uint_as_float(pair.x));
          add(s[4 * n + 2 * half + 1], __uint_as_float(pair.y));
        }
      } else {
        const unsigned from = bias_at<2>();
#pragma unroll
        for (int i = 0; i < keys / 4; ++i) {
          const int n = i % (keys / 8), half = i / (keys / 8);
          const unsigned pair = ptx::load_shared(from + i * bias_step<2>);
          add(s[4 * n + 2 * half], T::unpack(pair & 0xffff));
          add(s[4 * n + 2 * half + 1], T::unpack(pair >> 16));
        }
      }
    }
  }
  static constexpr float lowest_bias = -2.3e38f;

  // Says which keys of tile n the warp's queries see.
  __device__ __forceinline__ void say_seen(const Scores& s, unsigned n) {
    if constexpr (biased) {
      unsigned most = 0;  // as an integer, -inf is above all numbers, and only NaNs are above it
#pragma unroll
      for (int i = 0; i < keys / 2; i += 2)
        most = __vimax3_u32(most, __float_as_uint(s[i]), __float_as_uint(s[i + 1]));
      unsigned mine = low_bits(keys - 32 * lane);  // lane n has word n
      unseen = __any_sync(0xffffffff, most >= 0xff800000u);
      if (unseen) [[unlikely]] {
        bool all = true;
#pragma unroll
        for (int word = 0; word < words; ++word) {
          unsigned seen = 0;
#pragma unroll
          for (int n = 4 * word; n < min(4 * word + 4, keys / 8); ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const bool sees = s[4 * n + i] != -infinity() || s[4 * n + 2 + i] != -infinity();
              seen |= unsigned(sees) << (8 * (n % 4) + i);
            }
          }
          seen = __reduce_or_sync(0xffffffff, seen << lane % 4 * 2);
          all = all && seen == low_bits(keys - 32 * word);
          if (lane == word) mine = seen;
        }
        unseen = !all;
      }
      if (lane < words) atomicOr(&control.blocks[n % tile_slots].seen[lane], mine);
      __syncwarp();
      release(control.said[n % tile_slots]);
    }
  }
  // The same of a tile of which they see nothing.
  __device__ __forceinline__ void say_nothing_seen(unsigned n, unsigned flags) {
    if (masked && flags & has_unused) release(control.said[n % tile_slots]);
    if constexpr (biased) {
      unseen = true;
      release(control.said[n % tile_slots]);
    }
  }

  // The largest of the lane's scores of each of its rows. As integers three are compared at once;
  // the order is that of the numbers unless all are negative, which matters where the row has seen
  // nothing above 0 before either.
  __device__ __forceinline__ void find_largest(const Scores& s, float (&largest)[2]) const {
    constexpr int chains = 2;  // an instruction waits for the one before it in its chain
    int top[2][chains];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < keys / 8; ++n) {
        const int x = __float_as_int(s[4 * n + 2 * half]);
        const int y = __float_as_int(s[4 * n + 2 * half + 1]);
        int& t = top[half][n % chains];
        t = n < chains ? max(x, y) : __vimax3_s32(t, x, y);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int most = max(top[half][0], top[half][1]);
      most = max(most, __shfl_xor_sync(0xffffffff, most, 1));
      most = max(most, __shfl_xor_sync(0xffffffff, most, 2));
      largest[half] = __int_as_float(most);
    }
    if (!negative) [[likely]]
      return;
    const int both = (__float_as_int(largest[0]) & __float_as_int(row_state[0].reference)) |
                     (__float_as_int(largest[1]) & __float_as_int(row_state[1].reference));
    if (__any_sync(0xffffffff, both < 0)) [[unlikely]] {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = -infinity();
#pragma unroll
        for (int n = 0; n < keys / 8; ++n)
          most = fmaxf(most, fmaxf(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]));
        most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
        largest[half] = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
      }
    }
  }

  // A reference stays where it is until a score exceeds it by more than this: weights are up to
  // 2^slack then, and o is rarely multiplied, which would keep the tensor cores waiting
  // (docs/hopper.md). split_invariant: it is an integer and moves at once, so that sums taken
  // against different references differ by an exact power of two.
  __device__ __forceinline__ float slack() const { return sums_rounded() ? 0 : 8; }
  // split_invariant: the sums have all weights as they are rounded for the products.
  __device__ __forceinline__ bool sums_rounded() const { return may_split && a.split_invariant; }

  // Weights are 2^s of the s that this leaves; what earlier weights must be multiplied with is left
  // in `shrink`, and the sums of the lane's earlier weights so multiplied in `sum`. True: `shrink`
  // is not 1 for some row of the warp. The products have the weights as they are rounded. What
  // rounding adds to each tile's largest one is added up, for in a row that one key dominates it is
  // the error; each of the row's four lanes takes its share.
  __device__ __forceinline__ bool start_weights(Scores& s, float (&shrink)[2], float (&sum)[4]) {
    const float unit = score ? 1 : a.unit;
    float largest[2];
    bool moved = false;
    find_largest(s, largest);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float most = largest[half] * unit, old = row_state[half].reference;
      const float next = most > old + slack() ? (sums_rounded() ? ceilf(most) : most) : old;
      moved = moved || next != old;
      shrink[half] = ptx::ex2(old - next);
      row_state[half].reference = next;
      sum[2 * half] = row_state[half].sum * shrink[half];
      sum[2 * half + 1] = 0;
#pragma unroll
      for (int n = 0; n < keys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[4 * n + 2 * half + i];
          x = fmaf(x, unit, -next);
        }
      }
      if (!sums_rounded()) {
        const float weight = ptx::ex2(fmaf(largest[half], unit, -next));
        const float error = T::unpack(T::pack(weight, weight) & 0xffff) - weight;
        row_state[half].rounding = fmaf(row_state[half].rounding, shrink[half], error * 0.25f);
      }
    }
    return __any_sync(0xffffffff, moved);
  }
  // What is to be done where references have moved.
  __device__ __forceinline__ void rescale(const float (&shrink)[2]) {
#pragma unroll
    for (int n = 0; n < tile.head_dim_v / 2; ++n) o[n] *= shrink[n / 2 % 2];
    look_at_references();
  }
  // The weights of s[0, first_weights), and the rest of them; with the latter p gets them all.
  static constexpr int first_weights = 8;
  __device__ __forceinline__ static void find_first_weights(Scores& s) {
#pragma unroll
    for (int i = 0; i < first_weights; ++i) s[i] = ptx::ex2(s[i]);
  }
  __device__ __forceinline__ void finish_weights(Scores& s, const float (&shrink)[2],
                                                 float (&sum)[4]) {
    const bool rounded = sums_rounded();
#pragma unroll
    for (int i = 0; i < keys / 2; ++i) {
      if (i >= first_weights) s[i] = ptx::ex2(s[i]);
      if (!rounded) sum[i % 4] += s[i];
    }
#pragma unroll
    for (int n = 0; n < keys / 4; ++n) {
      const unsigned packed = p[n / 4][n % 4] = T::pack(s[2 * n], s[2 * n + 1]);
      if (rounded) {
        sum[n % 2 * 2] += T::unpack(packed & 0xffff);
        sum[n % 2 * 2 + 1] += T::unpack(packed >> 16);
      }
    }
    row_state[0].sum = sum[0] + sum[1];
    row_state[1].sum = sum[2] + sum[3];
  }
  // Scores of tile n, which is the item's, as start_weights takes them. visible: with a block mask,
  // if not all see all.
  __device__ __forceinline__ void prepare(Scores& s, const Item& item, unsigned n, unsigned flags,
                                          const Visible& visible) {
    if (score) modify(s, item, key_tile(n).first);
    add_bias(s);
    if (!(flags & sees_all)) [[unlikely]] {
      if constexpr (masked)
        mask(s, visible);
      else
        mask(s, item, key_tile(n).first, key_tile(n).keys);
      ptx::pin(s);  // without it ptxas moves some of them where nothing is hidden too
    }
    say_seen(s, n);
  }
  // All of it where nothing runs meanwhile.
  __device__ __forceinline__ void weigh(Scores& s, const Item& item, unsigned n, unsigned flags) {
    float shrink[2], sum[4];
    Visible visible;
    if constexpr (masked)
      if (!(flags & sees_all)) find_visible(item, n, flags, visible);
    load_bias(item, n);
    prepare(s, item, n, flags, visible);
    const bool moved = start_weights(s, shrink, sum);
    if (moved) rescale(shrink);
    find_first_weights(s);
    finish_weights(s, shrink, sum);
  }

  // Of an item whose weights have all been found: writes lse and leaves in factor what o must be
  // multiplied with.
  __device__ __forceinline__ void finish_softmax(const Item& item, float (&factor)[2]) {
    const float sink = a.sinks ? a.sinks[item.h] : -infinity();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowState& state = row_state[half];
      factor[half] = row_factor(state.reference, row_sum(state.sum + state.rounding), sink);
    }
    if (!a.lse) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float lse = row_lse(row_state[half].reference, row_sum(row_state[half].sum), sink);
      const int row = this->row(item, half);
      if (row < item.seqlen_q && lane % 4 == 0) {
        const long long at = a.cu_seqlens_q
                                 ? item.h * a.total_q + item.q_begin + row
                                 : (item.b * (long long)a.heads_q + item.h) * a.seqlen_q + row;
        a.lse[at] = lse;
      }
    }
  }
  __device__ __forceinline__ void store(const Item& item, const float (&factor)[2]) {
    clear_rows(o, factor);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = this->row(item, half);
      const long long at = (a.cu_seqlens_q ? 0 : item.b * a.out_stride[0]) +
                           ((long long)item.q_begin + row) * a.out_stride[1] +
                           item.h * a.out_stride[2];
      store_row(a.out, a.out_type, at, row < item.seqlen_q, o, half, factor[half], a.head_dim_v);
    }
  }

  __device__ __forceinline__ void run() {
    if (!take_item(0)) return;
    Scores s;
#pragma unroll
    for (float& x : o) x = 0;
    if (group == tile.groups - 1) pass_turn();
    ptx::mbarrier_wait(address(&control.k_full[0]), 0);
    ptx::wgmma_fence();
    start_scores(s, ptx::uniform(q_at(0)), k_at(0));
    // Tile n + 1 is of the item `count`. `here` are the flags of tile n, whose weights p holds if
    // the warpgroup sees it; `next` those of tile n + 1, if it is of the same item; `before` those
    // of tile n - 1, as if it were the last one of its item if o has nothing of that of tile n.
    unsigned n = 0, count = 0;
    unsigned here = ptx::uniform(item(0).first_tile >> 4 * group),
             next = ptx::uniform(key_tile(0).next_tile >> 4 * group);
    unsigned before = last_tile;
    unsigned q_next = ptx::uniform(q_at(0)), k_next = k_at(1), v_here = v_at(0);
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    __syncwarp();
    release(control.k_empty[0]);
    if (tile.q_stages == 1 && here & last_tile) release_q(0);
    start_softmax();
    weigh(s, item(0), 0, here);

    RingAt<tile.k_stages> k{K::stage(1), K::parity(1)};  // of tile n + 1
    RingAt<tile.v_stages> v{0, 0};                       // of tile n
    float factor[2];  // what o of the item whose last tile is n is to be multiplied with
    // K of tile n + 1 and V of n are there, and nothing but the rule is to be done.
    bool ready = false;
    for (;; ++n) {
      const bool ends = here & last_tile;
      if (!ready) {
        ptx::mbarrier_wait(address(&control.v_full[v.stage]), v.parity);
        if (biased ? unseen : here & has_unused) clear_unused(n);
        if (ends) {
          // Here rather than with o, for now the warp waits for its turn anyway.
          finish_softmax(item(count), factor);
          start_softmax();
          if (tile.q_stages > 1) release_q(count);
          if (!take_item(++count)) break;
          q_next = ptx::uniform(q_at(count));
        }
        ptx::mbarrier_wait(address(&control.k_full[k.stage]), k.parity);
        if (ends) next = ptx::uniform(item(count).first_tile >> 4 * group);
      }
      const int k_stage = k.stage, v_stage = v.stage;
      // What is known of the tile behind the next one when the next one's scores have been started.
      unsigned after;
      const auto look_ahead = [&] {
        after = ptx::uniform(key_tile(n + 1).next_tile >> 4 * group);
        k.advance();
        v.advance();
        k_next = k_of(k.stage);
        v_here = v_of(v.stage);
      };
      const auto release_scored = [&] {
        __syncwarp();  // what all lanes have read, lane 0 may give free
        release(control.k_empty[k_stage]);
        if (tile.q_stages == 1 && next & last_tile) release_q(count);
      };
      wait_turn();
      if (here & next & sees_some) [[likely]] {
        ptx::pin(o);
        ptx::wgmma_fence();
        start_scores(s, q_next, k_next);
        const unsigned v_now = v_here;
        look_ahead();  // while the scores are computed: a warp waits in front of a product
        start_sums(v_now, !(before & last_tile));
        // Between tiles that all see whole the turn is passed on when the sums are nearly done, so
        // that the other's products do not queue behind them. Hiding scores takes longer than that.
        const bool late = masked && tile.groups == 2 && next & here & sees_all;
        if (!late) pass_turn();
        Visible visible;
        load_bias(item(count), n + 1);
        if constexpr (masked && early)
          if (!(next & sees_all)) [[unlikely]]
            find_visible(item(count), n + 1, next, visible);
        ptx::wgmma_wait<1>();
        ptx::pin(s);
        release_scored();
        float shrink[2], sum[4];
        if constexpr (masked && !early)
          if (!(next & sees_all)) find_visible(item(count), n + 1, next, visible);
        prepare(s, item(count), n + 1, next, visible);
        const bool moved = start_weights(s, shrink, sum);
        find_first_weights(s);
        if (late) pass_turn();
        if (ends) [[unlikely]] {  // on both sides, for what stands before a branch stays there
          ptx::wgmma_wait<0>();
          ptx::pin(o);
          store(item(count - 1), factor);
          look_at_references();
        } else {
          ptx::wgmma_wait<0>();
          ptx::pin(o);
          if (moved) rescale(shrink);
        }
        release(control.v_empty[v_stage]);
        ready = ptx::mbarrier_test(address(&control.v_full[v.stage]), v.parity) &
                ptx::mbarrier_test(address(&control.k_full[k.stage]), k.parity) &
                !(next & (last_tile | (biased ? 0 : has_unused))) & !(biased && unseen);
        finish_weights(s, shrink, sum);
        before = here;
      } else {
        const bool add = !(before & last_tile);
        if (here & sees_some) add_sums(v_here, add);
        release(control.v_empty[v_stage]);
        if (next & sees_some) {
          ptx::wgmma_fence();
          start_scores(s, q_next, k_next);
          ptx::wgmma_wait<0>();
          ptx::pin(s);
        }
        pass_turn();
        look_ahead();
        release_scored();
        if (ends) store(item(count - 1), factor);
        if (next & sees_some)
          weigh(s, item(count), n + 1, next);
        else
          say_nothing_seen(n + 1, next);
        before = add || here & sees_some ? here : here | last_tile;
        ready = false;
      }
      here = next;
      next = after;
    }
    wait_turn();
    if (here & sees_some) add_sums(v_here, !(before & last_tile));
    if (group != tile.groups - 1) pass_turn();
    store(item(count - 1), factor);
  }
};

template <class T, Tile tile, unsigned with>
__device__ __forceinline__ void forward(const Kernarg<with>& a) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  Control& control = *reinterpret_cast<Control*>(shared_memory);
  const unsigned shared = address(shared_memory);
  // The same in all lanes, which the compiler sees here.
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    constexpr int warps = 4 * tile.groups;
    for (Barrier& full : control.item_full) ptx::mbarrier_init(address(&full), 1);
    ptx::mbarrier_init(address(&control.ending), 1);
    for (int i = 0; i < max_stages; ++i) {
      for (Barrier* full : {&control.k_full[i], &control.v_full[i]})
        ptx::mbarrier_init(address(full), 1);
      for (Barrier* empty : {&control.k_empty[i], &control.v_empty[i]})
        ptx::mbarrier_init(address(empty), warps);
      for (Barrier& full : control.q_full[i]) ptx::mbarrier_init(address(&full), 1);
      for (Barrier& empty : control.q_empty[i])
        ptx::mbarrier_init(address(&empty), warps / tile.q_parts());
      if (tile.blocks > 1)
        for (Barrier* there : {&control.k_there[i], &control.v_there[i]})
          ptx::mbarrier_init(address(there), 1);
    }
    if constexpr (with == with_bias || with & with_mask)
      for (Barrier& said : control.said) ptx::mbarrier_init(address(&said), warps);
    if constexpr (with & with_mask) {
      ptx::mbarrier_init(address(&control.listed), 1);
      for (Barrier& described : control.described) ptx::mbarrier_init(address(&described), 1);
    }
    ptx::mbarrier_init_fence();
  }
  if constexpr (tile.blocks > 1)
    ptx::cluster_meet();
  else
    __syncthreads();
  ptx::grid_let_next_start();
  if (with == plain && threadIdx.x == 32) prefetch_first<tile>(a);
  ptx::grid_wait();  // before any access to memory
  if (warp < 4) {
    if constexpr (tile.groups > 1) ptx::registers_shrink<tile.load_registers()>();
    if constexpr (with & with_mask) {
      if (warp == 0) {
        load_items<tile, with>(a, control, shared);
      } else if (warp == 1) {
        load_live_keys<tile>(a, control, shared);
      } else if (warp == 3) {
        load_live_values<tile>(a, control, shared);
      } else if (sorts_items(a)) {
        list_items<tile>(a);
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(address(&control.listed));
      }
    } else {
      if (warp >= 2) {
        if (a.cu_seqlens_q)
          store_rows_of_nobody<unsigned>(a, 2 * blockIdx.x + warp - 2, 2 * gridDim.x);
        return;
      }
      if (warp == 0) load_items<tile, with>(a, control, shared);
      if (threadIdx.x == 32) load_keys<tile, with == with_bias>(a, control, shared);
    }
  } else {
    if constexpr (tile.groups > 1) ptx::registers_grow<tile.compute_registers()>();
    Consumer<T, tile, with> consumer{
        a, control, within_block<tile>(shared), warp / 4 - 1, warp % 4, int(threadIdx.x % 32)};
    consumer.run();
  }
}

}  // namespace attn::sm90

// The kernel NAME, which is the name of its file. WITH: plain, with_score, with_mask or with_bias;
// behind it __cluster_dims__ where the tile has several blocks.
#define ATTN_SM90_FORWARD(NAME, T, TILE, WITH, ...)                                       \
  extern "C" __global__ void __launch_bounds__(attn::sm90::TILE.threads(), 1)             \
      __VA_ARGS__ NAME(const __grid_constant__ attn::sm90::Kernarg<attn::sm90::WITH> a) { \
    attn::sm90::forward<attn::device::T, attn::sm90::TILE, attn::sm90::WITH>(a);          \
  }
