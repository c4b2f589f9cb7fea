// The shapes of the blocks of fwd_sm90_fp8_*, see tiles.h.
#ifndef ATTN_KERNELS_FORWARD_SM90_FP8_TILES_H
#define ATTN_KERNELS_FORWARD_SM90_FP8_TILES_H

#include "tiles.h"

namespace attn::sm90 {

// Where larger tiles would leave multiprocessors idle.
constexpr Tile tile_fp8_d64_short{.head_dim = 64,
                                  .head_dim_v = 64,
                                  .groups = 1,
                                  .keys = 128,
                                  .q_stages = 1,
                                  .k_stages = 3,
                                  .v_stages = 2,
                                  .element_bytes = 1,
                                  .vt_stages = 3};
constexpr Tile tile_fp8_d64{.head_dim = 64,
                            .head_dim_v = 64,
                            .groups = 3,
                            .keys = 128,
                            .q_stages = 2,
                            .k_stages = 3,
                            .v_stages = 2,
                            .element_bytes = 1,
                            .vt_stages = 2};
constexpr Tile tile_fp8_d64_long{.head_dim = 64,
                                 .head_dim_v = 64,
                                 .groups = 3,
                                 .keys = 192,
                                 .q_stages = 2,
                                 .k_stages = 3,
                                 .v_stages = 2,
                                 .element_bytes = 1,
                                 .vt_stages = 2};
constexpr Tile tile_fp8_d128{.head_dim = 128,
                             .head_dim_v = 128,
                             .groups = 3,
                             .keys = 128,
                             .q_stages = 2,
                             .k_stages = 3,
                             .v_stages = 2,
                             .element_bytes = 1,
                             .vt_stages = 3,
                             .piece = 64};
constexpr Tile tile_fp8_d256{.head_dim = 256,
                             .head_dim_v = 256,
                             .groups = 2,
                             .keys = 128,
                             .q_stages = 1,
                             .k_stages = 2,
                             .v_stages = 2,
                             .element_bytes = 1,
                             .vt_stages = 1,
                             .piece = 64};
// Two blocks each load half of a K/V tile for both.
constexpr Tile tile_fp8_d128_heads = tile_fp8_d128.of_two_heads();
constexpr Tile tile_fp8_d256_pair = tile_fp8_d256.paired();
// With softcap, ALiBi and descales of blocks: sums in larger pieces, one after the other.
constexpr Tile tile_fp8_d256_score = [] {
  Tile tile = tile_fp8_d256;
  tile.piece = 128;
  return tile;
}();
// For weights of two values.
constexpr Tile tile_fp8_d64_precise{.head_dim = 64,
                                    .head_dim_v = 64,
                                    .groups = 3,
                                    .keys = 128,
                                    .q_stages = 2,
                                    .k_stages = 3,
                                    .v_stages = 2,
                                    .element_bytes = 1,
                                    .vt_stages = 2,
                                    .weight_parts = 2};
constexpr Tile tile_fp8_d128_precise{.head_dim = 128,
                                     .head_dim_v = 128,
                                     .groups = 2,
                                     .keys = 128,
                                     .q_stages = 2,
                                     .k_stages = 3,
                                     .v_stages = 2,
                                     .element_bytes = 1,
                                     .vt_stages = 2,
                                     .weight_parts = 2,
                                     .score_part = 64};
constexpr Tile tile_fp8_d256_precise{.head_dim = 256,
                                     .head_dim_v = 256,
                                     .groups = 2,
                                     .keys = 96,
                                     .q_stages = 1,
                                     .k_stages = 2,
                                     .v_stages = 2,
                                     .element_bytes = 1,
                                     .vt_stages = 2,
                                     .piece = 32,
                                     .weight_parts = 2,
                                     .score_part = 64,
                                     .score_part_keys = 48};
// For block masks.
constexpr Tile tile_fp8_d64_mask = tile_fp8_d64.finding();
constexpr Tile tile_fp8_d128_mask = tile_fp8_d128.finding();
constexpr Tile tile_fp8_d256_mask = tile_fp8_d256.finding();

}  // namespace attn::sm90
#endif
