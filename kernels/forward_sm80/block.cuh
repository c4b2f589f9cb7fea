// Which queries a block has, and which keys they see.
#pragma once
#include "../common/lengths.cuh"
#include "../common/no_keys.cuh"
#include "../common/positions.cuh"
#include "../common/seen_keys.h"
#include "forward_args.h"
#include "pages.cuh"

namespace attn::sm80 {

using namespace device;

// What all warps of a block share: it is kept in shared memory, so that registers are free for the
// tiles.
struct Block {
  int b, h;
  int row;  // first query
  int seqlen_q, seqlen_kv;
  int diagonal;       // query i is at key i + diagonal
  KeyBand band;       // and sees places from i + lower up to i + upper
  long long q_begin;  // packed q: row of the sequence's query 0
  int low, high;      // keys that some of the block's queries see
  struct Segment {
    const char *k, *v;  // where key 0 of the sequence would be, were all of it in this segment;
                        // paged: where page 0 is
    int end;            // position after the segment's last key
  } segment[attn_sm80_max_segments];

  template <class Kernarg>
  __device__ __forceinline__ void set_segments(const Kernarg& a) {
    const int kv_head = h / a.group;
    int begin = 0;
    for (int i = 0; i < a.num_segments; ++i) {
      const attn_sm80_segment& s = a.segment[i];
      const Span span = segment_span(s.lengths, b);
      const bool paged = is_paged(a, i);
      const long long batch = paged || s.lengths.cu_seqlens ? 0 : b,
                      row = paged ? 0 : span.begin - begin;
      begin += span.length;
      segment[i] = {static_cast<const char*>(s.k) +
                        2 * (batch * s.k_stride[0] + row * s.k_stride[1] + kv_head * s.k_stride[2]),
                    static_cast<const char*>(s.v) +
                        2 * (batch * s.v_stride[0] + row * s.v_stride[1] + kv_head * s.v_stride[2]),
                    begin};
    }
    seqlen_kv = begin;
  }

  // The keys that query `row` sees by the mask of ranges; they may lie outside the sequence.
  __device__ __forceinline__ KeyRange row_keys(const attn_sm80_forward_kernarg& a, int row) const {
    KeyRange keys = {row + band.lower, row + band.upper};
    if (a.positions.period)
      keys = {number_of(a.positions, clamp(keys.begin, 0, most_places)),
              number_of(a.positions, clamp(keys.end, 0, most_places))};
    return keys;
  }

  // By one thread: block number blockIdx.x of the grid. `rows`: of a block.
  template <class Kernarg>
  __device__ __forceinline__ void find(const Kernarg& a, int rows) {
    const unsigned tiles = (a.seqlen_q + rows - 1) / rows;
    const QueryTile item = query_tile(blockIdx.x, a.batch, a.heads_q, tiles, a.chunk);
    b = item.b;
    h = item.h;
    row = item.tile * rows;
    const Span queries = a.cu_seqlens_q ? packed_span(a.cu_seqlens_q, b, a.total_q, a.seqlen_q)
                                        : Span{0, a.seqlen_q};
    q_begin = queries.begin;
    seqlen_q = queries.length;
    set_segments(a);
    diagonal = near_first_query(a.positions, b, seqlen_q, seqlen_kv);
    band = a.mask.band(0, first_query(a.positions, b, seqlen_q, seqlen_kv));
    const int last = min(row + rows, queries.length) - 1;
    // Tiles of keys begin there, so that none has a key before kv_begin.
    low = clamp(row_keys(a, row).begin, first_key(a.kv_begin, b, seqlen_kv), seqlen_kv);
    high = clamp(row_keys(a, last).end, 0, seqlen_kv);
  }

  // The keys that queries [first, first + rows) see.
  __device__ __forceinline__ SeenKeys seen_keys(const attn_sm80_forward_kernarg& a, int first,
                                                int rows) const {
    SeenKeys see = {0, 0, 0, 0};
    if (first < seqlen_q) {
      const KeyRange oldest = row_keys(a, first),
                     newest = row_keys(a, min(first + rows, seqlen_q) - 1);
      see = {clamp(oldest.begin, 0, seqlen_kv), clamp(newest.end, 0, seqlen_kv),
             clamp(newest.begin, 0, seqlen_kv), clamp(oldest.end, 0, seqlen_kv)};
    }
    return see;
  }
};

// threadIdx.x, asked for where it is used.
__device__ __forceinline__ int thread_number() {
  int number;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
  return number;
}

}  // namespace attn::sm80
