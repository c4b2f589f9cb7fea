// Every kernel bwd_sm80_*, one line each, as in forward_sm80/variants.h. Its host side is
// src/kernels/sm80_backward.cpp. The order is the order of preference. _score: with softcap, ALiBi
// and bias; _mask: with a block mask, and these as well.
#ifndef ATTN_KERNELS_BACKWARD_SM80_VARIANTS_H
#define ATTN_KERNELS_BACKWARD_SM80_VARIANTS_H

#include "../shared/find_variant.h"
#include "../shared/types.h"
#include "backward_args.h"
#include "tiles.h"

namespace attn::bwd_sm80 {

struct Variant {
  const char* name;
  int type;      // of q, k, v and d_out
  int head_dim;  // columns that all products have; columns that a problem lacks count as zero
  unsigned with = 0;
  int local_bytes = 0;  // local memory that a thread may have, spilled registers included

  // Both have as many threads.
  ATTN_HOST_DEVICE constexpr Tile tile(bool of_keys) const {
    return tile_of(of_keys, head_dim, with & with_score);
  }
  static constexpr const char* architectures() { return "sm_80 sm_90 compute_80"; }
};

constexpr int bf16 = attn_element_bf16, f16 = attn_element_f16;
// clang-format off: a kernel is a line
constexpr Variant variants[] = {
    {.name = "bwd_sm80_bf16_d64", .type = bf16, .head_dim = 64},
    {.name = "bwd_sm80_bf16_d64_score", .type = bf16, .head_dim = 64, .with = with_score},
    {.name = "bwd_sm80_bf16_d64_mask", .type = bf16, .head_dim = 64, .with = with_score | with_mask},
    {.name = "bwd_sm80_bf16_d128", .type = bf16, .head_dim = 128, .local_bytes = 16},
    {.name = "bwd_sm80_bf16_d128_score", .type = bf16, .head_dim = 128, .with = with_score},
    {.name = "bwd_sm80_bf16_d128_mask", .type = bf16, .head_dim = 128, .with = with_score | with_mask},
    {.name = "bwd_sm80_bf16_d256", .type = bf16, .head_dim = 256},
    {.name = "bwd_sm80_bf16_d256_score", .type = bf16, .head_dim = 256, .with = with_score},
    {.name = "bwd_sm80_bf16_d256_mask", .type = bf16, .head_dim = 256, .with = with_score | with_mask, .local_bytes = 16},
    {.name = "bwd_sm80_f16_d64", .type = f16, .head_dim = 64},
    {.name = "bwd_sm80_f16_d64_score", .type = f16, .head_dim = 64, .with = with_score},
    {.name = "bwd_sm80_f16_d64_mask", .type = f16, .head_dim = 64, .with = with_score | with_mask},
    {.name = "bwd_sm80_f16_d128", .type = f16, .head_dim = 128, .local_bytes = 16},
    {.name = "bwd_sm80_f16_d128_score", .type = f16, .head_dim = 128, .with = with_score},
    {.name = "bwd_sm80_f16_d128_mask", .type = f16, .head_dim = 128, .with = with_score | with_mask},
    {.name = "bwd_sm80_f16_d256", .type = f16, .head_dim = 256},
    {.name = "bwd_sm80_f16_d256_score", .type = f16, .head_dim = 256, .with = with_score},
    {.name = "bwd_sm80_f16_d256_mask", .type = f16, .head_dim = 256, .with = with_score | with_mask, .local_bytes = 16},
};
// clang-format on

}  // namespace attn::bwd_sm80
#endif
