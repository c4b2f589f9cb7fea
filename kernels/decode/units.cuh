// The work of decode_* in units of 64 keys of a head's row tile, and each block's share. A head's
// row tile: as many rows of a sequence and K/V head as a block takes. Blocks form columns: those of
// a column share the sequences of its heads, mostly of one. So at any time neighbours read other
// heads of the same tokens, which lie side by side.
#pragma once
#include "../common/lengths.cuh"
#include "decode_args.h"
#include "decode_tiles.h"

namespace attn::decode {

using namespace device;

// A sequence and one of its row tiles, the same for all its K/V heads.
template <DecodeTile tile>
struct Sequence {
  static constexpr bool tiled = tile.row_groups > 1;
  int seqlen_q, seqlen_kv;
  long long q_begin;  // packed q: row of query 0
  int first_row;      // of the row tile
  int low, high;      // keys that some query of it sees
  int units;          // at least 1 where there are queries, whose rows someone must write

  Sequence() = default;
  __device__ __forceinline__ Sequence(const attn_decode_kernarg& a, int b) {
    const Span queries = a.cu_seqlens_q ? packed_span(a.cu_seqlens_q, b, a.total_q, a.seqlen_q)
                                        : Span{0, a.seqlen_q};
    seqlen_q = queries.length;
    q_begin = queries.begin;
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
    const KeyBand seen = a.mask.band(seqlen_q, seqlen_kv);
    const int first = tiled ? row / a.group : 0,
              last = tiled ? min(row + tile.rows(), rows(a)) - 1 : 0;
    low = clamp(first + seen.lower, 0, seqlen_kv);
    high = clamp((tiled ? last / a.group : seqlen_q - 1) + seen.upper, 0, seqlen_kv);
    units = 0;
    if (seqlen_q == 0) return;
    int begin = 0;
#pragma unroll 1
    for (int i = 0; i < a.num_segments; ++i) {
      const int end = begin + segment_span(a.segment[i].lengths, b).length;
      units += units_of(begin, end);
      begin = end;
    }
    units = max(units, 1);
  }
  // Goes to the next row tile, if there is one.
  __device__ __forceinline__ bool next_tile(const attn_decode_kernarg& a, int b) {
    if (!tiled || first_row + tile.rows() >= rows(a)) return false;
    set_row(a, b, first_row + tile.rows());
    return true;
  }
  // Of all row tiles; the sequence is at its first before and after.
  __device__ __forceinline__ int count(const attn_decode_kernarg& a, int b) {
    int all = units;
    if (tiled && tile.rows() < rows(a)) {
      while (next_tile(a, b)) all += units;
      set_row(a, b, 0);
    }
    return all;
  }

  // Units are counted from a segment's first key.
  __device__ __forceinline__ int units_of(int begin, int end) const {
    const int from = max(low, begin), to = min(high, end);
    return to > from ? (to - begin + unit_keys - 1) / unit_keys - (from - begin) / unit_keys : 0;
  }
};

// A unit, and the way to the next.
template <DecodeTile tile>
struct Cursor {
  Sequence<tile> sequence;
  int b, h;        // sequence and K/V head
  int left;        // units of both from this one on
  int segment;     // that the unit is in
  int begin, end;  // positions of the segment's first key and behind its last
  int first;       // position of the unit's first key
  long long row;   // packed K/V: of the segment's first key

  __device__ __forceinline__ void find(const attn_decode_kernarg& a, int skip) {
    begin = 0;
#pragma unroll 1
    for (segment = 0;; ++segment) {
      const Span span = segment_span(a.segment[segment].lengths, b);
      row = span.begin;
      end = begin + span.length;
      const int units = sequence.units_of(begin, end);
      if (skip < units || segment == a.num_segments - 1) break;
      skip -= units;
      begin = end;
    }
    first = begin + (max(sequence.low - begin, 0) / unit_keys + skip) * unit_keys;
  }
  __device__ __forceinline__ void next(const attn_decode_kernarg& a) {
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
    find(a, 0);
  }
};

// The units of a column, in the order of heads, sequences and keys, and the blocks that share them:
// each has as many, or one more.
struct Share {
  unsigned total, blocks;

  __device__ __forceinline__ unsigned begin(unsigned block) const {
    return total / blocks * block + min(block, total % blocks);
  }
  // The block that has unit u.
  __device__ __forceinline__ unsigned block_of(unsigned u) const {
    const unsigned fewer = total / blocks, more = total % blocks;
    return u < more * (fewer + 1) ? u / (fewer + 1) : more + (u - more * (fewer + 1)) / fewer;
  }
};

// The sums of x over the threads up to this one, and over all. By all threads of a block.
struct Scan {
  unsigned up_to_here, all;
};
template <int threads>
__device__ __forceinline__ Scan scan(unsigned x) {
  __shared__ unsigned warp_sums[threads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const unsigned before = __shfl_up_sync(0xffffffff, x, step);
    if (lane >= step) x += before;
  }
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

template <DecodeTile tile>
struct Work {
  Share share;
  unsigned begin, end;  // units of this block
  Cursor<tile> first;

  // Blocks of a column are `columns` apart.
  static __device__ __forceinline__ unsigned row(const attn_decode_kernarg& a) {
    return blockIdx.x / a.columns;
  }
};

// By all threads of a block.
template <DecodeTile tile>
__device__ __forceinline__ Work<tile> find_work(const attn_decode_kernarg& a) {
  __shared__ Cursor<tile> first;
  constexpr int threads = tile.threads();
  const unsigned column = blockIdx.x % a.columns;
  const int head = column * a.heads_kv / a.columns,
            heads = (column + 1) * a.heads_kv / a.columns - head;
  Sequence<tile> sequence;
  Scan sums = {0, 0};
  unsigned all = 0, own = 0;
  const auto count = [&](int b) {
    own = 0;
    if (b < a.batch) {
      sequence = Sequence<tile>(a, b);
      own = sequence.count(a, b);
    }
    sums = scan<threads>(own);
  };
#pragma unroll 1
  for (int b = threadIdx.x; b - int(threadIdx.x) < a.batch; b += threads) {
    count(b);
    all += sums.all;
  }
  Work<tile> work;
  work.share = {all * heads, gridDim.x / a.columns};
  work.begin = work.share.begin(work.row(a));
  work.end = work.share.begin(work.row(a) + 1);
  if (work.begin == work.end) return work;
  const unsigned wanted = work.begin % all;
  unsigned before = 0;
#pragma unroll 1
  for (int b = threadIdx.x; b - int(threadIdx.x) < a.batch; b += threads) {
    if (a.batch > threads) count(b);
    const unsigned end = before + sums.up_to_here;
    if (wanted < end && wanted >= end - own) {
      Cursor<tile> at;
      at.b = b;
      at.h = head + work.begin / all;
      int skip = wanted - (end - own);
      while (skip >= sequence.units) {
        skip -= sequence.units;
        if (!sequence.next_tile(a, b)) break;
      }
      at.sequence = sequence;
      at.left = sequence.units - skip;
      at.find(a, skip);
      first = at;
    }
    before += sums.all;
  }
  __syncthreads();
  work.first = first;
  return work;
}

}  // namespace attn::decode
