// fp8: wgmma takes 8-bit operands only with what is summed over side by side, so the warps that
// load transpose V. A row of V^T is a column of V, in the order in which a lane's scores become its
// weights without a shuffle: byte 16 h + 4 t + e is of key 16 h + 8 (e / 2) + 2 t + e % 2. The rows
// of 16 columns c stand as c even, then c odd: then a lane has four neighbouring columns of out,
// and stmatrix meets no bank twice. Behind them are eight rows of ones, which add up the weights.
#pragma once
#include "../ptx/ldmatrix.h"
#include "../ptx/load_shared.h"
#include "../ptx/mbarrier.h"
#include "../ptx/tma.h"
#include "../ptx/uniform.h"
#include "scores_blocks.cuh"

namespace attn::sm90 {

constexpr int transposing_warps = 2;

// The rows of ones of all places, by one warp. one: the code of 1 four times.
template <Tile tile>
__device__ __forceinline__ void write_ones(unsigned shared, unsigned one) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int panel = 0; panel < tile.vt_stages * panels(tile.keys, 1); ++panel)
#pragma unroll
    for (int at = 0; at < 8 * 128; at += 32 * 16)
      ptx::fill_shared(shared + tile.vt_offset() + panel * tile.vt_panel() + tile.head_dim_v * 128 +
                           at + 16 * lane,
                       one);
}

// Columns of 16 that one warp transposes, of all keys.
template <Tile tile>
constexpr int columns_of_warp = tile.head_dim_v / 16 / transposing_warps;

// Where warp `part` begins in a row of V.
template <Tile tile>
__device__ __forceinline__ unsigned panel_of(unsigned v, int part) {
  return v + part * columns_of_warp<tile> / 8 * (tile.keys * 128);
}

// Zeroes the keys of a tile that no query sees, because 0 * NaN is NaN: the columns of warp `part`.
template <Tile tile>
__device__ __forceinline__ void clear_keys(unsigned v, int part,
                                           const unsigned (&seen)[key_words<tile>]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int word = 0; word < key_words<tile>; ++word) {
    const int key = 32 * word + lane;
    if (seen[word] >> lane & 1) continue;
#pragma unroll
    for (int i = 0; i < columns_of_warp<tile>; ++i) {
      const int c = part * columns_of_warp<tile> + i;
      ptx::fill_shared(panel_of<tile>(v, part) + key * 128 + ((c % 8 ^ key % 8) << 4), 0);
    }
  }
  __syncwarp();
}

// The columns of warp `part`. v, vt: addresses of the tile and of its place.
template <Tile tile>
__device__ __forceinline__ void transpose_tile(unsigned v, unsigned vt, int part) {
  static_assert(columns_of_warp<tile> <= 8);                 // which are of one panel
  constexpr int groups = tile.keys / 32;                     // of 32 keys
  constexpr int at_once = groups > 4 ? groups / 2 : groups;  // loads under way
  const int lane = threadIdx.x % 32, r = lane % 8, m = lane / 8;
  const int first = part * columns_of_warp<tile>;
  const unsigned from = panel_of<tile>(v, part) + lane * 128 + (r << 4);
  const unsigned to = vt + (16 * first + 8 * (m & 1) + r) * 128 + ((m / 2 ^ r) << 4);
#pragma unroll 1
  for (int c = 0; c < columns_of_warp<tile>; ++c) {
#pragma unroll
    for (int begin = 0; begin < groups; begin += at_once) {
      // Of 8 keys each: lane l has those of key l%4*2 and the next, columns l/4*2 ..
      unsigned x[at_once][4];
#pragma unroll
      for (int i = 0; i < at_once; ++i)
        ptx::ldmatrix_transposed(x[i], (from ^ (first % 8 + c) << 4) + (begin + i) * (32 * 128));
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        const unsigned(&y)[4] = x[i];
        const unsigned rows[4] = {__byte_perm(y[0], y[1], 0x6420), __byte_perm(y[0], y[1], 0x7531),
                                  __byte_perm(y[2], y[3], 0x6420), __byte_perm(y[2], y[3], 0x7531)};
        const int group = begin + i;
        ptx::stmatrix((to ^ group % 4 << 5) + group / 4 * tile.vt_panel() + c * (16 * 128), rows);
      }
    }
  }
}

// By warps `part` of transposing_warps, tile by tile as V arrives. before(): called before each.
template <Tile tile, unsigned with, class Before>
__device__ __forceinline__ void transpose_values(Control& control, unsigned shared, int part,
                                                 unsigned one, Before before) {
  const bool leads = threadIdx.x % 32 == 0;
  RingAt<tile.v_stages> v{0, 0};
  RingAt<tile.vt_stages> vt{0, 0};
  unsigned said_parity = 0;  // of the next phase of each control.said
  if (part == 0) write_ones<tile>(shared, one);
#pragma unroll 1
  for (unsigned n = 0;; ++n) {
    before();
    ptx::mbarrier_wait(address(&control.v_full[v.stage]), v.parity);
    const KeyTile& at = control.tile[n % tile_slots];
    if (int(ptx::uniform(at.segment)) == no_more_tiles) return;
    const int used = at.used;
    const int unused = with & with_score ? control.scales[n % tile_slots].unused : 0;
    ptx::mbarrier_wait(address(&control.vt_empty[vt.stage]), vt.parity ^ 1);
    const unsigned v_at = shared + tile.v_offset() + v.stage * tile.v_bytes();
    if (used < tile.keys || unused > 0) [[unlikely]] {
      unsigned seen[key_words<tile>];
      const unsigned slot = n % tile_slots;
      if ((with & with_mask) && used == to_be_said) {
        ptx::mbarrier_wait(address(&control.said[slot]), said_parity >> slot & 1);
        said_parity ^= 1u << slot;
      }
#pragma unroll
      for (int word = 0; word < key_words<tile>; ++word)
        seen[word] = (with & with_mask) && used == to_be_said
                         ? control.blocks[slot].seen[word]
                         : low_bits(used - 32 * word) & ~low_bits(unused - 32 * word);
      clear_keys<tile>(v_at, part, seen);
    }
    transpose_tile<tile>(v_at, shared + tile.vt_offset() + vt.stage * tile.vt_bytes(), part);
    ptx::fence_async_shared();
    __syncwarp();
    ptx::mbarrier_arrive_if(address(&control.v_empty[v.stage]), leads);
    ptx::mbarrier_arrive_if(address(&control.vt_full[vt.stage]), leads);
    v.advance();
    vt.advance();
  }
}

}  // namespace attn::sm90
