//# architectures sm_80 sm_90 compute_80
// Appends new tokens to a KV cache, each by a block or, where it does not write lengths too, some.
#include "new_tokens.cuh"

using namespace attn::kv_append;

extern "C" __global__ void __launch_bounds__(attn_kv_append_max_threads)
    kv_append_cuda(const __grid_constant__ attn_kv_append_kernarg a) {
#if __CUDA_ARCH__ >= 900
  attn::ptx::grid_let_next_start();
  attn::ptx::grid_wait();  // before any access to memory
#endif
  if (a.lengths_only) {
    advance_all(a);
    return;
  }
  Token token = find_token(a, blockIdx.x);
  if (token.t < 0) return;
  const int length = segment_span(a.lengths, token.b).length;
  if (a.seqlens_out) {  // which may be where the lengths are; no other block reads this one
    __syncthreads();
    if (threadIdx.x == 0) advance(a, token.b, length);
  }
  token.position = find_position(a, token, length);
  if (token.position >= 0) append_token(a, token);
}
