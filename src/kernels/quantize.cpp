// The kernels quantize_*.
#include <algorithm>

#include "core/dtype.h"
#include "cpu/kernels.h"
#include "kernels/families.h"
#include "kernels/kernarg.h"
#include "kernels/limits.h"
#include "kernels/shared/quantize_args.h"
#include "problem/operations.h"

namespace attn {
namespace {

static_assert(int(attn_quantize_one) == ATTN_SCALE_ONE &&
              int(attn_quantize_given) == ATTN_SCALE_GIVEN &&
              int(attn_quantize_amax) == ATTN_SCALE_AMAX);

constexpr int64_t most_blocks = 1 << 16;  // they go on to further work

void set_groups(const QuantizeProblem& p, attn_quantize_kernarg* a) {
  const bool tensor = p.kind == ATTN_DESCALE_TENSOR;
  a->group_batch = tensor ? p.batch : 1;
  a->group_heads = tensor ? p.heads : 1;
  // Not 0, the kernel divides by it.
  a->group_seqs =
      p.kind == ATTN_DESCALE_BLOCK ? p.descale_block_keys : std::max<int64_t>(p.seqlen, 1);
  a->seq_groups = p.kind == ATTN_DESCALE_BLOCK ? (p.seqlen + a->group_seqs - 1) / a->group_seqs : 1;
  a->groups = tensor ? 1 : p.batch * p.heads * a->seq_groups;
}

void patch(const QuantizeProblem&, const attn_quantize_args& args, void*,
           attn_quantize_kernarg& a) {
  a.src = args.src;
  a.dst = args.dst;
  a.descale = args.descale;
  a.scales = args.scale;
}

Status recipe_sm80(const QuantizeProblem& p, const DeviceInfo&, Recipe* recipe) {
  attn_quantize_kernarg a{};
  set(a.src_stride, p.src_stride);
  set(a.dst_stride, p.dst_stride);
  a.batch = p.batch;
  a.seqlen = p.seqlen;
  a.heads = p.heads;
  a.head_dim = p.head_dim;
  set_groups(p, &a);
  a.max_finite = type_info(p.dst_type).max_finite;
  if (p.dst_type == ATTN_NVFP4) a.max_finite *= type_info(ATTN_F8_E4M3FN).max_finite;
  // Of no meaning for ggml blocks.
  a.format = p.dst_type == ATTN_F8_E4M3FN_TOKEN ? e4m3fn_format : fp8_format(p.dst_type);
  a.src_type = p.src_type;
  a.dst_type = p.dst_type;
  a.scale = p.scale;
  a.saturate = p.saturate;
  set(a.scale_stride, p.scale_stride);
  int64_t blocks = a.groups;
  if (p.scale != ATTN_SCALE_AMAX) {
    constexpr int64_t threads = 32 * attn_quantize_warps;
    const int64_t warps = p.batch * p.seqlen * p.heads * ((p.head_dim + 31) / 32);
    blocks = std::max<int64_t>(warps / attn_quantize_warps, a.groups / threads) + 1;
  }
  recipe->steps.push_back({
      .image = "quantize_cuda",
      .static_shared_bytes = sizeof(float) * attn_quantize_warps,
      .launch = {.grid = {uint32_t(std::min(blocks, most_blocks)), 1, 1},
                 .block = {32 * attn_quantize_warps, 1, 1}},
      .arguments = arguments_of<patch>(a),
  });
  return {};
}

constexpr Limits device_limits = {
    .in_types = float_types,
    .out_types = device_fp8_types | device_ggml_types | device_scale_arrays};
constexpr Limits host_limits = {.in_types = float_types,
                                .out_types = kv_types & ~float_types,
                                .features = feature_negative_strides};

constinit const Kernel rows[] = {
    {.name = "quantize_reference",
     .op = Op::quantize,
     .backend = ATTN_BACKEND_REFERENCE,
     .limits = host_limits,
     .host = &quantize_reference_kernel},
    {.name = "quantize_cpu",
     .op = Op::quantize,
     .backend = ATTN_BACKEND_CPU,
     .limits = host_limits,
     .host = &quantize_cpu_kernel},
    {.name = "quantize_cuda",
     .op = Op::quantize,
     .backend = ATTN_BACKEND_CUDA,
     .limits = device_limits,
     .recipe = recipe_of<recipe_sm80>},
};

}  // namespace

std::span<const Kernel> quantize_rows() {
  return rows;
}

}  // namespace attn
