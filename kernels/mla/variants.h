// Every kernel mla_*, one line each: decode of latent caches, where V is the first columns of K.
// The build makes its source file from this (write_stubs.cpp), and src/kernels/mla.cpp its row of
// the catalog. The order is the order of preference: by_rows_variants, few_variants,
// many_variants.
#ifndef ATTN_KERNELS_MLA_VARIANTS_H
#define ATTN_KERNELS_MLA_VARIANTS_H

#include "../decode/decode_args.h"
#include "../decode/decode_tiles.h"
#include "../shared/find_variant.h"
#include "../shared/types.h"

namespace attn::mla {

using decode::DecodeTile;

constexpr int rope = 64;  // columns of K after the latent ones: a panel in shared memory

// How a kernel reads the rows of its units.
enum class Rows {
  boxes,       // of the copy engine
  one_by_one,  // of pages of any size, as the following
  mla_656,     // of codes: 512 of e4m3, a float32 scale for each 128 of them, 64 columns of bf16
  e4m3,        // of codes alone, f8_e4m3fn or f8_e4m3fn_token
};
ATTN_HOST_DEVICE constexpr bool has_codes(Rows rows) {
  return rows == Rows::mla_656 || rows == Rows::e4m3;
}

struct Variant {
  const char* name;
  int type;  // of q, k and the products
  // For decode's units, loads and partial results "K" is the rope columns and "V" the latent ones,
  // so that a unit is loaded once.
  DecodeTile tile;
  int local_bytes = 0;
  Rows rows = Rows::boxes;

  ATTN_HOST_DEVICE constexpr int latent() const { return tile.head_dim_v; }
  ATTN_HOST_DEVICE constexpr int head_dim() const { return latent() + rope; }
  constexpr const char* architectures() const { return "sm_90a"; }
};

// Rows of the cache as by_rows.cuh has them in shared memory, where it reads 8 of them at once
// from different banks.
struct RowsOfCache {
  int bytes, pitch;
  int weights;  // tiles of them
};
ATTN_HOST_DEVICE constexpr RowsOfCache rows_of_cache(Rows rows) {
  return rows == Rows::mla_656 ? RowsOfCache{656, 656, 4}
         : rows == Rows::e4m3  ? RowsOfCache{576, 592, 1}
                               : RowsOfCache{1152, 1168, 1};
}
constexpr int by_rows_stages = 2;
ATTN_HOST_DEVICE constexpr int by_rows_control(Rows by) {
  return by == Rows::e4m3 ? 2 << 10 : 1 << 10;
}
ATTN_HOST_DEVICE constexpr int by_rows_warpgroups(int rows) {  // that compute
  return rows > 16 ? 2 : 1;
}
// Warps that load: for rows in any order it takes one of them 70 clocks a row to ask. Of two blocks
// no more have registers.
ATTN_HOST_DEVICE constexpr int by_rows_loaders(int rows, Rows by) {
  return rows > 16 || !has_codes(by) ? 4 : 2;
}
ATTN_HOST_DEVICE constexpr int by_rows_threads(int rows, Rows by) {
  return 128 * by_rows_warpgroups(rows) + 32 * by_rows_loaders(rows, by);
}
// Of two warpgroups, which take what the third one gives back.
constexpr int by_rows_load_registers = 24, by_rows_compute_registers = 240;
ATTN_HOST_DEVICE constexpr int by_rows_blocks(int rows, Rows by) {  // of a multiprocessor
  return rows > 16 || !has_codes(by) ? 1 : 2;
}
ATTN_HOST_DEVICE constexpr int by_rows_shared_bytes(int rows, Rows by) {
  return by_rows_control(by) + (9 + rows_of_cache(by).weights) * rows * 128 +
         by_rows_stages * decode::unit_keys * rows_of_cache(by).pitch;
}

constexpr int bf16 = attn_element_bf16, f16 = attn_element_f16;
constexpr DecodeTile d576{.head_dim = rope, .head_dim_v = 512};
// clang-format off: a kernel is a line
constexpr Variant few_variants[] = {
    {.name = "mla_sm90_bf16_d576_r8", .type = bf16, .tile = d576.of_swapped(8)},
    {.name = "mla_sm90_bf16_d576_r16", .type = bf16, .tile = d576.of_swapped(16)},
    {.name = "mla_sm90_bf16_d576_r32", .type = bf16, .tile = d576.of_swapped(32).of_any_rows()},
    {.name = "mla_sm90_f16_d576_r8", .type = f16, .tile = d576.of_swapped(8)},
    {.name = "mla_sm90_f16_d576_r16", .type = f16, .tile = d576.of_swapped(16)},
    {.name = "mla_sm90_f16_d576_r32", .type = f16, .tile = d576.of_swapped(32).of_any_rows()},
};
constexpr Variant many_variants[] = {
    {.name = "mla_sm90_bf16_d576_r64", .type = bf16, .tile = d576.with_rows(64).of_any_rows()},
    {.name = "mla_sm90_f16_d576_r64", .type = f16, .tile = d576.with_rows(64).of_any_rows()},
    {.name = "mla_sm90_bf16_d576_r64_pages", .type = bf16, .tile = d576.with_rows(64).of_any_rows(), .rows = Rows::one_by_one},
    {.name = "mla_sm90_f16_d576_r64_pages", .type = f16, .tile = d576.with_rows(64).of_any_rows(), .rows = Rows::one_by_one},
};
constexpr Variant by_rows_variants[] = {
    {.name = "mla_sm90_bf16_d576_r8_656", .type = bf16, .tile = d576.with_rows(8), .rows = Rows::mla_656},
    {.name = "mla_sm90_bf16_d576_r16_656", .type = bf16, .tile = d576.with_rows(16), .rows = Rows::mla_656},
    {.name = "mla_sm90_bf16_d576_r64_656", .type = bf16, .tile = d576.with_rows(64).of_any_rows(), .rows = Rows::mla_656},
    {.name = "mla_sm90_bf16_d576_r8_e4m3", .type = bf16, .tile = d576.with_rows(8), .rows = Rows::e4m3},
    {.name = "mla_sm90_bf16_d576_r16_e4m3", .type = bf16, .tile = d576.with_rows(16), .rows = Rows::e4m3},
    {.name = "mla_sm90_bf16_d576_r64_e4m3", .type = bf16, .tile = d576.with_rows(64).of_any_rows(), .rows = Rows::e4m3},
    {.name = "mla_sm90_bf16_d576_r8_pages", .type = bf16, .tile = d576.with_rows(8), .rows = Rows::one_by_one},
    {.name = "mla_sm90_bf16_d576_r16_pages", .type = bf16, .tile = d576.with_rows(16), .rows = Rows::one_by_one},
    {.name = "mla_sm90_f16_d576_r8_pages", .type = f16, .tile = d576.with_rows(8), .rows = Rows::one_by_one},
    {.name = "mla_sm90_f16_d576_r16_pages", .type = f16, .tile = d576.with_rows(16), .rows = Rows::one_by_one},
};
// clang-format on

}  // namespace attn::mla
#endif
