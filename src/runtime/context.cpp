#include "core/error.h"
#include "kernels/device_kernel.h"
#include "plan/plan.h"

namespace attn {

Context::~Context() {
  for (const auto& [image, module] : modules_) driver->unload(module);
  if (kernel_file_module) driver->unload(kernel_file_module);
}

Status Context::use_file(const char* path) {
  ATTN_TRY(driver->load_file(path, &kernel_file_module));
  kernel_file = path;
  return {};
}

std::string Context::without_code(const Kernel& kernel) const {
  const Image* image;
  if (!kernel_file_module) return find_image(kernel.name, driver->device().arch, &image).text;
  Function function;
  const Status found = driver->function(kernel_file_module, kernel.name, 0, &function);
  return found.ok() ? "" : join(kernel_file, ": ", found.text);
}

Status Context::function(const char* name, uint32_t kernarg_bytes, uint32_t static_shared_bytes,
                         uint32_t shared_bytes, Function* function) {
  const DeviceInfo& device = driver->device();
  if (kernarg_bytes > max_kernarg_bytes)
    return unsupported(name, ": ", kernarg_bytes, " bytes of parameters; accepted: up to ",
                       max_kernarg_bytes);
  const int64_t shared_total = int64_t{shared_bytes} + static_shared_bytes;
  if (shared_total > device.shared_bytes_max)
    return unsupported(name, ": needs ", shared_total, " bytes of shared memory; ", device.name,
                       " has ", device.shared_bytes_max);
  if (kernel_file_module) return driver->function(kernel_file_module, name, shared_bytes, function);
  const Image* image;
  ATTN_TRY(find_image(name, device.arch, &image));
  std::lock_guard lock(mutex_);
  auto found = modules_.find(image);
  if (found == modules_.end()) {
    Module module;
    ATTN_TRY(driver->load(image->bytes(), &module));
    found = modules_.emplace(image, module).first;
  }
  return driver->function(found->second, name, shared_bytes, function);
}

Status Context::function(const Kernel& kernel, uint32_t shared_bytes, Function* function) {
  return this->function(kernel.name, kernel.device->kernarg_bytes,
                        kernel.device->static_shared_bytes, shared_bytes, function);
}

Status Context::function(const FirstKernel& kernel, Function* function) {
  return this->function(kernel.name, kernel.kernarg_bytes, kernel.static_shared_bytes, 0, function);
}

}  // namespace attn
