//# architectures sm_90a
// Adds up the parts of row tiles that several blocks of mla_*_r64 shared, in a fixed order. Block
// x, y, z: rows y * rows_taken and on of a row tile of column x % columns: that of sequence
// x / columns, or (merges_by_block) what block x / columns of the column began and others went on
// with. Of the rows the z-th half or quarter. A warp has a row; or, if rows_taken is 1, all have
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

// A row tile that may have several parts. One part: there is nothing to add up.
struct SharedTile {
  int b, keys;
  Parts parts;
};
__device__ __forceinline__ SharedTile of_sequence(const attn_decode_kernarg& a, int b) {
  const Counted units = count_units(a, b);
  const int keys = segment_span(a.segment[0].lengths, b).length;
  return {b, keys, {a, {units.all, unsigned(a.splits)}, units.before, unsigned(units_of(keys))}};
}
// What block `number` of a column began and the next one went on with.
__device__ __forceinline__ SharedTile of_block(const attn_decode_kernarg& a, int column,
                                               int number) {
  const Found next = find_share(a, column, number + 1);
  const unsigned before = next.begin - next.unit;
  const int keys = segment_span(a.segment[0].lengths, next.b).length;
  const bool began = next.unit > 0 && next.share.block_of(before) == number;
  return {next.b, keys, {a, next.share, before, began ? units_of(keys) : 1u}};
}

// Of a row's parts `first`, first + step and so on, by all lanes of a warp: a lane has four columns
// of each 128.
template <int columns, unsigned step>
struct Merge {
  static constexpr int groups = columns / 128;
  static constexpr int at_once = step == 1 ? 3 : 8;  // parts for which there are registers
  const Parts& parts;
  const int column;  // of blocks
  const unsigned first;
  float4 o[groups], x[at_once][groups];
  float most, sum;

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ float2 stats(int r, unsigned part) const {
    return __ldcg(parts.stats(parts.slot(part, column), r));
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
  // Leaves o, most and sum. Of few parts, which one warp has, the first sums are asked for before
  // the statistics; of many, which warps share, after them.
  __device__ __forceinline__ void run(int r, int first_column) {
    constexpr bool ahead = step == 1;
    if (ahead) ask(r, first_column, first);
    most = find_most(r);
    sum = 0;
#pragma unroll
    for (int g = 0; g < groups; ++g) o[g] = {0, 0, 0, 0};
#pragma unroll 1
    for (unsigned i0 = first; i0 < parts.count; i0 += 32 * step) {
      const unsigned own_part = i0 + lane() * step;
      const float2 own = own_part < parts.count ? stats(r, own_part) : make_float2(0, 0);
      // -1: does not count. Parts of nothing but NaN, which maxima pass over, count as they are.
      const float factor = own.y == 0                    ? -1
                           : most == -device::infinity() ? 1
                                                         : ptx::ex2(own.x - most);
      const int n = min(int((parts.count - i0 + step - 1) / step), 32);
#pragma unroll 1
      for (int j = 0; j < n; j += at_once) {
        if (!ahead || i0 + j > first) ask(r, first_column, i0 + j * step);
        add(j, n, factor, own.y);
      }
    }
  }
  // The parts that were asked for, of which lanes j to n - 1 have factors and weights.
  __device__ __forceinline__ void add(int j, int n, float factor_of_lane, float weight_of_lane) {
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      const float factor = __shfl_sync(0xffffffff, factor_of_lane, (j + k) % 32),
                  weight = __shfl_sync(0xffffffff, weight_of_lane, (j + k) % 32);
      if (j + k >= n || factor < 0) continue;
      sum = fmaf(weight, factor, sum);
#pragma unroll
      for (int g = 0; g < groups; ++g) {
        o[g].x = fmaf(x[k][g].x, factor, o[g].x), o[g].y = fmaf(x[k][g].y, factor, o[g].y);
        o[g].z = fmaf(x[k][g].z, factor, o[g].z), o[g].w = fmaf(x[k][g].w, factor, o[g].w);
      }
    }
  }
  // The largest reference of all parts.
  __device__ __forceinline__ float find_most(int r) const {
    float most = -device::infinity();
#pragma unroll(step == 1 ? 1 : 4)
    for (unsigned i = lane(); i < parts.count; i += 32) {
      const float2 of = stats(r, i);
      if (of.y != 0) most = fmaxf(most, of.x);
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2)
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, distance));
    return most;
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

