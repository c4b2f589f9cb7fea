// The one place that knows which Catch2 is installed: 2.13 (Debian 12) or 3 (Ubuntu 24.04).
#pragma once

#include <iostream>
#include <string>

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

namespace attn::test {

// Skips of this process so far. tests/main.cpp counts the test cases that had any.
inline int skip_count = 0;

// Called after a run of all tests, some excluded perhaps; false fails the run.
inline bool (*after_all)() = nullptr;

}  // namespace attn::test

// Leaves the test case, saying why. Use it at the top level of a TEST_CASE.
#ifdef SKIP
#define ATTN_SKIP(reason)                           \
  do {                                              \
    ++attn::test::skip_count;                       \
    std::cout << "SKIP: " << (reason) << std::endl; \
    SKIP(reason);                                   \
  } while (false)
#else
#define ATTN_SKIP(reason)                           \
  do {                                              \
    ++attn::test::skip_count;                       \
    std::cout << "SKIP: " << (reason) << std::endl; \
    SUCCEED(reason);                                \
    return;                                         \
  } while (false)
#endif
