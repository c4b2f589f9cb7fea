// The kernels fwd_gfx942_*, before each of which prepare_gfx942_fp8 or _16bit runs, _segments if
// K and V are in several segments or in pages: it writes them as one padded segment. They differ by
// the type of q, k and v and the largest head_dim they take; _mask: with a block mask; _score: with
// softcap, ALiBi and pages; _bias: with these and a bias; _descaled: segments with different types
// and descales, and descales per block of keys, after prepare_gfx942_fp8_descaled.
#include <algorithm>
#include <utility>

#include "asm/gfx942/prepare_args.h"
#include "kernels/families.h"
#include "kernels/gfx942.h"
#include "kernels/limits.h"
#include "kernels/mask_arrays.h"

namespace attn {
namespace {

constexpr int64_t tile_keys = attn_gfx942_tile_keys;
constexpr int64_t max_length = attn_gfx942_max_length;
constexpr int64_t max_grid_yz = (1 << 16) - 1;  // workgroups of a HIP grid along y and z
constexpr int64_t max_bias_stride = 1 << 23;    // 256 queries and 64 keys further is below 2^32
constexpr unsigned xcds = 8;  // as the kernels count: workgroup i runs on XCD i % 8

// What a variant has beyond the masks and layouts of all.
enum class With { nothing, block_mask, score_terms, bias, descales };

// The workspace: tiles of 64 keys of K and V, then, if they are gathered, what is to be known of
// each tile, and the lengths of sequences.
struct Workspace {
  bool gathered;
  int64_t sequence_tiles;  // of the longest sequence
  int64_t tiles;           // of a K/V head
  size_t of_tiles, lengths, bytes;

