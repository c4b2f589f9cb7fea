//# architectures sm_90a
// dq from its sums in float32, which bwd_sm90_* leave as the products left them in the lanes of a
// warpgroup: a tile has, of each 8 columns, 4 floats of each of 128 threads. A block for each tile
// of queries, query head and sequence.
#include "../ptx/grid.h"
#include "sequences.cuh"
#include "store_gradient.cuh"

using namespace attn;
using namespace attn::bwd_sm90;

extern "C" __global__ void __launch_bounds__(128)
    bwd_sm90_finish(const __grid_constant__ attn_sm90_finish_kernarg a) {
  ptx::grid_let_next_start();
  ptx::grid_wait();
  const int tile = blockIdx.x, head = blockIdx.y, b = blockIdx.z;
  const device::Span q = query_span(a, b);
  if (tile * tile_queries >= q.length) return;
  const int keys = device::segment_span(a.kv, b).length;
  const bool seen = sequence(a.mask, q.length, keys).blocks(tile, a.block_keys).count() > 0;
  if (!seen && a.dq.add) return;
  const int row = tile * tile_queries + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const float4* const sum =
      reinterpret_cast<const float4*>(a.dq_sum) +
      (head * (long long)a.tiles + a.rows.first_tile(b, q.begin) + tile) * (a.panels * 8 * 128) + threadIdx.x;
  for (int p = 0; p < a.panels; ++p) {
    float o[32] = {};
    if (seen)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 x = sum[(8 * p + i) * 128];
        o[4 * i] = x.x, o[4 * i + 1] = x.y, o[4 * i + 2] = x.z, o[4 * i + 3] = x.w;
      }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = row + 8 * half;
      store_gradient(a.dq,
                     (a.cu_seqlens_q ? 0 : b * a.dq.stride[0]) + (q.begin + at) * a.dq.stride[1] +
                         head * a.dq.stride[2] + 64 * p,
                     at < q.length, o, half, a.scale, a.head_dim - 64 * p);
    }
  }
}
