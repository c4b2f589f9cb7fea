// The warpgroups that compute where both have the same queries and take turns at scores
// (tile.alternates): each finds the scores and weights of every second tile of keys, and sums half
// of V's columns over all tiles. With its weights a warpgroup hands over the state of the softmax,
// with which the other goes on.
#pragma once
#include "../ptx/ldmatrix.h"
#include "../ptx/tma.h"
#include "../ptx/warpgroup.h"
#include "../ptx/wgmma_wide.h"
#include "epilogue.cuh"
#include "scores.cuh"
#include "softmax.cuh"
#include "sums.cuh"

namespace attn::sm90 {

template <class T, Tile tile, unsigned with>
struct Alternating {
  static constexpr bool score = with & with_score, paged = with & with_pages;
  static constexpr bool bf16 = T::type == attn_element_bf16;
  static_assert(tile.halves && tile.groups == 2 && tile.keys == 32 && tile.q_stages == 1);
  static_assert(!(with & with_mask) && with != with_bias);

  const Kernarg<with>& a;
  Warp<tile> warp;
  Weights<tile> p;  // of the last tile whose scores the warpgroup found
  Sums<tile> o;
  Softmax<T, tile, score> softmax;  // after the tile before
  // What o must be multiplied with before p's products are added, if some of it is not 1. After
  // receive() `moved` is the same in all warps of the warpgroup: where products begin in two places
  // PTX wants all of them to take the same one.
  float shrink[2];
  bool moved = false;

