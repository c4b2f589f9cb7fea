// Attention forward in fp8 with wgmma and TMA, like forward.cuh: blocks take items, one warpgroup
// loads and transposes V, the others compute. The matrix unit keeps only some 13 bits of a sum of
// fp8 products, so the sum of each tile is computed in separate registers and added to o in
// float32. A consumer warpgroup does one tile after the other: scores, weights, sums. While it
// computes weights, the products of the others run. What the next tile needs is computed while this
// one's products run.
#pragma once
#include "../ptx/grid.h"
#include "../ptx/uniform.h"
#include "../ptx/warpgroup.h"
#include "config.h"
#include "fp8_epilogue.cuh"
#include "fp8_softmax.cuh"
#include "fp8_tiles.h"
#include "fp8_values.cuh"
#include "fp8_variants.h"
#include "load.cuh"
#include "load_live.cuh"

namespace attn::sm90 {

template <Tile tile, unsigned with, bool e5m2>
struct Fp8Consumer {
  static constexpr bool score = with & with_score, masked = with & with_mask;
  static constexpr int pieces = pieces_of_sums<tile>;
  // Whether there are no registers to compute a piece of sums while another is added.
  static constexpr bool one_by_one = score || (masked && tile.groups == 3);
  using Factors = typename Fp8Softmax<tile, score>::Factors;
  // Two pieces of the sums of a tile that are under way or being added, see TileSums.
  using Pieces = float[2][tile.piece_columns() / 2 + 4];
  template <int piece>
  __device__ __forceinline__ static TileSums<tile, piece>& piece_of(Pieces& t) {
    return *reinterpret_cast<TileSums<tile, piece>*>(&t[one_by_one ? 0 : piece % 2]);
  }

  const Kernarg<with>& a;
  Warp<tile> warp;
  Fp8Weights<tile> p;
  Sums<tile> o;
  Fp8Softmax<tile, score> softmax;
  float unit;  // with_score: the factor of o, see move_unit

  // Leaves the rest as it is: the compiler would clear large arrays in memory and keep them there.
  __device__ __forceinline__ Fp8Consumer(const Kernarg<with>& a, const Warp<tile>& warp)
      : a(a), warp(warp) {}

  static constexpr float near = 9.094947e-13f;  // 2^-40
  // with_score: takes a scale of V into the unit, which is the largest one so far while neighbours
  // are within 2^40 of each other, else 1: a row that does not see the keys of one scale would lose
  // its digits in another's unit. Returns the factor of sums of these keys.
  __device__ __forceinline__ float move_unit(float v_scale) {
    if (v_scale == unit) [[likely]]
      return 1;
    const float ratio = v_scale / unit;  // inf or NaN where there is no unit yet
    if (fabsf(ratio) <= 1 && fabsf(ratio) >= near) return ratio;
    const bool takes = fabsf(unit) >= near * fabsf(v_scale) && fabsf(ratio) > 1;
    const float next = takes || (unit == 0 && v_scale - v_scale == 0) ? v_scale : 1;
    const float by = unit / next;
#pragma unroll
    for (float& x : o) x *= by;
    unit = next;
    return next == v_scale ? 1 : v_scale;  // a NaN or inf too, which o has then and keeps
  }

