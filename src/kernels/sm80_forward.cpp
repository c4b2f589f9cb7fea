// The kernels fwd_sm80_*. They differ by the largest head_dim they take; _score: with softcap, bias
// and ALiBi; _mask: with a block mask; _paged: segments may be paged, there is no bias.
#include <algorithm>
#include <cmath>

#include "kernels/cuda_forward.h"
#include "kernels/families.h"
#include "kernels/forward_sm80/forward_args.h"
#include "kernels/forward_sm80/variants.h"
#include "kernels/limits.h"

namespace attn {
namespace {

using sm80::Kernarg, sm80::with_mask, sm80::with_pages, sm80::with_score;

template <unsigned with>
Kernarg<with> constants(const Problem& p, const DeviceInfo& device) {
  Kernarg<with> a{};
  set(a.q_stride, p.q_stride);
  set(a.out_stride, p.out_stride);
  std::copy_n(p.bias_stride, 4, a.bias_stride);
  a.total_q = p.total_q;
  a.batch = int(p.batch);
  a.heads_q = int(p.heads_q);
  a.group = int(p.group());
  a.seqlen_q = int(p.seqlen_q);
  a.head_dim = int(p.head_dim);
  a.head_dim_v = int(p.head_dim_v);
  a.out_type = p.out_type;
  a.bias_type = p.bias_type;
  a.split_invariant = p.has(ATTN_SPLIT_INVARIANT);
  a.num_segments = p.num_segments;
  a.chunk = pairs_in_l2(p, 24 << 20, device);
  a.scale = p.scale;
  a.log2_scale = std::max(std::abs(p.scale) * 1.44269504f, 1e-37f);  // log2(e)
  a.softcap = p.softcap;
  a.mask = p.range_mask();
  a.positions = positions(p);
  if constexpr ((with & with_mask) != 0) a.block_mask = mask_arrays(p);
  for (int32_t i = 0; i < p.num_segments; ++i) {
    const attn_segment& from = p.segment[i];
    set(a.segment[i].k_stride, from.k_stride);
    set(a.segment[i].v_stride, from.v_stride);
    a.segment[i].lengths = kv_lengths(from);
    if constexpr ((with & with_pages) != 0) a.pages[i] = pages(from);
  }
  return a;
}

template <unsigned with>
void patch(const Problem& p, const Args& args, void*, Kernarg<with>& a) {
  patch_rows(args, &a);
  a.q = args.q;
  a.bias = args.bias;
  a.alibi_slopes = args.alibi_slopes;
  a.kv_begin = args.kv_begin;
  patch_positions(p, args, &a.positions);
  if constexpr ((with & with_mask) != 0) patch_mask(p, args, &a.block_mask);
  for (int32_t i = 0; i < p.num_segments; ++i) {
    const attn_segment_args of = args.segment[i];
    a.segment[i].k = of.k;
    a.segment[i].v = of.v;
    patch_lengths(of, &a.segment[i].lengths);
    if constexpr ((with & with_pages) != 0) a.pages[i].block_table = of.block_table;
  }
}

template <size_t i>
Status make_recipe(const Problem& p, const DeviceInfo& device, Recipe* recipe) {
  constexpr const sm80::Variant& variant = sm80::variants[i];
  constexpr sm80::Tile tile = variant.tile();
  constexpr unsigned with = variant.with;
  constexpr int shared = sm80::shared_bytes(tile, variant.head_dim, variant.head_dim_v);
  constexpr int with_static = shared + sm80::static_shared_bytes(with);
  if (with_static > device.shared_bytes_max) {
    return unsupported("it needs ", with_static, " bytes of shared memory; the device has ",
                       device.shared_bytes_max);
  }
  if (p.num_segments > attn_sm80_max_segments) {
    return unsupported("num_segments is ", p.num_segments, "; accepted: up to ",
                       int(attn_sm80_max_segments));
  }
  constexpr int64_t max_length = 1 << 30;  // so that the ends of blocks stay within 32 bits
  if ((with & with_mask) && (p.seqlen_q > max_length || p.seqlen_kv > max_length)) {
    return unsupported("seqlen is ", std::max(p.seqlen_q, p.seqlen_kv),
                       "; accepted with a block mask: up to ", max_length);
  }
  ATTN_TRY(check_positions(p, false));
  const int64_t pairs = p.batch * p.heads_q, tiles = ceil_div(p.seqlen_q, tile.rows);
  if (pairs > max_grid || pairs * tiles > max_grid) {
    return unsupported("batch * heads_q * ceil(seqlen_q / ", tile.rows, ") is ", pairs, " * ",
                       tiles, "; accepted: up to ", max_grid);
  }
  recipe->steps.push_back({
      .image = variant.name,
      .static_shared_bytes = sm80::static_shared_bytes(with),
      .launch = {.grid = {uint32_t(forward_blocks(p, pairs * tiles)), 1, 1},
                 .block = {uint32_t(tile.threads()), 1, 1},
                 .shared_bytes = shared},
      .arguments = arguments_of<patch<with>>(constants<with>(p, device)),
  });
  return {};
}

// q, k and v are of one type.
constexpr Limits limits(const sm80::Variant& variant) {
  const uint32_t type = type_bit(attn_dtype(variant.type));
  const unsigned with = variant.with;
  Limits limits = {.in_types = type,
                   .kv_types = type,
                   .out_types = float_types,
                   .flags = forward_flags | ATTN_SPLIT_INVARIANT,
                   .features = forward_features | feature_segments | feature_kv_begin,
                   .head_dim = {.multiple = 8, .max = variant.head_dim},
                   .head_dim_v = {.multiple = 8, .max = variant.head_dim_v}};
  if (!(with & with_mask)) {
    limits.flags |= ATTN_QUERY_POSITIONS;
    limits.features |= feature_key_positions;
  }
  if (with & with_score) {
    limits.flags |= ATTN_ALIBI;
    limits.features |= feature_softcap | (with & with_pages ? 0u : feature_bias);
  }
  if (with & with_pages) limits.features |= feature_paged_kv | feature_shared_pages;
  return with & with_mask ? with_block_mask(limits) : limits;
}

constinit const std::array all_rows =
    rows_of_variants<std::size(sm80::variants)>([]<size_t i>() -> Kernel {
      constexpr const sm80::Variant& variant = sm80::variants[i];
      constexpr sm80::Tile tile = variant.tile();
      return {.name = variant.name,
              .op = Op::forward,
              .backend = ATTN_BACKEND_CUDA,
              .limits = limits(variant),
              .numerics = {.weights = attn_dtype(variant.type),
                           .rows = tile.rows / tile.row_warps(),
                           .keys = tile.keys},
              .recipe = recipe_of<make_recipe<i>>};
    });

}  // namespace

std::span<const Kernel> sm80_forward_rows() {
  return all_rows;
}

}  // namespace attn
