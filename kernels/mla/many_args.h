// Sizes of mla_*_r64 and of the kernel that merges their parts, for their host side too. Their
// parameters are those of decode_* (decode/decode_args.h).
#ifndef ATTN_KERNELS_MLA_MANY_ARGS_H
#define ATTN_KERNELS_MLA_MANY_ARGS_H

#include "../shared/host_device.h"

namespace attn::mla {

constexpr int tile_rows = 64, latent_columns = 512;
constexpr int many_threads = 384;
constexpr int many_shared_bytes = 227 << 10;  // all that a block can have

constexpr int merge_warps = 8, merge_blocks = 4;                // of a block, a multiprocessor
constexpr int merge_columns = 256, shared_merge_columns = 128;  // of a warp; if warps share a row
// What is left of the sums of warps that share a row.
constexpr int merge_shared_bytes = merge_warps * (shared_merge_columns + 1) * 4;
// Whether blocks of mla_merge_sm90 are counted by the row tiles that blocks of a column share: few
// of very many. To find these takes longer than to look at a sequence.
ATTN_HOST_DEVICE constexpr bool merges_by_block(long long batch, int splits) {
  return batch > 8ll * splits;
}

}  // namespace attn::mla
#endif
