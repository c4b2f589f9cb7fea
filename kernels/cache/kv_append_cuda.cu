//# architectures sm_80 sm_90 compute_80 local_bytes=88
// Appends new tokens to a KV cache.
#include "kv_append.cuh"
#include "sequences.cuh"

namespace {

using namespace attn::kv_append;

// The n-th. By all lanes of a warp, in the order of their n.
__device__ Token find_token(const attn_kv_append_kernarg& a, int n) {
  if (!a.cu_seqlens_new) {
    const int b = n / a.seqlen_new, t = n % a.seqlen_new;
    return {b, t, b, t};
  }
  const int* const ends = a.cu_seqlens_new + 1;
  int b = -1;
  // A search for the first lane that has no sequence yet, and all that have the same one.
  for (unsigned left = all_lanes; left; left = __ballot_sync(all_lanes, b < 0)) {
    const int leader = __ffs(int(left)) - 1, of_leader = __shfl_sync(all_lanes, n, leader),
              found = find_sequence(ends, a.batch, of_leader);
    if (b < 0 && (n == of_leader || found == a.batch || n < ends[found])) b = found;
  }
  if (b == a.batch) return {b, -1};
  const Span span = packed_span(a.cu_seqlens_new, b, a.total_new, a.seqlen_new);
  const long long t = n - span.begin;
  return {b, t >= 0 && t < span.length ? int(t) : -1, 0, n};
}

// The slot of a token of padded k_new; -1: it goes nowhere, or is beyond 31 bits.
__device__ int find_slot(const attn_kv_append_kernarg& a, const Token& token) {
  const long long slot = a.slot_mapping[token.b * (long long)a.seqlen_new + token.t];
  return slot == (slot & 0x7fffffff) ? int(slot) : -1;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(attn_kv_append_max_threads)
    kv_append_cuda(const __grid_constant__ attn_kv_append_kernarg a) {
#if __CUDA_ARCH__ >= 900
  attn::ptx::grid_let_next_start();
  attn::ptx::grid_wait();  // before any access to memory
#endif
  const auto length = [&](int b) { return segment_span(a.lengths, b).length; };
  if (a.lengths_only) {
    const unsigned b = blockIdx.x * blockDim.x + threadIdx.x;
    if (b < unsigned(a.batch)) advance(a, b, length(b));
    return;
  }
  append_tokens<true>(
      a, [&](int n) { return find_token(a, n); },
      [&](const Token& token) {
        if (a.slot_mapping) return find_slot(a, token);
        const int held = length(token.b);
        return token.t < a.lengths.capacity - held ? held + token.t : -1;
      });
  if (!a.seqlens_out) return;
  __syncthreads();  // all have read the lengths; no other block reads this one
  if (threadIdx.x == 0) advance(a, blockIdx.x, length(blockIdx.x));
}
