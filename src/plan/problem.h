// A validated problem: every default resolved, so that nothing downstream asks "unset?".
#pragma once
#include <string>
#include <vector>

#include "core/mask.h"
#include "core/status.h"

namespace attn {

// After make_problem: head_dim_v, out_type, scale, all strides, seqlen and total of each segment,
// mask_batch and mask_heads hold their real values; window sides below 0 are -1; `segments` points
// into `segment`.
struct Problem : attn_problem {
  std::vector<attn_segment> segment;
  std::string kernel_name;  // "" = the plan chooses
  int64_t seqlen_kv = 0;    // sum of the segments' capacities

  Problem() : attn_problem{} {}
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;
  bool has(uint32_t flag) const { return (flags & flag) != 0; }
  int64_t group() const { return heads_q / heads_kv; }
  RangeMask range_mask() const {
    return {has(ATTN_CAUSAL), has(ATTN_CAUSAL_TOP_LEFT), has(ATTN_WINDOW), window_left,
            window_right};
  }
};

Status make_problem(const attn_problem* in, Problem* out);

// Keys per sequence at most: seqlen, or what stands for it where that is 0.
int64_t segment_capacity(const attn_segment& segment);

// Copies a caller's versioned struct: shorter ones are zero-extended, longer ones must be zero
// behind what this library knows. `name` is the argument's name for the error.
Status copy_versioned(const char* name, const void* in, void* out, size_t size);
template <class T>
Status copy_versioned(const char* name, const T* in, T* out) {
  return copy_versioned(name, static_cast<const void*>(in), static_cast<void*>(out), sizeof(T));
}

// The caller's arguments in the library's own layout: at most a pointer check per array.
struct Args : attn_args {
  static constexpr int inline_segments = 8;
  attn_segment_args inline_segment[inline_segments];
  std::vector<attn_segment_args> more;         // used beyond inline_segments
  const attn_segment_args* segment = nullptr;  // num_segments of them
};
// Null pointers, alignment and overlap; on host backends also lengths and cu_seqlens.
Status check_args(const Problem& problem, const attn_args* in, bool host_memory, Args* out);

// Lengths, tables and block masks whose contents lie in host memory; what attn_check reports.
Status check_contents(const Problem& problem, const Args& args);

}  // namespace attn
