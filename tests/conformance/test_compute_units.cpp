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

template <class Family>
std::vector<Family> by_name(std::vector<Family> all) {  // they are in the order of links
  std::sort(all.begin(), all.end(),
            [](const Family& a, const Family& b) { return std::string_view(a.name) < b.name; });
  return all;
}

// The emulated device of a family's problem of this seed: its compute units, and an order of waves.
EmulatorOptions device_for(std::string_view family, uint64_t seed) {
  const uint64_t h = hash_of_names({family, std::to_string(seed), "any device"});
  // As often few units as many: problems are small.
  constexpr int most[] = {16, 64, 304};
  return {.order = 1 + (h >> 40), .compute_units = 1 + int((h >> 8) % uint64_t(most[h % 3]))};
}

// How many kernels ran.
int check_on_any_device(std::string_view family, uint64_t seed, auto&& check) {
  const EmulatorOptions device = device_for(family, seed);
  const Emulated here(device);
  INFO(family << " " << seed << " in the order of ATTN_EMU_SEED=" << device.order);
  return check(seed);
}

// Of `count` problems of each family.
int check_all_families(uint64_t count, Thinning thinning, bool print) {
  const auto kernels = emulated_kernels(Op::forward);
  int all = 0;
  const char* only = std::getenv("ATTN_ANY_DEVICE_FAMILY");
  const auto run = [&](std::string_view family, auto&& check) {
    if (only && family != only) return;
    int ran = 0;
    for (uint64_t seed = 1; seed <= count; ++seed)
      if (!sanitized || all + ran == 0) ran += check_on_any_device(family, seed, check);
    if (print)
      std::cout << "any device: " << family << ": " << count << " problems, " << ran
                << " runs of kernels" << std::endl;
    all += ran;
  };
  for (const RandomFamily& family : by_name(random_families()))
    run(family.name, [&](uint64_t seed) {
      Case c = family.make(seed);
      c.thinning = thinning;
      return check_case(c, kernels);
    });
  for (const RandomOperation& operation : by_name(random_operations()))
    run(operation.name, operation.check);
  return all;
}

TEST_CASE("any device: random problems of all families on 1 to 304 compute units") {
  if (emulated_kernels(Op::forward).empty()) ATTN_SKIP("no kernel runs on the emulator here");
  CHECK(check_all_families(2, {.emulated = Thinning::no_other}, false) > 0);
}

// attn-tests "any device at length*": ATTN_ANY_DEVICE=N problems of each family, by default 5,
// which take half a minute; ATTN_ANY_DEVICE_FAMILY=NAME for one family.
TEST_CASE("any device at length: random problems of all families", "[.][long]") {
  if (emulated_kernels(Op::forward).empty()) ATTN_SKIP("no kernel runs on the emulator here");
  const char* wanted = std::getenv("ATTN_ANY_DEVICE");
  const uint64_t count = wanted ? std::strtoull(wanted, nullptr, 10) : 5;
  CHECK(check_all_families(count, on_all_kernels, true) > 0);
}

}  // namespace
}  // namespace attn::test
