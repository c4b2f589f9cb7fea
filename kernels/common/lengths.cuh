// Lengths in device memory: whatever their values, everything derived from them stays inside the
// tensors.
#pragma once
#include "../shared/forward_args.h"

namespace attn::device {

__device__ __forceinline__ int clamp(long long x, int low, int high) {
  return x < low ? low : x > high ? high : int(x);
}

// A sequence in a packed tensor, or in a padded one, where it begins at 0.
struct Span {
  long long begin;
  int length;
};

// Entry b of cumulative lengths, inside [0, total] and at most `capacity` long.
__device__ __forceinline__ Span packed_span(const int* cu_seqlens, int b, long long total,
                                            int capacity) {
  const long long first = cu_seqlens[b], last = cu_seqlens[b + 1];
  const long long begin = first < 0 ? 0 : first > total ? total : first;
  const long long end = last < begin ? begin : last > total ? total : last;
  return {begin, clamp(end - begin, 0, capacity)};
}
__device__ __forceinline__ Span segment_span(const attn_kv_lengths& s, int b) {
  if (s.cu_seqlens) return packed_span(s.cu_seqlens, b, s.total, s.capacity);
  return {0, s.seqlens ? clamp(s.seqlens[b], 0, s.capacity) : s.capacity};
}

// The position of the first key that the queries of sequence b see, as after padding on the left;
// kv_begin null: 0.
__device__ __forceinline__ int first_key(const int* kv_begin, int b, int seqlen_kv) {
  return kv_begin ? clamp(kv_begin[b], 0, seqlen_kv) : 0;
}

// A tile of queries of one head: item `index` of batch * heads_q * tiles.
struct QueryTile {
  int b, h, tile;
};
// `chunk` (batch, head) pairs stand together, so that their K and V stay in L2. The last tiles of
// those together, which see most under a causal mask, come first.
__device__ __forceinline__ QueryTile query_tile(unsigned index, int batch, int heads_q,
                                                unsigned tiles, unsigned chunk) {
  const unsigned first_pair = index / (chunk * tiles) * chunk,
                 width = min(chunk, batch * heads_q - first_pair);
  const unsigned rest = index - first_pair * tiles, pair = first_pair + rest % width;
  return {int(pair / heads_q), int(pair % heads_q), int(tiles - 1 - rest / width)};
}

}  // namespace attn::device
