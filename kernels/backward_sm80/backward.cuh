// Gradients of attention with mma.sync, in two kinds of blocks, none of which adds to what another
// one has: a block has a tile of keys, walks over the queries of all heads that see them and sums
// dk and dv, or it has a tile of queries, walks over the keys that they see and sums dq. Scores are
// computed by both. Both are one loop: rows that stay in shared memory (X, Y) and rows that are
// walked over (x, y) are K, V and Q, dO for the former and Q, dO and K, V for the latter; then
//   S = X x^T, dP = Y y^T, P and dS of these; dv += P y, and dk or dq += dS x.
// A warp has 16 or 32 of the rows that stay. Parts: items.cuh, weigh.cuh, store.cuh; the products
// are forward_sm80's.
#pragma once
#include "../common/element.cuh"
#include "../forward_sm80/scores.cuh"
#include "../forward_sm80/shape.cuh"
#include "../forward_sm80/state.cuh"
#include "../forward_sm80/values.cuh"
#include "../ptx/address.h"
#include "../ptx/cp_async.h"
#include "items.cuh"
#include "store.cuh"
#include "variants.h"
#include "weigh.cuh"

namespace attn::bwd_sm80 {

using namespace device;

template <class Element, int head_dim, unsigned with, bool of_keys>
struct Shape : sm80::Shape<Element, head_dim, with,
                           tile_of(of_keys, head_dim, with& with_score).products()> {
  static constexpr Tile block = tile_of(of_keys, head_dim, with& with_score);
};

template <Of of, class Shape>
__device__ __forceinline__ void run(const attn_bwd_sm80_kernarg& a, unsigned index,
                                    unsigned char* shared_memory, Item& item) {
  constexpr Tile tile = Shape::block;
  constexpr int keys = Shape::keys, pitch = Shape::pitch, warp_rows = Shape::warp_rows;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned shared = ptx::address(shared_memory);

  if (threadIdx.x == 0) item.template find<of>(a, index, tile.rows);
  __syncthreads();
  if (item.row >= item.stored) return;
  const int warp_row = item.row + warp * warp_rows;

  Walker<Shape, of> walker(a, item, shared);
  if (walker.next.count > 0) {
    walker.copy_rows();
    walker.copy_walked(0);
  }
  ptx::cp_async_commit();

  RowStats<Shape> stats;
#pragma unroll
  for (int m = 0; m < Shape::row_tiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + 16 * m + fragment_row(half, lane);
      const long long at = a.rows.first_row(item.head) + item.stats + row;
      const bool exists = !is_keys<of> && row < item.length;
      stats.lse2[m][half] = exists ? a.lse2[at] : infinity();
      stats.delta[m][half] = exists ? a.delta[at] : 0;
    }
  }
  // The walked rows that some, and that all of the warp's rows see or are seen by.
  const int last = min(warp_row + warp_rows, item.length) - 1;
  const int some_begin = clamp(warp_row + item.from, 0, item.walked),
            some_end = last < warp_row ? 0 : clamp(last + item.to, 0, item.walked),
            all_begin = clamp(last + item.from, 0, item.walked),
            all_end = clamp(warp_row + item.to, 0, item.walked);

  sm80::State<Shape> s, d;  // of S and dv; of dP and dk or dq
  sm80::Queries<Shape> fragments;
  const unsigned walked_lane = chunk_offset<pitch>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  const unsigned lane_at = chunk_offset<pitch>(lane % 16, lane / 16);
  const unsigned rows_at = shared + warp * (warp_rows * pitch) + lane_at;

