//# architectures sm_90a
// Adds up the parts of row tiles that several blocks of mla_*_r64 shared, in their order. Block x,
// y: rows y * rows_taken and on of a row tile of column x % columns: that of sequence x / columns,
// or (merges_by_block) what block x / columns of the column began and others went on with.
#include "../decode/load.cuh"
#include "../ptx/grid.h"
#include "parts.cuh"

using namespace attn;
using namespace attn::mla;

extern "C" __global__ void __launch_bounds__(merge_threads, 8)
    mla_merge_sm90(const __grid_constant__ attn_decode_kernarg a) {
  ptx::grid_let_next_start();
  ptx::grid_wait();
  const int column = blockIdx.x % a.columns, number = blockIdx.x / a.columns;
  int b = number;
  unsigned before;
  Share share;
  if (!merges_by_block(a.batch, a.splits)) {
    const Counted units = count_units(a, b);
    share = {units.all, unsigned(a.splits)};
    before = units.before;
  } else {
    if (number + 1 == a.splits) return;
    const Found next = find_share(a, column, number + 1);
    if (next.unit == 0) return;
    share = next.share;
    before = next.begin - next.unit;
    b = next.b;
    if (share.block_of(before) != number) return;
  }
  const int keys = segment_span(a.segment[0].lengths, b).length;
  const Parts parts(a, share, before, units_of(keys));
  if (parts.count == 1) return;
  const Head at = {b, column / a.row_tiles, column % a.row_tiles * tile_rows, a.seqlen_q, keys, 0};
  const int used = min(a.seqlen_q * a.group - at.first_row, tile_rows), lane = threadIdx.x % 32;
  const int end = min(int(blockIdx.y + 1) * a.rows_taken, used);
#pragma unroll 1
  for (int r = blockIdx.y * a.rows_taken; r < end; ++r) {
    // Lane l has the stats of part i0 + l.
    const auto stats_of = [&](unsigned i) {
      return i < parts.count ? __ldcg(parts.stats(parts.slot(i, column), r)) : make_float2(0, 0);
    };
    float most = -device::infinity();
#pragma unroll 1
    for (unsigned i = lane; i < parts.count; i += 32) {
      const float2 of = stats_of(i);
      if (of.y != 0) most = fmaxf(most, of.x);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2)
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, step));
    float sum = 0;
    float4 o = {0, 0, 0, 0};
#pragma unroll 1
    for (unsigned i0 = 0; i0 < parts.count; i0 += 32) {
      const float2 of = stats_of(i0 + lane);
      // -1: does not count. Parts of nothing but NaN, which maxima pass over, count as they are.
      const float own = of.y == 0 ? -1 : most == -device::infinity() ? 1 : ptx::ex2(of.x - most);
      const int n = min(int(parts.count - i0), 32);
      constexpr int at_once = 8;
#pragma unroll 1
      for (int j = 0; j < n; j += at_once) {
        float4 x[at_once];
#pragma unroll
        for (int k = 0; k < at_once; ++k)
          x[k] = j + k < n ? __ldcg(reinterpret_cast<const float4*>(
                                        parts.sums(parts.slot(i0 + j + k, column), r)) +
                                    threadIdx.x)
                           : float4{0, 0, 0, 0};
#pragma unroll
        for (int k = 0; k < at_once; ++k) {
          const float factor = __shfl_sync(0xffffffff, own, (j + k) % 32),
                      weight = __shfl_sync(0xffffffff, of.y, (j + k) % 32);
          if (j + k >= n || factor < 0) continue;
          sum = fmaf(weight, factor, sum);
          o.x = fmaf(x[k].x, factor, o.x), o.y = fmaf(x[k].y, factor, o.y);
          o.z = fmaf(x[k].z, factor, o.z), o.w = fmaf(x[k].w, factor, o.w);
        }
      }
    }
    const OutRow out(a, at, r, make_float2(most, sum));
    out.store_pair(4 * threadIdx.x, o.x, o.y);
    out.store_pair(4 * threadIdx.x + 2, o.z, o.w);
    if (threadIdx.x == 0) out.store_lse();
  }
}