  Workspace(const Problem& p, With with, int dim) {
    const attn_segment& s = p.segment[0];
    const bool descaled = with == With::descales;
    gathered = descaled || p.num_segments > 1 || s.layout == ATTN_PAGED;
    sequence_tiles = descaled ? 0 : ceil_div(p.seqlen_kv, tile_keys);
    if (descaled)
      for (const attn_segment& of : p.segment) sequence_tiles += ceil_div(of.seqlen, tile_keys);
    tiles = p.batch * sequence_tiles;
    // A packed sequence begins at tile cu_seqlens / 64 + b.
    if (!gathered && s.layout == ATTN_PACKED) tiles = s.total / tile_keys + p.batch;
    of_tiles = size_t(tiles * p.heads_kv * 2 * tile_keys * dtype_bytes(s.k_type, dim));
    lengths = of_tiles + (descaled ? size_t(tiles * p.heads_kv) * sizeof(attn_gfx942_tile_record)
                                   : size_t(tiles) * sizeof(unsigned long long));
    bytes = gathered ? lengths + size_t(p.batch) * sizeof(int) : of_tiles;
  }
  template <class T>
  static T* at(void* workspace, size_t offset) {
    return reinterpret_cast<T*>(static_cast<char*>(workspace) + offset);
  }
};

int64_t query_tiles(const Problem& p) {
  return ceil_div(p.seqlen_q, attn_gfx942_rows);
}

// The work of a (batch, KV head) pair stays on one XCD, whose L2 then has its K and V, unless that
// leaves XCDs idle: then the pair is cut into 2, 4 or 8 parts.
int parts_log2(const Problem& p) {
  const int64_t pairs = p.batch * p.heads_kv, items = query_tiles(p) * p.group();
  int log2 = 0;
  const auto idle = [&] {
    const int64_t portions = pairs << log2, slots = ceil_div(portions, xcds) * xcds;
    return 10 * (slots - portions) > slots;
  };
  while (log2 < 3 && (int64_t{2} << log2) <= items && idle()) ++log2;
  return log2;
}

// The grid is (XCDs, items of a portion, portions of an XCD).
int64_t grid_items(const Problem& p) {
  const int64_t items = ceil_div(query_tiles(p) * p.group(), int64_t{1} << parts_log2(p));
  return forward_blocks(p, items);
}
int64_t grid_portions(const Problem& p) {
  return forward_blocks(p, ceil_div((p.batch * p.heads_kv) << parts_log2(p), xcds));
}

// ceil(2^32 / divisor), which gives quotients of n while n * divisor < 2^32; 0 means 1.
unsigned magic(int64_t divisor) {
  return divisor == 1 ? 0 : unsigned(ceil_div(int64_t{1} << 32, divisor));
}

// Scores and sums have one scale, whatever segment they are of.
Status check_alike(const Problem& p) {
  const attn_segment& first = p.segment[0];
  for (const attn_segment& s : p.segment) {
    if (s.k_type != first.k_type || s.v_type != first.v_type)
      return unsupported("segments are of ", dtype_name(first.k_type), ", ",
                         dtype_name(first.v_type), " and of ", dtype_name(s.k_type), ", ",
                         dtype_name(s.v_type), "; accepted: one type of k and one of v");
    if (s.k_descale != ATTN_DESCALE_NONE || s.v_descale != ATTN_DESCALE_NONE)
      return unsupported("num_segments is ", p.num_segments, "; accepted with descales: 1");
  }
  return {};
}

Status check(const Problem& p, With with, const Workspace& workspace) {
  if (p.num_segments > attn_gfx942_kv_segments)
    return unsupported("num_segments is ", p.num_segments, "; accepted: up to ",
                       int{attn_gfx942_kv_segments});
  if (p.seqlen_q > max_length || p.seqlen_kv > max_length)
    return unsupported("seqlen_q ", p.seqlen_q, ", seqlen_kv ", p.seqlen_kv, "; accepted: up to ",
                       max_length);
  if (p.total_q > INT32_MAX)
    return unsupported("total_q ", p.total_q, "; accepted: up to ", INT32_MAX);
  if (p.num_segments > 1 && with != With::descales) ATTN_TRY(check_alike(p));
  ATTN_TRY(check_seq_stride("q_stride", p.q_type, p.q_stride.seq));
  ATTN_TRY(check_seq_stride("out_stride", p.out_type, p.out_stride.seq));
  for (const attn_segment& s : p.segment) ATTN_TRY(check_segment(s));
  const int log2 = parts_log2(p);
  const int64_t items = grid_items(p), portions = grid_portions(p);
  if (p.batch > max_grid_yz || p.heads_kv > max_grid_yz || items > max_grid_yz ||
      portions > max_grid_yz || (items << log2) * p.group() >> 32 != 0 ||
      p.batch * p.heads_kv * p.heads_kv >> 32 != 0 || workspace.tiles * p.heads_kv >> 31 != 0 ||
      p.batch * p.heads_q >> 31 != 0)
    return unsupported("batch ", p.batch, ", heads_q ", p.heads_q, ", heads_kv ", p.heads_kv,
                       ", seqlen_q ", p.seqlen_q,
                       ": more workgroups than a grid has, or more tiles of K and V than 2^31");
  if (p.bias_type != ATTN_DTYPE_NONE) {
    for (const int i : {2, 3})
      if (dtype_bytes(p.bias_type, p.bias_stride[i]) >= max_bias_stride)
        return unsupported("bias_stride[", i, "] is ", p.bias_stride[i], "; accepted: less than ",
                           max_bias_stride, " bytes");
  }
  if (with == With::block_mask && p.mask_rows() * p.mask_columns() >> 31 != 0)
    return unsupported("seqlen_q ", p.seqlen_q, ", seqlen_kv ", p.seqlen_kv,
                       ": 2^31 blocks of the mask or more for a head");
  return {};
}

// What both kernels read alike.
template <class Kernarg>
void set_sizes(const Problem& p, const Args& args, With with, const Workspace& workspace,
               Kernarg* a) {
  a->cu_seqlens_q = p.q_layout == ATTN_PACKED ? args.cu_seqlens_q : nullptr;
  a->seqlen_q = int(p.seqlen_q);
  a->total_q = int(p.total_q);
  a->seqlen_kv = int(with == With::descales ? workspace.sequence_tiles * tile_keys : p.seqlen_kv);
  a->band = band_of(p);
  a->tiles = int(workspace.tiles);
  a->head_dim = int(p.head_dim);
  a->head_dim_v = int(p.head_dim_v);
}

bool is_ocp(attn_dtype type) {
  return type == ATTN_F8_E4M3FN;
}

template <With with, int dim>
void pack_prepare(const Problem& p, const Args& args, const Target& target, Parameters* to) {
  const attn_segment& s = p.segment[0];
  const Workspace workspace(p, with, dim);
  attn_gfx942_prepare_kernarg a{};
  a.prepared = target.workspace;
  if (workspace.gathered) a.lengths = Workspace::at<int>(target.workspace, workspace.lengths);
  if (with == With::descales) {
    a.tile_records = Workspace::at<attn_gfx942_tile_record>(target.workspace, workspace.of_tiles);
    a.q_descale = descale(p.q_descale, args.q_descale, p.heads_kv, s);
  } else if (workspace.gathered)
    a.missing = Workspace::at<unsigned long long>(target.workspace, workspace.of_tiles);
  set_sizes(p, args, with, workspace, &a);
  a.padded_dim = dim;
  a.convert_k = is_ocp(s.k_type);
  a.convert_v = is_ocp(s.v_type);
  a.num_segments = p.num_segments;
  set_segments(p, args, a.segment);
  store(a, to);
}

attn_gfx942_forward_kernarg forward_kernarg(const Problem& p, const Args& args,
                                            const Target& target, With with, int dim) {
  const attn_segment& s = p.segment[0];
  const Workspace workspace(p, with, dim);
  const bool descaled = with == With::descales;  // the tiles' records have what K and V have
  attn_gfx942_forward_kernarg a{};
  a.q = args.q;
  a.prepared = target.workspace;
  a.out = args.out;
  a.lse = args.lse;
  set_sizes(p, args, with, workspace, &a);
  const attn_kv_lengths lengths = kv_lengths(s, args.segment[0]);
  a.cu_seqlens_kv = workspace.gathered ? nullptr : lengths.cu_seqlens;
  a.seqlens_kv = workspace.gathered ? Workspace::at<int>(target.workspace, workspace.lengths)
                                    : lengths.seqlens;
  a.total_kv = int(lengths.total);
  // A descale that the problem has not is 1.
  const auto descale = [&](attn_descale_kind kind, const float* given, int bit) {
    if (kind == ATTN_DESCALE_HEAD) a.options |= 1 << bit;
    return kind == ATTN_DESCALE_NONE ? nullptr : given;
  };
  if (!descaled) {
    a.q_descale = descale(p.q_descale, args.q_descale, 0);
    a.k_descale = descale(s.k_descale, args.segment[0].k_descale, 1);
    a.v_descale = descale(s.v_descale, args.segment[0].v_descale, 2);
  }
  if (p.has(ATTN_SPLIT_INVARIANT)) a.options |= 1 << 3;
  a.sinks = p.has(ATTN_SINKS) ? args.sinks : nullptr;
  set_bytes(a.q_stride, p.q_type, p.q_stride);
  set_bytes(a.out_stride, p.out_type, p.out_stride);
  a.heads_kv = int(p.heads_kv);
  a.group = int(p.group());
  a.q_tiles = int(query_tiles(p));
  a.pairs = int(p.batch * p.heads_kv);
  a.parts_log2 = parts_log2(p);
  a.group_magic = magic(p.group());
  a.heads_magic = magic(p.heads_kv);
  const int doublings = is_ocp(p.q_type) + (!descaled && is_ocp(s.k_type));
  a.scale = p.scale * 1.44269504f * float(1 << doublings);  // log2(e)
  a.out_factor = !descaled && is_ocp(s.v_type) ? 2 : 1;
  a.convert_q = is_ocp(p.q_type);
  a.out_type = p.out_type;
  const uint32_t(&grid)[3] = target.step.launch.grid;
  a.items = int(grid[1]);
  if (!descaled && p.needs.features & feature_paged_kv)
    a.missing = Workspace::at<unsigned long long>(target.workspace, workspace.of_tiles);
  a.out_scale = p.has(ATTN_OUT_SCALE) ? args.out_scale : nullptr;
  a.workgroups = int(std::min<int64_t>(int64_t{grid[0]} * grid[1] * grid[2], 1 << 16));
  return a;
}
attn_gfx942_descaled_kernarg descaled_kernarg(const Problem& p, const Args& args,
                                              const Target& target, With with, int dim) {
  const size_t records = Workspace(p, with, dim).of_tiles;
  return {forward_kernarg(p, args, target, with, dim),
          Workspace::at<attn_gfx942_tile_record>(target.workspace, records), p.num_segments, 0};
}
attn_gfx942_mask_kernarg mask_kernarg(const Problem& p, const Args& args, const Target& target,
                                      With with, int dim) {
  return {forward_kernarg(p, args, target, with, dim), mask_arrays(p, args)};
}
attn_gfx942_score_kernarg score_kernarg(const Problem& p, const Args& args, const Target& target,
                                        With with, int dim) {
  attn_gfx942_score_kernarg a{};
  a.forward = forward_kernarg(p, args, target, with, dim);
  if (p.softcap > 0) a.forward.scale = float(double(p.scale) / p.softcap);
  a.alibi_slopes = p.has(ATTN_ALIBI) ? args.alibi_slopes : nullptr;
  a.cap = float(p.softcap * 1.44269504);
  return a;
}
attn_gfx942_bias_kernarg bias_kernarg(const Problem& p, const Args& args, const Target& target,
                                      With with, int dim) {
  attn_gfx942_bias_kernarg a{};
  a.score = score_kernarg(p, args, target, with, dim);
  if (p.bias_type == ATTN_DTYPE_NONE) return a;
  a.bias = args.bias;
  for (int i = 0; i < 4; ++i) a.bias_stride[i] = dtype_bytes(p.bias_type, p.bias_stride[i]);
  a.bias_bytes = (p.seqlen_q - 1) * a.bias_stride[2] + (p.seqlen_kv - 1) * a.bias_stride[3] +
                 dtype_bytes(p.bias_type);
  a.bias_type = p.bias_type;
  return a;
}

template <With with>
constexpr auto kernarg_of = forward_kernarg;
template <>
constexpr auto kernarg_of<With::block_mask> = mask_kernarg;
template <>
constexpr auto kernarg_of<With::score_terms> = score_kernarg;
template <>
constexpr auto kernarg_of<With::bias> = bias_kernarg;
template <>
constexpr auto kernarg_of<With::descales> = descaled_kernarg;

template <With with, int dim>
void pack(const Problem& p, const Args& args, const Target& target, Parameters* to) {
  store(kernarg_of<with>(p, args, target, with, dim), to);
}
template <With with>
constexpr size_t kernarg_bytes =
    sizeof(kernarg_of<with>(std::declval<const Problem&>(), std::declval<const Args&>(),
                            std::declval<const Target&>(), with, 0));
static_assert(ATTN_F32 == 1 && ATTN_F16 == 2 && ATTN_BF16 == 3 && ATTN_F8_E4M3FN == 4 &&
              ATTN_F8_E5M2 == 5 && ATTN_F8_E4M3FNUZ == 6);

// What kernels of a type have of their own: q, k and v in fp8, bf16 or f16.
struct Family {
  attn_dtype weights;
  int element_bytes;
  uint32_t threads;  // of a workgroup
  int slots;         // tiles of K and of V in LDS
  Text prepare, prepare_segments, prepare_descaled;
};
constexpr Family family_of(attn_dtype weights) {
  if (weights == ATTN_F8_E4M3FNUZ)
    return {weights,
            1,
            512,
            4,
            "prepare_gfx942_fp8",
            "prepare_gfx942_fp8_segments",
            "prepare_gfx942_fp8_descaled"};
  return {weights, 2, 256, 2, "prepare_gfx942_16bit", "prepare_gfx942_16bit_segments", ""};
}
template <attn_dtype weights>
constexpr Family family = family_of(weights);

template <Text name, attn_dtype weights, int dim, With with>
Status make_recipe(const Problem& p, const DeviceInfo&, Recipe* recipe) {
  constexpr const Family& f = family<weights>;
  constexpr int tile_part = tile_keys * dim * f.element_bytes;  // K or V
  const Workspace workspace(p, with, dim);
  ATTN_TRY(check(p, with, workspace));
  recipe->workspace = workspace.bytes;
  const Launch launch = {.grid = {xcds, uint32_t(grid_items(p)), uint32_t(grid_portions(p))},
                         .block = {f.threads, 1, 1}};
  if (is_empty(launch)) return {};
  recipe->steps.reserve(2);
  recipe->steps.push_back({
      .image = (with == With::descales ? f.prepare_descaled
                : workspace.gathered   ? f.prepare_segments
                                       : f.prepare)
                   .text,
      .kernarg_bytes = sizeof(attn_gfx942_prepare_kernarg),
      .launch = {.grid = {uint32_t(workspace.sequence_tiles), uint32_t(p.heads_kv),
                          uint32_t(p.batch)},
                 .block = {dim * f.element_bytes, 1, 1}},
      .pack = pack_of<pack_prepare<with, dim>>,
  });
  recipe->steps.push_back({
      .image = name_of<name>.text,
      .kernarg_bytes = kernarg_bytes<with>,
      .static_shared_bytes = uint32_t(2 * f.slots * tile_part),
      .launch = launch,
      .pack = pack_of<pack<with, dim>>,
  });
  return {};
}

// e4m3 in either form, of which q, k and v may differ; or one 16-bit type.
constexpr Limits limits(attn_dtype weights, int64_t head_dim_max, With with) {
  const bool fp8 = weights == ATTN_F8_E4M3FNUZ;
  const uint32_t types =
      fp8 ? type_bit(ATTN_F8_E4M3FN) | type_bit(ATTN_F8_E4M3FNUZ) : type_bit(weights);
  const uint32_t of_fp8 = feature_mixed_kv_types | feature_descale_tensor | feature_descale_head;
  const Sizes head_dim = {.multiple = fp8 ? 16 : 8, .max = head_dim_max};
  Limits limits = {.in_types = types,
                   .kv_types = types,
                   .out_types = float_types | (fp8 ? fp8_types : 0u),
                   .flags = forward_flags | uint32_t(fp8 ? ATTN_OUT_SCALE : ATTN_SPLIT_INVARIANT),
                   .features = forward_features | feature_segments | (fp8 ? of_fp8 : 0u),
                   .head_dim = head_dim,
                   .head_dim_v = head_dim};
  const bool scored = with == With::score_terms || with == With::bias;
  if (scored) {
    limits.flags |= ATTN_ALIBI;
    limits.features |= feature_softcap;
  }
  if (scored || (fp8 && with != With::block_mask)) limits.features |= feature_paged_kv;
  if (with == With::descales) limits.features |= feature_descale_block;
  if (with == With::bias) limits.features |= feature_bias;
  return with == With::block_mask ? with_block_mask(limits) : limits;
}
constexpr Numerics numerics(attn_dtype weights) {
  const bool fp8 = weights == ATTN_F8_E4M3FNUZ;
  return {.weights = weights,
          .offset = weights == ATTN_BF16 ? 0 : 7,
          .lag = fp8 ? 0.9 : 8,
          .rows = 32,
          .keys = tile_keys,
          .last_tile_first = true,
          .rounded_sums = true,
          .always_split_invariant = !fp8};
}

template <Text name, attn_dtype weights, int dim, With with = With::nothing>
constexpr Kernel row() {
  constexpr const Family& f = family<weights>;
  constexpr bool descaled = with == With::descales;
  return {.name = name_of<name>.text,
          .op = Op::forward,
          .backend = ATTN_BACKEND_HIP,
          .limits = limits(weights, dim, with),
          .numerics = numerics(weights),
          .recipe = recipe_of<make_recipe<name, weights, dim, with>>,
          .first_images = {(descaled ? f.prepare_descaled : f.prepare).text,
                           descaled ? nullptr : f.prepare_segments.text}};
}

constexpr attn_dtype fp8 = ATTN_F8_E4M3FNUZ, bf16 = ATTN_BF16, f16 = ATTN_F16;
constinit const Kernel rows[] = {
    row<"fwd_gfx942_fp8_d64", fp8, 64>(),
    row<"fwd_gfx942_fp8_d128", fp8, 128>(),
    row<"fwd_gfx942_fp8_d64_mask", fp8, 64, With::block_mask>(),
    row<"fwd_gfx942_fp8_d128_mask", fp8, 128, With::block_mask>(),
    row<"fwd_gfx942_fp8_d64_descaled", fp8, 64, With::descales>(),
    row<"fwd_gfx942_fp8_d128_descaled", fp8, 128, With::descales>(),
    row<"fwd_gfx942_bf16_d64", bf16, 64>(),
    row<"fwd_gfx942_bf16_d128", bf16, 128>(),
    row<"fwd_gfx942_f16_d64", f16, 64>(),
    row<"fwd_gfx942_f16_d128", f16, 128>(),
    row<"fwd_gfx942_bf16_d64_score", bf16, 64, With::score_terms>(),
    row<"fwd_gfx942_bf16_d128_score", bf16, 128, With::score_terms>(),
    row<"fwd_gfx942_f16_d64_score", f16, 64, With::score_terms>(),
    row<"fwd_gfx942_f16_d128_score", f16, 128, With::score_terms>(),
    row<"fwd_gfx942_bf16_d64_bias", bf16, 64, With::bias>(),
    row<"fwd_gfx942_bf16_d128_bias", bf16, 128, With::bias>(),
    row<"fwd_gfx942_f16_d64_bias", f16, 64, With::bias>(),
    row<"fwd_gfx942_f16_d128_bias", f16, 128, With::bias>(),
    row<"fwd_gfx942_bf16_d64_mask", bf16, 64, With::block_mask>(),
    row<"fwd_gfx942_bf16_d128_mask", bf16, 128, With::block_mask>(),
    row<"fwd_gfx942_f16_d64_mask", f16, 64, With::block_mask>(),
    row<"fwd_gfx942_f16_d128_mask", f16, 128, With::block_mask>(),
};

}  // namespace

std::span<const Kernel> gfx942_forward_rows() {
  return rows;
}

}  // namespace attn
