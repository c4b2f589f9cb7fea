// The kernels fwd_sm90_*. They differ by the head dimensions they take. _score: with softcap and
// ALiBi; _bias: with a bias too; _mask: with a block mask; _paged: segments may be paged; _short,
// _long, _pair: other tiles, for problems whose queries are few, long and causal, or many.
#include <algorithm>
#include <numeric>

#include "core/dtype.h"
#include "kernels/copy_engine.h"
#include "kernels/cuda_forward.h"
#include "kernels/families.h"
#include "kernels/limits.h"
#include "kernels/sm90/config.h"
#include "kernels/sm90/tiles.h"

namespace attn {
namespace {

static_assert(max_tensor_maps == 1 + 2 * attn_sm90_max_segments);

using sm90::Kernarg;
using sm90::plain, sm90::with_bias, sm90::with_mask, sm90::with_pages, sm90::with_score,
    sm90::with_score_and_pages;

// Keys that the copy engine brings at once.
int box_keys(const attn_segment& s, const sm90::Tile& tile) {
  return s.layout == ATTN_PAGED ? std::gcd(s.page_size, tile.keys) : tile.loaded_keys();
}

bool causal(const Problem& p) {
  return p.has(ATTN_CAUSAL) || p.has(ATTN_CAUSAL_TOP_LEFT);
}
int64_t items(const Problem& p, const sm90::Tile& tile) {
  return p.batch * p.heads_q * ceil_div(p.seqlen_q, tile.item_rows());
}

// (batch, head) pairs whose items stand together. Under a causal mask longest first: those whose K
// and V the L2 holds beside all else, so that blocks which end early find long items of them left.
unsigned pairs_together(const Problem& p, const DeviceInfo& device) {
  const int64_t pairs = p.batch * p.heads_q;
  if (pairs == 0 || !causal(p)) return 1;
  return unsigned(ceil_div(pairs, ceil_div(pairs, pairs_in_l2(p, 32 << 20, device))));
}

Status check(const Problem& p, const DeviceInfo& device, const sm90::Tile& tile, unsigned with) {
  ATTN_TRY(check_copy_engine(device));
  if (tile.shared_bytes() > device.shared_bytes_max)
    return unsupported("it needs ", tile.shared_bytes(), " bytes of shared memory; the device has ",
                       device.shared_bytes_max);
  if (p.num_segments > attn_sm90_max_segments)
    return unsupported("num_segments is ", p.num_segments, "; accepted: up to ",
                       int(attn_sm90_max_segments));
  constexpr int64_t max_length = 1 << 30;  // positions and their differences stay within 32 bits
  if (p.seqlen_q > max_length || p.seqlen_kv > max_length)
    return unsupported("seqlen is ", std::max(p.seqlen_q, p.seqlen_kv), "; accepted: up to ",
                       max_length);
  if (!(with & with_score) && p.scale <= 0)
    return unsupported("scale is ", p.scale, "; accepted: above 0");
  const int64_t count = items(p, tile);
  if (p.batch * p.heads_q > max_rows || count > max_rows)
    return unsupported("batch * heads_q * ceil(seqlen_q / ", tile.rows(), ") is ", count,
                       "; accepted: up to ", max_rows);
  if (p.q_layout == ATTN_PACKED && p.total_q > max_rows)
    return unsupported("total_q is ", p.total_q, "; accepted: up to ", max_rows);
  ATTN_TRY(check_strides("q", p.q_stride,
                         {p.q_layout == ATTN_PACKED ? p.total_q : p.seqlen_q, p.heads_q,
                          p.q_layout == ATTN_PACKED ? 1 : p.batch}));
  for (const attn_segment& s : p.segment) ATTN_TRY(check_copied(p, s));
  if (multiprocessors(p, device) < tile.blocks)
    return unsupported("it runs on ", tile.blocks, " multiprocessors or more; max_sms is ",
                       p.max_sms);
  return {};
}

void set_bases(const Problem& p, const Args& args, const void** base) {
  *base++ = args.q;
  for (int32_t i = 0; i < p.num_segments; ++i) {
    const attn_segment_args a = args.segment[i];
    *base++ = a.k;
    *base++ = a.v;
  }
}

template <sm90::Tile tile>
void set_forward(const Problem& p, const Args& args, const Target& target,
                 attn_sm90_forward_kernarg* kernarg) {
  attn_sm90_forward_kernarg& a = *kernarg;
  a.out = args.out;
  a.lse = args.lse;
  a.cu_seqlens_q = p.q_layout == ATTN_PACKED ? args.cu_seqlens_q : nullptr;
  a.sinks = p.has(ATTN_SINKS) ? args.sinks : nullptr;
  set(a.out_stride, p.out_stride);
  a.total_q = p.total_q;
  a.batch = int(p.batch);
  a.heads_q = int(p.heads_q);
  a.group = int(p.group());
  a.seqlen_q = int(p.seqlen_q);
  a.head_dim_v = int(p.head_dim_v);
  a.out_type = p.out_type;
  a.split_invariant = p.has(ATTN_SPLIT_INVARIANT);
  a.num_segments = p.num_segments;
  a.down = causal(p);
  a.chunk = pairs_together(p, target.device);
  a.items = unsigned(items(p, tile));
  a.taken = static_cast<unsigned*>(target.workspace);
  a.log2_scale = std::max(p.scale * 1.44269504f, 1e-37f);  // log2(e)
  a.alibi_slopes = p.has(ATTN_ALIBI) ? args.alibi_slopes : nullptr;
  a.scale = p.scale;
  a.softcap = p.softcap;
  a.mask = p.range_mask();
  for (int32_t i = 0; i < p.num_segments; ++i)
    a.segment[i] = kv_lengths(p.segment[i], args.segment[i]);
}

// Whether keys lie side by side, two from an even one on at a multiple of the size of both.
bool bias_pairs(const Problem& p, const void* bias) {
  const int64_t size[] = {p.batch, p.heads_q, p.seqlen_q};
  for (int i = 0; i < 3; ++i)
    if (size[i] > 1 && p.bias_stride[i] % 2 != 0) return false;
  return p.bias_stride[3] == 1 &&
         reinterpret_cast<uintptr_t>(bias) % size_t(dtype_bytes(p.bias_type, 2)) == 0;
}

template <sm90::Tile tile, unsigned with>
void pack(const Problem& p, const Args& args, const Target& target, Parameters* to) {
  static_assert(sizeof(Kernarg<with>) <= max_kernarg_bytes);
  set_bases(p, args, to->map_base);
  auto& a = *reinterpret_cast<Kernarg<with>*>(to->kernarg);
  set_forward<tile>(p, args, target, &a);
  if constexpr (with & with_mask) {
    a.block_mask = mask_arrays(p, args);
    a.order = static_cast<attn_sm90_order*>(target.workspace);
  }
  if constexpr (with == with_bias) {
    const bool any = p.bias_type != ATTN_DTYPE_NONE;
    a.bias = any ? args.bias : nullptr;
    std::copy_n(p.bias_stride, 4, a.bias_stride);
    a.bias_type = p.bias_type;
    a.bias_pairs = any && bias_pairs(p, args.bias);
  }
  if constexpr (with & with_pages) {
    for (int32_t i = 0; i < p.num_segments; ++i) {
      a.pages[i] = pages(p.segment[i], args.segment[i]);
      a.box_keys[i] = box_keys(p.segment[i], tile);
    }
  }
}

// Panels of 64 columns.
TensorMap panel_map(int64_t head_dim, int64_t rows, int64_t heads, int64_t batch,
                    const attn_strides& stride, int box_rows) {
  return tensor_map(2, head_dim, rows, heads, batch, stride, 64, box_rows);
}

std::vector<TensorMap> maps_of(const Problem& p, const sm90::Tile& tile) {
  std::vector<TensorMap> maps;
  maps.reserve(1 + 2 * p.num_segments);
  const bool packed = p.q_layout == ATTN_PACKED;
  maps.push_back(panel_map(p.head_dim, packed ? p.total_q : p.seqlen_q, p.heads_q,
                           packed ? 1 : p.batch, p.q_stride, tile.q_part_rows()));
  for (const attn_segment& s : p.segment) {
    const auto [rows, batch] = extents(p, s);
    const int keys = box_keys(s, tile);
    maps.push_back(panel_map(p.head_dim, rows, p.heads_kv, batch, s.k_stride, keys));
    maps.push_back(panel_map(p.head_dim_v, rows, p.heads_kv, batch, s.v_stride, keys));
  }
  return maps;
}

// Why a later kernel serves a problem better; "": none does.
using PassedOver = std::string (*)(const Problem&, const DeviceInfo&, const sm90::Tile&);
std::string never(const Problem&, const DeviceInfo&, const sm90::Tile&) {
  return "";
}
// Smaller tiles of queries, as long as each multiprocessor has one at most.
std::string too_many(const Problem& p, const DeviceInfo& device, const sm90::Tile& tile) {
  const int64_t count = items(p, tile), most = multiprocessors(p, device);
  if (count <= most) return "";
  return join("for ", count, " tiles of ", tile.item_rows(), " queries, more than ", most,
              ", a later kernel is faster");
}
std::string shorter_than(int64_t least, const Problem& p) {
  if (p.seqlen_kv >= least) return "";
  return join("for seqlen_kv ", p.seqlen_kv, ", below ", least, ", a later kernel is faster");
}
// Its larger tile costs more at the ends of sequences than it spares between them if they are
// short, and spares nothing where all items are equally long (docs/log).
std::string too_short(const Problem& p, const DeviceInfo&, const sm90::Tile&) {
  if (!causal(p)) return "without a causal mask a later kernel is as fast";
  return shorter_than(8192, p);
}

// Two blocks that share K and V take as long as the one that has more to do, and their items in a
// fixed order; what sharing spares shows where nearly all is read from the L2 (docs/log).
template <int64_t least>
std::string shares_little(const Problem& p, const DeviceInfo&, const sm90::Tile& tile) {
  if (causal(p) || p.has(ATTN_WINDOW))
    return "for causal masks and windows a later kernel is faster";
  if (p.q_layout == ATTN_PACKED || p.seqlen_q % tile.item_rows() != 0)
    return join("for sequences that are not multiples of ", tile.item_rows(),
                " queries a later kernel is faster");
  return shorter_than(least, p);
}

template <attn_dtype type, Text variant, sm90::Tile tile, unsigned with, PassedOver passed_over>
Status make_recipe(const Problem& p, const DeviceInfo& device, Recipe* recipe) {
  ATTN_TRY(check(p, device, tile, with));
  recipe->passed_over = passed_over(p, device, tile);
  const int64_t count = items(p, tile), blocks = multiprocessors(p, device);
  if (tile.blocks == 1 && count > blocks)
    recipe->workspace = with & with_mask ? sizeof(attn_sm90_order) : sizeof(unsigned);
  const int64_t grid = std::min(forward_blocks(p, count), blocks / tile.blocks) * tile.blocks;
  recipe->steps.push_back({
      .image = kernel_name<"fwd_sm90_", type, variant>.text,
      .kernarg_bytes = sizeof(Kernarg<with>),
      .launch = {.grid = {uint32_t(grid), 1, 1},
                 .block = {uint32_t(tile.threads()), 1, 1},
                 .shared_bytes = uint32_t(tile.shared_bytes()),
                 .starts_early = true},
      .maps = maps_of(p, tile),
      .pack = pack_of<pack<tile, with>>,
  });
  return {};
}

// q, k and v are of one type. split_invariant costs time that only the kernels that change scores
// take.
constexpr Limits limits(attn_dtype type, const sm90::Tile& tile, unsigned with) {
  const bool changes = with & with_score;
  Limits limits = {.in_types = type_bit(type),
                   .kv_types = type_bit(type),
                   .out_types = float_types,
                   .flags = forward_flags | (changes ? ATTN_ALIBI | ATTN_SPLIT_INVARIANT : 0u),
                   .features = forward_features | feature_segments |
                               (changes ? feature_softcap : 0u) |
                               (with == with_bias ? feature_bias : 0u),
                   .head_dim = {.multiple = 8, .max = tile.head_dim},
                   .head_dim_v = {.multiple = 8, .max = tile.head_dim_v}};
  if (with & with_pages) {
    limits.features |= feature_paged_kv;
    limits.page_size.multiple = 16;  // rows that are swizzled alike, and as many as products take
  }
  return with & with_mask ? with_block_mask(limits) : limits;
}

// Scores that are not changed go into the weights' exponents with one FMA, whose result is stated
// for those whose bits it keeps (docs/numerics.md).
constexpr int largest_score(attn_dtype type, unsigned with) {
  if (with & with_score) return 127;
  return type == ATTN_F16 ? 26 : 30;
}

template <attn_dtype type, Text variant, sm90::Tile tile, unsigned with = plain,
          PassedOver passed_over = never>
constexpr Kernel row() {
  return {.name = kernel_name<"fwd_sm90_", type, variant>.text,
          .op = Op::forward,
          .backend = ATTN_BACKEND_CUDA,
          .limits = limits(type, tile, with),
          .numerics = {.weights = type,
                       .rows = 16,
                       .keys = tile.keys,
                       .largest_score = largest_score(type, with)},
          .recipe = recipe_of<make_recipe<type, variant, tile, with, passed_over>>};
}

template <attn_dtype type>
constexpr std::array rows = {
    row<type, "d64_short", sm90::tile_d64_short, plain, too_many>(),
    row<type, "d64", sm90::tile_d64>(),
    row<type, "d96", sm90::tile_d96>(),
    row<type, "d128_pair", sm90::tile_d128_pair, plain, shares_little<8193>>(),
    row<type, "d128_long", sm90::tile_d128_long, plain, too_short>(),
    row<type, "d128", sm90::tile_d128>(),
    row<type, "d192_dv128", sm90::tile_d192_dv128>(),
    row<type, "d192", sm90::tile_d192>(),
    row<type, "d256_pair", sm90::tile_d256_pair, plain, shares_little<4096>>(),
    row<type, "d256", sm90::tile_d256>(),
    row<type, "d64_mask", sm90::tile_d64_mask, with_mask>(),
    row<type, "d128_mask", sm90::tile_d128_mask, with_mask>(),
    row<type, "d256_mask", sm90::tile_d256_mask, with_mask>(),
    row<type, "d64_score", sm90::tile_d64_score, with_score>(),
    row<type, "d128_score", sm90::tile_d128_score, with_score>(),
    row<type, "d256_score", sm90::tile_d256_score, with_score>(),
    row<type, "d64_bias", sm90::tile_d64_bias, with_bias>(),
    row<type, "d128_bias", sm90::tile_d128_bias, with_bias>(),
    row<type, "d256_bias", sm90::tile_d256_bias, with_bias>(),
    row<type, "d64_paged", sm90::tile_d64, with_pages>(),
    row<type, "d128_paged", sm90::tile_d128, with_pages>(),
    row<type, "d256_paged", sm90::tile_d256, with_pages>(),
    row<type, "d64_score_paged", sm90::tile_d64_score, with_score_and_pages>(),
    row<type, "d128_score_paged", sm90::tile_d128_score, with_score_and_pages>(),
    row<type, "d256_score_paged", sm90::tile_d256_score, with_score_and_pages>(),
};
constinit const std::array all_rows = joined(rows<ATTN_BF16>, rows<ATTN_F16>);

}  // namespace

std::span<const Kernel> sm90_forward_rows() {
  return all_rows;
}

}  // namespace attn
