// What the host sides of the kernels that launch fwd_sm90_* share.
#pragma once
#include <algorithm>
#include <numeric>

#include "core/dtype.h"
#include "kernels/copy_engine.h"
#include "kernels/cuda_forward.h"
#include "kernels/forward_sm90/config.h"
#include "kernels/forward_sm90/tiles.h"
#include "kernels/forward_sm90/variant.h"
#include "kernels/limits.h"

namespace attn::sm90 {

static_assert(max_tensor_maps == 1 + 2 * attn_sm90_max_segments);

// The segments whose K and V a launch reads: those of the problem. Others in their place have the
// same lengths.
struct GivenSegments {
  static const attn_segment& segment(const Problem& p, int32_t i) { return p.segment[i]; }
  static attn_segment_args args(const Problem&, const Args& args, const Target&, int32_t i) {
    return args.segment[i];
  }
};

// Keys that the copy engine brings at once.
inline int box_keys(const attn_segment& s, const Tile& tile) {
  return s.layout == ATTN_PAGED ? std::gcd(s.page_size, tile.keys) : tile.loaded_keys();
}

inline bool causal(const Problem& p) {
  return p.has(ATTN_CAUSAL) || p.has(ATTN_CAUSAL_TOP_LEFT);
}
inline int64_t items(const Problem& p, const Tile& tile) {
  return p.batch * p.heads_q / tile.item_heads() * ceil_div(p.seqlen_q, tile.item_rows());
}

// (batch, head) pairs, or (batch, heads of a cluster), whose items follow each other. Under a
// causal mask longest first: those whose K and V fit in L2 next to everything else, so that blocks
// which end early find long items of them left.
inline unsigned pairs_together(const Problem& p, const DeviceInfo& device, const Tile& tile) {
  const int64_t pairs = p.batch * p.heads_q / tile.item_heads();
  if (pairs == 0 || !causal(p)) return 1;
  const int64_t in_l2 = ceil_div(pairs_in_l2(p, 32 << 20, device), tile.item_heads());
  return unsigned(ceil_div(pairs, ceil_div(pairs, in_l2)));
}

template <class Segments = GivenSegments>
Status check(const Problem& p, const DeviceInfo& device, const Tile& tile, unsigned with) {
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
  if (!(with & (with_score | with_fp8)) && p.scale <= 0)
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
  for (int32_t i = 0; i < p.num_segments; ++i) ATTN_TRY(check_copied(p, Segments::segment(p, i)));
  if (multiprocessors(p, device) < tile.blocks)
    return unsupported("it runs on ", tile.blocks, " multiprocessors or more; max_sms is ",
                       p.max_sms);
  return {};
}

template <Tile tile, class Segments>
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
  a.chunk = pairs_together(p, target.device, tile);
  a.items = unsigned(items(p, tile));
  a.taken = static_cast<unsigned*>(target.workspace);
  a.log2_scale = std::max(p.scale * 1.44269504f, 1e-37f);  // log2(e)
  a.alibi_slopes = p.has(ATTN_ALIBI) ? args.alibi_slopes : nullptr;
  a.scale = p.scale;
  a.softcap = p.softcap;
  a.mask = p.range_mask();
  for (int32_t i = 0; i < p.num_segments; ++i)
    a.segment[i] = kv_lengths(Segments::segment(p, i), Segments::args(p, args, target, i));
}

// Whether keys are adjacent, with keys 2 n and 2 n + 1 at a multiple of the size of both.
inline bool bias_pairs(const Problem& p, const void* bias) {
  const int64_t size[] = {p.batch, p.heads_q, p.seqlen_q};
  for (int i = 0; i < 3; ++i)
    if (size[i] > 1 && p.bias_stride[i] % 2 != 0) return false;
  return p.bias_stride[3] == 1 &&
         reinterpret_cast<uintptr_t>(bias) % size_t(dtype_bytes(p.bias_type, 2)) == 0;
}

