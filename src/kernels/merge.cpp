// The host side of kernels/sm80/merge_sm80.cu and asm/gfx942/merge_gfx942.s.
#include <algorithm>

#include "kernels/kernarg.h"
#include "kernels/shared/merge_args.h"

namespace attn {
namespace {

int64_t rows(const attn_merge_problem& p) {
  return p.batch * p.heads_q * p.seqlen_q;
}

Status limit_parts(const char* kernel, const attn_merge_problem& p) {
  if (p.num_parts <= attn_merge_max_parts) return {};
  return unsupported(kernel, ": num_parts is ", p.num_parts, "; accepted: up to ",
                     int(attn_merge_max_parts));
}

Status shape_sm80(const attn_merge_problem& p, const DeviceInfo&, Launch* launch) {
  ATTN_TRY(limit_parts("merge_sm80", p));
  const int64_t blocks = (rows(p) + attn_merge_warps - 1) / attn_merge_warps;
  if (blocks > max_grid) {
    return unsupported("merge_sm80: batch * heads_q * seqlen_q is ", rows(p), "; accepted: up to ",
                       max_grid * attn_merge_warps);
  }
  launch->grid[0] = uint32_t(blocks);
  launch->block[0] = 32 * attn_merge_warps;
  return {};
}

// HIP's limits: a grid has fewer than 2^32 work items along x, 2^16 workgroups along y and z.
Status shape_gfx942(const attn_merge_problem& p, const DeviceInfo&, Launch* launch) {
  constexpr int64_t max_y = (1 << 16) - 1, max_seqlen = int64_t{1} << 25;
  constexpr int64_t max_head_dim = int64_t{1} << 28;  // offsets in a row are 32 bits of bytes
  ATTN_TRY(limit_parts("merge_gfx942", p));
  if (p.seqlen_q > max_seqlen || p.heads_q > max_y || p.batch > max_y)
    return unsupported("merge_gfx942: batch ", p.batch, ", heads_q ", p.heads_q, ", seqlen_q ",
                       p.seqlen_q, "; accepted: batch and heads_q up to ", max_y,
                       ", seqlen_q up to ", max_seqlen);
  if (p.head_dim_v > max_head_dim)
    return unsupported("merge_gfx942: head_dim_v ", p.head_dim_v, "; accepted: up to ",
                       max_head_dim);
  launch->grid[0] = uint32_t((p.seqlen_q + attn_merge_warps - 1) / attn_merge_warps);
  launch->grid[1] = uint32_t(p.heads_q);
  launch->grid[2] = uint32_t(p.batch);
  launch->block[0] = 64 * attn_merge_warps;
  return {};
}

void pack(const attn_merge_problem& p, const attn_merge_args& args, void* kernarg) {
  attn_merge_kernarg a{};
  std::copy_n(args.outs, p.num_parts, a.outs);
  std::copy_n(args.lses, p.num_parts, a.lses);
  a.out = args.out;
  a.lse = args.lse;
  set(a.part_stride, p.part_stride);
  set(a.out_stride, p.out_stride);
  a.rows = rows(p);
  a.heads = int(p.heads_q);
  a.seqlen_q = int(p.seqlen_q);
  a.head_dim = int(p.head_dim_v);
  a.num_parts = p.num_parts;
  a.part_type = p.part_type;
  a.out_type = p.out_type;
  store(a, kernarg);
}

}  // namespace

const DeviceKernel merge_sm80_kernel = {
    .kernarg_bytes = sizeof(attn_merge_kernarg), .shape_merge = shape_sm80, .pack_merge = pack};
const DeviceKernel merge_gfx942_kernel = {
    .kernarg_bytes = sizeof(attn_merge_kernarg), .shape_merge = shape_gfx942, .pack_merge = pack};

}  // namespace attn
