// Which cases a kernel computes: share.h and share() of conformance/backend.h.
#include <algorithm>
#include <set>
#include <string>

#include "conformance/backend.h"

namespace attn::test {
namespace {

Kernel row(const char* name, int64_t largest = 128, uint32_t features = 0) {
  Kernel kernel{.name = name, .op = Op::forward, .backend = ATTN_BACKEND_HIP};
  kernel.limits.head_dim = kernel.limits.head_dim_v = {8, largest};
  kernel.limits.features = features;
  return kernel;
}

Case case_of(uint64_t seed, const Thinning& thinning) {
  Case c = with_type(small("share", 10, 100), ATTN_BF16);
  c.seed = seed;
  c.thinning = thinning;
  if (thinning.number) c.thinning.number = seed;
  return c;
}

constexpr uint64_t cases = 4000;
uint64_t count(const Kernel& kernel, const Thinning& thinning, const Place& place,
               const char* test = "test") {
  uint64_t found = 0;
  for (uint64_t seed = 0; seed < cases; ++seed)
    found += share(test, kernel, case_of(seed, thinning), place);
  return found;
}

constexpr Place on_device{.emulated = false, .devices_here = true, .sanitized = false},
    on_host{.emulated = false, .devices_here = false, .sanitized = false},
    on_emulator{.emulated = true, .devices_here = false, .sanitized = false};
constexpr Place under_sanitizer(Place place) {
  place.sanitized = true;
  return place;
}

TEST_CASE("share: devices and hosts have all cases but those for devices") {
  const Kernel kernel = row("a");
  for (const Thinning& thinning : {Thinning{}, one_of_many(0), for_devices(0), fifth_of_many(0)})
    CHECK(count(kernel, thinning, on_device) == cases);
  CHECK(count(kernel, one_of_many(0), on_host) == cases);
  CHECK(count(kernel, for_devices(0), on_host) == cases / 5);
  CHECK(count(kernel, one_of_many(0), under_sanitizer(on_host)) == cases / 10);
  CHECK(count(kernel, for_devices(0), under_sanitizer(on_host)) == cases / 50);
  CHECK(count(kernel, on_all_kernels, under_sanitizer(on_host)) == cases);
}

TEST_CASE("share: emulated kernels have half, or by what a case costs") {
  const Kernel plain = row("a"), score = row("b", 128, feature_softcap);
  const auto near = [](uint64_t found, double want) {
    return std::abs(double(found) - want) < 4 * std::sqrt(want);
  };
  CHECK(count(plain, on_all_kernels, on_emulator) == cases);
  CHECK(count(plain, on_all_kernels, under_sanitizer(on_emulator)) == cases);
  CHECK(count(plain, on_all_kernels_in_turn(0), under_sanitizer(on_emulator)) == cases / 2);
  CHECK(near(count(plain, Thinning{}, on_emulator), cases / 2.0));
  CHECK(near(count(score, Thinning{}, on_emulator), cases / 10.0));
  CHECK(count(score, one_of_many(0), on_emulator) == cases / 10);
  CHECK(count(score, one_of_many(0), under_sanitizer(on_emulator)) == cases / 500);
  constexpr Thinning no_other{.emulated = Thinning::no_other};
  CHECK(count(plain, no_other, on_emulator) == cases);
  CHECK(count(score, no_other, on_emulator) == 0);
  Case large = case_of(1, {});
  large.seqlen_q = 5000;
  large.segments[0].capacity = 5000;
  CHECK(!share("test", plain, large, on_emulator));
}

// Not on what was asked before; on names and numbers alone.
TEST_CASE("share: the same answer whenever it is asked") {
  const Kernel a = row("a", 128, feature_softcap), b = row("b", 128, feature_softcap);
  std::vector<bool> first, again;
  for (uint64_t seed = 0; seed < 300; ++seed)
    first.push_back(share("test", a, case_of(seed, {}), on_emulator));
  for (uint64_t seed = 300; seed-- > 0;) {
    share("another", b, case_of(seed, one_of_many(0)), on_emulator);
    again.push_back(share("test", a, case_of(seed, {}), on_emulator));
  }
  std::reverse(again.begin(), again.end());
  CHECK(first == again);
  // Kernels take turns: two have no case in common here. Tests differ: a tenth of a tenth is the
  // same.
  uint64_t both = 0, both_tests = 0;
  for (uint64_t seed = 0; seed < cases; ++seed) {
    const Case c = case_of(seed, {});
    const bool of_a = share("test", a, c, on_emulator);
    both += of_a && share("test", b, c, on_emulator);
    both_tests += of_a && share("other", a, c, on_emulator);
  }
  CHECK(both == 0);
  CHECK((both_tests > cases / 200 && both_tests < cases / 50));
}

// Each kernel has some, however few there are.
TEST_CASE("share: of five cases that take turns an emulated kernel has one") {
  std::set<uint64_t> all;
  for (const char* name : {"a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"}) {
    for (uint64_t first : {0, 5, 20}) {
      std::vector<uint64_t> found;
      for (uint64_t n = first; n < first + 5; ++n)
        if (share("test", row(name), case_of(n, fifth_of_many(0)), on_emulator)) found.push_back(n);
      REQUIRE(found.size() == 1);
      all.insert(found[0] - first);
    }
  }
  CHECK(all.size() == 5);
}

// The reference's answer is computed for few cases.
TEST_CASE("share: under a sanitizer all kernels have the same few cases") {
  const Kernel a = row("a"), b = row("b");
  uint64_t of_a = 0, of_host = 0;
  for (uint64_t seed = 0; seed < cases; ++seed) {
    const Case c = case_of(seed, many_on_all_kernels(0));
    const bool on_host_too = share("test", b, c, under_sanitizer(on_host));
    const bool emulated = share("test", a, c, under_sanitizer(on_emulator));
    CHECK((on_host_too || !emulated));
    of_a += emulated;
    of_host += on_host_too;
  }
  CHECK(of_host == cases / 10);
  CHECK(of_a == of_host);
}

}  // namespace
}  // namespace attn::test
