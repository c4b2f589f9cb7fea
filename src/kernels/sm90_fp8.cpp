// The kernels fwd_sm90_fp8_*: q of e4m3, k and v both of e4m3 or both of e5m2 (_e5m2). They differ
// by the head dimensions they take. _score: with softcap, ALiBi and descales of blocks of keys and
// of several segments; _mask: with a block mask; _precise: with weights of two e4m3 values; _short,
// _long, _pair: other tiles, for few queries and long sequences; _heads: for two query heads of one
// K/V head.
#include "kernels/families.h"
#include "kernels/forward_sm90/fp8_variants.h"
#include "kernels/preference.h"
#include "kernels/sm90_forward.h"

namespace attn {
namespace {

template <size_t i>
Status make_recipe(const Problem& p, const DeviceInfo& device, Recipe* recipe) {
  constexpr const sm90::Variant& variant = sm90::fp8_variants[i];
  recipe->passed_over = prefer_other(p, device, variant);
  recipe->workspace = sm90::counter_bytes(p, device, variant.tile, variant.with);
  return sm90::add_forward<variant.tile, variant.with>(variant.name, p, device, recipe);
}

constexpr Limits limits(const sm90::Variant& variant) {
  const bool changes = variant.with & sm90::with_score;
  Limits limits = {
      .in_types = type_bit(attn_dtype(variant.type)),
      .kv_types = type_bit(attn_dtype(variant.kv_type)),
      .out_types = float_types | type_bit(ATTN_F8_E4M3FN) | type_bit(ATTN_F8_E5M2),
      .flags = forward_flags | ATTN_OUT_SCALE | (changes ? uint32_t{ATTN_ALIBI} : 0u),
      .features = forward_features | feature_descale_tensor | feature_descale_head |
                  feature_kv_begin |
                  (changes ? feature_descale_block | feature_segments | feature_softcap : 0u),
      .head_dim = {.multiple = 16, .max = variant.tile.head_dim},
      .head_dim_v = {.multiple = 16, .max = variant.tile.head_dim_v},
      .group = {.multiple = variant.tile.item_heads()}};
  if (variant.tile.weight_parts > 1) limits.flags |= limits.demands |= ATTN_FP8_PRECISE;
  return variant.with & sm90::with_mask ? with_block_mask(limits) : limits;
}

constinit const std::array all_rows =
    rows_of_variants<std::size(sm90::fp8_variants)>([]<size_t i>() -> Kernel {
      constexpr const sm90::Variant& variant = sm90::fp8_variants[i];
      return {.name = variant.name,
              .op = Op::forward,
              .backend = ATTN_BACKEND_CUDA,
              .limits = limits(variant),
              .numerics = {.weights = ATTN_F8_E4M3FN,
                           .offset = 8,
                           .rows = 16,
                           .keys = variant.tile.keys,
                           .last_tile_first = true,
                           .rounded_sums = true,
                           .sum_bits = 13,  // docs/numerics.md
                           .score_part = variant.tile.score_part,
                           .weight_parts = variant.tile.weight_parts,
                           .largest_score = sm90::largest_score(variant)},
              .recipe = recipe_of<make_recipe<i>>};
    });

}  // namespace

std::span<const Kernel> sm90_fp8_rows() {
  return all_rows;
}

}  // namespace attn
