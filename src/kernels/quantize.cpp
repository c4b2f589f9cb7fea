// The host side of kernels/sm80/quantize_sm80.cu.
#include <algorithm>

#include "core/dtype.h"
#include "kernels/kernarg.h"
#include "kernels/shared/quantize_args.h"

namespace attn {
namespace {

static_assert(int(attn_quantize_one) == ATTN_SCALE_ONE &&
              int(attn_quantize_given) == ATTN_SCALE_GIVEN &&
              int(attn_quantize_amax) == ATTN_SCALE_AMAX);

constexpr int64_t most_blocks = 1 << 16;  // they go on to further work

void set_groups(const attn_quantize_problem& p, attn_quantize_kernarg* a) {
  const bool tensor = p.kind == ATTN_DESCALE_TENSOR;
  a->group_batch = tensor ? p.batch : 1;
  a->group_heads = tensor ? p.heads : 1;
  // Not 0, the kernel divides by it.
  a->group_seqs =
      p.kind == ATTN_DESCALE_BLOCK ? p.descale_block_keys : std::max<int64_t>(p.seqlen, 1);
  a->seq_groups = p.kind == ATTN_DESCALE_BLOCK ? (p.seqlen + a->group_seqs - 1) / a->group_seqs : 1;
  a->groups = tensor ? 1 : p.batch * p.heads * a->seq_groups;
}

Status shape(const attn_quantize_problem& p, const DeviceInfo&, Launch* launch) {
  attn_quantize_kernarg a{};
  set_groups(p, &a);
  int64_t blocks = a.groups;
  if (p.scale != ATTN_SCALE_AMAX) {
    constexpr int64_t threads = 32 * attn_quantize_warps;
    const int64_t warps = p.batch * p.seqlen * p.heads * ((p.head_dim + 31) / 32);
    blocks = std::max<int64_t>(warps / attn_quantize_warps, a.groups / threads) + 1;
  }
  launch->grid[0] = uint32_t(std::min(blocks, most_blocks));
  launch->block[0] = 32 * attn_quantize_warps;
  return {};
}

void pack(const attn_quantize_problem& p, const attn_quantize_args& args, void* kernarg) {
  attn_quantize_kernarg a{};
  a.src = args.src;
  a.dst = args.dst;
  a.descale = args.descale;
  set(a.src_stride, p.src_stride);
  set(a.dst_stride, p.dst_stride);
  a.batch = p.batch;
  a.seqlen = p.seqlen;
  a.heads = p.heads;
  a.head_dim = p.head_dim;
  set_groups(p, &a);
  a.max_finite = type_info(p.dst_type).max_finite;
  a.format = fp8_format(p.dst_type);  // of no meaning for ggml blocks
  a.src_type = p.src_type;
  a.dst_type = p.dst_type;
  a.scale = p.scale;
  a.saturate = p.saturate;
  store(a, kernarg);
}

}  // namespace

const DeviceKernel quantize_sm80_kernel = {
    .kernarg_bytes = sizeof(attn_quantize_kernarg), .shape_quantize = shape, .pack_quantize = pack};

}  // namespace attn
