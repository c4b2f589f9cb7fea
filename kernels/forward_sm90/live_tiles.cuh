// What a block mask leaves of an item: the tiles of keys that some of its queries see, and which
// keys of a tile a query sees.
#pragma once
#include "../common/block_mask.cuh"
#include "../common/lengths.cuh"
#include "../common/seen_keys.h"
#include "forward_args.h"
#include "tiles.h"

namespace attn::sm90 {

using namespace device;

// Flags of a tile of keys for consumer warpgroups; those of warpgroup g are shifted by 4 g.
enum : unsigned {
  sees_some = 1,   // some of its queries see keys of the tile
  sees_all = 2,    // all see all of it
  last_tile = 4,   // the item's last tile
  has_unused = 8,  // V has rows that no query sees
};
constexpr unsigned for_all_groups = 0x111;
static_assert(max_groups == 3);
template <Tile tile>
constexpr unsigned every_group = for_all_groups >> 4 * (max_groups - tile.row_groups());
template <Tile tile>
constexpr unsigned seen_whole = (sees_some | sees_all) * every_group<tile>;

// With a block mask tiles are cut where multiples of tile.keys lie, and between segments. So many
// pieces of 64 keys, which begin at multiples of 64, meet such a tile.
template <Tile tile>
constexpr int mask_blocks = tile.keys % 64 == 0   ? tile.keys / 64
                            : 64 % tile.keys == 0 ? 1
                                                  : (tile.keys + 48 + 63) / 64;
static_assert(mask_blocks<tile_d256> == 2 && mask_blocks<tile_d512_mask> == 1);

struct TileBlocks {
  int block[2 * max_groups];  // mask_block: [warpgroup][piece of 64 keys]
  unsigned seen[4];           // keys that some query of the item sees, by those who mask; with
                              // pages, keys that are there
};

struct LiveTile {
  int first, keys;  // position of the first key; 0 keys: there are no more tiles
  int segment;
  unsigned flags;  // without last_tile
};

// The walk, down if that of key_walk.h goes down, by all lanes of one warp. Item: the item of
// forward.cuh.
template <Tile tile, class Item>
struct LiveTiles {
  static constexpr int pieces = mask_blocks<tile>, blocks = tile.row_groups() * pieces;
  static_assert(blocks <= 2 * max_groups && tile.keys <= 128);

  const attn_mask_arrays& a;
  const Item& item;
  const bool down;
  const long long grid;  // of the item's batch entry and head
  int column;            // of tile.keys keys each: the first of 32, of which each lane has one
  int block[blocks];     // what mask_block says about the lane's column: [warpgroup][piece]
  unsigned flags;        // of the lane's column, if no segment ends in it
  unsigned live;         // columns that are seen and have not been given yet
  unsigned whole;        // columns that all see all of, in which no segment begins or ends
  int from;              // the lane whose column is current
  int run;               // this many columns after it are fully visible, and no longer in `live`
  int first, end;        // what is left of it
  int segment;

  __device__ __forceinline__ LiveTiles(const attn_mask_arrays& a, const Item& item, bool down)
      : a(a),
        item(item),
        down(down),
        grid(item.b * a.batch_stride + item.h * a.head_stride),
        column(down ? (item.high - 1) / tile.keys + 1 : item.low / tile.keys - 32),
        live(0),
        from(0),
        run(0),
        first(0),
        end(0),
        segment(0) {
    while (down && item.segment[segment].end < item.high) ++segment;
  }

  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }

  // The next 32 columns.
  __device__ __forceinline__ void look() {
    column += down ? -32 : 32;
    const int from = (column + lane()) * tile.keys, begin = max(from, item.low);
    const int end = min(from + tile.keys, item.high);
    const auto row = [&](int n) { return item.row + 64 * (n / pieces); };
    const auto at = [&](int n) { return (from & ~63) + 64 * (n % pieces); };
    int kind[blocks], index[blocks];
#pragma unroll
    for (int n = 0; n < blocks; ++n) {  // all loads are under way before the first is waited for
      const bool inside = row(n) < item.seqlen_q && begin < end && at(n) < end;
      const long long cell = grid + (long long)(inside ? row(n) >> a.block_q_log2 : 0) * a.columns +
                             (inside ? at(n) >> a.block_k_log2 : 0);
      kind[n] = a.kinds[cell];
      index[n] = -1;
      if (a.index) index[n] = a.index[cell];
      if (!inside) kind[n] = attn_kind_empty;
    }
    flags = 0;
#pragma unroll
    for (int n = 0; n < blocks; ++n)
      block[n] = mask_block(a, kind[n], index[n], at(n) >> a.block_k_log2, row(n),
                            min(row(n) + 64, item.seqlen_q) - 1, item.q_end - item.seqlen_q);
#pragma unroll
    for (int g = 0; g < tile.row_groups(); ++g) {
      const SeenKeys see = item.see[g];
      bool some = false, full = true;
#pragma unroll
      for (int piece = 0; piece < pieces; ++piece) {
        some |= block[g * pieces + piece] != mask_empty;
        full &= block[g * pieces + piece] == mask_full;
      }
      if (some & (begin < see.some_end) & (end > see.some_begin)) flags |= sees_some << 4 * g;
      if (full & (begin >= see.all_begin) & (begin + tile.keys <= see.all_end) &
          (end - begin == tile.keys))
        flags |= sees_all << 4 * g;
    }
    bool cut = false;
    for (int i = 0; item.segment[i].end < item.q_end; ++i)
      cut |= begin <= item.segment[i].end && item.segment[i].end <= end;
    live = __ballot_sync(0xffffffff, flags != 0);
    whole = __ballot_sync(0xffffffff, flags == seen_whole<tile> && !cut);
  }

