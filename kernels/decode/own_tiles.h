// Of decode_sm90_blocks_*, for their host side and for the kernels: how far weights may be above 1.
#ifndef ATTN_KERNELS_DECODE_OWN_TILES_H
#define ATTN_KERNELS_DECODE_OWN_TILES_H

#include "decode_tiles.h"

namespace attn::decode {

// Weights are 2^(x - m), and m becomes the maximum where that is more than this above m.
constexpr int own_slack = 3;

}  // namespace attn::decode
#endif
