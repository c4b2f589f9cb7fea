#include "catalog/machine.h"

#include <cstring>

#include "cpu/host_kernel.h"

namespace attn {

std::string without_code(const char* image, const Machine& machine) {
  if (machine.file && machine.file->without(image).empty()) return "";
  const Image* found;
  return find_image(image, machine.device->arch, &found).text;
}

std::string no_code(Op op, attn_backend backend, const std::string& arch) {
  std::string archs;  // of all that there is, each once
  for (const Image& image : images()) {
    const bool listed = (", " + archs + ",").find(join(", ", image.arch, ",")) != std::string::npos;
    for (const Kernel& kernel : catalog()) {
      if (kernel.op != op || kernel.backend != backend) continue;
      if (std::strcmp(image.name, image_of(kernel)) != 0) continue;
      if (arch_runs_on(image.arch, arch)) return "";
      if (!listed) archs += (archs.empty() ? "" : ", ") + std::string(image.arch);
      break;
    }
  }
  const char* name = attn_backend_string(backend);
  if (!archs.empty())
    return join("no ", name, " kernel of this build has code for ", arch, "; accepted: ", archs);
  return join("this build has no ", name, " kernels: it was made without ",
              backend == ATTN_BACKEND_HIP ? "LLVM's AMDGPU assembler" : "a CUDA toolkit");
}

std::string absent(const Kernel& kernel, const Machine& machine) {
  if (kernel.composed != Composed::no) return "";
  if (!machine.host_memory())
    return machine.file ? machine.file->without(image_of(kernel))
                        : without_code(image_of(kernel), machine);
  if (!kernel.host) return "not in this build";
  if (!kernel.host->runs_here()) return join("this processor has no ", kernel.host->isa);
  return "";
}

bool present(const Kernel& kernel, const Machine& machine) {
  if (kernel.composed != Composed::no || machine.host_memory() || machine.file)
    return absent(kernel, machine).empty();
  return image_for(image_of(kernel), machine.device->arch) != nullptr;
}

}  // namespace attn
