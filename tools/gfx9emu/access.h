// One lane's access to one of the address spaces. Functions that return bool return false after a
// fault of the wave.
#pragma once
#include <cstdint>

#include "gfx9emu/inst.h"
#include "gfx9emu/wave.h"

namespace gfx9emu {

// The bytes at a device address, or null after a fault. `bytes` is 1, 2 or a multiple of 4, up
// to 64.
// `value`: those that are going to be written there, if they are known.
std::byte* device_bytes(Wave& w, uint64_t address, uint32_t bytes, bool read, bool write,
                        uint32_t align, const void* value = nullptr);
// Where a scalar load (s_load) begins.
uint64_t scalar_load_address(const Wave& w, const Inst& inst);
// LDS bytes [offset, offset + bytes).
// `value`: those that are going to be written there, if they are known.
std::byte* lds_bytes(Wave& w, uint64_t offset, uint32_t bytes, bool read, bool write, bool atomic,
                     uint32_t align, const void* value = nullptr);
// The lane's own scratch. `defined` gets the flags of the bytes, 0 or 1 each.
std::byte* scratch_bytes(Wave& w, int lane, uint64_t offset, uint32_t bytes, uint8_t** defined);

// *p = op(*p, data), atomically as far as the host's threads go; returns the old value. `compare`
// is for CmpSwap. `size` is 4 or 8.
uint64_t atomic_update(std::byte* p, Atomic op, uint32_t size, uint64_t data, uint64_t compare);

// The halves of its register that a load writes.
uint8_t loaded_halves(const Inst& inst);
// A sub-dword value as a load puts it into a register.
uint32_t extend_loaded(const Inst& inst, uint32_t value);

}  // namespace gfx9emu
