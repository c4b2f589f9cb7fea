// The sentence where no kernel runs a problem, however many kernels there are.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "plan/choose.h"

namespace attn {

// Rows that do not run a problem: those whose code the machine has, and the others.
struct Refused {
  std::vector<Declined> present, absent;
};

// Says why no kernel takes the problem, in the order code, types, head_dim, the rest. `runs`:
// whether some kernel of the machine takes another problem; types are called accepted only if it
// does.
std::string refusal(const AnyProblem& problem, const Machine& machine, const Refused& refused,
                    const std::function<bool(const Problem&)>& runs);

// The kernels of an operation and backend whose names begin most like `name`, and the number of
// others.
std::string similar_kernels(Op op, attn_backend backend, const std::string& name);

}  // namespace attn