  int stage = 0;
  while (walker.next.count > 0) {
    const Walked all = walker.next;
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (tile.stages == 2) {
      walker.go_on();
      if (walker.next.count > 0) walker.copy_walked(stage ^ 1);
      ptx::cp_async_commit();
    }
#pragma unroll 1
    for (int part = 0; part < tile.copied; part += keys) {
      const Walked now = {all.head, all.first + part, min(all.count - part, keys), all.mask};
      const bool sees = now.first < some_end && now.first + now.count > some_begin &&
                        now.count > 0 && (!Shape::masked || now.mask != mask_empty);
      if (!sees) continue;
      const unsigned x_at = walker.stage_at(stage) + part * pitch, y_at = x_at + walker.bytes;
      sm80::multiply_keys(s, fragments, rows_at, x_at + walked_lane);
      if constexpr (of != Of::keys_dv)
        sm80::multiply_keys(d, fragments, rows_at + rows_bytes(tile, Shape::head_dim),
                            y_at + walked_lane);
      const bool full = now.first >= all_begin && now.first + keys <= all_end &&
                        now.count == keys && (!Shape::masked || now.mask == mask_full);
      const auto* walked_stats =
          reinterpret_cast<const float*>(shared_memory + stats_at(tile, Shape::head_dim) +
                                         (stage * 2 * tile.copied + part) * sizeof(float));
      weigh<of>(s, d, a, item, now, full, warp_row, stats, walked_stats);
      if constexpr (of == Of::keys || of == Of::keys_dv) sm80::multiply_values(s, y_at + lane_at);
      if constexpr (of != Of::keys_dv) sm80::multiply_values(d, x_at + lane_at);
    }
    if (tile.stages == 1) {
      __syncthreads();
      walker.go_on();
      if (walker.next.count > 0) walker.copy_walked(0);
      ptx::cp_async_commit();
    } else {
      stage ^= 1;
    }
  }
  ptx::cp_async_wait<0>();

  float scale[Shape::row_tiles][2], one[Shape::row_tiles][2];
#pragma unroll
  for (int m = 0; m < Shape::row_tiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool exists = warp_row + 16 * m + fragment_row(half, lane) < item.length &&
                          (is_keys<of> || stats.lse2[m][half] != infinity());
      scale[m][half] = exists ? a.scale : 0;
      one[m][half] = exists ? 1 : 0;
    }
  }
  if constexpr (of == Of::keys || of == Of::keys_dv)
    store_rows<Shape>(s, a.dv, item, a.kv.cu_seqlens, warp_row, one, a.head_dim_v);
  if constexpr (of == Of::keys || of == Of::keys_dk)
    store_rows<Shape>(d, a.dk, item, a.kv.cu_seqlens, warp_row, scale, a.head_dim);
  if constexpr (of == Of::queries)
    store_rows<Shape>(d, a.dq, item, a.cu_seqlens_q, warp_row, scale, a.head_dim);
}

template <const Variant& variant>
__device__ __forceinline__ void backward(const attn_bwd_sm80_kernarg& a) {
  using Element = ElementOf<variant.type>;
  constexpr int head_dim = variant.head_dim;
  using Keys = Shape<Element, head_dim, variant.with, true>;
  using Queries = Shape<Element, head_dim, variant.with, false>;
  static_assert(Keys::threads == Queries::threads);
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ Item item;
  static_assert(sizeof item <= static_shared_bytes);
  unsigned index = blockIdx.x;
  if (index < a.items_dv) {
    constexpr Of of = both_sums(head_dim) ? Of::keys : Of::keys_dv;
    return run<of, Keys>(a, index, shared_memory, item);
  }
  index -= a.items_dv;
  if constexpr (!both_sums(head_dim)) {
    if (index < a.items_dk) return run<Of::keys_dk, Keys>(a, index, shared_memory, item);
    index -= a.items_dk;
  }
  run<Of::queries, Queries>(a, index, shared_memory, item);
}

}  // namespace attn::bwd_sm80

// The kernel of the variant NAME.
#define ATTN_SM80_BACKWARD(NAME)                                                     \
  constexpr attn::bwd_sm80::Variant NAME##_variant =                                 \
      attn::bwd_sm80::variants[attn::find_variant(attn::bwd_sm80::variants, #NAME)]; \
  extern "C" __global__ void __launch_bounds__(NAME##_variant.tile(true).threads(),  \
                                               NAME##_variant.tile(true).blocks)     \
      NAME(const __grid_constant__ attn_bwd_sm80_kernarg a) {                        \
    attn::bwd_sm80::backward<NAME##_variant>(a);                                     \
  }
