// The walk over the keys that a tile of queries sees.
#pragma once

namespace attn::device {

// A tile of keys. Tiles follow each other segment by segment, older first, and do not reach across
// segments. Block has `low` and `high`, between which the queries see keys, and segment[].end,
// positions after the segments' last keys.
struct Keys {
  int segment;
  int first;  // position of the tile's first key
  int left;   // keys of the segment that the block sees, from there on; 0: after the last tile

  template <class Block>
  __device__ __forceinline__ explicit Keys(const Block& block) : segment(0), first(block.low) {
    find(block);
  }
  template <class Block>
  __device__ __forceinline__ void find(const Block& block) {
    left = 0;
    if (first >= block.high) return;
    while (block.segment[segment].end <= first) ++segment;
    left = min(block.segment[segment].end, block.high) - first;
  }
  template <class Block>
  __device__ __forceinline__ void next(const Block& block, int keys) {
    first += min(left, keys);
    left -= keys;
    if (left <= 0) find(block);
  }
};

}  // namespace attn::device
