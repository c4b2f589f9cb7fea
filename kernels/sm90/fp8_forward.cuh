// Attention forward of fp8 with wgmma and the copy engine, in the manner of forward.cuh: blocks
// take items, one warpgroup loads and transposes V, the others compute. The matrix unit adds fp8
// products to some 13 bits of the sum, so that of each tile is found in registers of its own and
// added to the others in float32. A warpgroup starts the scores of a tile and the sums of the one
// before together, finds the largest scores while the sums are computed, and adds those up between
// the exponentials.
#pragma once
#include "../ptx/grid.h"
#include "../ptx/uniform.h"
#include "../ptx/warpgroup.h"
#include "config.h"
#include "fp8_epilogue.cuh"
#include "fp8_softmax.cuh"
#include "fp8_values.cuh"
#include "load.cuh"

namespace attn::sm90 {

template <Tile tile, bool e5m2>
struct Fp8Consumer {
  using K = Ring<tile.k_stages>;
  using Vt = Ring<tile.vt_stages>;
  // Beside the flags of a tile: it is in shared memory, and V^T of the one before.
  static constexpr unsigned looked_at = 1u << 16;

  const attn_sm90_fp8_kernarg& a;
  Warp<tile> warp;
  Fp8Weights<tile> p;
  Sums<tile> o;
  Fp8Softmax<tile> softmax;

  // Leaves the rest as it is: the compiler would clear large arrays in memory and keep them there.
  __device__ __forceinline__ Fp8Consumer(const attn_sm90_fp8_kernarg& a, const Warp<tile>& warp)
      : a(a), warp(warp) {}

  // o = o * shrink + t of share n of `shares`.
  template <int shares>
  __device__ __forceinline__ void promote(const TileSums<tile>& t, int n,
                                          const float (&shrink)[2]) {
    constexpr int each = (tile.head_dim_v / 2 + shares - 1) / shares;
#pragma unroll
    for (int i = n * each; i < (n + 1) * each && i < tile.head_dim_v / 2; ++i)
      o[i] = fmaf(o[i], shrink[i / 2 % 2], t[i]);
    if (n == shares - 1) softmax.add_sums(&t[tile.head_dim_v / 2], shrink);
  }
  // Of an item whose keys have all been added.
  __device__ __forceinline__ void end_item(const Item& item) {
    float factor[2];
    softmax.finish();
    finish_softmax(a, warp, softmax.row_state, item, factor);
    store_fp8_rows(a, warp, item, o, factor);
  }
  __device__ __forceinline__ void start_item() {
    softmax.start();
#pragma unroll
    for (int i = 0; i < tile.head_dim_v / 2; ++i) o[i] = 0;
  }

  __device__ __forceinline__ void hide(Scores<tile>& s, unsigned flags, unsigned n,
                                       unsigned count) {
    if (!(flags & sees_all)) [[unlikely]] {
      const KeyTile& at = warp.key_tile(n);
      hide_out_of_range(s, warp, warp.item(count), at.first, at.keys);
      ptx::pin(s);
    }
  }

