// Attention forward with wgmma and the copy engine. A block stays on its multiprocessor and takes
// work items, tiles of queries of one head, one after the other. One warpgroup loads; each of the
// others has 64 of the queries: their scores, weights, sums and softmax are in its registers. The
// tiles of keys of all items form one sequence: the scores of the next tile are computed together
// with the sums of the current one, across the border of two items too. The warpgroups take turns,
// so that one computes its softmax while the other's products run.
#pragma once
#include "../ptx/grid.h"
#include "../ptx/uniform.h"
#include "../ptx/warpgroup.h"
#include "alternating.cuh"
#include "config.h"
#include "control.cuh"
#include "epilogue.cuh"
#include "load.cuh"
#include "load_live.cuh"
#include "load_paged.cuh"
#include "scores.cuh"
#include "scores_bias.cuh"
#include "scores_blocks.cuh"
#include "softmax.cuh"
#include "sums.cuh"
#include "variants.h"

namespace attn::sm90 {

template <class T, Tile tile, unsigned with>
struct Consumer {
  static constexpr bool score = with & with_score, masked = with & with_mask,
                        biased = with == with_bias, paged = with & with_pages;
  static constexpr bool bf16 = T::type == attn_element_bf16;
  using K = Ring<tile.k_stages>;

  const Kernarg<with>& a;
  Warp<tile> warp;
  Weights<tile> p;  // of the tile before
  Sums<tile> o;
  Softmax<T, tile, score> softmax;
  bool unseen;  // with a bias: some of the tile's keys are not seen by any of the warp's queries
  unsigned said_parity = 0;  // with a block mask: of the next phase of each control.said

  __device__ __forceinline__ Bias<T, tile> bias() const { return {a, warp}; }
  __device__ __forceinline__ void load_bias(const Item& item, unsigned n) const {
    if constexpr (biased) bias().load(item, n);
  }
  // Says that the warp's queries see nothing of tile n.
  __device__ __forceinline__ void say_nothing_seen(unsigned n, unsigned flags) {
    if (masked && flags & has_unused) warp.release(warp.control.said[n % tile_slots]);
    if constexpr (biased) {
      unseen = true;
      warp.release(warp.control.said[n % tile_slots]);
    }
  }

  // Scores of tile n, which is the item's, as start_weights takes them. visible: with a block mask,
  // if not all see all.
  __device__ __forceinline__ void prepare(Scores<tile>& s, const Item& item, unsigned n,
                                          unsigned flags, const Visible<tile>& visible) {
    if constexpr (score) change_scores(s, a, warp, item, warp.key_tile(n).first, a.scale);
    if constexpr (biased) bias().add(s);
    if (!(flags & sees_all)) [[unlikely]] {
      if constexpr (masked)
        hide_others(s, warp, visible);
      else
        hide_out_of_range(s, a, warp, item, warp.key_tile(n).first, warp.key_tile(n).keys);
      if constexpr (paged)
        if (flags & has_unused) hide_absent(s, warp, n);
      ptx::pin(s);  // without it ptxas moves some of them where nothing is hidden too
    }
    if constexpr (biased) unseen = bias().say_seen(s, n);
  }
  // All of it where nothing runs meanwhile.
  __device__ __forceinline__ void weigh(Scores<tile>& s, const Item& item, unsigned n,
                                        unsigned flags) {
    float shrink[2], sum[4];
    Visible<tile> visible;
    if constexpr (masked)
      if (!(flags & sees_all)) find_visible(a.block_mask, warp, item, n, flags, visible);
    load_bias(item, n);
    prepare(s, item, n, flags, visible);
    const bool moved = softmax.start_weights(a, s, shrink, sum);
    if (moved) softmax.rescale(o, shrink);
    softmax.find_first_weights(s);
    softmax.finish_weights(a, s, sum, p);
  }

