#include "plan/automatic.h"

namespace attn {

Shown show_devices(attn_backend backend) {
  Shown shown{.backend = backend};
  if (backend == ATTN_BACKEND_CUDA) {
    shown.status = list_cuda(nullptr, &shown.devices);
    shown.current = current_cuda(nullptr);
  } else {
    shown.status = list_hip(nullptr, false, &shown.devices);
  }
  return shown;
}

std::string passed_by(attn_backend backend, const DeviceInfo& device) {
  return no_code(Op::forward, backend, device.arch);
}

std::optional<int> taken_device(const Shown& shown, std::optional<int> wanted) {
  const std::optional<int> only = wanted ? wanted : shown.current;
  for (const DeviceInfo& device : shown.devices)
    if ((!only || *only == device.ordinal) && passed_by(shown.backend, device).empty())
      return device.ordinal;
  return {};
}

Automatic automatic(const std::vector<Shown>& shown, std::optional<int> wanted) {
  for (const Shown& s : shown)
    if (const std::optional<int> device = taken_device(s, wanted)) return {s.backend, *device};
  return {};
}

}  // namespace attn
