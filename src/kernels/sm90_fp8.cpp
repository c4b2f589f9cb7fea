// The kernels fwd_sm90_fp8_*: q of e4m3, k and v both of e4m3 or both of e5m2 (_e5m2). They differ
// by the head dimensions they take.
#include "kernels/families.h"
#include "kernels/sm90_forward.h"

namespace attn {
namespace {

using sm90::with_fp8;

template <Text name, sm90::Tile tile>
Status make_recipe(const Problem& p, const DeviceInfo& device, Recipe* recipe) {
  ATTN_TRY(sm90::check(p, device, tile, with_fp8));
  if (sm90::counts_items(p, device, tile)) recipe->workspace = sizeof(unsigned);
  recipe->steps.push_back(sm90::forward_step<tile, with_fp8>(name_of<name>.text, p, device));
  return {};
}

constexpr Limits limits(attn_dtype kv_type, const sm90::Tile& tile) {
  return {.in_types = type_bit(ATTN_F8_E4M3FN),
          .kv_types = type_bit(kv_type),
          .out_types = float_types | type_bit(ATTN_F8_E4M3FN) | type_bit(ATTN_F8_E5M2),
          .flags = forward_flags | ATTN_OUT_SCALE,
          .features = forward_features | feature_descale_tensor | feature_descale_head,
          .head_dim = {.multiple = 16, .max = tile.head_dim},
          .head_dim_v = {.multiple = 16, .max = tile.head_dim_v}};
}

template <attn_dtype kv_type, Text variant, sm90::Tile tile>
constexpr Kernel row() {
  constexpr Text name =
      Text("fwd_sm90_fp8_").append(variant.text).append(kv_type == ATTN_F8_E5M2 ? "_e5m2" : "");
  return {.name = name_of<name>.text,
          .op = Op::forward,
          .backend = ATTN_BACKEND_CUDA,
          .limits = limits(kv_type, tile),
          .numerics = {.weights = ATTN_F8_E4M3FN,
                       .offset = 8,
                       .rows = 16,
                       .keys = tile.keys,
                       .last_tile_first = true,
                       .rounded_sums = true,
                       .sum_bits = 13,  // docs/numerics.md
                       .largest_score = sm90::largest_score(ATTN_F8_E4M3FN, with_fp8)},
          .recipe = recipe_of<make_recipe<name, tile>>};
}

template <attn_dtype kv_type>
constexpr std::array rows = {
    row<kv_type, "d64", sm90::tile_fp8_d64>(),
    row<kv_type, "d128", sm90::tile_fp8_d128>(),
};
constinit const std::array all_rows = joined(rows<ATTN_F8_E4M3FN>, rows<ATTN_F8_E5M2>);

}  // namespace

std::span<const Kernel> sm90_fp8_rows() {
  return all_rows;
}

}  // namespace attn
