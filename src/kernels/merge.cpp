// The kernels merge_*.
#include <algorithm>
#include <type_traits>

#include "cpu/kernels.h"
#include "kernels/families.h"
#include "kernels/kernarg.h"
#include "kernels/limits.h"
#include "kernels/shared/merge_args.h"
#include "problem/operations.h"

namespace attn {
namespace {

int64_t rows(const MergeProblem& p) {
  return p.batch * p.heads_q * p.seqlen_q;
}

Status limit_parts(const char* kernel, const MergeProblem& p) {
  if (p.num_parts <= attn_merge_max_parts) return {};
  return unsupported(kernel, ": num_parts is ", p.num_parts, "; accepted: up to ",
                     int(attn_merge_max_parts));
}

template <class Kernarg>
void patch(const MergeProblem& p, const attn_merge_args& args, void*, Kernarg& a) {
  std::copy_n(args.outs, p.num_parts, a.outs);
  std::copy_n(args.lses, p.num_parts, a.lses);
  a.out = args.out;
  a.lse = args.lse;
}

template <class Kernarg>
Step step(const char* image, const MergeProblem& p, const Launch& launch) {
  Kernarg a{};
  set(a.part_stride, p.part_stride);
  set(a.out_stride, p.out_stride);
  a.rows = rows(p);
  a.heads = int(p.heads_q);
  a.seqlen_q = int(p.seqlen_q);
  a.head_dim = int(p.head_dim_v);
  a.num_parts = p.num_parts;
  a.part_type = p.part_type;
  a.out_type = p.out_type;
  if constexpr (std::is_same_v<Kernarg, attn_merge_cuda_kernarg>) a.by_head = p.by_head;
  return {.image = image, .launch = launch, .arguments = arguments_of<patch<Kernarg>>(a)};
}

Status recipe_sm80(const MergeProblem& p, const DeviceInfo& device, Recipe* recipe) {
  ATTN_TRY(limit_parts("merge_cuda", p));
  const int64_t blocks = ceil_div(rows(p), attn_merge_warps);
  if (blocks > max_grid) {
    return unsupported("merge_cuda: batch * heads_q * seqlen_q is ", rows(p), "; accepted: up to ",
                       max_grid * attn_merge_warps);
  }
  recipe->steps.push_back(step<attn_merge_cuda_kernarg>("merge_cuda", p,
                                                        {.grid = {uint32_t(blocks), 1, 1},
                                                         .block = {32 * attn_merge_warps, 1, 1},
                                                         .starts_early = device.arch == "sm_90"}));
  return {};
}

// HIP's limits: a grid has fewer than 2^32 work items along x, 2^16 workgroups along y and z.
template <Text name>
Status recipe_gfx9(const MergeProblem& p, const DeviceInfo&, Recipe* recipe) {
  constexpr const char* kernel = name_of<name>.text;
  constexpr int64_t max_y = (1 << 16) - 1, max_seqlen = int64_t{1} << 25;
  constexpr int64_t max_head_dim = int64_t{1} << 28;  // offsets in a row are 32 bits of bytes
  ATTN_TRY(limit_parts(kernel, p));
  if (p.seqlen_q > max_seqlen || p.heads_q > max_y || p.batch > max_y)
    return unsupported(kernel, ": batch ", p.batch, ", heads_q ", p.heads_q, ", seqlen_q ",
                       p.seqlen_q, "; accepted: batch and heads_q up to ", max_y,
                       ", seqlen_q up to ", max_seqlen);
  if (p.head_dim_v > max_head_dim)
    return unsupported(kernel, ": head_dim_v ", p.head_dim_v, "; accepted: up to ", max_head_dim);
  recipe->steps.push_back(
      step<attn_merge_kernarg>(kernel, p,
                               {.grid = {uint32_t(ceil_div(p.seqlen_q, attn_merge_warps)),
                                         uint32_t(p.heads_q), uint32_t(p.batch)},
                                .block = {64 * attn_merge_warps, 1, 1}}));
  return {};
}

constexpr Limits device_limits = {.in_types = float_types, .out_types = float_types};
constexpr Limits cuda_limits = {
    .in_types = float_types, .out_types = float_types, .features = feature_lse_by_head};
constexpr Limits host_limits = {.in_types = float_types,
                                .out_types = float_types,
                                .features = feature_negative_strides | feature_lse_by_head};

constinit const Kernel all_rows[] = {
    {.name = "merge_reference",
     .op = Op::merge,
     .backend = ATTN_BACKEND_REFERENCE,
     .limits = host_limits,
     .host = &merge_reference_kernel},
    {.name = "merge_cpu",
     .op = Op::merge,
     .backend = ATTN_BACKEND_CPU,
     .limits = host_limits,
     .host = &merge_cpu_kernel},
    {.name = "merge_cuda",
     .op = Op::merge,
     .backend = ATTN_BACKEND_CUDA,
     .limits = cuda_limits,
     .recipe = recipe_of<recipe_sm80>},
    {.name = "merge_gfx942",
     .op = Op::merge,
     .backend = ATTN_BACKEND_HIP,
     .limits = device_limits,
     .recipe = recipe_of<recipe_gfx9<"merge_gfx942">>},
    {.name = "merge_gfx950",
     .op = Op::merge,
     .backend = ATTN_BACKEND_HIP,
     .limits = device_limits,
     .recipe = recipe_of<recipe_gfx9<"merge_gfx950">>},
};

}  // namespace

std::span<const Kernel> merge_rows() {
  return all_rows;
}

}  // namespace attn
