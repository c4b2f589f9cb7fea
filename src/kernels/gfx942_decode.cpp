// The kernels decode_gfx942_* and decode_gfx950_*: few queries against many keys. They differ by
// the types and the largest head_dim they take.
#include <algorithm>

#include "asm/gfx942/decode_args.h"
#include "kernels/decode_units.h"
#include "kernels/families.h"
#include "kernels/gfx942.h"
#include "kernels/limits.h"

namespace attn {
namespace {

static_assert(attn_gfx942_decode_keys == decode::unit_keys &&
              attn_gfx942_decode_rows == decode::group_rows &&
              attn_gfx942_decode_merged_parts == decode::merged_parts);

constexpr int64_t rows_of_tile = attn_gfx942_decode_rows;
constexpr int64_t few_units = 8;  // of a workgroup: two of each wave

int64_t row_tiles(const Problem& p) {
  return std::max<int64_t>(1, ceil_div(p.seqlen_q * p.group(), rows_of_tile));
}

// Two workgroups on each compute unit, one where they would have few units, but no more than units.
int64_t blocks(const Problem& p, const DeviceInfo& device) {
  int64_t units = 0;
  for (const attn_segment& s : p.segment) units += ceil_div(s.seqlen, decode::unit_keys);
  const int64_t all = p.batch * p.heads_kv * row_tiles(p) * std::max<int64_t>(1, units);
  int64_t most = std::max<int64_t>(1, multiprocessors(p, device));
  if (all / most >= few_units && p.max_sms == 0) most *= 2;
  const int64_t columns = decode::columns_of(p, most);
  return columns * std::min(most / columns, ceil_div(all, columns));
}

// Two slots of each workgroup.
struct Workspace {
  int64_t slots, stats_at, arrived_at, bytes;
};
Workspace workspace_of(int64_t blocks, int64_t dim) {
  constexpr int64_t waves = attn_gfx942_decode_waves;
  const int64_t slots = 2 * blocks, stats_at = slots * rows_of_tile * dim * int64_t{sizeof(float)},
                arrived_at = stats_at + slots * waves * rows_of_tile * 4 * int64_t{sizeof(float)};
  return {slots, stats_at, arrived_at, arrived_at + 2 * slots * waves * int64_t{sizeof(unsigned)}};
}

// Of a row, without the scales of blocks.
int code_bytes(attn_dtype type, int64_t dim) {
  if (type == ATTN_Q8_0) return int(dim);
  if (type == ATTN_Q4_0) return int(dim / 2);
  return int(dtype_bytes(type, dim));
}

attn_gfx942_decode_kernarg constants(const Problem& p, int64_t grid, const Workspace& workspace) {
  constexpr double log2_e = 1.4426950408889634;
  attn_gfx942_decode_kernarg a{};
  set_bytes(a.q_stride, p.q_type, p.q_stride);
  set_bytes(a.out_stride, p.out_type, p.out_stride);
  a.stats = offset_of<float>(size_t(workspace.stats_at));
  a.arrived = offset_of<unsigned>(size_t(workspace.arrived_at));
  a.q_descale = descale(p.q_descale, p.heads_kv, {});
  a.batch = int(p.batch);
  a.heads_q = int(p.heads_q);
  a.heads_kv = int(p.heads_kv);
  a.group = int(p.group());
  a.by_group = divisor(p.group());
  a.seqlen_q = int(p.seqlen_q);
  a.total_q = int(p.total_q);
  a.band = band_of(p);
  a.columns = int(decode::columns_of(p, grid));
  a.column_blocks = int(grid / a.columns);
  a.slots = unsigned(workspace.slots);
  a.num_segments = p.num_segments;
  a.head_dim = code_bytes(p.segment[0].k_type, p.head_dim);
  a.head_dim_v = code_bytes(p.segment[0].v_type, p.head_dim_v);
  a.q_type = p.q_type;
  a.out_type = p.out_type;
  a.factor = float(p.softcap > 0 ? double(p.scale) / p.softcap : p.scale * log2_e);
  a.cap = float(p.softcap * log2_e);
  a.out_bytes = int(dtype_bytes(p.out_type, p.head_dim_v));
  a.workgroups = int(std::min<int64_t>(grid, 1 << 16));
  set_segments(p, a.segment);
  return a;
}

void patch(const Problem& p, const Args& args, void* workspace, attn_gfx942_decode_kernarg& a) {
  patch_rows(args, &a);
  a.q = args.q;
  a.alibi_slopes = args.alibi_slopes;
  a.q_descale.at = args.q_descale;
  a.kv_begins = args.kv_begin;
  rebase(workspace, a.sums, a.stats, a.arrived);
  patch_segments(p, args, a.segment);
}

Status check(const Problem& p) {
  ATTN_TRY(decode::check_units(p, row_tiles(p), int(rows_of_tile), attn_gfx942_kv_segments,
                               attn_gfx942_max_length));
  if (p.total_q > INT32_MAX)
    return unsupported("total_q ", p.total_q, "; accepted: up to ", INT32_MAX);
  ATTN_TRY(check_seq_stride("q_stride", p.q_type, p.q_stride.seq));
  ATTN_TRY(check_seq_stride("out_stride", p.out_type, p.out_stride.seq));
  ATTN_TRY(check_head_stride("q_stride", p.q_type, p.q_stride.head));
  ATTN_TRY(check_head_stride("out_stride", p.out_type, p.out_stride.head));
  for (const attn_segment& s : p.segment) ATTN_TRY(check_segment(s));
  return {};
}

template <Text name, int64_t dim>
Status make_recipe(const Problem& p, const DeviceInfo& device, Recipe* recipe) {
  ATTN_TRY(check(p));
  const int64_t grid = blocks(p, device);
  const Workspace workspace = workspace_of(grid, dim);
  recipe->workspace = size_t(workspace.bytes);
  recipe->steps.push_back({
      .image = name_of<name>.text,
      .static_shared_bytes = attn_gfx942_decode_lds_bytes,
      .launch = {.grid = {uint32_t(grid), 1, 1}, .block = {64 * attn_gfx942_decode_waves, 1, 1}},
      .arguments = arguments_of<patch>(constants(p, grid, workspace)),
  });
  return {};
}

// What rows have in common; weights are of the type that products are of.
template <Text name, int64_t dim>
constexpr Kernel row(attn_dtype weights, uint32_t in_types, uint32_t kv_types, uint32_t features,
                     int64_t multiple) {
  return {
      .name = name_of<name>.text,
      .op = Op::forward,
      .backend = ATTN_BACKEND_HIP,
      .limits = {.in_types = in_types,
                 .kv_types = kv_types,
                 .out_types = float_types,
                 .flags = forward_flags | ATTN_ALIBI | ATTN_SPLIT_INVARIANT,
                 .features = forward_features | feature_segments | feature_paged_kv |
                             feature_shared_pages | feature_softcap | feature_kv_begin | features,
                 .head_dim = {.multiple = multiple, .max = dim},
                 .head_dim_v = {.multiple = multiple, .max = dim},
                 .seqlen_q = {.max = rows_of_tile},
                 .group = {.max = rows_of_tile}},
      .numerics = {.weights = weights,
                   .lag = 8,
                   .rows = int(rows_of_tile),
                   .keys = decode::unit_keys,
                   .rounded_sums = true,
                   .always_split_invariant = true},
      .recipe = recipe_of<make_recipe<name, dim>>};
}
// K and V as q.
template <Text prefix, attn_dtype type, Text variant, int64_t dim>
constexpr Kernel same() {
  constexpr Text name =
      Text(prefix).append(type == ATTN_F16 ? "f16_" : "bf16_").append(variant.text);
  return row<name, dim>(type, type_bit(type), type_bit(type), 0, 8);
}
template <Text prefix, uint32_t e4m3_types, Text variant, int64_t dim>
constexpr Kernel fp8() {
  constexpr Text name = Text(prefix).append("fp8_").append(variant.text);
  return row<name, dim>(ATTN_F16, type_bit(ATTN_F16) | type_bit(ATTN_BF16) | e4m3_types, e4m3_types,
                        feature_mixed_kv_types | kv_descale_features | feature_shared_descales, 16);
}
// ggml blocks of one type, whose elements are rounded to f16.
template <Text prefix, attn_dtype type, Text variant, int64_t dim>
constexpr Kernel blocks_of() {
  constexpr Text name = Text(prefix).append(variant.text);
  Kernel kernel = row<name, dim>(ATTN_F16, type_bit(ATTN_F16) | type_bit(ATTN_BF16), type_bit(type),
                                 feature_any_ggml_stride, 32);
  kernel.numerics.rounds_kv = true;
  return kernel;
}

template <Text prefix, uint32_t e4m3_types>
constexpr auto rows_of = std::to_array<Kernel>({
    same<prefix, ATTN_BF16, "d64", 64>(),
    same<prefix, ATTN_F16, "d64", 64>(),
    fp8<prefix, e4m3_types, "d64", 64>(),
    same<prefix, ATTN_BF16, "d128", 128>(),
    same<prefix, ATTN_F16, "d128", 128>(),
    fp8<prefix, e4m3_types, "d128", 128>(),
    blocks_of<prefix, ATTN_Q8_0, "q8_0_d64", 64>(),
    blocks_of<prefix, ATTN_Q8_0, "q8_0_d128", 128>(),
    blocks_of<prefix, ATTN_Q4_0, "q4_0_d128", 128>(),
});
constexpr uint32_t ocp = type_bit(ATTN_F8_E4M3FN), both = ocp | type_bit(ATTN_F8_E4M3FNUZ);
constinit const auto rows = joined(rows_of<"decode_gfx942_", both>, rows_of<"decode_gfx950_", ocp>);

}  // namespace

std::span<const Kernel> gfx942_decode_rows() {
  return rows;
}

}  // namespace attn
