// The launches of lists_cuda (plan/gather.h): list_slots_cuda writes where keys are, gather_cuda
// copies them into the workspace, gather_lse_cuda orders the lse.
#pragma once
#include <vector>

#include "kernels/kernel.h"

namespace attn {

constexpr int32_t gather_max_segments = 8;
constexpr const char* gather_image = "gather_cuda";
constexpr const char* list_slots_image = "list_slots_cuda";
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

// Each segment's keys where they are, as kernels read them by block tables of list_slots_cuda:
// pages of one key. Slot n is n * stride.seq after the segment's first key.
struct SlotsShape {
  struct OfSegment {
    int64_t slots;        // of the segment: pages that exist
    int64_t entry_slots;  // between sequences, or pages of the caller's
    int64_t capacity;     // of an item's row of the table
  };
  std::vector<OfSegment> segment;
  int64_t item_bytes = 0;  // of the tables and lengths of an item
};
// ATTN_UNSUPPORTED with the reason if keys must be copied.
bool make_slots(const Problem& problem, SlotsShape* shape);

// Where in the workspace a segment's table and lengths are, as offsets.
struct SlotsPlace {
  size_t table, lengths;
};
// Of items `first` to first + count - 1 and K/V head `head`, or all heads.
Step slots_step(const Problem& problem, const DeviceInfo& device, const SlotsShape& shape,
                const std::vector<SlotsPlace>& to, int64_t first, int64_t count, int64_t head);

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
