#include "gfx9emu/emu.h"

namespace gfx9emu {

Report launch(Memory&, const Kernel& kernel, Dim3, Dim3, std::span<const std::byte>, uint32_t,
              const Options&) {
  Report report;
  Fault fault;
  fault.kernel = kernel.name;
  fault.message = "not built yet";
  report.faults.push_back(fault);
  return report;
}

}  // namespace gfx9emu
