// The kernels fwd_sm90_fp8_*: q of e4m3, k and v both of e4m3 or both of e5m2 (_e5m2). They differ
// by the head dimensions they take. _score: with softcap, ALiBi and descales of blocks of keys and
// of several segments; _mask: with a block mask; _precise: with weights of two e4m3 values; _short,
// _long, _pair: other tiles, for few queries and long sequences; _heads: for two query heads of one
// K/V head.
#include "kernels/families.h"
#include "kernels/sm90/fp8_tiles.h"
#include "kernels/sm90_forward.h"

namespace attn {
namespace {

using sm90::with_fp8, sm90::with_fp8_and_mask, sm90::with_fp8_and_score;

// Why a later kernel serves a problem better; "": none does. What tiles of 192 keys and clusters
// spare is more than what they cost from so many keys on (docs/log).
std::string passed_over(const Problem& p, const DeviceInfo& device, const sm90::Tile& tile) {
  if (tile.groups == 1) return sm90::too_many(p, device, tile);
  if (tile.blocks > 1 && !tile.heads)
    return sm90::pair_shares_little(sm90::causal(p) ? 8192 : 2048, p, tile);
  if (tile.heads) return sm90::heads_share_little(2048, p);
  if (tile.keys > 128) return sm90::shorter_than(2048, p);
  return "";
}

template <Text name, sm90::Tile tile, unsigned with>
Status make_recipe(const Problem& p, const DeviceInfo& device, Recipe* recipe) {
  recipe->passed_over = passed_over(p, device, tile);
  recipe->workspace = sm90::counter_bytes(p, device, tile, with);
  return sm90::add_forward<tile, with>(name_of<name>.text, p, device, recipe);
}

constexpr Limits limits(attn_dtype kv_type, const sm90::Tile& tile, unsigned with) {
  const bool changes = with & sm90::with_score;
  Limits limits = {
      .in_types = type_bit(ATTN_F8_E4M3FN),
      .kv_types = type_bit(kv_type),
      .out_types = float_types | type_bit(ATTN_F8_E4M3FN) | type_bit(ATTN_F8_E5M2),
      .flags = forward_flags | ATTN_OUT_SCALE | (changes ? uint32_t{ATTN_ALIBI} : 0u),
      .features = forward_features | feature_descale_tensor | feature_descale_head |
                  (changes ? feature_descale_block | feature_segments | feature_softcap : 0u),
      .head_dim = {.multiple = 16, .max = tile.head_dim},
      .head_dim_v = {.multiple = 16, .max = tile.head_dim_v},
      .group = {.multiple = tile.item_heads()}};
  if (tile.weight_parts > 1) limits.flags |= limits.demands |= ATTN_FP8_PRECISE;
  return with & sm90::with_mask ? with_block_mask(limits) : limits;
}

template <attn_dtype kv_type, Text variant, sm90::Tile tile, unsigned with = with_fp8>
constexpr Kernel row() {
  constexpr Text name =
      Text("fwd_sm90_fp8_").append(variant.text).append(kv_type == ATTN_F8_E5M2 ? "_e5m2" : "");
  return {.name = name_of<name>.text,
          .op = Op::forward,
          .backend = ATTN_BACKEND_CUDA,
          .limits = limits(kv_type, tile, with),
          .numerics = {.weights = ATTN_F8_E4M3FN,
                       .offset = 8,
                       .rows = 16,
                       .keys = tile.keys,
                       .last_tile_first = true,
                       .rounded_sums = true,
                       .sum_bits = 13,  // docs/numerics.md
                       .score_part = tile.score_part,
                       .weight_parts = tile.weight_parts,
                       .largest_score = sm90::largest_score(ATTN_F8_E4M3FN, with)},
          .recipe = recipe_of<make_recipe<name, tile, with>>};
}

constexpr std::array e4m3_rows = {
    row<ATTN_F8_E4M3FN, "d64_short", sm90::tile_fp8_d64_short>(),
    row<ATTN_F8_E4M3FN, "d64_long", sm90::tile_fp8_d64_long>(),
    row<ATTN_F8_E4M3FN, "d64", sm90::tile_fp8_d64>(),
    row<ATTN_F8_E4M3FN, "d128_heads", sm90::tile_fp8_d128_heads>(),
    row<ATTN_F8_E4M3FN, "d128", sm90::tile_fp8_d128>(),
    row<ATTN_F8_E4M3FN, "d256_pair", sm90::tile_fp8_d256_pair>(),
    row<ATTN_F8_E4M3FN, "d256", sm90::tile_fp8_d256>(),
};
constexpr std::array e5m2_rows = {
    row<ATTN_F8_E5M2, "d64", sm90::tile_fp8_d64>(),
    row<ATTN_F8_E5M2, "d128", sm90::tile_fp8_d128>(),
    row<ATTN_F8_E5M2, "d256", sm90::tile_fp8_d256>(),
};
constexpr std::array other_rows = {
    row<ATTN_F8_E4M3FN, "d64_mask", sm90::tile_fp8_d64_mask, with_fp8_and_mask>(),
    row<ATTN_F8_E4M3FN, "d128_mask", sm90::tile_fp8_d128_mask, with_fp8_and_mask>(),
    row<ATTN_F8_E4M3FN, "d256_mask", sm90::tile_fp8_d256_mask, with_fp8_and_mask>(),
    row<ATTN_F8_E4M3FN, "d64_precise", sm90::tile_fp8_d64_precise>(),
    row<ATTN_F8_E4M3FN, "d128_precise", sm90::tile_fp8_d128_precise>(),
    row<ATTN_F8_E4M3FN, "d256_precise", sm90::tile_fp8_d256_precise>(),
    row<ATTN_F8_E4M3FN, "d64_score", sm90::tile_fp8_d64, with_fp8_and_score>(),
    row<ATTN_F8_E4M3FN, "d128_score", sm90::tile_fp8_d128, with_fp8_and_score>(),
    row<ATTN_F8_E4M3FN, "d256_score", sm90::tile_fp8_d256_score, with_fp8_and_score>(),
};
constinit const std::array all_rows = joined(e4m3_rows, e5m2_rows, other_rows);

}  // namespace

std::span<const Kernel> sm90_fp8_rows() {
  return all_rows;
}

}  // namespace attn
