// The emulated device and everything that lives on it. Errors are HIP's codes, with a sentence kept
// for the calling thread.
#pragma once
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "gfx9emu/emu.h"
#include "gfx9emu/runtime/hipemu.h"

namespace gfx9emu::runtime {

// hipError_t.
enum Error : int {
  success = 0,
  invalid_value = 1,
  out_of_memory = 2,
  invalid_configuration = 9,
  invalid_device_function = 98,
  no_device = 100,
  invalid_device = 101,
  invalid_image = 200,
  no_binary_for_gpu = 209,
  file_not_found = 301,
  invalid_handle = 400,
  not_found = 500,
  not_ready = 600,
  launch_failure = 719,
  not_supported = 801,
};
const char* error_name(int code);
const char* error_text(int code);

constexpr size_t memory_bytes = size_t{192} << 30;  // what MI300X has; MI355X has more
constexpr uint32_t max_threads = 1024;
constexpr uint32_t max_grid_yz = 65535;

// What the thread's last call left behind. Needs no destructor: HIP calls may come from those of
// static objects, which run when the main thread's own objects are gone.
struct LastCall {
  char fault[4096];
  char counters[4096];
  int error;
};
extern thread_local LastCall last_call;

// Keeps the sentence and gives the code back.
Error fail(Error code, const std::string& sentence);

struct Module {
  std::vector<std::byte> file;
  std::unique_ptr<CodeObject> object;
};
struct Function {
  std::shared_ptr<Module> module;
  const Kernel* kernel = nullptr;
};
struct Stream {};
struct Event {
  std::chrono::steady_clock::time_point time{};
  bool recorded = false;
};

struct LaunchShape {
  Dim3 grid, block;
  uint32_t dynamic_lds = 0;
};

// Work is done when it is asked for, so that streams have nothing to order. Thread-safe; handles
// that it did not give out are refused.
class Device {
 public:
  Memory memory;

  Error allocate(void** out, size_t bytes);
  Error allocate_host(void** out, size_t bytes);
  Error free(void* address);
  Error free_host(void* address);
  // Either side may be on the device or, where `may_be_host` says so, on the host.
  Error copy(void* to, const void* from, size_t bytes, bool to_host, bool from_host);
  Error copy_by_address(void* to, const void* from, size_t bytes);
  Error fill(void* to, const void* pattern, size_t pattern_bytes, size_t count);

  Error load(const void* image, void** module);
  Error load_file(const char* path, void** module);
  Error unload(void* module);
  Error function(void* module, const char* name, void** function);
  Error variable(void* module, const char* name, void** address, size_t* bytes);
  Error launch(void* function, const LaunchShape& shape, void** parameters, void** extra);

  Error create_stream(void** stream);
  Error destroy_stream(void* stream);
  Error check_stream(void* stream);  // null: the default stream
  Error create_event(void** event);
  Error destroy_event(void* event);
  Error record(void* event, void* stream);
  Error check_event(void* event, bool recorded);
  Error elapsed(float* milliseconds, void* start, void* stop);

  void configure(const attn_emu_options& options);
  int compute_units();
  Arch arch();

 private:
  Error load_bytes(std::vector<std::byte> file, void** module);

  std::mutex mutex_;
  std::map<void*, std::shared_ptr<Module>> modules_;
  std::map<void*, std::shared_ptr<Function>> functions_;
  std::map<std::pair<void*, std::string>, void*> functions_by_name_;
  std::map<void*, std::unique_ptr<Stream>> streams_;
  std::map<void*, std::unique_ptr<Event>> events_;
  std::map<void*, std::unique_ptr<std::byte[]>> host_memory_;
  Options options_ = [] {
    Options options;
    options.threads = 0;
    return options;
  }();
  int compute_units_ = 0;  // 0: the usual number
  int gfx_ = 0;            // 0: the usual one
};
// Made on first use and never destroyed: HIP calls may come from destructors at exit.
Device& device();

}  // namespace gfx9emu::runtime
