#include "runtime/context.h"

namespace attn {
namespace {

constexpr int reserved_shared_bytes = 1024;  // by CUDA, of each block

}  // namespace

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

Status check_code(const Step& step, const FunctionInfo& code, const DeviceInfo& device) {
  const auto differs = [&](const char* what, int64_t compiled, int64_t planned) {
    return Status{ATTN_INTERNAL,
                  join(step.image, ": its code has ", compiled, " ", what, ", the plan ", planned)};
  };
  const uint32_t(&block)[3] = step.launch.block;
  const int64_t threads = int64_t{block[0]} * block[1] * block[2],
                parameters = int64_t(step.arguments.bytes.size());
  if (code.threads >= 0 && (step.fewer_threads ? threads > code.threads : threads != code.threads))
    return differs("threads of a block", code.threads, threads);
  // Code for sm_90 and newer counts what the device reserves, as drivers may.
  const int reserved = device.arch.starts_with("sm_8") ? 0 : reserved_shared_bytes;
  if (code.static_shared_bytes > int64_t{step.static_shared_bytes} + reserved)
    return differs("bytes of static shared memory", code.static_shared_bytes,
                   step.static_shared_bytes);
  if (code.parameter_bytes >= 0 && code.parameter_bytes != parameters)
    return differs("bytes of parameters", code.parameter_bytes, parameters);
  return {};
}

Status Context::function(const Step& step, Function* function) {
  ATTN_TRY(load(step, function));
  if (!checks_code) return {};
  FunctionInfo code;
  ATTN_TRY(driver->inspect(*function, &code));
  return check_code(step, code, driver->device());
}

Status Context::load(const Step& step, Function* function) {
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
