//# architectures sm_80 sm_90 compute_80 local_bytes=48
// Appends many new tokens to a KV cache, several by a block.
#include "new_tokens.cuh"

using namespace attn::kv_append;

extern "C" __global__ void __launch_bounds__(attn_kv_append_max_threads, 2)
    kv_append_many_cuda(const __grid_constant__ attn_kv_append_kernarg a) {
#if __CUDA_ARCH__ >= 900
  attn::ptx::grid_let_next_start();
  attn::ptx::grid_wait();  // before any access to memory
#endif
  if (a.lengths_only) {
    advance_all(a);
    return;
  }
  append_tokens(
      a, [&](int n) { return find_token(a, n); },
      [&](const Token& token) {
        return find_position(a, token, segment_span(a.lengths, token.b).length);
      });
}
