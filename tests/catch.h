// The one place that knows which Catch2 is installed: 2.13 (Debian 12) or 3 (Ubuntu 24.04, Debian
// 13).
#pragma once

#include <iostream>
#include <string>

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#define ATTN_CATCH2 3
#else
#include <catch2/catch.hpp>
#define ATTN_CATCH2 2
#endif

namespace attn::test {

// Matches a string that contains `text`.
inline auto contains(const std::string& text) {
#if ATTN_CATCH2 >= 3
  return Catch::Matchers::ContainsSubstring(text);
#else
  return Catch::Matchers::Contains(text);
#endif
}

// Skips of this process so far. tests/main.cpp counts the test cases that had any.
inline int skip_count = 0;

// Called after a run of all tests, some excluded perhaps; false fails the run.
inline bool (*after_all)() = nullptr;

// Called after each test case with its name.
inline void (*after_case)(const std::string& name) = nullptr;

}  // namespace attn::test

// Leaves the test case, saying why. Use it at the top level of a TEST_CASE. Catch2 3 has a SKIP of
// its own, which 2.13 lacks: it would count such cases otherwise and fail a run in which every case
// is skipped.
#define ATTN_SKIP(reason)                           \
  do {                                              \
    ++attn::test::skip_count;                       \
    std::cout << "SKIP: " << (reason) << std::endl; \
    SUCCEED(reason);                                \
    return;                                         \
  } while (false)
