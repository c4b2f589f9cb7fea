#include "runtime/context.h"

namespace attn {

Context::~Context() {
  for (const auto& [image, module] : modules_) driver->unload(module);
  if (file_module_) driver->unload(file_module_);
}

Machine Context::machine() const {
  return {.backend = backend,
          .threads = pool ? pool->threads() : 0,
          .device = driver ? &driver->device() : nullptr,
          .file = file_module_ ? this : nullptr};
}

Status Context::use_file(const char* path) {
  ATTN_TRY(driver->load_file(path, &file_module_));
  file_ = path;
  return {};
}

std::string Context::without(const char* image) const {
  Function function;
  const Status found = driver->function(file_module_, image, 0, &function);
  return found.ok() ? "" : join(file_, ": ", found.text);
}

Status Context::function(const Step& step, Function* function) {
  const uint32_t shared_bytes = step.launch.shared_bytes;
  if (file_module_ && without(step.image).empty())
    return driver->function(file_module_, step.image, shared_bytes, function);
  const Image* image;
  ATTN_TRY(find_image(step.image, driver->device().arch, &image));
  std::lock_guard lock(mutex_);
  auto found = modules_.find(image);
  if (found == modules_.end()) {
    Module module;
    ATTN_TRY(driver->load(image->bytes(), &module));
    found = modules_.emplace(image, module).first;
  }
  return driver->function(found->second, step.image, shared_bytes, function);
}

}  // namespace attn
