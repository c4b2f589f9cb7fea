// The work of decode_* in units of 64 keys of a head's row tile, and each block's share. A row tile
// is as many rows of a sequence and K/V head as a block computes at once. Blocks form columns: the
// blocks of a column share the sequences of its heads, mostly of one head. So at any time
// neighbouring columns read other heads of the same tokens, which are adjacent in memory.
//
// Blocks share units; with fixed_split they share splits, whose keys are counted from a segment's
// first key, or whole row tiles. A split is summed separately, and identified by its number in the
// sequence.
#pragma once
#include "../common/lengths.cuh"
#include "../common/positions.cuh"
#include "decode_args.h"
#include "decode_tiles.h"

namespace attn::decode {

using namespace device;

template <DecodeTile tile>
__device__ __forceinline__ attn_positions positions_of(const attn_decode_kernarg& a) {
  return tile.takes_positions() ? a.positions : attn_positions{};
}

// A sequence and one of its row tiles, the same for all its K/V heads.
template <DecodeTile tile>
struct Sequence {
  static constexpr bool tiled = tile.tiled;
  int seqlen_q, seqlen_kv;
  int q_begin;                 // packed q: row of query 0
  int first_row;               // of the row tile
  int low, high;               // keys that some query of it sees
  int units;                   // at least 1 where there are queries, whose rows someone must write
  int split_begin, split_end;  // with fixed_split: numbers of its splits

  Sequence() = default;
  __device__ __forceinline__ Sequence(const attn_decode_kernarg& a, int b) {
    const Span queries = a.cu_seqlens_q ? packed_span(a.cu_seqlens_q, b, a.total_q, a.seqlen_q)
                                        : Span{0, a.seqlen_q};
    seqlen_q = queries.length * a.group <= a.rows_taken ? queries.length : 0;
    q_begin = int(queries.begin);
    seqlen_kv = 0;
#pragma unroll 1
    for (int i = 0; i < a.num_segments; ++i)
      seqlen_kv += segment_span(a.segment[i].lengths, b).length;
    set_row(a, b, 0);
  }
  __device__ __forceinline__ int rows(const attn_decode_kernarg& a) const {
    return seqlen_q * a.group;
  }
  __device__ __forceinline__ void set_row(const attn_decode_kernarg& a, int b, int row) {
    first_row = row;
    if (a.sees_all && (!tiled || rows(a) <= tile.rows())) {
      low = 0;
      high = seqlen_kv;
      split_begin = 0;
      split_end = 1;
      units = seqlen_q == 0 ? 0 : max((seqlen_kv + unit_keys - 1) / unit_keys, 1);
      return;
    }
    const SeenPlaces seen = seen_places(a.mask, positions_of<tile>(a), b, seqlen_q, seqlen_kv);
    const int first = tiled ? row / a.group : 0,
              last = tiled ? min(row + tile.rows(), rows(a)) - 1 : 0;
    low = keys_before(positions_of<tile>(a), first + seen.lower, seqlen_kv);
    high = keys_before(positions_of<tile>(a), (tiled ? last / a.group : seqlen_q - 1) + seen.upper,
                       seqlen_kv);
    // Keys before it are not valid in their unit, so those that compute need no kv_begin.
    if (tile.takes_kv_begin()) low = max(low, first_key(a.kv_begin, b, seqlen_kv));
    units = split_begin = split_end = 0;
    if (seqlen_q == 0) return;
    int begin = 0, splits = 0;  // splits: of the segments before
#pragma unroll 1
    for (int i = 0; i < a.num_segments; ++i) {
      const int end = begin + segment_span(a.segment[i].lengths, b).length;
      if (tile.swapped && a.split_keys) {
        const int own = count_of(begin, end, a.split_keys);
        if (own > 0) {
          const int last = splits + (min(high, end) - begin - 1) / a.split_keys;
          split_end = last + 1;
          if (units == 0) split_begin = split_end - own;
        }
        splits += (end - begin + a.split_keys - 1) / a.split_keys;
      }
      units += units_of(begin, end);
      begin = end;
    }
    units = max(units, 1);
    split_end = max(split_end, 1);
  }
  __device__ __forceinline__ int shares(const attn_decode_kernarg& a) const {
    if (!tile.swapped || !a.split_keys || units == 0) return units;
    return a.whole_heads ? 1 : split_end - split_begin;
  }
  // Goes to the next row tile, if there is one.
  __device__ __forceinline__ bool next_tile(const attn_decode_kernarg& a, int b) {
    if (!tiled || first_row + tile.rows() >= rows(a)) return false;
    set_row(a, b, first_row + tile.rows());
    return true;
  }
  // Shares of all row tiles; the sequence is at its first before and after.
  __device__ __forceinline__ int count(const attn_decode_kernarg& a, int b) {
    int all = shares(a);
    if (tiled && tile.rows() < rows(a)) {
      while (next_tile(a, b)) all += shares(a);
      set_row(a, b, 0);
    }
    return all;
  }

