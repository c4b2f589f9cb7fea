//# architectures sm_90a
// Adds up the parts of row tiles that several blocks of mla_*_r64 shared, in a fixed order. Block
// x, y, z: columns 128 z and on of rows y * rows_taken and on of a row tile of column x % columns:
// that of sequence x / columns, or (merges_by_block) what block x / columns of the column began and
// others went on with. A warp has a row; or, if rows_taken is 1, all have one row and each every
// eighth part of it.
#include "../decode/load.cuh"
#include "../ptx/grid.h"
#include "parts.cuh"

using namespace attn;
using namespace attn::mla;

// What warps leave that share a row.
struct MergeShared {
  float4 sums[merge_warps][merge_columns / 4];
  float sum[merge_warps];
};
static_assert(sizeof(MergeShared) == merge_shared_bytes);

extern "C" __global__ void __launch_bounds__(32 * merge_warps, 4)
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
  const int used = min(a.seqlen_q * a.group - at.first_row, tile_rows);
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int first_column = merge_columns * blockIdx.z + 4 * lane;
  const bool together = a.rows_taken == 1;
  const int first_row = blockIdx.y * a.rows_taken, end = min(first_row + a.rows_taken, used);
  // Of warps that are together. Static shared memory would keep all blocks from starting early.
  extern __shared__ MergeShared shared[];
#pragma unroll 1
  for (int r = together ? first_row : first_row + warp; r < end; r += together ? 1 : merge_warps) {
    // Of the warp's parts, `first`, first + step and so on.
    const unsigned first = together ? warp : 0, step = together ? merge_warps : 1;
    float most = -device::infinity();
#pragma unroll 4
    for (unsigned i = lane; i < parts.count; i += 32) {
      const float2 of = __ldcg(parts.stats(parts.slot(i, column), r));
      if (of.y != 0) most = fmaxf(most, of.x);
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2)
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, distance));
    float sum = 0;
    float4 o = {0, 0, 0, 0};
#pragma unroll 1
    for (unsigned i0 = first; i0 < parts.count; i0 += 32 * step) {
      // Lane l has the stats of part i0 + l * step.
      const unsigned own_part = i0 + lane * step;
      const float2 of = own_part < parts.count
                            ? __ldcg(parts.stats(parts.slot(own_part, column), r))
                            : make_float2(0, 0);
      // -1: does not count. Parts of nothing but NaN, which maxima pass over, count as they are.
      const float own = of.y == 0 ? -1 : most == -device::infinity() ? 1 : ptx::ex2(of.x - most);
      const int n = min(int((parts.count - i0 + step - 1) / step), 32);
      constexpr int at_once = 8;
#pragma unroll 1
      for (int j = 0; j < n; j += at_once) {
        float4 x[at_once];
#pragma unroll
        for (int k = 0; k < at_once; ++k)
          x[k] = j + k < n
                     ? __ldcg(reinterpret_cast<const float4*>(
                           parts.sums(parts.slot(i0 + (j + k) * step, column), r) + first_column))
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
    if (together) {
      shared->sums[warp][lane] = o;
      if (lane == 0) shared->sum[warp] = sum;
      __syncthreads();
      if (warp != 0) return;
#pragma unroll
      for (int w = 1; w < merge_warps; ++w) {
        const float4 x = shared->sums[w][lane];
        o.x += x.x, o.y += x.y, o.z += x.z, o.w += x.w;
        sum += shared->sum[w];
      }
    }
    const OutRow out(a, at, r, make_float2(most, sum));
    out.store_pair(first_column, o.x, o.y);
    out.store_pair(first_column + 2, o.z, o.w);
    if (first_column == 0) out.store_lse();
  }
}
