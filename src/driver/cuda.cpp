// The CUDA driver API, through libcuda.so.1.
#include "driver/gpu_driver.h"

namespace attn {
namespace {

enum {  // CUdevice_attribute
  attribute_multiprocessor_count = 16,
  attribute_l2_cache_size = 38,
  attribute_compute_capability_major = 75,
  attribute_compute_capability_minor = 76,
  attribute_max_shared_memory_per_block_optin = 97,
};
enum {  // CUfunction_attribute
  function_max_threads_per_block = 0,
  function_shared_size_bytes = 1,
  function_max_dynamic_shared_size_bytes = 8,
};
constexpr uint64_t proc_address_legacy_stream = 1;  // NULL is the legacy default stream
enum {  // CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion
  tensor_map_uint8 = 0,
  tensor_map_uint16 = 1,
  tensor_map_swizzle_32 = 1,
  tensor_map_swizzle_64 = 2,
  tensor_map_swizzle_128 = 3,
  tensor_map_l2_64 = 1,
  tensor_map_l2_128 = 2,
  tensor_map_l2_256 = 3,
};

struct LaunchAttribute {  // CUlaunchAttribute
  int id;
  alignas(8) int value;
  char rest[60];  // of the largest value
};
constexpr int programmatic_stream_serialization = 6;  // CUlaunchAttributeID
struct LaunchConfig {                                 // CUlaunchConfig
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned count;
};
static_assert(sizeof(LaunchAttribute) == 72 && sizeof(LaunchConfig) == 56);

struct CudaCalls : GpuCalls {
  Call<char*, int, int> device_name;  // (name, capacity, device)
  Call<size_t*, int> device_memory;
  Call<int*, int, int> device_attribute;
  Call<char*, int, int> device_pci;  // (text, capacity, device)
  Call<void**> ctx_get_current;
  Call<void*> ctx_push;
  Call<void**> ctx_pop;
  Call<int*> ctx_device;  // of the current context
  Call<void**, int> primary_retain;
  Call<int> primary_release;
  Call<void*, int, int> set_function_attribute;
  Call<int*, int, void*> function_attribute;                 // a driver may lack this and the next
  Call<void*, size_t, size_t*, size_t*> function_parameter;  // (function, index, offset, size)
  // (map, type, rank, base, sizes, strides, box, element strides, interleave, swizzle, L2
  // promotion, fill)
  Call<void*, int, unsigned, void*, const uint64_t*, const uint64_t*, const unsigned*,
       const unsigned*, int, int, int, int>
      tensor_map_encode;
  Call<void*, void*> tensor_map_address;
  Call<const LaunchConfig*, void*, void**, void**> launch_ex;  // a driver may lack it
  Call<int, const char**> error_name;
  Call<int, const char**> error_string;

  std::string error(int code) const override {
    const char* name = nullptr;
    const char* sentence = nullptr;
    error_name(code, &name);
    error_string(code, &sentence);
    std::string text = join(name ? name : "error", " (", code, ")");
    if (sentence) text += join(": ", sentence);
    return text;
  }
};

// Finds functions by name and version, in whichever of its two forms the driver has
// cuGetProcAddress.
struct Resolver {
  int (*v12000)(const char*, void**, int, uint64_t, int*) = nullptr;
  int (*v11030)(const char*, void**, int, uint64_t) = nullptr;

