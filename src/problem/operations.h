// The operations other than forward: their problems, validated, with every default resolved.
#pragma once
#include <algorithm>

#include "core/status.h"
#include "problem/any_problem.h"
#include "problem/overlap.h"
#include "problem/problem.h"

namespace attn {

struct MergeProblem : AnyProblem, attn_merge_problem {
  MergeProblem() : AnyProblem(Op::merge), attn_merge_problem{} {}
  Footprint part_bytes, out_bytes;
  int32_t by_head = 0;  // parts, the first ones, whose lse is [heads_q, batch, seqlen_q]
};
Status make_merge_problem(const attn_merge_problem* in, MergeProblem* out);
Status check_merge_args(const MergeProblem& problem, const attn_merge_args* in, bool host_memory,
                        attn_merge_args* out);

struct QuantizeProblem : AnyProblem, attn_quantize_problem {
  QuantizeProblem() : AnyProblem(Op::quantize), attn_quantize_problem{} {}
  Footprint src_bytes, dst_bytes, scale_bytes;
};
Status make_quantize_problem(const attn_quantize_problem* in, QuantizeProblem* out);
// Elements of its descale.
int64_t num_descales(const attn_quantize_problem& problem);
Status check_quantize_args(const QuantizeProblem& problem, const attn_quantize_args* in,
                           bool host_memory, attn_quantize_args* out);

// After make_kv_append_problem: head_dim_v, all strides, the segment's seqlen hold their real
// values. `cache` is the segment, `segment` a copy of it without footprints.
struct KvAppendProblem : AnyProblem, attn_kv_append_problem {
  Segment cache;
  Footprint k_new_bytes, v_new_bytes, q_bytes, q_out_bytes;

  KvAppendProblem() : AnyProblem(Op::kv_append), attn_kv_append_problem{}, cache{} {}
  KvShape kv_shape() const { return {batch, heads_kv, head_dim, head_dim_v}; }
};
Status make_kv_append_problem(const attn_kv_append_problem* in, KvAppendProblem* out);
Status check_kv_append_args(const KvAppendProblem& problem, const attn_kv_append_args* in,
                            bool host_memory, attn_kv_append_args* out);

// After make_kv_roll_problem: head_dim_v and both segments hold their real values; `recent` and
// `old` are null, `from` and `to` have them.
struct KvRollProblem : AnyProblem, attn_kv_roll_problem {
  Segment from{}, to{};

  KvRollProblem() : AnyProblem(Op::kv_roll), attn_kv_roll_problem{} {}
  KvShape kv_shape() const { return {batch, heads_kv, head_dim, head_dim_v}; }
  // Keys that move from a recent segment with this many keys to an old one with that many.
  int64_t moved_keys(int64_t recent_keys, int64_t old_keys) const {
    const int64_t most = std::min(recent_keys - keep, to.seqlen - old_keys);
    return std::max<int64_t>(most, 0) / from.page_size * from.page_size;
  }
  // Of all sequences, at most.
  int64_t most_moved_keys() const { return moved_keys(from.seqlen, 0); }
};
// `recent` and `old` point to `from` and `to`.
struct KvRollArgs : attn_kv_roll_args {
  attn_segment_args from{}, to{};
  KvRollArgs() : attn_kv_roll_args{} {}
  KvRollArgs(const KvRollArgs&) = delete;
  KvRollArgs& operator=(const KvRollArgs&) = delete;
};
Status make_kv_roll_problem(const attn_kv_roll_problem* in, KvRollProblem* out);
Status check_kv_roll_args(const KvRollProblem& problem, const attn_kv_roll_args* in,
                          bool host_memory, KvRollArgs* out);

}  // namespace attn
