// The tiles of fwd_sm90_*: what a thread block works on at a time, its stages and its warpgroups.
#ifndef ATTN_KERNELS_FORWARD_SM90_TILES_H
#define ATTN_KERNELS_FORWARD_SM90_TILES_H

#include "../shared/mask.h"  // ATTN_HOST_DEVICE

namespace attn::sm90 {

// A tile of keys or queries is made of panels, whose rows have 128 bytes: 64 columns of 16 bits,
// 128 of fp8.
ATTN_HOST_DEVICE constexpr int panel_columns(int element_bytes) {
  return 128 / element_bytes;
}
ATTN_HOST_DEVICE constexpr int panels(int columns, int element_bytes = 2) {
  return (columns + panel_columns(element_bytes) - 1) / panel_columns(element_bytes);
}

constexpr int max_groups = 3;
constexpr int max_stages = 3;
constexpr int item_slots = 8;        // items described but not yet computed
constexpr int tile_slots = 8;        // the same for tiles of keys; more than max_stages
constexpr int control_bytes = 3072;  // barriers, items and tiles, before Q, K and V

struct Tile {
  int head_dim,
      head_dim_v;  // columns of the products; a smaller head_dim is padded with zeros
  int groups;      // consumer warpgroups, with 64 queries each, but see halves
  int keys;        // keys of a K/V tile
  int q_stages, k_stages, v_stages;  // tiles in shared memory
  bool finds =
      false;  // the producer warpgroup searches a block mask for tiles, which takes registers
  bool adds = false;        // the bias of a tile is in shared memory too
  int blocks = 1;           // blocks of a cluster, which share K and V: neighbouring queries
  bool heads = false;       // true: the same queries of neighbouring heads instead
  int q_kept = 0;           // panels of Q that warpgroups keep in registers
  bool alternates = false;  // halves: each finds the scores of every second tile of keys, for both
  bool halves = false;    // both warpgroups have the same queries, and sum half of V's columns each
  int element_bytes = 2;  // of q, k and v
  int vt_stages = 0;      // fp8: tiles of V^T in shared memory, transposed from tiles of V
  int piece = 0;          // fp8: the sums are computed for this many columns at once; 0: all
  int weight_parts = 1;   // fp8: a weight is the sum of this many e4m3 values
  int score_part = 0;     // fp8: the unit sums score products over this many columns; 0: all
  int score_part_keys = 0;  // fp8: for this many keys at once, after the first part; 0: all

  constexpr bool operator==(const Tile&) const = default;

  // The same with a search of block masks.
  ATTN_HOST_DEVICE constexpr Tile finding() const {
    Tile tile = *this;
    tile.finds = true;
    return tile;
  }
  // The same with so many panels of Q in registers.
  ATTN_HOST_DEVICE constexpr Tile keeping(int panels) const {
    Tile tile = *this;
    tile.q_kept = panels;
    return tile;
  }
  // The same with scores that each warpgroup finds itself.
  ATTN_HOST_DEVICE constexpr Tile by_itself() const {
    Tile tile = *this;
    tile.alternates = false;
    return tile;
  }
  // The same with a bias.
  ATTN_HOST_DEVICE constexpr Tile adding() const {
    Tile tile = *this;
    tile.adds = true;
    return tile;
  }
  // The same in clusters of two blocks.
  ATTN_HOST_DEVICE constexpr Tile paired() const {
    Tile tile = *this;
    tile.blocks = 2;
    return tile;
  }
  ATTN_HOST_DEVICE constexpr Tile of_two_heads() const {
    Tile tile = paired();
    tile.heads = true;
    return tile;
  }
  // Consumer warpgroups that differ in their queries.
  ATTN_HOST_DEVICE constexpr int row_groups() const { return halves ? 1 : groups; }
  // Columns of V that a consumer warpgroup sums.
  ATTN_HOST_DEVICE constexpr int sum_columns() const {
    return halves ? head_dim_v / 2 : head_dim_v;
  }
  ATTN_HOST_DEVICE constexpr int rows() const { return 64 * row_groups(); }
  // Queries and heads of an item, which all blocks of a cluster take together, and the keys of a
  // K/V tile that each block loads.
  ATTN_HOST_DEVICE constexpr int item_rows() const { return rows() * (heads ? 1 : blocks); }
  ATTN_HOST_DEVICE constexpr int item_heads() const { return heads ? blocks : 1; }
  ATTN_HOST_DEVICE constexpr int loaded_keys() const { return keys / blocks; }
  ATTN_HOST_DEVICE constexpr int threads() const { return 128 * (groups + 1); }
  // Registers of the producer and of the consumer warpgroups after setmaxnreg; together they are
  // what the warpgroups start with. A single consumer warpgroup has enough from the start.
  ATTN_HOST_DEVICE constexpr int load_registers() const {
    return finds ? 56 : groups == 2 ? 40 : 32;
  }
  ATTN_HOST_DEVICE constexpr int compute_registers() const {
    return (groups == 2 ? 232 : 160) - (finds ? 8 : 0);
  }

