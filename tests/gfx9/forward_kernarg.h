// The arguments of a forward kernel for 256 queries of one head, all zeros.
#pragma once
#include "asm/gfx942/forward_args.h"
#include "gfx9emu/emu.h"

namespace attn::test {

inline void* zeros(gfx9emu::Memory& memory, uint64_t bytes) {
  const uint64_t at = memory.allocate(bytes);
  memory.fill(at, 0, bytes);
  return reinterpret_cast<void*>(at);
}

// `tiles` of 64 keys lie at `prepared`; q is of `element_bytes`.
inline attn_gfx942_forward_kernarg zero_queries(gfx9emu::Memory& memory, int dim, int tiles,
                                                void* prepared, int element_bytes = 1) {
  attn_gfx942_forward_kernarg a{};
  a.q = zeros(memory, 256 * dim * element_bytes);
  a.prepared = prepared;
  a.out = zeros(memory, 256 * dim * 4);
  a.q_stride[1] = dim * element_bytes;
  a.out_stride[1] = dim * 4;
  a.seqlen_q = 256;
  a.seqlen_kv = tiles * 64;
  a.band = {attn_gfx942_unbounded, attn_gfx942_unbounded, attn_gfx942_unbounded};
  a.tiles = tiles;
  a.heads_kv = a.group = a.q_tiles = a.pairs = 1;
  a.scale = 1;
  a.out_factor = 1;
  a.out_type = 1;
  a.head_dim = a.head_dim_v = dim;
  return a;
}

}  // namespace attn::test
