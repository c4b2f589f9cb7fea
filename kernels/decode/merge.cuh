// The end of a part: its warps' sums become one, that a result or, where a head's row tile has
// other parts, one in the workspace. The last block to leave its part adds all up, in their order.
// With fixed_split one at a time, in groups cut by their numbers, so that parts in which a row sees
// nothing change none of its bits.
#pragma once
#include "../common/no_keys.cuh"
#include "../common/softmax.cuh"
#include "../ptx/arrive.h"
#include "../ptx/cp_async.h"
#include "../ptx/load_shared.h"
#include "../ptx/recompute.h"
#include "../ptx/warpgroup.h"
#include "units.cuh"

namespace attn::decode {

template <int n>
struct Count {};

// The columns of a row that each consumer thread has: 4 neighbouring ones.
template <int columns>
struct RowPart {
  static constexpr int rows = group_threads / (columns / 4);  // at once
  float reference = -infinity(), sum = 0;
  float4 o = {};

  static __device__ __forceinline__ int row() {
    return threadIdx.x % group_threads / (columns / 4);
  }
  static __device__ __forceinline__ int column() { return threadIdx.x % (columns / 4) * 4; }

  // Adds n parts, all asked for before the first is used: stats(i) gives the reference and sum of
  // part i, 0 if there is none, columns_of(i) its columns. Parts of sum 0 may hold anything.
  template <int n, class Stats, class Columns>
  __device__ __forceinline__ void add(Stats&& stats, Columns&& columns_of,
                                      bool one_by_one = false) {
    float2 of[n];
    float4 x[n];
#pragma unroll
    for (int i = 0; i < n; ++i) of[i] = stats(i), x[i] = columns_of(i);
    if (one_by_one) {
#pragma unroll
      for (int i = 0; i < n; ++i) add_at_once(&of[i], &x[i], Count<1>{});
    } else {
      add_at_once(of, x, Count<n>{});
    }
  }
  template <int n>
  __device__ __forceinline__ void add_at_once(const float2* of, const float4* x, Count<n>) {
    float most = reference;
#pragma unroll
    for (int i = 0; i < n; ++i) most = fmaxf(most, of[i].y == 0 ? -infinity() : of[i].x);
    if (most == -infinity()) {  // no part, or parts of nothing but NaN, which maxima pass over
#pragma unroll
      for (int i = 0; i < n; ++i)
        if (of[i].y != 0) sum = of[i].y, o = x[i];
      return;
    }
    const float shrink = ptx::ex2(reference - most);
    sum *= shrink;
    o.x *= shrink, o.y *= shrink, o.z *= shrink, o.w *= shrink;
    reference = most;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if (of[i].y == 0) continue;
      const float factor = ptx::ex2(of[i].x - most);
      sum = fmaf(of[i].y, factor, sum);
      o.x = fmaf(x[i].x, factor, o.x), o.y = fmaf(x[i].y, factor, o.y);
      o.z = fmaf(x[i].z, factor, o.z), o.w = fmaf(x[i].w, factor, o.w);
    }
  }
};

// A row tile of a K/V head of a sequence.
struct Head {
  int b, h;
  int first_row;
  int seqlen_q, seqlen_kv;
  int q_begin;  // packed q: row of query 0
};

// All threads of the warps that compute.
__device__ __forceinline__ void meet() {
  ptx::barrier_wait<group_threads>(1);
}

// Query and head of row r of a row tile: the heads of a query are consecutive.
struct Row {
  int query, head;
  __device__ __forceinline__ Row(const attn_decode_kernarg& a, const Head& at, int r)
      : query(0), head(at.h * a.group + at.first_row + r) {
    if (at.seqlen_q == 1) return;
    query = (at.first_row + r) / a.group;
    head -= query * a.group;
  }
};

