// The way of Q, K and V into shared memory.
#pragma once
#include "../ptx/cp_async.h"
#include "../shared/swizzle.h"
#include "block.cuh"
#include "pages.cuh"
#include "shape.cuh"
#include "tile_list.cuh"

namespace attn::sm80 {

using namespace device;

// The block copies `rows` rows of 128-byte lines; thread t has chunk t % 8 of each line. Rows from
// `count` on and columns from head_dim on become zero.
template <int threads, int rows, int pitch>
__device__ __forceinline__ void copy_tile(unsigned to, const char* from, long long row_bytes,
                                          int count, int head_dim) {
  constexpr int rows_at_once = threads / 8;
  const int first = threadIdx.x / 8, column = threadIdx.x % 8;
  const unsigned at = to + chunk_offset<pitch>(first, column);
  from += first * row_bytes + column * 16;
#pragma unroll
  for (int row = 0; row < rows; row += rows_at_once) {
#pragma unroll
    for (int line = 0; line < pitch / 128; ++line) {
      ptx::cp_async_16(at + row * pitch + line * 128, from + line * 128,
                       first + row < count && 64 * line + 8 * column < head_dim);
    }
    from += rows_at_once * row_bytes;
  }
}

template <int keys>
__device__ __forceinline__ TileList<keys>& shared_list() {
  __shared__ TileList<keys> list;
  return list;
}

template <int keys>
__device__ __forceinline__ Places<keys>& shared_places() {
  __shared__ Places<keys> places;
  return places;
}

// Where the walk over the block's keys begins.
template <class Shape>
__device__ __forceinline__ auto first_keys(const Block& block) {
  if constexpr (Shape::masked)
    return ListedKeys(shared_list<Shape::keys>());
  else
    return Keys(block);
}

// Copies the block's queries and then one tile of keys after the other. Every copy is by all
// threads; cp.async groups are committed in the order in which they are waited for.
template <class Shape>
struct Loader {
  static constexpr Tile tile = Shape::tile;
  static constexpr int keys = Shape::keys;

  const typename Shape::Arguments& a;
  const Block& block;
  int warp;
  unsigned shared;    // address of the stages
  unsigned stage_at;  // of the stage of `next`
  int toggle = 0;
  decltype(first_keys<Shape>(block)) next = first_keys<Shape>(block);  // the tile copied next

  __device__ __forceinline__ Loader(const typename Shape::Arguments& a, const Block& block,
                                    int warp, unsigned shared)
      : a(a), block(block), warp(warp), shared(shared), stage_at(shared) {}

  // The number in Places of the tile `next`: with two stages that of its stage.
  __device__ __forceinline__ int number() const {
    return tile.stages == 2 ? int(stage_at != shared) : toggle;
  }

  __device__ __forceinline__ unsigned other_stage() const {
    return 2 * shared + Shape::stage_bytes - stage_at;
  }

  __device__ __forceinline__ void copy_k(unsigned to) const {
    const attn_sm80_segment& segment = a.segment[next.segment];
    if constexpr (Shape::paged) {
      Places<keys>& places = shared_places<keys>();
      const unsigned num_pages = a.pages[next.segment].num_pages;
      if (warp == 0) places.find_there(number(), num_pages);
      places.template copy<Shape::threads, Shape::pitch>(
          number(), to, block.segment[next.segment].k, segment.k_stride, num_pages, next.left,
          a.head_dim);
    } else {
      const long long stride = 2 * segment.k_stride[1];
      copy_tile<Shape::threads, keys, Shape::pitch>(
          to, block.segment[next.segment].k + next.first * stride, stride, next.left, a.head_dim);
    }
  }

  __device__ __forceinline__ void copy_v(unsigned to) const {
    const attn_sm80_segment& segment = a.segment[next.segment];
    if constexpr (Shape::paged) {
      shared_places<keys>().template copy<Shape::threads, Shape::v_pitch>(
          number(), to, block.segment[next.segment].v, segment.v_stride,
          a.pages[next.segment].num_pages, next.left, a.head_dim_v);
    } else {
      const long long stride = 2 * segment.v_stride[1];
      copy_tile<Shape::threads, keys, Shape::v_pitch>(
          to, block.segment[next.segment].v + next.first * stride, stride, next.left, a.head_dim_v);
    }
  }

  __device__ __forceinline__ void go_on() {
    if constexpr (Shape::masked)
      next.next(shared_list<keys>(), a.block_mask, block);
    else
      next.next(block, keys);
    if (Shape::paged) toggle ^= 1;
  }

  // paged: requests the places of the tile after `next`, which arrive with the next group.
  __device__ __forceinline__ void ask_behind() const {
    if constexpr (Shape::paged) {
      Keys behind = next;
      behind.next(block, keys);
      shared_places<keys>().ask(number() ^ 1, a, block, behind);
    }
  }

  // The queries, then the first tile of keys.
  __device__ __forceinline__ void begin(unsigned q_at) const {
    if constexpr (Shape::paged) {
      shared_places<keys>().ask(number(), a, block, next);
      if (tile.stages == 2) ask_behind();
      ptx::cp_async_commit();
    }
    const long long row = (a.cu_seqlens_q ? 0 : block.b * a.q_stride[0]) +
                          (block.q_begin + block.row) * a.q_stride[1] + block.h * a.q_stride[2];
    copy_tile<Shape::threads, tile.rows, Shape::pitch>(
        q_at, static_cast<const char*>(a.q) + 2 * row, 2 * a.q_stride[1],
        block.seqlen_q - block.row, a.head_dim);
    ptx::cp_async_commit();
    if constexpr (Shape::paged) {
      ptx::cp_async_wait<1>();
      __syncthreads();
    }
    copy_k(shared);
    ptx::cp_async_commit();
    if (tile.stages == 2) {
      copy_v(shared + Shape::k_bytes);
      ptx::cp_async_commit();
    }
  }

  // Before a tile's scores: waits for its K and, with two stages, for its V unless it is the first
  // tile. Then requests its V (one stage) or the next tile (two stages).
  __device__ __forceinline__ void wait_for_k(bool first) {
    if (tile.stages == 1) {
      ptx::cp_async_wait<0>();
      __syncthreads();
      copy_v(shared + Shape::k_bytes);
      ask_behind();
      ptx::cp_async_commit();
      return;
    }
    if (first)  // V of the first tile is a group of its own
      ptx::cp_async_wait<1>();
    else
      ptx::cp_async_wait<0>();
    __syncthreads();
    stage_at = other_stage();
    go_on();
    if (next.left > 0) {
      copy_k(stage_at);
      copy_v(stage_at + Shape::k_bytes);
      ask_behind();
    }
    ptx::cp_async_commit();
  }

  // With one stage, after the scores: waits for V of the tile and requests K of the next one.
  __device__ __forceinline__ void wait_for_v() {
    ptx::cp_async_wait<0>();
    __syncthreads();
    go_on();
    if (next.left > 0) copy_k(shared);
    ptx::cp_async_commit();
  }
};

}  // namespace attn::sm80
