// Moving the oldest pages of a cache into another type: the problem and its arguments.
#include "core/dtype.h"
#include "problem/operations.h"
#include "problem/rules.h"

namespace attn {
namespace {

constexpr const char* recent_prefix = "recent.";
constexpr const char* old_prefix = "old.";

Status named(const char* segment, Status status) {
  if (!status.ok()) status.text = join(segment, ": ", status.text);
  return status;
}

Status copy_segment(const char* name, const attn_segment* in, Segment* out) {
  if (!in) return invalid(name, " is NULL; accepted: a segment");
  return copy_versioned(name, in, static_cast<attn_segment*>(out));
}

Status copy_args(const char* name, const attn_segment_args* in, attn_segment_args* out) {
  if (!in) return invalid(name, " is NULL; accepted: the segment's arguments");
  return copy_versioned(name, in, out);
}

Status make_recent(KvRollProblem* p) {
  Segment& s = p->from;
  if (s.layout != ATTN_PAGED)
    return invalid("recent.layout is ", int(s.layout), "; accepted: paged (2)");
  if (s.has_seqlens != 1) return invalid("recent.has_seqlens is ", s.has_seqlens, "; accepted: 1");
  ATTN_TRY(one_of("recent.k_type", s.k_type, float_types));
  if (s.v_in_k != p->to.v_in_k)
    return invalid("recent.v_in_k is ", s.v_in_k, "; accepted: old.v_in_k, ", p->to.v_in_k);
  if (s.v_in_k && s.v_type == ATTN_DTYPE_NONE) s.v_type = s.k_type;
  if (s.v_type != s.k_type)
    return invalid("recent.v_type is ", dtype_text(s.v_type), "; accepted: recent.k_type, ",
                   dtype_name(s.k_type));
  if (s.k_descale != ATTN_DESCALE_NONE || s.v_descale != ATTN_DESCALE_NONE)
    return invalid("recent.k_descale is ", int(s.k_descale), ", recent.v_descale ",
                   int(s.v_descale), "; accepted: none (0)");
  return make_segment(recent_prefix, p->kv_shape(), false, &s);
}

Status make_old(KvRollProblem* p) {
  Segment& s = p->to;
  if (s.layout == ATTN_PACKED)
    return invalid("old.layout is packed (1); accepted: padded (0), paged (2)");
  if (s.has_seqlens != 1) return invalid("old.has_seqlens is ", s.has_seqlens, "; accepted: 1");
  return make_segment(old_prefix, p->kv_shape(), true, &s);
}

Needs needs_of(const KvRollProblem& p) {
  Needs needs = {.in_type = p.from.k_type, .head_dim = p.head_dim, .head_dim_v = p.head_dim_v};
  add_needs(p.to, &needs);
  for (const attn_strides& stride : {p.from.k_stride, p.from.v_stride}) {
    if (is_negative(stride)) needs.features |= feature_negative_strides;
    if (!aligned_strides(p.from.k_type, stride)) needs.features |= feature_any_stride;
  }
  needs.features |= feature_paged_kv;
  return needs;
}

Status check_overlap(const KvRollProblem& p, const attn_kv_roll_args& args) {
  const Footprint lengths(4, {p.batch}), table(4, {p.batch, p.from.max_pages});
  const attn_segment_args &from = *args.recent, &to = *args.old;
  const Placed written[] = {placed_k("old.k", p.to, to),
                            placed_v("old.v", p.to, to),
                            {{"old.k_scale"}, to.k_scale, &p.to.k_scale_bytes},
                            {{"old.v_scale"}, to.v_scale, &p.to.v_scale_bytes},
                            {{"old.seqlens"}, to.seqlens, &lengths},
                            {{"recent.seqlens"}, from.seqlens, &lengths},
                            {{"recent.block_table"}, from.block_table, &table}};
  attn_segment_args read = to;
  read.seqlens = nullptr;
  return keep_all_apart(written, [&](const auto& visit) {
    visit({"recent.k"}, from.k, p.from.k_bytes);
    if (!p.from.v_in_k) visit({"recent.v"}, from.v, p.from.v_bytes);
    for_each_small_array(p.to, read, p.kv_shape(), -1, visit);
  });
}

Status check_host_arrays(const KvRollProblem& p, const attn_kv_roll_args& args) {
  const attn_segment_args &from = *args.recent, &to = *args.old;
  ATTN_TRY(check_lengths({"recent.seqlens"}, from.seqlens, p.batch, p.from.seqlen));
  ATTN_TRY(check_lengths({"old.seqlens"}, to.seqlens, p.batch, p.to.seqlen));
  WrittenPages written(placed_k("old.k", p.to, to), placed_v("old.v", p.to, to));
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t keys = p.moved_keys(from.seqlens[b], to.seqlens[b]);
    if (keys == 0) continue;
    ATTN_TRY(check_pages(recent_prefix, p.from, from.block_table, b, 0, keys / p.from.page_size));
    if (p.to.layout != ATTN_PAGED) continue;
    ATTN_TRY(written.add(old_prefix, p.to, to.block_table, b, to.seqlens[b] / p.to.page_size,
                         ceil_div(to.seqlens[b] + keys, p.to.page_size)));
  }
  return written.check();
}

}  // namespace

Status make_kv_roll_problem(const attn_kv_roll_problem* in, KvRollProblem* p) {
  ATTN_TRY(copy_versioned("problem", in, static_cast<attn_kv_roll_problem*>(p)));
  ATTN_TRY(copy_segment("recent", p->recent, &p->from));
  ATTN_TRY(copy_segment("old", p->old, &p->to));
  p->recent = p->old = nullptr;
  ATTN_TRY(in_range("batch", p->batch, 0, max_extent));
  ATTN_TRY(in_range("heads_kv", p->heads_kv, 1, max_extent));
  ATTN_TRY(in_range("head_dim", p->head_dim, 1, max_extent));
  if (p->head_dim_v == 0) p->head_dim_v = p->head_dim;
  ATTN_TRY(in_range("head_dim_v", p->head_dim_v, 1, max_extent));
  ATTN_TRY(in_range("keep", p->keep, 0, max_extent));
  ATTN_TRY(make_recent(p));
  ATTN_TRY(make_old(p));
  const int64_t keys = p->batch * p->most_moved_keys();
  int64_t rows;
  if (__builtin_mul_overflow(keys, p->heads_kv, &rows) || rows >= max_offset)
    return invalid(keys, " keys that can move, of ", p->heads_kv,
                   " heads; accepted: below 2^60 rows");
  p->needs = needs_of(*p);
  p->no_batch = p->batch == 0;
  if (p->kernel) p->kernel_name = p->kernel;
  p->kernel = nullptr;
  return {};
}

Status check_kv_roll_args(const KvRollProblem& p, const attn_kv_roll_args* in, bool host_memory,
                          KvRollArgs* args) {
  ATTN_TRY(copy_versioned("args", in, static_cast<attn_kv_roll_args*>(args)));
  if (p.no_batch) return {};
  ATTN_TRY(copy_args("args.recent", args->recent, &args->from));
  ATTN_TRY(copy_args("args.old", args->old, &args->to));
  args->recent = &args->from;
  args->old = &args->to;
  ATTN_TRY(named("recent", check_segment_pointers(p.from, args->from, -1, host_memory)));
  ATTN_TRY(named("old", check_segment_pointers(p.to, args->to, -1, host_memory)));
  ATTN_TRY(check_overlap(p, *args));
  return host_memory ? check_host_arrays(p, *args) : Status{};
}

}  // namespace attn
