// The families of random problems, for tests that run all of them under other conditions.
#pragma once
#include <cstdint>
#include <vector>

#include "backend.h"
#include "forward_case.h"

namespace attn::test {

struct RandomFamily {
  const char* name;
  Case (*make)(uint64_t seed);
};
inline std::vector<RandomFamily>& random_families() {
  static std::vector<RandomFamily> all;
  return all;
}
// Before main, once in the file of each family.
struct AddRandomFamily {
  AddRandomFamily(const char* name, Case (*make)(uint64_t seed)) {
    random_families().push_back({name, make});
  }
};

// Of the other operations, and of kernels that are not in the catalog: checks emulated kernels on
// the problem of a seed. How many take it.
struct RandomOperation {
  const char* name;
  int (*check)(uint64_t seed);
};
inline std::vector<RandomOperation>& random_operations() {
  static std::vector<RandomOperation> all;
  return all;
}
struct AddRandomOperation {
  AddRandomOperation(const char* name, int (*check)(uint64_t seed)) {
    random_operations().push_back({name, check});
  }
};

inline std::vector<const Kernel*> emulated_kernels(Op op) {
  std::vector<const Kernel*> all = kernels_here(op, false);
  std::erase_if(all, [](const Kernel* kernel) { return kernel->host || !emulated(*kernel); });
  return all;
}

}  // namespace attn::test
