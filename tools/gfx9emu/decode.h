// Decoding: LLVM turns bytes into text, this turns the text into an Inst, once per instruction.
#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "gfx9emu/inst.h"

namespace gfx9emu {

// "" or why `text` is not understood. `inst` keeps its offset, size and architecture.
std::string parse_instruction(std::string_view text, Inst& inst);

// Which operands an index is added to, by s_set_gpr_idx_on's bits: sources 0..2, the destination.
inline constexpr uint32_t gpr_idx_dst = 8;
// The instruction with its registers of `file` moved on where `which` says so.
Inst move_registers(const Inst& inst, RegFile file, uint16_t by, uint32_t which);

// Makes a load into half a register do that to the other half; others are left alone.
void set_other_half(Inst& inst, D16 other_half);

class Decoder {
 public:
  explicit Decoder(Arch arch = Arch::Gfx942);
  ~Decoder();
  Decoder(const Decoder&) = delete;
  // Whether LLVM knows it.
  static bool knows(Arch arch);
  // Sets offset, size, text and all else. Bytes that are no instruction: size 4, text ".long 0x..".
  Inst decode(std::span<const std::byte> code, uint64_t offset) const;
  // From front to back; words that are no instruction are stepped over.
  Program decode_all(std::span<const std::byte> code, uint64_t base) const;

 private:
  Arch arch_;
  void* context_;  // LLVMDisasmContextRef
};

}  // namespace gfx9emu
