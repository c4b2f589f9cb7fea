// The kernels fwd_sm90_*_mixed: packed q of which some sequences have many queries and most have
// few, as a step of a server has them. decode_sm90_* takes the sequences that one row tile holds,
// the tokens, fwd_sm90_*_paged the others, the chunks, whose items it counts from the lengths.
// _dequantised_mixed: over caches of fp8, which decode_sm90_fp8_* reads as they are. For chunks a
// first launch converts the keys of their sequences to q's type (sm90_dequantised.h), at the same
// time as tokens are computed. Chunks follow.
//
// Tokens wait for memory and chunks for the matrix units, so both run at the same time where that
// pays (mixed_shares.h): chunks begin on some multiprocessors, tokens on the others. Each launch
// starts without waiting for the one before it and ends after it (grid_begin_concurrent), so a
// kernel that waits for the last launch sees the results of all. The third launch takes the items
// that are left when tokens end, because the host may not know the lengths.
#include "kernels/decode.h"
#include "kernels/families.h"
#include "kernels/forward_sm90/variants.h"
#include "kernels/mixed_shares.h"
#include "kernels/preference.h"
#include "kernels/sm90_dequantised.h"
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
  constexpr bool converts() const { return decode::variants[decode].fp8(); }
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
    mixed("fwd_sm90_bf16_d512_mixed", "decode_sm90_bf16_d512_r16", "fwd_sm90_bf16_d512_paged",
          "fwd_sm90_bf16_d512_score_paged"),
    mixed("fwd_sm90_f16_d64_mixed", "decode_sm90_f16_d64_r16", "fwd_sm90_f16_d64_paged",
          "fwd_sm90_f16_d64_score_paged"),
    mixed("fwd_sm90_f16_d128_mixed", "decode_sm90_f16_d128_r16", "fwd_sm90_f16_d128_paged",
          "fwd_sm90_f16_d128_score_paged"),
    mixed("fwd_sm90_f16_d256_mixed", "decode_sm90_f16_d256_r16", "fwd_sm90_f16_d256_paged",
          "fwd_sm90_f16_d256_score_paged"),
    mixed("fwd_sm90_f16_d512_mixed", "decode_sm90_f16_d512_r16", "fwd_sm90_f16_d512_paged",
          "fwd_sm90_f16_d512_score_paged"),
    mixed("fwd_sm90_bf16_d64_dequantised_mixed", "decode_sm90_fp8_d64_r16",
          "fwd_sm90_bf16_d64_paged", "fwd_sm90_bf16_d64_score_paged"),
    mixed("fwd_sm90_bf16_d128_dequantised_mixed", "decode_sm90_fp8_d128_r16",
          "fwd_sm90_bf16_d128_paged", "fwd_sm90_bf16_d128_score_paged"),
    mixed("fwd_sm90_bf16_d256_dequantised_mixed", "decode_sm90_fp8_d256_r16",
          "fwd_sm90_bf16_d256_paged", "fwd_sm90_bf16_d256_score_paged"),
    mixed("fwd_sm90_bf16_d512_dequantised_mixed", "decode_sm90_fp8_d512_r16",
          "fwd_sm90_bf16_d512_paged", "fwd_sm90_bf16_d512_score_paged"),
    mixed("fwd_sm90_f16_d64_dequantised_mixed", "decode_sm90_fp8_d64_r16", "fwd_sm90_f16_d64_paged",
          "fwd_sm90_f16_d64_score_paged"),
    mixed("fwd_sm90_f16_d128_dequantised_mixed", "decode_sm90_fp8_d128_r16",
          "fwd_sm90_f16_d128_paged", "fwd_sm90_f16_d128_score_paged"),
    mixed("fwd_sm90_f16_d256_dequantised_mixed", "decode_sm90_fp8_d256_r16",
          "fwd_sm90_f16_d256_paged", "fwd_sm90_f16_d256_score_paged"),
    mixed("fwd_sm90_f16_d512_dequantised_mixed", "decode_sm90_fp8_d512_r16",
          "fwd_sm90_f16_d512_paged", "fwd_sm90_f16_d512_score_paged"),
};