  // Of a segment: what has keys that are seen, of as many keys each, counted from its first key.
  __device__ __forceinline__ int count_of(int begin, int end, int keys) const {
    const int from = max(low, begin), to = min(high, end);
    return to > from ? (to - begin + keys - 1) / keys - (from - begin) / keys : 0;
  }
  __device__ __forceinline__ int units_of(int begin, int end) const {
    return count_of(begin, end, unit_keys);
  }
  // Units before a share.
  __device__ __forceinline__ int units_before(const attn_decode_kernarg& a, int b,
                                              int share) const {
    if (!tile.swapped || !a.split_keys || share == 0) return share;
    int begin = 0, units = 0;
#pragma unroll 1
    for (int i = 0; i < a.num_segments; ++i) {
      const int end = begin + segment_span(a.segment[i].lengths, b).length;
      const int own = count_of(begin, end, a.split_keys);
      if (share < own) {
        const int from = max(low - begin, 0);
        const int at = (from / a.split_keys + share) * a.split_keys;
        return units + max(at - from / unit_keys * unit_keys, 0) / unit_keys;
      }
      share -= own;
      units += units_of(begin, end);
      begin = end;
    }
    return units;
  }
};

// A unit, and the way to the next.
template <DecodeTile tile>
struct Cursor {
  Sequence<tile> sequence;
  int b, h;        // sequence and K/V head
  int left;        // units of both from this one on
  int split;       // with fixed_split: number of the unit's split
  int segment;     // that the unit is in
  int begin, end;  // positions of the segment's first key and after its last
  int first;       // position of the unit's first key
  int row;         // packed K/V: of the segment's first key

  __device__ __forceinline__ void find(const attn_decode_kernarg& a, int skip) {
    begin = 0;
#pragma unroll 1
    for (segment = 0;; ++segment) {
      const Span span = segment_span(a.segment[segment].lengths, b);
      row = int(span.begin);
      end = begin + span.length;
      const int units = sequence.units_of(begin, end);
      if (skip < units || segment == a.num_segments - 1) break;
      skip -= units;
      begin = end;
    }
    first = begin + (max(sequence.low - begin, 0) / unit_keys + skip) * unit_keys;
  }
  // split_ends: with fixed_split, whether the unit is its split's last.
  __device__ __forceinline__ void next(const attn_decode_kernarg& a, bool split_ends) {
    if (tile.swapped) split += split_ends;
    if (--left > 0) {
      first += unit_keys;
      if (first >= end) find(a, sequence.units - left);
      return;
    }
    if (!sequence.next_tile(a, b)) do {
        if (++b == a.batch) b = 0, ++h;
        sequence = Sequence<tile>(a, b);
      } while (sequence.units == 0);
    left = sequence.units;
    split = sequence.split_begin;
    find(a, 0);
  }
};

// The shares of a column, in the order of heads, sequences and keys, and its blocks: each has as
// many, or one more.
struct Share {
  unsigned total, blocks;

