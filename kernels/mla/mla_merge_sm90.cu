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

// What a block adds up. One part: nothing.
struct Shared {
  int b, keys;
  Parts parts;
};
__device__ __forceinline__ Shared find_shared(const attn_decode_kernarg& a, int column,
                                              int number) {
  int b = number;
  unsigned before;
  Share share;
  if (!merges_by_block(a.batch, a.splits)) {
    const Counted units = count_units(a, b);
    share = {units.all, unsigned(a.splits)};
    before = units.before;
  } else {
    const Found next = find_share(a, column, number + 1);
    share = next.share;
    before = next.begin - next.unit;
    b = next.b;
    if (next.unit == 0 || share.block_of(before) != number) return {b, 0, {a, share, before, 1}};
  }
  const int keys = segment_span(a.segment[0].lengths, b).length;
  return {b, keys, {a, share, before, unsigned(units_of(keys))}};
}

extern "C" __global__ void __launch_bounds__(32 * merge_warps, 4)
    mla_merge_sm90(const __grid_constant__ attn_decode_kernarg a) {
  ptx::grid_let_next_start();
  ptx::grid_begin_concurrent();  // to read lengths
  const int column = blockIdx.x % a.columns;
  const Shared of = find_shared(a, column, blockIdx.x / a.columns);
  const Parts& parts = of.parts;
  ptx::grid_wait();
  if (parts.count == 1) return;
  const Head at = {
      of.b, column / a.row_tiles, column % a.row_tiles * tile_rows, a.seqlen_q, of.keys, 0};
  const int used = min(at.seqlen_q * a.group - at.first_row, tile_rows);
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int first_column = merge_columns * blockIdx.z + 4 * lane;
  const bool together = a.rows_taken == 1;
  const int first_row = blockIdx.y * a.rows_taken, end = min(first_row + a.rows_taken, used),
            row_step = together ? 1 : merge_warps;
  // The warp has parts `first`, first + step and so on.
  const unsigned first = together ? warp : 0, step = together ? merge_warps : 1;
  const auto stats = [&](int r, unsigned part) {
    return r < end && part < parts.count ? __ldcg(parts.stats(parts.slot(part, column), r))
                                         : make_float2(0, 0);
  };
  constexpr int at_once = 4;
  using Sums = float4[at_once];  // of parts `step` apart, columns first_column and on
  const auto ask = [&](Sums& x, int r, unsigned part) {
#pragma unroll
    for (int k = 0; k < at_once; ++k, part += step)
      x[k] = r < end && part < parts.count
                 ? __ldcg(reinterpret_cast<const float4*>(parts.sums(parts.slot(part, column), r) +
                                                          first_column))
                 : float4{0, 0, 0, 0};
  };
  // Of warps that are together. Static shared memory would keep all blocks from starting early.
  extern __shared__ MergeShared shared[];
  int r = together ? first_row : first_row + warp;
  Sums ahead;
  ask(ahead, r, first);
  float2 own = stats(r, lane);  // of part i0 + lane
#pragma unroll 1
  for (; r < end; r += row_step) {
    float most = own.y == 0 ? -device::infinity() : own.x;
#pragma unroll 1
    for (unsigned i = lane + 32; i < parts.count; i += 32) {
      const float2 other = stats(r, i);
      if (other.y != 0) most = fmaxf(most, other.x);
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2)
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, distance));
    const float2 of_next_row = stats(r + row_step, lane);
    float sum = 0;
    float4 o = {0, 0, 0, 0};
#pragma unroll 1
    for (unsigned i0 = 0; i0 < parts.count; i0 += 32) {
      if (i0 > 0) own = stats(r, i0 + lane);
      // -1: does not count. Parts of nothing but NaN, which maxima pass over, count as they are.
      const float own_factor = own.y == 0                    ? -1
                               : most == -device::infinity() ? 1
                                                             : ptx::ex2(own.x - most);
#pragma unroll 1
      for (unsigned i = i0 + first; i < min(i0 + 32, parts.count); i += at_once * step) {
        Sums x;
#pragma unroll
        for (int k = 0; k < at_once; ++k) x[k] = ahead[k];
        const unsigned next = i + at_once * step;
        const bool row_ends = next >= parts.count;
        ask(ahead, row_ends ? r + row_step : r, row_ends ? first : next);
#pragma unroll
        for (int k = 0; k < at_once; ++k) {
          const unsigned part = i + k * step;
          const float factor = __shfl_sync(0xffffffff, own_factor, part % 32),
                      weight = __shfl_sync(0xffffffff, own.y, part % 32);
          if (part >= parts.count || factor < 0) continue;
          sum = fmaf(weight, factor, sum);
          o.x = fmaf(x[k].x, factor, o.x), o.y = fmaf(x[k].y, factor, o.y);
          o.z = fmaf(x[k].z, factor, o.z), o.w = fmaf(x[k].w, factor, o.w);
        }
      }
    }
    own = of_next_row;
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
