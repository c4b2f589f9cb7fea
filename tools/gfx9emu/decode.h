// Decoding: LLVM turns bytes into text, this turns the text into an Inst, once per instruction.
#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "gfx9emu/inst.h"

namespace gfx9emu {

// "" or why `text` is not understood. `inst` keeps its offset and size.
std::string parse_instruction(std::string_view text, Inst& inst);

class Decoder {
 public:
  Decoder();
  ~Decoder();
  // Sets offset, size, text and all else. Bytes that are no instruction: size 4, text ".long 0x..".
  Inst decode(std::span<const std::byte> code, uint64_t offset) const;
  // From front to back; words that are no instruction are stepped over.
  Program decode_all(std::span<const std::byte> code, uint64_t base) const;

 private:
  void* context_;  // LLVMDisasmContextRef
};

}  // namespace gfx9emu
