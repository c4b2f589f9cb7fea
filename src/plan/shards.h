// The kernel shards_cuda, by kernels that know nothing of earlier results and of arrival, and of
// the positions of keys in one segment only. Segments are cut into groups, of which each but the
// first begins with a segment that has ready words or says where its keys are, if masks allow that
// and it has a use. For each group:
//   wait        until its segments have arrived
//   attention   to its keys; its float32 result is left in the workspace
//   accumulate  of that result into out and lse, with ATTN_ACCUMULATE
// and without ATTN_ACCUMULATE at last
//   merge       of all groups; one group has the caller's out instead
// So a segment may arrive while the ones before it are attended to.
#pragma once
#include "plan/composition.h"

namespace attn {

bool has_shards(const AnyProblem& problem);

// ATTN_UNSUPPORTED with the reason if a part has no kernel. A kernel that the problem names is that
// of the attention.
Status compose_shards(const Problem& problem, const Machine& machine, const ChoosePart& choose,
                      Choice* choice);

}  // namespace attn
