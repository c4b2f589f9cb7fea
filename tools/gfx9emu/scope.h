// How far an access, a write-back or an invalidation reaches.
#pragma once
#include <cstdint>

namespace gfx9emu {

// The numbers are those of sc0 (1) and sc1 (2).
enum class Scope : uint8_t { Wave, Workgroup, Agent, System };

}  // namespace gfx9emu
