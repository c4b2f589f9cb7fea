// The drivers against stand-ins for the vendors' libraries (tests/mock): every failure, and the
// good path up to a merge through the C ABI.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <vector>

#include "api/handles.h"
#include "backends.h"
#include "catalog/catalog.h"
#include "catch.h"
#include "core/dtype.h"
#include "driver/driver.h"
#include "driver/library.h"
#include "driver/timing.h"
#include "kernels/shared/merge_args.h"
#include "kernels/shared/types.h"
#include "mock_library.h"

using namespace attn;
using mock::MockLibrary;

namespace {

struct Vendor {
  const char* name;
  const char* library;
  Status (*open)(const char* path, int device, std::shared_ptr<Driver>* driver);
  Status (*list)(const char* path, std::vector<DeviceInfo>* devices);
  const char *init, *alloc, *copy_in, *load, *function, *launch, *prefix;
  attn_backend backend;
  const char *load_file, *merge;
  const char *arch, *image_arch;  // of the stand-in's device, and of an image made for it
  const char* other_arch;         // of a device that there is no code for
};
const Vendor vendors[] = {
    {"cuda", "cuda",
     [](const char* p, int d, std::shared_ptr<Driver>* out) { return open_cuda(p, d, out); },
     list_cuda, "cuInit", "cuMemAlloc", "cuMemcpyHtoDAsync", "cuModuleLoadData",
     "cuModuleGetFunction", "cuLaunchKernel", "CUDA_ERROR_", ATTN_BACKEND_CUDA, "cuModuleLoad",
     "merge_cuda", "sm_90", "compute_80", "sm_75"},
    {"hip", "hip",
     [](const char* p, int d, std::shared_ptr<Driver>* out) { return open_hip(p, false, d, out); },
     [](const char* p, std::vector<DeviceInfo>* out) { return list_hip(p, false, out); }, "hipInit",
     "hipMalloc", "hipMemcpyHtoDAsync", "hipModuleLoadData", "hipModuleGetFunction",
     "hipModuleLaunchKernel", "hipError", ATTN_BACKEND_HIP, "hipModuleLoad", "merge_gfx942",
     "gfx942", "gfx942", "gfx908"},
};

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// The status and every part of the sentence.
void check_failure(const Status& status, attn_status code,
                   std::initializer_list<std::string> parts) {
  INFO(status.text);
  CHECK(status.code == code);
  for (const std::string& part : parts) {
    INFO("expected: " << part);
    CHECK(has(status.text, part));
  }
}

const unsigned char some_image[16] = {};

}  // namespace

TEST_CASE("driver: the library is absent", "[driver]") {
  for (const Vendor& v : vendors) {
    std::shared_ptr<Driver> driver;
    check_failure(v.open("/nowhere/libgpu.so.1", 0, &driver), ATTN_DRIVER_MISSING,
                  {v.name, "/nowhere/libgpu.so.1", "No such file"});
    CHECK(!driver);
  }
}

TEST_CASE("driver: a library that is nowhere: what was tried, and how to name another",
          "[driver]") {
  namespace fs = std::filesystem;
  const fs::path folder = fs::temp_directory_path() / ("attn-folder-" + std::to_string(getpid()));
  fs::create_directories(folder / "lib");
  fs::create_directories(folder / "none");
  const std::string lib = folder / "lib", none = folder / "none";
  const LibrarySearch search = {{"libattn-none.so.7", "libattn-none.so.6"},
                                {{none, "$NONE/lib"}, {lib, lib}, {"/nowhere", "/nowhere"}}};
  const std::string advice =
      "; LD_LIBRARY_PATH may name its folder, driver_path (attn --driver) the file";
  const std::string missing = "cannot open shared object file: No such file or directory";
  void* library = nullptr;
  Status status = open_first(search, &library);
  CHECK(status.code == ATTN_DRIVER_MISSING);
  CHECK(status.text == "libattn-none.so.7, libattn-none.so.6: " + missing + "; nor in $NONE/lib (" +
                           none + "), " + lib + ", /nowhere" + advice);

  // One that is there and no library has the loader's reason.
  std::ofstream(folder / "lib" / "libattn-none.so.7") << "text";
  status = open_first(search, &library);
  INFO(status.text);
  CHECK(has(status.text, lib + "/libattn-none.so.7: "));
  CHECK(has(status.text, "; nor in $NONE/lib (" + none + "), /nowhere;"));
  CHECK(!library);

  // The next name is taken then.
  fs::copy_file(fs::path(ATTN_MOCK_DIR) / "empty.so", folder / "lib" / "libattn-none.so.6");
  REQUIRE(open_first(search, &library).ok());
  CHECK(find_symbol(library, "attn_mock_nothing"));
  fs::remove_all(folder);
}

TEST_CASE("driver: the library is none, or lacks a function", "[driver]") {
  const MockLibrary empty("empty"), without_fill("hip_without_fill");
  MockLibrary cuda("cuda");
  mock::set_text(cuda->hidden, "cuMemsetD8Async");
  std::shared_ptr<Driver> driver;
  check_failure(open_cuda(empty.path(), 0, &driver), ATTN_DRIVER_MISSING,
                {empty.path(), "cuGetProcAddress"});
  check_failure(open_hip(empty.path(), false, 0, &driver), ATTN_DRIVER_MISSING,
                {empty.path(), "hipInit"});
  check_failure(open_hip(without_fill.path(), false, 0, &driver), ATTN_DRIVER_MISSING,
                {without_fill.path(), "hipMemsetD8Async"});
  check_failure(open_cuda(cuda.path(), 0, &driver), ATTN_DRIVER_MISSING,
                {cuda.path(), "cuMemsetD8Async", "CUDA 3.2"});
  CHECK(!driver);

  // A failure is not remembered.
  cuda->hidden[0] = 0;
  CHECK(open_cuda(cuda.path(), 0, &driver).ok());
}

