// A validated problem: every default resolved, so that nothing downstream asks "unset?".
#pragma once
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "core/ceil_div.h"
#include "core/dtype.h"
#include "core/status.h"
#include "kernels/shared/mask.h"
#include "problem/any_problem.h"
#include "problem/overlap.h"
#include "problem/versioned.h"

namespace attn {

// What the problem of an operation says about its segments.
struct KvShape {
  int64_t batch, heads_kv, head_dim, head_dim_v;
  bool attends = false;  // segments may be shared
};

struct Segment : attn_segment {
  Footprint k_bytes, v_bytes, k_scale_bytes, v_scale_bytes;  // of scales: of types that have them;
                                                             // of v and its scales: not of v_in_k
  int64_t lists = 0;                                         // in attn_segment_args.list
};

// After make_problem: head_dim_v, out_type, scale, all strides, seqlen and total of each segment,
// mask_batch and mask_heads hold their real values; window sides below 0 are -1; `segments` is
// null, `segment` has them. A shared segment has a batch stride of 0; with a batch of 1 none is
// shared. With v_in_k, what a segment says of V is what it says of K.
struct Problem : AnyProblem, attn_problem {
  std::vector<Segment> segment;
  int64_t seqlen_kv = 0;  // sum of the capacities of segments whose keys have positions
  int64_t most_keys = 0;  // that a query visits: entries of lists, with their repetitions
  bool by_query = false;  // queries of a sequence visit different keys: there are lists, or keys
                          // without positions
  // With a batch of 1, as a part of a composed kernel: the keys are cut into this many parts. Each
  // has an out, out_stride.batch apart, and an lse.
  int64_t key_parts = 1;
  Footprint q_bytes, out_bytes, bias_bytes;

  Problem() : AnyProblem(Op::forward), attn_problem{} {}
  bool has(uint32_t flag) const { return (flags & flag) != 0; }
  // Of either alignment.
  bool causal() const { return has(ATTN_CAUSAL | ATTN_CAUSAL_TOP_LEFT); }
  // Segments say where their keys are.
  bool key_positions() const { return segment[0].has_key_start != 0; }
  // How many keys after its own position, i + Skv - Sq, a query may see; INT64_MAX: any number.
  // ATTN_CAUSAL_TOP_LEFT does not count, whose bound depends on the lengths.
  int64_t keys_right() const;
  int64_t group() const { return heads_q / heads_kv; }
  KvShape kv_shape() const { return {batch, heads_kv, head_dim, head_dim_v, true}; }
  // Blocks of the block mask's grid.
  int64_t mask_rows() const { return ceil_div(seqlen_q, block_q); }
  int64_t mask_columns() const { return ceil_div(seqlen_kv, block_k); }
  RangeMask range_mask() const {
    return {has(ATTN_CAUSAL), has(ATTN_CAUSAL_TOP_LEFT), has(ATTN_WINDOW), window_left,
            window_right};
  }
  TreeMask tree_mask() const { return {tree_keys}; }
};

Status make_problem(const attn_problem* in, Problem* out);

// Entries of a segment's arrays along the batch.
inline int64_t entries(const attn_segment& segment, int64_t batch) {
  return segment.shared ? std::min<int64_t>(1, batch) : batch;
}

// What begins the names of segment i of `count` in errors: "segment 1: ", "" for the only one.
inline std::string segment_prefix(int64_t count, int64_t i) {
  return count == 1 ? "" : "segment " + std::to_string(i) + ": ";
}

// The most keys of a sequence: seqlen, or its default where that is 0.
int64_t segment_capacity(const attn_segment& segment);

// Validates and resolves a segment. `prefix` begins the names in errors; `written`: k and v are.
Status make_segment(const std::string& prefix, const KvShape& shape, bool written, Segment* s);
// Null pointers and alignment. `n`: the segment's number among several, else -1.
Status check_segment_pointers(const Segment& s, const attn_segment_args& a, int32_t n,
                              bool host_memory, bool wants_table = true);
// Calls visit(name, address, bytes) for each small array that is not NULL.
template <class Visit>
void for_each_small_array(const Segment& s, const attn_segment_args& a, const KvShape& shape,
                          int32_t n, Visit&& visit) {
  const int64_t batch = entries(s, shape.batch);
  const auto array = [&](const char* name, const void* address,
                         std::initializer_list<int64_t> extents) {
    if (address) visit(Name{name, n}, address, Footprint(4, extents));
  };
  if (a.key_start) visit(Name{"key_start", n}, a.key_start, Footprint(8, {batch}));
  if (a.ready) visit(Name{"ready", n}, a.ready, Footprint(4, {2}));
  const auto descale = [&](const char* name, const float* address, attn_descale_kind kind) {
    const bool one = kind == ATTN_DESCALE_TENSOR;
    array(name, address,
          {one ? 1 : batch, one ? 1 : shape.heads_kv,
           kind == ATTN_DESCALE_BLOCK ? ceil_div(s.seqlen, s.descale_block_keys) : 1});
  };
  array("list", a.list, {s.lists, s.list_size});
  array("list_lengths", a.list_lengths, {s.lists});
  array("seqlens", a.seqlens, {batch});
  array("cu_seqlens", a.cu_seqlens, {batch + 1});
  array("block_table", a.block_table, {batch, s.max_pages});
  descale("k_descale", a.k_descale, s.k_descale);
  descale("v_descale", a.v_descale, s.v_descale);
}
// The same for the arrays that a call of kv_append writes and forward reads.
template <class Visit>
void for_each_large_array(const Segment& s, const attn_segment_args& a, int32_t n, Visit&& visit) {
  visit(Name{"k", n}, a.k, s.k_bytes);
  if (!s.v_in_k) visit(Name{"v", n}, a.v, s.v_bytes);
  visit(Name{"k_scale", n}, a.k_scale, s.k_scale_bytes);
  if (!s.v_in_k) visit(Name{"v_scale", n}, a.v_scale, s.v_scale_bytes);
}
// The arrays of keys and values that a run writes. The stride of a single page says nothing.
inline Placed placed_k(const char* name, const Segment& s, const attn_segment_args& a) {
  const int64_t step = s.num_pages > 1 ? dtype_bytes(s.k_type, s.k_stride.batch) : 0;
  return {{name}, a.k, &s.k_bytes, std::abs(step)};
}
inline Placed placed_v(const char* name, const Segment& s, const attn_segment_args& a) {
  const int64_t step = s.num_pages > 1 ? dtype_bytes(s.v_type, s.v_stride.batch) : 0;
  return {{name}, a.v, &s.v_bytes, std::abs(step)};
}
// The pages that a run writes, of k and v that may be views of one pool: none of k's is one of v's.
class WrittenPages {
 public:
  WrittenPages(const Placed& k, const Placed& v) : k_(k), v_(v), apart_(pages_between(k, v)) {}
  void add(int64_t page) {
    if (apart_ != 0) pages_.push_back(page);
  }
  // Numbers `begin` to `end` - 1 of sequence b; an error of check_pages.
  Status add(const std::string& prefix, const attn_segment& s, const int32_t* block_table,
             int64_t b, int64_t begin, int64_t end);
  Status check();

