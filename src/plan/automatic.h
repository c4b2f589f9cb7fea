// What ATTN_BACKEND_AUTO takes.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "runtime/context.h"

namespace attn {

// In this order; then cpu.
constexpr attn_backend automatic_backends[] = {ATTN_BACKEND_CUDA, ATTN_BACKEND_HIP};

// The devices that a backend's driver shows.
struct Shown {
  attn_backend backend;
  Status status = {};  // of the driver
  std::vector<DeviceInfo> devices = {};
  std::optional<int> current = {};  // cuda: of the calling thread's current context
};
// By the system's driver of one of automatic_backends.
Shown show_devices(attn_backend backend);

// Why AUTO passes a device by; "" if it may take it: it takes none that this build has no forward
// kernel for.
std::string passed_by(attn_backend backend, const DeviceInfo& device);
// The first device that is not passed by, none if there is no such one. Where `wanted` or, on cuda,
// a current context names a device, no other is looked at.
std::optional<int> taken_device(const Shown& shown, std::optional<int> wanted);

struct Automatic {
  attn_backend backend = ATTN_BACKEND_CPU;
  int device = 0;
};
// The first backend that has a device to take; cpu if none has.
Automatic automatic(const std::vector<Shown>& shown, std::optional<int> wanted);

}  // namespace attn
