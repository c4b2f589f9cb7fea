// The kernels decode_*: few queries against many keys, of 16 bits as the queries or of fp8. They
// differ by the head dimensions and rows they take, and by what brings K and V: in decode_sm90_*
// the copy engine, whose boxes must each lie in one page.
#include <numeric>

#include "kernels/copy_engine.h"
#include "kernels/cuda_forward.h"
#include "kernels/decode/decode_args.h"
#include "kernels/decode/decode_tiles.h"
#include "kernels/families.h"
#include "kernels/limits.h"

namespace attn {
namespace {

constexpr uint32_t fp8_of_cuda = type_bit(ATTN_F8_E4M3FN) | type_bit(ATTN_F8_E5M2);
constexpr int ring_bytes = 192 << 10;               // of the blocks of a multiprocessor
constexpr int64_t few_units = 16, many_units = 48;  // of a block
constexpr int block_reserve = 1024;  // shared memory that each block costs beside its own

// What a launch is made of.
struct Shape {
  int stages;
  int64_t blocks;  // a multiple of columns_of()
};
// See Work in kernels/decode/units.cuh.
int64_t columns_of(const Problem& p, int64_t blocks) {
  return std::min(p.heads_kv, blocks);
}

int64_t row_tiles(const Problem& p, const decode::DecodeTile& tile) {
  return std::max<int64_t>(1, ceil_div(p.seqlen_q * p.group(), tile.rows()));
}

// As many stages as the device's shared memory has, and blocks as its multiprocessors have at once,
// but no more than there can be units.
Shape shape_of(const Problem& p, const DeviceInfo& device, const decode::DecodeTile& tile) {
  using namespace decode;
  const auto bytes = [&](int stages) {
    return tile.shared_bytes(stages) + tile.static_shared_bytes();
  };
  int stages = std::clamp(ring_bytes / tile.blocks() / tile.stage_bytes(), 2, decode_max_stages);
  while (stages > 2 && bytes(stages) > device.shared_bytes_max) --stages;
  const int64_t fit = (device.shared_bytes_max + block_reserve) / (bytes(stages) + block_reserve);
  int64_t units = 0;  // of a head
  for (const attn_segment& s : p.segment) units += ceil_div(s.seqlen, unit_keys);
  const int64_t all = p.batch * p.heads_kv * row_tiles(p, tile) * std::max<int64_t>(1, units);
  int64_t most = multiprocessors(p, device) * std::clamp<int64_t>(fit, 1, tile.blocks());
  // With few units a block, what blocks cost that share a head outweighs what they load at once.
  // With many, later blocks take what a slow multiprocessor leaves: some are up to a third slower,
  // though hardly where fp8 keeps them busy.
  // With max_sms there is no telling blocks where to run: there are no more than that.
  if (all / most < few_units || p.max_sms > 0)
    most = multiprocessors(p, device);
  else
    most *= std::clamp<int64_t>(all / most / many_units, 1, tile.element_bytes == 2 ? 4 : 1);
  const int64_t columns = columns_of(p, most);
  const int64_t of_column = ceil_div(all, columns);
  return {stages, columns * std::min(most / columns, of_column)};
}

// The workspace: sums, stats and counters of two slots of each row group of each block.
struct Workspace {
  int64_t stats_at, arrived_at, bytes;
};
Workspace workspace_of(int64_t blocks, const decode::DecodeTile& tile) {
  const int64_t slots = 2 * blocks * tile.row_groups, rows = slots * decode::group_rows;
  const int64_t stats_at = rows * tile.head_dim_v * int64_t{sizeof(float)},
                arrived_at = stats_at + rows * 2 * int64_t{sizeof(float)};
  return {stats_at, arrived_at, arrived_at + 2 * slots * int64_t{sizeof(unsigned)}};
}

// Keys that the copy engine brings at once.
int box_keys(const attn_segment& s) {
  return s.layout == ATTN_PAGED ? std::gcd(s.page_size, decode::unit_keys) : decode::unit_keys;
}

template <decode::DecodeTile tile>
void set_decode(const Problem& p, const Args& args, const Target& target, attn_decode_kernarg* to) {
  attn_decode_kernarg& a = *to;
  a.q = args.q;
  a.out = args.out;
  a.lse = args.lse;
  a.cu_seqlens_q = p.q_layout == ATTN_PACKED ? args.cu_seqlens_q : nullptr;
  a.alibi_slopes = p.has(ATTN_ALIBI) ? args.alibi_slopes : nullptr;
  a.sinks = p.has(ATTN_SINKS) ? args.sinks : nullptr;
  set(a.q_stride, p.q_stride);
  set(a.out_stride, p.out_stride);
  a.total_q = p.total_q;
  a.batch = int(p.batch);
  a.heads_q = int(p.heads_q);
  a.heads_kv = int(p.heads_kv);
  a.group = int(p.group());
  a.seqlen_q = int(p.seqlen_q);
  a.head_dim = int(p.head_dim);
  a.head_dim_v = int(p.head_dim_v);
  a.q_type = p.q_type;
  a.out_type = p.out_type;
  a.kv_e5m2 = p.segment[0].k_type == ATTN_F8_E5M2;
  const Launch& launch = target.step.launch;
  const int64_t blocks = launch.grid[0];
  a.stages = tile.stages(int(launch.shared_bytes));
  a.columns = int(columns_of(p, blocks));
  a.split_invariant = p.has(ATTN_SPLIT_INVARIANT);
  a.num_segments = p.num_segments;
  a.scale = p.scale;
  a.softcap = p.softcap;
  a.mask = p.range_mask();
  a.tree_mask = p.tree_mask();
  a.tree = reinterpret_cast<const unsigned long long*>(args.tree);
  const Workspace workspace = workspace_of(blocks, tile);
  char* base = static_cast<char*>(target.workspace);
  a.sums = reinterpret_cast<float*>(base);
  a.stats = reinterpret_cast<float*>(base + workspace.stats_at);
  a.arrived = reinterpret_cast<unsigned*>(base + workspace.arrived_at);
  for (int32_t i = 0; i < p.num_segments; ++i) {
    const attn_segment& from = p.segment[i];
    const attn_segment_args of = args.segment[i];
    attn_decode_segment& s = a.segment[i] = {};
    s.k = of.k;
    s.v = of.v;
    set(s.k_stride, from.k_stride);
    set(s.v_stride, from.v_stride);
    s.lengths = kv_lengths(from, of);
    if (from.layout == ATTN_PAGED) {
      s.block_table = of.block_table;
      s.num_pages = int(from.num_pages);
      s.page_size = from.page_size;
      s.max_pages = from.max_pages;
    }
    s.box_keys = box_keys(from);
    s.k_descale = descale(from.k_descale, of.k_descale, p.heads_kv, from);
    s.v_descale = descale(from.v_descale, of.v_descale, p.heads_kv, from);
  }
}

template <decode::DecodeTile tile, bool engine>
void pack(const Problem& p, const Args& args, const Target& target, Parameters* to) {
  if constexpr (engine) {
    static_assert(sizeof(attn_decode_sm90_kernarg) <= max_kernarg_bytes);
    for (int32_t i = 0; i < p.num_segments; ++i) {
      const attn_segment_args a = args.segment[i];
      to->map_base[2 * i] = a.k;
      to->map_base[2 * i + 1] = a.v;
    }
    set_decode<tile>(p, args, target, &reinterpret_cast<attn_decode_sm90_kernarg*>(to->kernarg)->a);
  } else {
    set_decode<tile>(p, args, target, reinterpret_cast<attn_decode_kernarg*>(to->kernarg));
  }
}

Status check_engine(const Problem& p, const DeviceInfo& device) {
  ATTN_TRY(check_copy_engine(device));
  for (const attn_segment& s : p.segment) {
    if (s.layout == ATTN_PAGED && s.page_size % decode::warp_keys != 0)
      return unsupported("page_size ", s.page_size, " is not a multiple of ", decode::warp_keys);
    ATTN_TRY(check_copied(p, s));
  }
  return {};
}

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

// L2 reads no more than a panel's row: what lies behind it is asked for by itself.
std::vector<TensorMap> maps_of(const Problem& p, const decode::DecodeTile& tile) {
  using decode::panel_pitch;
  std::vector<TensorMap> maps;
  maps.reserve(2 * p.num_segments);
  for (const attn_segment& s : p.segment) {
    const Extents size = extents(p, s);
    const auto map = [&](int64_t head_dim, const attn_strides& stride) {
      maps.push_back(tensor_map(tile.element_bytes, head_dim, size.rows, p.heads_kv, size.batch,
                                stride, panel_pitch / tile.element_bytes, box_keys(s), 128));
    };
    map(p.head_dim, s.k_stride);
    map(p.head_dim_v, s.v_stride);
  }
  return maps;
}

template <Text name, decode::DecodeTile tile, bool engine>
Status make_recipe(const Problem& p, const DeviceInfo& device, Recipe* recipe) {
  using namespace decode;
  // More rows than a block takes read K and V again for each of their tiles: of 16 bits that is
  // what fwd_* do better, but for trees, which they do not take.
  const bool alone = tile.element_bytes == 1 || p.tree_keys > 0;
  const bool any_rows = tile.row_groups > 1 && alone;
  const int64_t max_rows_here = any_rows ? INT32_MAX : tile.rows();
  if (p.group() * p.seqlen_q > max_rows_here)
    return unsupported("heads_q / heads_kv * seqlen_q is ", p.group(), " * ", p.seqlen_q,
                       "; accepted: up to ", max_rows_here);
  if (p.num_segments > attn_decode_max_segments)
    return unsupported("num_segments is ", p.num_segments, "; accepted: up to ",
                       int(attn_decode_max_segments));
  constexpr int64_t max_length = 1 << 30, max_units = INT32_MAX;
  if (p.seqlen_kv > max_length)
    return unsupported("seqlen_kv is ", p.seqlen_kv, "; accepted: up to ", max_length);
  const int64_t units = p.batch * p.heads_kv * row_tiles(p, tile) *
                        (ceil_div(p.seqlen_kv, unit_keys) + p.num_segments);
  if (units > max_units)
    return unsupported("batch * heads_kv * ceil(seqlen_kv / ", unit_keys, ") is ", units,
                       "; accepted: up to ", max_units);
  for (const attn_segment& s : p.segment) {
    if (s.layout == ATTN_PAGED && s.num_pages > INT32_MAX)
      return unsupported("num_pages is ", s.num_pages, "; accepted: up to ", int64_t{INT32_MAX});
    for (const attn_descale_kind kind : {s.k_descale, s.v_descale})
      if (kind == ATTN_DESCALE_BLOCK && units > INT32_MAX / 2)
        return unsupported("batch * heads_kv * ceil(seqlen_kv / ", unit_keys, ") is ", units,
                           "; accepted with descales per block: up to ", INT32_MAX / 2);
  }
  if (engine) ATTN_TRY(check_engine(p, device));
  if (tile.row_groups > 1 && !alone) recipe->passed_over = read_often(p, device);
  const Shape shape = shape_of(p, device, tile);
  recipe->workspace = size_t(workspace_of(shape.blocks, tile).bytes);
  recipe->steps.push_back({
      .image = name.text,
      .kernarg_bytes = engine ? sizeof(attn_decode_sm90_kernarg) : sizeof(attn_decode_kernarg),
      .static_shared_bytes = tile.static_shared_bytes(),
      .launch = {.grid = {uint32_t(shape.blocks), 1, 1},
                 .block = {uint32_t(tile.threads()), 1, 1},
                 .shared_bytes = uint32_t(tile.shared_bytes(shape.stages)),
                 .starts_early = engine || device.arch == "sm_90"},
      .maps = engine ? maps_of(p, tile) : std::vector<TensorMap>{},
      .pack = pack_of<pack<tile, engine>>,
  });
  return {};
}

template <Text name, decode::DecodeTile tile, bool engine>
constexpr Kernel row(uint32_t q_types, uint32_t kv_types, attn_dtype weights) {
  const bool fp8 = tile.element_bytes == 1;
  return {.name = name_of<name>.text,
          .op = Op::forward,
          .backend = ATTN_BACKEND_CUDA,
          .limits = {.in_types = q_types,
                     .kv_types = kv_types,
                     .out_types = float_types,
                     .flags = forward_flags | ATTN_ALIBI | ATTN_SPLIT_INVARIANT,
                     .features = forward_features | feature_segments | feature_paged_kv |
                                 feature_softcap | feature_tree |
                                 (fp8 ? feature_descale_tensor | feature_descale_head |
                                            feature_descale_block
                                      : 0u),
                     .head_dim = {.multiple = fp8 ? 16 : 8, .max = tile.head_dim},
                     .head_dim_v = {.multiple = fp8 ? 16 : 8, .max = tile.head_dim_v},
                     .seqlen_q = {.max = tile.row_groups > 1 ? INT32_MAX : tile.rows()},
                     .group = {.max = tile.row_groups > 1 ? INT32_MAX : tile.rows()}},
          .numerics = {.weights = weights, .keys = decode::warp_keys},
          .recipe = recipe_of<make_recipe<name, tile, engine>>};
}

// `tile` but for the bytes of an element.
template <attn_dtype type, Text variant, decode::DecodeTile tile, bool engine>
constexpr Kernel same() {
  constexpr Text family = engine ? "decode_sm90_" : "decode_sm80_";
  constexpr decode::DecodeTile of_two_bytes = {tile.head_dim, tile.head_dim_v, 2, tile.row_groups};
  return row<kernel_name<family, type, variant>, of_two_bytes, engine>(type_bit(type),
                                                                       type_bit(type), type);
}
template <Text variant, decode::DecodeTile tile, bool engine>
constexpr Kernel fp8() {
  constexpr Text name = Text(engine ? "decode_sm90_fp8_" : "decode_sm89_fp8_").append(variant.text);
  constexpr decode::DecodeTile of_a_byte = {tile.head_dim, tile.head_dim_v, 1, tile.row_groups};
  return row<name, of_a_byte, engine>(type_bit(ATTN_F16) | type_bit(ATTN_BF16), fp8_of_cuda,
                                      ATTN_F16);
}

template <bool engine, Text variant, int head_dim, int head_dim_v = head_dim, int row_groups = 1>
constexpr std::array of_all_types = [] {
  constexpr decode::DecodeTile tile = {
      .head_dim = head_dim, .head_dim_v = head_dim_v, .element_bytes = 2, .row_groups = row_groups};
  return std::array{same<ATTN_BF16, variant, tile, engine>(),
                    same<ATTN_F16, variant, tile, engine>(), fp8<variant, tile, engine>()};
}();

template <bool engine>
constexpr std::array rows =
    joined(of_all_types<engine, "d64", 64>, of_all_types<engine, "d128", 128>,
           of_all_types<engine, "d192_dv128", 192, 128>, of_all_types<engine, "d256", 256>);
constexpr std::array rows_of_three_groups =
    joined(of_all_types<true, "d64_r48", 64, 64, 3>, of_all_types<true, "d128_r48", 128, 128, 3>,
           of_all_types<true, "d192_dv128_r48", 192, 128, 3>);
constinit const std::array all_rows = joined(rows<true>, rows<false>, rows_of_three_groups);

}  // namespace

std::span<const Kernel> decode_forward_rows() {
  return all_rows;
}

}  // namespace attn
