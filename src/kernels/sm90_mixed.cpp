// The kernels fwd_sm90_*_mixed: packed q of which some sequences have many queries and most have
// few, as a step of a server has them. decode_sm90_* takes the sequences that one row tile holds,
// fwd_sm90_*_paged the others, whose items it counts from the lengths.
#include "kernels/decode.h"
#include "kernels/families.h"
#include "kernels/forward_sm90/variants.h"
#include "kernels/preference.h"
#include "kernels/sm90_forward.h"

namespace attn {
namespace {

// Queries of a sequence that is decode's.
int64_t few_queries(const Problem& p, const decode::DecodeTile& tile) {
  return decode::rows_of<true>(p, tile) / p.group();
}

// The variants of its launches.
struct Mixed {
  const char* name;
  size_t decode, paged, score_paged;  // places in decode::variants and sm90::variants
};
consteval Mixed mixed(const char* name, const char* decode, const char* paged,
                      const char* score_paged) {
  return {name, find_variant(decode::variants, decode), find_variant(sm90::variants, paged),
          find_variant(sm90::variants, score_paged)};
}
constexpr Mixed kernels[] = {
    mixed("fwd_sm90_bf16_d64_mixed", "decode_sm90_bf16_d64_r16", "fwd_sm90_bf16_d64_paged",
          "fwd_sm90_bf16_d64_score_paged"),
    mixed("fwd_sm90_bf16_d128_mixed", "decode_sm90_bf16_d128_r16", "fwd_sm90_bf16_d128_paged",
          "fwd_sm90_bf16_d128_score_paged"),
    mixed("fwd_sm90_bf16_d256_mixed", "decode_sm90_bf16_d256_r16", "fwd_sm90_bf16_d256_paged",
          "fwd_sm90_bf16_d256_score_paged"),
    mixed("fwd_sm90_f16_d64_mixed", "decode_sm90_f16_d64_r16", "fwd_sm90_f16_d64_paged",
          "fwd_sm90_f16_d64_score_paged"),
    mixed("fwd_sm90_f16_d128_mixed", "decode_sm90_f16_d128_r16", "fwd_sm90_f16_d128_paged",
          "fwd_sm90_f16_d128_score_paged"),
    mixed("fwd_sm90_f16_d256_mixed", "decode_sm90_f16_d256_r16", "fwd_sm90_f16_d256_paged",
          "fwd_sm90_f16_d256_score_paged"),
};

template <size_t forward, size_t decode>
Status add_forward(const Problem& p, const DeviceInfo& device, Recipe* recipe) {
  constexpr const sm90::Variant& variant = sm90::variants[forward];
  constexpr sm90::Tile tile = variant.tile;
  constexpr decode::DecodeTile decode_tile = decode::variants[decode].tile;
  ATTN_TRY(sm90::check(p, device, tile, variant.with));
  const int64_t few = few_queries(p, decode_tile);
  Step step = sm90::forward_step<tile, variant.with>(variant.name, p, device, int(few) + 1);
  step.workspace_at = recipe->workspace;
  if (p.q_layout != ATTN_PACKED)  // all sequences are of one of both
    (p.seqlen_q <= few ? step : recipe->steps[0]).launch.grid[0] = 0;
  recipe->workspace += sizeof(unsigned);
  recipe->steps.push_back(std::move(step));
  return {};
}

template <size_t i>
Status make_recipe(const Problem& p, const DeviceInfo& device, Recipe* recipe) {
  constexpr Mixed kernel = kernels[i];
  constexpr const decode::Variant& few = decode::variants[kernel.decode];
  static_assert(few.copy_engine);
  ATTN_TRY(decode::check(p, decode::rows_of<true>(p, few.tile), device, few.tile, true));
  recipe->passed_over = prefer_other_to_mixed(p, sm90::variants[kernel.paged]);
  decode::add_decode<few.tile, true, true>(few.name, p, device, recipe);
  recipe->workspace = size_t(ceil_div(int64_t(recipe->workspace), int64_t{256}) * 256);
  if (p.softcap > 0 || p.has(ATTN_ALIBI | ATTN_SPLIT_INVARIANT) || p.scale <= 0)
    return add_forward<kernel.score_paged, kernel.decode>(p, device, recipe);
  return add_forward<kernel.paged, kernel.decode>(p, device, recipe);
}

constinit const std::array all_rows =
    rows_of_variants<std::size(kernels)>([]<size_t i>() -> Kernel {
      constexpr Mixed kernel = kernels[i];
      constexpr const sm90::Variant& paged = sm90::variants[kernel.paged];
      constexpr const decode::Variant& few = decode::variants[kernel.decode];
      constexpr uint32_t type = type_bit(attn_dtype(paged.type));
      return {.name = kernel.name,
              .op = Op::forward,
              .backend = ATTN_BACKEND_CUDA,
              .limits = {.in_types = type,
                         .kv_types = type,
                         .out_types = float_types,
                         .flags = forward_flags | ATTN_ALIBI | ATTN_SPLIT_INVARIANT,
                         .features = forward_features | feature_segments | feature_paged_kv |
                                     feature_softcap,
                         .head_dim = {.multiple = 8, .max = paged.tile.head_dim},
                         .head_dim_v = {.multiple = 8, .max = paged.tile.head_dim_v},
                         .group = {.max = few.tile.rows()},
                         .page_size = {.multiple = 16}},
              .numerics = {.weights = attn_dtype(paged.type),
                           .lag = 8,
                           .keys = paged.tile.keys,
                           .causal_last_first = true,
                           .rounded_largest = true,
                           .largest_score = sm90::largest_score(paged)},
              .recipe = recipe_of<make_recipe<i>>,
              .first_images = {few.name},
              .image = paged.name};
    });

}  // namespace

std::span<const Kernel> sm90_mixed_rows() {
  return all_rows;
}

}  // namespace attn
