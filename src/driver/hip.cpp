// The HIP runtime API, through libamdhip64 or the emulator's stand-in for it.
#include <cstdlib>
#include <cstring>

#include "driver/gpu_driver.h"

namespace attn {
namespace {

constexpr const char* emulator_marker = "attn_emu_marker";
constexpr const char* emulator_file = "libattn-hipemu.so";

// Where hipDeviceProp_t has what we read. The struct grew in ROCm 6, which exports both
// generations.
struct PropertiesLayout {
  const char* function;
  size_t memory, shared, multiprocessors, arch;
};
constexpr PropertiesLayout properties_layouts[] = {
    {"hipGetDevicePropertiesR0600", 288, 296, 388, 1160},
    {"hipGetDeviceProperties", 256, 264, 336, 396},
};
constexpr size_t properties_capacity = 16384;  // ROCm 6: 1472 bytes
constexpr size_t properties_text = 256;        // of name, at 0, and of gcnArchName

struct HipCalls : GpuCalls {
  Call<int*> get_device;
  Call<int> set_device;
  Call<void*, int> properties;
  const PropertiesLayout* layout = nullptr;
  const char* (*error_name)(int) = nullptr;
  const char* (*error_string)(int) = nullptr;
  const char* (*last_fault)() = nullptr;  // the emulator's sentence, or null on hardware

