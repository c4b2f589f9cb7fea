#include "plan/compose.h"

#include <algorithm>

#include "kernels/preference.h"

namespace attn {
namespace {

int32_t shared_segments(const Problem& p) {
  return int32_t(std::count_if(p.segment.begin(), p.segment.end(),
                               [](const Segment& s) { return s.shared != 0; }));
}

// The keys of its own that every sequence has at least, as far as the problem says.
int64_t least_own_keys(const Problem& p) {
  int64_t least = 0;
  for (const Segment& s : p.segment)
    if (!s.shared && !s.has_seqlens && s.layout != ATTN_PACKED) least += s.seqlen;
  return least;
}

// Whether every query sees all shared keys, with equal terms in the scores.
Status check(const Problem& p) {
  const int32_t shared = shared_segments(p);
  if (shared == 0) return unsupported("no segment is shared by a batch of 2 or more");
  if (shared == p.num_segments)
    return unsupported("all segments are shared; accepted: one or more that are not");
  if (p.q_descale == ATTN_DESCALE_HEAD)
    return unsupported("q_descale is ", int(p.q_descale), "; accepted: none (0), tensor (1)");
  if (p.has(ATTN_WINDOW) && p.window_left >= 0)
    return unsupported("window_left is ", p.window_left, "; accepted: -1");
  // Queries of the next sequence follow as if they were of the same one.
  if (p.q_stride.batch == 0) return unsupported("q_stride.batch is 0; accepted: other strides");
  if (p.seqlen_q > 1 && p.q_stride.batch != p.seqlen_q * p.q_stride.seq)
    return unsupported("q_stride.batch is ", p.q_stride.batch,
                       "; accepted: seqlen_q * q_stride.seq = ", p.seqlen_q * p.q_stride.seq);
  const int64_t least = least_own_keys(p);
  if (least < p.tree_keys)
    return unsupported("the sequences may have ", least,
                       " keys of their own; accepted: tree_keys = ", p.tree_keys,
                       " or more without seqlens or cu_seqlens");
  // Query 0 sees up to key Skv - Sq + right.
  const RangeMask mask = p.range_mask();
  int64_t right = INT64_MAX;
  if (mask.causal) right = 0;
  if (mask.window && p.window_right >= 0) right = std::min(right, p.window_right);
  if (p.seqlen_q > 1 && right < p.seqlen_q - 1 - least)
    return unsupported("the sequences may have ", least,
                       " keys of their own, and the first queries then not see all shared ones; "
                       "accepted with masks: ",
                       p.seqlen_q - 1 - right, " or more without seqlens or cu_seqlens");
  return {};
}

// The problem with some of its segments, whose partial result is float32 and contiguous.
Status part_of(const Problem& from, attn_problem in, int32_t first, int32_t count,
               std::unique_ptr<Problem>* to) {
  in.struct_size = sizeof in;
  in.out_type = ATTN_F32;
  in.out_stride = {};
  in.flags &= ~uint32_t{ATTN_OUT_SCALE};
  in.num_segments = count;
  std::vector<attn_segment> segments(from.segment.begin() + first,
                                     from.segment.begin() + first + count);
  for (attn_segment& s : segments) {
    s.struct_size = sizeof s;
    s.shared = 0;
  }
  in.segments = segments.data();
  *to = std::make_unique<Problem>();
  return make_problem(&in, to->get());
}

// All queries as one sequence. Each sees all keys, so what masks say is left out.
attn_problem rows_of_batch(const Problem& p) {
  attn_problem in = p;
  in.batch = 1;
  in.seqlen_q = p.batch * p.seqlen_q;
  if (p.seqlen_q == 1) in.q_stride.seq = p.q_stride.batch;
  in.flags &= ATTN_SPLIT_INVARIANT | ATTN_FP8_PRECISE;
  in.window_left = in.window_right = 0;
  in.tree_keys = 0;
  return in;
}

attn_merge_problem merge_of(const Problem& p, int64_t num_parts) {
  attn_merge_problem in{};
  in.struct_size = sizeof in;
  in.batch = p.batch;
  in.heads_q = p.heads_q;
  in.seqlen_q = p.seqlen_q;
  in.head_dim_v = p.head_dim_v;
  in.num_parts = int32_t(num_parts);
  in.part_type = in.out_type = ATTN_F32;
  return in;
}

Status choose_merge(const attn_merge_problem& in, int32_t by_head, const ChoosePart& choose,
                    ComposedPart* part) {
  auto problem = std::make_unique<MergeProblem>();
  ATTN_TRY(make_merge_problem(&in, problem.get()));
  problem->by_head = by_head;
  if (by_head > 0) problem->needs.features |= feature_lse_by_head;
  part->problem = std::move(problem);
  return choose(*part->problem, &part->choice);
}

// Sizes that only a part exceeds are a reason to go on.
Status named(const char* part, const Status& status) {
  if (status.code == ATTN_INVALID_ARGUMENT || status.code == ATTN_UNSUPPORTED)
    return unsupported(part, ": ", status.text);
  return status;
}

}  // namespace

bool shares_segments(const AnyProblem& problem) {
  return problem.op == Op::forward && shared_segments(static_cast<const Problem&>(problem)) > 0;
}

Status compose(const Problem& p, const Machine& machine, const ChoosePart& choose, Choice* choice) {
  ATTN_TRY(check(p));
  auto composed = std::make_shared<Composed>();
  Composed& c = *composed;
  c.num_shared = shared_segments(p);

  std::unique_ptr<Problem> shared, own;
  attn_problem rows = rows_of_batch(p);
  ATTN_TRY(named("shared segments", part_of(p, rows, 0, c.num_shared, &shared)));
  // Cut, if that helps and a kernel takes it. One that is passed over for few rows does not help:
  // those that are preferred divide the keys among their blocks themselves.
  Status status = unsupported("");
  bool passed_over = false;
  const auto choose_cut = [&](int64_t parts) {
    std::unique_ptr<Problem> cut;
    ATTN_TRY(part_of(p, rows, 0, c.num_shared, &cut));
    cut->key_parts = parts;
    if (parts > 1) {
      cut->needs.features |= feature_key_parts;
      cut->out_stride.batch = cut->seqlen_q * cut->out_stride.seq;
    }
    Choice chosen;
    ATTN_TRY(choose(*cut, &chosen));
    passed_over = parts > 1 && !chosen.recipe.passed_over.empty();
    if (passed_over) return unsupported(chosen.recipe.passed_over);
    c.shared.choice = std::move(chosen);
    shared = std::move(cut);
    return Status{};
  };
  int64_t parts = machine.device ? prefix_parts(*shared, *machine.device) : 1;
  if (parts > 1) {
    status = choose_cut(parts);
    if (!status.ok()) parts = 1;
    if (!status.ok() && !passed_over) {
      rows.fixed_split = prefix_split(*shared, *machine.device);
      status = choose_cut(1);
    }
  }
  if (!status.ok()) ATTN_TRY(named("shared segments", choose(*shared, &c.shared.choice)));
  c.shared.problem = std::move(shared);
  ATTN_TRY(named("own segments", part_of(p, p, c.num_shared, p.num_segments - c.num_shared, &own)));
  ATTN_TRY(named("own segments", choose(*own, &c.own.choice)));
  c.own.problem = std::move(own);

  attn_merge_problem merge = merge_of(p, parts + 1);
  merge.out_type = p.out_type;
  merge.out_stride = p.out_stride;
  status = choose_merge(merge, int32_t(parts), choose, &c.merge);
  if (!status.ok()) {
    ATTN_TRY(named("merge", choose_merge(merge, 0, choose, &c.merge)));
    if (p.heads_q > 1) {
      attn_merge_problem order = merge_of(p, 1);
      order.head_dim_v = 1;
      order.part_stride = {p.seqlen_q, 1, p.batch * p.seqlen_q};
      order.out_stride = {p.heads_q * p.seqlen_q, 1, p.seqlen_q};
      ATTN_TRY(named("merge", choose_merge(order, 0, choose, &c.order)));
    }
  }

  size_t end = 0;
  const auto take = [&](size_t bytes) {
    const size_t at = end;
    end += aligned_bytes(bytes);
    return at;
  };
  for (ComposedPart* part : {&c.shared, &c.own})
    part->workspace_at = take(part->choice.recipe.workspace);
  c.rows = size_t(p.batch * p.heads_q * p.seqlen_q);
  const size_t lse = c.rows * sizeof(float), out = lse * size_t(p.head_dim_v);
  c.shared_out = take(size_t(parts) * out);
  c.own_out = take(out);
  c.shared_lse = take(size_t(parts) * lse);
  c.own_lse = take(lse);
  c.ordered_lse = c.order.problem ? take(lse) : c.shared_lse;
  c.zeros = c.order.problem ? take(lse) : 0;
  choice->recipe.workspace = end;
  choice->recipe.passed_over = prefer_other_to_prefix(p);
  choice->composed = std::move(composed);
  return {};
}

}  // namespace attn