TEST_CASE("driver: no device, and a device that is not there", "[driver]") {
  for (const Vendor& v : vendors) {
    MockLibrary none(v.library);
    none->devices = 0;
    std::shared_ptr<Driver> driver;
    std::vector<DeviceInfo> devices;
    CHECK(v.open(none.path(), 0, &driver).code == ATTN_NO_DEVICE);
    CHECK(v.list(none.path(), &devices).code == ATTN_NO_DEVICE);
    CHECK(devices.empty());

    MockLibrary two(v.library);
    check_failure(v.open(two.path(), 2, &driver), ATTN_NO_DEVICE, {"device: 2", v.name, "has 2"});
    check_failure(v.open(two.path(), -1, &driver), ATTN_NO_DEVICE, {"device: -1"});
    CHECK(!driver);

    MockLibrary broken(v.library);
    broken.fail(v.init, 999);
    check_failure(v.open(broken.path(), 0, &driver), ATTN_DRIVER_ERROR, {v.init, "(999)"});
  }
}

TEST_CASE("driver: a library is opened and its table made once", "[driver]") {
  for (const Vendor& v : vendors) {
    MockLibrary library(v.library);
    std::shared_ptr<Driver> a, b;
    std::vector<DeviceInfo> devices;
    REQUIRE(v.open(library.path(), 0, &a).ok());
    REQUIRE(v.open(library.path(), 1, &b).ok());
    REQUIRE(v.list(library.path(), &devices).ok());
    CHECK(library->init_calls == 1);
    CHECK(devices.size() == 2);
    a.reset();
    b.reset();
    CHECK(library->live_contexts == 0);
    REQUIRE(v.open(library.path(), 0, &a).ok());
    CHECK(library->init_calls == 1);
  }
}

TEST_CASE("driver: what a device is", "[driver]") {
  for (const char* name : {"cuda", "cuda_11_3"}) {
    MockLibrary cuda(name);
    std::vector<DeviceInfo> devices;
    REQUIRE(list_cuda(cuda.path(), &devices).ok());
    REQUIRE(devices.size() == 2);
    CHECK(cuda->live_contexts == 0);
    CHECK(devices[1].ordinal == 1);
    CHECK(devices[1].name == "Mock CUDA device");
    CHECK(devices[1].arch == "sm_90");
    CHECK(devices[1].multiprocessors == 132);
    CHECK(devices[1].memory_bytes == int64_t{80} << 30);
    CHECK(devices[1].shared_bytes_max == 232448);
    CHECK(devices[1].l2_bytes == 1 << 20);
    CHECK(devices[1].pci == "0000:0b:00.0");
    CHECK(devices[1].driver_version == "13.1");
  }
  for (const char* name : {"hip", "hip_rocm_5"}) {
    MockLibrary hip(name);
    std::vector<DeviceInfo> devices;
    REQUIRE(list_hip(hip.path(), false, &devices).ok());
    REQUIRE(devices.size() == 2);
    CHECK(devices[0].name == "Mock HIP device");
    CHECK(devices[0].arch == "gfx942");
    CHECK(devices[0].multiprocessors == 304);
    CHECK(devices[0].memory_bytes == int64_t{192} << 30);
    CHECK(devices[0].shared_bytes_max == 65536);
    CHECK(devices[0].driver_version == "6.0.32830");
  }
}

TEST_CASE("driver: hip refuses the emulator, hip-emu takes nothing else", "[driver]") {
  const MockLibrary emulator("hip_emulator"), hip("hip");
  std::shared_ptr<Driver> driver;
  check_failure(open_hip(emulator.path(), false, 0, &driver), ATTN_DRIVER_MISSING,
                {"hip:", emulator.path(), "emulator", "attn_emu_marker"});
  check_failure(open_hip(hip.path(), true, 0, &driver), ATTN_DRIVER_MISSING,
                {"hip-emu:", hip.path(), "attn_emu_marker"});
  CHECK(!driver);
  CHECK(open_hip(emulator.path(), true, 0, &driver).ok());
}

