// The address space as flat instructions see it.
#pragma once
#include <cstdint>

namespace gfx9emu {

// Upper halves of flat addresses that lead to LDS and to the lane's scratch.
inline constexpr uint64_t lds_aperture = 0x0001'0000'0000'0000;
inline constexpr uint64_t scratch_aperture = 0x0002'0000'0000'0000;
// Device memory begins here: where no Linux process has its heap, stack or libraries.
inline constexpr uint64_t device_base = 0x2000'0000'0000;

}  // namespace gfx9emu
