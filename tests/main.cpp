// Runs the tests and reports how many test cases were skipped, in whole or in part.
#define CATCH_CONFIG_RUNNER
#include "catch.h"

#if __has_include(<catch2/catch_all.hpp>)
using ListenerBase = Catch::EventListenerBase;
#else
using ListenerBase = Catch::TestEventListenerBase;
#endif

namespace {

int skipped_cases = 0;

struct SkippedCases : ListenerBase {
  using ListenerBase::ListenerBase;
  int before = 0;
  void testCaseStarting(const Catch::TestCaseInfo&) override { before = attn::test::skip_count; }
  void testCaseEnded(const Catch::TestCaseStats&) override {
    skipped_cases += attn::test::skip_count > before;
  }
};
CATCH_REGISTER_LISTENER(SkippedCases)

}  // namespace

int main(int argc, char** argv) {
  const int failed = Catch::Session().run(argc, argv);
  if (skipped_cases > 0) std::cout << "SKIPPED: " << skipped_cases << std::endl;
  return failed;
}
