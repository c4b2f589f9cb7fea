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

// Of packed q, whose items are found by offsets in memory.
__device__ __forceinline__ bool items_in_memory(const attn_visits& a) {
  return a.cu_seqlens_q && !a.by_sequence;
}
__device__ __forceinline__ Item find_padded_item(const attn_visits& a, long long n) {
  if (a.by_sequence) return {int(n), 0, 1};
  return {int(n / a.seqlen_q), n % a.seqlen_q, a.seqlen_q};
}
__device__ __forceinline__ Item find_packed_item(const attn_visits& a, long long n) {
  const int b = find_sequence(a.cu_seqlens_q + 1, a.batch, n);
  if (b == a.batch) return {0, 0, 0};
  const Span span = packed_span(a.cu_seqlens_q, b, a.total_q, a.seqlen_q);
  if (n < span.begin || n - span.begin >= span.length) return {0, 0, 0};
  return {b, n - span.begin, span.length};
}
__device__ __forceinline__ Item find_item(const attn_visits& a, long long n) {
  return items_in_memory(a) ? find_packed_item(a, n) : find_padded_item(a, n);
}

// Of an item, among the lists of a segment.
__device__ long long list_number(const attn_visits& a, const attn_visited_segment& s,
                                 const Item& item, long long n) {
  const int lists = 1 + (a.seqlen_q - 1) / s.list_queries;  // of a sequence
  const long long row =
      a.cu_seqlens_q ? n : item.b * (long long)lists + int(item.i) / s.list_queries;
  return row * s.list_heads + (s.list_heads == 1 ? 0 : a.first_head);
}

// Asks for the item's lists, its row of the block table and its length to be in L2. Reads nothing:
// the kernels before may still write them. By all threads of a block.
__device__ void prefetch_visits(const attn_visits& a, const Item& item, long long n) {
  constexpr int line = 32;  // numbers of 4 bytes
  const auto fetch = [](const int* from, long long count) {
    for (int i = threadIdx.x * line; i < count; i += blockDim.x * line) ptx::prefetch_l2(from + i);
  };
  for (int i = 0; i < a.num_segments; ++i) {
    const attn_visited_segment& s = a.segment[i];
    if (s.list_size > 0) fetch(s.list + list_number(a, s, item, n) * s.list_size, s.list_size);
    if (s.pages.block_table && s.pages.max_pages <= 64 * line)  // a list may need little of more
      fetch(s.pages.block_table + item.b * (long long)s.pages.max_pages, s.pages.max_pages);
    if (s.lengths.seqlens) fetch(s.lengths.seqlens + item.b, 1);
  }
}

// What an item visits of a segment with this many keys.
__device__ Visit visit(const attn_visits& a, const attn_visited_segment& s, const Item& item,
                       long long n, int keys, KeyRange seen) {
  if (item.queries == 0) return {0, 0, 0, nullptr};
  Visit v{0, 0, keys, nullptr};
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

// What the item visits of each segment. By all lanes of a warp: a lane has a segment.
__device__ void find_visits(const attn_visits& a, const Item& item, long long n, Visit* visits) {
  const int lane = threadIdx.x % 32, i = min(lane, a.num_segments - 1);
  const attn_visited_segment& s = a.segment[i];
  const int keys = segment_span(s.lengths, item.b).length;
  // Of the segments whose keys have positions, up to the lane's.
  const long long own = lane < a.num_segments && !s.no_positions ? keys : 0;
  long long up_to = own;
#pragma unroll
  for (int step = 1; step < attn_gather_max_segments; step *= 2) {
    const long long before = __shfl_up_sync(0xffffffff, up_to, step);
    if (lane >= step) up_to += before;
  }
  const long long all = __shfl_sync(0xffffffff, up_to, attn_gather_max_segments - 1),
                  before = up_to - own;
  const KeyRange seen = a.mask.keys(item.i, item.queries, all);
  if (lane < a.num_segments)
    visits[lane] = visit(a, s, item, n, keys, {seen.begin - before, seen.end - before});
}

// Of `count` visited keys of a segment, first, first + step and so on, where in the sequence they
// are, and whether the item sees a key there. All are loaded at once.
template <int count>
struct Positions {
  long long key[count];
  bool there[count];

  __device__ __forceinline__ Positions(const attn_visited_segment& s, const Visit& v, int first,
                                       int step) {
#pragma unroll
    for (int n = 0; n < count; ++n) key[n] = v.begin + first + n * step;
    if (v.list) read_list(s, v, first, step);
#pragma unroll
    for (int n = 0; n < count; ++n)
      there[n] = first + n * step < v.keys && key[n] >= v.begin && key[n] < v.end;
  }
  __device__ __forceinline__ void read_list(const attn_visited_segment& s, const Visit& v,
                                            int first, int step) {
    int entry[count], within[count];  // of the list, of its block of keys
#pragma unroll
    for (int n = 0; n < count; ++n) entry[n] = first + n * step, within[n] = 0;
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
};

// Visited keys first, first + step and so on of segment i. Lanes may have different segments.
template <int count>
__device__ __forceinline__ void find_keys(const attn_visits& a, int b, const Visit& v, int i,
                                          int first, int step, Key (&keys)[count]) {
  const attn_visited_segment& s = a.segment[i];
  Positions<count> at(s, v, first, step);
  if (s.of_pool || s.pages.block_table) {
    // Below v.end a key has 31 bits, of which a quotient takes a fraction of the time.
    const auto page_size = unsigned(s.pages.page_size);
    int page[count];
#pragma unroll
    for (int n = 0; n < count; ++n) {
      page[n] = int(unsigned(at.key[n]) / page_size);
      keys[n] = {i, int(at.key[n]), page[n], unsigned(at.key[n]) - page[n] * page_size};
    }
    const int* const table = s.pages.block_table + b * (long long)s.pages.max_pages;
#pragma unroll
    for (int n = 0; n < count; ++n)
      if (!s.of_pool) keys[n].entry = at.there[n] ? table[page[n]] : -1;
#pragma unroll
    for (int n = 0; n < count; ++n)
      at.there[n] = at.there[n] && unsigned(keys[n].entry) < unsigned(s.pages.num_pages);
  } else {
    const bool packed = s.lengths.cu_seqlens;
    const long long begin = packed ? segment_span(s.lengths, b).begin : 0;
#pragma unroll
    for (int n = 0; n < count; ++n)
      keys[n] = {i, int(at.key[n]), packed ? 0 : b, begin + at.key[n]};
  }
#pragma unroll
  for (int n = 0; n < count; ++n)
    if (!at.there[n]) keys[n] = {0, 0, -1, 0};
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
