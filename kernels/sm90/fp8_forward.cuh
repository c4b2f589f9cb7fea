// Attention forward of fp8 with wgmma and the copy engine, in the manner of forward.cuh: blocks
// take items, one warpgroup loads and transposes V, the others compute. The matrix unit adds fp8
// products to some 13 bits of the sum, so that of each tile is found in registers of its own and
// added to the others in float32. A warpgroup does one tile after the other, or else starts the
// scores of a tile and the sums of the one before together, finds the largest scores while the sums
// are computed, and adds those up between the exponentials.
#pragma once
#include "../ptx/grid.h"
#include "../ptx/uniform.h"
#include "../ptx/warpgroup.h"
#include "config.h"
#include "fp8_epilogue.cuh"
#include "fp8_softmax.cuh"
#include "fp8_tiles.h"
#include "fp8_values.cuh"
#include "load.cuh"
#include "load_live.cuh"

namespace attn::sm90 {

template <Tile tile, unsigned with, bool e5m2>
struct Fp8Consumer {
  static constexpr bool score = with & with_score, masked = with & with_mask;
  static constexpr int pieces = pieces_of_sums<tile>;
  // The last tile of all is added up where all others are, which takes fewer registers with pieces
  // and more without.
  static constexpr bool ends_inside = pieces > 1;
  using FirstSums = TileSums<tile, 0>;
  using LastSums = TileSums<tile, pieces - 1>;
  using K = Ring<tile.k_stages>;
  using Vt = Ring<tile.vt_stages>;
  // Beside the flags of a tile: it is in shared memory, and V^T of the one before.
  static constexpr unsigned looked_at = 1u << 16;

  const Kernarg<with>& a;
  Warp<tile> warp;
  Fp8Weights<tile> p;
  Sums<tile> o;
  Fp8Softmax<tile> softmax;
  float unit;  // with_score: the largest scale of V so far, which o is to be multiplied with

  // Leaves the rest as it is: the compiler would clear large arrays in memory and keep them there.
  __device__ __forceinline__ Fp8Consumer(const Kernarg<with>& a, const Warp<tile>& warp)
      : a(a), warp(warp) {}

  // o = o * shrink + t of share n of `shares` of a piece.
  template <int shares, int piece>
  __device__ __forceinline__ void promote(const TileSums<tile, piece>& t, int n,
                                          const float (&shrink)[2]) {
    constexpr int columns = tile.piece_columns() / 2, each = (columns + shares - 1) / shares;
#pragma unroll
    for (int i = n * each; i < (n + 1) * each && i < columns; ++i)
      o[piece * columns + i] = fmaf(o[piece * columns + i], shrink[i / 2 % 2], t[i]);
    if (piece == pieces - 1 && n == shares - 1) softmax.add_sums(&t[columns], shrink);
  }
  template <int piece>
  __device__ __forceinline__ static auto& sums_of(FirstSums& t, LastSums& last) {
    if constexpr (piece == pieces - 1)
      return last;
    else
      return t;
  }
  // Takes the scale of V of tile n into the unit. What remains for the tile's sums.
  __device__ __forceinline__ float move_unit(unsigned n) {
    if constexpr (!score) return 1;
    const float v_scale = warp.scales(n).v;
    if (v_scale == unit) [[likely]]
      return 1;
    if (!(fabsf(v_scale) > fabsf(unit))) return v_scale / unit;
    const float by = unit / v_scale;
#pragma unroll
    for (float& x : o) x *= by;
    unit = v_scale;
    return 1;
  }
  template <int piece>
  __device__ __forceinline__ static void scale(TileSums<tile, piece>& t, float by) {
    if constexpr (score)
      if (by != 1) [[unlikely]] {
#pragma unroll
        for (int i = 0; i < tile.piece_columns() / 2; ++i) t[i] *= by;
      }
  }
  template <int piece>
  __device__ __forceinline__ void add(TileSums<tile, piece>& t, float by,
                                      const float (&shrink)[2]) {
    scale<piece>(t, by);
    promote<1, piece>(t, 0, shrink);
  }

