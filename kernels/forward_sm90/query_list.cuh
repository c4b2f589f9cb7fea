// Packed q of which one sequence has many queries and most have few: items counted from capacities
// would nearly all be empty. So query tiles are counted from the lengths. The tiles of a sequence
// are consecutive, the last one first, each with heads_together heads. Then come all tiles again
// with the next heads.
#pragma once
#include "../common/lengths.cuh"
#include "forward_args.h"
#include "tiles.h"

namespace attn::sm90 {

using namespace device;

// By all lanes of one warp. Items are asked for in ascending order.
template <Tile tile>
struct QueryList {
  const attn_sm90_paged_kernarg& a;
  int first = -32;                // sequence of lane 0
  unsigned own = 0, through = 0;  // tiles of the lane's sequence; of all up to it

  __device__ __forceinline__ void look(int sequence, unsigned before) {
    first = sequence;
    own = 0;
    const int b = first + threadIdx.x % 32;
    if (b < a.batch) {
      const int queries = packed_span(a.cu_seqlens_q, b, a.total_q, a.seqlen_q).length;
      if (queries >= a.least_queries) own = (queries + tile.item_rows() - 1) / tile.item_rows();
    }
    through = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const unsigned x = __shfl_up_sync(0xffffffff, through, step);
      if (threadIdx.x % 32 >= step) through += x;
    }
    through += before;
  }
  __device__ __forceinline__ unsigned last() const { return __shfl_sync(0xffffffff, through, 31); }
  // Items of all sequences.
  __device__ __forceinline__ unsigned count() {
    unsigned tiles = 0;
#pragma unroll 1
    for (int b = 0; b < a.batch; b += 32) {
      look(b, tiles);
      tiles = last();
    }
    if (a.batch > 32) look(0, 0);
    return tiles * a.heads_q;
  }
  // items: what count() said.
  __device__ __forceinline__ QueryTile find(unsigned item, unsigned items) {
    const unsigned of_heads = items / a.heads_q * a.heads_together, heads = item / of_heads;
    item -= heads * of_heads;
    const unsigned at = item / a.heads_together;
    if (at < __shfl_sync(0xffffffff, through - own, 0)) look(0, 0);
#pragma unroll 1
    while (at >= last()) look(first + 32, last());
    const int lane = __ffs(__ballot_sync(0xffffffff, at < through)) - 1;
    const unsigned behind = __shfl_sync(0xffffffff, through, lane);
    return {first + lane, int(heads * a.heads_together + item % a.heads_together),
            int(behind - 1 - at)};
  }
};

}  // namespace attn::sm90
