// A stand-in for libamdhip64.so, and with MOCK_EMULATOR for libattn-hipemu.so.
#include "device.h"

using namespace attn::mock;

namespace {

constexpr int no_device = 100, invalid_device = 101;
thread_local int current_device = 0;

const bool scripted_by_default = [] {
  state.devices = 2;
  const char* text = std::getenv("MOCK_GCN_ARCH");
  set_text(state.gcn_arch, text ? text : "gfx942:sramecc+:xnack-");
  return true;
}();

int compute_units() {
  const char* text = std::getenv("MOCK_COMPUTE_UNITS");
  return text ? std::atoi(text) : 304;
}

std::string arch_of(int device) {
  std::string rest = state.gcn_arch;
  for (size_t comma; device > 0 && (comma = rest.find(',')) != std::string::npos; --device)
    rest.erase(0, comma + 1);
  return rest.substr(0, rest.find(','));
}

template <class T>
void put(void* base, size_t offset, T value) {
  std::memcpy(static_cast<char*>(base) + offset, &value, sizeof value);
}
void put_text(void* base, size_t offset, const char* text) {
  std::strncpy(static_cast<char*>(base) + offset, text, 256);
}

}  // namespace

intptr_t attn::mock::current_place() {
  return current_device;
}

#ifdef MOCK_EMULATOR
MOCK_API int attn_emu_marker;
int attn_emu_marker = 1;
MOCK_API const char* attn_emu_last_fault() {
  return state.code != 0 ? "the emulator's sentence" : "";
}
#endif