  std::string error(int code) const override {
    const char* name = error_name(code);
    const char* sentence = error_string(code);
    std::string text = join(name ? name : "error", " (", code, ")");
    if (sentence) text += join(": ", sentence);
    if (const char* fault = last_fault ? last_fault() : ""; *fault) text += join(": ", fault);
    return text;
  }
};

// Where ROCm is that the loader does not know of, in this order.
std::vector<LibraryFolder> rocm_folders() {
  std::vector<LibraryFolder> folders;
  const char* rocm = std::getenv("ROCM_PATH");
  if (rocm && *rocm) folders.push_back({join(rocm, "/lib"), "$ROCM_PATH/lib"});
  folders.push_back({"/opt/rocm/lib", "/opt/rocm/lib"});
  // The one of AMD's Python packages, next to libattn's package.
  const std::string wheel = beside_own_folder("_rocm_sdk_core/lib");
  if (!wheel.empty()) folders.push_back({wheel, wheel});
  return folders;
}

Status open_hip_library(const char* path, void** library) {
  if (path) return open_library(path, library);
  constexpr const char* loaded[] = {"libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6",
                                    "libamdhip64.so.5"};
  for (const char* name : loaded) {
    if ((*library = find_open_library(name))) return {};
  }
  return open_first({{"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"}, rocm_folders()},
                    library);
}

Status load_hip(const char* path, bool emulator, HipCalls* c) {
  const char* backend = emulator ? "hip-emu" : "hip";
  void* library = nullptr;
  if (Status status = open_hip_library(path, &library); !status.ok()) {
    return {status.code, join(backend, ": ", status.text)};
  }
  const std::string file = library_file(library, path ? path : "libamdhip64.so");
  const auto missing = [&](const char* name) {
    return Status{ATTN_DRIVER_MISSING, join(backend, ": ", file, " has no ", name)};
  };
  const bool marked = find_symbol(library, emulator_marker) != nullptr;
  if (marked && !emulator) {
    return {ATTN_DRIVER_MISSING, join("hip: ", file, " is the gfx9 emulator (it exports ",
                                      emulator_marker, "), which only the backend hip-emu opens")};
  }
  if (!marked && emulator) return missing(emulator_marker);

  const Symbol symbols[] = {
      {c->init, "hipInit"},
      {c->driver_version, "hipDriverGetVersion"},
      {c->device_count, "hipGetDeviceCount"},
      {c->device_get, "hipDeviceGet"},
      {c->get_device, "hipGetDevice"},
      {c->set_device, "hipSetDevice"},
      {c->alloc, "hipMalloc"},
      {c->free, "hipFree"},
      {c->copy_in, "hipMemcpyHtoDAsync"},
      {c->copy_out, "hipMemcpyDtoHAsync"},
      {c->fill, "hipMemsetD8Async"},
      {c->synchronize, "hipStreamSynchronize"},
      {c->module_load, "hipModuleLoadData"},
      {c->module_load_file, "hipModuleLoad"},
      {c->module_unload, "hipModuleUnload"},
      {c->module_function, "hipModuleGetFunction"},
      {c->launch, "hipModuleLaunchKernel"},
      {c->event_create, "hipEventCreateWithFlags"},
      {c->event_destroy, "hipEventDestroy"},
      {c->event_record, "hipEventRecord"},
      {c->event_synchronize, "hipEventSynchronize"},
      {c->event_elapsed, "hipEventElapsedTime"},
  };
  for (const Symbol& symbol : symbols) {
    *symbol.pointer = find_symbol(library, symbol.name);
    if (!*symbol.pointer) return missing(symbol.name);
  }
  const Symbol optional[] = {
      {c->exchange_capture_mode, "hipThreadExchangeStreamCaptureMode"},
      {c->copy, "hipMemcpyDtoDAsync"},
      {c->stream_create, "hipStreamCreateWithFlags"},
      {c->stream_destroy, "hipStreamDestroy"},
      {c->capture_begin, "hipStreamBeginCapture"},
      {c->capture_end, "hipStreamEndCapture"},
      {c->graph_instantiate, "hipGraphInstantiate"},
      {c->graph_destroy, "hipGraphDestroy"},
      {c->graph_launch, "hipGraphLaunch"},
      {c->graph_exec_destroy, "hipGraphExecDestroy"},
  };
  for (const Symbol& symbol : optional) *symbol.pointer = find_symbol(library, symbol.name);
  for (const PropertiesLayout& layout : properties_layouts) {
    *Symbol(c->properties, layout.function).pointer = find_symbol(library, layout.function);
    c->layout = &layout;
    if (c->properties.pointer) break;
  }
  if (!c->properties.pointer) return missing(properties_layouts[0].function);
  // Texts, not codes: these two return const char*.
  c->error_name =
      reinterpret_cast<decltype(c->error_name)>(find_symbol(library, "hipGetErrorName"));
  c->error_string =
      reinterpret_cast<decltype(c->error_string)>(find_symbol(library, "hipGetErrorString"));
  if (!c->error_name) return missing("hipGetErrorName");
  if (!c->error_string) return missing("hipGetErrorString");
  if (emulator) {
    c->last_fault =
        reinterpret_cast<decltype(c->last_fault)>(find_symbol(library, "attn_emu_last_fault"));
    if (!c->last_fault) return missing("attn_emu_last_fault");
  }
  return c->run(c->init, 0u, 0u);
}

Status get_calls(const char* path, bool emulator, const HipCalls** calls) {
  std::string installed;
  if (emulator && !path) {
    installed = installed_file(emulator_file);
    if (installed.empty())
      return {ATTN_DRIVER_MISSING,
              join("hip-emu: ", emulator_file, " is not next to libattn (", own_folder(),
                   "); driver_path (attn --driver) may name it")};
    path = installed.c_str();
  }
  return load_once<HipCalls>(
      join(emulator ? "emulator " : "", path ? path : ""),
      [&](HipCalls* fresh) { return load_hip(path, emulator, fresh); }, calls);
}

template <class T>
T read(const unsigned char* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

std::string read_text(const unsigned char* at) {
  const char* text = reinterpret_cast<const char*>(at);
  return {text, strnlen(text, properties_text)};
}

Status describe(const HipCalls& c, int ordinal, DeviceInfo* info) {
  std::vector<unsigned char> properties(properties_capacity);
  ATTN_TRY(c.run(c.properties, ordinal, properties.data(), ordinal));
  int version = 0;
  ATTN_TRY(c.run(c.driver_version, "", &version));
  const unsigned char* p = properties.data();
  info->ordinal = ordinal;
  info->name = read_text(p);
  info->arch = read_text(p + c.layout->arch);
  info->arch = info->arch.substr(0, info->arch.find(':'));
  info->multiprocessors = read<int>(p + c.layout->multiprocessors);
  info->memory_bytes = int64_t(read<size_t>(p + c.layout->memory));
  info->shared_bytes_max = int64_t(read<size_t>(p + c.layout->shared));
  info->driver_version =
      join(version / 10000000, ".", version / 100000 % 100, ".", version % 100000);
  return {};
}

class HipDriver final : public GpuDriver {
 public:
  HipDriver(const HipCalls& calls, DeviceInfo device)
      : GpuDriver(calls, std::move(device), reinterpret_cast<void*>(3)), calls_(calls) {}

 protected:
  Status enter(void** previous) override {
    int current = 0;
    ATTN_TRY(calls_.run(calls_.get_device, "", &current));
    *previous = reinterpret_cast<void*>(intptr_t(current));
    return current == device().ordinal
               ? Status{}
               : calls_.run(calls_.set_device, device().ordinal, device().ordinal);
  }
  void leave(void* previous) override {
    const int current = int(reinterpret_cast<intptr_t>(previous));
    if (current != device().ordinal) calls_.set_device(current);
  }
  Status allow_shared(Function, uint32_t) override {
    return {};
  }  // all LDS is there without asking

 private:
  const HipCalls& calls_;
};

}  // namespace

Status open_hip(const char* path, bool emulator, int device, std::shared_ptr<Driver>* driver) {
  const HipCalls* calls = nullptr;
  ATTN_TRY(get_calls(path, emulator, &calls));
  int handle = 0;
  DeviceInfo info;
  ATTN_TRY(calls->device_handle(emulator ? "hip-emu" : "hip", device, &handle));
  ATTN_TRY(describe(*calls, device, &info));
  *driver = std::make_shared<HipDriver>(*calls, std::move(info));
  return {};
}

Status list_hip(const char* path, bool emulator, std::vector<DeviceInfo>* devices) {
  const HipCalls* calls = nullptr;
  ATTN_TRY(get_calls(path, emulator, &calls));
  int count = 0;
  ATTN_TRY(calls->run(calls->device_count, "", &count));
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    DeviceInfo info;
    ATTN_TRY(describe(*calls, ordinal, &info));
    devices->push_back(std::move(info));
  }
  return {};
}

}  // namespace attn
