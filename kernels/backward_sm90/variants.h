// Every kernel bwd_sm90_*, one line each: the one place that says what it is. The build makes its
// source file from this (write_stubs.cpp), and its host side its row of the catalog
// (src/kernels/sm90_backward.cpp). The order is the order of preference.
#ifndef ATTN_KERNELS_BACKWARD_SM90_VARIANTS_H
#define ATTN_KERNELS_BACKWARD_SM90_VARIANTS_H

#include "../shared/find_variant.h"
#include "../shared/types.h"
#include "tiles.h"

namespace attn::bwd_sm90 {

enum class With {
  nothing,
  score,  // softcap and ALiBi
  bias    // these and a bias
};

struct Variant {
  const char* name;
  int type;  // of q, k, v and d_out
  Tile tile;
  With with = With::nothing;
  int local_bytes = 0;  // local memory that a thread may have, spilled registers included

  static constexpr const char* architectures() { return "sm_90a"; }
};

constexpr int bf16 = attn_element_bf16, f16 = attn_element_f16;
// clang-format off: a kernel is a line
constexpr Variant variants[] = {
    {.name = "bwd_sm90_bf16_d64", .type = bf16, .tile = tile_d64, .local_bytes = 16},
    {.name = "bwd_sm90_bf16_d64_score", .type = bf16, .tile = tile_d64_score, .with = With::score, .local_bytes = 24},
    {.name = "bwd_sm90_bf16_d64_bias", .type = bf16, .tile = tile_d64_bias, .with = With::bias, .local_bytes = 80},
    {.name = "bwd_sm90_bf16_d128", .type = bf16, .tile = tile_d128},
    {.name = "bwd_sm90_bf16_d128_score", .type = bf16, .tile = tile_d128, .with = With::score},
    {.name = "bwd_sm90_bf16_d128_bias", .type = bf16, .tile = tile_d128_bias, .with = With::bias},
    {.name = "bwd_sm90_bf16_d256", .type = bf16, .tile = tile_d256},
    {.name = "bwd_sm90_bf16_d256_score", .type = bf16, .tile = tile_d256, .with = With::score},
    {.name = "bwd_sm90_bf16_d256_bias", .type = bf16, .tile = tile_d256_bias, .with = With::bias},
    {.name = "bwd_sm90_f16_d64", .type = f16, .tile = tile_d64, .local_bytes = 16},
    {.name = "bwd_sm90_f16_d64_score", .type = f16, .tile = tile_d64_score, .with = With::score, .local_bytes = 24},
    {.name = "bwd_sm90_f16_d64_bias", .type = f16, .tile = tile_d64_bias, .with = With::bias, .local_bytes = 80},
    {.name = "bwd_sm90_f16_d128", .type = f16, .tile = tile_d128},
    {.name = "bwd_sm90_f16_d128_score", .type = f16, .tile = tile_d128, .with = With::score},
    {.name = "bwd_sm90_f16_d128_bias", .type = f16, .tile = tile_d128_bias, .with = With::bias},
    {.name = "bwd_sm90_f16_d256", .type = f16, .tile = tile_d256},
    {.name = "bwd_sm90_f16_d256_score", .type = f16, .tile = tile_d256, .with = With::score},
    {.name = "bwd_sm90_f16_d256_bias", .type = f16, .tile = tile_d256_bias, .with = With::bias},
};
// clang-format on

}  // namespace attn::bwd_sm90
#endif
