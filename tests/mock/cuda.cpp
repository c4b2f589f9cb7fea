// A stand-in for libcuda.so.1. Functions are reached through cuGetProcAddress only, as newer ABIs
// of the real one are.
#include <cstdint>
#include <vector>

#include "device.h"

using namespace attn::mock;

namespace {

constexpr int no_device = 100, invalid_device = 101, invalid_context = 201;

// Contexts are numbers: 0x1000 + device for a primary one, 0x2000 + device for one of the
// application's.
void* primary(int device) {
  return reinterpret_cast<void*>(intptr_t(0x1000 + device));
}
int device_of(void* context) {
  return int(reinterpret_cast<intptr_t>(context) & 0xfff);
}
thread_local std::vector<void*> contexts;
bool none_current() {
  return contexts.empty();
}

#define MOCK_IN_CONTEXT() \
  MOCK_SCRIPTED();        \
  if (none_current()) return invalid_context

int cuInit(unsigned) {
  ++state.init_calls;
  MOCK_SCRIPTED();
  return state.devices == 0 ? no_device : success;
}
int cuDriverGetVersion(int* version) {
  MOCK_SCRIPTED();
  *version = 13010;
  return success;
}
int cuGetErrorName(int code, const char** name) {
  switch (code) {
    case 1:
      *name = "CUDA_ERROR_INVALID_VALUE";
      break;
    case 2:
      *name = "CUDA_ERROR_OUT_OF_MEMORY";
      break;
    case 100:
      *name = "CUDA_ERROR_NO_DEVICE";
      break;
    case 201:
      *name = "CUDA_ERROR_INVALID_CONTEXT";
      break;
    case 209:
      *name = "CUDA_ERROR_NO_BINARY_FOR_GPU";
      break;
    case 400:
      *name = "CUDA_ERROR_INVALID_HANDLE";
      break;
    case 500:
      *name = "CUDA_ERROR_NOT_FOUND";
      break;
    case 701:
      *name = "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES";
      break;
    default:
      *name = nullptr;
      return invalid_value;
  }
  return success;
}
int cuGetErrorString(int code, const char** text) {
  *text = code == 2 ? "out of memory" : nullptr;
  return *text ? success : invalid_value;
}
int cuDeviceGetCount(int* count) {
  MOCK_SCRIPTED();
  *count = state.devices;
  return success;
}
int cuDeviceGet(int* device, int ordinal) {
  MOCK_SCRIPTED();
  if (ordinal >= state.devices) return invalid_device;
  *device = ordinal;
  return success;
}
int cuDeviceGetName(char* name, int capacity, int) {
  MOCK_SCRIPTED();
  std::strncpy(name, "Mock CUDA device", size_t(capacity));
  return success;
}
int cuDeviceTotalMem(size_t* bytes, int) {
  MOCK_SCRIPTED();
  *bytes = size_t{80} << 30;
  return success;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  MOCK_SCRIPTED();
  const int capability = state.compute_capability[device > 0];
  switch (attribute) {
    case 16:
      *value = 132;
      return success;
    case 38:
      *value = 1 << 20;
      return success;
    case 75:
      *value = capability / 10;
      return success;
    case 76:
      *value = capability % 10;
      return success;
    case 97:
      *value = 232448;
      return success;
    default:
      return invalid_value;
  }
}
int cuDeviceGetPCIBusId(char* text, int capacity, int device) {
  MOCK_SCRIPTED();
  std::strncpy(text, device == 0 ? "0000:0a:00.0" : "0000:0b:00.0", size_t(capacity));
  return success;
}
int cuCtxGetCurrent(void** context) {
  MOCK_SCRIPTED();
  *context = none_current() ? nullptr : contexts.back();
  return success;
}
int cuCtxPushCurrent(void* context) {
  MOCK_SCRIPTED();
  contexts.push_back(context);
  ++state.enters;
  return success;
}
int cuCtxPopCurrent(void** context) {
  MOCK_IN_CONTEXT();
  *context = contexts.back();
  contexts.pop_back();
  return success;
}
int cuCtxGetDevice(int* device) {
  MOCK_IN_CONTEXT();
  *device = device_of(contexts.back());
  return success;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  MOCK_SCRIPTED();
  *context = primary(device);
  ++state.live_contexts;
  return success;
}
int cuDevicePrimaryCtxRelease(int) {
  --state.live_contexts;
  return success;
}
int cuMemAlloc(uint64_t* p, size_t bytes) {
  MOCK_IN_CONTEXT();
  void* fresh = nullptr;
  const int code = allocate(&fresh, bytes);
  *p = reinterpret_cast<uint64_t>(fresh);
  return code;
}
int cuMemFree(uint64_t p) {
  MOCK_IN_CONTEXT();
  return release(reinterpret_cast<void*>(p));
}
int cuMemcpyHtoDAsync(uint64_t to, const void* from, size_t bytes, void* stream) {
  MOCK_IN_CONTEXT();
  MOCK_OURS(stream);
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return success;
}
int cuMemcpyDtoHAsync(void* to, uint64_t from, size_t bytes, void* stream) {
  MOCK_IN_CONTEXT();
  MOCK_OURS(stream);
  std::memcpy(to, reinterpret_cast<void*>(from), bytes);
  return success;
}
int cuMemcpyDtoDAsync(uint64_t to, uint64_t from, size_t bytes, void* stream) {
  MOCK_IN_CONTEXT();
  return copy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes, stream);
}
int cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, void* stream) {
  MOCK_IN_CONTEXT();
  return fill(reinterpret_cast<void*>(to), value, bytes, stream);
}
int cuStreamSynchronize(void* stream) {
  MOCK_IN_CONTEXT();
  MOCK_OURS(stream);
  return success;
}
int cuModuleLoadData(void** module, const void* image) {
  MOCK_IN_CONTEXT();
  return load_module(module, image);
}
int cuModuleLoad(void** module, const char* path) {
  MOCK_IN_CONTEXT();
  return load_module(module, path);
}
int cuModuleUnload(void* module) {
  MOCK_IN_CONTEXT();
  return unload_module(module);
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  MOCK_IN_CONTEXT();
  return find_function(function, module, name);
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  MOCK_IN_CONTEXT();
  if (attribute != 8) return invalid_value;
  set_text(state.attribute_symbol, function_name(function).c_str());
  state.attribute_value = value;
  return success;
}
int cuFuncGetAttribute(int* value, int attribute, void* function) {
  MOCK_IN_CONTEXT();
  const Code code = state.compiled(function_name(function).c_str());
  if (attribute != 0 && attribute != 1) return invalid_value;
  *value = attribute == 0 ? code.threads : code.static_shared_bytes;
  return success;
}
int cuFuncGetParamInfo(void* function, size_t index, size_t* offset, size_t* size) {
  MOCK_IN_CONTEXT();
  if (index != 0) return invalid_value;
  *offset = 0;
  *size = state.compiled(function_name(function).c_str()).parameter_bytes;
  return success;
}
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared_bytes, void* stream, void** parameters,
                   void** extra) {
  MOCK_IN_CONTEXT();
  return launch(function, {gx, gy, gz, bx, by, bz}, shared_bytes, stream, parameters, extra,
                nullptr);
}
struct LaunchAttribute {
  int id, padding, value;
  char rest[60];
};
struct LaunchConfig {
  unsigned gx, gy, gz, bx, by, bz, shared_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned count;
};
int cuLaunchKernelEx(const LaunchConfig* l, void* function, void** parameters, void** extra) {
  MOCK_IN_CONTEXT();
  for (unsigned i = 0; i < l->count; ++i) {
    if (l->attributes[i].id != 6) return invalid_value;  // programmatic stream serialization
    state.early += l->attributes[i].value;
  }
  return launch(function, {l->gx, l->gy, l->gz, l->bx, l->by, l->bz}, l->shared_bytes, l->stream,
                parameters, extra, nullptr);
}
int cuEventCreate(void** event, unsigned) {
  MOCK_IN_CONTEXT();
  return create_event(event);
}
int cuEventDestroy(void* event) {
  MOCK_IN_CONTEXT();
  return destroy_event(event);
}
int cuEventRecord(void* event, void* stream) {
  MOCK_IN_CONTEXT();
  return record_event(event, stream);
}
int cuEventSynchronize(void*) {
  MOCK_IN_CONTEXT();
  return success;
}
int cuEventElapsedTime(float* milliseconds, void* start, void* stop) {
  MOCK_IN_CONTEXT();
  return elapsed(milliseconds, start, stop);
}
int cuStreamCreate(void** stream, unsigned flags) {
  MOCK_IN_CONTEXT();
  return create_stream(stream, flags);
}
int cuStreamDestroy(void* stream) {
  MOCK_IN_CONTEXT();
  return destroy_stream(stream);
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  MOCK_SCRIPTED();
  return exchange_mode(mode);
}
int cuStreamBeginCapture(void* stream, int mode) {
  MOCK_IN_CONTEXT();
  return begin_capture(stream, mode);
}
int cuStreamEndCapture(void* stream, void** graph) {
  MOCK_IN_CONTEXT();
  return end_capture(stream, graph);
}
int cuGraphInstantiate(void** executable, void* graph, void**, char*, size_t) {
  MOCK_IN_CONTEXT();
  return instantiate(executable, graph);
}
int cuGraphDestroy(void* graph) {
  MOCK_IN_CONTEXT();
  return destroy_graph(graph);
}
int cuGraphLaunch(void* executable, void* stream) {
  MOCK_IN_CONTEXT();
  return launch_graph(executable, stream);
}
int cuGraphExecDestroy(void* executable) {
  MOCK_IN_CONTEXT();
  return destroy_graph(executable);
}

