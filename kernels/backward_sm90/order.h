// Which tiles of queries a block of keys works on, and the order in which blocks add to a tile's
// dq. The order is what makes the bits of dq the same on every run; it is also the order in which
// the blocks get there, so that they hardly wait. Host code includes this too.
#ifndef ATTN_KERNELS_BACKWARD_SM90_ORDER_H
#define ATTN_KERNELS_BACKWARD_SM90_ORDER_H

#include "../backward/prepare_args.h"
#include "../shared/mask.h"

namespace attn::bwd_sm90 {

constexpr int tile_queries = attn_backward_tile;

// From first to last, both included. Empty if last < first.
struct Range {
  int first, last;

  ATTN_HOST_DEVICE constexpr int count() const { return last < first ? 0 : last - first + 1; }
};

// Of one sequence: query i sees keys [i + lower, i + upper) of those there are.
struct Sequence {
  int queries, keys;  // below 2^29
  int lower, upper;   // within 2^30

  // Tiles of queries that see some of the `count` keys from `key` on.
  ATTN_HOST_DEVICE constexpr Range tiles(int key, int count) const {
    const int end = key + count < keys ? key + count : keys;
    if (upper <= lower || end <= key) return {0, -1};
    const int first = key - upper + 1 > 0 ? key - upper + 1 : 0;
    const int last = end - 1 - lower < queries - 1 ? end - 1 - lower : queries - 1;
    if (last < first) return {0, -1};
    return {first / tile_queries, last / tile_queries};
  }
  // Queries that see a key, and keys that a query sees, if there is such a pair. What the others
  // hold is not used.
  ATTN_HOST_DEVICE constexpr Range seeing() const {
    return {1 - upper > 0 ? 1 - upper : 0, (keys - lower < queries ? keys - lower : queries) - 1};
  }
  ATTN_HOST_DEVICE constexpr Range seen() const {
    return {lower > 0 ? lower : 0, (queries - 1 + upper < keys ? queries - 1 + upper : keys) - 1};
  }
  // Blocks of `block_keys` keys that have some of a tile's: those whose tiles() contain it.
  ATTN_HOST_DEVICE constexpr Range blocks(int tile, int block_keys) const {
    const int query = tile * tile_queries;
    const int end = query + tile_queries < queries ? query + tile_queries : queries;
    if (upper <= lower || end <= query) return {0, -1};
    const int first = query + lower > 0 ? query + lower : 0;
    const int last = end - 1 + upper < keys ? end - 2 + upper : keys - 1;
    if (last < first) return {0, -1};
    return {first / block_keys, last / block_keys};
  }
};

ATTN_HOST_DEVICE constexpr int within(long long x, int limit) {
  return x < -limit ? -limit : x > limit ? limit : int(x);
}
ATTN_HOST_DEVICE constexpr Sequence sequence(const RangeMask& mask, int queries, int keys) {
  const KeyBand band = mask.band(queries, keys);
  return {queries, keys, within(band.lower, 1 << 30), within(band.upper, 1 << 30)};
}

// Blocks are in groups. Groups add in ascending order, and a group's blocks in descending order:
// under a mask with a diagonal a group's last block begins furthest down, so it comes to each tile
// first.
struct Order {
  int group;

  struct Turn {
    int before;  // blocks that add to the tile earlier
    int blocks;  // that add to it
  };
  ATTN_HOST_DEVICE constexpr Turn turn(Range adding, int block) const {
    const int first = block / group * group;
    const int last = first + group - 1 < adding.last ? first + group - 1 : adding.last;
    return {(first > adding.first ? first - adding.first : 0) + last - block, adding.count()};
  }
};

// Items are listed in an order in which each adds after items before it only. So the first one that
// has not ended waits for none, and any number of multiprocessors gets through.
//
// Under a full mask the blocks of a group begin at the same tile, and each waits there until the
// one before has added. If the same block of all pairs comes before the next block (`across`),
// multiprocessors that begin late also end late, and take items that are to begin late.
struct ItemList {
  int pairs;   // of sequence and query head
  int blocks;  // of keys, of the longest sequence
  int group;
  int chunk;  // pairs whose items follow each other
  bool across;

  struct At {
    int pair, block;
  };
  // Chunk by chunk, in a chunk group by group. In a group pair by pair, and of these the blocks
  // downwards; across: the blocks downwards, and of these pair by pair.
  ATTN_HOST_DEVICE constexpr At at(unsigned index) const {
    const unsigned first_pair = index / (unsigned(chunk) * blocks) * chunk;
    const unsigned width = pairs - first_pair < unsigned(chunk) ? pairs - first_pair : chunk;
    const unsigned in_chunk = index - first_pair * blocks;
    const unsigned first_block = in_chunk / (width * group) * group;
    const unsigned here = blocks - first_block < unsigned(group) ? blocks - first_block : group;
    const unsigned in_group = in_chunk - width * first_block;
    const unsigned pair = across ? in_group % width : in_group / here;
    const unsigned from_last = across ? in_group / width : in_group % here;
    return {int(first_pair + pair), int(first_block + here - 1 - from_last)};
  }
};

// Blocks of keys have numbers across sequences too. begin: the sequence's first row in a packed
// array.
ATTN_HOST_DEVICE constexpr long long first_key_block(bool packed, int b, long long begin,
                                                     int capacity, int block_keys) {
  return packed ? b + begin / block_keys : b * ((capacity + block_keys - 1ll) / block_keys);
}

}  // namespace attn::bwd_sm90
#endif
