//# architectures sm_80 sm_90 compute_80
// Appends new tokens to a KV cache.
#include "kv_append_token.cuh"
#include "sequences.cuh"

namespace attn::kv_append_token {

__device__ Token find_token(const attn_kv_append_kernarg& a, int n) {
  if (!a.cu_seqlens_new) {
    const int b = n / a.seqlen_new, t = n % a.seqlen_new;
    return {b, t, b, t};
  }
  const int b = find_sequence(a.cu_seqlens_new + 1, a.batch, n);
  if (b == a.batch) return {b};
  const Span span = packed_span(a.cu_seqlens_new, b, a.total_new, a.seqlen_new);
  const long long t = n - span.begin;
  return {t >= 0 && t < span.length ? b : a.batch, int(t), 0, n};
}

extern "C" __global__ void __launch_bounds__(attn_kv_append_max_threads)
    kv_append_cuda(const __grid_constant__ attn_kv_append_kernarg a) {
#if __CUDA_ARCH__ >= 900
  attn::ptx::grid_let_next_start();
  attn::ptx::grid_wait();  // before any access to memory
#endif
  if (a.lengths_only) {
    const unsigned b = blockIdx.x * blockDim.x + threadIdx.x;
    if (b < unsigned(a.batch)) advance(a, b, segment_span(a.lengths, b).length);
    return;
  }
  const Token token = find_token(a, blockIdx.x);
  if (token.b == a.batch) return;
  const int length = segment_span(a.lengths, token.b).length;
  if (a.seqlens_out) {  // which may be where the lengths are; no other block reads this one
    __syncthreads();
    if (threadIdx.x == 0) advance(a, token.b, length);
  }
  if (token.t >= a.lengths.capacity - length) return;
  append(a, token, length + token.t);
}

}  // namespace attn::kv_append_token
