// The kernels prefix_*: attention over segments that the batch shares, by kernels that know nothing
// of these. Their parts:
//   shared  the queries of all sequences as one sequence of batch * seqlen_q queries, over the
//           shared segments, all of whose keys they see; in several parts of the keys if that fills
//           the device
//   own     the sequences' queries over their own segments
//   merge   of all
// The first two leave float32 partial results in the workspace.
#pragma once
#include "plan/composition.h"

namespace attn {

bool shares_segments(const AnyProblem& problem);

// ATTN_UNSUPPORTED with the reason if some query may not see all shared keys, or a part has no
// kernel.
Status compose_prefix(const Problem& problem, const Machine& machine, const ChoosePart& choose,
                      Choice* choice);

}  // namespace attn
