// What queries see where positions are given: the mask of ranges as numbers of keys.
#pragma once
#include "../shared/key_places.h"
#include "../shared/mask.h"
#include "../shared/positions.h"
#include "lengths.cuh"

namespace attn::device {

// The place of query 0 of sequence b: a position that counts from key 0's.
__device__ __forceinline__ long long first_query(const attn_positions& p, int b, int seqlen_q,
                                                 int seqlen_kv) {
  if (!p.query_start) return seqlen_kv - seqlen_q;
  const long long key = p.key_start ? p.key_start[b * p.key_batch] : 0;
  return p.query_start[b] - key - p.first_key;
}
// The same for distances, which are exact below 2^30.
__device__ __forceinline__ int near_first_query(const attn_positions& p, int b, int seqlen_q,
                                                int seqlen_kv) {
  if (!p.query_start) return seqlen_kv - seqlen_q;
  return clamp(first_query(p, b, seqlen_q, seqlen_kv), -(1 << 30), 1 << 30);
}
// Places of keys that the queries of sequence b see: query i from i + lower up to i + upper. Keys
// are at places below most_places, and there are no more queries.
constexpr int most_places = 1 << 30;
struct SeenPlaces {
  int lower, upper;
};
__device__ __forceinline__ SeenPlaces seen_places(const RangeMask& mask, const attn_positions& p,
                                                  int b, int seqlen_q, int seqlen_kv) {
  const KeyBand band = mask.band(0, first_query(p, b, seqlen_q, seqlen_kv));
  return {clamp(band.lower, -most_places, most_places),
          clamp(band.upper, -most_places, most_places)};
}
__device__ __forceinline__ int key_place(const attn_positions& p, int key) {
  return p.period ? KeyPlaces<int>{0, p.interleave, p.period}.at(key) : key;
}
// How many keys are before a place, if there are that many.
__device__ __forceinline__ int number_of(const attn_positions& p, int place) {
  return p.period ? KeyPlaces<int>{0, p.interleave, p.period}.before(place) : place;
}
__device__ __forceinline__ int keys_before(const attn_positions& p, int place, int seqlen_kv) {
  return min(max(number_of(p, place), 0), seqlen_kv);
}

}  // namespace attn::device
