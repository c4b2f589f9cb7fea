// Test cases that end in every way there is, for the programs that read what such a run prints.
#include "catch.h"

TEST_CASE("results: passes") {
  CHECK(1 == 1);
  CHECK(2 == 2);
}

TEST_CASE("results: a comma, a [bracket], a back\\slash") {
  CHECK(1 == 1);
}

TEST_CASE("results: skipped at once") {
  ATTN_SKIP("nothing is here");
}

TEST_CASE("results: skipped in part") {
  for (int i = 0; i < 3; ++i) CHECK(i < 3);
  ATTN_SKIP("the rest is not here");
}

TEST_CASE("results: hidden", "[.][long]") {
  CHECK(1 == 1);
}

TEST_CASE("results: fails", "[.][failing]") {
  CHECK(1 == 1);
  SECTION("in a section") {
    CHECK(1 == 2);
    CHECK(1 == 3);
  }
}

// As sanitize.sh asks for it: a section for each kernel that the test takes.
TEST_CASE("cuda: every forward kernel on few problems", "[.][device]") {
  for (const char* kernel : {"fwd_sm80_bf16_d64", "fwd_sm80_bf16_d128"}) DYNAMIC_SECTION(kernel) {
      CHECK(1 == 1);
    }
}
