// fp8: wgmma takes 8-bit operands only with what is summed over side by side, so the warps that
// load transpose V. A row of V^T is a column of V, in the order in which a lane's scores become its
// weights without a shuffle: byte 16 h + 4 t + e is of key 16 h + 8 (e / 2) + 2 t + e % 2. The rows
// of 16 columns c stand as c even, then c odd: then a lane has four neighbouring columns of out,
// and stmatrix meets no bank twice. Behind them are eight rows of ones, which add up the weights.
#pragma once
#include "../ptx/ldmatrix.h"
#include "../ptx/mbarrier.h"
#include "../ptx/tma.h"
#include "../ptx/uniform.h"
#include "control.cuh"

namespace attn::sm90 {

constexpr int transposing_warps = 2;

// The rows of ones of all places, by one warp. one: the code of 1 four times.
template <Tile tile>
__device__ __forceinline__ void write_ones(unsigned shared, unsigned one) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int stage = 0; stage < tile.vt_stages; ++stage)
#pragma unroll
    for (int at = 0; at < 8 * tile.keys; at += 32 * 16)
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(
                       shared + tile.vt_offset() + stage * tile.vt_bytes() +
                       tile.head_dim_v * tile.keys + at + 16 * lane),
                   "r"(one)
                   : "memory");
}

// Of keys 32 * group .. of a tile; those from `used` on become zero, for 0 * NaN is NaN. By one
// warp. v, vt: addresses of the tile and of its place.
template <Tile tile>
__device__ __forceinline__ void transpose_keys(unsigned v, unsigned vt, int group, int used) {
  static_assert(tile.keys == 128);
  const int lane = threadIdx.x % 32, r = lane % 8, m = lane / 8;
  unsigned kept[2];  // bytes, of 16 keys each
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int left = used - 32 * group - 16 * i - lane % 4 * 2;
    kept[i] = (left > 0 ? 0xffu : 0) | (left > 1 ? 0xff00u : 0) | (left > 8 ? 0xff0000u : 0) |
              (left > 9 ? 0xff000000u : 0);
  }
  const unsigned from = v + (32 * group + lane) * 128;
  const unsigned to = vt + (8 * (m & 1) + r) * 128 + (((2 * group + m / 2) ^ r) << 4);
#pragma unroll 4
  for (int c = 0; c < tile.head_dim_v / 16; ++c) {
    unsigned x[4];  // of 8 keys each: lane l has those of key l%4*2 and the next, columns l/4*2 ..
    ptx::ldmatrix_transposed(x, from + c / 8 * (tile.keys * 128) + ((c % 8 ^ r) << 4));
    const unsigned rows[4] = {
        __byte_perm(x[0], x[1], 0x6420) & kept[0], __byte_perm(x[0], x[1], 0x7531) & kept[0],
        __byte_perm(x[2], x[3], 0x6420) & kept[1], __byte_perm(x[2], x[3], 0x7531) & kept[1]};
    ptx::stmatrix(to + c * 16 * 128, rows);
  }
}

// By warps `part` of transposing_warps, tile by tile as V arrives.
template <Tile tile>
__device__ __forceinline__ void transpose_values(Control& control, unsigned shared, int part,
                                                 unsigned one) {
  const bool leads = threadIdx.x % 32 == 0;
  RingAt<tile.v_stages> v{0, 0};
  RingAt<tile.vt_stages> vt{0, 0};
  if (part == 0) write_ones<tile>(shared, one);
  for (unsigned n = 0;; ++n) {
    ptx::mbarrier_wait(address(&control.v_full[v.stage]), v.parity);
    const KeyTile& at = control.tile[n % tile_slots];
    if (int(ptx::uniform(at.segment)) == no_more_tiles) return;
    const int used = at.used;
    ptx::mbarrier_wait(address(&control.vt_empty[vt.stage]), vt.parity ^ 1);
#pragma unroll
    for (int group = 0; group < tile.keys / 32; group += transposing_warps)
      transpose_keys<tile>(shared + tile.v_offset() + v.stage * tile.v_bytes(),
                           shared + tile.vt_offset() + vt.stage * tile.vt_bytes(), group + part,
                           used);
    ptx::fence_async_shared();
    __syncwarp();
    ptx::mbarrier_arrive_if(address(&control.v_empty[v.stage]), leads);
    ptx::mbarrier_arrive_if(address(&control.vt_full[vt.stage]), leads);
    v.advance();
    vt.advance();
  }
}

}  // namespace attn::sm90