 private:
  Placed k_, v_;
  int64_t apart_;
  std::vector<int64_t> pages_;
};
// Adds a segment's types, features and page size to `needs`.
void add_needs(const attn_segment& s, Needs* needs);
// To 16 bytes; heads in ggml's blocks need not be.
bool aligned_strides(attn_dtype type, const attn_strides& stride);

// Check lengths and cumulative lengths in host memory.
Status check_lengths(Name name, const int32_t* values, int64_t count, int64_t capacity);
Status check_offsets(Name name, const int32_t* values, int64_t batch, int64_t capacity,
                     int64_t total);
// The pages of sequence b in [begin, end) of its row of the block table.
Status check_pages(const std::string& prefix, const attn_segment& s, const int32_t* block_table,
                   int64_t b, int64_t begin, int64_t end);

// The caller's array of segments, element i at i * step bytes. It is read in place: a run copies
// only the element that it asks for.
class SegmentList {
 public:
  SegmentList() = default;
  SegmentList(const attn_segment_args* first) : SegmentList(first, sizeof *first) {}
  SegmentList(const void* first, size_t step)
      : first_(static_cast<const char*>(first)), step_(step) {}
  SegmentList from(int64_t i) const { return {first_ + size_t(i) * step_, step_}; }
  // In the library's own layout: what a shorter struct has not is zero.
  attn_segment_args operator[](int64_t i) const {
    const char* from = first_ + size_t(i) * step_;
    attn_segment_args a;
    if (step_ >= sizeof a) {
      std::memcpy(&a, from, sizeof a);
    } else {
      std::memset(&a, 0, sizeof a);
      std::memcpy(&a, from, step_);
    }
    return a;
  }

 private:
  const char* first_ = nullptr;
  size_t step_ = 0;
};

// The caller's arguments in the library's own layout.
struct Args : attn_args {
  SegmentList segment;  // num_segments of them
};
// Tokens of a run with packed q.
inline int64_t total_q(const Problem& p, const attn_args& args) {
  return args.total_q > 0 ? args.total_q : p.total_q;
}
// Null pointers, alignment and overlap; on host backends also lengths and cu_seqlens.
Status check_args(const Problem& problem, const attn_args* in, const void* workspace,
                  size_t workspace_bytes, bool host_memory, Args* out);

// An error if one of the `count` arrays in `written` shares bytes with another or with an array
// that a forward run reads.
Status keep_apart_from_inputs(const Placed* written, size_t count, const Problem& problem,
                              const Args& args);

// Checks lengths, tables and block masks in host memory; what attn_check reports.
Status check_contents(const Problem& problem, const Args& args);

}  // namespace attn
