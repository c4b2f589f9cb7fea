// The kernel lists_cuda: attention over lists of keys by kernels that know nothing of lists. In
// passes that share their places in the workspace:
//   gather  the keys that some queries visit, one after the other, with their number
//   attend  these queries as sequences of one query each, over the copies
// and at last the lse in the problem's order. Where no query visits keys of its own, the sequences'
// keys are copied for their types' sake, and attend keeps the problem's queries and masks.
#pragma once
#include "kernels/gather.h"
#include "plan/composition.h"

namespace attn {

// ATTN_UNSUPPORTED with the reason if no kernel attends.
Status compose_lists(const Problem& problem, const Machine& machine, const ChoosePart& choose,
                     Choice* choice);

}  // namespace attn