  // o = o * shrink + by * P V of keys [from, to) of the tile, a piece of columns after the other.
  // meanwhile(): called while the first one is computed.
  template <int from, int to, class Meanwhile>
  __device__ __forceinline__ void add_sums(unsigned vt_at, float by, const float (&shrink)[2],
                                           const Meanwhile& meanwhile) {
    Pieces t;
    ptx::forget(t[0]);
    ptx::forget(t[1]);
    ptx::wgmma_fence();
    start_fp8_sums<e5m2, tile, 0, from, to>(piece_of<0>(t), p, vt_at);
    meanwhile();
    add_pieces<from, to>(t, vt_at, by, shrink);
  }
  // From a piece on that has been started. The next one is computed while it is added or,
  // one_by_one, after it.
  template <int from, int to, int piece = 0>
  __device__ __forceinline__ void add_pieces(Pieces& t, unsigned vt_at, float by,
                                             const float (&shrink)[2]) {
    constexpr int more = piece < pieces - 1 ? 1 : 0;
    const auto start_next = [&] {
      if constexpr (one_by_one) ptx::forget(t[0]);
      ptx::wgmma_fence();
      // a.batch is not negative, but ptxas does not know that. To it, the new piece adds to the one
      // before the last; so it reuses that piece's registers, after that piece has been added.
      start_fp8_sums<e5m2, tile, piece + more, from, to>(piece_of<piece + more>(t), p, vt_at,
                                                         !one_by_one && piece > 0 && a.batch < 0);
    };
    if constexpr (more && !one_by_one) start_next();
    ptx::wgmma_wait<more && !one_by_one>();
    add_piece<piece>(t, by, shrink);
    if constexpr (more && one_by_one) start_next();
    if constexpr (more) add_pieces<from, to, piece + 1>(t, vt_at, by, shrink);
  }
  template <int piece>
  __device__ __forceinline__ void add_piece(Pieces& pieces_found, float by,
                                            const float (&shrink)[2]) {
    constexpr int columns = tile.piece_columns() / 2;
    auto& t = piece_of<piece>(pieces_found);
    ptx::pin(t);
    if (score && by != 1) [[unlikely]] {
#pragma unroll
      for (int i = 0; i < columns; ++i) t[i] *= by;
    }
#pragma unroll
    for (int i = 0; i < columns; ++i)
      o[piece * columns + i] = fmaf(o[piece * columns + i], shrink[i / 2 % 2], t[i]);
    if constexpr (piece == pieces - 1)
      softmax.add_sums(&t[columns], shrink);
    else
      ptx::pin(o);
  }
  // For tile n.
  template <class Meanwhile>
  __device__ __forceinline__ void add_tile(unsigned n, unsigned vt_at, const float (&shrink)[2],
                                           const Meanwhile& meanwhile) {
    if constexpr (score) {
      const float(&v_scale)[2] = warp.scales(n).v;
      if (v_scale[0] != v_scale[1]) {
        constexpr float one[2] = {1, 1};
        add_sums<0, tile.keys / 2>(vt_at, move_unit(v_scale[0]), shrink, meanwhile);
        add_sums<tile.keys / 2, tile.keys>(vt_at, move_unit(v_scale[1]), one, [] {});
      } else {
        add_sums<0, tile.keys>(vt_at, move_unit(v_scale[0]), shrink, meanwhile);
      }
    } else {
      add_sums<0, tile.keys>(vt_at, 1, shrink, meanwhile);
    }
  }

  // The end of an item, after all its keys have been added.
  __device__ __forceinline__ void end_item(const Item& item) {
    float factor[2];
    softmax.finish();
    finish_softmax(a, warp, softmax.row_state, item, factor);
    store_fp8_rows(a, warp, item, o, factor, score ? item.out_scale * unit : item.out_scale);
  }
  __device__ __forceinline__ void start_item() {
    softmax.start();
    unit = 0;
#pragma unroll
    for (int i = 0; i < tile.head_dim_v / 2; ++i) o[i] = 0;
  }

  // The factor of products of q and k of tile n, which belongs to item `count`.
  __device__ __forceinline__ void find_scales(unsigned count, unsigned n, Factors& scale) const {
    if constexpr (score) {
      scale[0] = warp.scales(n).score[0];
      scale[1] = warp.scales(n).score[1];
    } else {
      scale[0] = warp.item(count).score_scale;
    }
  }
  // Scores of tile n that a query does not see.
  __device__ __forceinline__ void hide(Scores<tile>& s, unsigned count, unsigned n,
                                       unsigned flags) const {
    const Item& item = warp.item(count);
    if constexpr (masked) {
      Visible<tile> visible;
      find_visible(a.block_mask, warp, item, n, flags, visible);
      hide_others(s, warp, visible);
    } else {
      hide_out_of_range(s, a, warp, item, warp.key_tile(n).first, warp.key_tile(n).keys,
                        with & with_score ? first_seen(item) : INT_MIN);
    }
    ptx::pin(s);
  }
  // Computes the weights of tile n from its scores. shrink: the factor of earlier sums.
  // meanwhile(): called before the exponentials.
  template <class Meanwhile>
  __device__ __forceinline__ void weigh(Scores<tile>& s, unsigned count, unsigned n, unsigned flags,
                                        Factors& factor, float (&shrink)[2],
                                        const Meanwhile& meanwhile) {
    if (score && (a.softcap > 0 || a.alibi_slopes)) {
      Fp8Softmax<tile, score>::multiply(s, factor);
      change_scores(s, a, warp, warp.item(count), warp.key_tile(n).first, 1);
    } else {
      for (float& x : factor) x *= log2_e;
    }
    float most[2];
    // Most tiles take one path without branches, if there are registers for it.
    constexpr bool has_usual_way = tile.groups != 2 && !masked;
    if (has_usual_way && flags & sees_all && softmax.is_usual(factor)) [[likely]] {
      softmax.template find_most<true>(s, factor, most);
    } else {
      if (!(flags & sees_all)) [[unlikely]]
        hide(s, count, n, flags);
      softmax.template find_most<false>(s, factor, most);
    }
    softmax.move_references(most, shrink);
    meanwhile();
    softmax.find_weights(s, factor, p);
  }
  // Says that the warp's queries see nothing of tile n.
  __device__ __forceinline__ void say_nothing_seen(unsigned n, unsigned flags) {
    if (masked && flags & has_unused) warp.release(warp.control.said[n % tile_slots]);
  }

