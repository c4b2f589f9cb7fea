// The shapes of the blocks of decode_*, for their host side and for the kernels.
#ifndef ATTN_KERNELS_DECODE_TILES_H
#define ATTN_KERNELS_DECODE_TILES_H

#include "../shared/ggml_layout.h"
#include "../shared/host_device.h"
#include "../shared/nvfp4.h"
#include "../shared/row_scale.h"

namespace attn::decode {

constexpr int decode_warps = 4;  // of a block, that compute; others load
constexpr int group_threads = 32 * decode_warps;
constexpr int unit_keys = 64;  // keys that a block takes at once
constexpr int warp_keys = unit_keys / decode_warps;
constexpr int panel_pitch = 128;  // bytes of a row
constexpr int group_rows =
    16;  // without wgmma at most; rows: queries times query heads of a K/V head
constexpr int decode_max_stages = 6;
constexpr int merged_parts = 32;  // results that one block adds up

// A number below 16 of each type from q8_0 on. Kernels look up by shifts what follows from types
// that only the launch knows: of a switch the compiler makes a table in memory, and each short
// launch waits for it.
template <class Of>
constexpr unsigned long long of_types(Of&& of) {
  unsigned long long all = 0;
  for (int type = attn_element_q8_0; type <= attn_element_nvfp4; ++type)
    all |= (unsigned long long)of(type) << 4 * (type - attn_element_q8_0);
  return all;
}
ATTN_HOST_DEVICE constexpr int of_type(unsigned long long all, int type) {
  return int(all >> 4 * (type - attn_element_q8_0) & 15);
}
// Bytes of a head in ggml's blocks of 32 elements.
constexpr int least_block_bytes = block_layout(attn_element_q4_0).size();
constexpr unsigned long long more_block_bytes = of_types(
    [](int t) { return is_ggml(t) ? (block_layout(t).size() - least_block_bytes) / 2 : 0; });
ATTN_HOST_DEVICE constexpr int head_bytes(int type, int columns) {
  return columns / 32 * (least_block_bytes + 2 * of_type(more_block_bytes, type));
}
// The next odd multiple of 16 bytes: so the words that a warp reads at once are in different banks.
ATTN_HOST_DEVICE constexpr int odd_pitch(int bytes) {
  return (bytes + 15) / 16 * 16 | 16;
}
// Bytes of a key's row of blocks in shared memory: of a head, and what is before it from a multiple
// of 16 bytes on if heads are adjacent.
ATTN_HOST_DEVICE constexpr int block_pitch(int type, int columns) {
  const int bytes = head_bytes(type, columns), step = bytes & -bytes;
  return odd_pitch(bytes + (step < 16 ? 16 - step : 0));
}

// With own_types, a key's row in shared memory: ggml's blocks as they are; other types in panels as
// wide as their swizzle.
struct RowPlace {
  int pitch, panels;
  ATTN_HOST_DEVICE constexpr int bytes() const { return unit_keys * pitch * panels; }
};
ATTN_HOST_DEVICE constexpr RowPlace panels_of(int row_bytes) {
  return row_bytes <= panel_pitch ? RowPlace{row_bytes, 1}
                                  : RowPlace{panel_pitch, row_bytes / panel_pitch};
}
ATTN_HOST_DEVICE constexpr RowPlace row_place(int type, int columns) {
  if (is_ggml(type)) return {block_pitch(type, columns), 1};
  if (has_scale_array(type))
    return panels_of(type == attn_element_i4 || type == attn_element_nvfp4 ? columns / 2 : columns);
  return panels_of(columns * 2);
}
// The same where a block has several K/V heads at once: then rows of blocks have as many heads as
// make a multiple of 16 bytes. Of a stage's keys all are there of a head, or of a row's heads, then
// of the next.
struct OwnPlace {
  int pitch, panels;
  int heads, head_bytes;  // of a row, 1, 2 or 4, and between them
  // Of so many heads at once.
  ATTN_HOST_DEVICE constexpr int key_bytes(int at_once) const {
    return pitch * panels * (at_once >> heads_log2());
  }
  // Of keys of a stage.
  ATTN_HOST_DEVICE constexpr int at(int head, int key, int keys) const {
    return ((head >> heads_log2()) * keys + key) * pitch + (head & (heads - 1)) * head_bytes;
  }
  ATTN_HOST_DEVICE constexpr int heads_log2() const { return heads / 2; }
};
ATTN_HOST_DEVICE constexpr OwnPlace own_place(int type, int columns, int at_once) {
  const RowPlace row = row_place(type, columns);
  if (!is_ggml(type) || at_once == 1) return {row.pitch, row.panels, 1, 0};
  const int bytes = head_bytes(type, columns);
  const int heads = bytes % 16 == 0 ? 1 : bytes % 8 == 0 ? 2 : 4;
  return {odd_pitch(heads * bytes), 1, heads, bytes};
}
// Bytes of a key's scales, which follow a unit's K and V, K's first: of i8 and i4 the word that has
// its own, of f8_e4m3fn_token its own, of nvfp4 all of the row.
ATTN_HOST_DEVICE constexpr int key_scale_bytes(int type, int columns) {
  return type == attn_element_nvfp4 ? columns / attn_nvfp4_group : has_scale_array(type) ? 4 : 0;
}

struct DecodeTile {
  int head_dim, head_dim_v;
  int element_bytes = 2;           // of K and V
  bool own_types = false;          // K and V of each segment are as q or blocks; places in shared
                                   // memory are those of the largest, which the host knows
  int rows_of_group = group_rows;  // or 8: half the registers, so twice the blocks
  bool swapped = false;  // rows are the N of wgmma, see swapped.cuh; 8, 16, 32 or 64; takes
                         // fixed_split
  bool tiled = false;    // more rows than a block takes are further tiles
  int groups = 1;        // swapped: warpgroups that compute, which take units in turns

