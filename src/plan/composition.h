// What kernels launch that consist of others: parts, problems for other kernels, and stages, which
// say in which order they run and where their arrays are.
#pragma once
#include <functional>
#include <memory>
#include <variant>
#include <vector>

#include "plan/choose.h"
#include "problem/operations.h"

namespace attn {

struct Part {
  std::unique_ptr<const AnyProblem> problem;  // of forward or merge
  Choice choice;
  size_t workspace_at;   // of the part's, in the composed kernel's
  const char* computes;  // for attn_explain
};

// Where a run finds an array: `bytes` after the beginning of the workspace, or after the array of
// the same name that the caller gives, or not at all.
struct Place {
  enum From : uint8_t { nowhere, caller, workspace };
  From from = caller;
  int64_t bytes = 0;
};
inline Place in_workspace(size_t at) {
  return {Place::workspace, int64_t(at)};
}

// A launch of the composed kernel's own: a step of its recipe.
struct RunStep {
  size_t step;
  const char* computes;  // for attn_explain
  bool for_lse = false;  // left out where the caller wants no lse
};
// Forward, with the caller's arguments but for these.
struct RunForward {
  size_t part;
  int64_t first_segment = 0;  // of the caller's; the part's problem has their number
  struct Keys {
    Place k, v, seqlens, block_table;  // v of V in K: after the caller's k
    Place k_scale = {Place::nowhere}, k_descale = {Place::nowhere};
  };
  std::vector<Keys> keys = {};  // of the part's segments; none: the caller's. Up to most_keys
  Place q = {}, out = {}, lse = {}, cu_seqlens_q = {}, sinks = {};
};
constexpr size_t most_keys = 8;
constexpr size_t most_merged = 16;  // by merge_cuda and merge_gfx*
struct RunMerge {
  size_t part;
  std::vector<Place> outs = {}, lses = {};  // most_merged at most
  Place out = {}, lse = {};
};
using Stage = std::variant<RunStep, RunForward, RunMerge>;

struct Composition {
  std::vector<Part> parts;
  std::vector<Stage> stages;
};

// Chooses the kernel of a part.
using ChoosePart = std::function<Status(const AnyProblem& part, Choice* choice)>;

// Puts a choice together.
class Composer {
 public:
  explicit Composer(Choice* choice);
  // Bytes of the workspace; their offset.
  size_t take(size_t bytes);
  // Takes a part's workspace; its number.
  size_t add(const char* computes, std::unique_ptr<const AnyProblem> problem, Choice choice);
  void add(Stage stage) { composition_.stages.push_back(std::move(stage)); }
  // A launch of the composed kernel's own.
  void add(Step step, const char* computes, bool for_lse = false);

 private:
  Recipe& recipe_;
  Composition& composition_;
};

// The problem with a result that is float32 and contiguous.
attn_problem partial(attn_problem in);
// `in` with `count` of the segments of `from`, from `first` on, as having arrived.
Status part_problem(const Problem& from, attn_problem in, int64_t first, int64_t count,
                    std::unique_ptr<Problem>* to);

// Merges `num_parts` such results. Its out_type and out_stride are left to be set.
attn_merge_problem merge_of(const Problem& p, int64_t num_parts);

// The failure of a part as one of the composed kernel: sizes that only a part exceeds are a reason
// to go on to other kernels.
Status named(const char* part, const Status& status);

}  // namespace attn
