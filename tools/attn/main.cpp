// attn: attention from the command line.
#include <cstdio>
#include <iostream>
#include <new>

#include "attn/common.h"

using namespace attn::tools;

namespace {

int fail(int code, std::string text) {
  for (char& c : text)
    if (c == '\n' || c == '\r') c = ' ';
  while (!text.empty() && text.back() == ' ') text.pop_back();
  std::fprintf(stderr, "attn: %s\n", text.c_str());
  return code;
}

int run(int argc, char** argv) {
  CLI::App app("Attention forward on NVIDIA, AMD and CPU. Files are safetensors.", "attn");
  app.set_version_flag("--version", attn_version());
  app.require_subcommand(1);
  app.footer(
      "Exit codes: 0 done; 1 a comparison failed; 2 bad usage or input; 3 that backend is not "
      "here; 4 unsupported or a driver error.");
  int exit_code = exit_done;
  add_info(app, exit_code);
  add_run(app, exit_code);
  add_merge(app, exit_code);
  add_quantize(app, exit_code);
  add_diff(app, exit_code);
  add_mask(app, exit_code);
  add_bench(app, exit_code);
  // The parser's own sentence would not name the word.
  std::string names;
  bool known = argc < 2 || argv[1][0] == '-';
  for (const CLI::App* command : app.get_subcommands([](CLI::App*) { return true; })) {
    names += ' ' + command->get_name();
    known = known || command->get_name() == argv[1];
  }
  if (!known) return fail(exit_usage, quote(argv[1]) + " is not one of" + names);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // help and version
    return fail(exit_usage, e.what());
  }
  if (!std::cout.flush()) return fail(exit_unsupported, "cannot write to standard output");
  return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const InputError& e) {
    return fail(exit_usage, e.what());
  } catch (const attn::error& e) {
    return fail(exit_code_of(e.status()), e.what());
  } catch (const std::bad_alloc&) {
    return fail(exit_unsupported, "out of memory");
  } catch (const std::exception& e) {
    return fail(exit_unsupported, e.what());
  }
}
