// Every kernel decode_*, one line each: the one place that says what it is. The build makes its
// source file from this (write_stubs.cpp), and its host side its row of the catalog
// (src/kernels/decode.cpp). The order is the order of preference.
#ifndef ATTN_KERNELS_DECODE_VARIANTS_H
#define ATTN_KERNELS_DECODE_VARIANTS_H

#include "../shared/find_variant.h"
#include "../shared/types.h"
#include "decode_args.h"
#include "decode_tiles.h"

namespace attn::decode {

struct Variant {
  const char* name;
  int type;  // of the products' operands; also of q, k and v, except K and V of fp8 and own_types
  DecodeTile tile;
  bool copy_engine = false;  // which loads K and V; else cp.async does
  int local_bytes = 0;       // local memory that a thread may have, spilled registers included

  ATTN_HOST_DEVICE constexpr bool fp8() const { return tile.element_bytes == 1; }
  // The architectures it is compiled for: sm_90a has wgmma, sm_89 converts fp8.
  constexpr const char* architectures() const {
    if (tile.swapped) return "sm_90a";
    if (copy_engine) return "sm_90 compute_90";
    return fp8() ? "sm_89 sm_90 compute_89" : "sm_80 sm_90 compute_80";
  }
};

constexpr int bf16 = attn_element_bf16, f16 = attn_element_f16;
constexpr DecodeTile d64{.head_dim = 64, .head_dim_v = 64},
    d128{.head_dim = 128, .head_dim_v = 128}, d192_dv128{.head_dim = 192, .head_dim_v = 128},
    d256{.head_dim = 256, .head_dim_v = 256}, d320_dv256{.head_dim = 320, .head_dim_v = 256},
    d512{.head_dim = 512, .head_dim_v = 512};

// clang-format off: a kernel is a line
constexpr Variant variants[] = {
    {.name = "decode_sm90_bf16_d64_r8", .type = bf16, .tile = d64.of_swapped(8), .copy_engine = true},
    {.name = "decode_sm90_bf16_d64_r16", .type = bf16, .tile = d64.of_swapped(16), .copy_engine = true},
    {.name = "decode_sm90_bf16_d64_r32", .type = bf16, .tile = d64.of_swapped(32), .copy_engine = true},
    {.name = "decode_sm90_bf16_d64_r64", .type = bf16, .tile = d64.of_swapped(64).of_two_groups().of_any_rows(), .copy_engine = true},
    {.name = "decode_sm90_f16_d64_r8", .type = f16, .tile = d64.of_swapped(8), .copy_engine = true},
    {.name = "decode_sm90_f16_d64_r16", .type = f16, .tile = d64.of_swapped(16), .copy_engine = true},
    {.name = "decode_sm90_f16_d64_r32", .type = f16, .tile = d64.of_swapped(32), .copy_engine = true},
    {.name = "decode_sm90_f16_d64_r64", .type = f16, .tile = d64.of_swapped(64).of_two_groups().of_any_rows(), .copy_engine = true},
    {.name = "decode_sm90_fp8_d64_r8", .type = f16, .tile = d64.of_fp8().of_swapped(8), .copy_engine = true},
    {.name = "decode_sm90_fp8_d64_r16", .type = f16, .tile = d64.of_fp8().of_swapped(16), .copy_engine = true},
    {.name = "decode_sm90_fp8_d64_r32", .type = f16, .tile = d64.of_fp8().of_swapped(32), .copy_engine = true},
    {.name = "decode_sm90_fp8_d64_r64", .type = f16, .tile = d64.of_fp8().of_swapped(64).of_two_groups().of_any_rows(), .copy_engine = true},
    {.name = "decode_sm90_bf16_d128_r8", .type = bf16, .tile = d128.of_swapped(8), .copy_engine = true},
    {.name = "decode_sm90_bf16_d128_r16", .type = bf16, .tile = d128.of_swapped(16), .copy_engine = true},
    {.name = "decode_sm90_bf16_d128_r32", .type = bf16, .tile = d128.of_swapped(32), .copy_engine = true},
    {.name = "decode_sm90_bf16_d128_r64", .type = bf16, .tile = d128.of_swapped(64).of_two_groups().of_any_rows(), .copy_engine = true, .local_bytes = 8},
    {.name = "decode_sm90_f16_d128_r8", .type = f16, .tile = d128.of_swapped(8), .copy_engine = true},
    {.name = "decode_sm90_f16_d128_r16", .type = f16, .tile = d128.of_swapped(16), .copy_engine = true},
    {.name = "decode_sm90_f16_d128_r32", .type = f16, .tile = d128.of_swapped(32), .copy_engine = true},
    {.name = "decode_sm90_f16_d128_r64", .type = f16, .tile = d128.of_swapped(64).of_two_groups().of_any_rows(), .copy_engine = true, .local_bytes = 8},
    {.name = "decode_sm90_fp8_d128_r8", .type = f16, .tile = d128.of_fp8().of_swapped(8), .copy_engine = true},
    {.name = "decode_sm90_fp8_d128_r16", .type = f16, .tile = d128.of_fp8().of_swapped(16), .copy_engine = true},
    {.name = "decode_sm90_fp8_d128_r32", .type = f16, .tile = d128.of_fp8().of_swapped(32), .copy_engine = true},
    {.name = "decode_sm90_fp8_d128_r64", .type = f16, .tile = d128.of_fp8().of_swapped(64).of_two_groups().of_any_rows(), .copy_engine = true, .local_bytes = 72},
    {.name = "decode_sm90_bf16_d192_dv128_r8", .type = bf16, .tile = d192_dv128.of_swapped(8), .copy_engine = true},
    {.name = "decode_sm90_bf16_d192_dv128_r16", .type = bf16, .tile = d192_dv128.of_swapped(16), .copy_engine = true},
    {.name = "decode_sm90_bf16_d192_dv128_r32", .type = bf16, .tile = d192_dv128.of_swapped(32), .copy_engine = true},
    {.name = "decode_sm90_bf16_d192_dv128_r64", .type = bf16, .tile = d192_dv128.of_swapped(64).of_any_rows(), .copy_engine = true},
    {.name = "decode_sm90_f16_d192_dv128_r8", .type = f16, .tile = d192_dv128.of_swapped(8), .copy_engine = true},
    {.name = "decode_sm90_f16_d192_dv128_r16", .type = f16, .tile = d192_dv128.of_swapped(16), .copy_engine = true},
    {.name = "decode_sm90_f16_d192_dv128_r32", .type = f16, .tile = d192_dv128.of_swapped(32), .copy_engine = true},
    {.name = "decode_sm90_f16_d192_dv128_r64", .type = f16, .tile = d192_dv128.of_swapped(64).of_any_rows(), .copy_engine = true},
    {.name = "decode_sm90_fp8_d192_dv128_r8", .type = f16, .tile = d192_dv128.of_fp8().of_swapped(8), .copy_engine = true},
    {.name = "decode_sm90_fp8_d192_dv128_r16", .type = f16, .tile = d192_dv128.of_fp8().of_swapped(16), .copy_engine = true},
    {.name = "decode_sm90_fp8_d192_dv128_r32", .type = f16, .tile = d192_dv128.of_fp8().of_swapped(32), .copy_engine = true},
    {.name = "decode_sm90_fp8_d192_dv128_r64", .type = f16, .tile = d192_dv128.of_fp8().of_swapped(64).of_any_rows(), .copy_engine = true},
    {.name = "decode_sm90_bf16_d256_r8", .type = bf16, .tile = d256.of_swapped(8), .copy_engine = true},
    {.name = "decode_sm90_bf16_d256_r16", .type = bf16, .tile = d256.of_swapped(16), .copy_engine = true},
    {.name = "decode_sm90_bf16_d256_r32", .type = bf16, .tile = d256.of_swapped(32), .copy_engine = true},
    {.name = "decode_sm90_bf16_d256_r64", .type = bf16, .tile = d256.of_swapped(64).of_any_rows(), .copy_engine = true, .local_bytes = 16},
    {.name = "decode_sm90_f16_d256_r8", .type = f16, .tile = d256.of_swapped(8), .copy_engine = true},
    {.name = "decode_sm90_f16_d256_r16", .type = f16, .tile = d256.of_swapped(16), .copy_engine = true},
    {.name = "decode_sm90_f16_d256_r32", .type = f16, .tile = d256.of_swapped(32), .copy_engine = true},
    {.name = "decode_sm90_f16_d256_r64", .type = f16, .tile = d256.of_swapped(64).of_any_rows(), .copy_engine = true, .local_bytes = 16},
    {.name = "decode_sm90_fp8_d256_r8", .type = f16, .tile = d256.of_fp8().of_swapped(8), .copy_engine = true},
    {.name = "decode_sm90_fp8_d256_r16", .type = f16, .tile = d256.of_fp8().of_swapped(16), .copy_engine = true},
    {.name = "decode_sm90_fp8_d256_r32", .type = f16, .tile = d256.of_fp8().of_swapped(32).of_any_rows(), .copy_engine = true},
    {.name = "decode_sm90_bf16_d320_dv256_r8", .type = bf16, .tile = d320_dv256.of_swapped(8), .copy_engine = true},
    {.name = "decode_sm90_bf16_d320_dv256_r16", .type = bf16, .tile = d320_dv256.of_swapped(16), .copy_engine = true, .local_bytes = 48},
    {.name = "decode_sm90_bf16_d320_dv256_r32", .type = bf16, .tile = d320_dv256.of_swapped(32), .copy_engine = true},
    {.name = "decode_sm90_bf16_d320_dv256_r64", .type = bf16, .tile = d320_dv256.of_swapped(64).of_any_rows(), .copy_engine = true},
    {.name = "decode_sm90_f16_d320_dv256_r8", .type = f16, .tile = d320_dv256.of_swapped(8), .copy_engine = true},
    {.name = "decode_sm90_f16_d320_dv256_r16", .type = f16, .tile = d320_dv256.of_swapped(16), .copy_engine = true, .local_bytes = 48},
    {.name = "decode_sm90_f16_d320_dv256_r32", .type = f16, .tile = d320_dv256.of_swapped(32), .copy_engine = true},
    {.name = "decode_sm90_f16_d320_dv256_r64", .type = f16, .tile = d320_dv256.of_swapped(64).of_any_rows(), .copy_engine = true},
    {.name = "decode_sm90_fp8_d320_dv256_r8", .type = f16, .tile = d320_dv256.of_fp8().of_swapped(8), .copy_engine = true},
    {.name = "decode_sm90_fp8_d320_dv256_r16", .type = f16, .tile = d320_dv256.of_fp8().of_swapped(16), .copy_engine = true},
    {.name = "decode_sm90_fp8_d320_dv256_r32", .type = f16, .tile = d320_dv256.of_fp8().of_swapped(32).of_any_rows(), .copy_engine = true},
    {.name = "decode_sm90_bf16_d512_r8", .type = bf16, .tile = d512.of_swapped(8), .copy_engine = true},
    {.name = "decode_sm90_bf16_d512_r16", .type = bf16, .tile = d512.of_swapped(16), .copy_engine = true},
    {.name = "decode_sm90_bf16_d512_r32", .type = bf16, .tile = d512.of_swapped(32).of_any_rows(), .copy_engine = true},
    {.name = "decode_sm90_f16_d512_r8", .type = f16, .tile = d512.of_swapped(8), .copy_engine = true},
    {.name = "decode_sm90_f16_d512_r16", .type = f16, .tile = d512.of_swapped(16), .copy_engine = true},
    {.name = "decode_sm90_f16_d512_r32", .type = f16, .tile = d512.of_swapped(32).of_any_rows(), .copy_engine = true},
    {.name = "decode_sm90_fp8_d512_r8", .type = f16, .tile = d512.of_fp8().of_swapped(8), .copy_engine = true},
    {.name = "decode_sm90_fp8_d512_r16", .type = f16, .tile = d512.of_fp8().of_swapped(16), .copy_engine = true},
    {.name = "decode_sm80_bf16_d64", .type = bf16, .tile = d64.of_any_rows()},
    {.name = "decode_sm80_f16_d64", .type = f16, .tile = d64.of_any_rows()},
    {.name = "decode_sm89_fp8_d64", .type = f16, .tile = d64.of_fp8().of_any_rows()},
    {.name = "decode_sm80_bf16_d128", .type = bf16, .tile = d128.of_any_rows()},
    {.name = "decode_sm80_f16_d128", .type = f16, .tile = d128.of_any_rows()},
    {.name = "decode_sm89_fp8_d128", .type = f16, .tile = d128.of_fp8().of_any_rows(), .local_bytes = 64},
    {.name = "decode_sm80_bf16_d192_dv128", .type = bf16, .tile = d192_dv128.of_any_rows()},
    {.name = "decode_sm80_f16_d192_dv128", .type = f16, .tile = d192_dv128.of_any_rows()},
    {.name = "decode_sm89_fp8_d192_dv128", .type = f16, .tile = d192_dv128.of_fp8().of_any_rows()},
    {.name = "decode_sm80_bf16_d256", .type = bf16, .tile = d256.of_any_rows()},
    {.name = "decode_sm80_f16_d256", .type = f16, .tile = d256.of_any_rows()},
    {.name = "decode_sm89_fp8_d256", .type = f16, .tile = d256.of_fp8().of_any_rows(), .local_bytes = 64},
    {.name = "decode_sm80_bf16_d320_dv256", .type = bf16, .tile = d320_dv256.of_any_rows()},
    {.name = "decode_sm80_f16_d320_dv256", .type = f16, .tile = d320_dv256.of_any_rows()},
    {.name = "decode_sm80_bf16_d512", .type = bf16, .tile = d512.with_rows(8).of_any_rows()},
    {.name = "decode_sm80_f16_d512", .type = f16, .tile = d512.with_rows(8).of_any_rows()},
    {.name = "decode_sm90_blocks_d64", .type = f16, .tile = d64.of_own_types().with_rows(8), .copy_engine = true},
    {.name = "decode_sm90_blocks_d128", .type = f16, .tile = d128.of_own_types().with_rows(8), .copy_engine = true},
    {.name = "decode_sm90_blocks_d256", .type = f16, .tile = d256.of_own_types().with_rows(8), .copy_engine = true},
    {.name = "decode_sm90_blocks_d64_r16", .type = f16, .tile = d64.of_own_types(), .copy_engine = true},
    {.name = "decode_sm90_blocks_d128_r16", .type = f16, .tile = d128.of_own_types(), .copy_engine = true},
    {.name = "decode_sm90_blocks_d256_r16", .type = f16, .tile = d256.of_own_types(), .copy_engine = true},
};
// clang-format on

// swapped.cuh adds V in pieces of 64 columns.
constexpr bool has_whole_pieces() {
  for (const Variant& variant : variants)
    if (variant.tile.swapped && variant.tile.head_dim_v % 64 != 0) return false;
  return true;
}
static_assert(has_whole_pieces());

}  // namespace attn::decode
#endif
