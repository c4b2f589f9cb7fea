// The small operations beside forward: their problems, validated, with every default resolved.
#pragma once
#include "core/status.h"
#include "problem/any_problem.h"
#include "problem/overlap.h"

namespace attn {

struct MergeProblem : AnyProblem, attn_merge_problem {
  MergeProblem() : AnyProblem(Op::merge), attn_merge_problem{} {}
  Footprint part_bytes, out_bytes;
};
Status make_merge_problem(const attn_merge_problem* in, MergeProblem* out);
Status check_merge_args(const MergeProblem& problem, const attn_merge_args* in, bool host_memory,
                        attn_merge_args* out);

struct QuantizeProblem : AnyProblem, attn_quantize_problem {
  QuantizeProblem() : AnyProblem(Op::quantize), attn_quantize_problem{} {}
  Footprint src_bytes, dst_bytes;
};
Status make_quantize_problem(const attn_quantize_problem* in, QuantizeProblem* out);
// Elements of its descale.
int64_t num_descales(const attn_quantize_problem& problem);
Status check_quantize_args(const QuantizeProblem& problem, const attn_quantize_args* in,
                           bool host_memory, attn_quantize_args* out);

struct KvAppendProblem : AnyProblem, attn_kv_append_problem {
  KvAppendProblem() : AnyProblem(Op::kv_append), attn_kv_append_problem{} {}
};
// What no kernel serves yet is checked as far as it must be to say so.
Status make_kv_append_problem(const attn_kv_append_problem* in, KvAppendProblem* out);

}  // namespace attn
