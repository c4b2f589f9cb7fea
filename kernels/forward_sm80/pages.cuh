// Where the keys of a tile are if segments may be paged.
#pragma once
#include "../common/keys.cuh"
#include "../ptx/address.h"
#include "../ptx/cp_async.h"
#include "../shared/swizzle.h"
#include "forward_args.h"

namespace attn::sm80 {

using namespace device;

__device__ __forceinline__ bool is_paged(const attn_sm80_forward_kernarg&, int) {
  return false;
}
__device__ __forceinline__ bool is_paged(const attn_sm80_paged_kernarg& a, int segment) {
  return a.pages[segment].block_table != nullptr;
}

// Lies in shared memory and holds the places of two tiles, of which tile n has number n % 2: of the
// one that is copied next, and of the one after it, which are in flight meanwhile.
template <int keys>
struct Places {
  struct Place {
    int page;  // as the table has it, or outside the pool: not there
    int slot;
  };
  Place place[2][keys];
  unsigned there[2][keys / 32];  // a bit per key whose page is in the pool

  // Asks for the places of a tile's keys, by cp.async. Segments that are not paged are one page, in
  // which a key has its position as its slot.
  template <class Block>
  __device__ __forceinline__ void ask(int number, const attn_sm80_paged_kernarg& a,
                                      const Block& block, const Keys& tile) {
    const int r = threadIdx.x;
    if (r >= min(tile.left, keys)) return;
    Place& to = place[number][r];
    const int key = tile.first + r;
    const attn_pages& pages = a.pages[tile.segment];
    if (!pages.block_table) {
      to = {0, key};
      return;
    }
    const unsigned local = key - (tile.segment > 0 ? block.segment[tile.segment - 1].end : 0),
                   entry = local / pages.page_size;
    to.slot = int(local - entry * pages.page_size);
    ptx::cp_async_if<4>(ptx::address(&to.page),
                        pages.block_table + block.b * (long long)pages.max_pages + entry, true);
  }

  // By one warp, once the places have come.
  __device__ __forceinline__ void find_there(int number, unsigned num_pages) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < keys / 32; ++n) {
      const unsigned bits =
          __ballot_sync(0xffffffff, unsigned(place[number][32 * n + lane].page) < num_pages);
      if (lane == 0) there[number][n] = bits;
    }
  }

  // As copy_tile, with the rows of the tile's first `count` keys. Those that are not there become
  // zero. strides: elements.
  template <int threads, int pitch>
  __device__ __forceinline__ void copy(int number, unsigned to, const char* base,
                                       const long long (&strides)[3], unsigned num_pages, int count,
                                       int head_dim) const {
    constexpr int rows_at_once = threads / 8;
    const int first = threadIdx.x / 8, column = threadIdx.x % 8;
    const unsigned at = to + chunk_offset<pitch>(first, column);
#pragma unroll
    for (int row = 0; row < keys; row += rows_at_once) {
      const Place from = place[number][first + row];
      const bool valid = first + row < count && unsigned(from.page) < num_pages;
      const long long element = valid ? from.page * strides[0] + from.slot * strides[1] : 0;
      const char* chunk = base + 2 * element + column * 16;
#pragma unroll
      for (int line = 0; line < pitch / 128; ++line)
        ptx::cp_async_16(at + row * pitch + line * 128, chunk + line * 128,
                         valid && 64 * line + 8 * column < head_dim);
    }
  }
};

}  // namespace attn::sm80