  // The sums of tile n from this piece on, where nothing runs meanwhile. t, last: for the pieces.
  template <int piece = 0>
  __device__ __forceinline__ void add_pieces(FirstSums& t, LastSums& last, unsigned vt_at, float by,
                                             const float (&shrink)[2]) {
    auto& sums = sums_of<piece>(t, last);
    ptx::forget(sums);
    ptx::wgmma_fence();
    start_fp8_sums<e5m2, tile, piece>(sums, p, vt_at);
    ptx::wgmma_wait<0>();
    ptx::pin(sums);
    add<piece>(sums, by, shrink);
    if constexpr (piece + 1 < pieces) add_pieces<piece + 1>(t, last, vt_at, by, shrink);
  }

  // Of an item whose keys have all been added.
  __device__ __forceinline__ void end_item(const Item& item) {
    float factor[2];
    softmax.finish();
    finish_softmax(a, warp, softmax.row_state, item, factor);
    for (float& x : factor) x *= score ? item.out_scale * unit : item.out_scale;
    store_fp8_rows(a, warp, item, o, factor);
  }
  __device__ __forceinline__ void start_item() {
    softmax.start();
    unit = 0;
#pragma unroll
    for (int i = 0; i < tile.head_dim_v / 2; ++i) o[i] = 0;
  }

  // Says that the warp's queries see nothing of tile n.
  __device__ __forceinline__ void say_nothing_seen(unsigned n, unsigned flags) {
    if (masked && flags & has_unused) warp.release(warp.control.said[n % tile_slots]);
  }
  // Takes the scores of tile n, which is the item's, into the references. What they are to be
  // multiplied with.
  __device__ __forceinline__ float take_scores(Scores<tile>& s, unsigned count, unsigned n,
                                               unsigned flags, float (&shrink)[2]) {
    float factor = 1;
    if constexpr (score) {
      const float scale = warp.scales(n).score;
      if (a.softcap > 0 || a.alibi_slopes)
        change_scores(s, a, warp, warp.item(count), warp.key_tile(n).first, scale);
      else
        factor = scale * log2_e;
    }
    if (!(flags & sees_all)) [[unlikely]] {
      if constexpr (masked) {
        Visible<tile> visible;
        find_visible(a.block_mask, warp, warp.item(count), n, flags, visible);
        hide_others(s, warp, visible);
      } else {
        hide_out_of_range(s, warp, warp.item(count), warp.key_tile(n).first, warp.key_tile(n).keys);
      }
      ptx::pin(s);
    }
    if constexpr (!score) factor = warp.item(count).score_scale * log2_e;
    softmax.move_references(s, factor, shrink);
    return factor;
  }
  // The weights of tile n where nothing runs meanwhile.
  __device__ __forceinline__ void weigh(Scores<tile>& s, unsigned count, unsigned n, unsigned flags,
                                        float (&shrink)[2]) {
    float factor = take_scores(s, count, n, flags, shrink);
    softmax.find_weights(s, factor, p, [](int) {});
  }

  // Sums of a tile in pieces, two of which are under way.
  struct Pieces {
    float even[tile.piece_columns() / 2], odd[tile.piece_columns() / 2];
    LastSums last;
  };
  template <int piece>
  __device__ __forceinline__ static auto& piece_of(Pieces& t) {
    if constexpr (piece == pieces - 1)
      return t.last;
    else if constexpr (piece % 2)
      return t.odd;
    else
      return t.even;
  }
  template <int piece>
  __device__ __forceinline__ void start_piece(Pieces& t, unsigned vt_at) {
    auto& sums = piece_of<piece>(t);
    ptx::forget(sums);
    ptx::wgmma_fence();
    start_fp8_sums<e5m2, tile, piece>(sums, p, vt_at);
  }
  // This piece, which is under way, and those behind it.
  template <int piece = 0>
  __device__ __forceinline__ void add_others(Pieces& t, unsigned vt_at, float by,
                                             const float (&shrink)[2]) {
    constexpr bool last = piece + 1 == pieces;
    if constexpr (!last) start_piece<piece + 1>(t, vt_at);
    ptx::wgmma_wait<last ? 0 : 1>();
    ptx::pin(piece_of<piece>(t));
    add<piece>(piece_of<piece>(t), by, shrink);
    if constexpr (!last) add_others<piece + 1>(t, vt_at, by, shrink);
  }