  // Of tile n: weights as the matrix unit takes them, and states, which the lane's counterpart in
  // the other warpgroup reads, for it has the same rows and keys; with them, of each warp, `moved`.
  // Weights of tiles n and n + 2 are neighbours in rows of 128 bytes: of the former products may
  // run while the latter are written.
  static constexpr int weights_bytes = 64 * 128;
  __device__ __forceinline__ unsigned handed_at(unsigned n) const {
    return tile.handed_offset() + n % 2 * tile.handed_bytes();
  }
  __device__ __forceinline__ uint4* states(unsigned n) const {
    return reinterpret_cast<uint4*>(reinterpret_cast<unsigned char*>(&warp.control) + handed_at(n) +
                                    weights_bytes) +
           threadIdx.x % 128;
  }
  // Named barriers 1 and 2: the tile's weights are there. Its states' place is free again when the
  // other warpgroup has handed over the next tile, that of its weights one tile later.
  __device__ __forceinline__ void hand_over(unsigned n) const {
    const unsigned row = address(&warp.control) + handed_at(n) + (16 * warp.warp) * 128;
#pragma unroll
    for (int step = 0; step < tile.keys / 16; ++step)
      ptx::stmatrix(
          row + chunk_offset<128>(warp.lane % 16, n / 2 % 2 * 4 + 2 * step + warp.lane / 16),
          p[step]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowState& state = softmax.row_state[half];
      states(n)[128 * half] = {__float_as_uint(state.reference), __float_as_uint(state.sum),
                               __float_as_uint(state.rounding), moved};
    }
    ptx::fence_async_shared();
    ptx::barrier_arrive(1 + n % 2, 256);
  }
  __device__ __forceinline__ void receive(unsigned n) {
    ptx::barrier_wait(1 + n % 2, 256);
    const uint4* warps = states(n) - threadIdx.x % 128;
    moved = __any_sync(0xffffffff, warps[warp.lane % 4 * 32].w);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 x = states(n)[128 * half];
      RowState& state = softmax.row_state[half];
      const float before = state.reference;
      state = {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z)};
      shrink[half] = ptx::ex2(before - state.reference);
    }
  }
  // o += P V with the weights that were handed over.
  __device__ __forceinline__ void start_handed_sums(unsigned n, unsigned v_at, bool add) {
    const unsigned long long a_matrix = ptx::wgmma_descriptor(
                                 ptx::uniform((warp.shared + handed_at(n) + n / 2 % 2 * 64) / 16),
                                 0),
                             b_matrix = ptx::wgmma_descriptor(v_at, Warp<tile>::panel);
#pragma unroll
    for (int step = 0; step < tile.keys / 16; ++step)
      ptx::wgmma_wide<bf16>(o, a_matrix + (step * 32 >> 4), b_matrix + (step * 2048 >> 4),
                            step > 0 || add);
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void keep(const Weights<tile>& weights) {
#pragma unroll
    for (int i = 0; i < tile.keys / 16; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) p[i][j] = weights[i][j];
  }

  __device__ __forceinline__ void add_handed_sums(unsigned n, unsigned v_at, bool add) {
    ptx::pin(o);
    ptx::wgmma_fence();
    start_handed_sums(n, v_at, add);
    ptx::wgmma_wait<0>();
    ptx::pin(o);
  }

  // Scores of tile n become weights, which are handed over.
  __device__ __forceinline__ void weigh(Scores<tile>& s, const Item& item, unsigned n,
                                        unsigned flags) {
    if constexpr (score) change_scores(s, a, warp, item, warp.key_tile(n).first, a.scale);
    if (!(flags & sees_all)) [[unlikely]] {
      hide_out_of_range(s, a, warp, item, warp.key_tile(n).first, warp.key_tile(n).keys);
      if constexpr (paged)
        if (flags & has_unused) hide_absent(s, warp, n);
      ptx::pin(s);
    }
    float sum[4];
    moved = softmax.start_weights(a, s, shrink, sum);
    softmax.find_first_weights(s);
    softmax.finish_weights(a, s, sum, p);
    hand_over(n);
  }

  __device__ __forceinline__ void run() {
    if (!warp.take_item(0)) return;
    Scores<tile> s;
    KeptQueries<tile> q;
    keep_queries<tile>(q, warp, warp.q_at(0));
#pragma unroll
    for (float& x : o) x = 0;
    ptx::mbarrier_wait(address(&warp.control.k_full[0]), 0);
    // As in Consumer: tile n + 1 is of the item `count`, `here` are the flags of tile n and `next`
    // those of tile n + 1, if it is of the same item; `before` those of tile n - 1, as if it were
    // the last one of its item if o has nothing of that of tile n.
    unsigned n = 0, count = 0;
    unsigned here = ptx::uniform(warp.item(0).first_tile),
             next = ptx::uniform(warp.key_tile(0).next_tile);
    unsigned before = last_tile;
    unsigned q_next = ptx::uniform(warp.q_at(0)), k_next = warp.k_at(1), v_here = warp.v_of_sums(0);
    softmax.start();
    if (warp.group == 0) {
      ptx::wgmma_fence();
      start_scores<bf16, tile>(s, q, q_next, warp.k_at(0));
      ptx::wgmma_wait<0>();
      ptx::pin(s);
      weigh(s, warp.item(0), 0, here);
    }
    __syncwarp();
    warp.release(warp.control.k_empty[0]);
    if (here & last_tile) warp.release_q(0);

    RingAt<tile.k_stages> k{Ring<tile.k_stages>::stage(1), Ring<tile.k_stages>::parity(1)};
    RingAt<tile.v_stages> v{0, 0};
    float factor[2];
    unsigned said_parity = 0;
    bool ready = false;
    for (;; ++n) {
      const bool ends = here & last_tile, sees = here & sees_some;
      const bool mine = n % 2 == unsigned(warp.group);
      bool has = mine;  // p and the state after tile n
      if (!ready) {
        ptx::mbarrier_wait(address(&warp.control.v_full[v.stage]), v.parity);
        if (here & has_unused) clear_unused<tile, with>(warp, n, said_parity);
        if (ends) {
          if (!has) receive(n);
          has = true;
          finish_softmax(a, warp, softmax.row_state, warp.item(count), factor);
          softmax.start();
          if (!warp.take_item(++count)) break;
          q_next = ptx::uniform(warp.q_at(count));
          keep_queries<tile>(q, warp, warp.q_at(count));
        }
        ptx::mbarrier_wait(address(&warp.control.k_full[k.stage]), k.parity);
        if (ends) next = ptx::uniform(warp.item(count).first_tile);
      }
      const int k_stage = k.stage, v_stage = v.stage;
      const bool add = !(before & last_tile);
      unsigned after;
      const unsigned v_now = v_here;
      const auto look_ahead = [&] {
        after = ptx::uniform(warp.key_tile(n + 1).next_tile);
        k.advance();
        v.advance();
        k_next = warp.k_of(k.stage);
        v_here = warp.v_of_sums(v.stage);
      };
      const auto release_scored = [&] {
        __syncwarp();  // what all lanes have read, lane 0 may give free
        warp.release(warp.control.k_empty[k_stage]);
        if (next & last_tile) warp.release_q(count);
      };
      if (mine && sees) {
        if (moved) softmax.rescale(o, shrink);
        ptx::pin(o);
        ptx::wgmma_fence();
        start_sums<bf16, tile>(o, p, v_now, add);
        look_ahead();
        release_scored();
        ptx::wgmma_wait<0>();
        ptx::pin(o);
      } else if (mine) {
        look_ahead();
        release_scored();
      } else if (here & next & sees_some) [[likely]] {
        ptx::wgmma_fence();
        start_scores<bf16, tile>(s, q, q_next, k_next);
        look_ahead();
        if (!has) receive(n);
        if (moved) [[unlikely]] {
          ptx::wgmma_wait<0>();  // o is not to be touched while products run
          ptx::pin(s);
          softmax.rescale(o, shrink);
          add_handed_sums(n, v_now, add);
        } else {
          ptx::pin(o);
          ptx::wgmma_fence();
          start_handed_sums(n, v_now, add);
          ptx::wgmma_wait<1>();
          ptx::pin(s);
        }
        release_scored();
        weigh(s, warp.item(count), n + 1, next);
        ptx::wgmma_wait<0>();
        ptx::pin(o);
      } else {
        if (!has) receive(n);
        if (sees) {
          if (moved) softmax.rescale(o, shrink);
          add_handed_sums(n, v_now, add);
        }
        if (next & sees_some) {
          ptx::wgmma_fence();
          start_scores<bf16, tile>(s, q, q_next, k_next);
          ptx::wgmma_wait<0>();
          ptx::pin(s);
        }
        look_ahead();
        release_scored();
        moved = false;
        if (next & sees_some)
          weigh(s, warp.item(count), n + 1, next);
        else
          hand_over(n + 1);
      }
      if (ends) [[unlikely]]
        store(a, warp, warp.item(count - 1), o, factor);
      warp.release(warp.control.v_empty[v_stage]);
      ready = ptx::mbarrier_test(address(&warp.control.v_full[v.stage]), v.parity) &
              ptx::mbarrier_test(address(&warp.control.k_full[k.stage]), k.parity) &
              !(next & (last_tile | has_unused));
      before = add || sees ? here : here | last_tile;
      here = next;
      next = after;
    }
    if (here & sees_some) {
      if (moved) softmax.rescale(o, shrink);
      if (n % 2 == unsigned(warp.group))
        add_sums<bf16, tile>(o, p, v_here, !(before & last_tile));
      else
        add_handed_sums(n, v_here, !(before & last_tile));
    }
    store(a, warp, warp.item(count - 1), o, factor);
  }
};

}  // namespace attn::sm90
