// What kernels are chosen for.
#pragma once
#include <string>

#include "catalog/catalog.h"

namespace attn {

// A file of device code that stands in for the library's own.
class CodeFile {
 public:
  virtual ~CodeFile() = default;
  // Why it has no code of that name; "" if it has.
  virtual std::string without(const char* image) const = 0;
};

// A backend, and the device that it has or would have: a description is enough to choose by.
struct Machine {
  attn_backend backend = ATTN_BACKEND_AUTO;
  int threads = 0;                     // reference, cpu
  const DeviceInfo* device = nullptr;  // cuda, hip, hip-emu
  const CodeFile* file = nullptr;      // if there is one, only its kernels are chosen

  bool host_memory() const {
    return backend == ATTN_BACKEND_REFERENCE || backend == ATTN_BACKEND_CPU;
  }
  // That of its rows: hip-emu runs those of hip.
  attn_backend row_backend() const {
    return backend == ATTN_BACKEND_HIP_EMU ? ATTN_BACKEND_HIP : backend;
  }
};

// Why no kernel of an operation and backend has code for a device of `arch`; "" if one has. A
// backend is worth choosing for a device where this says nothing of Op::forward.
std::string no_code(Op op, attn_backend backend, const std::string& arch);
// Why a kernel cannot run on a machine at all; "" if it can.
std::string absent(const Kernel& kernel, const Machine& machine);
bool present(const Kernel& kernel, const Machine& machine);
// The same of an image, which the library has where the file lacks it.
std::string without_code(const char* image, const Machine& machine);

}  // namespace attn
