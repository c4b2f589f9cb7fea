// Sizes of mla_*_r64 and of the kernel that merges their parts, for their host side too. Their
// parameters are those of decode_* (decode/decode_args.h).
#ifndef ATTN_KERNELS_MLA_MANY_ARGS_H
#define ATTN_KERNELS_MLA_MANY_ARGS_H

namespace attn::mla {

constexpr int tile_rows = 64, latent_columns = 512;
constexpr int many_threads = 384;
constexpr int many_shared_bytes = 227 << 10;  // all that a block can have

constexpr int merge_threads = 128;  // with four columns of a row each

}  // namespace attn::mla
#endif
