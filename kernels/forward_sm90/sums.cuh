// Sums of weight * v.
#pragma once
#include "../ptx/load_shared.h"
#include "../ptx/tma.h"
#include "../ptx/wgmma.h"
#include "config.h"
#include "scores_blocks.cuh"

namespace attn::sm90 {

// Weights of a tile of keys as wgmma takes them, and the sums.
template <Tile tile>
using Weights = unsigned[tile.keys / 16][4];
template <Tile tile>
using Sums = float[tile.sum_columns() / 2];

// o += P V; to be waited for. Without `add` o starts at 0.
template <bool bf16, Tile tile>
__device__ __forceinline__ void start_sums(Sums<tile>& o, const Weights<tile>& p, unsigned v_at,
                                           bool add) {
  const unsigned long long b_matrix = ptx::wgmma_descriptor(v_at, Warp<tile>::panel);
#pragma unroll
  for (int step = 0; step < tile.keys / 16; ++step)
    ptx::wgmma<bf16, true>(o, p[step], b_matrix + (step * 2048 >> 4), step > 0 || add);
  ptx::wgmma_commit();
}

// The same, waited for.
template <bool bf16, Tile tile>
__device__ __forceinline__ void add_sums(Sums<tile>& o, const Weights<tile>& p, unsigned v_at,
                                         bool add) {
  ptx::pin(o);
  ptx::wgmma_fence();
  start_sums<bf16, tile>(o, p, v_at, add);
  ptx::wgmma_wait<0>();
  ptx::pin(o);
}

// V rows of keys that no query of the sequence sees, with a block mask, a bias or pages no query of
// the item, may hold anything, and 0 * NaN is NaN: they become zero. With a bias the warps that see
// all keys do not wait for the others, which find that there is nothing to do.
// said_parity: of the next phase of each warp.control.said.
template <Tile tile, unsigned with>
__device__ __forceinline__ void clear_unused(const Warp<tile>& warp, unsigned n,
                                             unsigned& said_parity) {
  constexpr bool masked = with & with_mask, biased = with == with_bias, paged = with & with_pages;
  constexpr int keys = tile.keys, words = key_words<tile>;
  const auto meet = [] { ptx::barrier_wait(1 + tile.groups, 128 * tile.groups); };
  const unsigned v = 16 * warp.v_at(n) - warp.shared + address(&warp.control);  // not within_block
  unsigned seen[words];
#pragma unroll
  for (int word = 0; word < words; ++word)
    seen[word] = paged ? warp.control.blocks[n % tile_slots].seen[word]
                       : low_bits(warp.key_tile(n).used - 32 * word);
  if (masked || biased) {
    const unsigned slot = n % tile_slots;
    ptx::mbarrier_wait(address(&warp.control.said[slot]),
                       (biased ? n / tile_slots : said_parity >> slot) & 1);
    said_parity ^= 1u << slot;
    bool all = true;
#pragma unroll
    for (int word = 0; word < words; ++word) {
      // By lane 0, which alone gives the place free.
      if (warp.lane == 0) seen[word] = warp.control.blocks[slot].seen[word];
      seen[word] = __shfl_sync(0xffffffff, seen[word], 0);
      all = all && seen[word] == low_bits(keys - 32 * word);
    }
    if (all) return;
  }
#pragma unroll
  for (int word = 0; word < words; ++word) {
    const int chunks = 8 * min(32, keys - 32 * word);
#pragma unroll 1
    for (int i = threadIdx.x - 128; i < chunks; i += 128 * tile.groups) {
      if (seen[word] >> i / 8 & 1) continue;
#pragma unroll
      for (int column = 0; column < panels(tile.head_dim_v); ++column)
        ptx::fill_shared(v + column * Warp<tile>::panel + (256 * word + i) * 16, 0);
    }
  }
  ptx::fence_async_shared();
  meet();
}

}  // namespace attn::sm90
