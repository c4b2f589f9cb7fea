// The new tokens of kv_append_many_cuda, and the lengths after them.
#pragma once
#include "kv_append.cuh"

namespace attn::kv_append {

// The first of the ascending `ends` that is greater than x, or `batch`. By all lanes of a warp.
__device__ int find_sequence(const int* ends, int batch, long long x) {
  const int lane = threadIdx.x % 32;
  int begin = 0, end = batch;
  while (begin < end) {
    const int step = (end - begin + 31) / 32;
    const auto last = [&](int part) {  // of 32 parts
      return int(min(begin + (part + 1ll) * step, (long long)end)) - 1;
    };
    const unsigned greater = __ballot_sync(0xffffffff, ends[last(lane)] > x);
    if (!greater) return end;
    const int part = __ffs(int(greater)) - 1;
    end = last(part);
    begin += part * step;
  }
  return begin;
}

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

__device__ void advance(const attn_kv_append_kernarg& a, int b, int length) {
  const int added = a.cu_seqlens_new
                        ? packed_span(a.cu_seqlens_new, b, a.total_new, a.seqlen_new).length
                        : a.seqlen_new;
  a.seqlens_out[b] = clamp(length + (long long)added, 0, a.lengths.capacity);
}
// What a launch with lengths_only does.
__device__ void advance_all(const attn_kv_append_kernarg& a) {
  const unsigned b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b < unsigned(a.batch)) advance(a, b, segment_span(a.lengths, b).length);
}

}  // namespace attn::kv_append
