//# architectures sm_80 sm_90 compute_80
// What bwd_* need of each query row before they begin, and rows of gradients that belong to nobody.
#include "../common/convert.cuh"
#include "../common/element.cuh"
#include "../common/lengths.cuh"
#include "../ptx/max.h"
#include "prepare_args.h"

namespace {

using namespace attn::device;

constexpr int warps = attn_backward_threads / 32, tile = attn_backward_tile;
constexpr int lanes = 16;  // of a row, each with 8 neighbouring elements at a time
constexpr float lowest =
    -2.3e38f;  // of lse, as forward's scores have it: times log2(e) it is finite

// 8 neighbouring elements from a 16-byte aligned place on.
__device__ void load_eight(const void* base, int type, long long at, float (&x)[8]) {
  if (type == attn_element_f32) {
    load_floats(static_cast<const float*>(base) + at, x);
    load_floats(static_cast<const float*>(base) + at + 4, x + 4);
    return;
  }
  const uint4 words =
      *reinterpret_cast<const uint4*>(static_cast<const unsigned short*>(base) + at);
  const unsigned word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const auto bits = (unsigned short)(word[i / 2] >> 16 * (i % 2));
    x[i] = type == attn_element_bf16 ? BF16::unpack(bits) : F16::unpack(bits);
  }
}

// By a warp.
__device__ void clear_row(const attn_gradient_array& g, long long row, int heads, int dim) {
  const int bytes = g.type == attn_element_f32 ? 4 : 2;
  for (int h = 0; h < heads; ++h) {
    auto* to = static_cast<char*>(g.at) + (row * g.stride[1] + h * g.stride[2]) * bytes;
    for (int i = threadIdx.x % 32; i < dim * bytes / 16; i += 32)
      reinterpret_cast<uint4*>(to)[i] = make_uint4(0, 0, 0, 0);
  }
}

