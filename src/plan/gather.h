// The kernel lists_cuda: attention over lists of keys by kernels that know nothing of lists. In
// passes that share their places in the workspace:
//   slots   where the keys are that some queries visit, as block tables with pages of one key; or
//   gather  these keys, one after the other; both with their number
//   attend  these queries as sequences of one query each, over the pages or the copies
// and at last the lse in the problem's order. Keys are copied where no kernel of few queries reads
// such pages, or if their type is not q's. Where no query visits keys of its own, the sequences'
// keys are copied for their types' sake, and attend keeps the problem's queries and masks.
#pragma once
#include "kernels/gather.h"
#include "plan/composition.h"

namespace attn {

// ATTN_UNSUPPORTED with the reason if no kernel attends.
Status compose_lists(const Problem& problem, const Machine& machine, const ChoosePart& choose,
                     Choice* choice);

}  // namespace attn
