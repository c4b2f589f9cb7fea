// Of decode_sm90_blocks_*, for their host side and for the kernels: where rows of codes are in
// shared memory if a block has several K/V heads at once, and how far weights may be above 1.
#ifndef ATTN_KERNELS_DECODE_OWN_TILES_H
#define ATTN_KERNELS_DECODE_OWN_TILES_H

#include "decode_tiles.h"

namespace attn::decode {

// Weights are 2^(x - m), and m becomes the maximum where that is more than this above m.
constexpr int own_slack = 3;

// As own_place(), but if heads are adjacent in memory a row has as many as make a panel: copies of
// rows of 32 or 64 bytes are slow.
// head_pitch: bytes between heads in memory; 0: a row has one head.
ATTN_HOST_DEVICE constexpr OwnPlace own_place(int type, int columns, int at_once, int head_pitch) {
  const RowPlace row = row_place(type, columns);
  if (!has_scale_array(type) || row.panels > 1 || head_pitch != row.pitch)
    return own_place(type, columns, at_once);
  const int room = row.pitch == 32   ? 4
                   : row.pitch == 64 ? 2
                                     : 1,
            heads = at_once < room ? at_once : room;
  return {heads * row.pitch, 1, heads, row.pitch};
}

// Heads whose scales of nvfp4 a copy of 16 bytes takes, if they are adjacent in memory.
ATTN_HOST_DEVICE constexpr int heads_of_scales(int columns) {
  const int row = key_scale_bytes(attn_element_nvfp4, columns);
  return row < 16 ? 16 / row : 1;
}

}  // namespace attn::decode
#endif
