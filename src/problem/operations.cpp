#include "problem/operations.h"

#include <cmath>

#include "core/ceil_div.h"
#include "core/dtype.h"
#include "problem/problem.h"
#include "problem/rules.h"

namespace attn {
namespace {

// Of an operation from one tensor to another.
void state_needs(attn_dtype in_type, const attn_strides& in_stride, attn_dtype out_type,
                 const attn_strides& out_stride, int64_t batch, const char* kernel, AnyProblem* p) {
  p->needs = {.in_type = in_type, .out_type = out_type};
  if (is_negative(in_stride) || is_negative(out_stride))
    p->needs.features = feature_negative_strides;
  p->no_batch = batch == 0;
  if (kernel) p->kernel_name = kernel;
}

}  // namespace

Status make_merge_problem(const attn_merge_problem* in, MergeProblem* p) {
  ATTN_TRY(copy_versioned("problem", in, static_cast<attn_merge_problem*>(p)));
  ATTN_TRY(in_range("batch", p->batch, 0, max_extent));
  ATTN_TRY(in_range("heads_q", p->heads_q, 1, max_extent));
  ATTN_TRY(in_range("seqlen_q", p->seqlen_q, 0, max_extent));
  ATTN_TRY(in_range("head_dim_v", p->head_dim_v, 1, max_extent));
  ATTN_TRY(in_range("num_parts", p->num_parts, 1, 1 << 16));
  ATTN_TRY(one_of("part_type", p->part_type, float_types));
  if (p->out_type == ATTN_DTYPE_NONE) p->out_type = p->part_type;
  ATTN_TRY(one_of("out_type", p->out_type, float_types));
  ATTN_TRY(make_tensor("part_stride", p->part_type, p->head_dim_v, false,
                       {{"batch", p->batch, &p->part_stride.batch},
                        {"seq", p->seqlen_q, &p->part_stride.seq},
                        {"head", p->heads_q, &p->part_stride.head}},
                       &p->part_bytes));
  ATTN_TRY(make_tensor("out_stride", p->out_type, p->head_dim_v, true,
                       {{"batch", p->batch, &p->out_stride.batch},
                        {"seq", p->seqlen_q, &p->out_stride.seq},
                        {"head", p->heads_q, &p->out_stride.head}},
                       &p->out_bytes));
  state_needs(p->part_type, p->part_stride, p->out_type, p->out_stride, p->batch, p->kernel, p);
  p->kernel = nullptr;
  return {};
}

Status check_merge_args(const MergeProblem& p, const attn_merge_args* in, bool host_memory,
                        attn_merge_args* args) {
  ATTN_TRY(copy_versioned("args", in, args));
  if (args->num_parts != p.num_parts)
    return invalid("args.num_parts is ", args->num_parts, "; accepted: the problem's ",
                   p.num_parts);
  if (!args->outs) return invalid("outs is NULL; accepted: num_parts pointers");
  if (!args->lses) return invalid("lses is NULL; accepted: num_parts pointers");
  if (p.out_bytes.width == 0) return {};
  for (int32_t i = 0; i < p.num_parts; ++i) {
    const size_t alignment = data_alignment(p.part_type, host_memory);
    ATTN_TRY(pointer({"outs", -1, i}, args->outs[i], true, alignment, "a part's result"));
    ATTN_TRY(pointer({"lses", -1, i}, args->lses[i], true, 4, "a part's lse"));
  }
  ATTN_TRY(pointer({"out"}, args->out, true, data_alignment(p.out_type, host_memory),
                   "room for the result"));
  ATTN_TRY(pointer({"lse"}, args->lse, args->lse != nullptr, 4, ""));
  const Footprint lse_bytes(4, {p.batch, p.heads_q, p.seqlen_q});
  const Placed out{{"out"}, args->out, &p.out_bytes}, lse{{"lse"}, args->lse, &lse_bytes};
  ATTN_TRY(keep_apart(out, lse));
  for (int32_t i = 0; i < p.num_parts; ++i) {
    const Placed part{{"outs", -1, i}, args->outs[i], &p.part_bytes},
        part_lse{{"lses", -1, i}, args->lses[i], &lse_bytes};
    for (const Placed& read : {part, part_lse}) {
      ATTN_TRY(keep_apart(out, read));
      ATTN_TRY(keep_apart(lse, read));
    }
  }
  return {};
}

Status make_quantize_problem(const attn_quantize_problem* in, QuantizeProblem* p) {
  ATTN_TRY(copy_versioned("problem", in, static_cast<attn_quantize_problem*>(p)));
  ATTN_TRY(in_range("batch", p->batch, 0, max_extent));
  ATTN_TRY(in_range("seqlen", p->seqlen, 0, max_extent));
  ATTN_TRY(in_range("heads", p->heads, 1, max_extent));
  ATTN_TRY(in_range("head_dim", p->head_dim, 1, max_extent));
  ATTN_TRY(one_of("src_type", p->src_type, float_types));
  ATTN_TRY(one_of("dst_type", p->dst_type, kv_types & ~float_types));
  ATTN_TRY(whole_blocks("head_dim", p->dst_type, p->head_dim));
  if (p->kind == ATTN_DESCALE_NONE) p->kind = ATTN_DESCALE_TENSOR;
  if (p->kind < ATTN_DESCALE_TENSOR || p->kind > ATTN_DESCALE_BLOCK)
    return invalid("kind is ", int(p->kind), "; accepted: tensor (1), head (2), block (3)");
  if (p->kind == ATTN_DESCALE_BLOCK && p->descale_block_keys != 64 && p->descale_block_keys != 128)
    return invalid("descale_block_keys is ", p->descale_block_keys, "; accepted: 64, 128");
  if (p->scale < ATTN_SCALE_ONE || p->scale > ATTN_SCALE_AMAX)
    return invalid("scale is ", int(p->scale), "; accepted: one (0), given (1), amax (2)");
  const bool own_scales =
      dtype_is_ggml(p->dst_type) || dtype_has_scales(p->dst_type) || p->dst_type == ATTN_MLA_656;
  if (own_scales && p->dst_type != ATTN_NVFP4 && p->scale != ATTN_SCALE_ONE)
    return invalid("scale is ", p->scale == ATTN_SCALE_AMAX ? "amax (2)" : "given (1)",
                   "; accepted for ", dtype_name(p->dst_type),
                   ": one (0), since it has its own scales");
  if (p->dst_type == ATTN_NVFP4 && p->kind != ATTN_DESCALE_TENSOR)
    return invalid("kind is ", p->kind == ATTN_DESCALE_HEAD ? "head (2)" : "block (3)",
                   "; accepted for nvfp4: none (0), tensor (1)");
  if (p->saturate != 0 && p->saturate != 1)
    return invalid("saturate is ", p->saturate, "; accepted: 0, 1");
  ATTN_TRY(make_tensor("src_stride", p->src_type, p->head_dim, false,
                       {{"batch", p->batch, &p->src_stride.batch},
                        {"seq", p->seqlen, &p->src_stride.seq},
                        {"head", p->heads, &p->src_stride.head}},
                       &p->src_bytes));
  ATTN_TRY(make_tensor("dst_stride", p->dst_type, p->head_dim, true,
                       {{"batch", p->batch, &p->dst_stride.batch},
                        {"seq", p->seqlen, &p->dst_stride.seq},
                        {"head", p->heads, &p->dst_stride.head}},
                       &p->dst_bytes));
  const attn_strides& scale = p->scale_stride;
  if (dtype_has_scales(p->dst_type)) {
    ATTN_TRY(make_tensor("scale_stride", scale_element(p->dst_type),
                         scales_of_row(type_info(p->dst_type), p->head_dim), true,
                         {{"batch", p->batch, &p->scale_stride.batch},
                          {"seq", p->seqlen, &p->scale_stride.seq},
                          {"head", p->heads, &p->scale_stride.head}},
                         &p->scale_bytes));
  } else if (scale.batch || scale.seq || scale.head) {
    return invalid("scale_stride is given; accepted for dst_type ", dtype_name(p->dst_type),
                   ": 0 (only ", type_names(types_with_scales, " and "),
                   " have an array of scales)");
  }
  state_needs(p->src_type, p->src_stride, p->dst_type, p->dst_stride, p->batch, p->kernel, p);
  if (is_negative(scale)) p->needs.features |= feature_negative_strides;
  p->kernel = nullptr;
  return {};
}

int64_t num_descales(const attn_quantize_problem& p) {
  switch (p.kind) {
    case ATTN_DESCALE_HEAD:
      return p.batch * p.heads;
    case ATTN_DESCALE_BLOCK:
      return p.batch * p.heads * ceil_div(p.seqlen, p.descale_block_keys);
    default:
      return 1;
  }
}

Status check_quantize_args(const QuantizeProblem& p, const attn_quantize_args* in, bool host_memory,
                           attn_quantize_args* args) {
  ATTN_TRY(copy_versioned("args", in, args));
  if (p.dst_bytes.width > 0) {
    ATTN_TRY(
        pointer({"src"}, args->src, true, data_alignment(p.src_type, host_memory), "the source"));
    ATTN_TRY(pointer({"dst"}, args->dst, true, data_alignment(p.dst_type, host_memory),
                     "room for the result"));
  }
  if (p.dst_bytes.width > 0 || args->scale)
    ATTN_TRY(pointer({"scale"}, args->scale, dtype_has_scales(p.dst_type),
                     std::max<int32_t>(1, type_info(p.dst_type).scale_bytes),
                     "room for the scales of a type that has them"));
  const bool wanted = args->descale || (p.batch > 0 && p.scale != ATTN_SCALE_ONE);
  ATTN_TRY(pointer({"descale"}, args->descale, wanted, 4, "scale given or amax"));
  const Footprint descale_bytes(4, {num_descales(p)});
  const Placed src{{"src"}, args->src, &p.src_bytes}, dst{{"dst"}, args->dst, &p.dst_bytes},
      descale{{"descale"}, args->descale, &descale_bytes},
      scale{{"scale"}, args->scale, &p.scale_bytes};
  ATTN_TRY(keep_apart(dst, src));
  for (const Placed& other : {src, dst, descale}) ATTN_TRY(keep_apart(scale, other));
  ATTN_TRY(keep_apart(dst, descale));
  if (p.scale != ATTN_SCALE_GIVEN) return keep_apart(descale, src);
  const bool read = host_memory && args->descale;
  for (int64_t n = 0; read && n < num_descales(p); ++n)
    if (!std::isfinite(args->descale[n]))
      return invalid("descale[", n, "] is ", args->descale[n], "; accepted: finite values");
  return {};
}

}  // namespace attn