  __device__ __forceinline__ void run() {
    if (!warp.take_item(0)) return;
    Scores<tile> s;
    start_item();
    if (warp.group == tile.groups - 1) warp.pass_turn();
    ptx::mbarrier_wait(address(&warp.control.k_full[0]), 0);
    ptx::wgmma_fence();
    start_fp8_scores<e5m2, tile>(s, ptx::uniform(warp.q_at(0)), warp.k_at(0));
    // `here`: flags of tile n, which is of item `count`. `next`: those of tile n + 1.
    unsigned n = 0, count = 0, next = 0;
    unsigned here = ptx::uniform(warp.item(0).first_tile >> 4 * warp.group);
    float shrink[2];
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    __syncwarp();
    warp.release(warp.control.k_empty[0]);
    if (tile.q_stages == 1 && here & last_tile) warp.release_q(0);
    const auto weigh = [&](unsigned flags, unsigned at) {
      hide(s, flags, at, count);
      float factor = warp.item(count).score_factor;
      softmax.move_references(s, factor, shrink);
      softmax.find_weights(s, factor, p, [](int) {});
    };
    if (here & sees_some) weigh(here, 0);

    RingAt<tile.k_stages> k{K::stage(1), K::parity(1)};  // of tile n + 1
    for (;; ++n) {
      const bool ends = here & last_tile;
      if (!(next & looked_at)) {
        if (ends) {
          if (tile.q_stages > 1) warp.release_q(count);
          if (!warp.take_item(++count)) break;
        } else {
          next = ptx::uniform(warp.key_tile(n).next_tile >> 4 * warp.group);
        }
        ptx::mbarrier_wait(address(&warp.control.k_full[k.stage]), k.parity);
        if (ends) next = ptx::uniform(warp.item(count).first_tile >> 4 * warp.group);
        ptx::mbarrier_wait(address(&warp.control.vt_full[Vt::stage(n)]), Vt::parity(n));
      }
      const unsigned k_next = warp.k_of(k.stage), vt_here = warp.vt_at(n);
      const int k_stage = k.stage;
      k.advance();
      unsigned after = 0;  // flags of tile n + 2
      warp.wait_turn();
      TileSums<tile> t;
      if (here & next & sees_some && !ends) [[likely]] {
        ptx::wgmma_fence();
        start_fp8_scores<e5m2, tile>(s, ptx::uniform(warp.q_at(count)), k_next);
        start_fp8_sums<e5m2, tile>(t, p, vt_here);
        warp.pass_turn();
        // While they run: what the next turn needs.
        if (!(next & last_tile)) [[likely]] {
          after = ptx::uniform(warp.key_tile(n + 1).next_tile >> 4 * warp.group) | looked_at;
          ptx::mbarrier_wait(address(&warp.control.k_full[k.stage]), k.parity);
          ptx::mbarrier_wait(address(&warp.control.vt_full[Vt::stage(n + 1)]), Vt::parity(n + 1));
        }
        ptx::wgmma_wait<1>();
        ptx::pin(s);
        __syncwarp();  // what all lanes have read, lane 0 may give free
        warp.release(warp.control.k_empty[k_stage]);
        hide(s, next, n + 1, count);
        float factor = warp.item(count).score_factor, shrink_next[2];
        softmax.move_references(s, factor, shrink_next);
        ptx::wgmma_wait<0>();
        ptx::pin(t);
        warp.release(warp.control.vt_empty[Vt::stage(n)]);
        softmax.find_weights(s, factor, p,
                             [&](int word) { promote<Fp8Softmax<tile>::words>(t, word, shrink); });
        shrink[0] = shrink_next[0], shrink[1] = shrink_next[1];
      } else {
        if (here & sees_some) {
          ptx::wgmma_fence();
          start_fp8_sums<e5m2, tile>(t, p, vt_here);
          ptx::wgmma_wait<0>();
          ptx::pin(t);
          promote<1>(t, 0, shrink);
        }
        __syncwarp();
        warp.release(warp.control.vt_empty[Vt::stage(n)]);
        if (next & sees_some) {
          ptx::wgmma_fence();
          start_fp8_scores<e5m2, tile>(s, ptx::uniform(warp.q_at(count)), k_next);
          ptx::wgmma_wait<0>();
          ptx::pin(s);
        }
        warp.pass_turn();
        __syncwarp();
        warp.release(warp.control.k_empty[k_stage]);
        if (ends) {
          end_item(warp.item(count - 1));
          start_item();
        }
        if (next & sees_some) weigh(next, n + 1);
      }
      if (tile.q_stages == 1 && next & last_tile) warp.release_q(count);
      here = next;
      next = after;
    }
    ptx::mbarrier_wait(address(&warp.control.vt_full[Vt::stage(n)]), Vt::parity(n));
    warp.wait_turn();
    if (here & sees_some) {
      TileSums<tile> t;
      ptx::wgmma_fence();
      start_fp8_sums<e5m2, tile>(t, p, warp.vt_at(n));
      ptx::wgmma_wait<0>();
      ptx::pin(t);
      promote<1>(t, 0, shrink);
    }
    if (warp.group != tile.groups - 1) warp.pass_turn();
    end_item(warp.item(count - 1));
  }
};

template <Tile tile, bool e5m2>
__device__ __forceinline__ void fp8_forward(const attn_sm90_fp8_kernarg& a) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  Control& control = *reinterpret_cast<Control*>(shared_memory);
  const unsigned shared = address(shared_memory);
  // The same in all lanes, which the compiler sees here.
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    constexpr int warps = 4 * tile.groups;
    for (Barrier& full : control.item_full) ptx::mbarrier_init(address(&full), 1);
    ptx::mbarrier_init(address(&control.ending), 1);
    for (int i = 0; i < max_stages; ++i) {
      for (Barrier* full : {&control.k_full[i], &control.v_full[i]})
        ptx::mbarrier_init(address(full), 1);
      for (Barrier* of_transposing : {&control.v_empty[i], &control.vt_full[i]})
        ptx::mbarrier_init(address(of_transposing), transposing_warps);
      for (Barrier* empty : {&control.k_empty[i], &control.vt_empty[i]})
        ptx::mbarrier_init(address(empty), warps);
      for (Barrier& full : control.q_full[i]) ptx::mbarrier_init(address(&full), 1);
      for (Barrier& empty : control.q_empty[i])
        ptx::mbarrier_init(address(&empty), warps / tile.q_parts());
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  ptx::grid_let_next_start();
  if (threadIdx.x == 32) prefetch_first<tile>(a);
  ptx::grid_wait();  // before any access to memory
  if (warp < 4) {
    ptx::registers_shrink<tile.load_registers()>();
    if (warp >= 2) {
      if (a.cu_seqlens_q)
        store_rows_of_nobody<unsigned>(a, 2 * blockIdx.x + warp - 2, 2 * gridDim.x);
      transpose_values<tile>(control, shared, warp - 2, e5m2 ? 0x3c3c3c3c : 0x38383838);
    }
    if (warp == 0) load_items<tile, with_fp8>(a, control, shared);
    if (threadIdx.x == 32) load_keys<tile, false>(a, control, shared);
  } else {
    ptx::registers_grow<tile.compute_registers()>();
    const Warp<tile> place{control, shared, warp / 4 - 1, warp % 4, int(threadIdx.x % 32)};
    Fp8Consumer<tile, e5m2> consumer(a, place);
    consumer.run();
  }
}

}  // namespace attn::sm90

// The kernel NAME, which is the name of its file. E5M2: K and V are, not e4m3.
#define ATTN_SM90_FP8_FORWARD(NAME, TILE, E5M2)                                   \
  extern "C" __global__ void __launch_bounds__(attn::sm90::TILE.threads(), 1)     \
      NAME(const __grid_constant__ attn::sm90::Kernarg<attn::sm90::with_fp8> a) { \
    attn::sm90::fp8_forward<attn::sm90::TILE, E5M2>(a);                           \
  }