// Rows of a packed gradient before, between and after the sequences. By all lanes of warp number
// `worker` of `workers`. Between two sequences there are some only where lengths are wrong.
__device__ void clear_rows_of_nobody(const attn_gradient_array& g, const int* cu_seqlens, int batch,
                                     long long total, int capacity, int heads, int dim,
                                     long long worker, long long workers) {
  if (!g.at || g.add || !cu_seqlens) return;
  const auto end_of = [&](long long b) {
    const Span s = packed_span(cu_seqlens, int(b), total, capacity);
    return s.begin + s.length;
  };
  const auto clear = [&](long long first, long long end, long long step) {
    for (; first < end; first += step) clear_row(g, first, heads, dim);
  };
  clear(worker, packed_span(cu_seqlens, 0, total, capacity).begin, workers);
  clear(end_of(batch - 1) + worker, total, workers);
  for (long long b = worker + 1; b < batch; b += workers)
    clear(end_of(b - 1), packed_span(cu_seqlens, int(b), total, capacity).begin, 1);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(attn_backward_threads)
    bwd_prepare_cuda(const __grid_constant__ attn_backward_prepare_kernarg a) {
  const int warp = threadIdx.x / 32;
  const long long worker = (long long)blockIdx.x * warps + warp,
                  workers = (long long)gridDim.x * warps;
  clear_rows_of_nobody(a.dq, a.cu_seqlens_q, a.batch, a.rows.total_q, a.seqlen_q, a.heads_q,
                       a.head_dim, worker, workers);
  clear_rows_of_nobody(a.dk, a.kv.cu_seqlens, a.batch, a.kv.total, a.kv.capacity, a.heads_kv,
                       a.head_dim, worker, workers);
  clear_rows_of_nobody(a.dv, a.kv.cu_seqlens, a.batch, a.kv.total, a.kv.capacity, a.heads_kv,
                       a.head_dim_v, worker, workers);
  for (long long i = (long long)blockIdx.x * attn_backward_threads + threadIdx.x; i < a.clear_words;
       i += (long long)gridDim.x * attn_backward_threads)
    a.clear[i] = 0;

  const unsigned tiles = unsigned(a.rows.tiles_of_sequence()), heads = a.heads_q;
  if (tiles == 0) return;
  const int h = blockIdx.x % heads, b = blockIdx.x / heads / tiles;
  const int first = blockIdx.x / heads % tiles * tile;
  const Span queries = a.cu_seqlens_q ? packed_span(a.cu_seqlens_q, b, a.rows.total_q, a.seqlen_q)
                                      : Span{0, a.seqlen_q};
  const int keys = segment_span(a.kv, b).length;
  const long long stat_tiles = a.rows.tiles(),
                  stat_tile = h * stat_tiles + a.rows.first_tile(b, queries.begin) + first / tile;
  const long long part_at = (h * (long long)a.batch + b) * tiles + first / tile;
  if (first >= queries.length) {
    if (a.sink_parts && threadIdx.x == 0) a.sink_parts[part_at] = 0;
    return;
  }
  const float sink = a.sinks ? a.sinks[h] : 0;

  // A half of a warp has 4 rows, and the warp's lanes what the block's sum is made of.
  float part = 0;
#pragma unroll 1
  for (int n = 0; n < tile / warps / 2; ++n) {
    const int in_tile = warp * (tile / warps) + 2 * n + threadIdx.x / lanes % 2,
              i = first + in_tile;
    const bool exists = i < queries.length;
    const long long entry = a.cu_seqlens_q ? 0 : b, row = queries.begin + i;
    float lse = -infinity(), d_lse = 0;
    bool sees = false;
    if (exists) {
      const long long at = a.cu_seqlens_q ? h * a.rows.total_q + row
                                          : (b * (long long)a.heads_q + h) * a.seqlen_q + i;
      lse = a.lse[at];
      if (a.d_lse) d_lse = a.d_lse[at];
      const attn::KeyRange range = a.mask.keys(i, queries.length, keys);
      sees = range.begin < range.end && lse != -infinity();
    }
    // A row from which masks hide all keys has out 0, and nothing depends on its d_out.
    float sum = 0;
    bool some = false;
    if (sees) {
      const long long out_at =
          entry * a.out_stride[0] + row * a.out_stride[1] + h * a.out_stride[2];
      const long long d_out_at =
          entry * a.d_out_stride[0] + row * a.d_out_stride[1] + h * a.d_out_stride[2];
      for (int d = threadIdx.x % lanes * 8; d < a.head_dim_v; d += 8 * lanes) {
        float x[8], y[8];
        load_eight(a.out, a.out_type, out_at + d, x);
        load_eight(a.d_out, a.d_out_type, d_out_at + d, y);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          sum = fmaf(x[e], y[e], sum);
          some = some || x[e] != 0;
        }
      }
    }
#pragma unroll
    for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    const unsigned half = 0xffffu << (threadIdx.x / lanes % 2 * lanes);
    const bool all_zero = (__ballot_sync(0xffffffff, some) & half) == 0;
    // So has one from which a bias hides them. None of its gradients is above what rounds off.
    const bool only_sink = a.sinks && lse == sink && all_zero;
    if (only_sink) sum = 0;
    const bool counts = exists && lse != -infinity();
    const float delta = counts ? sum - d_lse : 0;
    if (threadIdx.x % lanes == 0) {
      const bool used = sees && !only_sink;
      a.lse2[stat_tile * tile + in_tile] =
          used ? attn::ptx::max_nan(lse, lowest) * log2_e : infinity();
      a.delta[stat_tile * tile + in_tile] = used ? delta : 0;
      if (a.sink_parts && counts) part -= expf(sink - lse) * delta;
    }
  }
  if (!a.sink_parts) return;
  part += __shfl_xor_sync(0xffffffff, part, lanes);
  __shared__ float parts[warps];
  if (threadIdx.x % 32 == 0) parts[warp] = part;
  __syncthreads();
  if (threadIdx.x == 0) {
    float sum = 0;
    for (int w = 0; w < warps; ++w) sum += parts[w];
    a.sink_parts[part_at] = sum;
  }
}
