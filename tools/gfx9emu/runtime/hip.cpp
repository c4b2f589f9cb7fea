// The HIP functions, with the types that their ABI has: handles are pointers, enums are int.
#include <cstring>
#include <new>
#include <utility>

#include "gfx9emu/runtime/device.h"

using namespace gfx9emu;
using namespace gfx9emu::runtime;

#define HIP_API extern "C" __attribute__((visibility("default")))

namespace {

template <class Body>
int run(Body&& body) noexcept {
  int code = success;
  last_call.fault[0] = 0;
  try {
    code = body();
  } catch (const std::bad_alloc&) {
    code = out_of_memory;
  } catch (const std::exception& e) {
    code = fail(launch_failure, e.what());
  }
  last_call.error = code;
  return code;
}
int unsupported(const char* what) {
  return run([&] { return fail(not_supported, std::string(what) + " is not emulated"); });
}

// One device, number 0.
Error check_ordinal(int ordinal) {
  if (ordinal == 0) return success;
  return fail(invalid_device, "device " + std::to_string(ordinal) + "; there is one, number 0");
}

// ROCm 6.0.
constexpr int version = 60032830;

// hipDeviceProp_t of ROCm 6 (R0600) and before (R0000), as far as it says anything of this device.
struct PropertiesLayout {
  size_t bytes;
  size_t memory, shared, registers, wave, threads, threads_dim, grid, clock, constant, major, minor,
      multiprocessors, arch;
};
constexpr PropertiesLayout r0600 = {1472, 288, 296, 304, 308, 320, 324,
                                    336,  348, 352, 360, 364, 388, 1160};
constexpr PropertiesLayout r0000 = {792, 256, 264, 272, 276, 280, 284,
                                    296, 308, 320, 328, 332, 336, 396};

int properties(const PropertiesLayout& at, void* out, int ordinal) {
  return run([&] {
    if (!out) return fail(invalid_value, "the properties are null");
    if (const Error error = check_ordinal(ordinal); error != success) return error;
    char* p = static_cast<char*>(out);
    std::memset(p, 0, at.bytes);
    const auto put = [&](size_t offset, auto value) {
      std::memcpy(p + offset, &value, sizeof value);
    };
    const auto put3 = [&](size_t offset, int x, int y, int z) {
      put(offset, x), put(offset + 4, y), put(offset + 8, z);
    };
    const Arch arch = device().arch();
    const ArchFacts& facts = facts_of(arch);
    std::strcpy(p, (std::string(facts.name) + " (emulated)").c_str());
    std::strcpy(p + at.arch, (std::string(facts.name) + ":sramecc+:xnack-").c_str());
    put(at.memory, memory_bytes);
    put(at.shared, size_t{facts.lds_bytes});
    put(at.registers, int{65536});
    put(at.wave, int{64});
    put(at.threads, int(max_threads));
    put3(at.threads_dim, int(max_threads), int(max_threads), int(max_threads));
    put3(at.grid, 0x7fffffff, int(max_grid_yz), int(max_grid_yz));
    put(at.clock, int{2100000});  // kHz
    put(at.constant, size_t{0x7fffffff});
    put(at.major, int{9});
    put(at.minor, arch == Arch::Gfx950 ? 5 : 4);
    put(at.multiprocessors, device().compute_units());
    return success;
  });
}

int set(void* to, const void* pattern, size_t pattern_bytes, size_t count, void* stream) {
  return run([&] {
    if (const Error error = device().check_stream(stream); error != success) return error;
    return device().fill(to, pattern, pattern_bytes, count);
  });
}

enum CopyKind { host_to_host, host_to_device, device_to_host, device_to_device, by_address };

int copy(void* to, const void* from, size_t bytes, int kind, void* stream) {
  return run([&] {
    if (const Error error = device().check_stream(stream); error != success) return error;
    switch (kind) {
      case host_to_host:
        return device().copy(to, from, bytes, true, true);
      // Memory of hipHostMalloc may stand on either side.
      case host_to_device:
        return device().copy(to, from, bytes, false, true);
      case device_to_host:
        return device().copy(to, from, bytes, true, false);
      case device_to_device:
        return device().copy(to, from, bytes, false, false);
      case by_address:
        return device().copy_by_address(to, from, bytes);
    }
    return fail(invalid_value, "kind " + std::to_string(kind) + " of copy");
  });
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const int attn_emu_marker = 1;

HIP_API const char* attn_emu_last_fault() {
  return last_call.fault;
}
HIP_API const char* attn_emu_last_counters() {
  return last_call.counters;
}
HIP_API void attn_emu_configure(const attn_emu_options* options) {
  device().configure(options ? *options : attn_emu_options{});
}

// ---- devices and errors ------------------------------------------------------------------------

HIP_API int hipInit(unsigned flags) {
  return run(
      [&] { return flags == 0 ? success : fail(invalid_value, "flags " + std::to_string(flags)); });
}
HIP_API int hipDriverGetVersion(int* out) {
  return run([&] {
    if (!out) return invalid_value;
    *out = version;
    return success;
  });
}
HIP_API int hipRuntimeGetVersion(int* out) {
  return hipDriverGetVersion(out);
}
HIP_API int hipGetDeviceCount(int* count) {
  return run([&] {
    if (!count) return invalid_value;
    *count = 1;
    return success;
  });
}
HIP_API int hipDeviceGet(int* out, int ordinal) {
  return run([&] {
    if (!out) return invalid_value;
    if (const Error error = check_ordinal(ordinal); error != success) return error;
    *out = ordinal;
    return success;
  });
}
HIP_API int hipGetDevice(int* out) {
  return hipDeviceGet(out, 0);
}
HIP_API int hipSetDevice(int ordinal) {
  return run([&] { return check_ordinal(ordinal); });
}
HIP_API int hipDeviceSynchronize() {
  return run([] { return success; });
}
HIP_API int hipGetDevicePropertiesR0600(void* out, int ordinal) {
  return properties(r0600, out, ordinal);
}
HIP_API int hipGetDevicePropertiesR0000(void* out, int ordinal) {
  return properties(r0000, out, ordinal);
}
HIP_API int hipGetDeviceProperties(void* out, int ordinal) {
  return properties(r0000, out, ordinal);
}
HIP_API int hipDeviceGetName(char* name, int capacity, int ordinal) {
  return run([&] {
    if (!name || capacity <= 0) return invalid_value;
    const std::string text = std::string(facts_of(device().arch()).name) + " (emulated)";
    std::strncpy(name, text.c_str(), size_t(capacity));
    name[capacity - 1] = 0;
    return check_ordinal(ordinal);
  });
}
HIP_API int hipDeviceTotalMem(size_t* bytes, int ordinal) {
  return run([&] {
    if (!bytes) return invalid_value;
    *bytes = memory_bytes;
    return check_ordinal(ordinal);
  });
}
HIP_API const char* hipGetErrorName(int code) {
  return error_name(code);
}
HIP_API const char* hipGetErrorString(int code) {
  return error_text(code);
}
HIP_API int hipPeekAtLastError() {
  return last_call.error;
}
HIP_API int hipGetLastError() {
  return std::exchange(last_call.error, success);
}

// ---- memory ------------------------------------------------------------------------------------

HIP_API int hipMalloc(void** out, size_t bytes) {
  return run([&] { return device().allocate(out, bytes); });
}
HIP_API int hipMallocAsync(void** out, size_t bytes, void*) {
  return hipMalloc(out, bytes);
}
HIP_API int hipFree(void* address) {
  return run([&] { return device().free(address); });
}
HIP_API int hipFreeAsync(void* address, void*) {
  return hipFree(address);
}
HIP_API int hipHostMalloc(void** out, size_t bytes, unsigned) {
  return run([&] { return device().allocate_host(out, bytes); });
}
HIP_API int hipHostFree(void* address) {
  return run([&] { return device().free_host(address); });
}
HIP_API int hipMemGetInfo(size_t* free, size_t* total) {
  return run([&] {
    if (!free || !total) return invalid_value;
    *total = memory_bytes;
    *free = memory_bytes - device().memory.bytes_in_use();
    return success;
  });
}

HIP_API int hipMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) {
  return copy(to, from, bytes, kind, stream);
}
HIP_API int hipMemcpy(void* to, const void* from, size_t bytes, int kind) {
  return copy(to, from, bytes, kind, nullptr);
}
HIP_API int hipMemcpyHtoDAsync(void* to, void* from, size_t bytes, void* stream) {
  return copy(to, from, bytes, host_to_device, stream);
}
HIP_API int hipMemcpyHtoD(void* to, void* from, size_t bytes) {
  return copy(to, from, bytes, host_to_device, nullptr);
}
HIP_API int hipMemcpyDtoHAsync(void* to, void* from, size_t bytes, void* stream) {
  return copy(to, from, bytes, device_to_host, stream);
}
HIP_API int hipMemcpyDtoH(void* to, void* from, size_t bytes) {
  return copy(to, from, bytes, device_to_host, nullptr);
}
HIP_API int hipMemcpyDtoDAsync(void* to, void* from, size_t bytes, void* stream) {
  return copy(to, from, bytes, device_to_device, stream);
}
HIP_API int hipMemcpyDtoD(void* to, void* from, size_t bytes) {
  return copy(to, from, bytes, device_to_device, nullptr);
}

HIP_API int hipMemsetD8Async(void* to, unsigned char value, size_t count, void* stream) {
  return set(to, &value, 1, count, stream);
}
HIP_API int hipMemsetD8(void* to, unsigned char value, size_t count) {
  return set(to, &value, 1, count, nullptr);
}
HIP_API int hipMemsetD32Async(void* to, int value, size_t count, void* stream) {
  return set(to, &value, 4, count, stream);
}
HIP_API int hipMemsetD32(void* to, int value, size_t count) {
  return set(to, &value, 4, count, nullptr);
}
HIP_API int hipMemsetAsync(void* to, int value, size_t bytes, void* stream) {
  const auto byte = static_cast<unsigned char>(value);
  return set(to, &byte, 1, bytes, stream);
}
HIP_API int hipMemset(void* to, int value, size_t bytes) {
  return hipMemsetAsync(to, value, bytes, nullptr);
}

// ---- streams and events ------------------------------------------------------------------------

HIP_API int hipStreamCreateWithFlags(void** stream, unsigned) {
  return run([&] { return device().create_stream(stream); });
}
HIP_API int hipStreamCreate(void** stream) {
  return hipStreamCreateWithFlags(stream, 0);
}
HIP_API int hipStreamDestroy(void* stream) {
  return run([&] { return device().destroy_stream(stream); });
}
HIP_API int hipStreamSynchronize(void* stream) {
  return run([&] { return device().check_stream(stream); });
}
HIP_API int hipStreamQuery(void* stream) {
  return hipStreamSynchronize(stream);
}
HIP_API int hipStreamWaitEvent(void* stream, void* event, unsigned) {
  return run([&] {
    if (const Error error = device().check_event(event, false); error != success) return error;
    return device().check_stream(stream);
  });
}
HIP_API int hipStreamIsCapturing(void* stream, int* status) {
  return run([&] {
    if (!status) return invalid_value;
    *status = 0;
    return device().check_stream(stream);
  });
}
HIP_API int hipStreamBeginCapture(void*, int) {
  return unsupported("hipStreamBeginCapture");
}
HIP_API int hipStreamEndCapture(void*, void**) {
  return unsupported("hipStreamEndCapture");
}

HIP_API int hipEventCreateWithFlags(void** event, unsigned) {
  return run([&] { return device().create_event(event); });
}
HIP_API int hipEventCreate(void** event) {
  return hipEventCreateWithFlags(event, 0);
}
HIP_API int hipEventDestroy(void* event) {
  return run([&] { return device().destroy_event(event); });
}
HIP_API int hipEventRecord(void* event, void* stream) {
  return run([&] { return device().record(event, stream); });
}
HIP_API int hipEventSynchronize(void* event) {
  return run([&] { return device().check_event(event, false); });
}
HIP_API int hipEventQuery(void* event) {
  return hipEventSynchronize(event);
}
HIP_API int hipEventElapsedTime(float* milliseconds, void* start, void* stop) {
  return run([&] { return device().elapsed(milliseconds, start, stop); });
}

// ---- modules and launches ----------------------------------------------------------------------

HIP_API int hipModuleLoadData(void** module, const void* image) {
  return run([&] { return device().load(image, module); });
}
HIP_API int hipModuleLoadDataEx(void** module, const void* image, unsigned, int*, void**) {
  return hipModuleLoadData(module, image);
}
HIP_API int hipModuleLoad(void** module, const char* path) {
  return run([&] { return device().load_file(path, module); });
}
HIP_API int hipModuleUnload(void* module) {
  return run([&] { return device().unload(module); });
}
HIP_API int hipModuleGetFunction(void** function, void* module, const char* name) {
  return run([&] { return device().function(module, name, function); });
}
HIP_API int hipModuleGetGlobal(void** address, size_t* bytes, void* module, const char* name) {
  return run([&] { return device().variable(module, name, address, bytes); });
}
HIP_API int hipFuncSetAttribute(const void*, int, int) {
  return run([] { return success; });  // all LDS is there without asking
}
HIP_API int hipModuleLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                  unsigned block_x, unsigned block_y, unsigned block_z,
                                  unsigned shared_bytes, void* stream, void** parameters,
                                  void** extra) {
  return run([&] {
    if (const Error error = device().check_stream(stream); error != success) return error;
    const LaunchShape shape{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes};
    return device().launch(function, shape, parameters, extra);
  });
}
