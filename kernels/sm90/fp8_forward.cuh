// Attention forward of fp8 with wgmma and the copy engine, in the manner of forward.cuh: blocks
// take items, one warpgroup loads and transposes V, the others compute. The matrix unit adds fp8
// products to some 13 bits of the sum, so that of each tile is found in registers of its own and
// added to the others in float32. Those registers are the scores' too, so a warpgroup's products
// follow each other: the sums of a tile, the scores of the next; the warpgroups take turns, and one
// finds weights while the other's products run.
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
  static constexpr int pieces = tile.head_dim_v / tile.v_piece;
  using K = Ring<tile.k_stages>;

  const attn_sm90_fp8_kernarg& a;
  Warp<tile> warp;
  Fp8Weights<tile> p;
  Sums<tile> o;
  Fp8Softmax<tile> softmax;

  // Leaves the rest as it is: the compiler would clear large arrays in memory and keep them there.
  __device__ __forceinline__ Fp8Consumer(const attn_sm90_fp8_kernarg& a, const Warp<tile>& warp)
      : a(a), warp(warp) {}

  // o = o * shrink + t of piece n.
  template <int registers>
  __device__ __forceinline__ void promote(const float (&t)[registers], int piece,
                                          const float (&shrink)[2]) {
#pragma unroll
    for (int i = 0; i < tile.v_piece / 2; ++i) {
      float& x = o[piece * tile.v_piece / 2 + i];
      x = fmaf(x, shrink[i / 2 % 2], t[i]);
    }
  }
  // The sums of a tile from a piece on, but for those of the last one and of the weights, which are
  // left in t.
  template <int piece = 0>
  __device__ __forceinline__ void find_sums(float (&t)[tile.v_piece / 2 + 4], unsigned vt_at,
                                            const float (&shrink)[2]) {
    ptx::wgmma_fence();
    if constexpr (piece < pieces - 1) {
      float part[tile.v_piece / 2];
      start_piece<e5m2, tile>(part, p, vt_at, piece * tile.v_piece);
      ptx::wgmma_wait<0>();
      ptx::pin(part);
      promote(part, piece, shrink);
      find_sums<piece + 1>(t, vt_at, shrink);
    } else {
      start_piece<e5m2, tile>(t, p, vt_at, piece * tile.v_piece);
      ptx::wgmma_wait<0>();
      ptx::pin(t);
    }
  }
  __device__ __forceinline__ void add_last(const float (&t)[tile.v_piece / 2 + 4],
                                           const float (&shrink)[2]) {
    promote(t, pieces - 1, shrink);
    softmax.add_sums(&t[tile.v_piece / 2], shrink);
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

  __device__ __forceinline__ void run() {
    if (!warp.take_item(0)) return;
    Scores<tile> s;
    start_item();
    if (warp.group == tile.groups - 1) warp.pass_turn();
    ptx::mbarrier_wait(address(&warp.control.k_full[0]), 0);
    ptx::wgmma_fence();
    start_fp8_scores<e5m2, tile>(s, ptx::uniform(warp.q_at(0)), warp.k_at(0));
    // `here`: flags of tile n, which is of item `count`. `next`: those of tile n + 1.
    unsigned n = 0, count = 0;
    unsigned here = ptx::uniform(warp.item(0).first_tile >> 4 * warp.group);
    unsigned q_next = ptx::uniform(warp.q_at(0));
    float score_factor = warp.item(0).score_factor, shrink[2];
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    __syncwarp();
    warp.release(warp.control.k_empty[0]);
    if (tile.q_stages == 1 && here & last_tile) warp.release_q(0);

    RingAt<tile.k_stages> k{K::stage(1), K::parity(1)};  // of tile n + 1
    RingAt<tile.vt_stages> vt{0, 0};                     // of tile n
    for (;; ++n) {
      if (here & sees_some) {
        if (!(here & sees_all)) [[unlikely]] {
          const KeyTile& at = warp.key_tile(n);
          hide_out_of_range(s, warp, warp.item(count), at.first, at.keys);
          ptx::pin(s);
        }
        softmax.find_weights(s, score_factor, shrink, p);
      }
      const bool ends = here & last_tile;
      unsigned next = ends ? 0 : ptx::uniform(warp.key_tile(n).next_tile >> 4 * warp.group);
      if (ends) {
        if (tile.q_stages > 1) warp.release_q(count);
        if (!warp.take_item(++count)) break;
        q_next = ptx::uniform(warp.q_at(count));
        score_factor = warp.item(count).score_factor;
      }
      ptx::mbarrier_wait(address(&warp.control.k_full[k.stage]), k.parity);
      if (ends) next = ptx::uniform(warp.item(count).first_tile >> 4 * warp.group);
      const unsigned k_next = warp.k_of(k.stage), vt_here = warp.vt_of(vt.stage);
      ptx::mbarrier_wait(address(&warp.control.vt_full[vt.stage]), vt.parity);
      warp.wait_turn();
      float t[tile.v_piece / 2 + 4];
      if (here & next & sees_some) [[likely]] {
        find_sums(t, vt_here, shrink);
        // In registers there is room for one piece's sums beside the scores, not beside more of o.
        if (pieces > 1) add_last(t, shrink);
        ptx::wgmma_fence();
        start_fp8_scores<e5m2, tile>(s, q_next, k_next);
        if (ends) [[unlikely]] {  // on both sides, for what follows a branch stays there
          warp.pass_turn();
          warp.release(warp.control.vt_empty[vt.stage]);
          if (pieces == 1) add_last(t, shrink);
          end_item(warp.item(count - 1));
          start_item();
        } else {
          warp.pass_turn();
          warp.release(warp.control.vt_empty[vt.stage]);
          if (pieces == 1) add_last(t, shrink);
        }
        ptx::wgmma_wait<0>();
        ptx::pin(s);
      } else {
        if (here & sees_some) {
          find_sums(t, vt_here, shrink);
          add_last(t, shrink);
        }
        warp.release(warp.control.vt_empty[vt.stage]);
        if (next & sees_some) {
          ptx::wgmma_fence();
          start_fp8_scores<e5m2, tile>(s, q_next, k_next);
          ptx::wgmma_wait<0>();
          ptx::pin(s);
        }
        warp.pass_turn();
        if (ends) {
          end_item(warp.item(count - 1));
          start_item();
        }
      }
      __syncwarp();  // what all lanes have read, lane 0 may give free
      warp.release(warp.control.k_empty[k.stage]);
      if (tile.q_stages == 1 && next & last_tile) warp.release_q(count);
      k.advance();
      vt.advance();
      here = next;
    }
    ptx::mbarrier_wait(address(&warp.control.vt_full[vt.stage]), vt.parity);
    warp.wait_turn();
    if (here & sees_some) {
      float t[tile.v_piece / 2 + 4];
      find_sums(t, warp.vt_of(vt.stage), shrink);
      add_last(t, shrink);
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