constexpr size_t first_converting = 8;
static_assert(!kernels[first_converting - 1].converts() && kernels[first_converting].converts());

// Head dimensions up to this are for the kernels before, also where those leave a problem to
// fwd_sm90_* of its head dimension.
constexpr int narrower(size_t i) {
  const auto paged = [](size_t n) { return sm90::variants[kernels[n].paged]; };
  return i > 0 && paged(i - 1).type == paged(i).type ? paged(i - 1).tile.head_dim : 0;
}

// As far as the host knows lengths: sequences have all keys of their capacity and one query, and
// the other queries are those of as few chunks as possible. Sequences of up to `few` queries are
// tokens.
MixedWork mixed_work(const Problem& p, const DeviceInfo& device, const sm90::Tile& tile,
                     int64_t few) {
  const int64_t queries = p.seqlen_q > few ? std::max<int64_t>(0, p.total_q - p.batch) : 0,
                chunks = ceil_div(queries, std::max<int64_t>(1, p.seqlen_q - 1));
  const bool causal = p.causal();
  double keys = double(p.seqlen_kv), of_chunk = keys;
  if (causal) of_chunk -= std::min(keys, double(p.seqlen_q)) / 2;
  if (p.has(ATTN_WINDOW) && p.window_left >= 0 && (causal || p.window_right >= 0)) {
    const double window = double(p.window_left) + 1 + double(causal ? 0 : p.window_right);
    keys = std::min(keys, window), of_chunk = std::min(of_chunk, window);
  }
  // Operations of a multiprocessor in a microsecond.
  const double rate = tile.head_dim == 64 ? 3.9e6 : 5e6;
  const auto columns = [](int64_t k, int64_t v) { return double(k + v); };
  return {.multiprocessors = multiprocessors(p, device),
          .items = ceil_div(queries, int64_t{tile.rows()}) * p.heads_q,
          .item_us = 2 * tile.rows() * of_chunk * columns(tile.head_dim, tile.head_dim_v) / rate,
          .token_bytes = 2 * double((p.batch - chunks) * p.heads_kv) * keys *
                         columns(p.head_dim, p.head_dim_v)};
}

template <size_t forward, size_t decode>
Status add_launches(const Problem& p, const DeviceInfo& device, Recipe* recipe) {
  constexpr const sm90::Variant& variant = sm90::variants[forward];
  constexpr sm90::Tile tile = variant.tile;
  constexpr const decode::Variant& few_variant = decode::variants[decode];
  static_assert(tile.blocks == 1 && few_variant.tile.concurrent());
  constexpr bool converts = few_variant.fp8();
  using Segments = std::conditional_t<converts, dequantised::Segments, sm90::GivenSegments>;
  ATTN_TRY(sm90::check<Segments>(p, device, tile, variant.with));
  const int64_t few = few_queries(p, few_variant.tile);
  // Under max_sms one launch follows the other, because blocks cannot be told where to run.
  const bool beside = p.q_layout == ATTN_PACKED && p.max_sms == 0;
  // Beside tokens run the conversion, which waits for memory too but does not fill it, or chunks.
  const int64_t concurrent =
      beside && !converts ? concurrent_blocks(mixed_work(p, device, tile, few)) : 0;
  Step conversion;
  if constexpr (converts) conversion = dequantised::step(p, device, int(few) + 1, beside);
  // What runs at the same time as the tokens waits for what is before it; a launch of nothing does
  // not.
  const bool goes_on = converts ? beside && conversion.launch.grid[0] > 0 : concurrent > 0;
  decode::add_decode<few_variant.tile, true, true>(few_variant.name, p, device, recipe, goes_on);
  recipe->workspace = aligned_bytes(recipe->workspace);
  const auto in_workspace = [&](Step step) {
    step.workspace_at = recipe->workspace;
    return step;
  };
  const auto step_of = [&](sm90::Part part) {
    part.least_queries = int(few) + 1;
    return in_workspace(
        sm90::forward_step<tile, variant.with, Segments>(variant.name, p, device, part));
  };
  std::vector<Step>& steps = recipe->steps;
  if (concurrent > 0) {
    sm90::Part part = {.blocks = concurrent, .heads_together = int(p.group())};
    part.helpers = int(multiprocessors(p, device) - concurrent);
    steps.insert(steps.begin(), step_of(part));
    part.blocks = part.helpers;
    part.helped = int(concurrent);
    steps.push_back(step_of(part));
  } else {
    steps.push_back(step_of({}));
  }
  if (p.q_layout != ATTN_PACKED)  // all sequences are of one of both
    steps[p.seqlen_q <= few ? 1 : 0].launch.grid[0] = 0;
  if constexpr (converts) {
    steps.insert(steps.begin(), in_workspace(std::move(conversion)));
    if (p.q_layout != ATTN_PACKED && p.seqlen_q <= few) steps[0].launch.grid[0] = 0;
    recipe->cleared = recipe->workspace + dequantised::cleared_bytes(p);
    recipe->workspace += dequantised::workspace_bytes(p);
  } else {
    recipe->workspace += sizeof(unsigned);
  }
  return {};
}