  __device__ __forceinline__ unsigned begin(unsigned block) const {
    return total / blocks * block + min(block, total % blocks);
  }
  // The block that has share u.
  __device__ __forceinline__ unsigned block_of(unsigned u) const {
    const unsigned fewer = total / blocks, more = total % blocks;
    return u < more * (fewer + 1) ? u / (fewer + 1) : more + (u - more * (fewer + 1)) / fewer;
  }
};

// The sums of x over the threads up to this one, and over all. By all threads of a block, or by
// those of one warp.
struct Scan {
  unsigned up_to_here, all;
};
template <int threads>
__device__ __forceinline__ Scan scan(unsigned x) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const unsigned before = __shfl_up_sync(0xffffffff, x, step);
    if (lane >= step) x += before;
  }
  if constexpr (threads == 32) return {x, __shfl_sync(0xffffffff, x, 31)};
  __shared__ unsigned warp_sums[threads / 32];
  if (lane == 31) warp_sums[warp] = x;
  __syncthreads();
  Scan sums = {x, 0};
#pragma unroll
  for (int w = 0; w < threads / 32; ++w) {
    if (w < warp) sums.up_to_here += warp_sums[w];
    sums.all += warp_sums[w];
  }
  __syncthreads();
  return sums;
}

// Units that are summed up together, of a head's row tile, whose units have the numbers [begin,
// end) in the column. With fixed_split: split `number` of [begin, end).
struct Part {
  unsigned number, begin, end;
};

template <DecodeTile tile>
struct Work {
  Share share;
  unsigned begin, end;  // shares of this block
  Cursor<tile> first;

  // Blocks of a column are `columns` apart.
  static __device__ __forceinline__ unsigned row(const attn_decode_kernarg& a) {
    return blockIdx.x / a.columns;
  }
};

// By all threads of a block, or by those of one warp, of which each is `thread`.
template <DecodeTile tile, int threads = tile.threads()>
__device__ __forceinline__ Work<tile> find_work(const attn_decode_kernarg& a, int thread) {
  __shared__ Cursor<tile> first;
  const unsigned column = blockIdx.x % a.columns;
  const int head = column * a.heads_kv / a.columns,
            heads = (column + 1) * a.heads_kv / a.columns - head;
  Sequence<tile> sequence;
  Scan sums = {0, 0};
  unsigned own = 0, all = 0, before = 0, wanted = 0;
  Work<tile> work;
  // First all are counted, then the one that has the block's first share is found.
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
#pragma unroll 1
    for (int b = thread; b - thread < a.batch; b += threads) {
      if (pass == 0 || a.batch > threads) {
        own = 0;
        if (b < a.batch) {
          sequence = Sequence<tile>(a, b);
          own = sequence.count(a, b);
        }
        sums = scan<threads>(own);
      }
      if (pass == 0) {
        all += sums.all;
        continue;
      }
      const unsigned end = before + sums.up_to_here;
      if (wanted < end && wanted >= end - own) {
        Cursor<tile> at;
        at.b = b;
        at.h = heads == 1 ? head : head + work.begin / all;
        int skip = wanted - (end - own);
        while (skip >= sequence.shares(a)) {
          skip -= sequence.shares(a);
          if (!sequence.next_tile(a, b)) break;
        }
        at.sequence = sequence;
        at.split = sequence.split_begin + skip;
        skip = sequence.units_before(a, b, skip);
        at.left = sequence.units - skip;
        at.find(a, skip);
        first = at;
      }
      before += sums.all;
    }
    if (pass > 0) break;
    work.share = {all * heads, gridDim.x / a.columns};
    work.begin = work.share.begin(work.row(a));
    work.end = work.share.begin(work.row(a) + 1);
    if (work.begin == work.end) return work;
    wanted = heads == 1 ? work.begin : work.begin % all;
  }
  if constexpr (threads == 32)
    __syncwarp();
  else
    __syncthreads();
  work.first = first;
  return work;
}

}  // namespace attn::decode
