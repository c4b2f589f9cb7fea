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

// A segment as a launch reads it: the problem's, or with K, V and the table of its pages in the
// workspace, at these offsets. Others in their place have the same lengths.
struct ReadSegment : attn_segment {
  bool in_workspace = false;
  size_t k_at = 0, v_at = 0, table_at = 0;
};
struct GivenSegments {
  static ReadSegment segment(const Problem& p, int32_t i) { return {p.segment[i]}; }
  static bool in_workspace(const Problem&, int32_t) { return false; }
};

// Keys that the copy engine brings at once.
inline int box_keys(const attn_segment& s, const Tile& tile) {
  return s.layout == ATTN_PAGED ? std::gcd(s.page_size, tile.keys) : tile.loaded_keys();
}

inline int64_t items(const Problem& p, const Tile& tile) {
  return p.batch * p.key_parts * p.heads_q / tile.item_heads() *
         ceil_div(p.seqlen_q, tile.item_rows());
}

// (batch, head) pairs, or (batch, heads of a cluster), whose items follow each other. Under a
// causal mask longest first: those whose K and V fit in L2 next to everything else, so that blocks
// which end early find long items of them left.
inline unsigned pairs_together(const Problem& p, const DeviceInfo& device, const Tile& tile) {
  const int64_t pairs = p.batch * p.heads_q / tile.item_heads();
  if (pairs == 0 || !p.causal()) return 1;
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
  ATTN_TRY(check_positions(p, false));
  if (multiprocessors(p, device) < tile.blocks)
    return unsupported("it runs on ", tile.blocks, " multiprocessors or more; max_sms is ",
                       p.max_sms);
  return {};
}

// Whether keys are adjacent, with keys 2 n and 2 n + 1 at a multiple of the size of both if the
// array starts at one.
inline bool bias_pairs(const Problem& p) {
  const int64_t size[] = {p.batch, p.heads_q, p.seqlen_q};
  for (int i = 0; i < 3; ++i)
    if (size[i] > 1 && p.bias_stride[i] % 2 != 0) return false;
  return p.bias_type != ATTN_DTYPE_NONE && p.bias_stride[3] == 1;
}

// What a launch takes of the items, where other launches take the rest.
struct Part {
  int least_queries = 0;  // of a sequence, counted from the lengths; 0: all, from capacities
  int64_t blocks = 0;     // of the launch; 0: as many as the device has multiprocessors
  // See attn_sm90_paged_kernarg.
  int heads_together = 0;  // 0: all
  int helpers = 0, helped = 0;
};

template <Tile tile, unsigned with, class Segments>
Kernarg<with> constants(const Problem& p, const DeviceInfo& device, const Part& part) {
  Kernarg<with> a{};
  set(a.out_stride, p.out_stride);
  a.total_q = p.total_q;
  a.batch = int(p.batch * p.key_parts);
  if (p.key_parts > 1) a.part_keys = int(round_up(ceil_div(p.seqlen_kv, p.key_parts), tile.keys));
  a.heads_q = int(p.heads_q);
  a.group = int(p.group());
  a.seqlen_q = int(p.seqlen_q);
  a.head_dim_v = int(p.head_dim_v);
  a.out_type = p.out_type;
  a.split_invariant = p.has(ATTN_SPLIT_INVARIANT);
  a.num_segments = p.num_segments;
  // Of fp8, what a sink in the first tile dwarfs has been added up by then.
  a.down = with & with_fp8 || p.causal();
  a.chunk = pairs_together(p, device, tile);
  a.items = unsigned(items(p, tile));
  a.log2_scale = std::max(p.scale * 1.44269504f, 1e-37f);  // log2(e)
  a.scale = p.scale;
  a.softcap = p.softcap;
  a.mask = p.range_mask();
  a.positions = positions(p);
  if constexpr (with & with_mask) a.block_mask = mask_arrays(p);
  if constexpr (with == with_bias) {
    std::copy_n(p.bias_stride, 4, a.bias_stride);
    a.bias_type = p.bias_type;
    a.bias_pairs = bias_pairs(p);
  }
  if constexpr (with & with_fp8) a.scales.q = descale(p.q_descale, p.heads_kv, {});
  if constexpr (with & with_pages) {
    a.lists = part.least_queries > 0 && p.q_layout == ATTN_PACKED;
    a.least_queries = part.least_queries;
    a.heads_together = part.heads_together ? part.heads_together : int(p.heads_q);
    a.helpers = part.helpers;
    a.helped = part.helped;
  }
  for (int32_t i = 0; i < p.num_segments; ++i) {
    const ReadSegment s = Segments::segment(p, i);
    a.segment[i] = kv_lengths(s);
    if constexpr (with & with_fp8)
      a.scales.segment[i] = {.k = descale(s.k_descale, p.heads_kv, s),
                             .v = descale(s.v_descale, p.heads_kv, s)};
    if constexpr (with & with_pages) {
      a.pages[i] = pages(s);
      a.pages[i].block_table = offset_of<const int>(s.table_at);
      a.box_keys[i] = box_keys(s, tile);
    }
  }
  return a;
}

