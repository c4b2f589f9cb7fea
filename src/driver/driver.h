// The narrow interface to a vendor's driver, as kernels need it. Only its implementations, cuda.cpp
// and hip.cpp, know an API's names.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/status.h"
#include "driver/device.h"
#include "driver/launch.h"

namespace attn {

class Timing;

// What a driver knows of the code of a function; -1: nothing.
struct FunctionInfo {
  int threads = -1;              // of a block, at most
  int static_shared_bytes = -1;  // with what the device takes of each block, where code counts it
  int64_t parameter_bytes = -1;
};

// One device of one driver. Calls are thread-safe; those that launch neither allocate nor lock. The
// device's context is made current for the duration of a call only.
class Driver {
 public:
  virtual ~Driver() = default;
  virtual const DeviceInfo& device() const = 0;

  virtual Status alloc(size_t bytes, void** memory) = 0;
  virtual Status free(void* memory) = 0;
  virtual Status copy_in(void* dst, const void* host_src, size_t bytes, void* stream) = 0;
  virtual Status copy_out(void* host_dst, const void* src, size_t bytes, void* stream) = 0;
  virtual Status copy(void* dst, const void* src, size_t bytes, void* stream) = 0;
  virtual Status fill(void* dst, uint8_t value, size_t bytes, void* stream) = 0;
  virtual Status synchronize(void* stream) = 0;

  virtual Status load(std::span<const unsigned char> image, Module* module) = 0;
  virtual Status load_file(const char* path, Module* module) = 0;
  virtual void unload(Module module) = 0;
  // Raises the function's limit of dynamic shared memory to shared_bytes.
  virtual Status function(Module module, const char* symbol, uint32_t shared_bytes,
                          Function* function) = 0;
  virtual Status inspect(Function, FunctionInfo*) { return {}; }
  // `encoded`: tensor_map_bytes, aligned to 64.
  virtual Status encode(const TensorMap& map, void* encoded) = 0;
  virtual Status launch(const Launch& launch, void* stream) = 0;

  // For those who measure: timing.h.
  virtual Timing& timing() = 0;
};

// `path`: a driver library to open instead of the system's, or nullptr. The emulator is only ever
// opened by a path, by default that of libattn-hipemu.so next to this library. The library stays
// open for the life of the process. cuda without a device: that of the calling thread's current
// context, else 0. Errors: DRIVER_MISSING, NO_DEVICE, DRIVER_ERROR.
Status open_cuda(const char* path, std::optional<int> device, std::shared_ptr<Driver>* driver);
Status open_hip(const char* path, bool emulator, int device, std::shared_ptr<Driver>* driver);

// All devices of a driver; creates no context. On failure `devices` has those before it.
Status list_cuda(const char* path, std::vector<DeviceInfo>* devices);
Status list_hip(const char* path, bool emulator, std::vector<DeviceInfo>* devices);
// The device of the calling thread's current context, where there is one.
std::optional<int> current_cuda(const char* path);

}  // namespace attn