template <Tile tile, unsigned with, class Segments>
void pack(const Problem& p, const Args& args, const Target& target, Parameters* to) {
  static_assert(sizeof(Kernarg<with>) <= max_kernarg_bytes);
  const void** base = to->map_base;
  *base++ = args.q;
  for (int32_t i = 0; i < p.num_segments; ++i) {
    const attn_segment_args of = Segments::args(p, args, target, i);
    *base++ = of.k;
    *base++ = of.v;
  }
  auto& a = *reinterpret_cast<Kernarg<with>*>(to->kernarg);
  set_forward<tile, Segments>(p, args, target, &a);
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
  if constexpr (with & with_fp8) {
    a.down = true;  // what a sink in the first tile dwarfs has been added up by then
    a.scales.q = descale(p.q_descale, args.q_descale, p.heads_kv, Segments::segment(p, 0));
    a.scales.out = p.has(ATTN_OUT_SCALE) ? args.out_scale : nullptr;
    for (int32_t i = 0; i < p.num_segments; ++i) {
      const attn_segment& s = Segments::segment(p, i);
      const attn_segment_args of = Segments::args(p, args, target, i);
      a.scales.segment[i] = {.k = descale(s.k_descale, of.k_descale, p.heads_kv, s),
                             .v = descale(s.v_descale, of.v_descale, p.heads_kv, s)};
    }
  }
  if constexpr (with & with_pages) {
    for (int32_t i = 0; i < p.num_segments; ++i) {
      const attn_segment& s = Segments::segment(p, i);
      a.pages[i] = pages(s, Segments::args(p, args, target, i));
      a.box_keys[i] = box_keys(s, tile);
    }
    a.lists = 0;
    a.least_queries = 0;
  }
}

inline TensorMap panel_map(int64_t head_dim, int64_t rows, int64_t heads, int64_t batch,
                           const attn_strides& stride, int box_rows, int element_bytes = 2) {
  return tensor_map(element_bytes, head_dim, rows, heads, batch, stride,
                    panel_columns(element_bytes), box_rows);
}

template <class Segments>
std::vector<TensorMap> maps_of(const Problem& p, const Tile& tile) {
  std::vector<TensorMap> maps;
  maps.reserve(1 + 2 * p.num_segments);
  const bool packed = p.q_layout == ATTN_PACKED;
  maps.push_back(panel_map(p.head_dim, packed ? p.total_q : p.seqlen_q, p.heads_q,
                           packed ? 1 : p.batch, p.q_stride, tile.q_part_rows(),
                           tile.element_bytes));
  for (int32_t i = 0; i < p.num_segments; ++i) {
    const attn_segment& s = Segments::segment(p, i);
    const auto [rows, batch] = extents(p, s);
    const int keys = box_keys(s, tile);
    maps.push_back(
        panel_map(p.head_dim, rows, p.heads_kv, batch, s.k_stride, keys, tile.element_bytes));
    maps.push_back(
        panel_map(p.head_dim_v, rows, p.heads_kv, batch, s.v_stride, keys, tile.element_bytes));
  }
  return maps;
}

// Whether blocks take items as they come, whose number begins the workspace.
inline bool counts_items(const Problem& p, const DeviceInfo& device, const Tile& tile) {
  return items(p, tile) > multiprocessors(p, device) / tile.blocks;
}

inline size_t counter_bytes(const Problem& p, const DeviceInfo& device, const Tile& tile,
                            unsigned with) {
  if (!counts_items(p, device, tile)) return 0;
  return with & with_mask ? sizeof(attn_sm90_order) : sizeof(unsigned);
}

template <Tile tile, unsigned with, class Segments = GivenSegments>
Step forward_step(const char* image, const Problem& p, const DeviceInfo& device) {
  const int64_t blocks = multiprocessors(p, device) / tile.blocks;
  const int64_t grid = std::min(forward_blocks(p, items(p, tile)), blocks) * tile.blocks;
  return {
      .image = image,
      .kernarg_bytes = sizeof(Kernarg<with>),
      .launch = {.grid = {uint32_t(grid), 1, 1},
                 .block = {uint32_t(tile.threads()), 1, 1},
                 .shared_bytes = uint32_t(tile.shared_bytes()),
                 .starts_early = true},
      .maps = maps_of<Segments>(p, tile),
      .pack = pack_of<pack<tile, with, Segments>>,
  };
}

template <Tile tile, unsigned with, class Segments = GivenSegments>
Status add_forward(const char* image, const Problem& p, const DeviceInfo& device, Recipe* recipe) {
  ATTN_TRY(check<Segments>(p, device, tile, with));
  recipe->steps.push_back(forward_step<tile, with, Segments>(image, p, device));
  return {};
}

// Scores that are not changed go into the weights' exponents with one FMA, whose result is stated
// for those whose bits it keeps (docs/numerics.md).
constexpr int largest_score(const Variant& variant) {
  if (variant.with & with_fp8)
    return 22;  // beyond, weights of 2^8 may be rounded up to more than 448
  if (variant.with & with_score) return 127;
  return variant.type == ATTN_F16 ? 26 : 30;
}

}  // namespace attn::sm90
