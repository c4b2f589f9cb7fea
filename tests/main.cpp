// Runs the tests and reports how many test cases were skipped, in whole or in part.
#define CATCH_CONFIG_RUNNER
#include <algorithm>

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
  Catch::Session session;
  if (const int error = session.applyCommandLine(argc, argv)) return error;
  int failed = session.run();
  if (skipped_cases > 0) std::cout << "SKIPPED: " << skipped_cases << std::endl;
  const auto& config = session.configData();
  const auto excludes = [](const std::string& filter) {
    return filter.starts_with('~') && filter.find(',') == std::string::npos;
  };
  const bool lists = config.listTests || config.listTags || config.listReporters;
  if (attn::test::after_all && !lists && !config.showHelp &&
      std::all_of(config.testsOrTags.begin(), config.testsOrTags.end(), excludes) &&
      !attn::test::after_all())
    failed = std::max(failed, 1);
  return failed;
}
