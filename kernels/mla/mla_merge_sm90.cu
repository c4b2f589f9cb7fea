//# architectures sm_90a
// Adds up the parts of row tiles that several blocks of mla_*_r64 shared, in a fixed order. Block
// x, y, z: rows y * rows_taken and on of a row tile of column x % columns: that of sequence
// x / columns, or (merges_by_block) what block x / columns of the column began and others went on
// with. Of these the z-th part of the columns. A warp has a row; or, if rows_taken is 1, all have
// one row and each every eighth part of it.
#include "../decode/load.cuh"
#include "../ptx/grid.h"
#include "parts.cuh"

using namespace attn;
using namespace attn::mla;

// What warps leave that share a row.
struct MergeShared {
  float4 sums[merge_warps][shared_merge_columns / 4];
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

// A row tile's parts, by all lanes of a warp: in each of `groups` groups of merge_columns a lane
// has four columns, the first at column 4 * lane of its part of a row.
// It has parts `first`, first + step and so on.
template <int columns, unsigned step>
struct Merge {
  static constexpr int groups = columns / 128;
  static constexpr int at_once = step == 1 ? 3 : 8;  // parts
  const Parts& parts;
  const int column;  // of blocks
  const unsigned first;
  float4 o[groups], x[at_once][groups];
  float most, sum;

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ float2 stats(int r, unsigned part) const {
    return part < parts.count ? __ldcg(parts.stats(parts.slot(part, column), r))
                              : make_float2(0, 0);
  }
  __device__ __forceinline__ void ask(int r, int first_column, unsigned part) {
#pragma unroll
    for (int k = 0; k < at_once; ++k, part += step)
#pragma unroll
      for (int g = 0; g < groups; ++g)
        x[k][g] = part < parts.count
                      ? __ldcg(reinterpret_cast<const float4*>(
                            parts.sums(parts.slot(part, column), r) + first_column + 128 * g))
                      : float4{0, 0, 0, 0};
  }
  // Leaves o, most and sum.
  __device__ __forceinline__ void run(int r, int first_column) {
    float2 own = stats(r, first + lane() * step);  // of the warp's parts
    ask(r, first_column, first);
    most = own.y == 0 ? -device::infinity() : own.x;
    // Of all other parts.
#pragma unroll(step == 1 ? 1 : 4)
    for (unsigned i = lane() + (step == 1 ? 32 : 0); i < parts.count; i += 32) {
      const float2 of = stats(r, i);
      if (of.y != 0) most = fmaxf(most, of.x);
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2)
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, distance));
    sum = 0;
#pragma unroll
    for (int g = 0; g < groups; ++g) o[g] = {0, 0, 0, 0};
#pragma unroll 1
    for (unsigned i0 = first; i0 < parts.count; i0 += 32 * step) {
      if (i0 > first) own = stats(r, i0 + lane() * step);
      // -1: does not count. Parts of nothing but NaN, which maxima pass over, count as they are.
      const float factor = own.y == 0                    ? -1
                           : most == -device::infinity() ? 1
                                                         : ptx::ex2(own.x - most);
#pragma unroll 1
      for (int j = 0; j < 32 && i0 + j * step < parts.count; j += at_once) {
        if (i0 + j > first) ask(r, first_column, i0 + j * step);
        add(j, factor, own.y);
      }
    }
  }
  // The parts that were asked for, of which lanes j and on have factors and weights.
  __device__ __forceinline__ void add(int j, float factor_of_lane, float weight_of_lane) {
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      const float factor = __shfl_sync(0xffffffff, factor_of_lane, j + k),
                  weight = __shfl_sync(0xffffffff, weight_of_lane, j + k);
      if (factor < 0) continue;
      sum = fmaf(weight, factor, sum);
#pragma unroll
      for (int g = 0; g < groups; ++g) {
        o[g].x = fmaf(x[k][g].x, factor, o[g].x), o[g].y = fmaf(x[k][g].y, factor, o[g].y);
        o[g].z = fmaf(x[k][g].z, factor, o[g].z), o[g].w = fmaf(x[k][g].w, factor, o[g].w);
      }
    }
  }
  __device__ __forceinline__ void store(const OutRow& out, int first_column) const {
#pragma unroll
    for (int g = 0; g < groups; ++g) {
      out.store_pair(first_column + 128 * g, o[g].x, o[g].y);
      out.store_pair(first_column + 128 * g + 2, o[g].z, o[g].w);
    }
    if (first_column == 0) out.store_lse();
  }
};

extern "C" __global__ void __launch_bounds__(32 * merge_warps, 4)
    mla_merge_sm90(const __grid_constant__ attn_decode_kernarg a) {
  ptx::grid_let_next_start();
  ptx::grid_wait();
  const int column = blockIdx.x % a.columns;
  const Shared of = find_shared(a, column, blockIdx.x / a.columns);
  const Parts& parts = of.parts;
  if (parts.count == 1) return;
  const int tile = column % a.row_tiles;
  const Head at = {of.b, column / a.row_tiles, tile * tile_rows, a.seqlen_q, of.keys, 0};
  const int used = min(at.seqlen_q * a.group - at.first_row, tile_rows);
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int first_row = blockIdx.y * a.rows_taken, end = min(first_row + a.rows_taken, used);
  if (a.rows_taken > 1) {
    const int first_column = merge_columns * blockIdx.z + 4 * lane;
#pragma unroll 1
    for (int r = first_row + warp; r < end; r += merge_warps) {
      Merge<merge_columns, 1> merge{parts, column, 0};
      merge.run(r, first_column);
      merge.store(OutRow(a, at, r, make_float2(merge.most, merge.sum)), first_column);
    }
    return;
  }
  // Static shared memory would keep all blocks from starting early.
  extern __shared__ MergeShared shared[];
  if (first_row >= end) return;
  const int first_column = shared_merge_columns * blockIdx.z + 4 * lane;
  Merge<shared_merge_columns, merge_warps> merge{parts, column, unsigned(warp)};
  merge.run(first_row, first_column);
  shared->sums[warp][lane] = merge.o[0];
  if (lane == 0) shared->sum[warp] = merge.sum;
  __syncthreads();
  if (warp != 0) return;
#pragma unroll
  for (int w = 1; w < merge_warps; ++w) {
    const float4 x = shared->sums[w][lane];
    merge.o[0].x += x.x, merge.o[0].y += x.y, merge.o[0].z += x.z, merge.o[0].w += x.w;
    merge.sum += shared->sum[w];
  }
  merge.store(OutRow(a, at, first_row, make_float2(merge.most, merge.sum)), first_column);
}