  void* find(const char* name, int version) const {
    void* found = nullptr;
    const int code = v12000 ? v12000(name, &found, version, proc_address_legacy_stream, nullptr)
                            : v11030(name, &found, version, proc_address_legacy_stream);
    return code == 0 ? found : nullptr;
  }
};

// `path`: nullptr for the system's.
Status load_cuda(const char* path, CudaCalls* c) {
  void* library = nullptr;
  if (Status status =
          path ? open_library(path, &library) : open_first({{"libcuda.so.1"}, {}}, &library);
      !status.ok())
    return {status.code, join("cuda: ", status.text)};
  const std::string file = library_file(library, path ? path : "libcuda.so.1");
  Resolver resolver;
  resolver.v12000 =
      reinterpret_cast<decltype(resolver.v12000)>(find_symbol(library, "cuGetProcAddress_v2"));
  resolver.v11030 =
      reinterpret_cast<decltype(resolver.v11030)>(find_symbol(library, "cuGetProcAddress"));
  if (!resolver.v12000 && !resolver.v11030) {
    return {ATTN_DRIVER_MISSING,
            join("cuda: ", file,
                 " has no cuGetProcAddress; a driver for CUDA 11.3 or newer is needed")};
  }
  const Symbol symbols[] = {
      {c->init, "cuInit", 2000},
      {c->driver_version, "cuDriverGetVersion", 2020},
      {c->error_name, "cuGetErrorName", 6000},
      {c->error_string, "cuGetErrorString", 6000},
      {c->device_count, "cuDeviceGetCount", 2000},
      {c->device_get, "cuDeviceGet", 2000},
      {c->device_name, "cuDeviceGetName", 2000},
      {c->device_memory, "cuDeviceTotalMem", 3020},
      {c->device_attribute, "cuDeviceGetAttribute", 2000},
      {c->device_pci, "cuDeviceGetPCIBusId", 4010},
      {c->ctx_get_current, "cuCtxGetCurrent", 4000},
      {c->ctx_push, "cuCtxPushCurrent", 4000},
      {c->ctx_pop, "cuCtxPopCurrent", 4000},
      {c->ctx_device, "cuCtxGetDevice", 2000},
      {c->primary_retain, "cuDevicePrimaryCtxRetain", 7000},
      {c->primary_release, "cuDevicePrimaryCtxRelease", 11000},
      {c->alloc, "cuMemAlloc", 3020},
      {c->free, "cuMemFree", 3020},
      {c->copy_in, "cuMemcpyHtoDAsync", 3020},
      {c->copy_out, "cuMemcpyDtoHAsync", 3020},
      {c->fill, "cuMemsetD8Async", 3020},
      {c->synchronize, "cuStreamSynchronize", 2000},
      {c->module_load, "cuModuleLoadData", 2000},
      {c->module_load_file, "cuModuleLoad", 2000},
      {c->module_unload, "cuModuleUnload", 2000},
      {c->module_function, "cuModuleGetFunction", 2000},
      {c->set_function_attribute, "cuFuncSetAttribute", 9000},
      {c->launch, "cuLaunchKernel", 4000},
      {c->event_create, "cuEventCreate", 2000},
      {c->event_destroy, "cuEventDestroy", 4000},
      {c->event_record, "cuEventRecord", 2000},
      {c->event_synchronize, "cuEventSynchronize", 2000},
      {c->event_elapsed, "cuEventElapsedTime", 2000},
  };
  for (const Symbol& symbol : symbols) {
    *symbol.pointer = resolver.find(symbol.name, symbol.version);
    if (!*symbol.pointer) {
      return {ATTN_DRIVER_MISSING, join("cuda: ", file, " has no ", symbol.name, " of CUDA ",
                                        symbol.version / 1000, ".", symbol.version % 1000 / 10)};
    }
  }
  const Symbol optional[] = {
      {c->exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", 10010},
      {c->copy, "cuMemcpyDtoDAsync", 3020},
      {c->stream_create, "cuStreamCreate", 2000},
      {c->stream_destroy, "cuStreamDestroy", 4000},
      {c->capture_begin, "cuStreamBeginCapture", 10010},
      {c->capture_end, "cuStreamEndCapture", 10000},
      {c->graph_instantiate, "cuGraphInstantiate", 11000},
      {c->graph_destroy, "cuGraphDestroy", 10000},
      {c->graph_launch, "cuGraphLaunch", 10000},
      {c->tensor_map_encode, "cuTensorMapEncodeTiled", 12000},
      {c->tensor_map_address, "cuTensorMapReplaceAddress", 12000},
      {c->launch_ex, "cuLaunchKernelEx", 11060},
      {c->graph_exec_destroy, "cuGraphExecDestroy", 10000},
      {c->function_attribute, "cuFuncGetAttribute", 2020},
      {c->function_parameter, "cuFuncGetParamInfo", 12040},
  };
  for (const Symbol& symbol : optional)
    *symbol.pointer = resolver.find(symbol.name, symbol.version);
  return c->run(c->init, 0u, 0u);
}

Status get_calls(const char* path, const CudaCalls** calls) {
  return load_once<CudaCalls>(
      path ? path : "", [&](CudaCalls* fresh) { return load_cuda(path, fresh); }, calls);
}

Status describe(const CudaCalls& c, int ordinal, int device, DeviceInfo* info) {
  char name[256] = "";
  size_t memory = 0;
  int major = 0, minor = 0, shared = 0, l2 = 0, version = 0;
  char pci[32] = "";
  info->ordinal = ordinal;
  ATTN_TRY(c.run(c.device_name, ordinal, name, int(sizeof name), device));
  ATTN_TRY(c.run(c.device_memory, ordinal, &memory, device));
  const struct {
    int attribute;
    int* value;
  } attributes[] = {{attribute_multiprocessor_count, &info->multiprocessors},
                    {attribute_compute_capability_major, &major},
                    {attribute_compute_capability_minor, &minor},
                    {attribute_max_shared_memory_per_block_optin, &shared},
                    {attribute_l2_cache_size, &l2}};
  for (auto [attribute, value] : attributes) {
    ATTN_TRY(c.run(c.device_attribute, join("attribute ", attribute), value, attribute, device));
  }
  ATTN_TRY(c.run(c.device_pci, ordinal, pci, int(sizeof pci), device));
  ATTN_TRY(c.run(c.driver_version, "", &version));
  info->name = name;
  info->arch = join("sm_", major, minor);
  info->memory_bytes = int64_t(memory);
  info->shared_bytes_max = shared;
  info->l2_bytes = l2;
  info->pci = pci;
  info->tensor_maps = major >= 9 && c.tensor_map_encode.pointer && c.tensor_map_address.pointer;
  info->driver_version = join(version / 1000, ".", version % 1000 / 10);
  return {};
}

class CudaDriver final : public GpuDriver {
 public:
  // `retained`: the context is the primary one of `handle` and is released at the end.
  CudaDriver(const CudaCalls& calls, DeviceInfo device, void* context, bool retained, int handle)
      : GpuDriver(calls, std::move(device), nullptr),
        calls_(calls),
        context_(context),
        retained_(retained),
        handle_(handle) {}
  ~CudaDriver() override {
    if (retained_) calls_.primary_release(handle_);
  }

 protected:
  Status enter(void** previous) override {
    ATTN_TRY(calls_.run(calls_.ctx_get_current, "", previous));
    return *previous == context_ ? Status{} : calls_.run(calls_.ctx_push, "", context_);
  }
  void leave(void* previous) override {
    if (previous != context_) calls_.ctx_pop(&previous);
  }
  Status allow_shared(Function function, uint32_t bytes) override {
    return calls_.run(calls_.set_function_attribute,
                      join("dynamic shared memory ", bytes, " bytes"), function,
                      function_max_dynamic_shared_size_bytes, int(bytes));
  }
  Status inspect(Function function, FunctionInfo* info) override {
    return inside([&]() -> Status {
      if (calls_.function_attribute.pointer) {
        for (const auto& [attribute, value] :
             {std::pair{function_max_threads_per_block, &info->threads},
              {function_shared_size_bytes, &info->static_shared_bytes}})
          ATTN_TRY(
              calls_.run(calls_.function_attribute, int(attribute), value, attribute, function));
      }
      // Kernels have one parameter, a struct, before which there may be room for its
      // alignment.
      size_t offset = 0, size = 0;
      if (!calls_.function_parameter.pointer) return {};
      ATTN_TRY(calls_.run(calls_.function_parameter, 0, function, size_t{0}, &offset, &size));
      info->parameter_bytes = int64_t(size);
      return {};
    });
  }
  // As wide as a box's row.
  static int swizzle_of(const TensorMap& map) {
    if (!map.swizzled) return 0;
    switch (map.box[0] * map.element_bytes) {
      case 32:
        return tensor_map_swizzle_32;
      case 64:
        return tensor_map_swizzle_64;
      default:
        return tensor_map_swizzle_128;
    }
  }
  Status encode_map(const TensorMap& map, void* encoded) override {
    uint64_t size[5], stride[4];
    unsigned box[5], one[5];
    for (int i = 0; i < map.rank; ++i) {
      size[i] = uint64_t(map.size[i]);
      box[i] = unsigned(map.box[i]);
      one[i] = 1;
      // A stride that is never taken may be any.
      if (i > 0) stride[i - 1] = map.size[i] == 1 ? 16 : uint64_t(map.stride[i - 1]);
    }
    void* const anywhere = reinterpret_cast<void*>(uintptr_t{1} << 32);  // no address is looked at
    const int type = map.element_bytes == 1 ? tensor_map_uint8 : tensor_map_uint16;
    return calls_.run(calls_.tensor_map_encode, map, encoded, type, unsigned(map.rank), anywhere,
                      size, stride, box, one, 0, swizzle_of(map),
                      map.l2_bytes == 64    ? tensor_map_l2_64
                      : map.l2_bytes == 128 ? tensor_map_l2_128
                                            : tensor_map_l2_256,
                      0);
  }
  Status set_address(void* encoded, const void* base) override {
    return calls_.run(calls_.tensor_map_address, "", encoded, const_cast<void*>(base));
  }
  Status start(const Launch& l, void* stream, void** parameters, void** extra) override {
    if (!l.starts_early || !calls_.launch_ex.pointer)
      return GpuDriver::start(l, stream, parameters, extra);
    const LaunchAttribute early = {programmatic_stream_serialization, 1, {}};
    const LaunchConfig config = {{l.grid[0], l.grid[1], l.grid[2]},
                                 {l.block[0], l.block[1], l.block[2]},
                                 l.shared_bytes,
                                 stream,
                                 &early,
                                 1};
    return calls_.run(calls_.launch_ex, l, &config, l.function, parameters, extra);
  }

 private:
  const CudaCalls& calls_;
  void* const context_;
  const bool retained_;
  const int handle_;
};

}  // namespace

Status open_cuda(const char* path, std::optional<int> device, std::shared_ptr<Driver>* driver) {
  const CudaCalls* calls = nullptr;
  ATTN_TRY(get_calls(path, &calls));
  const CudaCalls& c = *calls;

  // The current context serves where it is of the wanted device: the streams and memory of an
  // application that made it are its own.
  void* context = nullptr;
  int current = -1, handle = 0;  // the driver numbers its handles from 0, as ordinals
  ATTN_TRY(c.run(c.ctx_get_current, "", &context));
  if (context) ATTN_TRY(c.run(c.ctx_device, "", &current));
  const int ordinal = device ? *device : context ? current : 0;
  ATTN_TRY(c.device_handle("cuda", ordinal, &handle));
  const bool retain = handle != current;
  DeviceInfo info;
  ATTN_TRY(describe(c, ordinal, handle, &info));
  if (retain) ATTN_TRY(c.run(c.primary_retain, ordinal, &context, handle));
  *driver = std::make_shared<CudaDriver>(c, std::move(info), context, retain, handle);
  return {};
}

std::optional<int> current_cuda(const char* path) {
  const CudaCalls* c = nullptr;
  void* context = nullptr;
  int device = 0;
  const bool found = get_calls(path, &c).ok() && c->ctx_get_current(&context) == 0 && context &&
                     c->ctx_device(&device) == 0;
  return found ? std::optional(device) : std::nullopt;
}

Status list_cuda(const char* path, std::vector<DeviceInfo>* devices) {
  const CudaCalls* calls = nullptr;
  ATTN_TRY(get_calls(path, &calls));
  int count = 0;
  ATTN_TRY(calls->run(calls->device_count, "", &count));
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    int handle = 0;
    DeviceInfo info;
    ATTN_TRY(calls->device_handle("cuda", ordinal, &handle));
    ATTN_TRY(describe(*calls, ordinal, handle, &info));
    devices->push_back(std::move(info));
  }
  return {};
}

}  // namespace attn