  __device__ __forceinline__ void run() {
    if (!warp.take_item(0)) return;
    Scores<tile> s;
    KeptQueries<tile> q;
    keep_queries<tile>(q, warp, warp.q_at(0));
#pragma unroll
    for (float& x : o) x = 0;
    if (warp.group == tile.groups - 1) warp.pass_turn();
    ptx::mbarrier_wait(address(&warp.control.k_full[0]), 0);
    ptx::wgmma_fence();
    start_scores<bf16, tile>(s, q, ptx::uniform(warp.q_at(0)), warp.k_at(0));
    // Tile n + 1 is of the item `count`. `here` are the flags of tile n, whose weights p holds if
    // the warpgroup sees it; `next` those of tile n + 1, if it is of the same item; `before` those
    // of tile n - 1, as if it were the last one of its item if o has nothing of that of tile n.
    unsigned n = 0, count = 0;
    unsigned here = ptx::uniform(warp.item(0).first_tile >> 4 * warp.row_group()),
             next = ptx::uniform(warp.key_tile(0).next_tile >> 4 * warp.row_group());
    unsigned before = last_tile;
    unsigned q_next = ptx::uniform(warp.q_at(0)), k_next = warp.k_at(1), v_here = warp.v_of_sums(0);
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    __syncwarp();
    warp.release(warp.control.k_empty[0]);
    if (tile.q_stages == 1 && here & last_tile) warp.release_q(0);
    softmax.start();
    weigh(s, warp.item(0), 0, here);

    RingAt<tile.k_stages> k{K::stage(1), K::parity(1)};  // of tile n + 1
    RingAt<tile.v_stages> v{0, 0};                       // of tile n
    float factor[2];  // what o of the item whose last tile is n is to be multiplied with
    // K of tile n + 1 and V of n are there, and nothing but the rule is to be done.
    bool ready = false;
    for (;; ++n) {
      const bool ends = here & last_tile;
      if (!ready) {
        ptx::mbarrier_wait(address(&warp.control.v_full[v.stage]), v.parity);
        if (biased ? unseen : here & has_unused) clear_unused<tile, with>(warp, n, said_parity);
        if (ends) {
          // Here rather than with o, for now the warp waits for its turn anyway.
          finish_softmax(a, warp, softmax.row_state, warp.item(count), factor);
          softmax.start();
          if (tile.q_stages > 1) warp.release_q(count);
          if (!warp.take_item(++count)) break;
          q_next = ptx::uniform(warp.q_at(count));
          keep_queries<tile>(q, warp, warp.q_at(count));
        }
        ptx::mbarrier_wait(address(&warp.control.k_full[k.stage]), k.parity);
        if (ends) next = ptx::uniform(warp.item(count).first_tile >> 4 * warp.row_group());
      }
      const int k_stage = k.stage, v_stage = v.stage;
      // What is known of the tile after next when the next tile's scores have been started.
      unsigned after;
      const auto look_ahead = [&] {
        after = ptx::uniform(warp.key_tile(n + 1).next_tile >> 4 * warp.row_group());
        k.advance();
        v.advance();
        k_next = warp.k_of(k.stage);
        v_here = warp.v_of_sums(v.stage);
      };
      const auto release_scored = [&] {
        __syncwarp();  // what all lanes have read, lane 0 may give free
        warp.release(warp.control.k_empty[k_stage]);
        if (tile.q_stages == 1 && next & last_tile) warp.release_q(count);
      };
      warp.wait_turn();
      if (here & next & sees_some) [[likely]] {
        ptx::pin(o);
        ptx::wgmma_fence();
        start_scores<bf16, tile>(s, q, q_next, k_next);
        const unsigned v_now = v_here;
        look_ahead();  // while the scores are computed: a warp waits before a product
        start_sums<bf16, tile>(o, p, v_now, !(before & last_tile));
        // Between tiles that all see whole the turn is passed on when the sums are nearly done, so
        // that the other's products do not queue behind them. Hiding scores takes longer than that.
        const bool late = masked && tile.groups == 2 && next & here & sees_all;
        if (!late) warp.pass_turn();
        Visible<tile> visible;
        load_bias(warp.item(count), n + 1);
        if constexpr (masked && finds_visible_early<tile>)
          if (!(next & sees_all)) [[unlikely]]
            find_visible(a.block_mask, warp, warp.item(count), n + 1, next, visible);
        ptx::wgmma_wait<1>();
        ptx::pin(s);
        release_scored();
        float shrink[2], sum[4];
        if constexpr (masked && !finds_visible_early<tile>)
          if (!(next & sees_all))
            find_visible(a.block_mask, warp, warp.item(count), n + 1, next, visible);
        prepare(s, warp.item(count), n + 1, next, visible);
        const bool moved = softmax.start_weights(a, s, shrink, sum);
        softmax.find_first_weights(s);
        if (late) warp.pass_turn();
        if (ends) [[unlikely]] {  // on both sides, since code before a branch stays there
          ptx::wgmma_wait<0>();
          ptx::pin(o);
          store(a, warp, warp.item(count - 1), o, factor);
          softmax.look_at_references();
        } else {
          ptx::wgmma_wait<0>();
          ptx::pin(o);
          if (moved) softmax.rescale(o, shrink);
        }
        warp.release(warp.control.v_empty[v_stage]);
        ready = ptx::mbarrier_test(address(&warp.control.v_full[v.stage]), v.parity) &
                ptx::mbarrier_test(address(&warp.control.k_full[k.stage]), k.parity) &
                !(next & (last_tile | (biased ? 0 : has_unused))) & !(biased && unseen);
        softmax.finish_weights(a, s, sum, p);
        before = here;
      } else {
        const bool add = !(before & last_tile);
        if (here & sees_some) add_sums<bf16, tile>(o, p, v_here, add);
        warp.release(warp.control.v_empty[v_stage]);
        if (next & sees_some) {
          ptx::wgmma_fence();
          start_scores<bf16, tile>(s, q, q_next, k_next);
          ptx::wgmma_wait<0>();
          ptx::pin(s);
        }
        warp.pass_turn();
        look_ahead();
        release_scored();
        if (ends) store(a, warp, warp.item(count - 1), o, factor);
        if (next & sees_some)
          weigh(s, warp.item(count), n + 1, next);
        else
          say_nothing_seen(n + 1, next);
        before = add || here & sees_some ? here : here | last_tile;
        ready = false;
      }
      here = next;
      next = after;
    }
    warp.wait_turn();
    if (here & sees_some) add_sums<bf16, tile>(o, p, v_here, !(before & last_tile));
    if (warp.group != tile.groups - 1) warp.pass_turn();
    store(a, warp, warp.item(count - 1), o, factor);
  }
};

template <class T, Tile tile, unsigned with>
__device__ __forceinline__ void forward(const Kernarg<with>& a) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  Control& control = *reinterpret_cast<Control*>(shared_memory);
  const unsigned shared = address(shared_memory);
  // The same in all lanes, which the compiler sees here.
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    constexpr int warps = 4 * tile.groups;
    constexpr int describing = with & with_pages ? describing_lanes<tile> : 1;
    for (Barrier& full : control.item_full) ptx::mbarrier_init(address(&full), 1);
    ptx::mbarrier_init(address(&control.ending), 1);
    for (int i = 0; i < max_stages; ++i) {
      ptx::mbarrier_init(address(&control.k_full[i]), describing);
      ptx::mbarrier_init(address(&control.v_full[i]), 1);
      for (Barrier* empty : {&control.k_empty[i], &control.v_empty[i]})
        ptx::mbarrier_init(address(empty), warps);
      init_barriers_of_stage<tile>(control, i);
    }
    init_barriers_of_cluster<tile>(control);
    if constexpr (with == with_bias || with & with_mask)
      for (Barrier& said : control.said) ptx::mbarrier_init(address(&said), warps);
    if constexpr (with & with_mask) ptx::mbarrier_init(address(&control.listed), 1);
    if constexpr (with & (with_mask | with_pages))
      for (Barrier& described : control.described)
        ptx::mbarrier_init(address(&described), describing);
    ptx::mbarrier_init_fence();
  }
  meet_all<tile>();
  int helpers = 0, helped = 0;
  if constexpr (with & with_pages) helpers = a.helpers, helped = a.helped;
  if (helpers == 0) ptx::grid_let_next_start();
  if (with == plain && threadIdx.x == 32) prefetch_first<tile>(a);
  // Before any access to memory.
  if (helped > 0)
    ptx::grid_begin_concurrent();
  else
    ptx::grid_wait();
  if (helpers > 0) ptx::grid_let_next_start();  // it reads memory as soon as it starts
  if (warp < 4) {
    if constexpr (tile.groups > 1) ptx::registers_shrink<tile.load_registers()>();
    if constexpr (with & with_mask) {
      if (warp == 0) {
        load_items<tile, with>(a, control, shared);
      } else if (warp == 1) {
        load_live_keys<tile>(a, control, shared);
      } else if (warp == 3) {
        load_live_values<tile>(a, control, shared);
      } else if (sorts_items(a)) {
        list_items<tile>(a);
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(address(&control.listed));
      }
    } else if constexpr (with & with_pages) {
      if (warp == 0) {
        load_items<tile, with>(a, control, shared);
      } else if (warp == 1) {
        load_paged_keys<tile>(a, control, shared);
      } else if (warp == 3) {
        load_paged_values<tile>(a, control, shared);
      } else if (helped > 0) {
        // One block that waits is enough: a launch ends with its last one, and others leave room.
        if (blockIdx.x == gridDim.x - 1) ptx::grid_wait();
      } else if (a.cu_seqlens_q) {
        store_rows_of_nobody<unsigned>(a, blockIdx.x, gridDim.x);
      }
    } else {
      if (warp >= 2) {
        if (a.cu_seqlens_q)
          store_rows_of_nobody<unsigned>(a, 2 * blockIdx.x + warp - 2, 2 * gridDim.x);
        return;
      }
      if (warp == 0) load_items<tile, with>(a, control, shared);
      if (threadIdx.x == 32) load_keys<tile, with>(a, control, shared);
    }
  } else {
    if constexpr (tile.groups > 1) ptx::registers_grow<tile.compute_registers()>();
    using Computes =
        std::conditional_t<tile.alternates, Alternating<T, tile, with>, Consumer<T, tile, with>>;
    Computes consumer{.a = a,
                      .warp = {control, within_block<tile>(shared), warp / 4 - 1, warp % 4,
                               int(threadIdx.x % 32)}};
    consumer.run();
  }
}

}  // namespace attn::sm90

#define ATTN_SM90_FORWARD(NAME, ...)                                                  \
  ATTN_SM90_KERNEL(NAME, attn::sm90::variants,                                        \
                   (attn::sm90::forward<attn::device::ElementOf<NAME##_variant.type>, \
                                        NAME##_variant.tile, NAME##_variant.with>),   \
                   __VA_ARGS__)
