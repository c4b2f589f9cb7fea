// Which kernel runs a problem, and what its plan launches: a function of the problem and of the
// machine's description alone. No driver is called, no module loaded.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "catalog/machine.h"

namespace attn {

// Why a kernel that the machine's backend has does not run a problem.
struct Declined {
  const Kernel* kernel;
  std::string reason;
};

struct Composition;  // composition.h

struct Choice {
  const Kernel* kernel = nullptr;
  Recipe recipe;  // of host kernels, which launch nothing, the workspace
  std::shared_ptr<Composition> composition = nullptr;  // of a composed kernel
};

// Chooses the first row of the catalog that takes the problem and has no later one that serves it
// better. `declined` (may be null) gets the rows of the backend that do not run it, also those
// after the chosen one.
Status choose(const AnyProblem& problem, const Machine& machine, Choice* choice,
              std::vector<Declined>* declined = nullptr);

}  // namespace attn
