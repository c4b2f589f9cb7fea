#include "plan/prefix.h"

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
  const int64_t right = p.keys_right();
  if (p.seqlen_q > 1 && right < p.seqlen_q - 1 - least)
    return unsupported("the sequences may have ", least,
                       " keys of their own, and the first queries then not see all shared ones; "
                       "accepted with masks: ",
                       p.seqlen_q - 1 - right, " or more without seqlens or cu_seqlens");
  return {};
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

Status choose_merge(const attn_merge_problem& in, int32_t by_head, const ChoosePart& choose,
                    std::unique_ptr<MergeProblem>* problem, Choice* choice) {
  *problem = std::make_unique<MergeProblem>();
  ATTN_TRY(make_merge_problem(&in, problem->get()));
  (*problem)->by_head = by_head;
  if (by_head > 0) (*problem)->needs.features |= feature_lse_by_head;
  return named("merge", choose(**problem, choice));
}

// The part over the shared segments, cut into parts of their keys if that helps and a kernel takes
// it. One that is passed over for few rows does not help: those that are preferred divide the keys
// among their blocks themselves.
Status choose_shared(const Problem& p, int32_t count, const Machine& machine,
                     const ChoosePart& choose, std::unique_ptr<Problem>* problem, Choice* choice) {
  constexpr const char* name = "shared segments";
  attn_problem rows = rows_of_batch(p);
  ATTN_TRY(named(name, part_problem(p, partial(rows), 0, count, problem)));
  const int64_t parts = machine.device ? prefix_parts(**problem, *machine.device) : 1;
  bool passed_over = false;
  const auto choose_cut = [&](int64_t key_parts) {
    std::unique_ptr<Problem> cut;
    ATTN_TRY(part_problem(p, partial(rows), 0, count, &cut));
    cut->key_parts = key_parts;
    if (key_parts > 1) {
      cut->needs.features |= feature_key_parts;
      cut->out_stride.batch = cut->seqlen_q * cut->out_stride.seq;
    }
    Choice chosen;
    ATTN_TRY(choose(*cut, &chosen));
    passed_over = key_parts > 1 && !chosen.recipe.passed_over.empty();
    if (passed_over) return unsupported(chosen.recipe.passed_over);
    *choice = std::move(chosen);
    *problem = std::move(cut);
    return Status{};
  };
  if (parts > 1) {
    if (choose_cut(parts).ok()) return {};
    if (!passed_over) {
      rows.fixed_split = prefix_split(**problem, *machine.device);
      if (choose_cut(1).ok()) return {};
    }
  }
  return named(name, choose(**problem, choice));
}

}  // namespace

bool shares_segments(const AnyProblem& problem) {
  return problem.op == Op::forward && shared_segments(static_cast<const Problem&>(problem)) > 0;
}

Status compose_prefix(const Problem& p, const Machine& machine, const ChoosePart& choose,
                      Choice* choice) {
  ATTN_TRY(check(p));
  Composer to(choice);
  const int32_t num_shared = shared_segments(p);
  std::unique_ptr<Problem> shared, own;
  Choice of_shared, of_own;
  ATTN_TRY(choose_shared(p, num_shared, machine, choose, &shared, &of_shared));
  ATTN_TRY(named("own segments",
                 part_problem(p, partial(p), num_shared, p.num_segments - num_shared, &own)));
  ATTN_TRY(named("own segments", choose(*own, &of_own)));

  const int64_t parts = shared->key_parts;
  const size_t rows = size_t(p.batch * p.heads_q * p.seqlen_q);
  const size_t lse = rows * sizeof(float), out = lse * size_t(p.head_dim_v);
  const size_t shared_out = to.take(size_t(parts) * out), shared_lse = to.take(size_t(parts) * lse);
  const size_t own_out = to.take(out), own_lse = to.take(lse);
  RunForward run{.part = to.add("shared segments", std::move(shared), std::move(of_shared)),
                 .out = in_workspace(shared_out),
                 .lse = in_workspace(shared_lse),
                 .sinks = {Place::nowhere}};  // they are in `own`
  to.add(run);
  run = {.part = to.add("own segments", std::move(own), std::move(of_own)),
         .first_segment = num_shared,
         .out = in_workspace(own_out),
         .lse = in_workspace(own_lse)};
  to.add(run);

  // The lse of the shared segments is [Hq, B * Sq], for which some kernels need a part of its own:
  // a merge of one part, of rows of one element.
  attn_merge_problem in = merge_of(p, parts + 1);
  in.out_type = p.out_type;
  in.out_stride = p.out_stride;
  std::unique_ptr<MergeProblem> merge, order;
  Choice of_merge, of_order;
  size_t ordered_lse = shared_lse;
  if (!choose_merge(in, int32_t(parts), choose, &merge, &of_merge).ok()) {
    ATTN_TRY(choose_merge(in, 0, choose, &merge, &of_merge));
    if (p.heads_q > 1) {
      attn_merge_problem one = merge_of(p, 1);
      one.head_dim_v = 1;
      one.part_stride = {p.seqlen_q, 1, p.batch * p.seqlen_q};
      one.out_stride = {p.heads_q * p.seqlen_q, 1, p.seqlen_q};
      ATTN_TRY(choose_merge(one, 0, choose, &order, &of_order));
      ordered_lse = to.take(lse);
      const size_t zeros = to.take(lse);  // of attn_workspace_init: the part's weight is 1
      to.add(RunMerge{.part = to.add("order of lse", std::move(order), std::move(of_order)),
                      .outs = {in_workspace(shared_lse)},
                      .lses = {in_workspace(zeros)},
                      .out = in_workspace(ordered_lse),
                      .lse = {Place::nowhere}});
    }
  }
  RunMerge all{.part = to.add("merge", std::move(merge), std::move(of_merge))};
  for (int64_t i = 0; i < parts; ++i) {
    all.outs.push_back(in_workspace(shared_out + size_t(i) * out));
    all.lses.push_back(in_workspace(ordered_lse + size_t(i) * lse));
  }
  all.outs.push_back(in_workspace(own_out));
  all.lses.push_back(in_workspace(own_lse));
  to.add(std::move(all));
  choice->recipe.passed_over = prefer_other_to_prefix(p);
  return {};
}

}  // namespace attn
