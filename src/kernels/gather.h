// The launches of lists_cuda (plan/gather.h): gather_cuda copies keys into the workspace,
// gather_lse_cuda orders the lse.
#pragma once
#include "kernels/kernel.h"

namespace attn {

constexpr const char* gather_image = "gather_cuda";
constexpr const char* gather_lse_image = "gather_lse_cuda";

// How a problem's keys are copied. Items are queries, the rows of q in its order, or sequences.
struct GatherShape {
  bool by_sequence;  // no query visits keys of its own
  bool by_head;      // K/V heads have lists of their own: a launch has one of them, else all
  bool own_v;        // V is not in K
  int64_t items;
  int64_t rows;   // for the keys of an item
  int64_t heads;  // K/V heads of a launch
};
GatherShape gather_shape(const Problem& problem);

// Whether lists_cuda is looked at: lists, keys without positions, or types that no other kernel of
// CUDA reads.
bool gathers(const AnyProblem& problem);

// What gather_cuda cannot take.
Status check_gather(const Problem& problem);

// Where in the workspace copies go, as offsets.
struct GatherPlace {
  size_t k, v, lengths;
};
// Of items `first` to first + count - 1 and K/V head `head`, or all heads.
Step gather_step(const Problem& problem, const GatherShape& shape, const GatherPlace& to,
                 int64_t first, int64_t count, int64_t head);
// From the lse [heads_kv or 1, items, the query heads of a launch] at an offset.
Step gather_lse_step(const Problem& problem, const GatherShape& shape, size_t from);

}  // namespace attn