#ifdef MOCK_TENSOR_MAPS
// A map is its address, then its sizes.
int cuTensorMapEncodeTiled(void* map, int, unsigned rank, void*, const uint64_t* size,
                           const uint64_t*, const unsigned*, const unsigned*, int, int, int, int) {
  MOCK_IN_CONTEXT();
  std::memset(map, 0, 128);
  std::memcpy(static_cast<char*>(map) + sizeof(void*), size, rank * sizeof *size);
  return success;
}
int cuTensorMapReplaceAddress(void* map, void* address) {
  MOCK_IN_CONTEXT();
  std::memcpy(map, &address, sizeof address);
  return success;
}
#endif

// By the versions of cudaTypedefs.h: asked for an older one, the real driver gives another ABI.
struct Entry {
  const char* name;
  int version;
  void* function;
};
#define MOCK_ENTRY(name, version) {#name, version, reinterpret_cast<void*>(&name)}
const Entry entries[] = {
    MOCK_ENTRY(cuInit, 2000),
    MOCK_ENTRY(cuDriverGetVersion, 2020),
    MOCK_ENTRY(cuGetErrorName, 6000),
    MOCK_ENTRY(cuGetErrorString, 6000),
    MOCK_ENTRY(cuDeviceGetCount, 2000),
    MOCK_ENTRY(cuDeviceGet, 2000),
    MOCK_ENTRY(cuDeviceGetName, 2000),
    MOCK_ENTRY(cuDeviceTotalMem, 3020),
    MOCK_ENTRY(cuDeviceGetAttribute, 2000),
    MOCK_ENTRY(cuDeviceGetPCIBusId, 4010),
    MOCK_ENTRY(cuCtxGetCurrent, 4000),
    MOCK_ENTRY(cuCtxPushCurrent, 4000),
    MOCK_ENTRY(cuCtxPopCurrent, 4000),
    MOCK_ENTRY(cuCtxGetDevice, 2000),
    MOCK_ENTRY(cuDevicePrimaryCtxRetain, 7000),
    MOCK_ENTRY(cuDevicePrimaryCtxRelease, 11000),
    MOCK_ENTRY(cuMemAlloc, 3020),
    MOCK_ENTRY(cuMemFree, 3020),
    MOCK_ENTRY(cuMemcpyHtoDAsync, 3020),
    MOCK_ENTRY(cuMemcpyDtoHAsync, 3020),
    MOCK_ENTRY(cuMemcpyDtoDAsync, 3020),
    MOCK_ENTRY(cuMemsetD8Async, 3020),
    MOCK_ENTRY(cuStreamSynchronize, 2000),
    MOCK_ENTRY(cuModuleLoadData, 2000),
    MOCK_ENTRY(cuModuleLoad, 2000),
    MOCK_ENTRY(cuModuleUnload, 2000),
    MOCK_ENTRY(cuModuleGetFunction, 2000),
    MOCK_ENTRY(cuFuncSetAttribute, 9000),
    MOCK_ENTRY(cuFuncGetAttribute, 2020),
    MOCK_ENTRY(cuFuncGetParamInfo, 12040),
    MOCK_ENTRY(cuLaunchKernel, 4000),
    MOCK_ENTRY(cuLaunchKernelEx, 11060),
    MOCK_ENTRY(cuEventCreate, 2000),
    MOCK_ENTRY(cuEventDestroy, 4000),
    MOCK_ENTRY(cuEventRecord, 2000),
    MOCK_ENTRY(cuEventSynchronize, 2000),
    MOCK_ENTRY(cuEventElapsedTime, 2000),
    MOCK_ENTRY(cuStreamCreate, 2000),
    MOCK_ENTRY(cuStreamDestroy, 4000),
    MOCK_ENTRY(cuThreadExchangeStreamCaptureMode, 10010),
    MOCK_ENTRY(cuStreamBeginCapture, 10010),
    MOCK_ENTRY(cuStreamEndCapture, 10000),
    MOCK_ENTRY(cuGraphInstantiate, 11000),
    MOCK_ENTRY(cuGraphDestroy, 10000),
    MOCK_ENTRY(cuGraphLaunch, 10000),
    MOCK_ENTRY(cuGraphExecDestroy, 10000),
#ifdef MOCK_TENSOR_MAPS
    MOCK_ENTRY(cuTensorMapEncodeTiled, 12000),
    MOCK_ENTRY(cuTensorMapReplaceAddress, 12000),
#endif
};

