// The order of the last items under a block mask: the longest first, so that the blocks end
// together. Earlier items are taken in order, which keeps K and V in L2. In each block a warp that
// has nothing else to do takes a share of these items, counts the mask columns that are not EMPTY
// for each, and enters the item in the class of its count. Then all blocks take items from the
// classes, within a class in order, so that they work on one head together. A block waits only
// until the shares that were taken are entered. Running blocks took them, so a block that starts
// late delays no other.
#pragma once
#include "../common/block_mask.cuh"
#include "../common/lengths.cuh"
#include "../ptx/acquire.h"
#include "control.cuh"
#include "forward_args.h"
#include "live_tiles.cuh"
#include "tiles.h"

namespace attn::sm90 {

using namespace device;

static_assert(attn_sm90_order_classes == 32);  // one to a lane

// The queries of work item `index`; in a cluster of heads, of the block's head.
template <Tile tile>
__device__ __forceinline__ QueryTile item_queries(const attn_sm90_forward_kernarg& a,
                                                  unsigned index) {
  constexpr int rows = tile.item_rows(), heads = tile.item_heads();
  QueryTile at =
      query_tile(index, a.batch, a.heads_q / heads, (a.seqlen_q + rows - 1) / rows, a.chunk);
  if (heads > 1) at.h = at.h * heads + block_of_cluster<tile>();
  return at;
}

__device__ __forceinline__ bool sorts_items(const attn_sm90_mask_kernarg& a) {
  return a.items > gridDim.x;
}
// The first item of a block is no other's, so it is not among them.
__device__ __forceinline__ unsigned sorted_items(const attn_sm90_mask_kernarg& a) {
  return min(a.items - gridDim.x, unsigned(attn_sm90_order_max_items));
}

// The class of an item with this many live columns: class 31 for none, one class for each of 1 to
// 7, then one for each quarter of an octave; class 0 has the largest counts.
__device__ __forceinline__ int class_of(int columns) {
  if (columns < 8) return 31 - columns;
  const int octave = 28 - __clz(columns);
  return max(0, 31 - 8 - 4 * octave - (columns >> (octave + 1) & 3));
}

// Columns of the mask's grid that some query of the item may see: every `step`-th, from the
// `from`-th on.
template <Tile tile>
__device__ __forceinline__ int live_columns(const attn_sm90_mask_kernarg& a, unsigned index,
                                            int from, int step) {
  constexpr int rows = tile.rows(), mask_rows = grid_rows<tile>;
  const attn_mask_arrays& mask = a.block_mask;
  const QueryTile at = item_queries<tile>(a, index);
  int length = 0;
  for (int i = 0; i < a.num_segments; ++i) length += segment_span(a.segment[i], at.b).length;
  const int first = at.tile * rows, last = min(first + rows, a.seqlen_q) - 1;
  const int low = clamp(a.mask.keys(first, a.seqlen_q, length).begin, 0, length);
  const int high = clamp(a.mask.keys(last, a.seqlen_q, length).end, 0, length);
  if (low >= high) return 0;
  const unsigned char* kinds = mask.kinds + at.b * mask.batch_stride + at.h * mask.head_stride;
  const unsigned char* at_row[mask_rows];
#pragma unroll
  for (int r = 0; r < mask_rows; ++r)
    at_row[r] = kinds + (long long)grid_row<tile>(mask, first, last, r) * mask.columns;
  const int behind = ((high - 1) >> mask.block_k_log2) + 1;
  const int causal_end = last + length - a.seqlen_q;  // the last key that CAUSAL blocks show
  int live = 0;
  constexpr int at_once = 8;
  for (int column = (low >> mask.block_k_log2) + from; column < behind; column += at_once * step) {
    unsigned kind[at_once][mask_rows];
#pragma unroll
    for (int n = 0; n < at_once; ++n) {
      const int at = min(column + n * step, behind - 1);
#pragma unroll
      for (int r = 0; r < mask_rows; ++r) kind[n][r] = at_row[r][at];
    }
#pragma unroll
    for (int n = 0; n < at_once; ++n) {
      const int at = column + n * step;
      const unsigned least =
          at << mask.block_k_log2 <= causal_end ? attn_kind_causal : attn_kind_full;
      const unsigned width = attn_kind_partial - least;
      bool sees = false;
#pragma unroll
      for (int r = 0; r < mask_rows; ++r) sees |= kind[n][r] - least <= width;
      live += at < behind && sees;
    }
  }
  return live;
}

// Until all items are listed. By all lanes of one warp.
template <Tile tile>
__device__ __forceinline__ void list_items(const attn_sm90_mask_kernarg& a) {
  constexpr unsigned lanes = 4, share = 32 / lanes;  // items at a time
  const unsigned lane = threadIdx.x % 32, items = sorted_items(a);
  attn_sm90_order& order = *a.order;
  for (;;) {
    const unsigned first =
        __shfl_sync(0xffffffff, lane == 0 ? atomicAdd(&order.shares, 1) : 0, 0) * share;
    if (first >= items) break;
    const unsigned n = first + lane / lanes;
    int live = n < items ? live_columns<tile>(a, a.items - items + n, lane % lanes, lanes) : 0;
#pragma unroll
    for (unsigned step = 1; step < lanes; step *= 2)
      live += __shfl_xor_sync(0xffffffff, live, step);
    if (n < items && lane % lanes == 0)
      atomicOr(&order.in_class[class_of(live)][n / 32], 1u << n % 32);
    __syncwarp();
    if (lane == 0) {
      __threadfence();
      atomicAdd(&order.listed, min(share, items - first));
    }
  }
  if (lane == 0) {
    while (ptx::load_acquire(&order.listed) < items) __nanosleep(64);
  }
  __syncwarp();
}

// What a warp that takes items knows about the classes once all items are listed.
struct ItemOrder {
  unsigned begin, behind;  // ranks of the items of the lane's class

