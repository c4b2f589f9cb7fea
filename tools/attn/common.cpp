#include "attn/common.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <new>
#include <string_view>

#include "core/dtype.h"

namespace attn::tools {

ExitCode exit_code_of(attn_status status) {
  switch (status) {
    case ATTN_OK:
      return exit_done;
    case ATTN_INVALID_ARGUMENT:
      return exit_usage;
    case ATTN_NO_DEVICE:
    case ATTN_DRIVER_MISSING:
      return exit_no_backend;
    default:
      return exit_unsupported;
  }
}

const char* program_name = "attn";

// The parser may be what fails, so it is found without the parser.
static bool json_asked_for = false;

int fail(attn_status status, std::string text) {
  for (char& c : text)
    if (c == '\n' || c == '\r') c = ' ';
  while (!text.empty() && text.back() == ' ') text.pop_back();
  const ExitCode code = exit_code_of(status);
  if (!json_asked_for) {
    std::fprintf(stderr, "%s: %s\n", program_name, text.c_str());
    return code;
  }
  const Json error = {
      {"status", attn_status_string(status)}, {"message", text}, {"exit_code", int(code)}};
  std::cout << Json{{"error", error}}.dump(2, ' ', false, Json::error_handler_t::replace) << "\n"
            << std::flush;
  return code;
}

void add_json(CLI::App& command, bool& as_json) {
  command.add_flag(
      "--json", as_json,
      "print JSON; a failure is {\"error\": {\"status\", \"message\", \"exit_code\"}}");
}

int run_program(const char* name, int (*body)(int, char**), int argc, char** argv) {
  program_name = name;
  json_asked_for = std::any_of(argv, argv + argc,
                               [](const char* word) { return word == std::string_view("--json"); });
  try {
    const int code = body(argc, argv);
    if (!std::cout.flush() || std::fflush(stdout) != 0)
      return fail(ATTN_INTERNAL, "cannot write to standard output");
    return code;
  } catch (const InputError& e) {
    return fail(ATTN_INVALID_ARGUMENT, e.what());
  } catch (const attn::error& e) {
    return fail(e.status(), e.what());
  } catch (const std::bad_alloc&) {
    return fail(ATTN_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& e) {
    return fail(ATTN_INTERNAL, e.what());
  }
}

std::optional<int> parse_command_line(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
    return {};
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // help and version
    return fail(ATTN_INVALID_ARGUMENT, e.what());
  }
}

void BackendOptions::add_to(CLI::App& command) {
  command.add_option("--backend", backend, "auto, reference, cpu, cuda, hip or hip-emu")
      ->check(CLI::IsMember({"auto", "reference", "cpu", "cuda", "hip", "hip-emu"}))
      ->type_name("B");
  command.add_option("--device", device, "ordinal of the device, from 0")->type_name("N");
  command
      .add_option("--threads", threads,
                  "threads of cpu and reference; 0: OMP_NUM_THREADS, else all cores")
      ->type_name("N");
  command
      .add_option("--driver", driver,
                  "with cuda, hip and hip-emu: open this driver library instead of the system's "
                  "(hip-emu: a libattn-hipemu.so)")
      ->type_name("PATH");
  command
      .add_option("--kernel-file", kernel_file,
                  "run kernels of this code object or cubin instead of the library's own")
      ->check(CLI::ExistingFile)
      ->type_name("FILE");
}

context BackendOptions::open() const {
  if (!kernel_file.empty())
    std::fprintf(stderr,
                 "%s: WARNING: kernels come from %s, NOT from the library; only what they launch "
                 "first (prepare_*) is the library's where the file lacks it\n",
                 program_name, kernel_file.c_str());
  auto options = make<attn_context_options>();
  options.device = device.value_or(0);
  options.has_device = device.has_value();
  options.cpu_threads = threads;
  options.driver_path = driver.empty() ? nullptr : driver.c_str();
  options.kernel_file = kernel_file.empty() ? nullptr : kernel_file.c_str();
  for (int b = ATTN_BACKEND_AUTO; b <= ATTN_BACKEND_HIP_EMU; ++b)
    if (backend == attn_backend_string(attn_backend(b))) return context(attn_backend(b), &options);
  throw InputError("--backend " + backend + " is unknown");
}

std::string BackendOptions::ran(const std::string& kernel, const context& device) const {
  std::string text = kernel;
  if (!kernel_file.empty()) text += " from " + kernel_file + ", NOT the library's own,";
  text += std::string(" on ") + attn_backend_string(device.backend());
  if (device.backend() == ATTN_BACKEND_HIP_EMU) text += " (emulated)";
  return text;
}

Json BackendOptions::report(const context& device) const {
  Json json = {{"backend", attn_backend_string(device.backend())}};
  if (device.backend() == ATTN_BACKEND_HIP_EMU) json["emulated"] = true;
  if (!kernel_file.empty()) json["kernel_file"] = kernel_file;
  return json;
}

attn_dtype parse_dtype(const std::string& option, const std::string& text) {
  const attn_dtype type = attn::dtype_from_name(text);
  if (type == ATTN_DTYPE_NONE && !text.empty()) {
    std::string names;
    for (int t = ATTN_F32; t < attn::end_of_dtypes; ++t) {
      names += ' ';
      names += attn::dtype_name(attn_dtype(t));
    }
    throw InputError(option + " " + quote(text) + " is not one of" + names);
  }
  return type;
}

Window parse_window(const std::string& text) {
  Window window;
  const char* at = text.data();
  const char* end = at + text.size();
  auto left = std::from_chars(at, end, window.left);
  bool good = left.ec == std::errc() && left.ptr != end && *left.ptr == ',';
  if (good) {
    const auto right = std::from_chars(left.ptr + 1, end, window.right);
    good = right.ec == std::errc() && right.ptr == end;
  }
  if (!good || window.left < -1 || window.right < -1)
    throw InputError("--window " + quote(text) +
                     " is not L,R with two integers from -1 (unbounded) up");
  return window;
}

void* Arrays::room(size_t bytes) {
  return buffers_.emplace_back(*owner_, std::max<size_t>(bytes, 1)).data();
}

void* Arrays::copy_of(const void* host, size_t bytes) {
  void* memory = room(bytes);
  if (bytes > 0) buffers_.back().copy_in(host, bytes);
  return memory;
}

void copy_out(const context& from, void* host, const void* memory, size_t bytes) {
  if (bytes > 0) check(attn_copy_out(from.get(), host, memory, bytes, nullptr));
}

Progress::Progress() : terminal_(::isatty(STDERR_FILENO) == 1) {}
Progress::~Progress() {
  clear();
}
void Progress::clear() {
  if (std::exchange(shown_, false)) std::fputs("\r\033[K", stderr);
}
void Progress::say(const std::string& what, size_t done, size_t total) {
  if (!terminal_) return;
  clear();
  std::string bar;
  if (total) {
    const size_t width = 20, full = done * width / total;
    bar = "[" + std::string(full, '#') + std::string(width - full, '.') + "] " +
          std::to_string(done + 1) + " of " + std::to_string(total) + ", ";
  }
  std::fprintf(stderr, "%s: %s%s", program_name, bar.c_str(), what.c_str());
  std::fflush(stderr);
  shown_ = true;
}

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace attn::tools