template <unsigned with, class Segments>
void patch(const Problem& p, const Args& args, void* workspace, Kernarg<with>& a,
           const void** map_base) {
  patch_rows(args, &a);
  a.alibi_slopes = args.alibi_slopes;
  a.kv_begin = args.kv_begin;
  patch_positions(p, args, &a.positions);
  a.taken = static_cast<unsigned*>(workspace);
  if constexpr (with & with_mask) {
    patch_mask(p, args, &a.block_mask);
    a.order = static_cast<attn_sm90_order*>(workspace);
  }
  if constexpr (with == with_bias) {
    a.bias = args.bias;
    if (a.bias_pairs)
      a.bias_pairs =
          reinterpret_cast<uintptr_t>(args.bias) % size_t(dtype_bytes(p.bias_type, 2)) == 0;
  }
  if constexpr (with & with_fp8) {
    a.scales.q.at = args.q_descale;
    a.scales.out = args.out_scale;
  }
  *map_base++ = args.q;
  for (int32_t i = 0; i < p.num_segments; ++i, map_base += 2) {
    const attn_segment_args of = args.segment[i];
    patch_lengths(of, &a.segment[i]);
    if constexpr (with & with_fp8) {
      a.scales.segment[i].k.at = of.k_descale;
      a.scales.segment[i].v.at = of.v_descale;
    }
    if (Segments::in_workspace(p, i)) {
      rebase(workspace, map_base[0], map_base[1]);
      if constexpr (with & with_pages)
        if (p.segment[i].layout == ATTN_PAGED) rebase(workspace, a.pages[i].block_table);
      continue;
    }
    map_base[0] = of.k;
    map_base[1] = of.v;
    if constexpr (with & with_pages) a.pages[i].block_table = of.block_table;
  }
}

inline TensorMap panel_map(int64_t head_dim, int64_t rows, int64_t heads, int64_t batch,
                           const attn_strides& stride, int box_rows, int element_bytes = 2) {
  return tensor_map(element_bytes, head_dim, rows, heads, batch, stride,
                    panel_columns(element_bytes), box_rows);
}

template <class Segments>
void set_maps(const Problem& p, const Tile& tile, Step* step) {
  const bool packed = p.q_layout == ATTN_PACKED;
  const auto add = [&](const TensorMap& map, size_t at) {
    step->maps.push_back(map);
    step->map_base.push_back(offset_of<const void>(at));
  };
  add(panel_map(p.head_dim, packed ? p.total_q : p.seqlen_q, p.heads_q, packed ? 1 : p.batch,
                p.q_stride, tile.q_part_rows(), tile.element_bytes),
      0);
  step->maps_packed_q = packed;
  for (int32_t i = 0; i < p.num_segments; ++i) {
    const ReadSegment s = Segments::segment(p, i);
    const auto [rows, batch] = extents(p, s);
    const int keys = box_keys(s, tile);
    add(panel_map(p.head_dim, rows, p.heads_kv, batch, s.k_stride, keys, tile.element_bytes),
        s.k_at);
    add(panel_map(p.head_dim_v, rows, p.heads_kv, batch, s.v_stride, keys, tile.element_bytes),
        s.v_at);
  }
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
Step forward_step(const char* image, const Problem& p, const DeviceInfo& device,
                  const Part& part = {}) {
  const int64_t most = multiprocessors(p, device) / tile.blocks;
  const int64_t blocks =
      part.blocks ? part.blocks : std::min(forward_blocks(p, items(p, tile)), most);
  Step step = {
      .image = image,
      .launch = {.grid = {uint32_t(blocks * tile.blocks), 1, 1},
                 .block = {uint32_t(tile.threads()), 1, 1},
                 .shared_bytes = uint32_t(tile.shared_bytes()),
                 .starts_early = true},
      .arguments =
          arguments_of<patch<with, Segments>>(constants<tile, with, Segments>(p, device, part)),
  };
  set_maps<Segments>(p, tile, &step);
  return step;
}

template <Tile tile, unsigned with>
Status add_forward(const char* image, const Problem& p, const DeviceInfo& device, Recipe* recipe) {
  ATTN_TRY(check(p, device, tile, with));
  recipe->steps.push_back(forward_step<tile, with>(image, p, device));
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