  // One tile after the other: while a warpgroup finds weights, the products of others run.
  __device__ __forceinline__ void run_in_order() {
    if (!warp.take_item(0)) return;
    start_item();
    if (warp.group == tile.groups - 1) warp.pass_turn();
    RingAt<tile.k_stages> k{0, 0};  // of tile n
    ptx::mbarrier_wait(address(&warp.control.k_full[0]), 0);
    // `here`: flags of tile n, which is of item `count`. `next`: those of tile n + 1.
    unsigned count = 0, here = ptx::uniform(warp.item(0).first_tile >> 4 * warp.group);
    warp.wait_turn();
    for (unsigned n = 0;; ++n) {
      float shrink[2];
      const bool ends = here & last_tile;
      if (here & sees_some) {
        Scores<tile> s;
        ptx::forget(s);
        ptx::wgmma_fence();
        const unsigned q_at = ptx::uniform(warp.q_at(count)), k_at = warp.k_of(k.stage);
        start_fp8_scores<e5m2, tile, 0, tile.score_columns()>(s, q_at, k_at);
        warp.pass_turn();
        add_fp8_scores<e5m2, tile>(s, q_at, k_at);
        __syncwarp();
        warp.release(warp.control.k_empty[k.stage]);
        weigh(s, count, n, here, shrink);
      } else {
        warp.pass_turn();
        __syncwarp();
        warp.release(warp.control.k_empty[k.stage]);
        say_nothing_seen(n, here);
      }
      if (ends) warp.release_q(count);
      k.advance();
      bool more = true;  // tiles
      unsigned next = 0;
      if (ends) {
        more = warp.take_item(count + 1);
      } else {
        next = ptx::uniform(warp.key_tile(n).next_tile >> 4 * warp.group);
      }
      if (more) ptx::mbarrier_wait(address(&warp.control.k_full[k.stage]), k.parity);
      if (ends && more) next = ptx::uniform(warp.item(count + 1).first_tile >> 4 * warp.group);
      ptx::mbarrier_wait(address(&warp.control.vt_full[Vt::stage(n)]), Vt::parity(n));
      warp.wait_turn();
      if (here & sees_some) {
        Pieces t;
        const unsigned vt_here = warp.vt_at(n);
        start_piece<0>(t, vt_here);
        add_others(t, vt_here, move_unit(n), shrink);
      }
      __syncwarp();
      warp.release(warp.control.vt_empty[Vt::stage(n)]);
      if (ends) {
        if (!more && warp.group != tile.groups - 1) warp.pass_turn();
        end_item(warp.item(count++));
        if (!more) return;
        start_item();
      }
      here = next;
    }
  }

