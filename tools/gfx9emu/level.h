// What checks ask of code.
#pragma once
#include <cstdint>

namespace gfx9emu {

enum class Level : uint8_t {
  // What this project's kernels keep to: wait states as LLVM inserts them, arch VGPRs below
  // accum_offset.
  Strict,
  // What the ISA manual documents, for code that was made elsewhere. Where AMD's own kernels give
  // fewer wait states than it asks for, a warning.
  Isa,
};

}  // namespace gfx9emu
