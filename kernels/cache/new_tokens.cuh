// The new tokens of kv_append_many_cuda.
#pragma once
#include "kv_append.cuh"
#include "sequences.cuh"

namespace attn::kv_append {

__device__ Token find_token(const attn_kv_append_kernarg& a, int n) {
  if (!a.cu_seqlens_new) {
    const int b = n / a.seqlen_new, t = n % a.seqlen_new;
    return {b, t, b, t};
  }
  const int b = find_sequence(a.cu_seqlens_new + 1, a.batch, n);
  if (b == a.batch) return {b, -1};
  const Span span = packed_span(a.cu_seqlens_new, b, a.total_new, a.seqlen_new);
  const long long t = n - span.begin;
  return {b, t >= 0 && t < span.length ? int(t) : -1, 0, n};
}
// In a sequence that had `length` tokens; -1: it is full.
__device__ int find_position(const attn_kv_append_kernarg& a, const Token& token, int length) {
  return token.t < a.lengths.capacity - length ? length + token.t : -1;
}

// What a launch with lengths_only does.
__device__ void advance_all(const attn_kv_append_kernarg& a) {
  const unsigned b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b < unsigned(a.batch)) advance(a, b, segment_span(a.lengths, b).length);
}

}  // namespace attn::kv_append
