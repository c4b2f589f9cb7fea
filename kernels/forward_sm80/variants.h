// Every kernel fwd_sm80_*, one line each: the one place that says what it is. The build makes its
// source file from this (write_stubs.cpp), and its host side its row of the catalog
// (src/kernels/sm80_forward.cpp). The order is the order of preference.
#ifndef ATTN_KERNELS_FORWARD_SM80_VARIANTS_H
#define ATTN_KERNELS_FORWARD_SM80_VARIANTS_H

#include "../shared/find_variant.h"
#include "../shared/types.h"
#include "forward_args.h"
#include "tiles.h"

namespace attn::sm80 {

struct Variant {
  const char* name;
  int type;      // of q, k and v
  int head_dim;  // columns of the products; columns that a problem lacks count as zero
  int head_dim_v = head_dim;
  unsigned with = 0;
  int local_bytes = 0;  // local memory that a thread may have, spilled registers included

  ATTN_HOST_DEVICE constexpr Tile tile() const { return tile_of(head_dim, with & with_score); }
  static constexpr const char* architectures() { return "sm_80 sm_90 compute_80"; }
};

template <unsigned with>
struct KernargOf {
  using type = attn_sm80_forward_kernarg;
};
template <>
struct KernargOf<with_mask> {
  using type = attn_sm80_mask_kernarg;
};
template <>
struct KernargOf<with_pages> {
  using type = attn_sm80_paged_kernarg;
};
template <unsigned with>
using Kernarg = typename KernargOf<with&(with_mask | with_pages)>::type;

constexpr int bf16 = attn_element_bf16, f16 = attn_element_f16;
// clang-format off: a kernel is a line
constexpr Variant variants[] = {
    {.name = "fwd_sm80_bf16_d64", .type = bf16, .head_dim = 64},
    {.name = "fwd_sm80_bf16_d64_score", .type = bf16, .head_dim = 64, .with = with_score},
    {.name = "fwd_sm80_bf16_d64_mask", .type = bf16, .head_dim = 64, .with = with_mask},
    {.name = "fwd_sm80_bf16_d64_score_mask", .type = bf16, .head_dim = 64, .with = with_score | with_mask},
    {.name = "fwd_sm80_bf16_d128", .type = bf16, .head_dim = 128},
    {.name = "fwd_sm80_bf16_d128_score", .type = bf16, .head_dim = 128, .with = with_score},
    {.name = "fwd_sm80_bf16_d128_mask", .type = bf16, .head_dim = 128, .with = with_mask},
    {.name = "fwd_sm80_bf16_d128_score_mask", .type = bf16, .head_dim = 128, .with = with_score | with_mask},
    {.name = "fwd_sm80_bf16_d256", .type = bf16, .head_dim = 256},
    {.name = "fwd_sm80_bf16_d256_score", .type = bf16, .head_dim = 256, .with = with_score},
    {.name = "fwd_sm80_bf16_d256_mask", .type = bf16, .head_dim = 256, .with = with_mask},
    {.name = "fwd_sm80_bf16_d256_score_mask", .type = bf16, .head_dim = 256, .with = with_score | with_mask},
    {.name = "fwd_sm80_bf16_d320_dv256", .type = bf16, .head_dim = 320, .head_dim_v = 256},
    {.name = "fwd_sm80_bf16_d320_dv256_score", .type = bf16, .head_dim = 320, .head_dim_v = 256, .with = with_score},
    {.name = "fwd_sm80_bf16_d320_dv256_mask", .type = bf16, .head_dim = 320, .head_dim_v = 256, .with = with_mask},
    {.name = "fwd_sm80_bf16_d320_dv256_score_mask", .type = bf16, .head_dim = 320, .head_dim_v = 256, .with = with_score | with_mask},
    {.name = "fwd_sm80_bf16_d512", .type = bf16, .head_dim = 512},
    {.name = "fwd_sm80_bf16_d512_score", .type = bf16, .head_dim = 512, .with = with_score},
    {.name = "fwd_sm80_bf16_d512_mask", .type = bf16, .head_dim = 512, .with = with_mask},
    {.name = "fwd_sm80_bf16_d512_score_mask", .type = bf16, .head_dim = 512, .with = with_score | with_mask},
    {.name = "fwd_sm80_bf16_d64_paged", .type = bf16, .head_dim = 64, .with = with_pages},
    {.name = "fwd_sm80_bf16_d64_score_paged", .type = bf16, .head_dim = 64, .with = with_score | with_pages},
    {.name = "fwd_sm80_bf16_d128_paged", .type = bf16, .head_dim = 128, .with = with_pages},
    {.name = "fwd_sm80_bf16_d128_score_paged", .type = bf16, .head_dim = 128, .with = with_score | with_pages},
    {.name = "fwd_sm80_bf16_d256_paged", .type = bf16, .head_dim = 256, .with = with_pages},
    {.name = "fwd_sm80_bf16_d256_score_paged", .type = bf16, .head_dim = 256, .with = with_score | with_pages},
    {.name = "fwd_sm80_bf16_d320_dv256_paged", .type = bf16, .head_dim = 320, .head_dim_v = 256, .with = with_pages},
    {.name = "fwd_sm80_bf16_d320_dv256_score_paged", .type = bf16, .head_dim = 320, .head_dim_v = 256, .with = with_score | with_pages},
    {.name = "fwd_sm80_bf16_d512_paged", .type = bf16, .head_dim = 512, .with = with_pages},
    {.name = "fwd_sm80_bf16_d512_score_paged", .type = bf16, .head_dim = 512, .with = with_score | with_pages},
    {.name = "fwd_sm80_f16_d64", .type = f16, .head_dim = 64},
    {.name = "fwd_sm80_f16_d64_score", .type = f16, .head_dim = 64, .with = with_score},
    {.name = "fwd_sm80_f16_d64_mask", .type = f16, .head_dim = 64, .with = with_mask},
    {.name = "fwd_sm80_f16_d64_score_mask", .type = f16, .head_dim = 64, .with = with_score | with_mask},
    {.name = "fwd_sm80_f16_d128", .type = f16, .head_dim = 128},
    {.name = "fwd_sm80_f16_d128_score", .type = f16, .head_dim = 128, .with = with_score},
    {.name = "fwd_sm80_f16_d128_mask", .type = f16, .head_dim = 128, .with = with_mask},
    {.name = "fwd_sm80_f16_d128_score_mask", .type = f16, .head_dim = 128, .with = with_score | with_mask},
    {.name = "fwd_sm80_f16_d256", .type = f16, .head_dim = 256},
    {.name = "fwd_sm80_f16_d256_score", .type = f16, .head_dim = 256, .with = with_score},
    {.name = "fwd_sm80_f16_d256_mask", .type = f16, .head_dim = 256, .with = with_mask},
    {.name = "fwd_sm80_f16_d256_score_mask", .type = f16, .head_dim = 256, .with = with_score | with_mask},
    {.name = "fwd_sm80_f16_d320_dv256", .type = f16, .head_dim = 320, .head_dim_v = 256},
    {.name = "fwd_sm80_f16_d320_dv256_score", .type = f16, .head_dim = 320, .head_dim_v = 256, .with = with_score},
    {.name = "fwd_sm80_f16_d320_dv256_mask", .type = f16, .head_dim = 320, .head_dim_v = 256, .with = with_mask},
    {.name = "fwd_sm80_f16_d320_dv256_score_mask", .type = f16, .head_dim = 320, .head_dim_v = 256, .with = with_score | with_mask},
    {.name = "fwd_sm80_f16_d512", .type = f16, .head_dim = 512},
    {.name = "fwd_sm80_f16_d512_score", .type = f16, .head_dim = 512, .with = with_score},
    {.name = "fwd_sm80_f16_d512_mask", .type = f16, .head_dim = 512, .with = with_mask},
    {.name = "fwd_sm80_f16_d512_score_mask", .type = f16, .head_dim = 512, .with = with_score | with_mask},
    {.name = "fwd_sm80_f16_d64_paged", .type = f16, .head_dim = 64, .with = with_pages},
    {.name = "fwd_sm80_f16_d64_score_paged", .type = f16, .head_dim = 64, .with = with_score | with_pages},
    {.name = "fwd_sm80_f16_d128_paged", .type = f16, .head_dim = 128, .with = with_pages},
    {.name = "fwd_sm80_f16_d128_score_paged", .type = f16, .head_dim = 128, .with = with_score | with_pages},
    {.name = "fwd_sm80_f16_d256_paged", .type = f16, .head_dim = 256, .with = with_pages},
    {.name = "fwd_sm80_f16_d256_score_paged", .type = f16, .head_dim = 256, .with = with_score | with_pages},
    {.name = "fwd_sm80_f16_d320_dv256_paged", .type = f16, .head_dim = 320, .head_dim_v = 256, .with = with_pages},
    {.name = "fwd_sm80_f16_d320_dv256_score_paged", .type = f16, .head_dim = 320, .head_dim_v = 256, .with = with_score | with_pages},
    {.name = "fwd_sm80_f16_d512_paged", .type = f16, .head_dim = 512, .with = with_pages},
    {.name = "fwd_sm80_f16_d512_score_paged", .type = f16, .head_dim = 512, .with = with_score | with_pages},
};
// clang-format on

}  // namespace attn::sm80
#endif
