#include "catalog/machine.h"

#include "cpu/host_kernel.h"

namespace attn {

std::string without_code(const char* image, const Machine& machine) {
  if (machine.file && machine.file->without(image).empty()) return "";
  const Image* found;
  return find_image(image, machine.device->arch, &found).text;
}

std::string absent(const Kernel& kernel, const Machine& machine) {
  if (!machine.host_memory())
    return machine.file ? machine.file->without(image_of(kernel))
                        : without_code(image_of(kernel), machine);
  if (!kernel.host) return "not in this build";
  if (!kernel.host->runs_here()) return join("this processor has no ", kernel.host->isa);
  return "";
}

}  // namespace attn
