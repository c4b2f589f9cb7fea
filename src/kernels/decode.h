// What the host sides of the kernels that launch decode_* share.
#pragma once
#include <algorithm>
#include <bit>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "core/dtype.h"
#include "kernels/copy_engine.h"
#include "kernels/cuda_forward.h"
#include "kernels/decode/decode_args.h"
#include "kernels/decode/own_tiles.h"
#include "kernels/decode/variants.h"
#include "kernels/decode_units.h"
#include "kernels/limits.h"

namespace attn::decode {

static_assert(int(attn_element_nvfp4) == ATTN_NVFP4);

constexpr int ring_bytes = 192 << 10;  // of the blocks of a multiprocessor
constexpr int64_t few_units = 16, few_units_of_swapped = 4, many_units = 48;  // of a block
constexpr int64_t few_units_of_blocks = 3;
constexpr int64_t concurrent_waves = 4;  // of blocks, with another launch at the same time
constexpr int64_t max_length = 1 << 30;  // keys of a sequence
constexpr int block_reserve = 1024;      // shared memory that the system reserves for each block

// With fixed_split each split has a slot in the workspace, up to this size; beyond that blocks take
// whole row tiles.
constexpr int64_t split_bytes_max = 512 << 20;

// What a launch is made of.
struct Shape {
  int heads = 1;  // K/V heads that a block of own_types has at once
  int stages = 0;
  int k_bytes = 0, stage_bytes = 0;    // of a unit in shared memory
  int scales_at = 0, v_scales_at = 0;  // in it, K's and V's; 0: none
  int64_t blocks = 0;                  // a multiple of columns_of()
  int64_t splits = 0;                  // of a row tile at most; 0: without fixed_split
  bool whole_heads = false;            // blocks take whole row tiles
  int64_t slots = 0;                   // of the workspace
  bool by_rows = false;                // rows of K and V are loaded one by one
};
// Rows, queries times query heads of a K/V head, of the sequences that a launch takes: of all, or
// (few) of those that one row tile holds.
template <bool few>
int64_t rows_of(const Problem& p, const DecodeTile& tile) {
  const int64_t rows = p.seqlen_q * p.group();
  return few ? std::min(rows, tile.rows() / p.group() * p.group()) : rows;
}
// More rows than a block takes read K and V again for each of their tiles: of 16 bits that is what
// fwd_* do better, except for trees and the bits that fixed_split promises.
inline bool alone(const Problem& p, const DecodeTile& tile) {
  return tile.element_bytes == 1 || p.tree_keys > 0 || p.fixed_split > 0;
}
inline int64_t row_tiles(int64_t rows, const DecodeTile& tile) {
  return std::max<int64_t>(1, ceil_div(rows, tile.rows()));
}

inline int64_t slot_bytes(const DecodeTile& tile) {
  return tile.rows() * (tile.head_dim_v + 2) * int64_t{sizeof(float)};
}

// Bytes that K or V of a unit take in shared memory.
inline int place_bytes(attn_dtype type, int columns, const DecodeTile& tile, int heads) {
  if (!tile.own_types) return tile.tile_bytes(columns);
  // In whole 1024 bytes, so that swizzles begin there.
  return (unit_keys / heads * own_place(type, columns, heads).key_bytes(heads) + 1023) / 1024 *
         1024;
}
// Keys that TMA loads at once.
inline int box_keys(const attn_segment& s, int heads = 1) {
  return std::min(s.layout == ATTN_PAGED ? std::gcd(s.page_size, unit_keys) : unit_keys,
                  unit_keys / heads);
}
// swapped.cuh can load rows one by one. It must for pages smaller than any box. Boxes are asked for
// by one lane, for which those of few keys take longer than memory does, above all over fp8. And
// rows of 16 bits and 128 or 256 columns load 3 to 8 % faster, though a launch begins up to 1.2 us
// later; those of 160 and 192 are slower (docs/log/2026-11-28_rows_one_by_one.md).
inline bool can_load_rows(const DecodeTile& tile) {
  return tile.swapped && tile.loaders() > 1;
}
inline bool loads_rows(const Problem& p, const DecodeTile& tile, int64_t units_of_block) {
  constexpr int64_t least_units = 12;
  if (!can_load_rows(tile)) return false;
  const int least_keys = tile.element_bytes == 1 ? 64 : 32;
  for (const attn_segment& s : p.segment)
    if (box_keys(s) < least_keys) return true;
  return tile.element_bytes == 2 && (p.head_dim == 128 || p.head_dim == 256) &&
         p.head_dim_v == p.head_dim && units_of_block >= least_units;
}

// Heads of a token are adjacent in memory. A block that has several reads them at about the same
// time, which takes up to a third less; but as many partial results are merged for each.
inline bool can_have_heads(const Problem& p, int heads) {
  if (p.heads_kv % heads != 0) return false;
  for (const attn_segment& s : p.segment) {
    if (box_keys(s, heads) != unit_keys / heads) return false;
    for (const auto& [type, stride, dim] : {std::tuple(s.k_type, s.k_stride, p.head_dim),
                                            std::tuple(s.v_type, s.v_stride, p.head_dim_v)}) {
      if (!dtype_is_ggml(type)) continue;
      const OwnPlace place = own_place(type, int(dim), heads);
      const int64_t head = dtype_bytes(type, stride.head);
      if (place.heads > heads || (place.heads == 1 ? head % 16 != 0 : head != place.head_bytes))
        return false;
    }
  }
  return true;
}
inline bool v_by_fours(const Problem& p) {
  return !(p.needs.v_types & ~(type_bit(ATTN_I4) | type_bit(ATTN_NVFP4)));
}
// Bytes between heads; of codes 0 where rows of shared memory have one head: of i4 those of several
// were no faster.
inline int head_pitch(const Problem& p, const attn_segment& s, bool v) {
  const attn_dtype type = v ? s.v_type : s.k_type;
  if (dtype_has_scales(type) && (type != ATTN_NVFP4 || (v && !v_by_fours(p)))) return 0;
  return int(dtype_bytes(type, v ? s.v_stride.head : s.k_stride.head));
}
constexpr int64_t units_of_head = 16;  // of a block, for each head it has at once
inline int heads_at_once(const Problem& p, int64_t units_of_block) {
  int heads = decode_warps;
  while (heads > 1 && (!can_have_heads(p, heads) || units_of_block < units_of_head * heads))
    heads /= 2;
  return heads;
}
inline void set_places(const Problem& p, const DecodeTile& tile, Shape* shape) {
  int v_bytes = 0;
  for (const attn_segment& s : p.segment) {
    shape->k_bytes =
        std::max(shape->k_bytes, place_bytes(s.k_type, tile.head_dim, tile, shape->heads));
    v_bytes = std::max(v_bytes, place_bytes(s.v_type, tile.head_dim_v, tile, shape->heads));
  }
  shape->stage_bytes = shape->k_bytes + v_bytes;
  if (!((p.needs.k_types | p.needs.v_types) & types_with_scales)) return;
  const auto scales = [](uint32_t types, int columns) {
    return unit_keys *
           key_scale_bytes(types & type_bit(ATTN_NVFP4) ? ATTN_NVFP4 : ATTN_I8, columns);
  };
  shape->scales_at = shape->stage_bytes;
  shape->v_scales_at = shape->scales_at + scales(p.needs.k_types, tile.head_dim);
  // In whole 1024 bytes, as K and V.
  shape->stage_bytes +=
      (shape->v_scales_at - shape->scales_at + scales(p.needs.v_types, tile.head_dim_v) + 1023) /
      1024 * 1024;
}

// A few blocks fewer in a column if their shares then begin and end with row tiles, where these are
// equally long: nothing is left to merge, or each row tile is merged from as many parts.
inline int64_t aligned(int64_t blocks, int64_t row_tiles) {
  const int64_t fewer = row_tiles >= blocks ? ceil_div(row_tiles, ceil_div(row_tiles, blocks))
                                            : blocks / std::max<int64_t>(1, row_tiles) * row_tiles;
  return fewer * 10 >= blocks * 9 ? fewer : blocks;
}

// As many stages as the device's shared memory has, and blocks as its multiprocessors have at once,
// but no more than there can be units.
inline Shape shape_of(const Problem& p, int64_t rows, const DeviceInfo& device,
                      const DecodeTile& tile, bool concurrent) {
  Shape shape;
  int64_t units = 0, splits = 0;  // of a row tile
  for (const attn_segment& s : p.segment) {
    units += ceil_div(s.seqlen, unit_keys);
    if (p.fixed_split > 0) splits += ceil_div(s.seqlen, p.fixed_split);
  }
  if (tile.own_types)
    shape.heads = heads_at_once(
        p, p.batch * p.heads_kv * units / (multiprocessors(p, device) * tile.blocks()));
  set_places(p, tile, &shape);
  const auto bytes = [&](int stages) {
    return shape.heads * tile.merge_bytes() + stages * shape.stage_bytes +
           tile.static_shared_bytes();
  };
  int stages = tile.own_types ? decode_max_stages
                              : std::clamp(ring_bytes / tile.blocks() / shape.stage_bytes, 2,
                                           decode_max_stages);
  const auto fitting = [&] {  // blocks, in a multiprocessor
    return (device.shared_bytes_max + block_reserve) / (bytes(stages) + block_reserve);
  };
  // A unit of 512 columns leaves no room for a second one.
  const int least = tile.head_dim > 256 && bytes(2) > device.shared_bytes_max ? 1 : 2;
  while (stages > least && fitting() < (tile.own_types || tile.swapped ? tile.blocks() : 1))
    --stages;
  const int64_t fit = fitting();
  const int64_t tiles = p.batch * p.heads_kv / shape.heads * row_tiles(rows, tile);
  const int64_t all = tiles * std::max<int64_t>(1, units);
  int64_t most = multiprocessors(p, device) * std::clamp<int64_t>(fit, 1, tile.blocks());
  // With few units per block, the cost of merging partial results outweighs the extra loads in
  // flight. With many, later blocks take the work that slow multiprocessors leave: some are up to a
  // third slower, though hardly if fp8 keeps them busy. Units of ggml's blocks take long to
  // compute, so more warps help. A block cannot be told where to run, so max_sms limits their
  // number.
  if (p.max_sms > 0)
    most = multiprocessors(p, device);
  else if (tile.own_types)
    most =
        multiprocessors(p, device) *
        std::clamp<int64_t>(all * shape.heads / (multiprocessors(p, device) * few_units_of_blocks),
                            1, std::clamp<int64_t>(fit, 1, tile.blocks()));
  else if (tile.swapped ? all / most < few_units_of_swapped && tiles < most
                        : all / most < few_units)
    most = multiprocessors(p, device);
  else
    most *= std::clamp<int64_t>(all / most / many_units, 1,
                                tile.element_bytes == 2 && !tile.swapped ? 4 : 1);
  // Multiprocessors come and go while it runs, so blocks are small.
  if (concurrent) most *= std::clamp<int64_t>(all / most / few_units, 1, concurrent_waves);
  shape.stages = stages;
  int64_t shares = all;
  if (p.fixed_split > 0) {
    shape.splits = std::max<int64_t>(1, splits);
    shape.slots = tiles * shape.splits;
    shape.whole_heads = shape.slots > split_bytes_max / slot_bytes(tile);
    shares = shape.whole_heads ? tiles : shape.slots;
  }
  const int64_t columns = std::min(p.heads_kv / shape.heads, most);
  int64_t rows_of_column = std::min(most / columns, ceil_div(shares, columns));
  if (tile.swapped && p.fixed_split == 0) rows_of_column = aligned(rows_of_column, tiles / columns);
  shape.blocks = columns * rows_of_column;
  if (shape.splits == 0 || shape.whole_heads) shape.slots = 2 * shape.blocks;
  // A launch beside another keeps the threads that the other leaves room for.
  shape.by_rows = loads_rows(p, tile, concurrent ? 0 : all / std::max<int64_t>(1, shape.blocks));
  return shape;
}

// Producer warps of a block. Without swapped.cuh they take turns: one has some 1800 clocks of
// latency per unit, more if it loads each row separately or pages. A second one costs 1 us if a
// block has few units.
template <DecodeTile tile, bool engine>
int loaders_of(const Problem& p, const Shape& shape) {
  if (tile.swapped) return shape.by_rows ? tile.loaders() : 1;
  return !engine || p.needs.features & feature_paged_kv ? tile.loaders() : 1;
}

// The workspace: sums, stats and counters of each slot.
struct Workspace {
  int64_t stats_at, arrived_at, bytes;
};
inline Workspace workspace_of(int64_t slots, const DecodeTile& tile) {
  const int64_t rows = slots * tile.slot_rows();
  const int64_t stats_at = rows * tile.head_dim_v * int64_t{sizeof(float)},
                arrived_at = stats_at + rows * 2 * int64_t{sizeof(float)};
  return {stats_at, arrived_at, arrived_at + 2 * slots * int64_t{sizeof(unsigned)}};
}

// size: bytes of a scale, of kernels that count bytes.
inline attn_key_scales key_scales(const attn_strides& stride, int64_t size = 1) {
  return {nullptr, size * stride.batch, int(size * stride.seq), int(size * stride.head)};
}

inline attn_decode_kernarg& common(attn_decode_kernarg& kernarg) {
  return kernarg;
}
inline attn_decode_kernarg& common(attn_decode_sm90_kernarg& kernarg) {
  return kernarg.a;
}

template <DecodeTile tile, bool engine>
Kernarg<engine> constants(const Problem& p, int64_t rows, const Shape& shape) {
  Kernarg<engine> kernarg{};
  attn_decode_kernarg& a = common(kernarg);
  set(a.q_stride, p.q_stride);
  set(a.out_stride, p.out_stride);
  a.total_q = p.total_q;
  a.batch = int(p.batch);
  a.heads_q = int(p.heads_q);
  a.heads_kv = int(p.heads_kv / shape.heads);
  a.heads_log2 = std::countr_zero(unsigned(shape.heads));
  a.group = int(p.group());
  a.seqlen_q = int(p.seqlen_q);
  a.head_dim = int(p.head_dim);
  a.head_dim_v = int(p.head_dim_v);
  a.q_type = p.q_type;
  a.out_type = p.out_type;
  if constexpr (tile.own_types) {
    a.v_scales_at = shape.v_scales_at;
    a.v_by_fours = v_by_fours(p);
  } else {
    a.kv_e5m2 = p.segment[0].k_type == ATTN_F8_E5M2;
    a.whole_heads = shape.whole_heads;
  }
  a.rows_taken = int(rows);
  a.stages = shape.stages;
  // Warps that load in turns need two stages: they wait for the one before alone.
  a.loaders = !tile.swapped && shape.stages == 1 ? 1 : loaders_of<tile, engine>(p, shape);
  a.k_bytes = shape.k_bytes;
  a.stage_bytes = shape.stage_bytes;
  a.scales_at = shape.scales_at;
  a.columns = int(std::min<int64_t>(a.heads_kv, shape.blocks));
  a.split_keys = int(std::min<int64_t>(p.fixed_split, max_length));
  a.row_tiles = int(row_tiles(rows, tile));
  a.splits = int(shape.splits);
  a.slots = unsigned(shape.slots);
  a.split_invariant = p.has(ATTN_SPLIT_INVARIANT);
  a.num_segments = p.num_segments;
  a.sees_all = p.num_segments == 1 && p.fixed_split == 0 && p.tree_keys == 0 && !p.has_kv_begin &&
               !(p.flags & (ATTN_WINDOW | ATTN_CAUSAL_TOP_LEFT)) &&
               !(p.has(ATTN_CAUSAL) && p.has(ATTN_QUERY_POSITIONS));
  a.scale = p.scale;
  a.softcap = p.softcap;
  a.mask = p.range_mask();
  a.tree_mask = p.tree_mask();
  a.positions = positions(p);
  const Workspace workspace = workspace_of(shape.slots, tile);
  a.stats = offset_of<float>(workspace.stats_at);
  a.arrived = offset_of<unsigned>(workspace.arrived_at);
  for (int32_t i = 0; i < p.num_segments; ++i) {
    const attn_segment& from = p.segment[i];
    attn_decode_segment& s = a.segment[i];
    s.lengths = kv_lengths(from);
    if (from.layout == ATTN_PAGED) {
      s.num_pages = int(from.num_pages);
      s.page_size = from.page_size;
      s.max_pages = from.max_pages;
      const auto size = unsigned(from.page_size);
      s.page_log2 = std::has_single_bit(size) ? std::countr_zero(size) : -1;
    }
    s.box_keys = box_keys(from, shape.heads);
    s.k_type = from.k_type;
    s.v_type = from.v_type;
    s.k_head = head_pitch(p, from, false) / 2;
    s.v_head = head_pitch(p, from, true) / 2;
    if constexpr (tile.own_types) {
      s.k_scales = key_scales(from.k_scale_stride, type_info(from.k_type).scale_bytes);
      s.v_scales = key_scales(from.v_scale_stride, type_info(from.v_type).scale_bytes);
      s.k_nvfp4_descale = descale(from.k_descale, p.heads_kv, from);
      s.v_nvfp4_descale = descale(from.v_descale, p.heads_kv, from);
    } else {
      set(s.k_stride, from.k_stride);
      set(s.v_stride, from.v_stride);
      s.k_descale = descale(from.k_descale, p.heads_kv, from);
      s.v_descale = descale(from.v_descale, p.heads_kv, from);
    }
  }
  return kernarg;
}

template <bool own_types>
void patch(const Problem& p, const Args& args, void* workspace, attn_decode_kernarg& a) {
  patch_rows(args, &a);
  a.q = args.q;
  a.alibi_slopes = args.alibi_slopes;
  a.tree = reinterpret_cast<const unsigned long long*>(args.tree);
  rebase(workspace, a.sums, a.stats, a.arrived);
  a.kv_begin = args.kv_begin;
  patch_positions(p, args, &a.positions);
  a.fixed_lengths = !a.cu_seqlens_q && !a.kv_begin && !a.positions.query_start;
  for (int32_t i = 0; i < p.num_segments; ++i) {
    const attn_segment_args of = args.segment[i];
    attn_decode_segment& s = a.segment[i];
    s.k = of.k;
    s.v = of.v;
    patch_lengths(of, &s.lengths);
    a.fixed_lengths = a.fixed_lengths && !s.lengths.seqlens && !s.lengths.cu_seqlens;
    s.block_table = of.block_table;
    if constexpr (own_types) {
      s.k_scales.at = of.k_scale;
      s.v_scales.at = of.v_scale;
      s.k_nvfp4_descale.at = of.k_descale;
      s.v_nvfp4_descale.at = of.v_descale;
    } else {
      s.k_descale.at = of.k_descale;
      s.v_descale.at = of.v_descale;
    }
  }
}
template <bool own_types>
void patch_engine(const Problem& p, const Args& args, void* workspace,
                  attn_decode_sm90_kernarg& kernarg, const void** map_base) {
  patch<own_types>(p, args, workspace, kernarg.a);
  for (int32_t i = 0; i < p.num_segments; ++i) {
    *map_base++ = kernarg.a.segment[i].k;
    *map_base++ = kernarg.a.segment[i].v;
  }
}
template <DecodeTile tile, bool engine>
Arguments arguments(const Kernarg<engine>& kernarg) {
  if constexpr (engine)
    return arguments_of<patch_engine<tile.own_types>>(kernarg);
  else
    return arguments_of<patch<tile.own_types>>(kernarg);
}

inline Status check_engine(const Problem& p, const DeviceInfo& device, const DecodeTile& tile) {
  ATTN_TRY(check_copy_engine(device));
  for (const attn_segment& s : p.segment) {
    if (s.layout == ATTN_PAGED && s.page_size % warp_keys != 0 && !can_load_rows(tile))
      return unsupported("page_size ", s.page_size, " is not a multiple of ", warp_keys);
    ATTN_TRY(check_copied(p, s));
  }
  return {};
}

// Heads of blocks are places in a token's row. A box takes one from the multiple of 16 bytes in
// front of it, as far as the pitch goes; or rows of several.
inline TensorMap map_of_blocks(const Problem& p, const attn_segment& s, attn_dtype type,
                               int64_t head_dim, const attn_strides& stride, int heads) {
  const Extents size = extents(p, s);
  const OwnPlace place = own_place(type, int(head_dim), heads);
  const int64_t row = dtype_bytes(type, (p.heads_kv - 1) * stride.head + head_dim);
  return {.rank = 4,
          .element_bytes = 2,
          .size = {(heads == 1 ? row : place.heads * place.head_bytes) / 2,
                   std::max<int64_t>(1, size.rows), heads == 1 ? 1 : p.heads_kv / place.heads,
                   std::max<int64_t>(1, size.batch)},
          .stride = {dtype_bytes(type, stride.seq),
                     heads == 1 ? 16 : place.heads * dtype_bytes(type, stride.head),
                     dtype_bytes(type, stride.batch)},
          .box = {place.pitch / 2, box_keys(s, heads), heads / place.heads, 1},
          .l2_bytes = 128,
          .swizzled = false};
}
// Of codes with scales in an array an element of the copy engine is a byte.
inline TensorMap map_of_codes(const Problem& p, const attn_segment& s, attn_dtype type,
                              int64_t head_dim, const attn_strides& stride, int heads,
                              int head_pitch) {
  const Extents size = extents(p, s);
  const OwnPlace place = own_place(type, int(head_dim), heads, head_pitch);
  TensorMap map = tensor_map(1, place.heads * dtype_bytes(type, head_dim), size.rows,
                             p.heads_kv / place.heads, size.batch,
                             {dtype_bytes(type, stride.batch), dtype_bytes(type, stride.seq),
                              place.heads * dtype_bytes(type, stride.head)},
                             place.pitch, box_keys(s, heads), 128);
  map.box[2] = heads / place.heads;
  return map;
}

// L2 reads no more than a head's row, which is all that boxes ask for, or its first 256 bytes.
inline std::vector<TensorMap> maps_of(const Problem& p, const DecodeTile& tile, int heads) {
  std::vector<TensorMap> maps;
  maps.reserve(2 * p.num_segments);
  for (const attn_segment& s : p.segment) {
    const Extents size = extents(p, s);
    const auto map = [&](attn_dtype type, int64_t head_dim, const attn_strides& stride, bool v) {
      if (dtype_is_ggml(type)) {
        maps.push_back(map_of_blocks(p, s, type, head_dim, stride, heads));
      } else if (dtype_has_scales(type)) {
        maps.push_back(map_of_codes(p, s, type, head_dim, stride, heads, head_pitch(p, s, v)));
      } else {
        maps.push_back(
            tensor_map(tile.element_bytes, head_dim, size.rows, p.heads_kv, size.batch, stride,
                       panel_pitch / tile.element_bytes, box_keys(s, heads),
                       tile.swapped && tile.element_bytes * head_dim >= 256 ? 256 : 128));
        maps.back().box[2] = heads;
      }
    };
    map(s.k_type, p.head_dim, s.k_stride, false);
    map(s.v_type, p.head_dim_v, s.v_stride, true);
  }
  return maps;
}

inline Status check_own_types(const Problem& p) {
  for (const attn_segment& s : p.segment) {
    for (const auto& [type, kind] : {std::pair{s.k_type, s.k_descale}, {s.v_type, s.v_descale}}) {
      if (kind == ATTN_DESCALE_NONE || (type == ATTN_NVFP4 && kind != ATTN_DESCALE_BLOCK)) continue;
      return unsupported("a descale of kind ", int(kind), " with ", dtype_name(type),
                         "; accepted: none (0), and with nvfp4 tensor (1) and head (2)");
    }
    for (const auto& [type, stride, dim] : {std::tuple(s.k_type, s.k_scale_stride, p.head_dim),
                                            std::tuple(s.v_type, s.v_scale_stride, p.head_dim_v)}) {
      if (!dtype_has_scales(type)) continue;
      const int64_t most = INT32_MAX / type_info(type).scale_bytes;
      if (stride.seq > most || stride.head > most)
        return unsupported("scales of tokens and heads are ", stride.seq, " and ", stride.head,
                           " apart; accepted: up to ", most);
      if (type == ATTN_NVFP4) {
        const int64_t row = scales_of_row(type_info(type), dim);
        if (stride.seq % row != 0 || stride.head % row != 0 || stride.batch % row != 0)
          return unsupported("scales of nvfp4 are ", stride.batch, ", ", stride.seq, " and ",
                             stride.head, " apart; accepted: multiples of ", row,
                             ", those of a row");
      } else if (s.layout == ATTN_PAGED && type != ATTN_F8_E4M3FN_TOKEN && stride.batch % 2 != 0) {
        return unsupported("scales of pages are ", stride.batch, " apart; accepted: even numbers");
      }
    }
    for (const auto& [type, stride, dim] : {std::tuple(s.k_type, s.k_stride, p.head_dim),
                                            std::tuple(s.v_type, s.v_stride, p.head_dim_v)}) {
      // The copy engine counts columns in 32 bits.
      constexpr int64_t max_row = int64_t{1} << 31;
      if (!dtype_is_ggml(type)) continue;
      const int64_t row = dtype_bytes(type, (p.heads_kv - 1) * stride.head + dim);
      if (row >= max_row)
        return unsupported("the heads of a token take ", row, " bytes; accepted: below ", max_row);
      // The most bytes before a head in its box.
      const int64_t head = dtype_bytes(type, stride.head),
                    in_front = p.heads_kv > 1 ? (16 - std::gcd(head, int64_t{16})) % 16 : 0;
      if (in_front % 4 != 0 || in_front + dtype_bytes(type, dim) > block_pitch(type, int(dim)))
        return unsupported("heads of ", dtype_name(type), " are ", stride.head, " elements, ", head,
                           " bytes, apart; accepted: ", dim, " elements, or multiples of 16 bytes");
    }
  }
  return {};
}

inline Status check(const Problem& p, int64_t rows, const DeviceInfo& device,
                    const DecodeTile& tile, bool engine) {
  if (p.fixed_split % unit_keys != 0)
    return unsupported("fixed_split is ", p.fixed_split, "; accepted: multiples of ", unit_keys);
  if (p.seqlen_q > max_length)
    return unsupported("seqlen_q is ", p.seqlen_q, "; accepted: up to ", max_length);
  ATTN_TRY(check_positions(p, true));
  ATTN_TRY(
      check_units(p, row_tiles(rows, tile), tile.rows(), attn_decode_max_segments, max_length));
  if (engine) ATTN_TRY(check_engine(p, device, tile));
  if (tile.own_types) ATTN_TRY(check_own_types(p));
  return {};
}

// Adds the launch, which begins the recipe's workspace.
// concurrent: with the launch before it (decode_args.h).
template <DecodeTile tile, bool engine, bool few = false>
void add_decode(const char* image, const Problem& p, const DeviceInfo& device, Recipe* recipe,
                bool concurrent = false) {
  const int64_t rows = rows_of<few>(p, tile);
  const Shape shape = shape_of(p, rows, device, tile, concurrent);
  Kernarg<engine> kernarg = constants<tile, engine>(p, rows, shape);
  common(kernarg).concurrent = concurrent;
  const int threads =
      tile.threads() -
      (tile.swapped ? 32 * (tile.loaders() - loaders_of<tile, engine>(p, shape)) : 0);
  recipe->workspace = size_t(workspace_of(shape.slots, tile).bytes);
  recipe->steps.push_back({
      .image = image,
      .static_shared_bytes = tile.static_shared_bytes(),
      .fewer_threads = threads < tile.threads(),
      .launch = {.grid = {uint32_t(shape.blocks), 1, 1},
                 .block = {uint32_t(threads), 1, 1},
                 .shared_bytes =
                     uint32_t(shape.heads * tile.merge_bytes() + shape.stages * shape.stage_bytes),
                 .starts_early = engine || device.arch == "sm_90"},
      .arguments = arguments<tile, engine>(kernarg),
      .maps = engine ? maps_of(p, tile, shape.heads) : std::vector<TensorMap>{},
  });
}

}  // namespace attn::decode
