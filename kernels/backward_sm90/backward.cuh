// Gradients of attention with wgmma and the copy engine. A block stays on its multiprocessor and
// takes work items, blocks of keys, one after the other, each of which goes over tiles of queries.
// Two warpgroups compute, and keep dk and dv in registers. dq of a tile is added in float32 to
// memory, in an order that follows from the problem (order.h).
#pragma once
#include "../ptx/grid.h"
#include "../ptx/warpgroup.h"
#include "by_keys.cuh"
#include "by_roles.cuh"
#include "variants.h"

namespace attn::bwd_sm90 {

template <class T, const Variant& variant>
__device__ __forceinline__ void backward(const attn_sm90_backward_kernarg& a) {
  constexpr Tile tile = variant.tile;
  constexpr bool biased = variant.with == With::bias;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  Control& control = *reinterpret_cast<Control*>(shared_memory);
  const unsigned shared = address(shared_memory);
  // The same in all lanes, which the compiler sees here.
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) init_barriers<tile>(control);
  meet_all<tile>();
  ptx::grid_let_next_start();
  ptx::grid_wait();  // before any access to memory
  if (warp < 4) {
    ptx::registers_shrink<40>();
    if (warp == 2) {
      clear_dq<tile>(a);
      clear_unused<T, tile, biased>(a, control, shared);
    } else if (threadIdx.x == 0) {
      Loader<tile, biased>{a, control, shared}.run();
    } else if (threadIdx.x % 32 == 0) {
      add_dq<tile>(a, control, shared, warp / 2);
    }
  } else {
    ptx::registers_grow<232>();
    const Consumer<T, tile, variant.with> consumer{
        a, control, shared, warp / 4 - 1, warp % 4, int(threadIdx.x % 32)};
    if constexpr (tile.roles())
      consumer.run_by_roles();
    else
      consumer.run_by_keys();
  }
  if constexpr (tile.blocks > 1) {
    // The other block may still write here.
    __syncwarp();
    ptx::cluster_meet();
  }
}

}  // namespace attn::bwd_sm90

#define ATTN_SM90_BACKWARD(NAME, ...)                                                          \
  constexpr attn::bwd_sm90::Variant NAME##_variant =                                           \
      attn::bwd_sm90::variants[attn::find_variant(attn::bwd_sm90::variants, #NAME)];           \
  extern "C" __global__ void __launch_bounds__(NAME##_variant.tile.threads(), 1)               \
      __VA_ARGS__ NAME(const __grid_constant__ attn_sm90_backward_kernarg a) {                 \
    attn::bwd_sm90::backward<attn::device::ElementOf<NAME##_variant.type>, NAME##_variant>(a); \
  }
