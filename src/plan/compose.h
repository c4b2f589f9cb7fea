// Attention over segments that the batch shares, by kernels that know nothing of these:
//   shared  the queries of all sequences as one sequence of batch * seqlen_q queries, over the
//           shared segments, all of whose keys they see; in several parts of the keys if that fills
//           the device
//   own     the sequences' queries over their own segments
//   order   the lse of `shared`, [Hq, B * Sq], as [B, Hq, Sq]: a merge of one part, of rows of one
//           element. For merge kernels that do not take the first order
//   merge   of all
// The first two leave float32 partial results in the workspace.
#pragma once
#include <functional>
#include <memory>

#include "plan/choose.h"
#include "problem/operations.h"

namespace attn {

bool shares_segments(const AnyProblem& problem);

struct ComposedPart {
  std::unique_ptr<const AnyProblem> problem;
  Choice choice;
  size_t workspace_at = 0;
};

struct Composed {
  ComposedPart shared, own, merge;
  ComposedPart order;      // without a problem where merge reads `shared`'s lse as it is
  int32_t num_shared = 0;  // segments
  // Arrays in the workspace, as offsets. `zeros`: the lse that gives a part the weight 1.
  size_t shared_out = 0, shared_lse = 0, ordered_lse = 0, own_out = 0, own_lse = 0, zeros = 0;
  size_t rows = 0;  // floats of an lse, and of the zeros
};

// Chooses the kernel of a part.
using ChoosePart = std::function<Status(const AnyProblem& part, Choice* choice)>;

// ATTN_UNSUPPORTED with the reason if some query may not see all shared keys, or a part has no
// kernel.
Status compose(const Problem& problem, const Machine& machine, const ChoosePart& choose,
               Choice* choice);

}  // namespace attn