void* find(const char* name, int version, uint64_t flags) {
  if (flags != 1 || std::strcmp(state.hidden, name) == 0) return nullptr;
  if (!state.compiled && std::strncmp(name, "cuFuncGet", 9) == 0) return nullptr;
  for (const Entry& entry : entries)
    if (std::strcmp(entry.name, name) == 0 && version >= entry.version) return entry.function;
  return nullptr;
}

const bool scripted_by_default = [] {
  state.devices = 2;
  const char* text = std::getenv("MOCK_COMPUTE_CAPABILITY");
  const char* second = text ? std::strchr(text, ',') : nullptr;
  state.compute_capability[0] = text ? std::atoi(text) : 90;
  state.compute_capability[1] = second ? std::atoi(second + 1) : state.compute_capability[0];
  return true;
}();

}  // namespace

intptr_t attn::mock::current_place() {
  return none_current() ? 0 : reinterpret_cast<intptr_t>(contexts.back());
}

#ifdef MOCK_CUDA_11_3
MOCK_API int cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) {
  *function = find(name, version, flags);
  return *function ? success : not_found;
}
#else
MOCK_API int cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags,
                                 int* status) {
  *function = find(name, version, flags);
  if (status) *status = *function ? 0 : 1;
  return success;  // a name it does not know is not an error since CUDA 12
}
#endif

// What an application does that made a context of its own.
MOCK_API void attn_mock_set_context(int device) {
  contexts.clear();
  if (device >= 0) contexts.push_back(reinterpret_cast<void*>(intptr_t(0x2000 + device)));
}
MOCK_API int attn_mock_context_depth() {
  return int(contexts.size());
}