  __device__ __forceinline__ void run() {
    if constexpr (tile.in_order) return run_in_order();
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
    if (here & sees_some)
      weigh(s, 0, 0, here, shrink);
    else
      say_nothing_seen(0, here);

    RingAt<tile.k_stages> k{K::stage(1), K::parity(1)};  // of tile n + 1
    for (;; ++n) {
      const bool ends = here & last_tile;
      bool more = true;  // tiles
      if (!(next & looked_at)) {
        if (ends) {
          if (tile.q_stages > 1) warp.release_q(count);
          more = warp.take_item(++count);
          if (!more && !ends_inside) break;
          next = 0;
        } else {
          next = ptx::uniform(warp.key_tile(n).next_tile >> 4 * warp.group);
        }
        if (more) ptx::mbarrier_wait(address(&warp.control.k_full[k.stage]), k.parity);
        if (ends && more) next = ptx::uniform(warp.item(count).first_tile >> 4 * warp.group);
        ptx::mbarrier_wait(address(&warp.control.vt_full[Vt::stage(n)]), Vt::parity(n));
      }
      const unsigned k_next = warp.k_of(k.stage), vt_here = warp.vt_at(n);
      const int k_stage = k.stage;
      k.advance();
      unsigned after = 0;  // flags of tile n + 2
      const auto look_ahead = [&] {
        // What is to be transposed when its keys are hidden cannot be waited for.
        if (!(next & (masked ? last_tile | has_unused : last_tile))) [[likely]] {
          after = ptx::uniform(warp.key_tile(n + 1).next_tile >> 4 * warp.group) | looked_at;
          ptx::mbarrier_wait(address(&warp.control.k_full[k.stage]), k.parity);
          ptx::mbarrier_wait(address(&warp.control.vt_full[Vt::stage(n + 1)]), Vt::parity(n + 1));
        }
      };
      warp.wait_turn();
      if (here & next & sees_some && !ends) [[likely]] {
        float factor, shrink_next[2];
        const auto take = [&] {
          ptx::pin(s);
          __syncwarp();  // what all lanes have read, lane 0 may give free
          warp.release(warp.control.k_empty[k_stage]);
          factor = take_scores(s, count, n + 1, next, shrink_next);
        };
        if constexpr (pieces == 1) {
          TileSums<tile, 0> t;
          ptx::wgmma_fence();
          start_fp8_scores<e5m2, tile>(s, ptx::uniform(warp.q_at(count)), k_next);
          start_fp8_sums<e5m2, tile>(t, p, vt_here);
          warp.pass_turn();
          look_ahead();  // while they run: what the next turn needs
          ptx::wgmma_wait<1>();
          take();
          ptx::wgmma_wait<0>();
          ptx::pin(t);
          warp.release(warp.control.vt_empty[Vt::stage(n)]);
          scale<0>(t, move_unit(n));
          softmax.find_weights(s, factor, p, [&](int word) {
            promote<Fp8Softmax<tile>::words, 0>(t, word, shrink);
          });
        } else {
          FirstSums t;
          LastSums last;
          ptx::forget(t);
          ptx::wgmma_fence();
          start_fp8_sums<e5m2, tile, 0>(t, p, vt_here);
          start_fp8_scores<e5m2, tile>(s, ptx::uniform(warp.q_at(count)), k_next);
          warp.pass_turn();
          look_ahead();
          const float by = move_unit(n);
          ptx::wgmma_wait<1>();
          ptx::pin(t);
          add<0>(t, by, shrink);
          const auto add_others = [&]<int piece>(const auto& again) {
            constexpr int words = Fp8Softmax<tile>::words, shares = pieces > 2 ? pieces - 2 : 1;
            auto& sums = sums_of<piece>(t, last);
            ptx::forget(sums);
            ptx::wgmma_fence();
            start_fp8_sums<e5m2, tile, piece>(sums, p, vt_here);
            if constexpr (piece == 1) {
              ptx::wgmma_wait<1>();
              take();
            } else {
              softmax.template find_some_weights<(piece - 2) * words / shares,
                                                 (piece - 1) * words / shares>(s, factor);
            }
            ptx::wgmma_wait<0>();
            ptx::pin(sums);
            if constexpr (piece == pieces - 1) warp.release(warp.control.vt_empty[Vt::stage(n)]);
            add<piece>(sums, by, shrink);
            if constexpr (piece + 1 < pieces) again.template operator()<piece + 1>(again);
          };
          add_others.template operator()<1>(add_others);
          if constexpr (pieces > 2)
            softmax.pack(s, p);
          else
            softmax.find_weights(s, factor, p, [](int) {});
        }
        shrink[0] = shrink_next[0], shrink[1] = shrink_next[1];
      } else {
        if (here & sees_some) {
          FirstSums t;
          LastSums last;
          add_pieces(t, last, vt_here, move_unit(n), shrink);
        }
        __syncwarp();
        warp.release(warp.control.vt_empty[Vt::stage(n)]);
        if (next & sees_some) {
          ptx::wgmma_fence();
          start_fp8_scores<e5m2, tile>(s, ptx::uniform(warp.q_at(count)), k_next);
          ptx::wgmma_wait<0>();
          ptx::pin(s);
        }
        if (more || warp.group != tile.groups - 1) warp.pass_turn();
        __syncwarp();
        if (more) warp.release(warp.control.k_empty[k_stage]);
        if (ends) {
          end_item(warp.item(count - 1));
          if (!more) return;
          start_item();
        }
        if (next & sees_some)
          weigh(s, count, n + 1, next, shrink);
        else
          say_nothing_seen(n + 1, next);
      }
      if (tile.q_stages == 1 && next & last_tile) warp.release_q(count);
      here = next;
      next = after;
    }
    if constexpr (ends_inside) return;
    ptx::mbarrier_wait(address(&warp.control.vt_full[Vt::stage(n)]), Vt::parity(n));
    warp.wait_turn();
    if (here & sees_some) {
      FirstSums t;
      LastSums last;
      add_pieces(t, last, warp.vt_at(n), move_unit(n), shrink);
    }
    if (warp.group != tile.groups - 1) warp.pass_turn();
    end_item(warp.item(count - 1));
  }
};

template <Tile tile, unsigned with, bool e5m2>
__device__ __forceinline__ void fp8_forward(const Kernarg<with>& a) {
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
    if constexpr (with & with_mask) {
      ptx::mbarrier_init(address(&control.listed), 1);
      for (Barrier& said : control.said) ptx::mbarrier_init(address(&said), warps);
      for (Barrier& described : control.described) ptx::mbarrier_init(address(&described), 1);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  ptx::grid_let_next_start();
  if (!(with & with_mask) && threadIdx.x == 32) prefetch_first<tile>(a);
  ptx::grid_wait();  // before any access to memory
  if (warp < 4) {
    ptx::registers_shrink<tile.load_registers()>();
    constexpr unsigned one = e5m2 ? 0x3c3c3c3c : 0x38383838;
    if constexpr (with & with_mask) {
      if (warp == 0) {
        load_items<tile, with>(a, control, shared);
      } else if (warp == 1) {
        load_live_keys<tile>(a, control, shared);
      } else if (warp == 2) {
        if (sorts_items(a)) {
          list_items<tile>(a);
          if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(address(&control.listed));
        }
        transpose_values<tile, with>(control, shared, 0, one, [] {});
      } else {
        LiveValues<tile> values{a, control, shared};
        bool more = values.load();
        transpose_values<tile, with>(control, shared, 1, one, [&] {
          if (more) more = values.load();
        });
      }
    } else {
      if (warp >= 2) {
        if (a.cu_seqlens_q)
          store_rows_of_nobody<unsigned>(a, 2 * blockIdx.x + warp - 2, 2 * gridDim.x);
        transpose_values<tile, with>(control, shared, warp - 2, one, [] {});
      }
      if (warp == 0) load_items<tile, with>(a, control, shared);
      if (threadIdx.x == 32) load_keys<tile, with>(a, control, shared);
    }
  } else {
    ptx::registers_grow<tile.compute_registers()>();
    const Warp<tile> place{control, shared, warp / 4 - 1, warp % 4, int(threadIdx.x % 32)};
    Fp8Consumer<tile, with, e5m2> consumer(a, place);
    consumer.run();
  }
}

}  // namespace attn::sm90

// The kernel NAME, which is the name of its file. WITH: one of config.h; E5M2: K and V are, not
// e4m3.
#define ATTN_SM90_FP8_FORWARD(NAME, TILE, WITH, E5M2)                         \
  extern "C" __global__ void __launch_bounds__(attn::sm90::TILE.threads(), 1) \
      NAME(const __grid_constant__ attn::sm90::Kernarg<attn::sm90::WITH> a) { \
    attn::sm90::fp8_forward<attn::sm90::TILE, attn::sm90::WITH, E5M2>(a);     \
  }
