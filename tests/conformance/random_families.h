// The families of random problems, for tests that run all of them under other conditions.
#pragma once
#include <cstdint>
#include <vector>

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

}  // namespace attn::test
