// Which sequence a packed new token is of, and the lengths after the new tokens.
#pragma once
#include "../common/lengths.cuh"
#include "kv_append_args.h"

namespace attn::device {

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

__device__ void advance(const attn_kv_append_kernarg& a, int b, int length) {
  const int added = a.cu_seqlens_new
                        ? packed_span(a.cu_seqlens_new, b, a.total_new, a.seqlen_new).length
                        : a.seqlen_new;
  a.seqlens_out[b] = clamp(length + (long long)added, 0, a.lengths.capacity);
}

}  // namespace attn::device