// A block's part of the grid.
struct Block {
  int column, number;  // of blocks of mla_*; in the column a sequence or a block
  int warp, lane;
  __device__ __forceinline__ explicit Block(const attn_decode_kernarg& a)
      : column(blockIdx.x % a.columns),
        number(blockIdx.x / a.columns),
        warp(__shfl_sync(0xffffffff, threadIdx.x / 32, 0)),
        lane(threadIdx.x % 32) {}
};
__device__ __forceinline__ Head head_of(const attn_decode_kernarg& a, const SharedTile& of,
                                        int column) {
  const int tile = column % a.row_tiles;
  return {of.b, column / a.row_tiles, tile * tile_rows, a.seqlen_q, of.keys, 0};
}

// A warp has a row.
__device__ __forceinline__ void merge_rows(const attn_decode_kernarg& a, const Block& block,
                                           const SharedTile& of) {
  if (of.parts.count == 1) return;
  const Head at = head_of(a, of, block.column);
  const int first_row = blockIdx.y * a.rows_taken,
            end = min(first_row + a.rows_taken, used_rows(a, at, tile_rows)),
            first_column = merge_columns * blockIdx.z + 4 * block.lane;
#pragma unroll 1
  for (int r = first_row + block.warp; r < end; r += merge_warps) {
    Merge<merge_columns, 1> merge{of.parts, block.column, 0};
    merge.run(r, first_column);
    merge.store(OutRow(a, at, r, make_float2(merge.most, merge.sum)), first_column);
  }
}

// All warps have row y, and each every eighth part of it.
__device__ __forceinline__ void merge_together(const attn_decode_kernarg& a, const Block& block) {
  const SharedTile of = of_sequence(a, block.number);
  if (of.parts.count == 1) return;
  const Head at = head_of(a, of, block.column);
  const int r = blockIdx.y;
  if (r >= used_rows(a, at, tile_rows)) return;
  const int first_column = shared_merge_columns * blockIdx.z + 4 * block.lane;
  Merge<shared_merge_columns, merge_warps> merge{of.parts, block.column, unsigned(block.warp)};
  merge.run(r, first_column);
  // Static shared memory would keep all blocks from starting early.
  extern __shared__ MergeShared shared[];
  shared->sums[block.warp][block.lane] = merge.o[0];
  if (block.lane == 0) shared->sum[block.warp] = merge.sum;
  __syncthreads();
  if (block.warp != 0) return;
#pragma unroll
  for (int w = 1; w < merge_warps; ++w) {
    const float4 x = shared->sums[w][block.lane];
    merge.o[0].x += x.x, merge.o[0].y += x.y, merge.o[0].z += x.z, merge.o[0].w += x.w;
    merge.sum += shared->sum[w];
  }
  merge.store(OutRow(a, at, r, make_float2(merge.most, merge.sum)), first_column);
}

// A block's time is mostly that of what it waits for, instructions among it: code that was longer
// before its first load of a sum was slower (docs/log/2026-11-28_list_steps.md).
extern "C" __global__ void __launch_bounds__(32 * merge_warps, merge_blocks)
    mla_merge_sm90(const __grid_constant__ attn_decode_kernarg a) {
  ptx::grid_let_next_start();
  ptx::grid_wait();
  const Block block(a);
  if (a.rows_taken == 1)
    merge_together(a, block);
  else if (!merges_by_block(a.batch, a.splits))
    merge_rows(a, block, of_sequence(a, block.number));
  else
    merge_rows(a, block, of_block(a, block.column, block.number));
}
