// The kernels fwd_sm90_*_mixed: packed q of which some sequences have many queries and most have
// few, as a step of a server has them. decode_sm90_* takes the sequences that one row tile holds,
// fwd_sm90_*_paged the others, whose items it counts from the lengths.
#include "kernels/decode.h"
#include "kernels/families.h"
#include "kernels/sm90_forward.h"

namespace attn {
namespace {

using sm90::with_pages, sm90::with_score_and_pages;

// Queries of a sequence that is decode's.
int64_t few_queries(const Problem& p, const decode::DecodeTile& tile) {
  return decode::rows_of<true>(p, tile) / p.group();
}

// Items counted from capacities, beside those that total_q leaves room for.
std::string few_empty(const Problem& p, const sm90::Tile& tile) {
  if (p.q_layout != ATTN_PACKED) return "for padded q a later kernel is as fast";
  const int64_t rows = tile.item_rows(), all = p.batch * ceil_div(p.seqlen_q, rows),
                most = p.total_q / rows + p.batch;
  if (all > 2 * most) return "";
  return join("for ", p.total_q, " queries of ", p.batch, " sequences with up to ", p.seqlen_q,
              " each a later kernel is faster");
}

template <sm90::Tile tile, unsigned with, decode::DecodeTile decode_tile>
void pack(const Problem& p, const Args& args, const Target& target, Parameters* to) {
  sm90::pack<tile, with, sm90::GivenSegments>(p, args, target, to);
  auto& a = *reinterpret_cast<sm90::Kernarg<with>*>(to->kernarg);
  a.lists = p.q_layout == ATTN_PACKED;
  a.least_queries = int(few_queries(p, decode_tile)) + 1;
}

template <Text image, sm90::Tile tile, unsigned with, decode::DecodeTile decode_tile>
Status add_forward(const Problem& p, const DeviceInfo& device, Recipe* recipe) {
  ATTN_TRY(sm90::check(p, device, tile, with));
  Step step = sm90::forward_step<tile, with>(name_of<image>.text, p, device);
  step.pack = pack_of<pack<tile, with, decode_tile>>;
  step.workspace_at = recipe->workspace;
  if (p.q_layout != ATTN_PACKED)  // all sequences are of one of both
    (p.seqlen_q <= few_queries(p, decode_tile) ? step : recipe->steps[0]).launch.grid[0] = 0;
  recipe->workspace += sizeof(unsigned);
  recipe->steps.push_back(std::move(step));
  return {};
}

template <attn_dtype type, Text variant, sm90::Tile tile, sm90::Tile score,
          decode::DecodeTile decode_tile>
Status make_recipe(const Problem& p, const DeviceInfo& device, Recipe* recipe) {
  ATTN_TRY(decode::check(p, decode::rows_of<true>(p, decode_tile), device, decode_tile, true));
  recipe->passed_over = few_empty(p, tile);
  recipe->workspace = size_t(
      ceil_div(int64_t(decode::workspace_bytes<decode_tile, true>(p, device)), int64_t{256}) * 256);
  recipe->steps.push_back(decode::decode_step<decode_tile, true, true>(
      kernel_name<"decode_sm90_", type, variant>.text, p, device));
  constexpr Text family = kernel_name<"fwd_sm90_", type, variant>;
  constexpr Text of_pages = Text(family).append("_paged"),
                 of_both = Text(family).append("_score_paged");
  if (p.softcap > 0 || p.has(ATTN_ALIBI | ATTN_SPLIT_INVARIANT) || p.scale <= 0)
    return add_forward<of_both, score, with_score_and_pages, decode_tile>(p, device, recipe);
  return add_forward<of_pages, tile, with_pages, decode_tile>(p, device, recipe);
}

template <attn_dtype type, Text variant, sm90::Tile tile, sm90::Tile score>
constexpr Kernel row() {
  constexpr Text mixed = Text(variant).append("_mixed"), paged = Text(variant).append("_paged");
  constexpr decode::DecodeTile decode_tile = {
      .head_dim = tile.head_dim, .head_dim_v = tile.head_dim_v, .element_bytes = 2};
  return {.name = kernel_name<"fwd_sm90_", type, mixed>.text,
          .op = Op::forward,
          .backend = ATTN_BACKEND_CUDA,
          .limits = {.in_types = type_bit(type),
                     .kv_types = type_bit(type),
                     .out_types = float_types,
                     .flags = forward_flags | ATTN_ALIBI | ATTN_SPLIT_INVARIANT,
                     .features =
                         forward_features | feature_segments | feature_paged_kv | feature_softcap,
                     .head_dim = {.multiple = 8, .max = tile.head_dim},
                     .head_dim_v = {.multiple = 8, .max = tile.head_dim_v},
                     .group = {.max = decode_tile.rows()},
                     .page_size = {.multiple = 16}},
          .numerics = {.weights = type,
                       .rows = 16,
                       .keys = tile.keys,
                       .largest_score = sm90::largest_score(type, with_pages)},
          .recipe = recipe_of<make_recipe<type, variant, tile, score, decode_tile>>,
          .first_images = {kernel_name<"decode_sm90_", type, variant>.text},
          .image = kernel_name<"fwd_sm90_", type, paged>.text};
}

template <attn_dtype type>
constexpr std::array rows = {
    row<type, "d64", sm90::tile_d64, sm90::tile_d64_score>(),
    row<type, "d128", sm90::tile_d128, sm90::tile_d128_score>(),
    row<type, "d256", sm90::tile_d256, sm90::tile_d256_score>(),
};
constinit const std::array all_rows = joined(rows<ATTN_BF16>, rows<ATTN_F16>);

}  // namespace

std::span<const Kernel> sm90_mixed_rows() {
  return all_rows;
}

}  // namespace attn
