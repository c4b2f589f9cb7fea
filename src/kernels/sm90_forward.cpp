// The kernels fwd_sm90_*. They differ by the head dimensions they take. _score: with softcap and
// ALiBi; _bias: with a bias too; _mask: with a block mask; _paged: segments may be paged; _short,
// _long, _pair: other tiles, for problems whose queries are few, long and causal, or many; _heads:
// for two query heads of one K/V head.
#include "kernels/sm90_forward.h"

#include "kernels/families.h"

namespace attn {
namespace {

using sm90::plain, sm90::with_bias, sm90::with_mask, sm90::with_pages, sm90::with_score,
    sm90::with_score_and_pages;

// Why a later kernel serves a problem better; "": none does.
using PassedOver = std::string (*)(const Problem&, const DeviceInfo&, const sm90::Tile&);
std::string never(const Problem&, const DeviceInfo&, const sm90::Tile&) {
  return "";
}
// Its larger tile costs more at the ends of sequences than it spares between them if they are
// short, and spares nothing where all items are equally long (docs/log).
std::string too_short(const Problem& p, const DeviceInfo&, const sm90::Tile&) {
  if (!sm90::causal(p)) return "without a causal mask a later kernel is as fast";
  return sm90::shorter_than(8192, p);
}

template <int64_t least>
std::string shares_little(const Problem& p, const DeviceInfo&, const sm90::Tile& tile) {
  if (sm90::causal(p)) return "for causal masks a later kernel is faster";
  return sm90::pair_shares_little(least, p, tile);
}
std::string too_short_for_heads(const Problem& p, const DeviceInfo&, const sm90::Tile&) {
  if (p.has(ATTN_WINDOW)) return "for windows a later kernel is faster";
  return sm90::heads_share_little(8192, p);
}

template <attn_dtype type, Text variant, sm90::Tile tile, unsigned with, PassedOver passed_over>
Status make_recipe(const Problem& p, const DeviceInfo& device, Recipe* recipe) {
  recipe->passed_over = passed_over(p, device, tile);
  recipe->workspace = sm90::counter_bytes(p, device, tile, with);
  return sm90::add_forward<tile, with>(kernel_name<"fwd_sm90_", type, variant>.text, p, device,
                                       recipe);
}

// q, k and v are of one type. split_invariant costs time that only the kernels that change scores
// take.
constexpr Limits limits(attn_dtype type, const sm90::Tile& tile, unsigned with) {
  const bool changes = with & with_score;
  Limits limits = {.in_types = type_bit(type),
                   .kv_types = type_bit(type),
                   .out_types = float_types,
                   .flags = forward_flags | (changes ? ATTN_ALIBI | ATTN_SPLIT_INVARIANT : 0u),
                   .features = forward_features | feature_segments |
                               (changes ? feature_softcap : 0u) |
                               (with == with_bias ? feature_bias : 0u),
                   .head_dim = {.multiple = 8, .max = tile.head_dim},
                   .head_dim_v = {.multiple = 8, .max = tile.head_dim_v},
                   .group = {.multiple = tile.item_heads()}};
  if (with & with_pages) {
    limits.features |= feature_paged_kv;
    limits.page_size.multiple = 16;  // rows that are swizzled alike, and as many as products take
  }
  return with & with_mask ? with_block_mask(limits) : limits;
}

template <attn_dtype type, Text variant, sm90::Tile tile, unsigned with = plain,
          PassedOver passed_over = never>
constexpr Kernel row() {
  return {.name = kernel_name<"fwd_sm90_", type, variant>.text,
          .op = Op::forward,
          .backend = ATTN_BACKEND_CUDA,
          .limits = limits(type, tile, with),
          .numerics = {.weights = type,
                       .rows = 16,
                       .keys = tile.keys,
                       .largest_score = sm90::largest_score(type, with)},
          .recipe = recipe_of<make_recipe<type, variant, tile, with, passed_over>>};
}

template <attn_dtype type>
constexpr std::array rows = {
    row<type, "d64_short", sm90::tile_d64_short, plain, sm90::too_many>(),
    row<type, "d64", sm90::tile_d64>(),
    row<type, "d96", sm90::tile_d96>(),
    row<type, "d128_pair", sm90::tile_d128_pair, plain, shares_little<8192>>(),
    row<type, "d128_heads", sm90::tile_d128_heads, plain, too_short_for_heads>(),
    row<type, "d128_long", sm90::tile_d128_long, plain, too_short>(),
    row<type, "d128", sm90::tile_d128>(),
    row<type, "d192_dv128", sm90::tile_d192_dv128>(),
    row<type, "d192", sm90::tile_d192>(),
    row<type, "d256_pair", sm90::tile_d256_pair, plain, shares_little<4096>>(),
    row<type, "d256", sm90::tile_d256>(),
    row<type, "d64_mask", sm90::tile_d64_mask, with_mask>(),
    row<type, "d128_mask", sm90::tile_d128_mask, with_mask>(),
    row<type, "d256_mask", sm90::tile_d256_mask, with_mask>(),
    row<type, "d64_score", sm90::tile_d64_score, with_score>(),
    row<type, "d128_score", sm90::tile_d128_score, with_score>(),
    row<type, "d256_score", sm90::tile_d256_score, with_score>(),
    row<type, "d64_bias", sm90::tile_d64_bias, with_bias>(),
    row<type, "d128_bias", sm90::tile_d128_bias, with_bias>(),
    row<type, "d256_bias", sm90::tile_d256_bias, with_bias>(),
    row<type, "d64_paged", sm90::tile_d64, with_pages>(),
    row<type, "d128_paged", sm90::tile_d128, with_pages>(),
    row<type, "d256_paged", sm90::tile_d256, with_pages>(),
    row<type, "d64_score_paged", sm90::tile_d64_score, with_score_and_pages>(),
    row<type, "d128_score_paged", sm90::tile_d128_score, with_score_and_pages>(),
    row<type, "d256_score_paged", sm90::tile_d256_score, with_score_and_pages>(),
};
constinit const std::array all_rows = joined(rows<ATTN_BF16>, rows<ATTN_F16>);

}  // namespace

std::span<const Kernel> sm90_forward_rows() {
  return all_rows;
}

}  // namespace attn
