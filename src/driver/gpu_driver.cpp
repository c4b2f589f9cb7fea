#include "driver/gpu_driver.h"

namespace attn {
namespace {

// The two APIs agree on these codes.
constexpr int error_out_of_memory = 2;
constexpr int error_no_device = 100;
constexpr int error_invalid_device = 101;
constexpr int error_not_supported = 801;

struct Bytes {
  size_t count;
};
std::ostream& operator<<(std::ostream& out, Bytes bytes) {
  return out << bytes.count << " bytes";
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const Launch& l) {
  return out << "grid " << l.grid[0] << " x " << l.grid[1] << " x " << l.grid[2] << ", block "
             << l.block[0] << " x " << l.block[1] << " x " << l.block[2] << ", shared memory "
             << l.shared_bytes << " bytes, parameters " << l.kernarg_bytes << " bytes";
}

std::ostream& operator<<(std::ostream& out, const TensorMap& map) {
  const auto list = [&](const char* name, const auto& values, int count) {
    out << name;
    for (int i = 0; i < count; ++i) out << ' ' << values[i];
  };
  list("sizes", map.size, map.rank);
  list(", strides", map.stride, map.rank - 1);
  list(", box", map.box, map.rank);
  return out << ", " << map.element_bytes << " bytes an element";
}

Status GpuCalls::failure(const char* function, const std::string& what, int code) const {
  attn_status status = ATTN_DRIVER_ERROR;
  if (code == error_out_of_memory) status = ATTN_OUT_OF_MEMORY;
  if (code == error_not_supported) status = ATTN_UNSUPPORTED;
  if (code == error_no_device || code == error_invalid_device) status = ATTN_NO_DEVICE;
  return {status, join(function, "(", what, "): ", error(code))};
}

Status GpuCalls::device_handle(const char* vendor, int ordinal, int* handle) const {
  int count = 0;
  ATTN_TRY(run(device_count, "", &count));
  if (count == 0) return {ATTN_NO_DEVICE, join(vendor, ": the driver sees no device")};
  if (ordinal < 0 || ordinal >= count) {
    return {ATTN_NO_DEVICE, join("device: ", ordinal, "; this ", vendor, " driver has ", count,
                                 ", numbered from 0")};
  }
  return run(device_get, ordinal, handle, ordinal);
}

Status GpuDriver::alloc(size_t bytes, void** memory) {
  return beside_captures([&]() -> Status {
    void* fresh = nullptr;
    ATTN_TRY(calls_.run(calls_.alloc, Bytes{bytes}, &fresh, bytes));
    *memory = fresh;
    return {};
  });
}

Status GpuDriver::free(void* memory) {
  if (!memory) return {};
  return beside_captures([&] { return calls_.run(calls_.free, memory, memory); });
}

Status GpuDriver::copy_in(void* dst, const void* host_src, size_t bytes, void* stream) {
  return inside([&]() -> Status {
    ATTN_TRY(calls_.run(calls_.copy_in, Bytes{bytes}, dst, host_src, bytes, stream));
    return calls_.run(calls_.synchronize, "", stream);
  });
}

Status GpuDriver::copy_out(void* host_dst, const void* src, size_t bytes, void* stream) {
  return inside([&]() -> Status {
    ATTN_TRY(calls_.run(calls_.copy_out, Bytes{bytes}, host_dst, src, bytes, stream));
    return calls_.run(calls_.synchronize, "", stream);
  });
}

Status GpuDriver::copy(void* dst, const void* src, size_t bytes, void* stream) {
  return inside([&] { return calls_.run(calls_.copy, Bytes{bytes}, dst, src, bytes, stream); });
}

Status GpuDriver::fill(void* dst, uint8_t value, size_t bytes, void* stream) {
  return inside([&] { return calls_.run(calls_.fill, Bytes{bytes}, dst, value, bytes, stream); });
}

Status GpuDriver::synchronize(void* stream) {
  return inside([&] { return calls_.run(calls_.synchronize, "", stream); });
}

Status GpuDriver::load(std::span<const unsigned char> image, Module* module) {
  return beside_captures([&]() -> Status {
    void* loaded = nullptr;
    ATTN_TRY(calls_.run(calls_.module_load, Bytes{image.size()}, &loaded, image.data()));
    *module = static_cast<Module>(loaded);
    return {};
  });
}

Status GpuDriver::load_file(const char* path, Module* module) {
  return beside_captures([&]() -> Status {
    void* loaded = nullptr;
    ATTN_TRY(calls_.run(calls_.module_load_file, path, &loaded, path));
    *module = static_cast<Module>(loaded);
    return {};
  });
}

void GpuDriver::unload(Module module) {
  (void)beside_captures([&] { return calls_.run(calls_.module_unload, "", module); });
}

Status GpuDriver::function(Module module, const char* symbol, uint32_t shared_bytes,
                           Function* function) {
  return beside_captures([&]() -> Status {
    void* found = nullptr;
    ATTN_TRY(calls_.run(calls_.module_function, symbol, &found, module, symbol));
    if (shared_bytes > 0) ATTN_TRY(allow_shared(static_cast<Function>(found), shared_bytes));
    *function = static_cast<Function>(found);
    return {};
  });
}

Status GpuDriver::encode(const TensorMap& map, void* encoded) {
  return inside([&] { return encode_map(map, encoded); });
}

Status GpuDriver::launch(const Launch& l, void* stream) {
  return inside([&]() -> Status {
    for (size_t i = 0; i < l.map_base.size(); ++i)
      ATTN_TRY(set_address(static_cast<unsigned char*>(l.kernarg) + i * tensor_map_bytes,
                           l.map_base[i]));
    if (!l.map_base
             .empty()) {  // aligned to 64 bytes, where in the parameter space the driver knows
      void* parameters[] = {l.kernarg};
      return start(l, stream, parameters, nullptr);
    }
    size_t bytes = l.kernarg_bytes;
    void* extra[] = {reinterpret_cast<void*>(1),  // LAUNCH_PARAM_BUFFER_POINTER of both
                     l.kernarg,
                     reinterpret_cast<void*>(2),  // LAUNCH_PARAM_BUFFER_SIZE
                     &bytes, launch_end_};
    return start(l, stream, nullptr, extra);
  });
}

Status GpuDriver::start(const Launch& l, void* stream, void** parameters, void** extra) {
  return calls_.run(calls_.launch, l, l.function, l.grid[0], l.grid[1], l.grid[2], l.block[0],
                    l.block[1], l.block[2], l.shared_bytes, stream, parameters, extra);
}

}  // namespace attn
