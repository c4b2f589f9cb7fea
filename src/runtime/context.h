// What calls share: a device or a pool of threads, and the modules that are loaded.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "catalog/machine.h"
#include "core/interrupt.h"
#include "cpu/pool.h"
#include "driver/driver.h"

namespace attn {

// Whether functions that are loaded are held against the steps that launch them: in debug builds,
// and in tests, which set it.
#ifdef NDEBUG
inline bool checks_code = false;
#else
inline bool checks_code = true;
#endif
// An ATTN_INTERNAL where a step does not launch what was compiled: other threads of a block,
// parameters of another size, less static shared memory.
Status check_code(const Step& step, const FunctionInfo& code, const DeviceInfo& device);

class Context final : public CodeFile {
 public:
  attn_backend backend = ATTN_BACKEND_AUTO;
  std::shared_ptr<Driver> driver;    // cuda, hip, hip-emu
  std::unique_ptr<ThreadPool> pool;  // reference, cpu
  Interrupt::Callback interrupted = nullptr;
  void* interrupted_user = nullptr;

  ~Context() override;
  bool host_memory() const { return !driver; }
  // Of one call.
  Interrupt interrupt() const { return Interrupt(interrupted, interrupted_user); }
  // What kernels are chosen for.
  Machine machine() const;
  // Kernels come from the file. Others that they launch come from it too, where it has them.
  Status use_file(const char* path);
  // The entry point of a step, its module loaded on first use and kept.
  Status function(const Step& step, Function* function);

  std::string without(const char* image) const override;

 private:
  Status load(const Step& step, Function* function);

  std::string file_;
  Module file_module_ = nullptr;
  std::mutex mutex_;
  std::map<const Image*, Module> modules_;
};

}  // namespace attn
