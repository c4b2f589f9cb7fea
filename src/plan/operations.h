// The small operations beside forward: their problems, validated, with every default resolved.
#pragma once
#include "core/status.h"

namespace attn {

Status make_merge_problem(const attn_merge_problem* in, attn_merge_problem* out);
Status check_merge_args(const attn_merge_problem& problem, const attn_merge_args* in,
                        bool host_memory, attn_merge_args* out);

Status make_quantize_problem(const attn_quantize_problem* in, attn_quantize_problem* out);
Status check_quantize_args(const attn_quantize_problem& problem, const attn_quantize_args* in,
                           bool host_memory, attn_quantize_args* out);

}  // namespace attn
