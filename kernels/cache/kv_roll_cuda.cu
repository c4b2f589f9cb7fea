//# architectures sm_80 sm_90 compute_80 local_bytes=88
// Moves the oldest full pages of a paged cache into another one: their keys are appended there, by
// a block for each key that can move. Then a block for each sequence writes both lengths and turns
// the row of the block table.
#include "kv_append.cuh"

namespace {

using namespace attn::kv_append;

__device__ int moved_keys(const attn_kv_roll_kernarg& r, int b) {
  const int most = min(segment_span(r.recent_lengths, b).length - r.keep,
                       r.append.lengths.capacity - segment_span(r.append.lengths, b).length);
  return max(most, 0) / r.recent.page_size * r.recent.page_size;
}

__device__ Token find_token(const attn_kv_roll_kernarg& r, int n) {
  const int b = n / r.append.seqlen_new, t = n % r.append.seqlen_new;
  if (t >= moved_keys(r, b)) return {b, -1};
  const int page = r.recent_table[b * (long long)r.recent.max_pages + t / r.recent.page_size];
  if (unsigned(page) >= unsigned(r.recent.num_pages)) return {b, -1};
  return {b, t, page, t % r.recent.page_size};
}

__device__ void reverse(int* begin, int* end) {
  const int count = int(end - begin);
  for (int i = threadIdx.x; i < count / 2; i += blockDim.x) {
    const int first = begin[i];
    begin[i] = end[-1 - i];
    end[-1 - i] = first;
  }
  __syncthreads();
}
// Lengths of sequence b after its pages moved, and its table turned. By a block.
__device__ void finish(const attn_kv_roll_kernarg& r, int b) {
  const int recent = segment_span(r.recent_lengths, b).length,
            old = segment_span(r.append.lengths, b).length, moved = moved_keys(r, b),
            size = r.recent.page_size;
  int *const table = r.recent_table + b * (long long)r.recent.max_pages,
             *const middle = table + moved / size, *const end = table + (recent + size - 1) / size;
  __syncthreads();  // all have read the lengths
  if (threadIdx.x == 0) {
    r.recent_seqlens_out[b] = recent - moved;
    r.append.seqlens_out[b] = old + moved;
  }
  reverse(table, middle);
  reverse(middle, end);
  reverse(table, end);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(attn_kv_append_max_threads)
    kv_roll_cuda(const __grid_constant__ attn_kv_roll_kernarg r) {
#if __CUDA_ARCH__ >= 900
  attn::ptx::grid_let_next_start();
  attn::ptx::grid_wait();  // before any access to memory
#endif
  if (r.append.lengths_only) {
    finish(r, blockIdx.x);
    return;
  }
  append_tokens<false>(
      r.append, [&](int n) { return find_token(r, n); },
      [&](const Token& token) { return segment_span(r.append.lengths, token.b).length + token.t; });
}
