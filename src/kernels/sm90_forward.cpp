// The host side of kernels/sm90.
#include "kernels/sm90_forward.h"

#include <algorithm>

#include "core/dtype.h"
#include "kernels/cuda_forward.h"
#include "kernels/sm90/forward_args.h"
#include "kernels/sm90/tiles.h"

namespace attn {
namespace {

static_assert(sizeof(attn_sm90_mask_kernarg) <= max_kernarg_bytes);
static_assert(sizeof(attn_sm90_bias_kernarg) <= max_kernarg_bytes);
static_assert(sizeof(attn_tensor_map) == tensor_map_bytes);
static_assert(max_tensor_maps == 1 + 2 * attn_sm90_max_segments);

constexpr int64_t multiprocessors = 132;  // of an H100 or H200

// Rows that the copy engine can count.
constexpr int64_t max_rows = (int64_t{1} << 31) - 1;

bool causal(const Problem& p) {
  return p.has(ATTN_CAUSAL) || p.has(ATTN_CAUSAL_TOP_LEFT);
}
// Of a (batch, head) pair.
template <sm90::Tile tile>
int64_t query_tiles(const Problem& p) {
  return ceil_div(p.seqlen_q, tile.item_rows());
}
template <sm90::Tile tile>
int64_t items(const Problem& p) {
  return p.batch * p.heads_q * query_tiles<tile>(p);
}

// The copy engine takes no stride of 0 between entries, nor one of 2^40 bytes.
Status check_strides(const char* name, const attn_strides& s, const int64_t (&size)[3]) {
  const int64_t stride[] = {s.seq, s.head, s.batch};
  for (int i = 0; i < 3; ++i) {
    if (size[i] > 1 && (stride[i] <= 0 || stride[i] >= int64_t{1} << 39))
      return unsupported(name, ": stride ", stride[i], "; accepted: above 0, below 2^39");
  }
  return {};
}

// (batch, head) pairs whose items stand together. Under a causal mask longest first: those whose K
// and V the L2 holds beside all else, so that blocks which end early find long items of them left.
unsigned pairs_together(const Problem& p) {
  const int64_t pairs = p.batch * p.heads_q;
  if (pairs == 0 || !causal(p)) return 1;
  return unsigned(ceil_div(pairs, ceil_div(pairs, pairs_in_l2(p, 32 << 20))));
}

template <sm90::Tile tile, bool score>
Status shape(const Problem& p, const DeviceInfo& device, Launch* launch, size_t* workspace) {
  constexpr int shared = tile.shared_bytes();
  if (!device.tensor_maps)
    return unsupported("the driver has no cuTensorMapEncodeTiled of CUDA 12.0");
  if (shared > device.shared_bytes_max)
    return unsupported("it needs ", shared, " bytes of shared memory; the device has ",
                       device.shared_bytes_max);
  if (p.num_segments > attn_sm90_max_segments)
    return unsupported("num_segments is ", p.num_segments, "; accepted: up to ",
                       int(attn_sm90_max_segments));
  constexpr int64_t max_length = 1 << 30;  // positions and their differences stay within 32 bits
  if (p.seqlen_q > max_length || p.seqlen_kv > max_length)
    return unsupported("seqlen is ", std::max(p.seqlen_q, p.seqlen_kv), "; accepted: up to ",
                       max_length);
  if (!score && p.scale <= 0) return unsupported("scale is ", p.scale, "; accepted: above 0");
  const int64_t count = items<tile>(p);
  if (p.batch * p.heads_q > max_rows || count > max_rows)
    return unsupported("batch * heads_q * ceil(seqlen_q / ", tile.rows(), ") is ", count,
                       "; accepted: up to ", max_rows);
  if (p.q_layout == ATTN_PACKED && p.total_q > max_rows)
    return unsupported("total_q is ", p.total_q, "; accepted: up to ", max_rows);
  ATTN_TRY(check_strides("q", p.q_stride,
                         {p.q_layout == ATTN_PACKED ? p.total_q : p.seqlen_q, p.heads_q,
                          p.q_layout == ATTN_PACKED ? 1 : p.batch}));
  for (const attn_segment& s : p.segment) {
    const bool packed = s.layout == ATTN_PACKED;
    if (packed && s.total > max_rows)
      return unsupported("total is ", s.total, "; accepted: up to ", max_rows);
    const int64_t size[] = {packed ? s.total : s.seqlen, p.heads_kv, packed ? 1 : p.batch};
    ATTN_TRY(check_strides("k", s.k_stride, size));
    ATTN_TRY(check_strides("v", s.v_stride, size));
  }
  const int64_t blocks =
      p.max_sms > 0 ? std::min<int64_t>(p.max_sms, device.multiprocessors) : device.multiprocessors;
  if (blocks < tile.blocks)
    return unsupported("it runs on ", tile.blocks, " multiprocessors or more; max_sms is ",
                       p.max_sms);
  launch->grid[0] =
      uint32_t(std::min(forward_blocks(p, count), blocks / tile.blocks) * tile.blocks);
  launch->block[0] = tile.threads();
  launch->shared_bytes = shared;
  launch->starts_early = true;
  *workspace = 0;
  if (tile.blocks == 1 && count > blocks)
    *workspace = p.has(ATTN_BLOCK_MASK) ? sizeof(attn_sm90_order) : sizeof(unsigned);
  return {};
}

template <sm90::Tile tile>
void pack(const Problem& p, const Args& args, void* workspace, void* kernarg) {
  auto& a = *static_cast<attn_sm90_forward_kernarg*>(kernarg);
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
  a.chunk = pairs_together(p);
  a.items = unsigned(items<tile>(p));
  a.taken = static_cast<unsigned*>(workspace);
  a.unit = std::max(p.scale * 1.44269504f, 1e-37f);  // log2(e)
  a.alibi_slopes = p.has(ATTN_ALIBI) ? args.alibi_slopes : nullptr;
  a.scale = p.scale;
  a.softcap = p.softcap;
  a.mask = p.range_mask();
  for (int32_t i = 0; i < p.num_segments; ++i)
    a.segment[i] = kv_lengths(p.segment[i], args.segment[i]);
}

template <sm90::Tile tile>
void pack_masked(const Problem& p, const Args& args, void* workspace, void* kernarg) {
  pack<tile>(p, args, workspace, kernarg);
  auto& a = *static_cast<attn_sm90_mask_kernarg*>(kernarg);
  a.block_mask = mask_arrays(p, args);
  a.order = static_cast<attn_sm90_order*>(workspace);
}

// Whether keys lie side by side, two from an even one on at a multiple of the size of both.
bool bias_pairs(const Problem& p, const void* bias) {
  const int64_t size[] = {p.batch, p.heads_q, p.seqlen_q};
  for (int i = 0; i < 3; ++i)
    if (size[i] > 1 && p.bias_stride[i] % 2 != 0) return false;
  return p.bias_stride[3] == 1 &&
         reinterpret_cast<uintptr_t>(bias) % size_t(dtype_bytes(p.bias_type, 2)) == 0;
}

template <sm90::Tile tile>
void pack_biased(const Problem& p, const Args& args, void* workspace, void* kernarg) {
  pack<tile>(p, args, workspace, kernarg);
  auto& a = *static_cast<attn_sm90_bias_kernarg*>(kernarg);
  const bool any = p.bias_type != ATTN_DTYPE_NONE;
  a.bias = any ? args.bias : nullptr;
  std::copy_n(p.bias_stride, 4, a.bias_stride);
  a.bias_type = p.bias_type;
  a.bias_pairs = any && bias_pairs(p, args.bias);
}

// Maps of empty tensors are never used; the driver wants sizes above 0.
TensorMap tensor_map(const void* base, int64_t head_dim, int64_t rows, int64_t heads, int64_t batch,
                     const attn_strides& stride, int box_rows) {
  return {.base = base,
          .size = {head_dim, std::max<int64_t>(1, rows), heads, batch},
          .stride = {2 * stride.seq, 2 * stride.head, 2 * stride.batch},
          .rows = box_rows};
}

template <sm90::Tile tile>
int maps(const Problem& p, const Args& args, TensorMap (&to)[max_tensor_maps]) {
  int count = 0;
  const bool packed = p.q_layout == ATTN_PACKED;
  to[count++] = tensor_map(args.q, p.head_dim, packed ? p.total_q : p.seqlen_q, p.heads_q,
                           packed ? 1 : p.batch, p.q_stride, tile.q_part_rows());
  for (int32_t i = 0; i < p.num_segments; ++i) {
    const attn_segment& s = p.segment[i];
    const bool packed = s.layout == ATTN_PACKED;
    const int64_t rows = packed ? s.total : s.seqlen, batch = packed ? 1 : p.batch;
    to[count++] = tensor_map(args.segment[i].k, p.head_dim, rows, p.heads_kv, batch, s.k_stride,
                             tile.loaded_keys());
    to[count++] = tensor_map(args.segment[i].v, p.head_dim_v, rows, p.heads_kv, batch, s.v_stride,
                             tile.loaded_keys());
  }
  return count;
}

template <sm90::Tile tile, bool score = false>
constexpr DeviceKernel row(std::string (*passed_over)(const Problem&) = nullptr) {
  return {.kernarg_bytes = sizeof(attn_sm90_forward_kernarg),
          .passed_over = passed_over,
          .shape_forward = shape<tile, score>,
          .maps_forward = maps<tile>,
          .pack_forward = pack<tile>};
}

template <sm90::Tile tile>
constexpr DeviceKernel masked_row() {
  DeviceKernel kernel = row<tile>();
  kernel.kernarg_bytes = sizeof(attn_sm90_mask_kernarg);
  kernel.pack_forward = pack_masked<tile>;
  return kernel;
}

template <sm90::Tile tile>
constexpr DeviceKernel biased_row() {
  DeviceKernel kernel = row<tile, true>();
  kernel.kernarg_bytes = sizeof(attn_sm90_bias_kernarg);
  kernel.pack_forward = pack_biased<tile>;
  return kernel;
}

// Smaller tiles of queries, as long as each multiprocessor has one at most.
std::string too_many(const Problem& p) {
  const int64_t count = items<sm90::tile_d64_short>(p);
  if (count <= multiprocessors) return "";
  return join("for ", count, " tiles of 64 queries, more than ", multiprocessors,
              ", a later kernel is faster");
}
std::string shorter_than(int64_t least, const Problem& p) {
  if (p.seqlen_kv >= least) return "";
  return join("for seqlen_kv ", p.seqlen_kv, ", below ", least, ", a later kernel is faster");
}
// Its larger tile costs more at the ends of sequences than it spares between them if they are
// short, and spares nothing where all items are equally long (docs/hopper.md).
std::string too_short(const Problem& p) {
  if (!causal(p)) return "without a causal mask a later kernel is as fast";
  return shorter_than(8192, p);
}

// Two blocks that share K and V take as long as the one that has more to do, and their items in a
// fixed order; what sharing spares shows where nearly all is read from the L2 (docs/hopper.md).
template <sm90::Tile tile, int64_t least>
std::string shares_little(const Problem& p) {
  if (causal(p) || p.has(ATTN_WINDOW))
    return "for causal masks and windows a later kernel is faster";
  if (p.q_layout == ATTN_PACKED || p.seqlen_q % tile.item_rows() != 0)
    return join("for sequences that are not multiples of ", tile.item_rows(),
                " queries a later kernel is faster");
  return shorter_than(least, p);
}

}  // namespace

constinit const DeviceKernel fwd_sm90_d128_pair_kernel =
    row<sm90::tile_d128_pair>(shares_little<sm90::tile_d128_pair, 8193>);
constinit const DeviceKernel fwd_sm90_d256_pair_kernel =
    row<sm90::tile_d256_pair>(shares_little<sm90::tile_d256_pair, 4096>);
constinit const DeviceKernel fwd_sm90_d64_short_kernel = row<sm90::tile_d64_short>(too_many);
constinit const DeviceKernel fwd_sm90_d64_kernel = row<sm90::tile_d64>();
constinit const DeviceKernel fwd_sm90_d96_kernel = row<sm90::tile_d96>();
constinit const DeviceKernel fwd_sm90_d128_long_kernel = row<sm90::tile_d128_long>(too_short);
constinit const DeviceKernel fwd_sm90_d128_kernel = row<sm90::tile_d128>();
constinit const DeviceKernel fwd_sm90_d192_dv128_kernel = row<sm90::tile_d192_dv128>();
constinit const DeviceKernel fwd_sm90_d192_kernel = row<sm90::tile_d192>();
constinit const DeviceKernel fwd_sm90_d256_kernel = row<sm90::tile_d256>();
constinit const DeviceKernel fwd_sm90_d64_mask_kernel = masked_row<sm90::tile_d64_mask>();
constinit const DeviceKernel fwd_sm90_d128_mask_kernel = masked_row<sm90::tile_d128_mask>();
constinit const DeviceKernel fwd_sm90_d256_mask_kernel = masked_row<sm90::tile_d256_mask>();
constinit const DeviceKernel fwd_sm90_d64_score_kernel = row<sm90::tile_d64_score, true>();
constinit const DeviceKernel fwd_sm90_d128_score_kernel = row<sm90::tile_d128_score, true>();
constinit const DeviceKernel fwd_sm90_d256_score_kernel = row<sm90::tile_d256_score, true>();
constinit const DeviceKernel fwd_sm90_d64_bias_kernel = biased_row<sm90::tile_d64_bias>();
constinit const DeviceKernel fwd_sm90_d128_bias_kernel = biased_row<sm90::tile_d128_bias>();
constinit const DeviceKernel fwd_sm90_d256_bias_kernel = biased_row<sm90::tile_d256_bias>();

}  // namespace attn
