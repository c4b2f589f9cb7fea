// What attn bench times: a problem of given shape with random data in place.
#pragma once

#include <vector>

#include "attn/common.h"
#include "core/status.h"
#include "plan/plan.h"

namespace attn::tools {

struct Case {
  int64_t batch = 1, heads = 8, heads_kv = 0, seqlen_q = 2048, seqlen_kv = 0, head_dim = 128;
  bool causal = false;
  std::string window{};
  int64_t shared_keys = 0;  // of a segment that the batch shares, before those of seqlen_kv
};

struct CaseTypes {
  attn_dtype q, kv = ATTN_DTYPE_NONE, out = ATTN_DTYPE_NONE;  // NONE: as q; out bf16 for an fp8 q
};

std::vector<Case> default_cases(attn_backend backend);

// A plan and `sets` copies of its inputs. All runs write the same out and lse.
class Ready {
 public:
  // inputs_above: as many sets as it takes that their inputs exceed these bytes together; 0: one.
  Ready(const context& device, const Case& c, CaseTypes types, const std::string& kernel,
        int64_t inputs_above = 0);
  Ready(const Ready&) = delete;

  attn::Status run(int set = 0, void* stream = nullptr) const;
  // Device code that a run launches, in this order. `only`: from now on one of the launches alone,
  // on what the last whole run has left in the workspace.
  std::vector<std::string> launches() const;
  void only(size_t launch);
  int sets() const { return static_cast<int>(args_.size()); }
  const attn_problem& problem() const { return problem_; }
  std::string kernel() const { return plan_.kernel(); }
  double bytes() const { return bytes_; }  // of q, k, v, out and lse
  // Two operations per multiply-add, of both products, over the pairs that the mask leaves.
  double operations() const;
  std::string describe() const;  // "B1 H8/2 Sq128 Skv128 D64 causal", of shared keys Skv512+128

 private:
  int64_t seqlen_kv() const;  // of a sequence, shared keys included

  std::vector<attn_segment> segments_;
  attn_problem problem_;
  attn::plan plan_;
  const std::vector<Step> steps_;  // the plan's; none of a composed kernel
  Arrays arrays_;
  buffer workspace_;
  std::vector<std::vector<attn_segment_args>> segment_args_;  // of each set
  std::vector<attn_args> args_;
  double bytes_ = 0;
};

// Values in [-1, 1), the same in every run; of large tensors only the first millions are drawn, the
// rest repeats them.
Tensor random_tensor(attn_dtype type, std::vector<int64_t> shape, uint64_t seed);

}  // namespace attn::tools
