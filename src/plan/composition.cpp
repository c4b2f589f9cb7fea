#include "plan/composition.h"

namespace attn {

Composer::Composer(Choice* choice)
    : recipe_(choice->recipe),
      composition_(*(choice->composition = std::make_shared<Composition>())) {}

size_t Composer::take(size_t bytes) {
  const size_t at = recipe_.workspace;
  recipe_.workspace += aligned_bytes(bytes);
  return at;
}

size_t Composer::add(const char* computes, std::unique_ptr<const AnyProblem> problem,
                     Choice choice) {
  const size_t at = take(choice.recipe.workspace);
  composition_.parts.push_back({std::move(problem), std::move(choice), at, computes});
  return composition_.parts.size() - 1;
}

void Composer::add(Step step, const char* computes, bool for_lse) {
  composition_.stages.push_back(RunStep{recipe_.steps.size(), computes, for_lse});
  recipe_.steps.push_back(std::move(step));
}

attn_problem partial(attn_problem in) {
  in.out_type = ATTN_F32;
  in.out_stride = {};
  in.flags &= ~uint32_t{ATTN_OUT_SCALE | ATTN_ACCUMULATE};
  return in;
}

Status part_problem(const Problem& from, attn_problem in, int64_t first, int64_t count,
                    std::unique_ptr<Problem>* to) {
  in.struct_size = sizeof in;
  std::vector<attn_segment> segments(from.segment.begin() + first,
                                     from.segment.begin() + first + count);
  for (attn_segment& s : segments) s.struct_size = sizeof s, s.has_ready = 0;
  in.num_segments = int32_t(count);
  in.segments = segments.data();
  *to = std::make_unique<Problem>();
  return make_problem(&in, to->get());
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

Status named(const char* part, const Status& status) {
  if (status.code == ATTN_INVALID_ARGUMENT || status.code == ATTN_UNSUPPORTED)
    return unsupported(part, ": ", status.text);
  return status;
}

}  // namespace attn
