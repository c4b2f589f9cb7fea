// Runs the tests and reports how many were skipped.
#define CATCH_CONFIG_RUNNER
#include "catch.h"

int main(int argc, char** argv) {
  const int failed = Catch::Session().run(argc, argv);
  if (attn::test::skip_count > 0) std::cout << "SKIPPED: " << attn::test::skip_count << std::endl;
  return failed;
}
