// The keys that each query visits, one after the other: those of its lists in their order, without
// those that it does not see, and all that it sees of segments without lists.
#pragma once
#include "../ptx/prefetch.h"
#include "gather_args.h"
#include "sequences.cuh"

namespace attn::device {

// What an item visits of a segment: keys in [begin, end) of those in its list, or all of them.
struct Visit {
  int keys;  // visited, of a list with those that are not kept
  long long begin, end;
  const int* list;
};
// A visited key: where its row is. entry < 0: it is not kept.
struct Key {
  int segment, number, entry;
  long long row;
};
// An item: query i of sequence b, which has this many. queries 0: it visits nothing.
struct Item {
  int b;
  long long i, queries;
};

__device__ Item find_item(const attn_visits& a, long long n) {
  if (a.by_sequence) return {int(n), 0, 1};
  if (!a.cu_seqlens_q) return {int(n / a.seqlen_q), n % a.seqlen_q, a.seqlen_q};
  const int b = find_sequence(a.cu_seqlens_q + 1, a.batch, n);
  if (b == a.batch) return {0, 0, 0};
  const Span span = packed_span(a.cu_seqlens_q, b, a.total_q, a.seqlen_q);
  if (n < span.begin || n - span.begin >= span.length) return {0, 0, 0};
  return {b, n - span.begin, span.length};
}

// Of an item, among the lists of a segment.
__device__ long long list_number(const attn_visits& a, const attn_visited_segment& s,
                                 const Item& item, long long n) {
  const int lists = 1 + (a.seqlen_q - 1) / s.list_queries;  // of a sequence
  const long long row =
      a.cu_seqlens_q ? n : item.b * (long long)lists + int(item.i) / s.list_queries;
  return row * s.list_heads + (s.list_heads == 1 ? 0 : a.first_head);
}

// Asks for what the item visits to be in L2, before it is known that it can be read. Not for packed
// q, whose items are found by offsets in memory. By all threads of a block.
__device__ void prefetch_visits(const attn_visits& a, const Item& item, long long n) {
  constexpr int line = 32;  // numbers of 4 bytes
  const auto fetch = [](const int* from, long long count) {
    for (int i = threadIdx.x * line; i < count; i += blockDim.x * line) ptx::prefetch_l2(from + i);
  };
  for (int i = 0; i < a.num_segments; ++i) {
    const attn_visited_segment& s = a.segment[i];
    if (s.list_size > 0) fetch(s.list + list_number(a, s, item, n) * s.list_size, s.list_size);
    if (s.pages.block_table && s.pages.max_pages <= 64 * line)
      fetch(s.pages.block_table + item.b * (long long)s.pages.max_pages, s.pages.max_pages);
    if (s.lengths.seqlens) fetch(s.lengths.seqlens + item.b, 1);
  }
}

__device__ Visit visit(const attn_visits& a, const attn_visited_segment& s, const Item& item,
                       long long n, KeyRange seen) {
  if (item.queries == 0) return {0, 0, 0, nullptr};
  Visit v{0, 0, segment_span(s.lengths, item.b).length, nullptr};
  if (s.of_pool) v.end = (long long)s.pages.num_pages * s.pages.page_size;
  if (!a.by_sequence && !s.no_positions) {
    v.begin = max(v.begin, seen.begin);
    v.end = min(v.end, seen.end);
  }
  v.keys = int(max(v.end - v.begin, 0ll));
  if (s.list_size == 0) return v;
  const long long number = list_number(a, s, item, n);
  v.list = s.list + number * s.list_size;
  v.keys =
      (s.list_lengths ? clamp(s.list_lengths[number], 0, s.list_size) : s.list_size) * s.list_block;
  return v;
}

// What the item visits of each segment.
__device__ void find_visits(const attn_visits& a, const Item& item, long long n, Visit* visits) {
  long long all = 0, before = 0;
  for (int i = 0; i < a.num_segments; ++i)
    if (!a.segment[i].no_positions) all += segment_span(a.segment[i].lengths, item.b).length;
  const KeyRange seen = a.mask.keys(item.i, item.queries, all);
  for (int i = 0; i < a.num_segments; ++i) {
    const attn_visited_segment& s = a.segment[i];
    visits[i] = visit(a, s, item, n, {seen.begin - before, seen.end - before});
    if (!s.no_positions) before += segment_span(s.lengths, item.b).length;
  }
}

// Visited keys first, first + step and so on of segment i, whose loads are all on their way at
// once.
template <int count>
__device__ __forceinline__ void find_keys(const attn_visits& a, int b, const Visit& v, int i,
                                          int first, int step, Key (&keys)[count]) {
  const attn_visited_segment& s = a.segment[i];
  int within[count];  // of a block of the list
  long long key[count];
#pragma unroll
  for (int n = 0; n < count; ++n) within[n] = 0, key[n] = v.begin + first + n * step;
  if (v.list) {
    int entry[count];
#pragma unroll
    for (int n = 0; n < count; ++n) entry[n] = first + n * step;
    if (s.list_block > 1)
#pragma unroll
      for (int n = 0; n < count; ++n) {
        within[n] = entry[n] % s.list_block;
        entry[n] /= s.list_block;
      }
#pragma unroll
    for (int n = 0; n < count; ++n)
      entry[n] = first + n * step < v.keys ? __ldcg(v.list + entry[n]) : -1;
#pragma unroll
    for (int n = 0; n < count; ++n) key[n] = entry[n] * (long long)s.list_block + within[n];
  }
  bool there[count];
#pragma unroll
  for (int n = 0; n < count; ++n)
    there[n] = first + n * step < v.keys && key[n] >= v.begin && key[n] < v.end;
  const bool packed = s.lengths.cu_seqlens;
  if (s.of_pool || s.pages.block_table) {
    // Below v.end a key has 31 bits, of which a quotient takes a fraction of the time.
    const auto page_size = unsigned(s.pages.page_size);
#pragma unroll
    for (int n = 0; n < count; ++n) {
      const unsigned page = unsigned(key[n]) / page_size;
      keys[n] = {i, int(key[n]), int(page), unsigned(key[n]) - page * page_size};
    }
    if (!s.of_pool) {
      const int* const table = s.pages.block_table + b * (long long)s.pages.max_pages;
#pragma unroll
      for (int n = 0; n < count; ++n) keys[n].entry = there[n] ? table[keys[n].entry] : -1;
    }
#pragma unroll
    for (int n = 0; n < count; ++n)
      there[n] = there[n] && unsigned(keys[n].entry) < unsigned(s.pages.num_pages);
  } else {
    const long long begin = packed ? segment_span(s.lengths, b).begin : 0;
#pragma unroll
    for (int n = 0; n < count; ++n) keys[n] = {i, int(key[n]), packed ? 0 : b, begin + key[n]};
  }
#pragma unroll
  for (int n = 0; n < count; ++n)
    if (!there[n]) keys[n] = {0, 0, -1, 0};
}

// The places of what this thread keeps among what the block keeps, of several rounds one after the
// other, and how many that are. By all threads. kept_of_warp: an int for each warp and round, which
// the next call must not have.
template <int warps, int rounds>
struct Kept {
  int place[rounds];
  int all = 0;

  __device__ Kept(const bool (&keeps)[rounds], int* kept_of_warp) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < rounds; ++r) {
      const unsigned lanes = __ballot_sync(0xffffffff, keeps[r]);
      place[r] = __popc(lanes & ((1u << lane) - 1));
      if (lane == 0) kept_of_warp[r * warps + warp] = __popc(lanes);
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < rounds; ++r) {
      const int of_warp = lane < warps ? kept_of_warp[r * warps + lane] : 0;
      place[r] += all + __reduce_add_sync(0xffffffff, lane < warp ? of_warp : 0);
      all += __reduce_add_sync(0xffffffff, of_warp);
    }
  }
};

}  // namespace attn::device
