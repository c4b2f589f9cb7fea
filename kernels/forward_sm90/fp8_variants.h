// Every kernel fwd_sm90_fp8_*, see variants.h.
#ifndef ATTN_KERNELS_FORWARD_SM90_FP8_VARIANTS_H
#define ATTN_KERNELS_FORWARD_SM90_FP8_VARIANTS_H

#include "config.h"
#include "fp8_tiles.h"
#include "variant.h"

namespace attn::sm90 {

constexpr int e4m3 = attn_element_f8_e4m3fn, e5m2 = attn_element_f8_e5m2;
// clang-format off: a kernel is a line
constexpr Variant fp8_variants[] = {
    {.name = "fwd_sm90_fp8_d64_short", .type = e4m3, .tile = tile_fp8_d64_short, .with = with_fp8},
    {.name = "fwd_sm90_fp8_d64_long", .type = e4m3, .tile = tile_fp8_d64_long, .with = with_fp8, .local_bytes = 8},
    {.name = "fwd_sm90_fp8_d64", .type = e4m3, .tile = tile_fp8_d64, .with = with_fp8},
    {.name = "fwd_sm90_fp8_d128_heads", .type = e4m3, .tile = tile_fp8_d128_heads, .with = with_fp8, .local_bytes = 8},
    {.name = "fwd_sm90_fp8_d128", .type = e4m3, .tile = tile_fp8_d128, .with = with_fp8, .local_bytes = 8},
    {.name = "fwd_sm90_fp8_d256_pair", .type = e4m3, .tile = tile_fp8_d256_pair, .with = with_fp8},
    {.name = "fwd_sm90_fp8_d256", .type = e4m3, .tile = tile_fp8_d256, .with = with_fp8},
    {.name = "fwd_sm90_fp8_d64_e5m2", .type = e4m3, .kv_type = e5m2, .tile = tile_fp8_d64, .with = with_fp8},
    {.name = "fwd_sm90_fp8_d128_e5m2", .type = e4m3, .kv_type = e5m2, .tile = tile_fp8_d128, .with = with_fp8, .local_bytes = 8},
    {.name = "fwd_sm90_fp8_d256_e5m2", .type = e4m3, .kv_type = e5m2, .tile = tile_fp8_d256, .with = with_fp8},
    {.name = "fwd_sm90_fp8_d64_mask", .type = e4m3, .tile = tile_fp8_d64_mask, .with = with_fp8_and_mask, .local_bytes = 8},
    {.name = "fwd_sm90_fp8_d128_mask", .type = e4m3, .tile = tile_fp8_d128_mask, .with = with_fp8_and_mask, .local_bytes = 40},
    {.name = "fwd_sm90_fp8_d256_mask", .type = e4m3, .tile = tile_fp8_d256_mask, .with = with_fp8_and_mask},
    {.name = "fwd_sm90_fp8_d64_precise", .type = e4m3, .tile = tile_fp8_d64_precise, .with = with_fp8},
    {.name = "fwd_sm90_fp8_d128_precise", .type = e4m3, .tile = tile_fp8_d128_precise, .with = with_fp8},
    {.name = "fwd_sm90_fp8_d256_precise", .type = e4m3, .tile = tile_fp8_d256_precise, .with = with_fp8, .local_bytes = 24},
    {.name = "fwd_sm90_fp8_d64_score", .type = e4m3, .tile = tile_fp8_d64, .with = with_fp8_and_score},
    {.name = "fwd_sm90_fp8_d128_score", .type = e4m3, .tile = tile_fp8_d128, .with = with_fp8_and_score, .local_bytes = 48},
    {.name = "fwd_sm90_fp8_d256_score", .type = e4m3, .tile = tile_fp8_d256_score, .with = with_fp8_and_score, .local_bytes = 16},
};
// clang-format on

}  // namespace attn::sm90
#endif
