// Attention over lists of keys by kernels that know nothing of lists. In passes that share their
// places in the workspace:
//   gather  the keys that some queries visit, one after the other, with their number
//   attend  these queries as sequences of one query each, over the copies
// and at last the lse in the problem's order. Where no query visits keys of its own, the sequences'
// keys are copied for their types' sake, and attend keeps the problem's queries and masks.
#pragma once
#include "kernels/gather.h"
#include "plan/compose.h"

namespace attn {

struct GatherPass {
  int64_t first, count, head;  // items; K/V head, 0 if a pass has all
};

struct Gathered {
  GatherShape shape;
  GatherPlace place;
  std::vector<GatherPass> passes;  // step i of the recipe is the gather of pass i
  ComposedPart attend;             // of every pass but the last
  ComposedPart attend_last;        // without a problem where the last pass has as many items
  size_t lse = 0;                  // in the workspace
  bool orders_lse = false;         // by the recipe's last step
  int64_t q_row = 0, out_row = 0;  // bytes between items
};

// ATTN_UNSUPPORTED with the reason if no kernel attends.
Status gather(const Problem& problem, const ChoosePart& choose, Choice* choice);

}  // namespace attn
