// The kernels fwd_gfx942_* and fwd_gfx950_*, before each of which prepare_gfx942_fp8 or _16bit
// runs, or that of gfx950, _segments if K and V are in several segments or in pages: it writes them
// as one padded segment. They differ by the type of q, k and v and the largest head_dim they take;
// _mask: with a block mask; _score: with softcap, ALiBi and pages; _bias: with these and a bias;
// _descaled: segments with different types and descales, and descales per block of keys, after
// prepare_gfx942_fp8_descaled; _direct, of gfx950: without that launch, for few queries over
// contiguous rows of K and V.
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
constexpr int64_t direct_dim = 128;             // of rows that _direct reads
constexpr unsigned xcds = 8;  // as the kernels count: workgroup i runs on XCD i % 8

// What a variant has beyond the masks and layouts of all.
enum class With { nothing, block_mask, score_terms, bias, descales, direct };

// Whether prepare_* writes K and V of several segments, or of pages, as one.
bool gathered(const Problem& p, With with) {
  return with == With::descales || p.num_segments > 1 || p.segment[0].layout == ATTN_PAGED;
}

// The workspace: tiles of 64 keys of K and V, then, if they are gathered, what is to be known of
// each tile, and the lengths of sequences.
struct Workspace {
  int64_t sequence_tiles;  // of the longest sequence
  int64_t tiles;           // of a K/V head
  size_t of_tiles, lengths, bytes;

