// Every kernel fwd_sm90_* but those of fp8, one line each: the one place that says what it is. The
// build makes its source file from this (write_stubs.cpp), and its host side its row of the catalog
// (src/kernels/sm90_forward.cpp). The order is the order of preference.
#ifndef ATTN_KERNELS_FORWARD_SM90_VARIANTS_H
#define ATTN_KERNELS_FORWARD_SM90_VARIANTS_H

#include "config.h"
#include "tiles.h"
#include "variant.h"

namespace attn::sm90 {

constexpr int bf16 = attn_element_bf16, f16 = attn_element_f16;
// clang-format off: a kernel is a line
constexpr Variant variants[] = {
    {.name = "fwd_sm90_bf16_d64_short", .type = bf16, .tile = tile_d64_short},
    {.name = "fwd_sm90_bf16_d64", .type = bf16, .tile = tile_d64},
    {.name = "fwd_sm90_bf16_d96", .type = bf16, .tile = tile_d96},
    {.name = "fwd_sm90_bf16_d128_pair", .type = bf16, .tile = tile_d128_pair},
    {.name = "fwd_sm90_bf16_d128_heads", .type = bf16, .tile = tile_d128_heads},
    {.name = "fwd_sm90_bf16_d128_long", .type = bf16, .tile = tile_d128_long},
    {.name = "fwd_sm90_bf16_d128", .type = bf16, .tile = tile_d128},
    {.name = "fwd_sm90_bf16_d192_dv128", .type = bf16, .tile = tile_d192_dv128},
    {.name = "fwd_sm90_bf16_d192", .type = bf16, .tile = tile_d192},
    {.name = "fwd_sm90_bf16_d256_pair", .type = bf16, .tile = tile_d256_pair},
    {.name = "fwd_sm90_bf16_d256", .type = bf16, .tile = tile_d256},
    {.name = "fwd_sm90_bf16_d320_dv256", .type = bf16, .tile = tile_d320_dv256},
    {.name = "fwd_sm90_bf16_d512_heads", .type = bf16, .tile = tile_d512_heads},
    {.name = "fwd_sm90_bf16_d512", .type = bf16, .tile = tile_d512},
    {.name = "fwd_sm90_bf16_d64_mask", .type = bf16, .tile = tile_d64_mask, .with = with_mask},
    {.name = "fwd_sm90_bf16_d128_mask", .type = bf16, .tile = tile_d128_mask, .with = with_mask},
    {.name = "fwd_sm90_bf16_d256_mask", .type = bf16, .tile = tile_d256_mask, .with = with_mask},
    {.name = "fwd_sm90_bf16_d320_dv256_mask", .type = bf16, .tile = tile_d320_dv256_mask, .with = with_mask},
    {.name = "fwd_sm90_bf16_d512_mask", .type = bf16, .tile = tile_d512_mask, .with = with_mask},
    {.name = "fwd_sm90_bf16_d64_score", .type = bf16, .tile = tile_d64_score, .with = with_score},
    {.name = "fwd_sm90_bf16_d128_score", .type = bf16, .tile = tile_d128_score, .with = with_score},
    {.name = "fwd_sm90_bf16_d256_score", .type = bf16, .tile = tile_d256_score, .with = with_score},
    {.name = "fwd_sm90_bf16_d320_dv256_score", .type = bf16, .tile = tile_d320_dv256, .with = with_score},
    {.name = "fwd_sm90_bf16_d512_score", .type = bf16, .tile = tile_d512, .with = with_score},
    {.name = "fwd_sm90_bf16_d64_bias", .type = bf16, .tile = tile_d64_bias, .with = with_bias},
    {.name = "fwd_sm90_bf16_d128_bias", .type = bf16, .tile = tile_d128_bias, .with = with_bias},
    {.name = "fwd_sm90_bf16_d256_bias", .type = bf16, .tile = tile_d256_bias, .with = with_bias},
    {.name = "fwd_sm90_bf16_d320_dv256_bias", .type = bf16, .tile = tile_d320_dv256_bias, .with = with_bias},
    {.name = "fwd_sm90_bf16_d512_bias", .type = bf16, .tile = tile_d512_bias, .with = with_bias},
    {.name = "fwd_sm90_bf16_d64_paged", .type = bf16, .tile = tile_d64, .with = with_pages},
    {.name = "fwd_sm90_bf16_d128_paged", .type = bf16, .tile = tile_d128, .with = with_pages},
    {.name = "fwd_sm90_bf16_d256_paged", .type = bf16, .tile = tile_d256, .with = with_pages},
    {.name = "fwd_sm90_bf16_d320_dv256_paged", .type = bf16, .tile = tile_d320_dv256, .with = with_pages},
    {.name = "fwd_sm90_bf16_d512_paged", .type = bf16, .tile = tile_d512, .with = with_pages},
    {.name = "fwd_sm90_bf16_d64_score_paged", .type = bf16, .tile = tile_d64_score, .with = with_score_and_pages},
    {.name = "fwd_sm90_bf16_d128_score_paged", .type = bf16, .tile = tile_d128_score, .with = with_score_and_pages},
    {.name = "fwd_sm90_bf16_d256_score_paged", .type = bf16, .tile = tile_d256_score, .with = with_score_and_pages},
    {.name = "fwd_sm90_bf16_d320_dv256_score_paged", .type = bf16, .tile = tile_d320_dv256, .with = with_score_and_pages},
    {.name = "fwd_sm90_bf16_d512_score_paged", .type = bf16, .tile = tile_d512, .with = with_score_and_pages},
    {.name = "fwd_sm90_f16_d64_short", .type = f16, .tile = tile_d64_short},
    {.name = "fwd_sm90_f16_d64", .type = f16, .tile = tile_d64},
    {.name = "fwd_sm90_f16_d96", .type = f16, .tile = tile_d96},
    {.name = "fwd_sm90_f16_d128_pair", .type = f16, .tile = tile_d128_pair},
    {.name = "fwd_sm90_f16_d128_heads", .type = f16, .tile = tile_d128_heads},
    {.name = "fwd_sm90_f16_d128_long", .type = f16, .tile = tile_d128_long},
    {.name = "fwd_sm90_f16_d128", .type = f16, .tile = tile_d128},
    {.name = "fwd_sm90_f16_d192_dv128", .type = f16, .tile = tile_d192_dv128},
    {.name = "fwd_sm90_f16_d192", .type = f16, .tile = tile_d192},
    {.name = "fwd_sm90_f16_d256_pair", .type = f16, .tile = tile_d256_pair},
    {.name = "fwd_sm90_f16_d256", .type = f16, .tile = tile_d256},
    {.name = "fwd_sm90_f16_d320_dv256", .type = f16, .tile = tile_d320_dv256},
    {.name = "fwd_sm90_f16_d512_heads", .type = f16, .tile = tile_d512_heads},
    {.name = "fwd_sm90_f16_d512", .type = f16, .tile = tile_d512},
    {.name = "fwd_sm90_f16_d64_mask", .type = f16, .tile = tile_d64_mask, .with = with_mask},
    {.name = "fwd_sm90_f16_d128_mask", .type = f16, .tile = tile_d128_mask, .with = with_mask},
    {.name = "fwd_sm90_f16_d256_mask", .type = f16, .tile = tile_d256_mask, .with = with_mask},
    {.name = "fwd_sm90_f16_d320_dv256_mask", .type = f16, .tile = tile_d320_dv256_mask, .with = with_mask},
    {.name = "fwd_sm90_f16_d512_mask", .type = f16, .tile = tile_d512_mask, .with = with_mask},
    {.name = "fwd_sm90_f16_d64_score", .type = f16, .tile = tile_d64_score, .with = with_score},
    {.name = "fwd_sm90_f16_d128_score", .type = f16, .tile = tile_d128_score, .with = with_score},
    {.name = "fwd_sm90_f16_d256_score", .type = f16, .tile = tile_d256_score, .with = with_score},
    {.name = "fwd_sm90_f16_d320_dv256_score", .type = f16, .tile = tile_d320_dv256, .with = with_score},
    {.name = "fwd_sm90_f16_d512_score", .type = f16, .tile = tile_d512, .with = with_score},
    {.name = "fwd_sm90_f16_d64_bias", .type = f16, .tile = tile_d64_bias, .with = with_bias},
    {.name = "fwd_sm90_f16_d128_bias", .type = f16, .tile = tile_d128_bias, .with = with_bias},
    {.name = "fwd_sm90_f16_d256_bias", .type = f16, .tile = tile_d256_bias, .with = with_bias},
    {.name = "fwd_sm90_f16_d320_dv256_bias", .type = f16, .tile = tile_d320_dv256_bias, .with = with_bias},
    {.name = "fwd_sm90_f16_d512_bias", .type = f16, .tile = tile_d512_bias, .with = with_bias},
    {.name = "fwd_sm90_f16_d64_paged", .type = f16, .tile = tile_d64, .with = with_pages},
    {.name = "fwd_sm90_f16_d128_paged", .type = f16, .tile = tile_d128, .with = with_pages},
    {.name = "fwd_sm90_f16_d256_paged", .type = f16, .tile = tile_d256, .with = with_pages},
    {.name = "fwd_sm90_f16_d320_dv256_paged", .type = f16, .tile = tile_d320_dv256, .with = with_pages},
    {.name = "fwd_sm90_f16_d512_paged", .type = f16, .tile = tile_d512, .with = with_pages},
    {.name = "fwd_sm90_f16_d64_score_paged", .type = f16, .tile = tile_d64_score, .with = with_score_and_pages},
    {.name = "fwd_sm90_f16_d128_score_paged", .type = f16, .tile = tile_d128_score, .with = with_score_and_pages},
    {.name = "fwd_sm90_f16_d256_score_paged", .type = f16, .tile = tile_d256_score, .with = with_score_and_pages},
    {.name = "fwd_sm90_f16_d320_dv256_score_paged", .type = f16, .tile = tile_d320_dv256, .with = with_score_and_pages},
    {.name = "fwd_sm90_f16_d512_score_paged", .type = f16, .tile = tile_d512, .with = with_score_and_pages},
};
// clang-format on

}  // namespace attn::sm90
#endif