template <int columns>
__device__ __forceinline__ void store_result(const attn_decode_kernarg& a, const Head& at, int r,
                                             const RowPart<columns>& part) {
  if (at.first_row + r >= at.seqlen_q * a.group) return;
  const Row row(a, at, r);
  const float sink = a.sinks ? a.sinks[row.head] : -infinity();
  const float factor = row_factor(part.reference, part.sum, sink);
  const long long q = (a.cu_seqlens_q ? at.q_begin : 0) + row.query;
  const long long out = (a.cu_seqlens_q ? 0 : at.b * a.out_stride[0]) + q * a.out_stride[1] +
                        row.head * a.out_stride[2];
  const int column = RowPart<columns>::column();
  if (column < a.head_dim_v) {
    float4 x = part.o;
    x.x *= factor, x.y *= factor, x.z *= factor, x.w *= factor;
    if (factor == 0) x = {};
    if (a.out_type == attn_element_f32) {
      *reinterpret_cast<float4*>(static_cast<float*>(a.out) + out + column) = x;
    } else {
      const bool f16 = a.out_type == attn_element_f16;
      const uint2 packed = f16 ? uint2{F16::pack(x.x, x.y), F16::pack(x.z, x.w)}
                               : uint2{BF16::pack(x.x, x.y), BF16::pack(x.z, x.w)};
      *reinterpret_cast<uint2*>(static_cast<unsigned short*>(a.out) + out + column) = packed;
    }
  }
  if (a.lse && column == 0) {
    const long long lse = a.cu_seqlens_q
                              ? row.head * a.total_q + q
                              : (at.b * (long long)a.heads_q + row.head) * a.seqlen_q + q;
    a.lse[lse] = row_lse(part.reference, part.sum, sink);
  }
}

// A part among those of its row tile, [begin, end). Parts of blocks that follow each other are
// numbered from 0 on, splits in the order of the sequence.
struct PlacedPart {
  unsigned number, begin, end;
  unsigned first;  // slot of split 0; or the first one of the block that has part 0

  __device__ __forceinline__ bool alone() const { return end - begin == 1; }
};

template <DecodeTile tile>
__device__ __forceinline__ PlacedPart place_of(const attn_decode_kernarg& a, const Head& at,
                                               const Share& share, const Part& part) {
  if (tile.swapped && a.split_keys) {
    const unsigned row_tile = tile.tiled ? at.first_row / tile.rows() : 0,
                   head = at.b * a.heads_kv + at.h;
    return {part.number, part.begin, part.end, (head * a.row_tiles + row_tile) * a.splits};
  }
  const unsigned first = share.block_of(part.begin), last = share.block_of(part.end - 1);
  return {Work<tile>::row(a) - first, 0, last - first + 1,
          2 * (first * a.columns + blockIdx.x % a.columns)};
}

// The parts of a row tile.
template <DecodeTile tile>
struct Parts {
  static constexpr int columns = tile.head_dim_v;
  const attn_decode_kernarg& a;
  const PlacedPart& part;

