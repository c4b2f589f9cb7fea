// The narrow interface to a vendor's driver. Only cuda.cpp and hip.cpp behind it know an API's
// names.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/status.h"

namespace attn {

struct DeviceInfo {
  int ordinal = 0;
  std::string name;  // as the driver says
  std::string arch;  // "sm_90", "gfx942" (feature suffixes such as :sramecc+ removed)
  int multiprocessors = 0;
  int64_t memory_bytes = 0;
  int64_t shared_bytes_max = 0;  // shared memory or LDS that one block can have
  int64_t l2_bytes = 0;          // cuda only
  std::string pci;               // "0000:1b:00.0"; cuda only
  bool tensor_maps = false;  // launches can have maps: sm_90 and newer, with a driver for CUDA 12
  std::string driver_version;
};

using Module = struct ModuleHandle*;
using Function = struct FunctionHandle*;
using Event = struct EventHandle*;
using Graph = struct GraphHandle*;

// A tensor that CUDA's copy engine reads box by box into shared memory, with the 128-byte swizzle.
// Its address, 16-byte aligned, comes with each launch. The first dimension is contiguous.
struct TensorMap {
  int rank;           // 2 to 5
  int element_bytes;  // 1 or 2
  int64_t size[5];    // elements
  int64_t stride[4];  // bytes, of dimensions from 1 on: multiples of 16
  int box[5];         // elements; of dimension 0 at most 128 bytes
};
constexpr size_t tensor_map_bytes = 128;

struct Launch {
  Function function = nullptr;
  uint32_t grid[3] = {1, 1, 1};
  uint32_t block[3] = {1, 1, 1};
  uint32_t shared_bytes = 0;  // dynamic
  void* kernarg = nullptr;    // the parameters, laid out as the kernel declares them
  size_t kernarg_bytes = 0;
  // Addresses of the tensor maps with which kernarg, which the launch then writes to, begins as
  // encode() made them.
  std::span<const void* const> map_base = {};
  // cuda: the kernel waits by itself (griddepcontrol) for the work before it in the stream, so its
  // blocks may be placed while that ends.
  bool starts_early = false;
};

inline bool is_empty(const Launch& launch) {
  return launch.grid[0] == 0 || launch.grid[1] == 0 || launch.grid[2] == 0;
}

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
  // `encoded`: tensor_map_bytes, aligned to 64.
  virtual Status encode(const TensorMap& map, void* encoded) = 0;
  virtual Status launch(const Launch& launch, void* stream) = 0;

  virtual Status event_create(Event* event) = 0;
  virtual void event_destroy(Event event) = 0;
  virtual Status event_record(Event event, void* stream) = 0;
  virtual Status event_elapsed(Event start, Event stop, float* milliseconds) = 0;

  // A stream that does not wait for the default one.
  virtual Status stream_create(void** stream) = 0;
  virtual void stream_destroy(void* stream) = 0;
  // What `work` launches on `stream`, a stream that stream_create made, as a graph; nothing runs.
  virtual Status capture(void* stream, const std::function<Status()>& work, Graph* graph) = 0;
  virtual Status graph_launch(Graph graph, void* stream) = 0;
  virtual void graph_destroy(Graph graph) = 0;

  // Does `work` with the device current, for vendors' libraries that look for it there.
  virtual Status with_device(const std::function<Status()>& work) = 0;
};

// `path`: a driver library to open instead of the system's, or nullptr. The emulator is only ever
// opened by a path, by default that of libattn-hipemu.so beside this library. The library stays
// open for the life of the process. cuda without a device: that of the calling thread's current
// context, else 0. Errors: DRIVER_MISSING, NO_DEVICE, DRIVER_ERROR.
Status open_cuda(const char* path, std::optional<int> device, std::shared_ptr<Driver>* driver);
Status open_hip(const char* path, bool emulator, int device, std::shared_ptr<Driver>* driver);

// All devices of a driver, for attn_info; creates no context.
Status list_cuda(const char* path, std::vector<DeviceInfo>* devices);
Status list_hip(const char* path, bool emulator, std::vector<DeviceInfo>* devices);

}  // namespace attn
