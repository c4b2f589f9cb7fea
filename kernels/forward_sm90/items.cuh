// Work items: which one a block takes, and the descriptions of it and its tiles of keys.
#pragma once
#include "../common/descale.cuh"
#include "../common/lengths.cuh"
#include "../common/no_keys.cuh"
#include "config.h"
#include "control.cuh"
#include "item_order.cuh"
#include "key_walk.h"

namespace attn::sm90 {

// Blocks or clusters that take items: `first` of them begin with the item of their number, helpers
// of another launch with one that is left.
struct Takers {
  unsigned first, helpers;
};
template <Tile tile>
__device__ __forceinline__ Takers takers(const attn_sm90_forward_kernarg&) {
  return {gridDim.x / tile.blocks, 0};
}
template <Tile tile>
__device__ __forceinline__ Takers takers(const attn_sm90_paged_kernarg& a) {
  return {a.helped ? a.helped : gridDim.x / tile.blocks, unsigned(a.helpers)};
}
// The item that a block takes after its first: one that no other has taken. Each takes until there
// is none, and the last one to do so resets the counter.
template <Tile tile, class Args>
__device__ __forceinline__ unsigned next_item(const Args& a, unsigned items) {
  const Takers by = takers<tile>(a);
  if (items <= by.first) return items;
  const unsigned before = atomicAdd(a.taken, 1);
  if (before == items - 1 + by.helpers) *a.taken = 0;
  return by.first + before;
}

template <Tile tile>
__device__ __forceinline__ unsigned tile_flags(const Item& item, const KeyWalk<tile.keys>& at) {
  unsigned flags = at.ends(item) ? last_tile * for_all_groups : 0;
  if (min(item.segment[at.segment].end, item.used) < at.first + tile.keys)
    flags |= has_unused * for_all_groups;
#pragma unroll
  for (int g = 0; g < tile.row_groups(); ++g) {
    const SeenKeys see = item.see[g];
    const bool whole = at.first + tile.keys <= at.end;
    if (at.first < see.some_end && at.first + at.count() > see.some_begin)
      flags |= sees_some << 4 * g;
    if (whole && at.first >= see.all_begin && at.first + tile.keys <= see.all_end)
      flags |= sees_all << 4 * g;
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
    for (int g = 0; g < tile.row_groups(); ++g) {
      low = max(low, item.see[g].all_begin);
      high = min(high, item.see[g].all_end - tile.keys);
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

__device__ __forceinline__ int end_of_queries(const attn_positions& p, int b, int seqlen_q,
                                              int seqlen_kv) {
  if (!p.query_start) return seqlen_kv;
  return near_first_query(p, b, seqlen_q, seqlen_kv) + seqlen_q;
}

// By all lanes of one warp. at: the cluster's item, of which each block has a part.
template <Tile tile>
__device__ __forceinline__ void describe(const attn_sm90_forward_kernarg& a, const QueryTile& at,
                                         Item& item) {
  constexpr int rows = tile.rows(), all_rows = tile.item_rows();
  const int lane = threadIdx.x % 32;
  const Span queries = a.cu_seqlens_q ? packed_span(a.cu_seqlens_q, at.b, a.total_q, a.seqlen_q)
                                      : Span{0, a.seqlen_q};
  const int sequence = a.part_keys > 0 ? 0 : at.b;
  int length = 0;
  for (int i = 0; i < a.num_segments; ++i) {
    const Span span = segment_span(a.segment[i], sequence);
    const int row = int(span.begin) - length;
    length += span.length;
    if (lane == 0) item.segment[i] = {length, row, a.segment[i].cu_seqlens ? 0 : sequence};
  }
  const auto [lower, upper] =
      seen_places(a.mask, positions_of<tile>(a), sequence, queries.length, length);
  // Lane g finds what row group g sees, the next one what the item sees, the next the sequence.
  const int all_row = at.tile * all_rows;
  const int item_row = all_row + (tile.heads ? 0 : rows * block_of_cluster<tile>());
  const int row = lane < tile.row_groups()    ? item_row + 64 * lane
                  : lane == tile.row_groups() ? all_row
                                              : 0;
  const int behind = min(lane < tile.row_groups()    ? row + 64
                         : lane == tile.row_groups() ? all_row + all_rows
                                                     : queries.length,
                         queries.length);
  // Where an item's tiles begin at its first key, none has a key before kv_begin. With
  // begin_at_tile() they may: there first_seen() hides these keys.
  const int first = first_key(a.kv_begin, at.b, length);
  const auto key = [&](int place) { return number_of(positions_of<tile>(a), place); };
  SeenKeys see = {0, 0, 0, 0};
  if (row < behind)
    see = {clamp(key(row + lower), first, length), clamp(key(behind - 1 + upper), 0, length),
           clamp(key(behind - 1 + lower), first, length), clamp(key(row + upper), 0, length)};
  if (a.part_keys > 0 && lane <= tile.row_groups()) {
    const int begin = min(at.b * (long long)a.part_keys, (long long)length),
              end = min((at.b + 1) * (long long)a.part_keys, (long long)length);
    see = {max(see.some_begin, begin), min(see.some_end, end), max(see.all_begin, begin),
           min(see.all_end, end)};
  }
  // Lane 0 writes all of it, for it alone says that it is there.
  const auto of = [](int x, int lane) { return __shfl_sync(0xffffffff, x, lane); };
#pragma unroll
  for (int g = 0; g < tile.row_groups(); ++g) {
    const SeenKeys sees = {of(see.some_begin, g), of(see.some_end, g), of(see.all_begin, g),
                           of(see.all_end, g)};
    if (lane == 0) item.see[g] = sees;
  }
  const int low = of(see.some_begin, tile.row_groups()), high = of(see.some_end, tile.row_groups());
  const int used = of(see.some_end, tile.row_groups() + 1);
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
    item.lower = lower;
    item.upper = upper;
    item.q_end = end_of_queries(positions_of<tile>(a), sequence, queries.length, length);
  }
}

// fp8: writes the item's scales, and marks keys that it does not see as unused. By all lanes of one
// warp.
template <unsigned with>
__device__ __forceinline__ void describe_scales(const Kernarg<with>& a, Item& item) {
  if (threadIdx.x % 32 == 0) {
    const attn_sm90_scales& scales = a.scales;
    const auto descale = [&](const attn_descale& d) {
      return d.at ? *descale_at(d, item.b, item.head_kv, 0) : 1;
    };
    item.score_scale = a.scale * descale(scales.q);
    item.out_scale = scales.out ? *scales.out : 1;
    if constexpr (!(with & with_score)) {
      item.score_scale *= descale(scales.segment[0].k);
      item.out_scale *= descale(scales.segment[0].v);
    }
    item.used = item.high;  // tiles may reach far beyond it
  }
  __syncwarp();
}
// Keys before this one no query of the item sees.
__device__ __forceinline__ int first_seen(const Item& item) {
  return item.see[0].some_begin;
}
// The scales of a tile. Tiles are cut from the segment's first key on (begin_at_tile), so each half
// of a tile is in one block of 64 or 128 keys.
template <Tile tile>
__device__ __forceinline__ void describe_scales(const attn_sm90_fp8_kernarg& a, const Item& item,
                                                const KeyTile& at, TileScales& to) {
  static_assert(tile.keys == 128);
  const auto& scales = a.scales.segment[at.segment];
  const int begin = at.segment > 0 ? item.segment[at.segment - 1].end : 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = at.first + min(64 * half, at.keys - 1) - begin;  // there are no more blocks
    const auto descale = [&](const attn_descale& d) {
      return d.at ? *descale_at(d, item.b, item.head_kv, key) : 1;
    };
    to.score[half] = item.score_scale * descale(scales.k);
    to.v[half] = descale(scales.v);
  }
  to.unused = first_seen(item) - at.first;
}

// Moves the first key of an item down to where a tile begins. By all lanes of one warp.
template <Tile tile>
__device__ __forceinline__ void begin_at_tile(Item& item) {
  if (threadIdx.x % 32 == 0 && item.low < item.high) {
    int segment = 0;
    while (item.segment[segment].end <= item.low) ++segment;
    const int begin = segment > 0 ? item.segment[segment - 1].end : 0;
    item.low -= (item.low - begin) % tile.keys;
  }
  __syncwarp();
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

}  // namespace attn::sm90