  // Counts the fully visible columns after the current one, which find() then gives without a look
  // at each: most tiles.
  __device__ __forceinline__ void start_run() {
    if (down) {
      run = __clz(~(whole << (31 - from) << 1));
      live &= (1u << (from - run)) - 1;
    } else {
      run = __ffs(~(whole >> from >> 1)) - 1;
      live &= ~1u << (from + run);
    }
  }

  // One lane has the blocks.
  __device__ __forceinline__ static void leave(TileBlocks& to, bool has,
                                               const int (&block)[blocks]) {
    if (has) {
#pragma unroll
      for (int n = 0; n < blocks; ++n) to.block[n] = block[n];
    }
    if (lane() == 0) {  // which has waited for those who read it
#pragma unroll
      for (unsigned& word : to.seen) word = 0;
    }
    __syncwarp();
  }

  // The rest of the current column, up to the end of a segment or down to its beginning.
  __device__ __forceinline__ LiveTile next_piece() {
    if (down) {
      while (segment > 0 && item.segment[segment - 1].end >= end) --segment;
      const int begin = segment > 0 ? max(first, item.segment[segment - 1].end) : first;
      const int keys = end - begin;
      end = begin;
      return {begin, keys, segment, 0};
    }
    while (item.segment[segment].end <= first) ++segment;
    const int begin = first;
    first = min(item.segment[segment].end, end);
    return {begin, first - begin, segment, 0};
  }

  // The next tile. Its blocks are left in `to` unless all see all of it: where there is none, EMPTY
  // ones, for those who compute look at the tile of an item that has none.
  __device__ __forceinline__ LiveTile find(TileBlocks& to) {
    if (run > 0) [[likely]] {
      --run;
      from += down ? -1 : 1;
      return {(column + from) * tile.keys, tile.keys, segment, seen_whole<tile>};
    }
    for (;;) {
      bool begins = false;
      while (first >= end) {
        while (live == 0) {
          if (down ? column * tile.keys <= item.low : (column + 32) * tile.keys >= item.high) {
            int none[blocks];
#pragma unroll
            for (int& block : none) block = mask_empty;
            leave(to, lane() == 0, none);
            return {0, 0, 0, 0};
          }
          look();
        }
        from = down ? 31 - __clz(int(live)) : __ffs(int(live)) - 1;
        live &= ~(1u << from);
        first = max(item.low, (column + from) * tile.keys);
        end = min(item.high, (column + from + 1) * tile.keys);
        begins = true;
      }
      LiveTile found = next_piece();
      found.flags = __shfl_sync(0xffffffff, flags, from);
      if (!begins || first < end) [[unlikely]] {  // cut by the end of a segment
#pragma unroll
        for (int g = 0; g < tile.row_groups(); ++g) {
          const SeenKeys see = item.see[g];
          const bool sees = found.first < see.some_end && found.first + found.keys > see.some_begin;
          found.flags &= ~((sees ? sees_all : sees_all | sees_some) << 4 * g);
        }
        if (found.flags == 0) continue;
      }
      const unsigned all = found.flags / sees_all & every_group<tile>;
      if (all == 0) found.flags |= has_unused * for_all_groups;
      if (all != every_group<tile>) leave(to, lane() == from, block);
      if (first >= end) start_run();
      return found;
    }
  }
};

// Of the mask's grid the queries of an item, [first, last], meet so many rows at most, which begin
// at multiples of 64.
template <Tile tile>
constexpr int grid_rows = tile.row_groups() > 2 ? tile.row_groups() : 2;
template <Tile tile>
__device__ __forceinline__ int grid_row(const attn_mask_arrays& a, int first, int last, int n) {
  return (n == 0                     ? first
          : n == grid_rows<tile> - 1 ? last
                                     : min(first + 64 * n, last)) >>
         a.block_q_log2;
}

