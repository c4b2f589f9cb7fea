// attn: attention from the command line.
#include "attn/common.h"

using namespace attn::tools;

namespace {

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
  add_append(app, exit_code);
  add_diff(app, exit_code);
  add_mask(app, exit_code);
  add_bench(app, exit_code);
  // The parser's own sentences would name neither the word nor the subcommands.
  std::string names;
  const std::string word = argc > 1 ? argv[1] : "";
  bool known = word.starts_with('-');
  for (const CLI::App* command : app.get_subcommands([](CLI::App*) { return true; })) {
    names += ' ' + command->get_name();
    known = known || command->get_name() == word;
  }
  if (argc < 2) return fail(ATTN_INVALID_ARGUMENT, "a subcommand is missing; accepted:" + names);
  if (!known) return fail(ATTN_INVALID_ARGUMENT, quote(word) + " is not one of" + names);
  return parse_command_line(app, argc, argv).value_or(exit_code);
}

}  // namespace

int main(int argc, char** argv) {
  return run_program("attn", run, argc, argv);
}
