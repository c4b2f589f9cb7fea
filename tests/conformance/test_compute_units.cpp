// Random problems of every family on emulated devices of any size, in any order of waves and loads:
// the results are right, and the emulator reports nothing.
#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <string_view>

#include "../share.h"
#include "backend.h"
#include "random_families.h"

namespace attn::test {
namespace {

std::vector<const Kernel*> emulated_kernels() {
  std::vector<const Kernel*> all = kernels_here(Op::forward, false);
  std::erase_if(all, [](const Kernel* kernel) { return kernel->host || !emulated(*kernel); });
  return all;
}
std::vector<RandomFamily> families_by_name() {
  auto families = random_families();  // in the order of links, which nothing shall depend on
  std::sort(families.begin(), families.end(), [](const RandomFamily& a, const RandomFamily& b) {
    return std::string_view(a.name) < b.name;
  });
  return families;
}

// The family's problem of this seed, on a number of compute units and in an order of its own. How
// many kernels ran.
int check_on_any_device(const RandomFamily& family, uint64_t seed, Thinning thinning,
                        const std::vector<const Kernel*>& kernels) {
  Case c = family.make(seed);
  c.name += ", any device";
  c.thinning = thinning;
  const uint64_t h = hash_of_names({family.name, c.name});
  // As often few as many: problems are small.
  constexpr int most[] = {16, 64, 304};
  const int units = 1 + int((h >> 8) % uint64_t(most[h % 3]));
  const uint64_t order = 1 + (h >> 40);
  const Emulated here({.order = order, .compute_units = units});
  INFO("in the order of ATTN_EMU_SEED=" << order);
  return check_case(c, kernels);
}

TEST_CASE("any device: random problems of all families on 1 to 304 compute units") {
  const auto kernels = emulated_kernels();
  if (kernels.empty()) ATTN_SKIP("no kernel runs on the emulator here");
  int ran = 0;
  for (const RandomFamily& family : families_by_name())
    for (uint64_t seed = 1; seed <= 2; ++seed)
      if (!sanitized || ran == 0)
        ran += check_on_any_device(family, seed, {.emulated = Thinning::no_other}, kernels);
  CHECK(ran > 0);
}

// attn-tests "any device at length*": ATTN_ANY_DEVICE=N problems of each family, by default 5,
// which take half a minute.
TEST_CASE("any device at length: random problems of all families", "[.][long]") {
  const auto kernels = emulated_kernels();
  if (kernels.empty()) ATTN_SKIP("no kernel runs on the emulator here");
  const char* wanted = std::getenv("ATTN_ANY_DEVICE");
  const uint64_t count = wanted ? std::strtoull(wanted, nullptr, 10) : 5;
  int all = 0;
  for (const RandomFamily& family : families_by_name()) {
    int ran = 0;
    for (uint64_t seed = 1; seed <= count; ++seed)
      ran += check_on_any_device(family, seed, on_all_kernels, kernels);
    std::cout << "any device: " << family.name << ": " << count << " problems, " << ran
              << " runs of kernels" << std::endl;
    all += ran;
  }
  CHECK(all > 0);
}

}  // namespace
}  // namespace attn::test
