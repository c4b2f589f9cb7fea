// The kernels decode_*: few queries against many keys, of 16 bits as the queries or of fp8. They
// differ by the head dimensions and rows they take. decode_sm90_*_r8 to _r64 are for wgmma; _r64
// take more rows in tiles of 64. decode_sm80_* and decode_sm89_* are for all other devices.
// decode_sm90_blocks_*: K and V of each segment in ggml's blocks, i8, i4, f8_e4m3fn_token, nvfp4 or
// q's type; up to 8 rows, _r16 up to 16.
#include "kernels/decode.h"

#include "kernels/families.h"
#include "kernels/preference.h"

namespace attn {
namespace {

template <size_t i>
Status make_recipe(const Problem& p, const DeviceInfo& device, Recipe* recipe) {
  using namespace decode;
  constexpr const Variant& variant = variants[i];
  constexpr DecodeTile tile = variant.tile;
  const bool any_rows = tile.tiled && alone(p, tile);
  const int64_t max_rows_here = any_rows ? INT32_MAX : tile.rows();
  if (p.group() * p.seqlen_q > max_rows_here)
    return unsupported("heads_q / heads_kv * seqlen_q is ", p.group(), " * ", p.seqlen_q,
                       "; accepted: up to ", max_rows_here);
  const int64_t rows = rows_of<false>(p, tile);
  ATTN_TRY(check(p, rows, device, tile, variant.copy_engine));
  recipe->passed_over = prefer_other(p, device, variant);
  add_decode<tile, variant.copy_engine>(variant.name, p, device, recipe);
  return {};
}

constexpr Limits limits(const decode::Variant& variant) {
  const decode::DecodeTile& tile = variant.tile;
  const bool fp8 = variant.fp8(), tiled = tile.tiled;
  const uint32_t type = type_bit(attn_dtype(variant.type)),
                 both = type_bit(ATTN_F16) | type_bit(ATTN_BF16);
  Limits limits = {
      .in_types = fp8 || tile.own_types ? both : type,
      .kv_types = fp8              ? fp8_of_cuda
                  : tile.own_types ? both | ggml_types | device_scale_arrays
                                   : type,
      .out_types = float_types,
      .flags = forward_flags | ATTN_ALIBI | ATTN_SPLIT_INVARIANT |
               (tile.takes_positions() ? uint32_t{ATTN_QUERY_POSITIONS} : 0u),
      .features =
          forward_features | feature_segments | feature_paged_kv | feature_softcap | feature_tree |
          (tile.takes_positions() ? feature_key_positions : 0u) |
          (tile.takes_kv_begin() ? feature_kv_begin : 0u) |
          (tile.swapped ? feature_fixed_split : 0u) | (fp8 ? kv_descale_features : 0u) |
          (fp8 && !variant.copy_engine ? feature_shared_descales : 0u) |
          (tile.own_types ? feature_mixed_kv_types | feature_descale_tensor | feature_descale_head
                          : 0u),
      .head_dim = {.multiple = fp8 ? 16 : 8, .max = tile.head_dim},
      .head_dim_v = {.multiple = fp8 ? 16 : 8, .max = tile.head_dim_v},
      .seqlen_q = {.max = tiled ? INT32_MAX : tile.rows()},
      .group = {.max = tiled ? INT32_MAX : tile.rows()}};
  if (tile.own_types) {
    limits.floats_as_q = true;
    limits.head_dim.multiple = tile.head_dim;
    limits.head_dim_v.multiple = tile.head_dim_v;
  }
  return limits;
}

constinit const std::array all_rows =
    rows_of_variants<std::size(decode::variants)>([]<size_t i>() -> Kernel {
      constexpr const decode::Variant& variant = decode::variants[i];
      return {.name = variant.name,
              .op = Op::forward,
              .backend = ATTN_BACKEND_CUDA,
              .limits = limits(variant),
              .numerics = {.weights = variant.tile.own_types ? ATTN_BF16 : attn_dtype(variant.type),
                           .lag = variant.tile.swapped     ? 8.
                                  : variant.tile.own_types ? decode::own_slack
                                                           : 0.,
                           .keys = variant.tile.swapped ? decode::unit_keys : decode::warp_keys,
                           .scaled_weights = variant.tile.own_types},
              .recipe = recipe_of<make_recipe<i>>};
    });

}  // namespace

std::span<const Kernel> decode_forward_rows() {
  return all_rows;
}

}  // namespace attn
