// What the subcommands share: failures and exit codes, common options, memory of a backend.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <deque>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>

#include "attn/attn.hpp"
#include "common/safetensors.h"

namespace attn::tools {

using Json = nlohmann::ordered_json;

enum ExitCode {
  exit_done = 0,
  exit_failed = 1,       // a comparison failed
  exit_usage = 2,        // bad usage or input
  exit_no_backend = 3,   // that backend is not here
  exit_unsupported = 4,  // unsupported, or a driver error
};

// Bad usage or input; what() is the sentence.
struct InputError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

ExitCode exit_code_of(attn_status status);

// Comes before every sentence on stderr.
extern const char* program_name;
// What went wrong: one line on stderr, or with --json on the command line {"error": {"status",
// "message", "exit_code"}} on stdout. Returns the exit code.
int fail(attn_status status, std::string text);
// body's value, or a sentence and the exit code of what it threw.
int run_program(const char* name, int (*body)(int argc, char** argv), int argc, char** argv);
// Parses; help, version and bad usage come as their exit code.
std::optional<int> parse_command_line(CLI::App& app, int argc, char** argv);

// The value, or its error as an InputError.
template <class T>
T need(Result<T> result) {
  if (!result) throw InputError(result.error());
  return std::move(*result);
}

// Subcommands. Each registers itself; its callback sets exit_code or throws.
void add_info(CLI::App& app, int& exit_code);
void add_run(CLI::App& app, int& exit_code);
void add_merge(CLI::App& app, int& exit_code);
void add_quantize(CLI::App& app, int& exit_code);
void add_append(CLI::App& app, int& exit_code);
void add_diff(CLI::App& app, int& exit_code);
void add_mask(CLI::App& app, int& exit_code);
void add_bench(CLI::App& app, int& exit_code);

// --json.
void add_json(CLI::App& command, bool& as_json);

// --backend, --device, --threads, --driver, --kernel-file.
struct BackendOptions {
  std::string backend = "auto";
  std::optional<int> device;
  int threads = 0;
  std::string driver, kernel_file;

  void add_to(CLI::App& command);
  context open() const;
  // "fwd_gfx942_fp8_d128 from x.hsaco, NOT the library's own, on hip-emu (emulated)".
  std::string ran(const std::string& kernel, const context& device) const;
  // "backend", and where they apply "emulated" and "kernel_file".
  Json report(const context& device) const;
};

// "f16" or the empty string (NONE); InputError otherwise.
attn_dtype parse_dtype(const std::string& option, const std::string& text);

// "L,R" with both at least -1.
struct Window {
  int64_t left = -1, right = -1;
};
Window parse_window(const std::string& text);

// Arrays in a backend's memory, freed together. Addresses stay as the object lives.
class Arrays {
 public:
  explicit Arrays(const context& owner) : owner_(&owner) {}
  void* room(size_t bytes);                       // contents undefined
  void* copy_of(const void* host, size_t bytes);  // host -> backend

 private:
  const context* owner_;
  std::deque<buffer> buffers_;
};
void copy_out(const context& from, void* host, const void* memory, size_t bytes);

// One line on stderr that tells what is being done, only where stderr is a terminal.
class Progress {
 public:
  Progress();
  ~Progress();
  // With `total`, a bar of which `done` parts are full.
  void say(const std::string& what, size_t done = 0, size_t total = 0);

 private:
  void clear();
  bool terminal_, shown_ = false;
};

double seconds_now();  // monotonic
double median(std::vector<double> values);

}  // namespace attn::tools
