// The walk over the tiles of keys in the blocks of a mask that are not EMPTY for a block's queries.
#pragma once
#include "../common/block_mask.cuh"
#include "../common/keys.cuh"
#include "../common/lengths.cuh"
#include "forward_args.h"

namespace attn::sm80 {

using namespace device;

// The keys [low, high) of a column of mask blocks, as Keys walks them.
template <class Segment>
struct ColumnPart {
  int low, high;
  const Segment* segment;
};
template <class Segment>
ColumnPart(int, int, const Segment*) -> ColumnPart<Segment>;

// In shared memory: the tiles of up to 16 columns of the mask's grid at a time, after the last tile
// of the previous columns. A tile is inside one block of the mask and one segment.
template <int keys>
struct TileList {
  static constexpr int columns_at_once = 16;
  static constexpr int capacity = 1 + columns_at_once * (128 / keys) + attn_sm80_max_segments;

  struct Tile {
    int first;            // position of the first key
    short left, segment;  // left: keys of the tile
    int mask[2];  // mask_block for the first and for the second row of the grid that the queries
                  // meet
  };
  Tile tile[capacity];
  int count;   // 1: there are no more tiles
  int column;  // of the grid, the first one that is not in the list yet
  long long grid;
  int row[2];             // of the grid; equal: there is one
  int first[2], last[2];  // queries in each

  template <class Block>
  __device__ __forceinline__ void start(const attn_mask_arrays& a, const Block& block,
                                        int tile_rows) {
    grid = block.b * a.batch_stride + block.h * a.head_stride;
    const int end = min(block.row + tile_rows, block.seqlen_q) - 1;
    row[0] = block.row >> a.block_q_log2;
    row[1] = end >> a.block_q_log2;
    first[0] = block.row;
    last[0] = min(end, ((row[0] + 1) << a.block_q_log2) - 1);
    first[1] = max(block.row, row[1] << a.block_q_log2);
    last[1] = end;
    column = block.low >> a.block_k_log2;
    count = 1;
  }

  // Makes the last tile number 0 and appends the next ones. By all lanes of one warp;
  // afterwards the block's warps must wait for each other.
  template <class Block>
  __device__ __forceinline__ void fill(const attn_mask_arrays& a, const Block& block) {
    const int lane = threadIdx.x % 32, diagonal = block.diagonal;
    if (lane == 0) tile[0] = tile[count - 1];
    __syncwarp();
    const int end = block.high > block.low ? ((block.high - 1) >> a.block_k_log2) + 1 : 0;
    int at = column, total = 0;
    while (at < end && total == 0) {
      // Skips what is EMPTY, 128 columns at a time.
      constexpr int loads = 4;
      bool sees[loads];
#pragma unroll
      for (int n = 0; n < loads; ++n) {
        const int c = at + 32 * n + lane;
        sees[n] = c < end && (mask_may_see(a, grid, row[0], c) || mask_may_see(a, grid, row[1], c));
      }
      int skip = 32 * loads;
#pragma unroll
      for (int n = loads - 1; n >= 0; --n) {
        const unsigned some = __ballot_sync(0xffffffff, sees[n]);
        if (some) skip = 32 * n + __ffs(int(some)) - 1;
      }
      at += skip;
      if (skip == 32 * loads) continue;

      // A lane has a column.
      const int c = at + lane;
      int mask[2] = {mask_empty, mask_empty};
      if (lane < columns_at_once && c < end) {
#pragma unroll
        for (int n = 0; n < 2; ++n)
          mask[n] = mask_block(a, grid, row[n], c, first[n], last[n], diagonal);
      }
      const bool live = mask[0] != mask_empty || mask[1] != mask_empty;
      const ColumnPart part{live ? max(block.low, c << a.block_k_log2) : 0,
                            live ? min(block.high, (c + 1) << a.block_k_log2) : 0, block.segment};
      int behind = 0;  // the lane's tiles, then with those of the lanes before it
      for (Keys k(part); k.left > 0; k.next(part, keys)) ++behind;
      const int own = behind;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(0xffffffff, behind, step);
        if (lane >= step) behind += before;
      }
      int to = 1 + behind - own;
      for (Keys k(part); k.left > 0; k.next(part, keys))
        tile[to++] = {k.first, short(min(k.left, keys)), short(k.segment), {mask[0], mask[1]}};
      total = __shfl_sync(0xffffffff, behind, 31);
      at += columns_at_once;
    }
    __syncwarp();
    if (lane == 0) {
      count = 1 + total;
      column = at;
    }
    __syncwarp();
  }
};

// As Keys, by the list.
template <int keys>
struct ListedKeys {
  int at;  // in the list; the tile before is there too
  int segment, first, left;

  __device__ __forceinline__ explicit ListedKeys(const TileList<keys>& list) : at(1) { read(list); }
  __device__ __forceinline__ void read(const TileList<keys>& list) {
    const auto& tile = list.tile[at];
    segment = tile.segment;
    first = tile.first;
    left = at < list.count ? tile.left : 0;
  }
  template <class Block>
  __device__ __forceinline__ void next(TileList<keys>& list, const attn_mask_arrays& a,
                                       const Block& block) {
    if (++at == list.count) {
      __syncthreads();
      if (threadIdx.x < 32) list.fill(a, block);
      __syncthreads();
      at = 1;
    }
    read(list);
  }
};

}  // namespace attn::sm80