  // A block has at most one part that others began, and one that others go on with.
  __device__ __forceinline__ unsigned slot(unsigned number) const {
    if (tile.swapped && a.split_keys) return part.first + number;
    return part.first + 2 * a.columns * number + (number == 0);
  }
  __device__ __forceinline__ long long row_at(unsigned slot, int r) const {
    return slot * (long long)tile.slot_rows() + r;
  }
  __device__ __forceinline__ float* sums(unsigned slot, int r) const {
    return a.sums + row_at(slot, r) * columns;
  }
  __device__ __forceinline__ float2* stats(unsigned slot, int r) const {
    return reinterpret_cast<float2*>(a.stats) + row_at(slot, r);
  }
  __device__ __forceinline__ void write(unsigned slot, int r, const RowPart<columns>& from) const {
    const int column = RowPart<columns>::column();
    if (column == 0) *stats(slot, r) = make_float2(from.reference, from.sum);
    *reinterpret_cast<float4*>(sums(slot, r) + column) = from.o;
  }
  // Every step-th of the parts [from, to). Past L1, which may have what was there before.
  __device__ __forceinline__ RowPart<columns> read(unsigned from, unsigned to, unsigned step,
                                                   int r) const {
    constexpr int n = 4;
    const int column = RowPart<columns>::column();
    RowPart<columns> row;
#pragma unroll 1
    for (unsigned number = from; number < to; number += n * step) {
      const auto slot_of = [&](int i) {
        return slot(number + i * step < to ? number + i * step : number);
      };
      row.template add<n>(
          [&](int i) {
            return number + i * step < to ? __ldcg(stats(slot_of(i), r)) : make_float2(0, 0);
          },
          [&](int i) {
            return __ldcg(reinterpret_cast<const float4*>(sums(slot_of(i), r) + column));
          },
          true);
    }
    return row;
  }
  // Every step-th of the parts [from, to), at most merged_parts, of each row: done(r, sums). They
  // come through `at_once` places of 16 bytes for each thread, which uses its own alone.
  template <class Done>
  __device__ __forceinline__ void add_up(unsigned from, unsigned to, unsigned step, int rows,
                                         unsigned places, int at_once, Done&& done) const {
    using Row = RowPart<columns>;
    constexpr int width = columns < 128 ? columns / 4 : 32,
                  per_lane = merged_parts / width;  // lanes of a row
    const int lane = threadIdx.x % width, count = (to - from + step - 1) / step;
    const unsigned own = places + threadIdx.x % group_threads * 16;
#pragma unroll 1
    for (int r0 = 0; r0 < rows; r0 += Row::rows) {
      const int r = r0 + Row::row();
      const bool any = r < rows;
      Row row;
      float factor[per_lane], sum[per_lane];  // of parts lane, lane + width
#pragma unroll 1
      for (int first = 0; first < count; first += at_once) {
        const int end = min(first + at_once, count);
        if (first > 0) __syncwarp();
#pragma unroll 4
        for (int i = first; i < end; ++i)
          ptx::cp_async_16(own + (i - first) * 16 * group_threads,
                           sums(slot(from + i * step), any ? r : 0) + Row::column(), any);
        if (first == 0) {
#pragma unroll
          for (int n = 0; n < per_lane; ++n) {
            const int part = lane + n * width;
            const float2 of = part < count && any ? __ldcg(stats(slot(from + part * step), r))
                                                  : make_float2(0, 0);
            factor[n] = of.x, sum[n] = of.y;
            if (of.y != 0) row.reference = fmaxf(row.reference, of.x);
          }
#pragma unroll
          for (int lanes = 1; lanes < width; lanes *= 2)
            row.reference = fmaxf(row.reference, __shfl_xor_sync(0xffffffff, row.reference, lanes));
#pragma unroll
          for (int n = 0; n < per_lane; ++n) {
            factor[n] = sum[n] == 0 ? -1 : ptx::ex2(factor[n] - row.reference);  // -1: not added
            if (sum[n] != 0) row.sum = fmaf(sum[n], factor[n], row.sum);
          }
#pragma unroll
          for (int lanes = 1; lanes < width; lanes *= 2)
            row.sum += __shfl_xor_sync(0xffffffff, row.sum, lanes);
        }
        ptx::cp_async_wait_all();
#pragma unroll 4
        for (int i = first; i < end; ++i) {
          const float mine = per_lane > 1 && i >= width ? factor[per_lane - 1] : factor[0];
          const float f = __shfl_sync(0xffffffff, mine, i % width, width);
          const float4 x = ptx::load_shared_floats(own + (i - first) * 16 * group_threads);
          if (f < 0) continue;
          row.o.x = fmaf(x.x, f, row.o.x), row.o.y = fmaf(x.y, f, row.o.y);
          row.o.z = fmaf(x.z, f, row.o.z), row.o.w = fmaf(x.w, f, row.o.w);
        }
      }
      if (columns > 128) meet();  // warps that share a row have read its stats
      if (any) done(r, row);
    }
  }
  // Whether this block is the last of `expected` to come here; what the others wrote before can
  // then be read.
  __device__ __forceinline__ bool last_here(unsigned* arrived, unsigned expected) const {
    __shared__ bool last;
    meet();
    if (threadIdx.x % group_threads == 0) {
      last = ptx::count_arrival(arrived) == expected - 1;
      if (last) *arrived = 0;
    }
    meet();
    return last;
  }
  // After the part is written. Parts are added up in groups, and these again.
  __device__ __forceinline__ void arrive(const Head& at, int rows, unsigned places,
                                         int at_once) const {
    const unsigned group = part.number / merged_parts * merged_parts,
                   first_group = part.begin / merged_parts,
                   groups = (part.end - 1) / merged_parts + 1 - first_group;
    unsigned step = 1, from = max(group, part.begin), to = min(group + merged_parts, part.end);
    if (!last_here(a.arrived + slot(group), to - from)) return;
    const auto go_on = [&] {
      from = first_group * merged_parts, to = part.end, step = merged_parts;
      return last_here(a.arrived + a.slots + slot(from), groups);
    };
    bool all = groups == 1;
#pragma unroll 1
    while (true) {
      add_up(from, to, step, rows, places, at_once, [&](int r, const RowPart<columns>& row) {
        if (all)
          store_result(a, at, r, row);
        else
          write(slot(group), r, row);
      });
      if (all || !go_on()) return;
      all = true;
    }
  }
  // The same without a ring: what it reads comes to registers. Groups are as large as there are
  // groups, so that neither level waits long; with fixed_split they are cut by numbers.
  __device__ __forceinline__ void arrive_with_all_rows(const Head& at, int rows) const {
    unsigned size = merged_parts, group = 0, first_group = 0, groups = 1;
    if (a.split_keys || part.end > parts_at_once) {
      if (!a.split_keys) size = unsigned(__fsqrt_ru(float(part.end)));
      group = part.number / size * size;
      first_group = part.begin / size;
      groups = (part.end - 1) / size + 1 - first_group;
    }
    unsigned step = 1, from = max(group, part.begin), to = min(group + size, part.end),
             expected = to - from;
    unsigned* arrived = a.arrived + slot(group);
#pragma unroll 1
    while (last_here(arrived, expected)) {
      const bool all = step > 1 || groups == 1;
      add_rows(at, from, to, step, rows, all ? -1 : int(slot(group)));
      if (all) return;
      from = first_group * size, to = part.end, step = size, expected = groups;
      arrived = a.arrived + a.slots + slot(from);
    }
  }
  static constexpr unsigned parts_at_once = 16;
  // Every step-th of the parts [from, to), without fixed_split. Lane l of 16 has the stats of part
  // l.
  __device__ __forceinline__ RowPart<columns> add_blocks(unsigned from, unsigned to, unsigned step,
                                                         int r) const {
    static_assert(columns / 4 >= parts_at_once);
    const int lane = threadIdx.x % parts_at_once;
    const long long pitch = 2ll * a.columns * step * tile.slot_rows();  // rows
    unsigned left = step == 1 ? to - from : (to - from + step - 1) / step;
    // Part 0 lies in its block's other slot.
    int moved = from == 0 ? tile.slot_rows() : 0;
    const float2* stats_at = stats(slot(from) - (from == 0), r);
    const float* sums_at = sums(slot(from) - (from == 0), r) + RowPart<columns>::column();
    RowPart<columns> row;
#pragma unroll 1
    while (true) {
      float4 x[parts_at_once];
#pragma unroll
      for (int i = 0; i < parts_at_once; ++i)
        x[i] = i < left ? __ldcg(reinterpret_cast<const float4*>(
                              sums_at + (i * pitch + (i == 0 ? moved : 0)) * columns))
                        : float4{};
      const float2 of = lane < left ? __ldcg(stats_at + lane * pitch + (lane == 0 ? moved : 0))
                                    : make_float2(0, 0);
      RowPart<columns> some;
      if (of.y != 0) some.reference = of.x;
#pragma unroll
      for (int lanes = 1; lanes < parts_at_once; lanes *= 2)
        some.reference = fmaxf(some.reference, __shfl_xor_sync(0xffffffff, some.reference, lanes));
      // Parts of nothing but NaN, which maxima pass over, count as they are; -1: does not count.
      const float factor = of.y == 0                       ? -1
                           : some.reference == -infinity() ? 1
                                                           : ptx::ex2(of.x - some.reference);
      if (of.y != 0) some.sum = of.y * factor;
#pragma unroll
      for (int lanes = 1; lanes < parts_at_once; lanes *= 2)
        some.sum += __shfl_xor_sync(0xffffffff, some.sum, lanes);
#pragma unroll
      for (int i = 0; i < parts_at_once; ++i) {
        const float f = __shfl_sync(0xffffffff, factor, i, parts_at_once);
        if (f < 0) continue;
        some.o.x = fmaf(x[i].x, f, some.o.x), some.o.y = fmaf(x[i].y, f, some.o.y);
        some.o.z = fmaf(x[i].z, f, some.o.z), some.o.w = fmaf(x[i].w, f, some.o.w);
      }
      if (row.sum == 0) {
        row = some;
      } else {
        const float2 of_some = make_float2(some.reference, some.sum);
        row.add_at_once(&of_some, &some.o, Count<1>{});
      }
      if (left <= parts_at_once) return row;
      left -= parts_at_once;
      stats_at += parts_at_once * pitch;
      sums_at += parts_at_once * pitch * columns;
      moved = 0;
    }
  }
  // Every step-th of the parts [from, to) of each row: to the result, or to a slot.
  __device__ __forceinline__ void add_rows(const Head& at, unsigned from, unsigned to,
                                           unsigned step, int rows, int to_slot) const {
    using Row = RowPart<columns>;
    const int all = tile.max_heads() > 1 ? rows << a.heads_log2 : rows;
#pragma unroll 1
    for (int r0 = 0; r0 < all; r0 += Row::rows) {
      const int i = min(r0 + Row::row(), all - 1), head = tile.max_heads() > 1 ? i / rows : 0,
                r = i + head * (tile.rows() - rows);
      Row row;
      if (a.split_keys) {
        row = read(from, to, step, r);
      } else {
        row = add_blocks(from, to, step, r);
      }
      if (columns > 128) meet();  // warps that share a row have read its stats
      if (r0 + Row::row() >= all) continue;
      if (to_slot < 0) {
        Head of = at;
        of.h += head;
        store_result(a, of, r - head * tile.rows(), row);
      } else {
        write(to_slot, r, row);
      }
    }
  }
  // By all threads. A block that takes all splits of a row tile keeps the sums of a group in its
  // first slot, and those of the groups before in its second.
  __device__ __forceinline__ void fold(const Head& at, int r, const RowPart<columns>& row) const {
    const unsigned slot = 2 * blockIdx.x;
    const int column = RowPart<columns>::column();
    const auto add = [&](unsigned slot, bool any, const RowPart<columns>& next) {
      RowPart<columns> sum;
      if (any) {
        const float2 of = *stats(slot, r);
        sum.reference = of.x, sum.sum = of.y;
        sum.o = *reinterpret_cast<const float4*>(sums(slot, r) + column);
      }
      const float2 of = make_float2(next.reference, next.sum);
      sum.add_at_once(&of, &next.o, Count<1>{});
      return sum;
    };
    const unsigned next = part.number + 1;
    const bool begins_group = part.number == part.begin || part.number % merged_parts == 0,
               ends = next == part.end, ends_group = ends || next % merged_parts == 0;
    RowPart<columns> sum = add(slot, !begins_group, row);
    if (ends_group)
      sum = add(slot + 1, part.begin / merged_parts != part.number / merged_parts, sum);
    meet();  // all have read what is written now
    if (ends)
      store_result(a, at, r, sum);
    else
      write(slot + ends_group, r, sum);
  }
};

}  // namespace attn::decode