TEST_CASE("driver: hip takes a copy that the process has loaded already", "[driver]") {
  // In a child, since the copy stays open under the name of the real library.
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    void* loaded = dlopen(ATTN_MOCK_DIR "/hip_loaded.so", RTLD_NOW | RTLD_LOCAL);
    if (!loaded) _exit(2);
    std::vector<DeviceInfo> devices;
    const bool found = list_hip(nullptr, false, &devices).ok() && !devices.empty() &&
                       devices[0].name == "Mock HIP device";
    _exit(found ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("driver: memory", "[driver]") {
  for (const Vendor& v : vendors) {
    MockLibrary library(v.library);
    std::shared_ptr<Driver> driver;
    REQUIRE(v.open(library.path(), 1, &driver).ok());
    CHECK(driver->device().ordinal == 1);
    void* memory = nullptr;
    REQUIRE(driver->alloc(1000, &memory).ok());
    CHECK(reinterpret_cast<uintptr_t>(memory) % 256 == 0);
    const std::string in = "a text of some length";
    std::string out(in.size(), '?');
    CHECK(driver->copy_in(memory, in.data(), in.size(), nullptr).ok());
    CHECK(driver->copy_out(out.data(), memory, out.size(), nullptr).ok());
    CHECK(out == in);
    CHECK(driver->fill(memory, 'x', 5, nullptr).ok());
    CHECK(driver->copy_out(out.data(), memory, out.size(), nullptr).ok());
    CHECK(out == "xxxxx" + in.substr(5));
    CHECK(driver->copy(static_cast<char*>(memory) + 100, memory, 6, nullptr).ok());
    out.resize(6);
    CHECK(driver->copy_out(out.data(), static_cast<char*>(memory) + 100, 6, nullptr).ok());
    CHECK(out == "xxxxx" + in.substr(5, 1));
    CHECK(driver->synchronize(nullptr).ok());

    void* untouched = memory;
    check_failure(driver->alloc(size_t{1} << 50, &untouched), ATTN_OUT_OF_MEMORY,
                  {v.alloc, "1125899906842624 bytes", v.prefix, "(2)", "out of memory"});
    CHECK(untouched == memory);
    library.fail(v.copy_in, 1);
    check_failure(driver->copy_in(memory, in.data(), in.size(), nullptr), ATTN_DRIVER_ERROR,
                  {v.copy_in, "21 bytes", "(1)"});
    library.recover();
    CHECK(driver->free(nullptr).ok());
    CHECK(driver->free(memory).ok());
    CHECK(driver->free(memory).code == ATTN_DRIVER_ERROR);
    CHECK(library->live_memory == 0);
  }
}

TEST_CASE("driver: modules, functions, launches", "[driver]") {
  for (const Vendor& v : vendors) {
    MockLibrary library(v.library);
    std::shared_ptr<Driver> driver;
    REQUIRE(v.open(library.path(), 0, &driver).ok());

    Module module = nullptr;
    library.fail(v.load, 209);
    check_failure(driver->load(some_image, &module), ATTN_DRIVER_ERROR,
                  {v.load, "16 bytes", v.prefix, "(209)"});
    CHECK(module == nullptr);
    library.recover();
    REQUIRE(driver->load(some_image, &module).ok());

    Function function = nullptr;
    library.fail(v.function, 500);
    check_failure(driver->function(module, "no_such_kernel", 0, &function), ATTN_DRIVER_ERROR,
                  {v.function, "no_such_kernel", "(500)"});
    CHECK(function == nullptr);
    library.recover();
    REQUIRE(driver->function(module, "some_kernel", 100000, &function).ok());
    if (v.backend == ATTN_BACKEND_CUDA) {
      CHECK(library->attribute_symbol == std::string("some_kernel"));
      CHECK(library->attribute_value == 100000);
    }

    Launch launch;
    launch.function = function;
    launch.grid[0] = 3, launch.grid[1] = 4, launch.grid[2] = 5;
    launch.block[0] = 128, launch.block[1] = 2;
    launch.shared_bytes = 100000;
    std::string kernarg = "parameters, as they are";
    launch.kernarg = kernarg.data();
    launch.kernarg_bytes = kernarg.size();
    int stream = 0;
    REQUIRE(driver->launch(launch, &stream).ok());
    CHECK(library->launches == 1);
    const mock::Launch& seen = library->last;
    CHECK(seen.symbol == std::string("some_kernel"));
    CHECK(std::equal(launch.grid, launch.grid + 3, seen.grid));
    CHECK(std::equal(launch.block, launch.block + 3, seen.block));
    CHECK(seen.shared_bytes == 100000);
    CHECK(seen.stream == &stream);
    CHECK(std::string(reinterpret_cast<const char*>(seen.kernarg), seen.kernarg_bytes) == kernarg);

    library.fail(v.launch, 701);
    check_failure(
        driver->launch(launch, &stream), ATTN_DRIVER_ERROR,
        {v.launch, "grid 3 x 4 x 5", "block 128 x 2 x 1", "100000 bytes", "23 bytes", "(701)"});
    CHECK(library->launches == 1);
    library.recover();

    if (v.backend == ATTN_BACKEND_CUDA) {
      launch.starts_early = true;
      REQUIRE(driver->launch(launch, &stream).ok());
      CHECK(library->early == 1);
      CHECK(library->launches == 2);
      CHECK(std::equal(launch.block, launch.block + 3, seen.block));
      CHECK(seen.shared_bytes == 100000);
      CHECK(seen.stream == &stream);
    }

    Event start = nullptr, stop = nullptr;
    REQUIRE(driver->timing().event_create(&start).ok());
    REQUIRE(driver->timing().event_create(&stop).ok());
    REQUIRE(driver->timing().event_record(start, nullptr).ok());
    REQUIRE(driver->launch(launch, nullptr).ok());
    REQUIRE(driver->timing().event_record(stop, nullptr).ok());
    float milliseconds = 0;
    REQUIRE(driver->timing().event_elapsed(start, stop, &milliseconds).ok());
    CHECK(milliseconds == 1);
    driver->timing().event_destroy(start);
    driver->timing().event_destroy(stop);
    driver->unload(module);
    CHECK(library->live_events == 0);
    CHECK(library->live_modules == 0);
  }
}

TEST_CASE("driver: a graph launches what was captured", "[driver]") {
  for (const Vendor& v : vendors) {
    MockLibrary library(v.library);
    std::shared_ptr<Driver> driver;
    REQUIRE(v.open(library.path(), 0, &driver).ok());
    Module module = nullptr;
    Launch launch;
    REQUIRE(driver->load(some_image, &module).ok());
    REQUIRE(driver->function(module, "some_kernel", 0, &launch.function).ok());
    int kernarg = 7;
    launch.kernarg = &kernarg;
    launch.kernarg_bytes = sizeof kernarg;

    void *stream = nullptr, *other = nullptr;
    REQUIRE(driver->timing().stream_create(&stream).ok());
    REQUIRE(driver->timing().stream_create(&other).ok());
    Graph graph = nullptr;
    const auto work = [&]() -> Status {
      for (unsigned x = 1; x <= 3; ++x) {
        launch.grid[0] = x;
        ATTN_TRY(driver->launch(launch, stream));
      }
      return {};
    };
    REQUIRE(driver->timing().capture(stream, work, &graph).ok());
    CHECK(library->launches == 0);
    CHECK(library->live_graphs == 1);
    REQUIRE(driver->timing().graph_launch(graph, other).ok());
    REQUIRE(driver->timing().graph_launch(graph, other).ok());
    CHECK(library->launches == 6);
    CHECK(library->last.grid[0] == 3);
    driver->timing().graph_destroy(graph);
    CHECK(library->live_graphs == 0);

    // Work that fails ends the capture.
    graph = nullptr;
    check_failure(driver->timing().capture(
                      stream, [] { return Status{ATTN_INTERNAL, "no work"}; }, &graph),
                  ATTN_INTERNAL, {"no work"});
    CHECK(graph == nullptr);
    CHECK(library->live_graphs == 0);
    REQUIRE(driver->timing().capture(stream, work, &graph).ok());
    driver->timing().graph_destroy(graph);
    driver->timing().stream_destroy(stream);
    driver->timing().stream_destroy(other);
    driver->unload(module);
    CHECK(library->live_streams == 0);
    CHECK(driver->timing().with_device([] { return Status{ATTN_INTERNAL, "inside"}; }).text ==
          "inside");
  }
}

TEST_CASE("driver: memory and modules are made beside a capture, and fills are part of it",
          "[driver]") {
  for (const Vendor& v : vendors) {
    MockLibrary library(v.library);
    std::shared_ptr<Driver> driver;
    REQUIRE(v.open(library.path(), 0, &driver).ok());
    void *stream = nullptr, *memory = nullptr;
    Module module = nullptr;
    Function function;
    Graph graph = nullptr;
    REQUIRE(driver->timing().stream_create(&stream).ok());
    const auto work = [&]() -> Status {
      ATTN_TRY(driver->alloc(16, &memory));
      std::memset(memory, 1, 16);
      ATTN_TRY(driver->load(some_image, &module));
      ATTN_TRY(driver->function(module, "some_kernel", 0, &function));
      ATTN_TRY(driver->fill(memory, 7, 16, stream));
      void* other = nullptr;
      ATTN_TRY(driver->alloc(16, &other));
      return driver->free(other);
    };
    REQUIRE(driver->timing().capture(stream, work, &graph).ok());
    CHECK(*static_cast<char*>(memory) == 1);
    REQUIRE(driver->timing().graph_launch(graph, stream).ok());
    CHECK(*static_cast<char*>(memory) == 7);
    CHECK(library->live_memory == 1);
    driver->timing().graph_destroy(graph);
    driver->timing().stream_destroy(stream);
    driver->unload(module);
    REQUIRE(driver->free(memory).ok());

    // The thread's mode is what it was: others' calls are still refused.
    REQUIRE(driver->timing().stream_create(&stream).ok());
    const auto raw = library.symbol<int (*)()>("attn_mock_try_alloc");
    int code = 0;
    REQUIRE(driver->timing()
                .capture(
                    stream,
                    [&]() -> Status {
                      ATTN_TRY(driver->alloc(16, &memory));
                      code = raw();
                      return {};
                    },
                    &graph)
                .ok());
    CHECK(code == 900);
    driver->timing().graph_destroy(graph);
    driver->timing().stream_destroy(stream);
    REQUIRE(driver->free(memory).ok());
  }
}

TEST_CASE("driver: one that knows no graphs serves everything else", "[driver]") {
  MockLibrary hip("hip_rocm_5"), cuda("cuda");
  mock::set_text(cuda->hidden, "cuStreamBeginCapture");
  std::shared_ptr<Driver> driver;
  void* stream = nullptr;
  REQUIRE(open_hip(hip.path(), false, 0, &driver).ok());
  check_failure(driver->timing().stream_create(&stream), ATTN_UNSUPPORTED,
                {"hipStreamCreateWithFlags"});
  REQUIRE(open_cuda(cuda.path(), 0, &driver).ok());
  REQUIRE(driver->timing().stream_create(&stream).ok());
  Graph graph = nullptr;
  check_failure(driver->timing().capture(
                    stream, [] { return Status{}; }, &graph),
                ATTN_UNSUPPORTED, {"cuStreamBeginCapture"});
  CHECK(graph == nullptr);
  driver->timing().stream_destroy(stream);
}

TEST_CASE("driver: cuda uses the application's context, else the primary one", "[driver]") {
  MockLibrary cuda("cuda");
  const auto set_context = cuda.symbol<void (*)(int)>("attn_mock_set_context");
  const auto depth = cuda.symbol<int (*)()>("attn_mock_context_depth");
  std::shared_ptr<Driver> primary, application;
  void* memory = nullptr;

  REQUIRE(open_cuda(cuda.path(), 1, &primary).ok());
  CHECK(cuda->live_contexts == 1);
  REQUIRE(primary->alloc(16, &memory).ok());
  REQUIRE(primary->free(memory).ok());
  CHECK(cuda->enters == 2);
  CHECK(depth() == 0);
  CHECK(primary->alloc(size_t{1} << 50, &memory).code == ATTN_OUT_OF_MEMORY);
  CHECK(depth() == 0);

  set_context(0);
  REQUIRE(open_cuda(cuda.path(), {}, &application).ok());
  CHECK(application->device().ordinal == 0);
  CHECK(cuda->live_contexts == 1);
  const int before = cuda->enters;
  REQUIRE(application->alloc(16, &memory).ok());
  REQUIRE(application->free(memory).ok());
  CHECK(cuda->enters == before);  // current already
  REQUIRE(primary->synchronize(nullptr).ok());
  CHECK(cuda->enters == before + 1);
  CHECK(depth() == 1);

  // A device that is named is that one, in the application's context where this is of it.
  for (int current : {0, 1}) {
    for (int named : {0, 1}) {
      set_context(current);
      std::shared_ptr<Driver> driver;
      REQUIRE(open_cuda(cuda.path(), named, &driver).ok());
      CHECK(driver->device().ordinal == named);
      CHECK(cuda->live_contexts == (named == current ? 1 : 2));
      REQUIRE(driver->alloc(16, &memory).ok());
      CHECK(cuda->allocated_in == (named == current ? 0x2000 : 0x1000) + named);
      REQUIRE(driver->free(memory).ok());
      CHECK(depth() == 1);
    }
  }

  primary.reset();
  application.reset();
  CHECK(cuda->live_contexts == 0);
}

namespace {

// What makes a device current for the calling thread, as an application does, and what tells it.
void set_current(const MockLibrary& library, const Vendor& v, int device) {
  if (v.backend == ATTN_BACKEND_CUDA)
    library.symbol<void (*)(int)>("attn_mock_set_context")(device);
  else
    library.symbol<int (*)(int)>("hipSetDevice")(device);
}
long current_place(const MockLibrary& library) {
  return library.symbol<long (*)()>("attn_mock_place")();
}

}  // namespace

TEST_CASE("driver: every call works on its device and leaves the thread's as it was", "[driver]") {
  for (const Vendor& v : vendors) {
    for (int device : {0, 1}) {
      INFO(v.name << " device " << device);
      MockLibrary library(v.library);
      std::shared_ptr<Driver> driver;
      REQUIRE(v.open(library.path(), device, &driver).ok());
      const long here = v.backend == ATTN_BACKEND_CUDA ? 0x1000 + device : device;
      set_current(library, v, 1 - device);
      const long before = current_place(library);
      REQUIRE(before != here);
      const auto good = [&](const Status& status) {
        INFO(status.text);
        CHECK(status.ok());
        CHECK(current_place(library) == before);
      };

      void *memory = nullptr, *stream = nullptr;
      good(driver->alloc(16, &memory));
      CHECK(library->allocated_in == here);
      good(driver->timing().stream_create(&stream));
      char text[16] = "fifteen letters";
      for (void* in : {stream, static_cast<void*>(nullptr)}) {
        good(driver->copy_in(memory, text, 16, in));
        good(driver->copy_out(text, memory, 16, in));
        good(driver->fill(memory, 0, 8, in));
        good(driver->copy(memory, static_cast<char*>(memory) + 8, 8, in));
        good(driver->synchronize(in));
      }

      Module module = nullptr;
      Launch launch;
      launch.kernarg = text;
      launch.kernarg_bytes = sizeof text;
      good(driver->load(some_image, &module));
      good(driver->function(module, "some_kernel", 1000, &launch.function));
      for (bool early : {false, true}) {
        launch.starts_early = early;
        library->launched_in = -1;
        good(driver->launch(launch, stream));
        CHECK(library->launched_in == here);
        good(driver->launch(launch, nullptr));
        CHECK(library->launched_in == here);
      }

      Event start = nullptr, stop = nullptr;
      float milliseconds = 0;
      good(driver->timing().event_create(&start));
      good(driver->timing().event_create(&stop));
      good(driver->timing().event_record(start, stream));
      good(driver->timing().event_record(stop, nullptr));
      good(driver->timing().event_elapsed(start, stop, &milliseconds));
      driver->timing().event_destroy(start);
      driver->timing().event_destroy(stop);
      Graph graph = nullptr;
      good(
          driver->timing().capture(stream, [&] { return driver->launch(launch, stream); }, &graph));
      good(driver->timing().graph_launch(graph, stream));
      CHECK(library->launched_in == here);
      good(driver->timing().with_device([&] {
        CHECK(current_place(library) == here);
        return Status{};
      }));
      check_failure(driver->alloc(size_t{1} << 50, &memory), ATTN_OUT_OF_MEMORY, {});
      good({});
      driver->timing().graph_destroy(graph);
      driver->timing().stream_destroy(stream);
      driver->unload(module);
      good(driver->free(memory));
      CHECK(library->live_modules == 0);

      // Where the device is current already, nothing is made current.
      set_current(library, v, device);
      if (v.backend == ATTN_BACKEND_HIP) {
        const int enters = library->enters;
        CHECK(driver->synchronize(nullptr).ok());
        CHECK(library->enters == enters);
      }
      driver.reset();
      CHECK(library->live_contexts == 0);
    }
  }
}

TEST_CASE("driver: the device of the options is the context's, whatever is current", "[driver]") {
  for (const Vendor& v : vendors) {
    for (int device : {0, 1}) {
      INFO(v.name << " device " << device);
      MockLibrary library(v.library);
      const auto driver_of = [&](attn_context_options options) {
        options.struct_size = sizeof options;
        options.driver_path = library.path();
        attn_context* context = nullptr;
        REQUIRE(attn_context_create(v.backend, &options, &context) == ATTN_OK);
        const std::shared_ptr<Driver> driver = context->context->driver;
        attn_context_destroy(context);
        return driver;
      };
      attn_context_options named{}, unset{}, old{};
      named.has_device = 1;
      named.device = old.device = device;
      set_current(library, v, 1 - device);
      const long before = current_place(library);
      CHECK(driver_of(named)->device().ordinal == device);
      if (device != 0) CHECK(driver_of(old)->device().ordinal == device);
      // Unset: cuda goes by the current context, hip takes device 0.
      CHECK(driver_of(unset)->device().ordinal ==
            (v.backend == ATTN_BACKEND_CUDA ? 1 - device : 0));
      CHECK(current_place(library) == before);
    }
  }
  attn_context_options options{};
  options.struct_size = sizeof options;
  options.has_device = 2;
  attn_context* context = nullptr;
  check_failure({attn_context_create(ATTN_BACKEND_CUDA, &options, &context), attn_last_error()},
                ATTN_INVALID_ARGUMENT, {"options.has_device is 2", "0 to 1"});
}

namespace {

// What merge_cuda and merge_gfx942 do, in double, for f32.
void merge_on_host(const mock::Launch& launch) {
  attn_merge_kernarg a;
  const bool sm80 = launch.symbol == std::string("merge_cuda");
  if (!sm80) REQUIRE(launch.symbol == std::string("merge_gfx942"));
  REQUIRE(launch.kernarg_bytes == (sm80 ? sizeof(attn_merge_cuda_kernarg) : sizeof a));
  std::memcpy(&a, launch.kernarg, sizeof a);
  REQUIRE(a.part_type == attn_element_f32);
  REQUIRE(a.out_type == attn_element_f32);
  // sm80: warps over all rows; gfx942: waves over the queries of a (head, batch entry) of the grid.
  const long long covered = (long long)launch.grid[0] * launch.block[0] / (sm80 ? 32 : 64);
  for (long long row = 0; row < a.rows; ++row) {
    const long long i = row % a.seqlen_q, h = row / a.seqlen_q % a.heads,
                    b = row / a.seqlen_q / a.heads;
    const bool reached =
        sm80 ? row < covered : i < covered && h < launch.grid[1] && b < launch.grid[2];
    if (!reached) continue;
    const auto at = [&](const long long(&stride)[3]) {
      return b * stride[0] + i * stride[1] + h * stride[2];
    };
    double highest = -INFINITY, sum = 0;
    for (int s = 0; s < a.num_parts; ++s) highest = std::max(highest, double(a.lses[s][row]));
    const auto weight = [&](int s) {
      return a.lses[s][row] == -INFINITY ? 0.0 : std::exp(a.lses[s][row] - highest);
    };
    for (int s = 0; s < a.num_parts; ++s) sum += weight(s);
    if (a.lse) a.lse[row] = float(highest + std::log(sum));
    for (int d = 0; d < a.head_dim; ++d) {
      double x = 0;
      for (int s = 0; s < a.num_parts; ++s) {
        if (weight(s) > 0)
          x += weight(s) * static_cast<const float*>(a.outs[s])[at(a.part_stride) + d];
      }
      static_cast<float*>(a.out)[at(a.out_stride) + d] = sum > 0 ? float(x / sum) : 0.0f;
    }
  }
}

struct OpenContext {
  attn_context* context = nullptr;
  OpenContext(attn_backend backend, const char* path, attn_context_options options = {}) {
    options.struct_size = sizeof options;
    options.driver_path = path;
    INFO(attn_last_error());
    REQUIRE(attn_context_create(backend, &options, &context) == ATTN_OK);
  }
  ~OpenContext() { attn_context_destroy(context); }
};

constexpr int B = 2, H = 3, S = 5, D = 40, parts = 3;

// Merges the same parts on any backend; out, then lse. Row 0 sees nothing in any part; in row 1
// part 1 contributes nothing and holds NaN, which must not reach the result.
std::vector<float> merged(attn_context* context, attn_dtype part_type, attn_dtype out_type) {
  attn_merge_problem problem{};
  problem.struct_size = sizeof problem;
  problem.batch = B, problem.heads_q = H, problem.seqlen_q = S, problem.head_dim_v = D;
  problem.num_parts = parts;
  problem.part_type = part_type;
  problem.out_type = out_type;
  attn_plan* plan = nullptr;
  const attn_status status = attn_plan_create_merge(context, &problem, &plan);
  INFO(attn_last_error());
  REQUIRE(status == ATTN_OK);

  constexpr int outs = B * S * H * D, lses = B * H * S;
  constexpr float inf = std::numeric_limits<float>::infinity();
  const auto number = [](size_t i) {
    return float(int(i * 2654435761u >> 20 & 4095) - 2048) / 1024;
  };
  const auto copied = [&](const void* host, size_t bytes) {
    void* memory = nullptr;
    REQUIRE(attn_alloc(context, bytes, &memory) == ATTN_OK);
    REQUIRE(attn_copy_in(context, memory, host, bytes, nullptr) == ATTN_OK);
    return memory;
  };
  const void* part_outs[parts];
  const float* part_lses[parts];
  for (int s = 0; s < parts; ++s) {
    std::vector<unsigned char> out(outs * dtype_bytes(part_type));
    std::vector<float> lse(lses);
    for (int i = 0; i < outs; ++i) {
      const bool row_1 = i >= H * D && i < H * D + D;  // batch 0, query 1, head 0
      encode_element(part_type, out.data(), i, row_1 && s == 1 ? NAN : number(i + s * 7919), false);
    }
    for (int i = 0; i < lses; ++i)
      lse[i] = i == 0 || (i == 1 && s == 1) ? -inf : 4 * number(i * 31 + s);
    part_outs[s] = copied(out.data(), out.size());
    part_lses[s] = static_cast<const float*>(copied(lse.data(), lse.size() * 4));
  }
  std::vector<unsigned char> out(outs * dtype_bytes(out_type), 0xff);
  std::vector<float> lse(lses, NAN);
  attn_merge_args args{};
  args.struct_size = sizeof args;
  args.num_parts = parts;
  args.outs = part_outs;
  args.lses = part_lses;
  args.out = copied(out.data(), out.size());
  args.lse = static_cast<float*>(copied(lse.data(), lse.size() * 4));
  const uint64_t before = attn_launch_count(attn_plan_kernel(plan));
  CHECK(attn_run_merge(plan, &args, nullptr) == ATTN_OK);
  CHECK(attn_launch_count(attn_plan_kernel(plan)) == before + 1);
  CHECK(attn_copy_out(context, out.data(), args.out, out.size(), nullptr) == ATTN_OK);
  CHECK(attn_copy_out(context, lse.data(), args.lse, lse.size() * 4, nullptr) == ATTN_OK);
  for (int s = 0; s < parts; ++s) {
    CHECK(attn_free(context, const_cast<void*>(part_outs[s])) == ATTN_OK);
    CHECK(attn_free(context, const_cast<float*>(part_lses[s])) == ATTN_OK);
  }
  CHECK(attn_free(context, args.out) == ATTN_OK);
  CHECK(attn_free(context, args.lse) == ATTN_OK);
  attn_plan_destroy(plan);

  std::vector<float> result(outs);
  decode_row(out_type, out.data(), 0, outs, result.data());
  result.insert(result.end(), lse.begin(), lse.end());
  return result;
}

// `bound`: of the difference, relative to the larger of 1 and the expected value.
void compare_with_reference(attn_context* context, attn_dtype part_type, attn_dtype out_type,
                            float bound) {
  OpenContext reference(ATTN_BACKEND_REFERENCE, nullptr);
  const std::vector<float> got = merged(context, part_type, out_type);
  const std::vector<float> expected = merged(reference.context, part_type, out_type);
  for (size_t i = 0; i < got.size(); ++i) {
    const bool close = got[i] == expected[i] || std::abs(got[i] - expected[i]) <=
                                                    bound * std::max(1.0f, std::abs(expected[i]));
    if (!close) {
      FAIL(dtype_name(part_type) << " to " << dtype_name(out_type) << ", element " << i << ": "
                                 << got[i] << ", expected " << expected[i]);
    }
  }
}

bool embedded(const char* kernel) {
  return std::any_of(images().begin(), images().end(),
                     [&](const Image& image) { return std::strcmp(image.name, kernel) == 0; });
}

}  // namespace

TEST_CASE("driver: a merge through the C ABI on the stand-ins", "[driver]") {
  int ran = 0;
  for (const Vendor& v : vendors) {
    if (!embedded(v.merge)) continue;
    ++ran;
    MockLibrary library(v.library);
    library->kernel = merge_on_host;
    {
      OpenContext device(v.backend, library.path());
      compare_with_reference(device.context, ATTN_F32, ATTN_F32, 1e-6f);
      CHECK(library->launches == 1);
    }
    CHECK(library->live_memory == 0);
    CHECK(library->live_modules == 0);
    CHECK(library->live_contexts == 0);
  }
  if (ran < int(std::size(vendors))) ATTN_SKIP("this build lacks CUDA or gfx9 kernels");
}

TEST_CASE("driver: a run through the C ABI on another device than the current one", "[driver]") {
  for (const Vendor& v : vendors) {
    for (int device : {0, 1}) {
      INFO(v.name << " device " << device);
      MockLibrary library(v.library);
      library->kernel = merge_on_host;
      attn_context_options options{};
      options.has_device = 1;
      options.device = device;
      options.kernel_file = "some.hsaco";  // no build lacks it
      {
        OpenContext context(v.backend, library.path(), options);
        set_current(library, v, 1 - device);
        const long before = current_place(library);
        compare_with_reference(context.context, ATTN_F32, ATTN_F32, 1e-6f);
        CHECK(library->launches == 1);
        CHECK(library->launched_in == (v.backend == ATTN_BACKEND_CUDA ? 0x1000 + device : device));
        CHECK(current_place(library) == before);
      }
      CHECK(library->live_memory == 0);
      CHECK(library->live_modules == 0);
      CHECK(library->live_contexts == 0);
    }
  }
}

TEST_CASE("driver: block masks lie in device memory and go with the mask", "[driver]") {
  attn_block_mask_shape shape{};
  shape.struct_size = sizeof shape;
  shape.seqlen_q = shape.seqlen_kv = 300;
  shape.block_q = shape.block_k = 64;
  const int64_t lengths[] = {100, 200};
  const auto documents = [&](attn_context* context, attn_block_mask** mask) {
    return attn_block_mask_from_documents(context, &shape, lengths, 2, 1, mask);
  };
  attn_args want{}, got{};
  want.struct_size = got.struct_size = sizeof want;
  OpenContext host(ATTN_BACKEND_CPU, nullptr);
  attn_block_mask* on_host = nullptr;
  REQUIRE(documents(host.context, &on_host) == ATTN_OK);
  REQUIRE(attn_block_mask_apply(on_host, nullptr, &want) == ATTN_OK);
  for (const Vendor& v : vendors) {
    MockLibrary library(v.library);
    OpenContext device(v.backend, library.path());
    attn_block_mask* mask = nullptr;
    REQUIRE(documents(device.context, &mask) == ATTN_OK);
    REQUIRE(attn_block_mask_apply(mask, nullptr, &got) == ATTN_OK);
    CHECK(library->live_memory == 1);
    std::vector<uint8_t> kinds(25);
    REQUIRE(attn_copy_out(device.context, kinds.data(), got.block_kinds, 25, nullptr) == ATTN_OK);
    CHECK(std::equal(kinds.begin(), kinds.end(), want.block_kinds));
    attn_block_mask_destroy(mask);
    CHECK(library->live_memory == 0);

    mask = nullptr;
    library.fail(v.alloc, 2);
    CHECK(documents(device.context, &mask) == ATTN_OUT_OF_MEMORY);
    library.recover();
    library.fail(v.copy_in, 1);
    CHECK(documents(device.context, &mask) == ATTN_DRIVER_ERROR);
    library.recover();
    CHECK(mask == nullptr);
    CHECK(library->live_memory == 0);

    // From an array on the device: launched where there is a kernel.
    const std::vector<uint8_t> dense(300 * 300);
    const attn_status status =
        attn_block_mask_from_dense(device.context, &shape, dense.data(), nullptr, &mask);
    if (v.backend == ATTN_BACKEND_CUDA && embedded("mask_cuda")) {
      CHECK(status == ATTN_OK);
      CHECK(std::string(library->last.symbol) == "mask_cuda");
      CHECK(library->last.grid[0] == 25);
      CHECK(library->live_memory == 1);
      attn_block_mask_destroy(mask);
    } else {
      CHECK(status == ATTN_UNSUPPORTED);
    }
    CHECK(library->live_memory == 0);
  }
  attn_block_mask_destroy(on_host);
}

TEST_CASE("driver: merge_cuda on an NVIDIA device", "[driver][gpu]") {
  if (!embedded("merge_cuda")) ATTN_SKIP("this build has no CUDA kernels");
  std::vector<DeviceInfo> devices;
  if (const Status status = list_cuda(nullptr, &devices); !status.ok()) ATTN_SKIP(status.text);
  OpenContext device(ATTN_BACKEND_CUDA, nullptr);
  const uint64_t before = attn_launch_count("merge_cuda");
  for (attn_dtype part : {ATTN_F32, ATTN_F16, ATTN_BF16}) {
    compare_with_reference(device.context, part, ATTN_F32, 1e-6f);
    compare_with_reference(device.context, part, ATTN_F16, 1.0f / 1024);
    compare_with_reference(device.context, part, ATTN_BF16, 1.0f / 128);
  }
  CHECK(attn_launch_count("merge_cuda") == before + 9);
}

TEST_CASE("driver: an NVIDIA device loads every image made for it", "[driver][gpu]") {
  std::shared_ptr<Driver> driver;
  if (const Status status = open_cuda(nullptr, 0, &driver); !status.ok()) ATTN_SKIP(status.text);
  for (const Image& image : images()) {
    if (!arch_runs_on(image.arch, driver->device().arch)) continue;
    INFO(image.name << " for " << image.arch);
    Module module = nullptr;
    const Status loaded = driver->load(image.bytes(), &module);
    INFO(loaded.text);
    REQUIRE(loaded.ok());
    Function function = nullptr;
    CHECK(driver->function(module, image.name, 0, &function).ok());
    driver->unload(module);
  }
}

TEST_CASE("driver: failures come through the C ABI", "[driver]") {
  int ran = 0;
  for (const Vendor& v : vendors) {
    MockLibrary library(v.library);
    OpenContext device(v.backend, library.path());
    attn_merge_problem problem{};
    problem.struct_size = sizeof problem;
    problem.batch = 1, problem.heads_q = 1, problem.seqlen_q = 1, problem.head_dim_v = 8;
    problem.num_parts = 2;
    problem.part_type = ATTN_F32;
    attn_plan* plan = nullptr;
    const auto create = [&](attn_context* context) {
      const attn_status status = attn_plan_create_merge(context, &problem, &plan);
      if (status != ATTN_OK) CHECK(plan == nullptr);
      return Status{status, attn_last_error()};
    };

    void* memory = nullptr;
    CHECK(attn_alloc(device.context, size_t{1} << 50, &memory) == ATTN_OUT_OF_MEMORY);
    CHECK(memory == nullptr);
    CHECK(has(attn_last_error(), v.alloc));

    if (!embedded(v.merge)) {
      check_failure(create(device.context), ATTN_UNSUPPORTED, {"merge", v.name, "without"});
      continue;
    }
    ++ran;
    library.fail(v.load, 209);
    check_failure(create(device.context), ATTN_DRIVER_ERROR, {v.load, v.prefix, "(209)"});
    library.fail(v.function, 500);
    check_failure(create(device.context), ATTN_DRIVER_ERROR, {v.function, v.merge, "(500)"});
    library.recover();
    problem.num_parts = 17;
    check_failure(create(device.context), ATTN_UNSUPPORTED, {v.merge, "17", "16"});

    // A device that there is no code for.
    MockLibrary old(v.library);
    old->compute_capability[0] = 75;
    mock::set_text(old->gcn_arch, "gfx908");
    OpenContext other(v.backend, old.path());
    problem.num_parts = 2;
    check_failure(create(other.context), ATTN_UNSUPPORTED,
                  {"merge", join("has code for ", v.other_arch), v.image_arch});
    CHECK(old->live_modules == 0);

    // A launch that fails.
    REQUIRE(create(device.context).code == ATTN_OK);
    REQUIRE(attn_alloc(device.context, 256, &memory) == ATTN_OK);
    const void* outs[] = {memory, memory};
    const float* lses[] = {static_cast<float*>(memory), static_cast<float*>(memory)};
    attn_merge_args args{sizeof args, 2, outs, lses, static_cast<char*>(memory) + 128, nullptr};
    const uint64_t before = attn_launch_count(v.merge);
    // merge_cuda starts early.
    const std::string launch = join(v.launch, v.backend == ATTN_BACKEND_CUDA ? "Ex" : "");
    library.fail(launch.c_str(), 719);
    check_failure({attn_run_merge(plan, &args, nullptr), attn_last_error()}, ATTN_DRIVER_ERROR,
                  {launch, "(719)"});
    CHECK(attn_launch_count(v.merge) == before);
    library.recover();
    CHECK(attn_free(device.context, memory) == ATTN_OK);
    attn_plan_destroy(plan);
  }
  if (ran < int(std::size(vendors))) ATTN_SKIP("this build lacks CUDA or gfx9 kernels");
}

TEST_CASE("driver: kernels from a file", "[driver]") {
  for (const Vendor& v : vendors) {
    MockLibrary library(v.library);
    attn_context_options options{};
    options.struct_size = sizeof options;
    options.driver_path = library.path();
    options.kernel_file = "some.hsaco";
    attn_context* context = nullptr;
    library.fail(v.load_file, 301);
    check_failure({attn_context_create(v.backend, &options, &context), attn_last_error()},
                  ATTN_DRIVER_ERROR, {v.load_file, "some.hsaco", "(301)"});
    CHECK(context == nullptr);
    library.recover();
    REQUIRE(attn_context_create(v.backend, &options, &context) == ATTN_OK);
    CHECK(library->live_modules == 1);

    // The file stands in for what the build may lack, and only for what it has.
    attn_merge_problem problem{};
    problem.struct_size = sizeof problem;
    problem.batch = 1, problem.heads_q = 1, problem.seqlen_q = 1, problem.head_dim_v = 8;
    problem.num_parts = 2;
    problem.part_type = ATTN_F32;
    attn_plan* plan = nullptr;
    library.fail(v.function, 500);
    check_failure({attn_plan_create_merge(context, &problem, &plan), attn_last_error()},
                  ATTN_UNSUPPORTED, {"some.hsaco", v.merge, "(500)"});
    library.recover();
    REQUIRE(attn_plan_create_merge(context, &problem, &plan) == ATTN_OK);
    CHECK(library->live_modules == 1);
    attn_plan_destroy(plan);
    attn_context_destroy(context);
    CHECK(library->live_modules == 0);

    for (attn_backend backend : {ATTN_BACKEND_AUTO, ATTN_BACKEND_CPU, ATTN_BACKEND_REFERENCE}) {
      options.driver_path = library.path();
      check_failure({attn_context_create(backend, &options, &context), attn_last_error()},
                    ATTN_INVALID_ARGUMENT, {"options.driver_path", attn_backend_string(backend)});
      options.driver_path = nullptr;
      check_failure({attn_context_create(backend, &options, &context), attn_last_error()},
                    ATTN_INVALID_ARGUMENT, {"options.kernel_file", attn_backend_string(backend)});
    }
  }
}

TEST_CASE("attn_check copies what it reads of a device's memory", "[driver]") {
  test::on_every_backend([](attn_context* context, const MockLibrary* library) {
    if (!library) return;
    const bool hip = attn_context_backend(context) == ATTN_BACKEND_HIP;
    auto segment = make<attn_segment>();
    segment.k_type = segment.v_type = ATTN_BF16;
    segment.seqlen = 64;
    auto p = make<attn_problem>();
    p.batch = p.heads_q = p.heads_kv = 1;
    p.head_dim = p.seqlen_q = 64;
    p.q_type = ATTN_BF16;
    p.num_segments = 1;
    p.segments = &segment;
    p.has_kv_begin = 1;
    attn_plan* plan = nullptr;
    const attn_status made = attn_plan_create(context, &p, &plan);
    if (made == ATTN_UNSUPPORTED) return;  // kernels of cuda may not take kv_begin
    REQUIRE(made == ATTN_OK);
    // Nothing is at these addresses, and a copy from there fails as the stand-in is told to.
    const auto at = [](uintptr_t address) { return reinterpret_cast<const void*>(address); };
    auto kv = make<attn_segment_args>();
    kv.k = at(0x10000);
    kv.v = at(0x20000);
    auto args = make<attn_args>();
    args.q = at(0x30000);
    args.out = const_cast<void*>(at(0x40000));
    args.kv_begin = static_cast<const int32_t*>(at(0x50000));
    args.num_segments = 1;
    args.segments = &kv;
    mock::set_text((*library)->failing, hip ? "hipMemcpyDtoHAsync" : "cuMemcpyDtoHAsync");
    (*library)->code = 1;
    CHECK(attn_check(plan, &args, nullptr) == ATTN_DRIVER_ERROR);
    (*library)->failing[0] = 0;
    (*library)->code = 0;
    attn_plan_destroy(plan);
  });
}