// Narrows the keys of an item to those between the first and the last block that the mask shows to
// it. By all lanes of one warp.
template <Tile tile, class Item>
__device__ __forceinline__ void narrow(const attn_mask_arrays& a, Item& item) {
  constexpr int rows = grid_rows<tile>;
  const int lane = threadIdx.x % 32, last_row = min(item.row + tile.rows(), item.seqlen_q) - 1;
  const long long grid = item.b * a.batch_stride + item.h * a.head_stride;
  long long at_row[rows];
#pragma unroll
  for (int r = 0; r < rows; ++r)
    at_row[r] = grid + (long long)grid_row<tile>(a, item.row, last_row, r) * a.columns;
  const int behind = item.high > item.low ? ((item.high - 1) >> a.block_k_log2) + 1 : 0;
  int first = behind, last = -1;
  constexpr int at_once = 4;
  for (int column = (item.low >> a.block_k_log2) + lane; column < behind; column += 32 * at_once) {
    int kind[at_once][rows];
#pragma unroll
    for (int n = 0; n < at_once; ++n) {
      const int at = min(column + 32 * n, behind - 1);
#pragma unroll
      for (int r = 0; r < rows; ++r) kind[n][r] = a.kinds[at_row[r] + at];
    }
#pragma unroll
    for (int n = 0; n < at_once; ++n) {
      const int at = column + 32 * n;
      bool sees = false;
#pragma unroll
      for (int r = 0; r < rows; ++r) sees |= mask_may_see(kind[n][r]);
      sees &= at < behind;
      first = sees ? min(first, at) : first;
      last = sees ? max(last, at) : last;
    }
  }
  first = __reduce_min_sync(0xffffffff, first);
  last = __reduce_max_sync(0xffffffff, last);
  if (lane == 0) {
    item.low = max(item.low, first << a.block_k_log2);
    item.high = min(item.high, (last + 1) << a.block_k_log2);
  }
  __syncwarp();
}

// The x lowest bits.
__device__ __forceinline__ unsigned low_bits(int x) {
  return x <= 0 ? 0 : x >= 32 ? ~0u : (1u << x) - 1;
}

// By the mask alone: bits[n] has the keys from position `first` on that query row[n] sees. block:
// what mask_block says about the pieces of the tile that `first` lies in. diagonal: Skv - Sq.
template <Tile tile, int rows, int words>
__device__ __forceinline__ void visible_by_blocks(const attn_mask_arrays& a, const int* block,
                                                  int first, const int (&row)[rows], int diagonal,
                                                  unsigned (&bits)[rows][words]) {
  constexpr int pieces = mask_blocks<tile>;
  const int from = first / tile.keys * tile.keys & ~63;
  unsigned all[rows][2 * pieces];
  // All loads are under way before the first is waited for.
#pragma unroll
  for (int n = 0; n < rows; ++n) {
#pragma unroll
    for (int piece = 0; piece < pieces; ++piece) {
      const int kind = block[piece], at = from + 64 * piece, partial = kind >= 0;
      const long long line = ((long long)(partial ? kind : 0) << a.block_q_log2) +
                             (row[n] & ((1 << a.block_q_log2) - 1));
      unsigned &x = all[n][2 * piece], &y = all[n][2 * piece + 1];
      x = y = kind == mask_empty ? 0 : ~0u;
      asm volatile(
          "{\n"
          ".reg .pred partial;\n"
          "setp.ne.s32 partial, %3, 0;\n"
          "@partial ld.global.v2.u32 {%0, %1}, [%2];\n"
          "}"
          : "+r"(x), "+r"(y)
          : "l"(a.bits + (line << (a.block_k_log2 - 5)) +
                ((at & ((1 << a.block_k_log2) - 1)) >> 5)),
            "r"(partial));
    }
  }
#pragma unroll
  for (int n = 0; n < rows; ++n) {
#pragma unroll
    for (int piece = 0; piece < pieces; ++piece) {
      if (block[piece] != mask_causal) continue;
      const int seen = row[n] + diagonal + 1 - from - 64 * piece;
      all[n][2 * piece] = low_bits(seen);
      all[n][2 * piece + 1] = low_bits(seen - 32);
    }
    const int away = first - from;  // less than 128
#pragma unroll
    for (int step = 2; step >= 1; --step) {
#pragma unroll
      for (int i = 0; i < 2 * pieces; ++i)
        all[n][i] = (away & 32 * step) == 0 ? all[n][i]
                    : i + step < 2 * pieces ? all[n][i + step < 2 * pieces ? i + step : 0]
                                            : 0;
    }
#pragma unroll
    for (int i = 0; i < words; ++i)
      bits[n][i] = __funnelshift_r(all[n][i], i + 1 < 2 * pieces ? all[n][i + 1] : 0, away % 32);
  }
}

}  // namespace attn::sm90