  // Parts of Q, each with its own barriers. With one stage, each consumer warpgroup gets its new
  // queries as soon as it is done with the previous item.
  ATTN_HOST_DEVICE constexpr int q_parts() const { return q_stages == 1 ? row_groups() : 1; }
  ATTN_HOST_DEVICE constexpr int q_part_rows() const { return rows() / q_parts(); }
  ATTN_HOST_DEVICE constexpr int q_bytes() const {
    return rows() * panels(head_dim, element_bytes) * 128;
  }
  ATTN_HOST_DEVICE constexpr int k_bytes() const {
    return keys * panels(head_dim, element_bytes) * 128;
  }
  ATTN_HOST_DEVICE constexpr int v_bytes() const {
    return keys * panels(head_dim_v, element_bytes) * 128;
  }
  // fp8: columns of V for which the sums of a tile are found at once.
  ATTN_HOST_DEVICE constexpr int piece_columns() const { return piece > 0 ? piece : head_dim_v; }
  ATTN_HOST_DEVICE constexpr int score_columns() const {
    return score_part > 0 ? score_part : head_dim;
  }
  ATTN_HOST_DEVICE constexpr int score_keys() const {
    return score_part_keys > 0 ? score_part_keys : keys;
  }
  // V^T is made of panels of 128 keys, with a row for each column of V and eight of ones.
  ATTN_HOST_DEVICE constexpr int vt_panel() const { return (head_dim_v + 8) * 128; }
  ATTN_HOST_DEVICE constexpr int vt_bytes() const { return panels(keys, 1) * vt_panel(); }
  ATTN_HOST_DEVICE constexpr int q_offset() const { return control_bytes; }
  ATTN_HOST_DEVICE constexpr int k_offset() const { return q_offset() + q_stages * q_bytes(); }
  ATTN_HOST_DEVICE constexpr int v_offset() const { return k_offset() + k_stages * k_bytes(); }
  ATTN_HOST_DEVICE constexpr int bias_offset() const { return v_offset() + v_stages * v_bytes(); }
  ATTN_HOST_DEVICE constexpr int vt_offset() const { return bias_offset(); }  // not both
  // alternates: places of four tiles' weights and of two tiles' states of the softmax.
  ATTN_HOST_DEVICE constexpr int handed_offset() const { return bias_offset(); }
  ATTN_HOST_DEVICE constexpr int handed_bytes() const {
    return alternates ? 64 * 128 + 2 * 128 * 16 : 0;
  }
  ATTN_HOST_DEVICE constexpr int shared_bytes() const {
    return bias_offset() + 2 * handed_bytes() + (adds ? 64 * groups * keys * 4 : 0) +
           vt_stages * vt_bytes();
  }
};

// For problems so small that larger tiles would leave multiprocessors idle.
constexpr Tile tile_d64_short{.head_dim = 64,
                              .head_dim_v = 64,
                              .groups = 1,
                              .keys = 128,
                              .q_stages = 1,
                              .k_stages = 3,
                              .v_stages = 3};
constexpr Tile tile_d64{.head_dim = 64,
                        .head_dim_v = 64,
                        .groups = 3,
                        .keys = 128,
                        .q_stages = 2,
                        .k_stages = 3,
                        .v_stages = 3};
constexpr Tile tile_d96{.head_dim = 96,
                        .head_dim_v = 96,
                        .groups = 2,
                        .keys = 128,
                        .q_stages = 2,
                        .k_stages = 3,
                        .v_stages = 2};
constexpr Tile tile_d128{.head_dim = 128,
                         .head_dim_v = 128,
                         .groups = 2,
                         .keys = 128,
                         .q_stages = 2,
                         .k_stages = 3,
                         .v_stages = 2};
// For long sequences: larger tiles of keys leave room for one stage of Q, and waste more at the
// ends.
constexpr Tile tile_d128_long{.head_dim = 128,
                              .head_dim_v = 128,
                              .groups = 2,
                              .keys = 176,
                              .q_stages = 1,
                              .k_stages = 2,
                              .v_stages = 2};
constexpr Tile tile_d192_dv128{.head_dim = 192,
                               .head_dim_v = 128,
                               .groups = 2,
                               .keys = 128,
                               .q_stages = 1,
                               .k_stages = 2,
                               .v_stages = 2};
constexpr Tile tile_d192{.head_dim = 192,
                         .head_dim_v = 192,
                         .groups = 2,
                         .keys = 112,
                         .q_stages = 1,
                         .k_stages = 2,
                         .v_stages = 2};
constexpr Tile tile_d256{.head_dim = 256,
                         .head_dim_v = 256,
                         .groups = 2,
                         .keys = 80,
                         .q_stages = 1,
                         .k_stages = 2,
                         .v_stages = 2};
constexpr Tile tile_d320_dv256{.head_dim = 320,
                               .head_dim_v = 256,
                               .groups = 2,
                               .keys = 64,
                               .q_stages = 1,
                               .k_stages = 2,
                               .v_stages = 2};
// Sums of 512 columns are the registers of two warpgroups, which both find the scores of the same
// queries: exchanging weights would need places that keys have.
constexpr Tile tile_d512{.head_dim = 512,
                         .head_dim_v = 512,
                         .groups = 2,
                         .keys = 32,
                         .q_stages = 1,
                         .k_stages = 2,
                         .v_stages = 2,
                         .q_kept = 3,
                         .alternates = true,
                         .halves = true};
// Two blocks each load half of a K/V tile for both, for long sequences without a causal mask.
constexpr Tile tile_d128_pair = tile_d128_long.paired();
constexpr Tile tile_d256_pair = tile_d256.paired();
// Two blocks have two query heads that share K and V, for long sequences.
constexpr Tile tile_d128_heads = tile_d128_long.of_two_heads();
constexpr Tile tile_d512_heads = tile_d512.of_two_heads();
// For block masks: keys are cut as without a mask, so that a mask that is all FULL gives the same
// bits.
constexpr Tile tile_d64_mask{.head_dim = 64,
                             .head_dim_v = 64,
                             .groups = 2,
                             .keys = 128,
                             .q_stages = 2,
                             .k_stages = 3,
                             .v_stages = 3,
                             .finds = true};
constexpr Tile tile_d128_mask = tile_d128.finding();
constexpr Tile tile_d256_mask = tile_d256.finding();
constexpr Tile tile_d320_dv256_mask = tile_d320_dv256.finding();
constexpr Tile tile_d512_mask = tile_d512.finding().keeping(2).by_itself();
// For softcap and ALiBi, which need registers, so there are fewer keys.
constexpr Tile tile_d64_score{.head_dim = 64,
                              .head_dim_v = 64,
                              .groups = 3,
                              .keys = 80,
                              .q_stages = 2,
                              .k_stages = 3,
                              .v_stages = 3};
constexpr Tile tile_d128_score{.head_dim = 128,
                               .head_dim_v = 128,
                               .groups = 2,
                               .keys = 96,
                               .q_stages = 2,
                               .k_stages = 3,
                               .v_stages = 3};
constexpr Tile tile_d256_score{.head_dim = 256,
                               .head_dim_v = 256,
                               .groups = 2,
                               .keys = 64,
                               .q_stages = 1,
                               .k_stages = 2,
                               .v_stages = 2};
// For a bias, which needs shared memory too.
constexpr Tile tile_d64_bias{.head_dim = 64,
                             .head_dim_v = 64,
                             .groups = 3,
                             .keys = 80,
                             .q_stages = 2,
                             .k_stages = 3,
                             .v_stages = 3,
                             .adds = true};
constexpr Tile tile_d128_bias{.head_dim = 128,
                              .head_dim_v = 128,
                              .groups = 2,
                              .keys = 96,
                              .q_stages = 2,
                              .k_stages = 2,
                              .v_stages = 2,
                              .adds = true};
constexpr Tile tile_d256_bias{.head_dim = 256,
                              .head_dim_v = 256,
                              .groups = 2,
                              .keys = 64,
                              .q_stages = 1,
                              .k_stages = 2,
                              .v_stages = 2,
                              .adds = true};
constexpr Tile tile_d320_dv256_bias{.head_dim = 320,
                                    .head_dim_v = 256,
                                    .groups = 2,
                                    .keys = 32,
                                    .q_stages = 1,
                                    .k_stages = 2,
                                    .v_stages = 2,
                                    .adds = true};
constexpr Tile tile_d512_bias = tile_d512.adding().keeping(2).by_itself();

}  // namespace attn::sm90
#endif