  __device__ __forceinline__ void look(const attn_sm90_order& order) {
    unsigned count = 0;
    for (const unsigned& word : order.in_class[threadIdx.x % 32]) count += __popc(__ldcg(&word));
    behind = sum_up(count);
    begin = behind - count;
  }
  // Of the lanes up to this one.
  static __device__ __forceinline__ unsigned sum_up(unsigned x) {
    const unsigned lane = threadIdx.x % 32;
#pragma unroll
    for (unsigned step = 1; step < 32; step *= 2) {
      const unsigned before = __shfl_up_sync(0xffffffff, x, step);
      if (lane >= step) x += before;
    }
    return x;
  }
  // The next item, a.items if there is none. Whoever is the last to be told so leaves the counters
  // at 0: nobody reads them any more, for list_items ends before its block takes.
  __device__ __forceinline__ unsigned take(const attn_sm90_mask_kernarg& a) const {
    const unsigned lane = threadIdx.x % 32, items = sorted_items(a), first = a.items - items;
    attn_sm90_order& order = *a.order;
    const unsigned taken = __shfl_sync(0xffffffff, lane == 0 ? atomicAdd(a.taken, 1) : 0, 0);
    const unsigned index = gridDim.x + taken, n = index - first;
    if (index < first) return index;
    if (index >= a.items) {
      if (taken == a.items - 1) {
        for (unsigned& word : order.in_class[lane]) word = 0;
        if (lane == 0) order.taken = order.shares = order.listed = 0;
      }
      return a.items;
    }
    // Items without keys come in the middle, where their stores overlap with computation.
    const unsigned seeing = __shfl_sync(0xffffffff, begin, 31), half = seeing / 2;
    const unsigned rank = n < half                    ? n
                          : n < half + items - seeing ? n + seeing - half
                                                      : n + seeing - items;
    const unsigned c = __popc(__ballot_sync(0xffffffff, behind <= rank));
    const unsigned in_class = rank - __shfl_sync(0xffffffff, begin, c);
    const unsigned mine = lane < attn_sm90_order_words ? __ldcg(&order.in_class[c][lane]) : 0;
    const unsigned up_to = sum_up(__popc(mine)), before = up_to - __popc(mine);
    const unsigned at = __popc(__ballot_sync(0xffffffff, up_to <= in_class));
    const unsigned word = __shfl_sync(0xffffffff, mine, at);
    const unsigned in_word = in_class - __shfl_sync(0xffffffff, before, at);
    const bool found = word >> lane & 1 && __popc(word & ((1u << lane) - 1)) == in_word;
    return first + 32 * at + __ffs(__ballot_sync(0xffffffff, found)) - 1;
  }
};

}  // namespace attn::sm90
