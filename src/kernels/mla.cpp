// The kernels mla_*: decode of latent caches, where V is the first columns of K, so that each row
// of the cache is read once. mla_*_r8 to _r32 are decode_* (kernels/decode.h) for which "K" is the
// rope columns and "V" the latent ones. mla_*_r64 and mla_*_r64_pages have units, shares and parts
// of the same sizes, and merge the parts of row tiles by a launch of their own.
#include "kernels/decode.h"
#include "kernels/families.h"
#include "kernels/mla/many_args.h"
#include "kernels/mla/variants.h"

namespace attn {
namespace {

using decode::DecodeTile;
using mla::Rows;

constexpr const char* merge_image = "mla_merge_sm90";

template <const auto& variants, size_t i>
void patch(const Problem& p, const Args& args, void* workspace, attn_decode_sm90_kernarg& kernarg,
           const void** map_base) {
  decode::patch<false>(p, args, workspace, kernarg.a);
  for (int32_t n = 0; n < p.num_segments; ++n) {
    attn_decode_segment& s = kernarg.a.segment[n];
    s.v = s.k;
    if (s.v) s.k = static_cast<const char*>(s.v) + 2 * variants[i].latent();
    *map_base++ = s.k;
    *map_base++ = s.v;
  }
}

void patch_codes(const Problem& p, const Args& args, void* workspace, attn_decode_kernarg& a) {
  decode::patch<false>(p, args, workspace, a);
  for (int32_t n = 0; n < p.num_segments; ++n) {
    attn_decode_segment& s = a.segment[n];
    s.v = s.k;
    if (p.segment[n].k_type == ATTN_F8_E4M3FN_TOKEN) s.k_scales.at = args.segment[n].k_scale;
  }
}
template <const auto& variants, size_t i>
constexpr bool by_engine = !has_codes(variants[i].rows);
template <const auto& variants, size_t i>
using Kernarg = decode::Kernarg<by_engine<variants, i>>;
// The tile by which the workspace has slots: those that mla_merge_sm90 adds up are of 64 rows.
constexpr DecodeTile slots_of(const mla::Variant& variant) {
  return variant.tile.swapped ? variant.tile : variant.tile.with_rows(mla::tile_rows);
}

// Places of scales of f8_e4m3fn_token are numbers of 31 bits.
Status check_scales(const Problem& p, const Segment& s) {
  if (s.k_descale == ATTN_DESCALE_BLOCK) {
    const double all = double(p.batch) * double(p.heads_kv) *
                       double(ceil_div(s.seqlen, int64_t{s.descale_block_keys}));
    if (all > INT32_MAX)
      return unsupported("k_descale has ", all, " places; accepted: up to ", INT32_MAX);
  }
  if (s.k_type != ATTN_F8_E4M3FN_TOKEN) return {};
  const Extents size = extents(p, s);
  const attn_strides& stride = s.k_scale_stride;
  const double last = double(size.batch) * double(stride.batch) +
                      double(size.rows) * double(stride.seq) +
                      double(p.heads_kv) * double(stride.head);
  if (last <= INT32_MAX) return {};
  return unsupported("k_scale has ", last, " places; accepted: up to ", INT32_MAX);
}

Status check_latent(const Problem& p, int64_t rows, const DeviceInfo& device,
                    const DecodeTile& tile, Rows by = Rows::boxes) {
  for (int32_t n = 0; n < p.num_segments; ++n)
    if (!p.segment[n].v_in_k)
      return unsupported("segments[", n, "].v_in_k is 0; accepted: 1 in all segments");
  if (by == Rows::boxes) return decode::check(p, rows, device, tile, true);
  ATTN_TRY(decode::check(p, rows, device, tile, false));
  if (has_codes(by)) return check_scales(p, p.segment[0]);
  ATTN_TRY(check_copy_engine(device));  // the maps are there, and not used
  return check_copied(p, p.segment[0]);
}

template <const auto& variants, size_t i>
Kernarg<variants, i> constants(const Problem& p, int64_t rows, const decode::Shape& shape) {
  auto kernarg = decode::constants<slots_of(variants[i]), by_engine<variants, i>>(p, rows, shape);
  attn_decode_kernarg& a = decode::common(kernarg);
  a.head_dim = mla::rope;
  if (!by_engine<variants, i>)
    for (int32_t n = 0; n < p.num_segments; ++n) {
      const Segment& s = p.segment[n];
      const attn_strides bytes = {dtype_bytes(s.k_type, s.k_stride.batch),
                                  dtype_bytes(s.k_type, s.k_stride.seq),
                                  dtype_bytes(s.k_type, s.k_stride.head)};
      set(a.segment[n].v_stride, bytes);
      if (s.k_type == ATTN_F8_E4M3FN_TOKEN)
        a.segment[n].k_scales = decode::key_scales(s.k_scale_stride);
    }
  return kernarg;
}

// Adds the launch of a kernel mla_*, which begins the recipe's workspace.
template <const auto& variants, size_t i>
void add_launch(const Problem& p, const decode::Shape& shape, int threads, int shared_bytes,
                const Kernarg<variants, i>& kernarg, Recipe* recipe) {
  constexpr const mla::Variant& variant = variants[i];
  constexpr DecodeTile tile = variant.tile;
  std::vector<TensorMap> maps;
  for (const attn_segment& s : p.segment) {
    if (!by_engine<variants, i>) break;
    const Extents size = extents(p, s);
    for (const int columns : {mla::rope, variant.latent()})
      maps.push_back(tensor_map(2, columns, size.rows, p.heads_kv, size.batch, s.k_stride,
                                decode::panel_pitch / 2, decode::box_keys(s)));
  }
  Arguments arguments;
  if constexpr (by_engine<variants, i>)
    arguments = arguments_of<patch<variants, i>>(kernarg);
  else
    arguments = arguments_of<patch_codes>(kernarg);
  recipe->workspace = size_t(decode::workspace_of(shape.slots, slots_of(variant)).bytes);
  recipe->steps.push_back({
      .image = variant.name,
      .static_shared_bytes = tile.swapped ? uint32_t(tile.static_shared_bytes()) : 0,
      .fewer_threads = tile.swapped && threads < tile.threads(),
      .launch = {.grid = {uint32_t(shape.blocks), 1, 1},
                 .block = {uint32_t(threads), 1, 1},
                 .shared_bytes = uint32_t(shared_bytes),
                 .starts_early = true},
      .arguments = std::move(arguments),
      .maps = std::move(maps),
  });
}

// Measured on an H100: docs/log/2026-11-27_mla_decode.md.
bool faster_in_tiles_of_64(const Problem& p, int64_t rows, const DeviceInfo& device) {
  if (rows > decode::group_rows) return true;
  const attn_segment& s = p.segment[0];
  if (s.layout == ATTN_PAGED && s.page_size % decode::unit_keys) return false;
  const int64_t units = p.batch * ceil_div(s.seqlen, int64_t{decode::unit_keys});
  return units <= 2 * multiprocessors(p, device) ||
         (rows > decode::group_rows / 2 && p.batch <= 64);
}

template <const auto& variants, size_t i>
Status few_recipe(const Problem& p, const DeviceInfo& device, Recipe* recipe) {
  constexpr const mla::Variant& variant = variants[i];
  constexpr DecodeTile tile = variant.tile;
  const int64_t rows = decode::rows_of<false>(p, tile);
  if (!tile.tiled && rows > tile.rows())
    return unsupported("heads_q / heads_kv * seqlen_q is ", p.group(), " * ", p.seqlen_q,
                       "; accepted: up to ", tile.rows());
  ATTN_TRY(check_latent(p, rows, device, tile));
  if (faster_in_tiles_of_64(p, rows, device))
    recipe->passed_over = join("for ", rows, " rows, seqlen_q * heads_q / heads_kv, of ", p.batch,
                               " sequences of up to ", p.segment[0].seqlen, " keys");
  const decode::Shape shape = decode::shape_of(p, rows, device, tile, false);
  const Kernarg<variants, i> kernarg = constants<variants, i>(p, rows, shape);
  add_launch<variants, i>(p, shape, tile.threads() - 32 * (tile.loaders() - kernarg.a.loaders),
                          tile.merge_bytes() + shape.stages * shape.stage_bytes, kernarg, recipe);
  return {};
}

// Blocks form columns, one for each row tile of a K/V head while there are enough blocks.
struct BlockSize {
  int threads, shared_bytes;
  int blocks;  // of a multiprocessor
};
template <const auto& variants, size_t i>
Status merged_recipe(const Problem& p, const DeviceInfo& device, const BlockSize& size,
                     Recipe* recipe) {
  constexpr const mla::Variant& variant = variants[i];
  constexpr DecodeTile tile = variant.tile;
  static_assert(variant.latent() == mla::latent_columns);
  const int64_t rows = decode::rows_of<false>(p, tile);
  if (!tile.tiled && rows > tile.rows())
    return unsupported("heads_q / heads_kv * seqlen_q is ", p.group(), " * ", p.seqlen_q,
                       "; accepted: up to ", tile.rows());
  ATTN_TRY(check_latent(p, rows, device, tile, variant.rows));
  if (device.shared_bytes_max < size.shared_bytes)
    return unsupported("the device has ", device.shared_bytes_max,
                       " bytes of shared memory; accepted: from ", size.shared_bytes, " on");
  // A block cannot be told where to run, so max_sms limits their number.
  const int64_t most = multiprocessors(p, device) * (p.max_sms > 0 ? 1 : size.blocks),
                tiles = p.heads_kv * decode::row_tiles(rows, tile), columns = std::min(tiles, most),
                units = std::max<int64_t>(1, ceil_div(p.segment[0].seqlen, decode::unit_keys));
  // find_share multiplies them in 32 bits.
  if (tiles > UINT32_MAX / columns)
    return unsupported("heads_kv times tiles of ", tile.rows(), " rows is ", tiles,
                       "; accepted: up to ", UINT32_MAX / columns);
  const int64_t of_column = decode::aligned(std::min(most / columns, p.batch * units), p.batch);
  decode::Shape shape;
  shape.blocks = columns * (tiles > columns ? 1 : of_column);
  shape.slots = 2 * shape.blocks;
  Kernarg<variants, i> kernarg = constants<variants, i>(p, rows, shape);
  attn_decode_kernarg& a = decode::common(kernarg);
  a.columns = int(columns);
  a.splits = int(shape.blocks / columns);
  add_launch<variants, i>(p, shape, size.threads, size.shared_bytes, kernarg, recipe);
  if (shape.blocks == columns) return {};
  // As many blocks as fit on the device at once. A block of a column leaves at most one row tile to
  // others.
  const int64_t tile_rows = std::min<int64_t>(rows, mla::tile_rows),
                merged = tiles * (mla::merges_by_block(p.batch, a.splits) ? a.splits : p.batch);
  attn_decode_kernarg merge = a;
  // Of many parts all warps of a block take some.
  const bool together = a.splits >= mla::merge_warps * p.batch;
  const int64_t of_row =
      mla::latent_columns / (together ? mla::shared_merge_columns : mla::merge_columns);
  const int64_t most_blocks = mla::merge_blocks * int64_t{multiprocessors(p, device)};
  merge.rows_taken = together ? 1
                              : int(round_up(ceil_div(merged * tile_rows * of_row, most_blocks),
                                             int64_t{mla::merge_warps}));
  recipe->steps.push_back({
      .image = merge_image,
      .launch = {.grid = {uint32_t(merged),
                          uint32_t(ceil_div(tile_rows, int64_t{merge.rows_taken})),
                          uint32_t(of_row)},
                 .block = {32 * mla::merge_warps, 1, 1},
                 .shared_bytes = together ? uint32_t(mla::merge_shared_bytes) : 0,
                 .starts_early = true},
      .arguments = arguments_of<decode::patch<false>>(merge),
  });
  return {};
}

template <const auto& variants, size_t i>
Status many_recipe(const Problem& p, const DeviceInfo& device, Recipe* recipe) {
  constexpr BlockSize size = {mla::many_threads, mla::many_shared_bytes, 1};
  return merged_recipe<variants, i>(p, device, size, recipe);
}
template <const auto& variants, size_t i>
Status by_rows_recipe(const Problem& p, const DeviceInfo& device, Recipe* recipe) {
  constexpr int rows = variants[i].tile.rows();
  constexpr Rows by = variants[i].rows;
  constexpr BlockSize size = {mla::by_rows_threads(rows, by), mla::by_rows_shared_bytes(rows, by),
                              mla::by_rows_blocks(rows, by)};
  ATTN_TRY((merged_recipe<variants, i>(p, device, size, recipe)));
  // Boxes of whole units are the copy engine's faster way.
  if (by == Rows::one_by_one && decode::box_keys(p.segment[0]) > decode::unit_keys / 4)
    recipe->passed_over = join("for pages of ", p.segment[0].page_size);
  return {};
}

constexpr uint32_t kv_types(const mla::Variant& variant) {
  switch (variant.rows) {
    case Rows::mla_656:
      return type_bit(ATTN_MLA_656);
    case Rows::e4m3:
      return type_bit(ATTN_F8_E4M3FN) | type_bit(ATTN_F8_E4M3FN_TOKEN);
    default:
      return type_bit(attn_dtype(variant.type));
  }
}
constexpr Limits limits(const mla::Variant& variant) {
  const DecodeTile& tile = variant.tile;
  const uint32_t type = type_bit(attn_dtype(variant.type));
  const int64_t rows = tile.tiled ? INT32_MAX : tile.rows();
  Limits limits = {
      .in_types = type,
      .kv_types = kv_types(variant),
      .out_types = float_types,
      .flags = ATTN_CAUSAL | ATTN_SINKS,
      .features = feature_packed_kv | feature_seqlens | feature_paged_kv | feature_v_in_k,
      .demanded_features = feature_v_in_k,
      .head_dim = {.multiple = variant.head_dim(), .max = variant.head_dim()},
      .head_dim_v = {.multiple = variant.latent(), .max = variant.latent()},
      .seqlen_q = {.max = rows},
      .group = {.max = rows}};
  if (tile.swapped) {
    limits.flags |= forward_flags | ATTN_ALIBI | ATTN_SPLIT_INVARIANT;
    limits.features |= forward_features | feature_segments | feature_softcap | feature_tree |
                       feature_fixed_split | feature_kv_begin;
  } else if (variant.rows == Rows::one_by_one) {
    limits.demanded_features |= feature_paged_kv;
  } else if (variant.rows == Rows::boxes) {
    limits.page_size.multiple = decode::unit_keys;
  } else if (variant.rows == Rows::e4m3) {
    limits.features |= kv_descale_features;
  }
  return limits;
}

constexpr Kernel row(const mla::Variant& variant, MakeRecipe recipe) {
  return {.name = variant.name,
          .op = Op::forward,
          .backend = ATTN_BACKEND_CUDA,
          .limits = limits(variant),
          .numerics =
              {
                  .weights = attn_dtype(variant.type),
                  .lag = 8,
                  .keys = decode::unit_keys,
              },
          .recipe = recipe,
          .first_images = {variant.tile.swapped ? nullptr : merge_image}};
}
constinit const std::array all_rows = joined(
    rows_of_variants<std::size(mla::by_rows_variants)>([]<size_t i>() {
      return row(mla::by_rows_variants[i], recipe_of<by_rows_recipe<mla::by_rows_variants, i>>);
    }),
    joined(rows_of_variants<std::size(mla::few_variants)>([]<size_t i>() {
             return row(mla::few_variants[i], recipe_of<few_recipe<mla::few_variants, i>>);
           }),
           rows_of_variants<std::size(mla::many_variants)>([]<size_t i>() {
             return row(mla::many_variants[i], recipe_of<many_recipe<mla::many_variants, i>>);
           })));

}  // namespace

std::span<const Kernel> mla_forward_rows() {
  return all_rows;
}

}  // namespace attn
