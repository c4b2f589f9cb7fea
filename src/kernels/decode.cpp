// The kernels decode_*: few queries against many keys, of 16 bits as the queries or of fp8. They
// differ by the head dimensions and rows they take, and by what brings K and V: in decode_sm90_*
// the copy engine, whose boxes must each lie in one page. _r64 take 64 rows at once, by wgmma, and
// any number of them by tiles of so many; _split, and _r48, take fixed_split. decode_sm90_blocks_*:
// K and V of q8_0, q4_0, i8, i4 and q's type, of each segment in its own; up to 8 rows, _r16 16.
#include "kernels/decode.h"

#include "kernels/families.h"

namespace attn {
namespace {

constexpr uint32_t fp8_of_cuda = type_bit(ATTN_F8_E4M3FN) | type_bit(ATTN_F8_E5M2);

// fwd_* read K and V for each query head anew, and compute more at once: what they read is then to
// come from memory (docs/log).
std::string read_often(const Problem& p, const DeviceInfo& device) {
  int64_t bytes = 0;
  for (const attn_segment& s : p.segment)
    bytes += p.batch * p.heads_kv * s.seqlen * (p.head_dim + p.head_dim_v) * 2;
  if (p.group() == 1) return "where heads_q is heads_kv a later kernel is faster";
  if (bytes > device.l2_bytes) return "";
  return join("for K and V of ", bytes, " bytes, which L2 holds, a later kernel is faster");
}

template <Text name, decode::DecodeTile tile, bool engine>
Status make_recipe(const Problem& p, const DeviceInfo& device, Recipe* recipe) {
  using namespace decode;
  // More rows than a block takes read K and V again for each of their tiles: of 16 bits that is
  // what fwd_* do better, but for trees and the bits that fixed_split promises.
  const bool alone = tile.element_bytes == 1 || p.tree_keys > 0 || p.fixed_split > 0;
  const bool any_rows = tile.tiled() && alone;
  const int64_t max_rows_here = any_rows ? INT32_MAX : tile.rows();
  if (p.group() * p.seqlen_q > max_rows_here)
    return unsupported("heads_q / heads_kv * seqlen_q is ", p.group(), " * ", p.seqlen_q,
                       "; accepted: up to ", max_rows_here);
  const int64_t rows = rows_of<false>(p, tile);
  ATTN_TRY(check(p, rows, device, tile, engine));
  if (tile.tiled() && !alone) recipe->passed_over = read_often(p, device);
  recipe->workspace = workspace_bytes<tile>(p, device);
  recipe->steps.push_back(decode_step<tile, engine>(name.text, p, device));
  return {};
}

template <Text name, decode::DecodeTile tile, bool engine>
constexpr Kernel row(uint32_t q_types, uint32_t kv_types, attn_dtype weights) {
  const bool fp8 = tile.element_bytes == 1;
  return {
      .name = name_of<name>.text,
      .op = Op::forward,
      .backend = ATTN_BACKEND_CUDA,
      .limits = {.in_types = q_types,
                 .kv_types = kv_types,
                 .out_types = float_types,
                 .flags = forward_flags | ATTN_ALIBI | ATTN_SPLIT_INVARIANT,
                 .features =
                     forward_features | feature_segments | feature_paged_kv | feature_softcap |
                     feature_tree | (tile.split ? feature_fixed_split : 0u) |
                     (fp8 ? feature_descale_tensor | feature_descale_head | feature_descale_block
                          : 0u),
                 .head_dim = {.multiple = fp8 ? 16 : 8, .max = tile.head_dim},
                 .head_dim_v = {.multiple = fp8 ? 16 : 8, .max = tile.head_dim_v},
                 .seqlen_q = {.max = tile.tiled() ? INT32_MAX : tile.rows()},
                 .group = {.max = tile.tiled() ? INT32_MAX : tile.rows()}},
      .numerics = {.weights = weights, .keys = decode::warp_keys},
      .recipe = recipe_of<make_recipe<name, tile, engine>>};
}

constexpr decode::DecodeTile with_bytes(decode::DecodeTile tile, int element_bytes) {
  tile.element_bytes = element_bytes;
  return tile;
}
template <attn_dtype type, Text variant, decode::DecodeTile tile, bool engine>
constexpr Kernel same() {
  constexpr Text family = engine ? "decode_sm90_" : "decode_sm80_";
  return row<kernel_name<family, type, variant>, with_bytes(tile, 2), engine>(type_bit(type),
                                                                              type_bit(type), type);
}
template <Text variant, decode::DecodeTile tile, bool engine>
constexpr Kernel fp8() {
  constexpr Text name = Text(engine ? "decode_sm90_fp8_" : "decode_sm89_fp8_").append(variant.text);
  return row<name, with_bytes(tile, 1), engine>(type_bit(ATTN_F16) | type_bit(ATTN_BF16),
                                                fp8_of_cuda, ATTN_F16);
}

template <bool engine, Text variant, decode::DecodeTile tile>
constexpr std::array of_all_types = {same<ATTN_BF16, variant, tile, engine>(),
                                     same<ATTN_F16, variant, tile, engine>(),
                                     fp8<variant, tile, engine>()};

using Tile = decode::DecodeTile;
template <bool engine>
constexpr std::array rows =
    joined(of_all_types<engine, "d64", Tile{.head_dim = 64, .head_dim_v = 64}>,
           of_all_types<engine, "d128", Tile{.head_dim = 128, .head_dim_v = 128}>,
           of_all_types<engine, "d192_dv128", Tile{.head_dim = 192, .head_dim_v = 128}>,
           of_all_types<engine, "d256", Tile{.head_dim = 256, .head_dim_v = 256}>);
constexpr std::array wide_rows = joined(
    of_all_types<true, "d64_r64", Tile{.head_dim = 64, .head_dim_v = 64, .rows_of_group = 64}>,
    of_all_types<true, "d128_r64", Tile{.head_dim = 128, .head_dim_v = 128, .rows_of_group = 64}>,
    of_all_types<true, "d192_dv128_r64",
                 Tile{.head_dim = 192, .head_dim_v = 128, .rows_of_group = 64}>,
    of_all_types<true, "d256_r64", Tile{.head_dim = 256, .head_dim_v = 256, .rows_of_group = 64}>);
constexpr std::array rows_of_splits = joined(
    of_all_types<true, "d64_split", Tile{.head_dim = 64, .head_dim_v = 64, .split = true}>,
    of_all_types<true, "d128_split", Tile{.head_dim = 128, .head_dim_v = 128, .split = true}>,
    of_all_types<true, "d192_dv128_split", Tile{.head_dim = 192, .head_dim_v = 128, .split = true}>,
    of_all_types<true, "d256_split", Tile{.head_dim = 256, .head_dim_v = 256, .split = true}>);
constexpr std::array rows_of_three_groups = joined(
    of_all_types<true, "d64_r48", Tile{.head_dim = 64, .head_dim_v = 64, .row_groups = 3}>,
    of_all_types<true, "d128_r48", Tile{.head_dim = 128, .head_dim_v = 128, .row_groups = 3}>,
    of_all_types<true, "d192_dv128_r48",
                 Tile{.head_dim = 192, .head_dim_v = 128, .row_groups = 3}>);

template <Text name, int dim, int rows>
constexpr Kernel blocks() {
  constexpr uint32_t floats = type_bit(ATTN_F16) | type_bit(ATTN_BF16);
  constexpr decode::DecodeTile tile = {.head_dim = dim,
                                       .head_dim_v = dim,
                                       .element_bytes = 2,
                                       .own_types = true,
                                       .rows_of_group = rows};
  Kernel kernel =
      row<name, tile, true>(floats, floats | device_ggml_types | scaled_types, ATTN_BF16);
  kernel.limits.features |= feature_mixed_kv_types;
  kernel.limits.floats_as_q = true;
  kernel.numerics.scaled_weights = true;
  kernel.limits.head_dim.multiple = kernel.limits.head_dim_v.multiple = dim;
  return kernel;
}
constexpr std::array rows_of_blocks = {blocks<"decode_sm90_blocks_d64", 64, 8>(),
                                       blocks<"decode_sm90_blocks_d128", 128, 8>(),
                                       blocks<"decode_sm90_blocks_d256", 256, 8>(),
                                       blocks<"decode_sm90_blocks_d64_r16", 64, 16>(),
                                       blocks<"decode_sm90_blocks_d128_r16", 128, 16>(),
                                       blocks<"decode_sm90_blocks_d256_r16", 256, 16>()};
constinit const std::array all_rows = joined(rows<true>, rows<false>, wide_rows, rows_of_splits,
                                             rows_of_three_groups, rows_of_blocks);

}  // namespace

std::span<const Kernel> decode_forward_rows() {
  return all_rows;
}

}  // namespace attn