  constexpr DecodeTile of_fp8() const {
    DecodeTile tile = *this;
    tile.element_bytes = 1;
    return tile;
  }
  constexpr DecodeTile of_own_types() const {
    DecodeTile tile = *this;
    tile.own_types = true;
    return tile;
  }
  constexpr DecodeTile with_rows(int rows) const {
    DecodeTile tile = *this;
    tile.rows_of_group = rows;
    return tile;
  }
  constexpr DecodeTile of_swapped(int rows) const {
    DecodeTile tile = *this;
    tile.rows_of_group = rows;
    tile.swapped = true;
    return tile;
  }
  constexpr DecodeTile of_two_groups() const {
    DecodeTile tile = *this;
    tile.groups = 2;
    return tile;
  }
  constexpr DecodeTile of_any_rows() const {
    DecodeTile tile = *this;
    tile.tiled = true;
    return tile;
  }

  ATTN_HOST_DEVICE constexpr int rows() const { return rows_of_group; }
  // Warps that can load: in turns, or (swapped) two that load rows one by one, where each scheduler
  // has registers for them.
  ATTN_HOST_DEVICE constexpr int loaders() const {
    if (own_types) return 1;
    return swapped && rows() > group_rows ? 1 : 2;
  }
  // Of those that compute.
  ATTN_HOST_DEVICE constexpr int compute_threads() const { return group_threads * groups; }
  // With two warpgroups there are no registers for these: ptxas 13.0 spills two more.
  ATTN_HOST_DEVICE constexpr bool takes_kv_begin() const { return groups == 1; }
  ATTN_HOST_DEVICE constexpr bool takes_positions() const { return groups == 1; }
  // Two warpgroups take registers that a third one, of which a warp loads, gives back: 9 warps
  // could have 168 each.
  static constexpr int load_registers = 72, compute_registers = 216;
  ATTN_HOST_DEVICE constexpr int threads() const {
    return compute_threads() + (groups > 1 ? group_threads : loaders() * 32);
  }

  // Whether it can run at the same time as the launch before it, which fwd_sm90_*_mixed need.
  ATTN_HOST_DEVICE constexpr bool concurrent() const {
    return swapped && !own_types && rows() == 16;
  }

  // K/V heads that a block has at once, at most.
  ATTN_HOST_DEVICE constexpr int max_heads() const { return own_types ? decode_warps : 1; }
  // Rows of a slot of the workspace.
  ATTN_HOST_DEVICE constexpr int slot_rows() const { return max_heads() * rows(); }

  // Units in shared memory are panels of 128 bytes of each row.
  ATTN_HOST_DEVICE constexpr int panels(int columns) const {
    return (columns * element_bytes + 127) / 128;
  }
  ATTN_HOST_DEVICE constexpr int tile_bytes(int columns) const {
    return unit_keys * panels(columns) * panel_pitch;
  }
  ATTN_HOST_DEVICE constexpr int k_bytes() const { return tile_bytes(head_dim); }
  ATTN_HOST_DEVICE constexpr int stage_bytes() const { return k_bytes() + tile_bytes(head_dim_v); }
  // Room for Q, and for merging the sums of the warps of 8 rows; of own_types for Q of one head.
  ATTN_HOST_DEVICE constexpr int merge_bytes() const {
    // And for sums of Q's columns and factors of scores.
    if (own_types) return q_bytes() + rows() * (head_dim / 4 + 8);
    if (swapped) return groups * group_bytes();
    return merge_warps() * 8 * head_dim_v * 4;
  }
  // That have room for their sums at a time.
  ATTN_HOST_DEVICE constexpr int merge_warps() const {
    return head_dim_v > 256 ? decode_warps / 2 : decode_warps;
  }
  // swapped, of a warpgroup: Q, and behind it P of two units; when a part ends its sums.
  ATTN_HOST_DEVICE constexpr int group_bytes() const {
    return larger(q_bytes() + 2 * p_bytes(), rows() * head_dim_v * 4);
  }
  ATTN_HOST_DEVICE constexpr int q_bytes() const { return rows() * columns_16bit(head_dim); }
  ATTN_HOST_DEVICE constexpr int p_bytes() const { return rows() * columns_16bit(unit_keys); }
  ATTN_HOST_DEVICE static constexpr int larger(int x, int y) { return x > y ? x : y; }
  // Bytes of a row of this many 16-bit columns, in whole panels.
  ATTN_HOST_DEVICE static constexpr int columns_16bit(int columns) {
    return (columns + 63) / 64 * panel_pitch;
  }
  ATTN_HOST_DEVICE constexpr int blocks() const {  // per multiprocessor
    if (swapped) return head_dim > 128 || rows() > 32 ? 1 : 2;
    if (head_dim > 256) return 1;
    const int usual = head_dim > 128 ? 1 : 2;
    return rows_of_group < group_rows ? 2 * usual : usual;
  }
  ATTN_HOST_DEVICE constexpr int static_shared_bytes() const {  // at most; in whole 1024 bytes
    if (own_types) return 1024 + (rows() * 60 + slot_rows() * 16 + 1023) / 1024 * 1024;
    if (swapped) return 1024 + (groups * rows() * 76 + 1023) / 1024 * 1024;
    return 1024;
  }
};

}  // namespace attn::decode
#endif
