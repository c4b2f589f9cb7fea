// Decode of latent caches with few rows: decode/swapped.cuh, whose V is the latent columns of K and
// whose K is the rope columns. Only what has to do with all columns of K is here: Q and its
// products.
#pragma once
// clang-format off: swapped.cuh uses grid.h and does not include it
#include "../ptx/grid.h"
#include "../decode/swapped.cuh"
// clang-format on
#include "variants.h"

namespace attn::mla {

// Q's rope columns are where swapped.cuh has Q; its latent ones follow P.
template <DecodeTile tile>
__host__ __device__ constexpr int latent_q_at() {
  return tile.q_bytes() + 2 * tile.p_bytes();
}

// Q to shared memory, 8 threads per row.
template <DecodeTile tile, class Swapped>
__device__ __forceinline__ void load_q(const Swapped& to) {
  constexpr int rows = tile.rows(), panels = tile.head_dim_v / 64 + 1;
  static_assert(latent_q_at<tile>() + rows * 2 * tile.head_dim_v <= tile.group_bytes());
  const int chunk = to.thread() % 8;
#pragma unroll
  for (int r0 = 0; r0 < rows; r0 += decode::group_threads / 8) {
    const int r = r0 + to.thread() / 8;
    if (r >= rows) return;
    const bool used = r < to.used_rows();
    const char* const from =
        decode::q_address(to.a, to.at, decode::Row(to.a, to.at, used ? r : 0)) + 16 * chunk;
    uint4 x[panels];
#pragma unroll
    for (int i = 0; i < panels; ++i)
      x[i] = used ? *reinterpret_cast<const uint4*>(from + 128 * i) : uint4{0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < panels; ++i) {
      const int panel_at =
          i == panels - 1 ? 0 : latent_q_at<tile>() + i * rows * decode::panel_pitch;
      *reinterpret_cast<uint4*>(to.q_place + panel_at +
                                device::chunk_offset<decode::panel_pitch>(r, chunk)) = x[i];
    }
  }
}

// x = K Q^T, which is there after wgmma_wait(). k: the unit's rope columns, which the latent ones
// follow.
template <DecodeTile tile, class Swapped, int elements>
__device__ __forceinline__ void multiply_k(const Swapped& of, float (&x)[elements], unsigned k) {
  const unsigned long long rope_k = Swapped::descriptor(k, 0),
                           latent_k = rope_k + (tile.k_bytes() >> 4),
                           latent_q = of.q_matrix + (latent_q_at<tile>() >> 4);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < tile.head_dim_v / 16; ++step)
    ptx::wgmma<Swapped::bf16>(x, latent_k + Swapped::step_offset(step, decode::unit_keys),
                              latent_q + Swapped::step_offset(step, tile.rows()), step > 0);
#pragma unroll
  for (int step = 0; step < rope / 16; ++step)
    ptx::wgmma<Swapped::bf16>(x, rope_k + Swapped::step_offset(step, decode::unit_keys),
                              of.q_matrix + Swapped::step_offset(step, tile.rows()), true);
  ptx::wgmma_commit();
}

}  // namespace attn::mla

// A kernel and what it has instead of three functions of decode. It takes no positions.
#define ATTN_MLA_FEW(NAME)                                                            \
  constexpr attn::mla::Variant NAME##_variant =                                       \
      attn::mla::few_variants[attn::find_variant(attn::mla::few_variants, #NAME)];    \
  constexpr attn::decode::DecodeTile NAME##_tile = NAME##_variant.tile;               \
  using NAME##_kv =                                                                   \
      attn::decode::Same<std::conditional_t<NAME##_variant.type == attn_element_bf16, \
                                            attn::device::BF16, attn::device::F16>>;  \
  namespace attn::decode {                                                            \
  template <>                                                                         \
  __device__ __forceinline__ attn_positions                                           \
  positions_of<NAME##_tile>(const attn_decode_kernarg&) {                             \
    return {};                                                                        \
  }                                                                                   \
  template <>                                                                         \
  __device__ __forceinline__ void Swapped<NAME##_kv, NAME##_tile>::load_q() {         \
    mla::load_q<NAME##_tile>(*this);                                                  \
  }                                                                                   \
  template <>                                                                         \
  __device__ __forceinline__ void Swapped<NAME##_kv, NAME##_tile>::multiply_k(        \
      float (&x)[elements], unsigned k) const {                                       \
    mla::multiply_k<NAME##_tile>(*this, x, k);                                        \
  }                                                                                   \
  }                                                                                   \
  extern "C" __global__ void __launch_bounds__(NAME##_tile.threads(), 1)              \
      NAME(const __grid_constant__ attn_decode_sm90_kernarg a) {                      \
    attn::decode::decode_swapped<NAME##_kv, NAME##_tile>(a.a, a.map);                 \
  }
