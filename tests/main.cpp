// Runs the tests and reports how many test cases were skipped, in whole or in part.
//
// Both versions of Catch2 take the same options here: --list-test-names-only, which 3 no longer
// has, prints one name a line. The exit code is 0 after a list, and 2 where no test case matches,
// as of Catch2 3.
#define CATCH_CONFIG_RUNNER
#include <algorithm>
#include <string_view>
#include <vector>

#include "catch.h"

#if ATTN_CATCH2 >= 3
using ListenerBase = Catch::EventListenerBase;
#else
using ListenerBase = Catch::TestEventListenerBase;
#endif

namespace {

int cases = 0, skipped_cases = 0;

struct Count : ListenerBase {
  using ListenerBase::ListenerBase;
  int before = 0;
  std::string name;
  void testCaseStarting(const Catch::TestCaseInfo& test) override {
    before = attn::test::skip_count;
    name = test.name;
  }
  void testCaseEnded(const Catch::TestCaseStats&) override {
    ++cases;
    skipped_cases += attn::test::skip_count > before;
    if (attn::test::after_case) attn::test::after_case(name);
  }
};
CATCH_REGISTER_LISTENER(Count)

bool excludes(const std::string& filter) {
  return filter.starts_with('~') && filter.find(',') == std::string::npos;
}

bool lists(const Catch::ConfigData& config) {
#if ATTN_CATCH2 >= 3
  const bool other = config.listListeners;
#else
  const bool other = config.listTestNamesOnly;
#endif
  return config.listTests || config.listTags || config.listReporters || other;
}

// The command line as the installed version takes it.
std::vector<const char*> translated(int argc, char** argv) {
  std::vector<const char*> arguments;
  for (int i = 0; i < argc; ++i) {
#if ATTN_CATCH2 >= 3
    if (argv[i] == std::string_view("--list-test-names-only")) {
      arguments.insert(arguments.end(), {"--list-tests", "--verbosity", "quiet"});
      continue;
    }
#endif
    arguments.push_back(argv[i]);
  }
  return arguments;
}

}  // namespace

int main(int argc, char** argv) {
  Catch::Session session;
  const std::vector<const char*> arguments = translated(argc, argv);
  if (const int error = session.applyCommandLine(int(arguments.size()), arguments.data()))
    return error;
  const int code = session.run();
  const Catch::ConfigData& config = session.configData();
  if (config.showHelp || config.libIdentify) return code;
  if (lists(config)) return ATTN_CATCH2 >= 3 ? code : 0;  // of 2.13 how many there are
  if (cases == 0) return std::max(code, 2);
  if (skipped_cases > 0) std::cout << "SKIPPED: " << skipped_cases << std::endl;
  const auto& filters = config.testsOrTags;
  const bool all = std::all_of(filters.begin(), filters.end(), excludes);
  const bool complete = !all || !attn::test::after_all || attn::test::after_all();
  return complete ? code : std::max(code, 1);
}
