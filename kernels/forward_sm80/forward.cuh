// Attention forward with mma.sync. A block has a tile of queries of one head and walks over the
// keys that they see; a warp has 16 or 32 of the queries, its scores, its sums and the state of its
// softmax in registers. Parts: block.cuh, load.cuh, scores.cuh, softmax.cuh, values.cuh.
#pragma once
#include "../common/element.cuh"
#include "../ptx/address.h"
#include "../ptx/cp_async.h"
#include "../ptx/recompute.h"
#include "block.cuh"
#include "load.cuh"
#include "scores.cuh"
#include "shape.cuh"
#include "softmax.cuh"
#include "state.cuh"
#include "values.cuh"

namespace attn::sm80 {

using namespace device;

// With a mask there are no registers to keep a tile in: it is read where it is used. `at`: in the
// list.
template <class Shape>
__device__ __forceinline__ void read_tile(TileOfKeys* tile, const Block& block, int at) {
  const TileList<Shape::keys>& list = shared_list<Shape::keys>();
  const auto& t = list.tile[ptx::recompute(at)];
  tile->first = t.first;
  tile->count = t.left;
  tile->mask =
      t.mask[block.row + Shape::row_warp(thread_number() / 32) * Shape::warp_rows >= list.first[1]];
}

// Softmax takes a scale above 0: with another one Q is negated, once it is there.
template <class Shape>
__device__ __forceinline__ void negate_queries(unsigned char* shared_memory) {
  ptx::cp_async_wait<0>();
  __syncthreads();
  unsigned* words = reinterpret_cast<unsigned*>(
      shared_memory + q_offset(Shape::tile, Shape::head_dim, Shape::head_dim_v));
  for (int i = threadIdx.x; i < q_bytes(Shape::tile, Shape::head_dim) / 4; i += Shape::threads)
    words[i] ^= 0x80008000;
  __syncthreads();
}

template <class Shape>
__device__ __forceinline__ void forward(const typename Shape::Arguments& a) {
  constexpr Tile tile = Shape::tile;
  constexpr bool masked = Shape::masked;
  constexpr int keys = Shape::keys, pitch = Shape::pitch, warp_rows = Shape::warp_rows;

  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const unsigned shared = ptx::address(shared_memory);
  const unsigned q_at = shared + q_offset(tile, Shape::head_dim, Shape::head_dim_v);
  __shared__ Block block;
  __shared__ SeenKeys warp_keys[tile.warps];
  static_assert(sizeof block + sizeof warp_keys + (masked ? sizeof(TileList<keys>) : 0) +
                    (Shape::paged ? sizeof(Places<keys>) : 0) <=
                static_shared_bytes(Shape::with));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  // Packed q, which block masks do not take. Meanwhile another warp waits for the lengths too.
  if (!masked && a.cu_seqlens_q) {
    if (warp == tile.warps - 1) store_rows_of_nobody<long long>(a, blockIdx.x, gridDim.x);
    if (a.seqlen_q == 0) return;
  }
  if (threadIdx.x == 0) block.find(a, tile.rows);
  __syncthreads();
  if (block.row >= block.seqlen_q) return;
  const int warp_row = block.row + Shape::row_warp(warp) * warp_rows;
  if constexpr (masked) {
    TileList<keys>& list = shared_list<keys>();
    if (warp == 0) {
      if (lane == 0) list.start(a.block_mask, block, tile.rows);
      __syncwarp();
      list.fill(a.block_mask, block);
      if (lane == 0 && list.count > 1) block.low = list.tile[1].first;
    }
    __syncthreads();
  }
  if (lane == 0) {
    const SeenKeys see = block.seen_keys(a, warp_row, warp_rows);
    warp_keys[warp] = see;
  }
  __syncwarp();

  Loader<Shape> loader(a, block, warp, shared);
  const bool any = loader.next.left > 0;
  if (any) loader.begin(q_at);
  State<Shape> state;

  // Each lane's place in the matrices that ldmatrix reads.
  const unsigned k_lane = chunk_offset<pitch>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  const unsigned q_lane = chunk_offset<pitch>(lane % 16, lane / 16);  // from the warp's first row
  const unsigned v_lane =
      chunk_offset<Shape::v_pitch>(lane % 16, lane / 16) + 2 * Shape::first_column(warp);

  if (!Shape::score && a.scale < 0 && any) negate_queries<Shape>(shared_memory);
  Queries<Shape> q;
  if (q.kept && any) {
    ptx::cp_async_wait<tile.stages>();
    __syncthreads();
#pragma unroll
    for (int d = 0; d < (q.kept ? Shape::d_steps : 1); ++d)
      q.read_step(q_lane + q_at + Shape::row_warp(warp) * (warp_rows * pitch), d);
  }
  const float log2_scale = Shape::score ? 1 : a.log2_scale;

  while (loader.next.left > 0) {
    TileOfKeys now = {.first = loader.next.first, .count = min(loader.next.left, keys)};
    const unsigned k_at = ptx::recompute(loader.stage_at + k_lane);
    loader.wait_for_k(now.first == block.low);

    const SeenKeys see = warp_keys[masked ? thread_number() / 32 : warp];
    if constexpr (masked)
      read_tile<Shape>(&now, block, tile.stages == 1 ? loader.next.at : loader.next.at - 1);
    const bool sees = now.first < see.some_end && now.first + now.count > see.some_begin &&
                      (!masked || now.mask != mask_empty);
    if (sees)
      multiply_keys(state, q,
                    q_lane + q_at + Shape::row_warp(ptx::recompute(warp)) * (warp_rows * pitch),
                    k_at);
    if (tile.stages == 1) loader.wait_for_v();

    if (sees) {
      const SeenKeys see = warp_keys[masked ? thread_number() / 32 : warp];
      if constexpr (masked) read_tile<Shape>(&now, block, loader.next.at - 1);
      const bool full = now.first >= see.all_begin && now.first + keys <= see.all_end &&
                        now.count == keys && (!masked || now.mask == mask_full) &&
                        all_there<Shape>(loader.number() ^ 1);
      if (Shape::score || !full) modify_scores(state, loader, now, warp_row);
      if (masked) state.seen[0] = state.all_seen;
      if ((masked && !full) || (Shape::biased && a.bias)) state.find_unseen();
      softmax(state, log2_scale, a.split_invariant);
    }
    if constexpr (masked && tile.stages == 2) read_tile<Shape>(&now, block, loader.next.at - 1);
    if (tile.stages == 2 && now.first == block.low) {
      ptx::cp_async_wait<1>();
      __syncthreads();
    }
    if (sees) {
      // With two stages stage_at has moved on to the other one.
      const unsigned here = tile.stages == 2 ? loader.other_stage() : loader.stage_at;
      multiply_values(state, ptx::recompute(here + Shape::k_bytes + v_lane));
    }
    if constexpr (masked) loader.next.read(shared_list<keys>());
  }
  ptx::cp_async_wait<0>();
  store_results(state, a, block, warp_row);
}

}  // namespace attn::sm80

// The kernel of the variant NAME.
#define ATTN_SM80_FORWARD(NAME)                                                                    \
  constexpr attn::sm80::Variant NAME##_variant =                                                   \
      attn::sm80::variants[attn::find_variant(attn::sm80::variants, #NAME)];                       \
  extern "C" __global__ void __launch_bounds__(NAME##_variant.tile().threads(),                    \
                                               NAME##_variant.tile().blocks)                       \
      NAME(const __grid_constant__ attn::sm80::Kernarg<NAME##_variant.with> a) {                   \
    attn::sm80::forward<                                                                           \
        attn::sm80::Shape<attn::device::ElementOf<NAME##_variant.type>, NAME##_variant.head_dim,   \
                          NAME##_variant.with, NAME##_variant.tile(), NAME##_variant.head_dim_v>>( \
        a);                                                                                        \
  }