MOCK_API int hipInit(unsigned) {
  ++state.init_calls;
  MOCK_SCRIPTED();
  return success;
}
MOCK_API int hipDriverGetVersion(int* version) {
  MOCK_SCRIPTED();
  *version = 60032830;
  return success;
}
MOCK_API const char* hipGetErrorName(int code) {
  switch (code) {
    case 1:
      return "hipErrorInvalidValue";
    case 2:
      return "hipErrorOutOfMemory";
    case 100:
      return "hipErrorNoDevice";
    case 209:
      return "hipErrorNoBinaryForGpu";
    case 400:
      return "hipErrorInvalidHandle";
    case 500:
      return "hipErrorNotFound";
    case 719:
      return "hipErrorLaunchFailure";
    default:
      return "hipErrorUnknown";
  }
}
MOCK_API const char* hipGetErrorString(int code) {
  return code == 2 ? "out of memory" : "some error";
}
MOCK_API int hipGetDeviceCount(int* count) {
  MOCK_SCRIPTED();
  *count = state.devices;
  return state.devices == 0 ? no_device : success;
}
MOCK_API int hipDeviceGet(int* device, int ordinal) {
  MOCK_SCRIPTED();
  if (ordinal >= state.devices) return invalid_device;
  *device = ordinal;
  return success;
}
MOCK_API int hipGetDevice(int* device) {
  MOCK_SCRIPTED();
  *device = current_device;
  return success;
}
MOCK_API int hipSetDevice(int device) {
  MOCK_SCRIPTED();
  current_device = device;
  ++state.enters;
  return success;
}
// Offsets of hipDeviceProp_t in ROCm 5 and earlier, and of hipDeviceProp_tR0600.
MOCK_API int hipGetDeviceProperties(void* p, int device) {
  MOCK_SCRIPTED();
  std::memset(p, 0xa5, 792);
  put_text(p, 0, "Mock HIP device");
  put(p, 256, size_t{192} << 30);
  put(p, 264, size_t{65536});
  put(p, 336, compute_units());
  put_text(p, 396, arch_of(device).c_str());
  return success;
}
#ifndef MOCK_ROCM_5
MOCK_API int hipGetDevicePropertiesR0600(void* p, int device) {
  MOCK_SCRIPTED();
  std::memset(p, 0xa5, 1472);
  put_text(p, 0, "Mock HIP device");
  put(p, 288, size_t{192} << 30);
  put(p, 296, size_t{65536});
  put(p, 388, compute_units());
  put_text(p, 1160, arch_of(device).c_str());
  return success;
}
#endif
MOCK_API int hipMalloc(void** p, size_t bytes) {
  MOCK_SCRIPTED();
  return allocate(p, bytes);
}
MOCK_API int hipFree(void* p) {
  MOCK_SCRIPTED();
  return release(p);
}
MOCK_API int hipMemcpyHtoDAsync(void* to, const void* from, size_t bytes, void* stream) {
  MOCK_SCRIPTED();
  MOCK_OURS(stream);
  std::memcpy(to, from, bytes);
  return success;
}
MOCK_API int hipMemcpyDtoHAsync(void* to, void* from, size_t bytes, void* stream) {
  MOCK_SCRIPTED();
  MOCK_OURS(stream);
  std::memcpy(to, from, bytes);
  return success;
}
MOCK_API int hipMemcpyDtoDAsync(void* to, void* from, size_t bytes, void* stream) {
  MOCK_SCRIPTED();
  return copy(to, from, bytes, stream);
}
#ifndef MOCK_WITHOUT_FILL
MOCK_API int hipMemsetD8Async(void* to, unsigned char value, size_t bytes, void* stream) {
  MOCK_SCRIPTED();
  return fill(to, value, bytes, stream);
}
#endif
MOCK_API int hipStreamSynchronize(void* stream) {
  MOCK_SCRIPTED();
  MOCK_OURS(stream);
  return success;
}
MOCK_API int hipModuleLoadData(void** module, const void* image) {
  MOCK_SCRIPTED();
  return load_module(module, image);
}
MOCK_API int hipModuleLoad(void** module, const char* path) {
  MOCK_SCRIPTED();
  return load_module(module, path);
}
MOCK_API int hipModuleUnload(void* module) {
  MOCK_SCRIPTED();
  return unload_module(module);
}
MOCK_API int hipModuleGetFunction(void** function, void* module, const char* name) {
  MOCK_SCRIPTED();
  return find_function(function, module, name);
}
MOCK_API int hipModuleLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz,
                                   unsigned bx, unsigned by, unsigned bz, unsigned shared_bytes,
                                   void* stream, void** parameters, void** extra) {
  MOCK_SCRIPTED();
  return launch(function, {gx, gy, gz, bx, by, bz}, shared_bytes, stream, parameters, extra,
                reinterpret_cast<void*>(3));
}
MOCK_API int hipEventCreateWithFlags(void** event, unsigned) {
  MOCK_SCRIPTED();
  return create_event(event);
}
MOCK_API int hipEventDestroy(void* event) {
  MOCK_SCRIPTED();
  return destroy_event(event);
}
MOCK_API int hipEventRecord(void* event, void* stream) {
  MOCK_SCRIPTED();
  return record_event(event, stream);
}
MOCK_API int hipEventSynchronize(void*) {
  MOCK_SCRIPTED();
  return success;
}
MOCK_API int hipEventElapsedTime(float* milliseconds, void* start, void* stop) {
  MOCK_SCRIPTED();
  return elapsed(milliseconds, start, stop);
}
#ifndef MOCK_ROCM_5
MOCK_API int hipStreamCreateWithFlags(void** stream, unsigned flags) {
  MOCK_SCRIPTED();
  return create_stream(stream, flags);
}
MOCK_API int hipStreamDestroy(void* stream) {
  MOCK_SCRIPTED();
  return destroy_stream(stream);
}
MOCK_API int hipThreadExchangeStreamCaptureMode(int* mode) {
  MOCK_SCRIPTED();
  return exchange_mode(mode);
}
MOCK_API int hipStreamBeginCapture(void* stream, int mode) {
  MOCK_SCRIPTED();
  return begin_capture(stream, mode);
}
MOCK_API int hipStreamEndCapture(void* stream, void** graph) {
  MOCK_SCRIPTED();
  return end_capture(stream, graph);
}
MOCK_API int hipGraphInstantiate(void** executable, void* graph, void**, char*, size_t) {
  MOCK_SCRIPTED();
  return instantiate(executable, graph);
}
MOCK_API int hipGraphDestroy(void* graph) {
  MOCK_SCRIPTED();
  return destroy_graph(graph);
}
MOCK_API int hipGraphLaunch(void* executable, void* stream) {
  MOCK_SCRIPTED();
  return launch_graph(executable, stream);
}
MOCK_API int hipGraphExecDestroy(void* executable) {
  MOCK_SCRIPTED();
  return destroy_graph(executable);
}
#endif