template <size_t i>
Status make_recipe(const Problem& p, const DeviceInfo& device, Recipe* recipe) {
  constexpr Mixed kernel = kernels[i];
  constexpr const decode::Variant& few = decode::variants[kernel.decode];
  static_assert(few.copy_engine);
  if constexpr (kernel.converts()) ATTN_TRY(dequantised::check(p, device));
  ATTN_TRY(decode::check(p, decode::rows_of<true>(p, few.tile), device, few.tile, true));
  recipe->passed_over = prefer_other_to_mixed(p, sm90::variants[kernel.paged], kernel.converts());
  if (std::max(p.head_dim, p.head_dim_v) <= narrower(i))
    recipe->passed_over = join("for head_dim ", p.head_dim);
  if (p.softcap > 0 || p.has(ATTN_ALIBI | ATTN_SPLIT_INVARIANT) || p.scale <= 0)
    return add_launches<kernel.score_paged, kernel.decode>(p, device, recipe);
  return add_launches<kernel.paged, kernel.decode>(p, device, recipe);
}

constinit const std::array all_rows =
    rows_of_variants<std::size(kernels)>([]<size_t i>() -> Kernel {
      constexpr Mixed kernel = kernels[i];
      constexpr const sm90::Variant& paged = sm90::variants[kernel.paged];
      constexpr const decode::Variant& few = decode::variants[kernel.decode];
      constexpr uint32_t type = type_bit(attn_dtype(paged.type));
      constexpr bool converts = kernel.converts();
      return {
          .name = kernel.name,
          .op = Op::forward,
          .backend = ATTN_BACKEND_CUDA,
          .limits = {.in_types = type,
                     .kv_types = converts ? fp8_of_cuda : type,
                     .out_types = float_types,
                     .flags = forward_flags | ATTN_ALIBI | ATTN_SPLIT_INVARIANT,
                     .features = forward_features | feature_segments | feature_paged_kv |
                                 feature_softcap | feature_kv_begin |
                                 (converts ? kv_descale_features : 0u),
                     .head_dim = {.multiple = converts ? 16 : 8, .max = paged.tile.head_dim},
                     .head_dim_v = {.multiple = converts ? 16 : 8, .max = paged.tile.head_dim_v},
                     .group = {.max = few.tile.rows()},
                     .page_size = {.multiple = 16}},
          .numerics = {.weights = attn_dtype(paged.type),
                       .lag = 8,
                       .keys = paged.tile.keys,
                       .causal_last_first = true,
                       .rounded_largest = true,
                       .largest_score = sm90::largest_score(paged),
                       .rounds_kv = converts},
          .recipe = recipe_of<make_recipe<i>>,
          .first_images = {few.name, converts ? dequantised::image : nullptr},
          .image = paged.name};
    });

}  // namespace

std::span<const Kernel> sm90_mixed_rows() {
  return std::span(all_rows).first<first_converting>();
}
std::span<const Kernel> sm90_dequantised_mixed_rows() {
  return std::span(all_rows).subspan<first_converting>();
}

}  // namespace attn
