// What a block mask leaves of an item: the tiles of keys that some of its queries see, and which keys
// of a tile a query sees.
#pragma once
#include "../common/block_mask.cuh"
#include "../common/lengths.cuh"
#include "forward_args.h"
#include "tiles.h"

namespace attn::sm90 {

using namespace device;

// What warpgroups must know of a tile of keys. Of warpgroup g, shifted by 4 g: some of its queries
// see keys of the tile; all see all of it.
enum : unsigned { sees_some = 1, sees_all = 2 };
// Its item's last tile; V has rows that nobody sees.
enum : unsigned { last_tile = 1u << 31, has_unused = 1u << 30 };

// With a block mask tiles are cut where multiples of tile.keys lie, and between segments. So many
// pieces of 64 keys, which begin at multiples of 64, meet such a tile.
template <Tile tile>
constexpr int mask_blocks = tile.keys % 64 == 0 ? tile.keys / 64 : (tile.keys + 48 + 63) / 64;
static_assert(mask_blocks<tile_d256> == 2);

struct TileBlocks {
  int block[2 * max_groups];  // mask_block: [warpgroup][piece of 64 keys]
  unsigned seen[4];           // keys that some query of the item sees, by those who mask
};

struct LiveTile {
  int first, keys;  // position of the first key; 0 keys: there are no more tiles
  int segment;
  unsigned flags;  // without last_tile
};

// The walk, by all lanes of one warp. Item: the item of forward.cuh.
template <Tile tile, class Item>
struct LiveTiles {
  static constexpr int pieces = mask_blocks<tile>, blocks = tile.groups * pieces;
  static_assert(blocks <= 2 * max_groups && tile.keys <= 128);

  const attn_mask_arrays& a;
  const Item& item;
  const long long grid;  // of the item's batch entry and head
  int column;            // of tile.keys keys each: where the 32 begin that are looked at next
  unsigned live;         // of the 32 before, those that may be seen and have not been given yet
  int first, end;        // what is left of the current column
  int segment;

  __device__ __forceinline__ LiveTiles(const attn_mask_arrays& a, const Item& item)
      : a(a),
        item(item),
        grid(item.b * a.batch_stride + item.h * a.head_stride),
        column(item.low / tile.keys),
        live(0),
        first(0),
        end(0),
        segment(0) {}

  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }

  // The next 32 columns: which of them may be seen.
  __device__ __forceinline__ void look() {
    const int from = (column + lane()) * tile.keys, to = min(from + tile.keys, item.high);
    bool sees = false;
#pragma unroll
    for (int g = 0; g < tile.groups; ++g) {
      const int row = item.row + 64 * g;
      if (row >= item.seqlen_q || from >= item.see[g].y || to <= item.see[g].x) continue;
      for (int at = from & ~63; at < to; at += 64)
        sees = sees || mask_may_see(a, grid, row >> a.block_q_log2, at >> a.block_k_log2);
    }
    live = __ballot_sync(0xffffffff, sees);
    column += 32;
  }

  // What the mask says to this lane's warpgroup about this lane's piece of the tile at `first`.
  __device__ __forceinline__ int block_of_lane() const {
    const int group = lane() / pieces, row = item.row + 64 * group;
    const int at = (first / tile.keys * tile.keys & ~63) + 64 * (lane() % pieces);
    if (lane() >= blocks || row >= item.seqlen_q || at >= end) return mask_empty;
    return mask_block(a, grid, row >> a.block_q_log2, at >> a.block_k_log2, row,
                      min(row + 64, item.seqlen_q) - 1, item.seqlen_kv - item.seqlen_q);
  }

  // The next tile, whose blocks are left in `to`.
  __device__ __forceinline__ LiveTile find(TileBlocks& to) {
    for (;;) {
      while (first >= end) {
        while (live == 0) {
          if (column * tile.keys >= item.high) return {0, 0, 0, 0};
          look();
        }
        const int at = (column - 32 + __ffs(int(live)) - 1) * tile.keys;
        live &= live - 1;
        first = max(item.low, at);
        end = min(item.high, at + tile.keys);
      }
      while (item.segment[segment].end <= first) ++segment;
      LiveTile found{first, min(item.segment[segment].end, end) - first, segment, 0};
      const int block = block_of_lane();
      const unsigned some = __ballot_sync(0xffffffff, block != mask_empty);
      const unsigned full = __ballot_sync(0xffffffff, block == mask_full);
      first += found.keys;
      bool unused = true;
#pragma unroll
      for (int g = 0; g < tile.groups; ++g) {
        constexpr unsigned ones = (1u << pieces) - 1;
        const int4 see = item.see[g];
        if ((some >> g * pieces & ones) != 0 && found.first < see.y &&
            found.first + found.keys > see.x)
          found.flags |= sees_some << 4 * g;
        if ((full >> g * pieces & ones) == ones && found.first >= see.z &&
            found.first + tile.keys <= see.w && found.keys == tile.keys) {
          found.flags |= sees_all << 4 * g;
          unused = false;
        }
      }
      if (found.flags == 0) continue;
      if (unused) found.flags |= has_unused;
      if (lane() < blocks) to.block[lane()] = block;
      if (lane() < 4) to.seen[lane()] = 0;
      __syncwarp();
      return found;
    }
  }
};

// The x lowest bits.
__device__ __forceinline__ unsigned low_bits(int x) {
  return x <= 0 ? 0 : x >= 32 ? ~0u : (1u << x) - 1;
}

// By the mask alone: which of the 32 keys from position `at` on, a multiple of 32, query `row` sees.
// block: what mask_block says about the pieces of the tile, the first of which begins at `from`.
// diagonal: Skv - Sq.
template <Tile tile>
__device__ __forceinline__ unsigned aligned_visible(const attn_mask_arrays& a, const int* block,
                                                    int from, int at, int row, int diagonal) {
  const int piece = (at - from) / 64;
  const int kind = piece < mask_blocks<tile> ? block[piece] : mask_empty;
  if (kind == mask_causal) return low_bits(row + diagonal + 1 - at);
  if (kind < 0) return kind == mask_full ? ~0u : 0;
  const long long line = ((long long)kind << a.block_q_log2) + (row & ((1 << a.block_q_log2) - 1));
  return a.bits[(line << (a.block_k_log2 - 5)) + ((at & ((1 << a.block_k_log2) - 1)) >> 5)];
}
// The same from any position on, in the tile that begins at `first` or later.
template <Tile tile>
__device__ __forceinline__ unsigned visible(const attn_mask_arrays& a, const int* block, int first,
                                            int at, int row, int diagonal) {
  const int from = first / tile.keys * tile.keys & ~63, aligned = at & ~31;
  const auto word = [&](int at) {
    return aligned_visible<tile>(a, block, from, at, row, diagonal);
  };
  return at == aligned ? word(at) : __funnelshift_r(word(aligned), word(aligned + 32), at % 32);
}

}  // namespace attn::sm90