  __device__ __forceinline__ void run() {
    if (!warp.take_item(0)) return;
    start_item();
    RingAt<tile.k_stages> k{0, 0};  // of tile n
    RingAt<tile.vt_stages> vt{0, 0};
    ptx::mbarrier_wait(address(&warp.control.k_full[0]), 0);
    // `here`: flags of tile n, which belongs to item `count`, whose Q is at q_at.
    unsigned count = 0, here = ptx::uniform(warp.item(0).first_tile >> 4 * warp.group);
    unsigned q_at = ptx::uniform(warp.q_at(0));
    for (unsigned n = 0;; ++n) {
      const bool ends = here & last_tile;
      unsigned next;  // flags of tile n + 1, if it is of the same item
      // Read in any case: with a condition of its own here, ptxas 13.0 used another condition's
      // result.
      const auto look_ahead = [&] {
        next = ptx::uniform(warp.key_tile(n).next_tile >> 4 * warp.group);
      };
      const auto wait_keys = [&] {
        if (!ends) ptx::mbarrier_wait(address(&warp.control.k_full[k.stage]), k.parity);
      };
      float shrink[2];
      bool there = false;  // V^T
      Barrier& k_empty = warp.control.k_empty[k.stage];
      if (here & sees_some) {
        Scores<tile> s;
        Factors factor;
        ptx::forget(s);
        ptx::wgmma_fence();
        const unsigned k_at = warp.k_of(k.stage);
        start_fp8_scores<e5m2, tile, 0, tile.score_columns()>(s, q_at, k_at);
        look_ahead();
        find_scales(count, n, factor);
        k.advance();
        add_fp8_scores<e5m2, tile>(s, q_at, k_at);
        __syncwarp();
        warp.release(k_empty);
        weigh(s, count, n, here, factor, shrink, [&] {
          there = ptx::mbarrier_test(address(&warp.control.vt_full[vt.stage]), vt.parity);
        });
      } else {
        look_ahead();
        k.advance();
        __syncwarp();
        warp.release(k_empty);
        say_nothing_seen(n, here);
      }
      if (ends) warp.release_q(count);
      if (!there) ptx::mbarrier_wait(address(&warp.control.vt_full[vt.stage]), vt.parity);
      if (here & sees_some)
        add_tile(n, warp.vt_of(vt.stage), shrink, wait_keys);
      else
        wait_keys();
      __syncwarp();
      warp.release(warp.control.vt_empty[vt.stage]);
      vt.advance();
      if (ends) {
        end_item(warp.item(count));
        if (!warp.take_item(++count)) return;
        start_item();
        ptx::mbarrier_wait(address(&warp.control.k_full[k.stage]), k.parity);
        next = ptx::uniform(warp.item(count).first_tile >> 4 * warp.group);
        q_at = ptx::uniform(warp.q_at(count));
      }
      here = next;
    }
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
      init_barriers_of_stage<tile>(control, i);
    }
    init_barriers_of_cluster<tile>(control);
    if constexpr (with & with_mask) {
      ptx::mbarrier_init(address(&control.listed), 1);
      for (Barrier& said : control.said) ptx::mbarrier_init(address(&said), warps);
      for (Barrier& described : control.described) ptx::mbarrier_init(address(&described), 1);
    }
    ptx::mbarrier_init_fence();
  }
  meet_all<tile>();
  ptx::grid_let_next_start();
  if (!(with & with_mask) && threadIdx.x == 32) prefetch_first<tile>(a);
  ptx::grid_wait();  // before any access to memory
  if (warp < 4) {
    if constexpr (tile.groups > 1) ptx::registers_shrink<tile.load_registers()>();
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
    if constexpr (tile.groups > 1) ptx::registers_grow<tile.compute_registers()>();
    const Warp<tile> place{control, within_block<tile>(shared), warp / 4 - 1, warp % 4,
                           int(threadIdx.x % 32)};
    Fp8Consumer<tile, with, e5m2> consumer(a, place);
    consumer.run();
  }
}

}  // namespace attn::sm90

#define ATTN_SM90_FP8_FORWARD(NAME, ...)                                                \
  ATTN_SM90_KERNEL(NAME, attn::sm90::fp8_variants,                                      \
                   (attn::sm90::fp8_forward < NAME##_variant.tile, NAME##_variant.with, \
                    NAME##_variant.kv_type == attn::sm90::e5m2 >),                      \
                   __VA_ARGS__)
