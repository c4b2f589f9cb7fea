// The host side of kernels/sm80.
#include "kernels/sm80_forward.h"

#include <algorithm>
#include <cmath>

#include "kernels/cuda_forward.h"
#include "kernels/sm80/forward_args.h"
#include "kernels/sm80/tiles.h"

namespace attn {
namespace {

int64_t query_tiles(const Problem& p, const sm80::Tile& tile) {
  return (p.seqlen_q + tile.rows - 1) / tile.rows;
}

template <int head_dim, bool score, bool masked>
Status shape(const Problem& p, const DeviceInfo& device, Launch* launch, size_t* workspace) {
  constexpr sm80::Tile tile = sm80::tile_of(head_dim, score);
  constexpr int shared = sm80::shared_bytes(tile, head_dim);
  constexpr int with_static = shared + sm80::static_shared_bytes(masked);
  if (with_static > device.shared_bytes_max) {
    return unsupported("it needs ", with_static, " bytes of shared memory; the device has ",
                       device.shared_bytes_max);
  }
  if (p.num_segments > attn_sm80_max_segments) {
    return unsupported("num_segments is ", p.num_segments, "; accepted: up to ",
                       int(attn_sm80_max_segments));
  }
  constexpr int64_t max_length = 1 << 30;  // so that the ends of blocks stay within 32 bits
  if (masked && (p.seqlen_q > max_length || p.seqlen_kv > max_length)) {
    return unsupported("seqlen is ", std::max(p.seqlen_q, p.seqlen_kv),
                       "; accepted with a block mask: up to ", max_length);
  }
  const int64_t pairs = p.batch * p.heads_q, tiles = query_tiles(p, tile);
  if (pairs > max_grid || pairs * tiles > max_grid) {
    return unsupported("batch * heads_q * ceil(seqlen_q / ", tile.rows, ") is ", pairs, " * ",
                       tiles, "; accepted: up to ", max_grid);
  }
  launch->grid[0] = uint32_t(forward_blocks(p, pairs * tiles));
  launch->block[0] = tile.threads();
  launch->shared_bytes = shared;
  *workspace = 0;
  return {};
}

void set_forward(const Problem& p, const Args& args, attn_sm80_forward_kernarg* kernarg) {
  attn_sm80_forward_kernarg& a = *kernarg;
  a.q = args.q;
  a.out = args.out;
  a.lse = args.lse;
  a.cu_seqlens_q = p.q_layout == ATTN_PACKED ? args.cu_seqlens_q : nullptr;
  a.bias = p.bias_type == ATTN_DTYPE_NONE ? nullptr : args.bias;
  a.alibi_slopes = p.has(ATTN_ALIBI) ? args.alibi_slopes : nullptr;
  a.sinks = p.has(ATTN_SINKS) ? args.sinks : nullptr;
  set(a.q_stride, p.q_stride);
  set(a.out_stride, p.out_stride);
  std::copy_n(p.bias_stride, 4, a.bias_stride);
  a.total_q = p.total_q;
  a.batch = int(p.batch);
  a.heads_q = int(p.heads_q);
  a.group = int(p.group());
  a.seqlen_q = int(p.seqlen_q);
  a.head_dim = int(p.head_dim);
  a.head_dim_v = int(p.head_dim_v);
  a.out_type = p.out_type;
  a.bias_type = p.bias_type;
  a.split_invariant = p.has(ATTN_SPLIT_INVARIANT);
  a.num_segments = p.num_segments;
  a.chunk = pairs_in_l2(p, 24 << 20);  // large devices have 40 MB and more
  a.scale = p.scale;
  a.unit = std::max(std::abs(p.scale) * 1.44269504f, 1e-37f);  // log2(e)
  a.softcap = p.softcap;
  a.mask = p.range_mask();
  for (int32_t i = 0; i < p.num_segments; ++i) {
    const attn_segment& from = p.segment[i];
    attn_sm80_segment& to = a.segment[i];
    to.k = args.segment[i].k;
    to.v = args.segment[i].v;
    set(to.k_stride, from.k_stride);
    set(to.v_stride, from.v_stride);
    to.lengths = kv_lengths(from, args.segment[i]);
  }
}

void pack(const Problem& p, const Args& args, void*, void* kernarg) {
  attn_sm80_forward_kernarg a{};
  set_forward(p, args, &a);
  store(a, kernarg);
}
void pack_masked(const Problem& p, const Args& args, void*, void* kernarg) {
  attn_sm80_mask_kernarg a{};
  set_forward(p, args, &a);
  a.block_mask = mask_arrays(p, args);
  store(a, kernarg);
}

template <int head_dim, bool score>
constexpr DeviceKernel row = {.kernarg_bytes = sizeof(attn_sm80_forward_kernarg),
                              .static_shared_bytes = sm80::static_shared_bytes(false),
                              .shape_forward = shape<head_dim, score, false>,
                              .pack_forward = pack};
template <int head_dim, bool score>
constexpr DeviceKernel masked_row = {.kernarg_bytes = sizeof(attn_sm80_mask_kernarg),
                                     .static_shared_bytes = sm80::static_shared_bytes(true),
                                     .shape_forward = shape<head_dim, score, true>,
                                     .pack_forward = pack_masked};

}  // namespace

constinit const DeviceKernel fwd_sm80_d64_kernel = row<64, false>;
constinit const DeviceKernel fwd_sm80_d64_score_kernel = row<64, true>;
constinit const DeviceKernel fwd_sm80_d64_mask_kernel = masked_row<64, false>;
constinit const DeviceKernel fwd_sm80_d64_score_mask_kernel = masked_row<64, true>;
constinit const DeviceKernel fwd_sm80_d128_kernel = row<128, false>;
constinit const DeviceKernel fwd_sm80_d128_score_kernel = row<128, true>;
constinit const DeviceKernel fwd_sm80_d128_mask_kernel = masked_row<128, false>;
constinit const DeviceKernel fwd_sm80_d128_score_mask_kernel = masked_row<128, true>;
constinit const DeviceKernel fwd_sm80_d256_kernel = row<256, false>;
constinit const DeviceKernel fwd_sm80_d256_score_kernel = row<256, true>;
constinit const DeviceKernel fwd_sm80_d256_mask_kernel = masked_row<256, false>;
constinit const DeviceKernel fwd_sm80_d256_score_mask_kernel = masked_row<256, true>;

}  // namespace attn
