// The kernels bwd_sm90_*. They differ by type, by the largest head_dim they take, and
// by what scores have: _score: softcap and ALiBi; _bias: a bias as well.
#include "kernels/backward.h"
#include "kernels/backward_sm90/backward_args.h"
#include "kernels/backward_sm90/variants.h"
#include "kernels/copy_engine.h"
#include "kernels/families.h"
#include "kernels/kv_args.h"

namespace attn {
namespace {

using bwd_sm90::Tile, bwd_sm90::With;

// The family's arrays in the workspace.
struct Space : BackwardSpace {
  int64_t tiles, key_blocks;
  size_t turns, kv_turns;  // words that are 0 at first, before the one that counts the items taken
  size_t dq_sum, kv_sum, bytes;

  Space(const BackwardProblem& b, const Tile& tile) : BackwardSpace{} {
    const Problem& p = b.of;
    const bool heads_add = p.group() > 1;
    const int64_t keys = tile.keys();
    tiles = backward_rows(p).tiles();
    key_blocks = b.kv().layout == ATTN_PACKED ? b.kv().total / keys + p.batch
                                              : p.batch * ceil_div(b.kv().seqlen, keys);
    turns = size_t(p.heads_q * tiles) * tile.dq_parts();
    const size_t kv_parts = 4 * bwd_sm90::groups * tile.blocks;  // warps that add on their own
    kv_turns = heads_add ? size_t(p.heads_kv * key_blocks) * kv_parts : 0;
    static_cast<BackwardSpace&>(*this) = backward_space(b, clear_bytes());
    dq_sum = end;
    kv_sum = dq_sum + turns * size_t(tile.dq_bytes());
    bytes = kv_sum + kv_turns / kv_parts * size_t(2 * keys * tile.head_dim) * 4;
  }
  size_t clear_bytes() const { return (turns + kv_turns + 1) * sizeof(unsigned); }
};

// The order of dq's sums follows from the kind of mask and of heads alone, since dq's bits depend
// on it. Under a window a block is done with a tile before the block before it gets there, however
// many they are. Else a tile of 256 keys is fastest with groups of 2, by 2 to 9 %, and one of 128
// keys with 8 (docs/log/2026-11-27_backward_bias.md). Where query heads share K and V there are
// more pairs, and their sums of dq leave L2 between two groups; few groups are faster by 20 % then
// (docs/log/2026-11-28_backward_order.md).
bwd_sm90::Order order(const Problem& p, const Tile& tile) {
  if (p.has(ATTN_WINDOW)) return {int(std::max<int64_t>(1, ceil_div(p.seqlen_kv, tile.keys())))};
  if (p.causal() && p.group() > 1 && tile.head_dim == 128) return {32};
  return {tile.keys() == 256 ? 2 : 8};
}

bwd_sm90::ItemList item_list(const Problem& p, const DeviceInfo& device, const Tile& tile) {
  const int64_t pairs = p.batch * p.heads_q, group = order(p, tile).group;
  const int64_t blocks = ceil_div(p.seqlen_kv, tile.keys());
  const int64_t busy = multiprocessors(p, device) / tile.blocks;
  const bool across = !p.causal() && !p.has(ATTN_WINDOW);
  int64_t chunk;
  if (across) {
    // So few pairs that sums of dq which blocks are going to add to are still in L2
    // (docs/log/2026-11-28_backward_order.md).
    chunk =
        std::clamp<int64_t>(busy / std::max<int64_t>(1, blocks), 8 / tile.blocks, 16 / tile.blocks);
  } else {
    // So many that a group of each keeps all multiprocessors busy; under a causal mask twice as
    // many, since the blocks of a group do not end together.
    const int64_t rounds = pairs * group / (busy * (p.causal() ? 2 : 1));
    chunk = ceil_div(pairs, std::max<int64_t>(1, rounds));
  }
  return {.pairs = int(pairs),
          .blocks = int(blocks),
          .group = int(group),
          .chunk = int(std::max<int64_t>(1, std::min(chunk, pairs))),
          .across = across};
}

Status check(const BackwardProblem& b, const DeviceInfo& device, const Tile& tile) {
  const Problem& p = b.of;
  ATTN_TRY(check_device_gradients(b));
  ATTN_TRY(check_copy_engine(device));
  if (tile.shared_bytes() > device.shared_bytes_max)
    return unsupported("it needs ", tile.shared_bytes(), " bytes of shared memory; the device has ",
                       device.shared_bytes_max);
  if (multiprocessors(p, device) < tile.blocks)
    return unsupported("it needs ", tile.blocks, " multiprocessors; max_sms is ", p.max_sms);
  constexpr int64_t max_length = 1 << 29;  // positions and their differences stay within 32 bits
  if (p.seqlen_q >= max_length || p.seqlen_kv >= max_length)
    return unsupported("seqlen is ", std::max(p.seqlen_q, p.seqlen_kv), "; accepted: below ",
                       max_length);
  if (p.scale <= 0) return unsupported("scale is ", p.scale, "; accepted: above 0");
  const BackwardRows rows = backward_rows(p);
  if (rows.tiles() > max_rows / attn_backward_tile)
    return unsupported("there are ", rows.tiles(), " tiles of ", int(attn_backward_tile),
                       " queries; accepted: up to ", max_rows / attn_backward_tile);
  const int64_t items = p.batch * p.heads_q * ceil_div(p.seqlen_kv, tile.keys());
  if (items > max_rows)
    return unsupported("batch * heads_q * ceil(seqlen_kv / ", tile.keys(), ") is ", items,
                       "; accepted: up to ", max_rows);
  constexpr int64_t max_bias_stride = 1 << 27;  // 8 keys of it stay within 32 bits
  for (const int n : {2, 3})
    if (p.bias_type != ATTN_DTYPE_NONE && std::abs(p.bias_stride[n]) > max_bias_stride)
      return unsupported("bias_stride[", n, "] is ", p.bias_stride[n], "; accepted: up to ",
                         max_bias_stride, " in size");
  const bool packed = p.q_layout == ATTN_PACKED;
  const int64_t size[] = {packed ? p.total_q : p.seqlen_q, p.heads_q, packed ? 1 : p.batch};
  if (size[0] > max_rows)
    return unsupported("total_q is ", size[0], "; accepted: up to ", max_rows);
  ATTN_TRY(check_strides("q", p.q_stride, {size[0], size[1], size[2]}));
  ATTN_TRY(check_strides("d_out", b.d_out_stride, {size[0], size[1], size[2]}));
  return check_copied(p, b.kv());
}

void patch(const BackwardProblem& b, const BackwardArgs& args, void* workspace,
           attn_sm90_backward_kernarg& a, const void** map_base) {
  patch_gradients(b, args, &a.dq, &a.dk, &a.dv);
  a.cu_seqlens_q = args.of.cu_seqlens_q;
  a.alibi_slopes = args.of.alibi_slopes;
  a.bias = args.of.bias;
  patch_lengths(args.of.segment[0], &a.kv);
  rebase(workspace, a.lse2, a.delta, a.dq_sum, a.kv_sum, a.turn, a.kv_turn, a.taken);
  map_base[0] = args.of.q;
  map_base[1] = args.of.segment[0].k;
  map_base[2] = args.of.segment[0].v;
  map_base[3] = args.d_out;
}

Step main_step(const char* image, const BackwardProblem& b, const DeviceInfo& device,
               const Tile& tile, const Space& space) {
  const Problem& p = b.of;
  attn_sm90_backward_kernarg a{};
  a.lse2 = offset_of<const float>(space.lse2);
  a.delta = offset_of<const float>(space.delta);
  a.dq_sum = offset_of<float>(space.dq_sum);
  a.kv_sum = offset_of<float>(space.kv_sum);
  const auto word = [&](size_t at) {
    return offset_of<unsigned>(space.clear + at * sizeof(unsigned));
  };
  a.turn = word(0);
  a.kv_turn = word(space.turns);
  a.taken = word(space.turns + space.kv_turns);
  a.dq = gradient_array(b, ATTN_GRAD_Q);
  a.dk = gradient_array(b, ATTN_GRAD_K);
  a.dv = gradient_array(b, ATTN_GRAD_V);
  a.kv = kv_lengths(b.kv());
  a.rows = backward_rows(p);
  a.batch = int(p.batch);
  a.heads_q = int(p.heads_q);
  a.group = int(p.group());
  a.head_dim = int(p.head_dim);
  a.head_dim_v = int(p.head_dim_v);
  a.tiles = int(space.tiles);
  a.key_blocks = int(space.key_blocks);
  a.list = item_list(p, device, tile);
  a.order = order(p, tile);
  a.items = unsigned(a.list.pairs) * unsigned(a.list.blocks);
  a.scale = p.scale;
  a.log2_scale = log2_scale(p);
  if (p.softcap > 0) {
    // So that both are normal numbers. No score is so large that it feels a softcap above 1e20.
    const float softcap = std::min(p.softcap, 1e20f);
    a.log2_scale = softcap * 1.44269504f;  // log2(e)
    a.into_softcap = std::clamp(p.scale / softcap, 1e-37f, 1e37f);
  }
  std::copy_n(p.bias_stride, 2, a.bias_stride);
  a.bias_query = int(p.bias_stride[2]);
  a.bias_key = int(p.bias_stride[3]);
  a.bias_type = p.bias_type;
  a.mask = p.range_mask();
  // Without items there are rows of dq to be cleared.
  const int64_t grid =
      std::clamp<int64_t>(a.items, 1, multiprocessors(p, device) / tile.blocks) * tile.blocks;
  const bool packed = p.q_layout == ATTN_PACKED;
  const auto map = [&](int64_t dim, int64_t rows_of, int64_t heads, int64_t batch,
                       const attn_strides& stride, int box_rows) {
    return tensor_map(2, dim, rows_of, heads, batch, stride, 64, box_rows);
  };
  const auto of_queries = [&](int64_t dim, const attn_strides& stride) {
    return map(dim, packed ? p.total_q : p.seqlen_q, p.heads_q, packed ? 1 : p.batch, stride,
               bwd_sm90::tile_queries);
  };
  const auto of_keys = [&](int64_t dim, const attn_strides& stride) {
    const Extents size = extents(p, b.kv());
    return map(dim, size.rows, p.heads_kv, size.batch, stride, tile.block_keys());
  };
  return {
      .image = image,
      .launch = {.grid = {uint32_t(grid), 1, 1},
                 .block = {uint32_t(tile.threads()), 1, 1},
                 .shared_bytes = uint32_t(tile.shared_bytes())},
      .arguments = arguments_of<patch>(a),
      .maps = {of_queries(p.head_dim, p.q_stride), of_keys(p.head_dim, b.kv().k_stride),
               of_keys(p.head_dim_v, b.kv().v_stride), of_queries(p.head_dim_v, b.d_out_stride)},
      .map_base = {nullptr, nullptr, nullptr, nullptr},
  };
}

template <size_t i>
Status make_recipe(const BackwardProblem& b, const DeviceInfo& device, Recipe* recipe) {
  constexpr const bwd_sm90::Variant& variant = bwd_sm90::variants[i];
  ATTN_TRY(check(b, device, variant.tile));
  const Space space(b, variant.tile);
  ATTN_TRY(add_prepare_steps(b, device, space, space.clear_bytes(), recipe));
  recipe->workspace = space.bytes;
  recipe->steps.push_back(main_step(variant.name, b, device, variant.tile, space));
  return {};
}

constexpr Limits limits(const bwd_sm90::Variant& variant) {
  Limits limits = gradient_limits(attn_dtype(variant.type), variant.tile.head_dim);
  if (variant.with != With::nothing) {
    limits.flags |= ATTN_ALIBI;
    limits.features |= feature_softcap;
  }
  if (variant.with == With::bias) {
    limits.features |= feature_bias;
    limits.demanded_features |= feature_bias;
  }
  return limits;
}

constinit const std::array all_rows =
    rows_of_variants<std::size(bwd_sm90::variants)>([]<size_t i>() -> Kernel {
      constexpr const bwd_sm90::Variant& variant = bwd_sm90::variants[i];
      return gradient_row(variant.name, attn_dtype(variant.type), limits(variant),
                          recipe_of<make_recipe<i>>);
    });

}  // namespace

std::span<const Kernel> sm90_backward_rows() {
  return all_rows;
}

}  // namespace attn
