// Which cases of a test are computed, by which kernels, where all would take too long: decided by
// numbers and hashes of names, so that it is the same in every run, whatever else runs.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <string_view>

#include "catch.h"

namespace attn::test {

#ifdef __has_feature  // clang
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__
#endif
#endif
// A sanitizer looks for memory errors and is several times slower, and similar problems make the
// same memory errors. So sanitized builds run a tenth of the problems that differ only in shapes,
// seeds or types; other builds run all, unless ATTN_AS_SANITIZED is in the environment.
#ifdef __SANITIZE_ADDRESS__
inline const bool sanitized = true;
#else
inline const bool sanitized = std::getenv("ATTN_AS_SANITIZED");
#endif
constexpr uint64_t sanitized_one_in = 10;

constexpr uint64_t hash_of_names(std::initializer_list<std::string_view> names) {
  uint64_t h = 0xcbf29ce484222325;
  for (const std::string_view name : names) {
    for (const char letter : name) h = (h ^ uint8_t(letter)) * 0x100000001b3;
    h = (h ^ 0xff) * 0x100000001b3;  // so that "a", "bc" is not "ab", "c"
  }
  h = (h ^ h >> 32) * 0x9fb21c651e98df25;  // the lowest bits are those of the last letters
  return h ^ h >> 29;
}

// Whether case n is one of `one_in`, beginning with `first`; then n becomes its number among them.
// Of one_in in succession it is one, in loops over one_in things not always the same.
constexpr bool in_turn(uint64_t& n, uint64_t one_in, uint64_t first = 0) {
  const bool is = (n + n / one_in + first) % one_in == 0;
  n /= one_in;
  return is;
}

inline std::string current_test() {
  return Catch::getResultCapture().getCurrentTestName();
}
// Of many cases that are like each other: under a sanitizer a tenth.
inline bool share(uint64_t number) {
  return in_turn(number, sanitized ? sanitized_one_in : 1);
}

}  // namespace attn::test
