#include "plan/shards.h"

#include <algorithm>
#include <cstring>

#include "kernels/shards.h"

namespace attn {
namespace {

// Segments [first, end). later_keys: how many keys later groups have. Masks over the group's keys
// alone are moved right by this many.
struct Group {
  int64_t first, end, later_keys;
};

bool has_known_length(const Segment& s) {
  return !s.has_seqlens && s.layout != ATTN_PACKED;
}

// A group for each arrival, or for each segment if they say where their keys are; empty if masks
// then cannot be said by a causal one or a window, or there are too many to merge.
std::vector<Group> groups_of(const Problem& p) {
  constexpr uint32_t whole =
      feature_bias | feature_f16_bias | feature_tree | feature_kv_begin | feature_causal_sequences;
  const bool places = p.key_positions();
  if (p.needs.features & whole ||
      p.has(ATTN_BLOCK_MASK | ATTN_CAUSAL_TOP_LEFT | ATTN_BIAS_SLOPES) ||
      (p.has(ATTN_ALIBI) && !places))
    return {};
  std::vector<Group> groups = {{0, 0, 0}};
  for (int64_t i = 0; i < p.num_segments; ++i) {
    if (i > 0 && (places || p.segment[i].has_ready)) groups.push_back({i, i, 0});
    groups.back().end = i + 1;
  }
  // Masks by positions of keys hold in each segment alone, others not for the numbers of keys.
  const bool masked = p.has(ATTN_CAUSAL | ATTN_WINDOW) && !places;
  if (masked && groups.size() > 1 && p.has(ATTN_QUERY_POSITIONS)) return {};
  for (const Group& later : groups)
    for (int64_t i = later.first; later.first > 0 && masked && i < later.end; ++i) {
      if (!has_known_length(p.segment[i]) || p.by_query) return {};
      for (Group& g : groups)
        if (g.end <= later.first) g.later_keys += p.segment[i].seqlen;
    }
  if (p.has(ATTN_WINDOW) && p.window_left >= 0 && p.window_left < groups[0].later_keys) return {};
  if (!p.has(ATTN_ACCUMULATE) &&
      (groups.size() > most_merged || !(type_bit(p.out_type) & float_types)))
    return {};
  return groups;
}

// The masks of the problem, said of a group's keys alone.
void set_masks(const Problem& p, const Group& g, attn_problem* to) {
  if (g.later_keys == 0) return;
  int64_t right = p.keys_right();
  // Where the first query sees the last key, the others do.
  right = right > INT32_MAX || right + g.later_keys >= p.seqlen_q - 1 ? -1 : right + g.later_keys;
  const int64_t left = p.has(ATTN_WINDOW) && p.window_left >= 0 ? p.window_left - g.later_keys : -1;
  to->flags &= ~uint32_t{ATTN_CAUSAL | ATTN_WINDOW};
  to->window_left = to->window_right = 0;
  if (left < 0 && right < 0) return;
  to->flags |= ATTN_WINDOW;
  to->window_left = left;
  to->window_right = right;
}

}  // namespace

bool has_shards(const AnyProblem& problem) {
  return problem.op == Op::forward &&
         (problem.needs.flags & ATTN_ACCUMULATE || problem.needs.features & feature_ready ||
          (problem.needs.features & feature_key_positions &&
           problem.needs.features & feature_segments));
}

Status compose_shards(const Problem& p, const Machine& machine, const ChoosePart& choose,
                      Choice* choice) {
  if (!has_shards(p))
    return unsupported(
        "neither ATTN_ACCUMULATE nor a segment with has_ready nor several with has_key_start");
  Composer to(choice);
  std::vector<Group> groups = groups_of(p);
  if (groups.empty()) groups = {{0, p.num_segments, 0}};
  const bool accumulates = p.has(ATTN_ACCUMULATE), merges = !accumulates && groups.size() > 1;
  attn_problem in = p;
  if (accumulates || merges) in = partial(in);
  if (p.kernel_name != choice->kernel->name && !p.kernel_name.empty())
    in.kernel = p.kernel_name.c_str();

  const bool packed = p.q_layout == ATTN_PACKED;
  const size_t rows = size_t(packed ? p.total_q : p.batch * p.seqlen_q) * size_t(p.heads_q);
  const size_t lse = rows * sizeof(float), out = lse * size_t(p.head_dim_v);
  RunMerge all{};
  // Results that are accumulated share a place.
  const auto take = [&] {
    all.outs.push_back(in_workspace(to.take(out)));
    all.lses.push_back(in_workspace(to.take(lse)));
  };
  for (size_t n = 0; n < groups.size(); ++n) {
    const Group& g = groups[n];
    attn_problem masked = in;
    set_masks(p, g, &masked);
    if (n > 0) masked.flags &= ~uint32_t{ATTN_SINKS};  // which count once
    std::unique_ptr<Problem> part;
    Choice of_part;
    ATTN_TRY(named("attention", part_problem(p, masked, g.first, g.end - g.first, &part)));
    ATTN_TRY(named("attention", choose(*part, &of_part)));
    for (Step& step : wait_steps(p, g.first, g.end - g.first))
      to.add(std::move(step), "arrival of segments");
    RunForward run{.part = to.add("attention", std::move(part), std::move(of_part)),
                   .first_segment = g.first};
    if (n > 0) run.sinks = {Place::nowhere};
    if (merges || (accumulates && n == 0)) take();
    if (accumulates || merges) run.out = all.outs.back(), run.lse = all.lses.back();
    to.add(run);
    if (accumulates)
      to.add(accumulate_step(p, *machine.device, size_t(run.out.bytes), size_t(run.lse.bytes)),
             "merge into out and lse");
  }
  if (!merges) return {};

  attn_merge_problem merge = merge_of(p, int64_t(groups.size()));
  if (packed) merge.batch = 1, merge.seqlen_q = p.total_q;
  merge.out_type = p.out_type;
  merge.out_stride = p.out_stride;
  auto problem = std::make_unique<MergeProblem>();
  ATTN_TRY(named("merge", make_merge_problem(&merge, problem.get())));
  Choice of_merge;
  ATTN_TRY(named("merge", choose(*problem, &of_merge)));
  all.part = to.add("merge", std::move(problem), std::move(of_merge));
  to.add(std::move(all));
  return {};
}

}  // namespace attn