  Workspace(const Problem& p, With with, int dim) {
    const attn_segment& s = p.segment[0];
    const bool descaled = with == With::descales;
    sequence_tiles = descaled ? 0 : ceil_div(p.seqlen_kv, tile_keys);
    if (descaled)
      for (const attn_segment& of : p.segment) sequence_tiles += ceil_div(of.seqlen, tile_keys);
    tiles = p.batch * sequence_tiles;
    // A packed sequence begins at tile cu_seqlens / 64 + b.
    if (!gathered(p, with) && s.layout == ATTN_PACKED) tiles = s.total / tile_keys + p.batch;
    of_tiles = size_t(tiles * p.heads_kv * 2 * tile_keys * dtype_bytes(s.k_type, dim));
    lengths = of_tiles + (descaled ? size_t(tiles * p.heads_kv) * sizeof(attn_gfx942_tile_record)
                                   : size_t(tiles) * sizeof(unsigned long long));
    bytes = gathered(p, with) ? lengths + size_t(p.batch) * sizeof(int) : of_tiles;
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

// Rows that loads of 16 bytes can read, each from its first byte to its last.
Status check_rows(const char* name, const attn_strides& stride) {
  if (stride.batch % 16 == 0 && stride.seq % 16 == 0 && stride.head % 16 == 0 &&
      stride.seq >= direct_dim)
    return {};
  return unsupported(name, " is {batch ", stride.batch, ", seq ", stride.seq, ", head ",
                     stride.head, "}; accepted: multiples of 16, seq from ", direct_dim, " on");
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
  if (with == With::direct) {
    ATTN_TRY(check_rows("k_stride", p.segment[0].k_stride));
    ATTN_TRY(check_rows("v_stride", p.segment[0].v_stride));
  }
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
void set_sizes(const Problem& p, With with, const Workspace& workspace, Kernarg* a) {
  a->seqlen_q = int(p.seqlen_q);
  a->total_q = int(p.total_q);
  a->seqlen_kv = int(with == With::descales ? workspace.sequence_tiles * tile_keys : p.seqlen_kv);
  a->band = band_of(p);
  a->tiles = int(workspace.tiles);
  a->head_dim = int(p.head_dim);
  a->head_dim_v = int(p.head_dim_v);
}

// gfx942 computes with codes of the OCP kind as FNUZ codes, which mean half as much.
bool is_doubled(attn_dtype type, attn_dtype weights) {
  return weights == ATTN_F8_E4M3FNUZ && type == ATTN_F8_E4M3FN;
}

attn_gfx942_prepare_kernarg prepare_constants(const Problem& p, With with,
                                              const Workspace& workspace, int dim,
                                              attn_dtype weights) {
  const attn_segment& s = p.segment[0];
  attn_gfx942_prepare_kernarg a{};
  if (gathered(p, with)) a.lengths = offset_of<int>(workspace.lengths);
  if (with == With::descales) {
    a.tile_records = offset_of<attn_gfx942_tile_record>(workspace.of_tiles);
    a.q_descale = descale(p.q_descale, p.heads_kv, {});
  } else if (gathered(p, with)) {
    a.missing = offset_of<unsigned long long>(workspace.of_tiles);
  }
  set_sizes(p, with, workspace, &a);
  a.padded_dim = dim;
  a.convert_k = is_doubled(s.k_type, weights);
  a.convert_v = is_doubled(s.v_type, weights);
  a.num_segments = p.num_segments;
  set_segments(p, a.segment);
  return a;
}
template <With with>
void patch_prepare(const Problem& p, const Args& args, void* workspace,
                   attn_gfx942_prepare_kernarg& a) {
  a.prepared = workspace;
  a.cu_seqlens_q = args.cu_seqlens_q;
  a.kv_begins = args.kv_begin;
  if (gathered(p, with)) rebase(workspace, a.lengths);
  if (with == With::descales) {
    rebase(workspace, a.tile_records);
    a.q_descale.at = args.q_descale;
  } else if (gathered(p, with)) {
    rebase(workspace, a.missing);
  }
  patch_segments(p, args, a.segment);
}

// Keys may lack a page, as prepare_* has found out.
bool reads_missing(const Problem& p, With with) {
  return with != With::descales && p.needs.features & feature_paged_kv;
}

attn_gfx942_forward_kernarg forward_constants(const Problem& p, With with,
                                              const Workspace& workspace, const Launch& launch,
                                              attn_dtype weights) {
  const attn_segment& s = p.segment[0];
  const bool descaled = with == With::descales;  // the tiles' records have what K and V have
  attn_gfx942_forward_kernarg a{};
  set_sizes(p, with, workspace, &a);
  a.total_kv = int(s.total);
  if (!descaled)
    for (const auto& [kind, bit] : {std::pair{p.q_descale, 0}, {s.k_descale, 1}, {s.v_descale, 2}})
      if (kind == ATTN_DESCALE_HEAD) a.options |= 1 << bit;
  if (p.has(ATTN_SPLIT_INVARIANT)) a.options |= 1 << 3;
  set_bytes(a.q_stride, p.q_type, p.q_stride);
  set_bytes(a.out_stride, p.out_type, p.out_stride);
  a.heads_kv = int(p.heads_kv);
  a.group = int(p.group());
  a.q_tiles = int(query_tiles(p));
  a.pairs = int(p.batch * p.heads_kv);
  a.parts_log2 = parts_log2(p);
  a.group_magic = magic(p.group());
  a.heads_magic = magic(p.heads_kv);
  const int doublings =
      is_doubled(p.q_type, weights) + (!descaled && is_doubled(s.k_type, weights));
  a.scale = p.scale * 1.44269504f * float(1 << doublings);  // log2(e)
  a.out_factor = !descaled && is_doubled(s.v_type, weights) ? 2 : 1;
  a.convert_q = is_doubled(p.q_type, weights);
  a.out_type = p.out_type;
  a.items = int(launch.grid[1]);
  if (gathered(p, with)) a.seqlens_kv = offset_of<const int>(workspace.lengths);
  if (reads_missing(p, with)) a.missing = offset_of<const unsigned long long>(workspace.of_tiles);
  a.workgroups =
      int(std::min<int64_t>(int64_t{launch.grid[0]} * launch.grid[1] * launch.grid[2], 1 << 16));
  return a;
}
void patch_forward(const Problem& p, const Args& args, void* workspace, With with,
                   attn_gfx942_forward_kernarg* a) {
  patch_rows(args, a);
  a->q = args.q;
  a->prepared = workspace;
  a->out_scale = args.out_scale;
  a->kv_begins = args.kv_begin;
  const attn_segment_args of = args.segment[0];
  if (gathered(p, with)) {
    rebase(workspace, a->seqlens_kv);
  } else {
    a->seqlens_kv = of.seqlens;
    a->cu_seqlens_kv = of.cu_seqlens;
  }
  if (reads_missing(p, with)) rebase(workspace, a->missing);
  if (with == With::descales) return;
  a->q_descale = args.q_descale;
  a->k_descale = of.k_descale;
  a->v_descale = of.v_descale;
}

void set_score(const Problem& p, attn_gfx942_score_kernarg* a) {
  if (p.softcap > 0) a->forward.scale = float(double(p.scale) / p.softcap);
  a->cap = float(p.softcap * 1.44269504);
}
void set_bias(const Problem& p, attn_gfx942_bias_kernarg* a) {
  if (p.bias_type == ATTN_DTYPE_NONE) return;
  for (int i = 0; i < 4; ++i) a->bias_stride[i] = dtype_bytes(p.bias_type, p.bias_stride[i]);
  a->bias_bytes = (p.seqlen_q - 1) * a->bias_stride[2] + (p.seqlen_kv - 1) * a->bias_stride[3] +
                  dtype_bytes(p.bias_type);
  a->bias_type = p.bias_type;
}

void set_rows(const Problem& p, attn_gfx950_direct_kernarg* a) {
  const attn_segment& s = p.segment[0];
  set_bytes(a->k_stride, s.k_type, s.k_stride);
  set_bytes(a->v_stride, s.v_type, s.v_stride);
  if (s.layout == ATTN_PACKED) a->k_stride[0] = a->v_stride[0] = 0;
}

template <With with>
constexpr auto kernarg_of() {
  if constexpr (with == With::block_mask)
    return attn_gfx942_mask_kernarg{};
  else if constexpr (with == With::score_terms)
    return attn_gfx942_score_kernarg{};
  else if constexpr (with == With::bias)
    return attn_gfx942_bias_kernarg{};
  else if constexpr (with == With::descales)
    return attn_gfx942_descaled_kernarg{};
  else if constexpr (with == With::direct)
    return attn_gfx950_direct_kernarg{};
  else
    return attn_gfx942_forward_kernarg{};
}
template <With with>
using Kernarg = decltype(kernarg_of<with>());

template <With with>
Kernarg<with> constants(const Problem& p, const Workspace& workspace, const Launch& launch,
                        attn_dtype weights) {
  Kernarg<with> a{};
  const auto forward = forward_constants(p, with, workspace, launch, weights);
  if constexpr (with == With::nothing) {
    a = forward;
  } else if constexpr (with == With::bias) {
    a.score.forward = forward;
    set_score(p, &a.score);
    set_bias(p, &a);
  } else {
    a.forward = forward;
    if constexpr (with == With::block_mask) a.block_mask = mask_arrays(p);
    if constexpr (with == With::score_terms) set_score(p, &a);
    if constexpr (with == With::direct) set_rows(p, &a);
    if constexpr (with == With::descales) {
      a.tile_records = offset_of<const attn_gfx942_tile_record>(workspace.of_tiles);
      a.num_segments = p.num_segments;
    }
  }
  return a;
}

template <With with>
void patch(const Problem& p, const Args& args, void* workspace, Kernarg<with>& a) {
  if constexpr (with == With::nothing) {
    patch_forward(p, args, workspace, with, &a);
  } else if constexpr (with == With::bias) {
    patch_forward(p, args, workspace, with, &a.score.forward);
    a.score.alibi_slopes = args.alibi_slopes;
    a.bias = args.bias;
  } else {
    patch_forward(p, args, workspace, with, &a.forward);
    if constexpr (with == With::block_mask) patch_mask(p, args, &a.block_mask);
    if constexpr (with == With::score_terms) a.alibi_slopes = args.alibi_slopes;
    if constexpr (with == With::descales) rebase(workspace, a.tile_records);
    if constexpr (with == With::direct) a.k = args.segment[0].k, a.v = args.segment[0].v;
  }
}

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
constexpr Family family_of(Text arch, attn_dtype weights) {
  const bool fp8 = dtype_is_fp8(weights);
  const Text prepare = Text("prepare_").append(arch.text).append(fp8 ? "_fp8" : "_16bit");
  const Text segments = Text(prepare).append("_segments");
  if (fp8) return {weights, 1, 512, 4, prepare, segments, Text(prepare).append("_descaled")};
  return {weights, 2, 256, 2, prepare, segments, ""};
}
template <Text arch, attn_dtype weights>
constexpr Family family = family_of(arch, weights);

// Reading rows costs _direct 0.7 % of the loop, each time; preparing a tile is done once and takes
// what the loop takes for 0.6 tiles: in the issue model the loops' difference is that from 22,000
// rows on. The bound is lower since the model's memory has no lines.
std::string prefer_prepared(const Problem& p) {
  constexpr int64_t most_rows = 8192;
  const int64_t rows = p.seqlen_q * p.group();
  if (rows <= most_rows) return "";
  return join("for ", rows, " rows, seqlen_q * heads_q / heads_kv, more than ", most_rows);
}

// The launch that writes tiles of K and V to the workspace.
template <With with>
Step prepare_step(const Problem& p, const Workspace& workspace, const Family& f, int dim) {
  return {
      .image = (with == With::descales ? f.prepare_descaled
                : gathered(p, with)    ? f.prepare_segments
                                       : f.prepare)
                   .text,
      .launch = {.grid = {uint32_t(workspace.sequence_tiles), uint32_t(p.heads_kv),
                          uint32_t(p.batch)},
                 .block = {uint32_t(dim * f.element_bytes), 1, 1}},
      .arguments =
          arguments_of<patch_prepare<with>>(prepare_constants(p, with, workspace, dim, f.weights)),
  };
}

template <Text arch, Text name, attn_dtype weights, int dim, With with>
Status make_recipe(const Problem& p, const DeviceInfo&, Recipe* recipe) {
  constexpr const Family& f = family<arch, weights>;
  constexpr int tile_part = tile_keys * dim * f.element_bytes;  // K or V
  const Workspace workspace(p, with, dim);
  ATTN_TRY(check(p, with, workspace));
  recipe->workspace = workspace.bytes;
  const Launch launch = {.grid = {xcds, uint32_t(grid_items(p)), uint32_t(grid_portions(p))},
                         .block = {f.threads, 1, 1}};
  if (is_empty(launch)) return {};
  recipe->steps.reserve(2);
  if constexpr (with == With::direct) {
    recipe->workspace = 0;
    recipe->passed_over = prefer_prepared(p);
  } else {
    recipe->steps.push_back(prepare_step<with>(p, workspace, f, dim));
  }
  recipe->steps.push_back({
      .image = name_of<name>.text,
      .static_shared_bytes = uint32_t(2 * f.slots * tile_part),
      .launch = launch,
      .arguments = arguments_of<patch<with>>(constants<with>(p, workspace, launch, weights)),
  });
  return {};
}

// gfx942: e4m3 in either form, of which q, k and v may differ; gfx950: of the OCP kind; or one
// 16-bit type.
constexpr Limits limits(attn_dtype weights, int64_t head_dim_max, With with) {
  const bool fp8 = dtype_is_fp8(weights);
  const uint32_t types =
      type_bit(weights) | (weights == ATTN_F8_E4M3FNUZ ? type_bit(ATTN_F8_E4M3FN) : 0u);
  const uint32_t of_fp8 = feature_mixed_kv_types | feature_descale_tensor | feature_descale_head;
  const Sizes head_dim = {.multiple = fp8 ? 16 : 8, .max = head_dim_max};
  Limits limits = {
      .in_types = types,
      .kv_types = types,
      .out_types = float_types | (fp8 ? device_fp8_types : 0u),
      .flags = forward_flags | uint32_t(fp8 ? ATTN_OUT_SCALE : ATTN_SPLIT_INVARIANT),
      .features = forward_features | feature_segments | feature_kv_begin | (fp8 ? of_fp8 : 0u),
      .head_dim = head_dim,
      .head_dim_v = head_dim};
  const bool scored = with == With::score_terms || with == With::bias;
  if (scored) {
    limits.flags |= ATTN_ALIBI;
    limits.features |= feature_softcap;
  }
  if (scored || (fp8 && with != With::block_mask))
    limits.features |= feature_paged_kv | feature_shared_pages;
  if (with == With::descales) limits.features |= feature_descale_block;
  if (with == With::bias) limits.features |= feature_bias;
  if (with == With::direct) {
    limits.flags &= ~uint32_t(ATTN_WINDOW);
    // Keys before kv_begin are zeroed by the launch that it goes without.
    limits.features &=
        ~(feature_segments | feature_paged_kv | feature_shared_pages | feature_kv_begin);
    limits.head_dim.multiple = limits.head_dim_v.multiple = direct_dim;
  }
  return with == With::block_mask ? with_block_mask(limits) : limits;
}
constexpr Numerics numerics(attn_dtype weights) {
  const bool fp8 = dtype_is_fp8(weights), ocp = weights == ATTN_F8_E4M3FN;
  return {.weights = weights,
          .offset = weights == ATTN_BF16 ? 0 : 7,
          .lag = ocp   ? 1.8
                 : fp8 ? 0.9
                       : 8,
          .rows = 32,
          .keys = tile_keys,
          .last_tile_first = true,
          .rounded_sums = true,
          .always_split_invariant = !fp8};
}

constexpr Text kernel_name(Text arch, attn_dtype weights, int dim, With with) {
  constexpr const char* of_with[] = {"", "_mask", "_score", "_bias", "_descaled", "_direct"};
  return Text("fwd_")
      .append(arch.text)
      .append(weights == ATTN_BF16  ? "_bf16"
              : weights == ATTN_F16 ? "_f16"
                                    : "_fp8")
      .append(dim == 64 ? "_d64" : "_d128")
      .append(of_with[int(with)]);
}
template <Text arch, attn_dtype weights, int dim, With with = With::nothing>
constexpr Kernel row() {
  constexpr const Family& f = family<arch, weights>;
  constexpr Text name = kernel_name(arch, weights, dim, with);
  constexpr bool descaled = with == With::descales, direct = with == With::direct;
  return {.name = name_of<name>.text,
          .op = Op::forward,
          .backend = ATTN_BACKEND_HIP,
          .limits = limits(weights, dim, with),
          .numerics = numerics(weights),
          .recipe = recipe_of<make_recipe<arch, name, weights, dim, with>>,
          .first_images = {direct     ? nullptr
                           : descaled ? f.prepare_descaled.text
                                      : f.prepare.text,
                           descaled || direct ? nullptr : f.prepare_segments.text}};
}

constexpr attn_dtype bf16 = ATTN_BF16, f16 = ATTN_F16;
template <Text arch, attn_dtype fp8>
constexpr auto rows_of_fp8 = std::to_array<Kernel>({
    row<arch, fp8, 64>(),
    row<arch, fp8, 128>(),
    row<arch, fp8, 64, With::block_mask>(),
    row<arch, fp8, 128, With::block_mask>(),
    row<arch, fp8, 64, With::descales>(),
    row<arch, fp8, 128, With::descales>(),
});
template <Text arch>
constexpr auto rows_of_16_bits = std::to_array<Kernel>({
    row<arch, bf16, 64>(),
    row<arch, bf16, 128>(),
    row<arch, f16, 64>(),
    row<arch, f16, 128>(),
    row<arch, bf16, 64, With::score_terms>(),
    row<arch, bf16, 128, With::score_terms>(),
    row<arch, f16, 64, With::score_terms>(),
    row<arch, f16, 128, With::score_terms>(),
    row<arch, bf16, 64, With::bias>(),
    row<arch, bf16, 128, With::bias>(),
    row<arch, f16, 64, With::bias>(),
    row<arch, f16, 128, With::bias>(),
    row<arch, bf16, 64, With::block_mask>(),
    row<arch, bf16, 128, With::block_mask>(),
    row<arch, f16, 64, With::block_mask>(),
    row<arch, f16, 128, With::block_mask>(),
});
constinit const auto rows =
    joined(joined(rows_of_fp8<"gfx942", ATTN_F8_E4M3FNUZ>, rows_of_16_bits<"gfx942">),
           joined(joined(std::to_array({row<"gfx950", ATTN_F8_E4M3FN, 128, With::direct>()}),
                         rows_of_fp8<"gfx950", ATTN_F8_E4M3FN>),
                  rows_of_16_bits<"gfx950">));

}  // namespace

std::span<const Kernel> gfx942_forward_rows() {
  return rows;
}

}  // namespace attn
