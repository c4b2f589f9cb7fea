// The kernels fwd_sm90_*. They differ by the head dimensions they take. _score: with softcap and
// ALiBi; _bias: with a bias too; _mask: with a block mask; _paged: segments may be paged; _short,
// _long, _pair: other tiles, for problems whose queries are few, long and causal, or many; _heads:
// for two query heads of one K/V head.
#include "kernels/sm90_forward.h"

#include "kernels/families.h"
#include "kernels/forward_sm90/variants.h"
#include "kernels/preference.h"

namespace attn {
namespace {

using sm90::with_bias, sm90::with_mask, sm90::with_pages, sm90::with_score;

template <size_t i>
Status make_recipe(const Problem& p, const DeviceInfo& device, Recipe* recipe) {
  constexpr const sm90::Variant& variant = sm90::variants[i];
  recipe->passed_over = prefer_other(p, device, variant);
  recipe->workspace = sm90::counter_bytes(p, device, variant.tile, variant.with);
  return sm90::add_forward<variant.tile, variant.with>(variant.name, p, device, recipe);
}

// q, k and v are of one type. split_invariant costs time that only the kernels that change scores
// take.
constexpr Limits limits(const sm90::Variant& variant) {
  const uint32_t type = type_bit(attn_dtype(variant.type));
  const unsigned with = variant.with;
  const bool changes = with & with_score;
  Limits limits = {.in_types = type,
                   .kv_types = type,
                   .out_types = float_types,
                   .flags = forward_flags | (changes ? ATTN_ALIBI | ATTN_SPLIT_INVARIANT : 0u),
                   .features = forward_features | feature_segments | feature_kv_begin |
                               (changes ? feature_softcap : 0u) |
                               (with & with_mask ? 0u : feature_key_parts) |
                               (with == with_bias ? feature_bias : 0u),
                   .head_dim = {.multiple = 8, .max = variant.tile.head_dim},
                   .head_dim_v = {.multiple = 8, .max = variant.tile.head_dim_v},
                   .group = {.multiple = variant.tile.item_heads()}};
  if (!(with & with_mask)) {
    limits.flags |= ATTN_QUERY_POSITIONS;
    limits.features |= feature_key_positions;
  }
  if (with & with_pages) {
    limits.features |= feature_paged_kv | feature_shared_pages;
    limits.page_size.multiple = 16;  // rows that are swizzled alike, and as many as products take
  }
  return with & with_mask ? with_block_mask(limits) : limits;
}

constinit const std::array all_rows =
    rows_of_variants<std::size(sm90::variants)>([]<size_t i>() -> Kernel {
      constexpr const sm90::Variant& variant = sm90::variants[i];
      return {.name = variant.name,
              .op = Op::forward,
              .backend = ATTN_BACKEND_CUDA,
              .limits = limits(variant),
              .numerics = {.weights = attn_dtype(variant.type),
                           .lag = 8,
                           .keys = variant.tile.keys,
                           .causal_last_first = true,
                           .rounded_largest = true,
                           .largest_score = sm90::largest_score(variant)},
              .recipe = recipe_of<make_recipe<i>>};
    });

}  // namespace

std::span<const Kernel> sm90_forward_rows() {
  return all_rows;
}

}  // namespace attn
