#include "gfx9emu/decode.h"

#include <llvm-c/Disassembler.h>
#include <llvm-c/Target.h>

#include <cstdio>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "gfx9emu/ops.h"

extern "C" {
void LLVMInitializeAMDGPUTargetInfo(void);
void LLVMInitializeAMDGPUTarget(void);
void LLVMInitializeAMDGPUTargetMC(void);
void LLVMInitializeAMDGPUDisassembler(void);
}

namespace gfx9emu {

namespace {

// LLVM's printer does not survive an SDWA operand select of 7 or a dst_unused of 3, both reserved.
bool has_reserved_sdwa(uint32_t word, uint32_t next) {
  const bool is_vop = word >> 31 == 0, is_vopc = word >> 25 == 0x3e;
  if (!is_vop || (word & 0x1ff) != 0xf9) return false;
  const bool sources = (next >> 16 & 7) == 7 || (next >> 24 & 7) == 7;
  const bool destination = !is_vopc && ((next >> 8 & 7) == 7 || (next >> 11 & 3) == 3);
  return sources || destination;
}

// Nor does that of LLVM 22 survive a literal (255) as an operand of VOP3 or as a buffer's offset,
// which gfx9 has not, the destination 255 of a VOP3 comparison, formats that MFMA with formats
// in it do not have, and v_madmk_f16 and v_madak_f16, which gfx942 has no more.
bool has_reserved_operand(uint32_t word, uint32_t next) {
  constexpr uint32_t v_madmk_f16 = 36, v_madak_f16 = 37;
  if (word >> 25 == v_madmk_f16 || word >> 25 == v_madak_f16) return true;
  constexpr uint32_t literal = 0xff;
  const uint32_t encoding = word >> 26, vop3 = 0x34, mubuf = 0x38, mtbuf = 0x3a;
  if (encoding == mubuf || encoding == mtbuf) return next >> 24 == literal;
  if (encoding != vop3) return false;
  const uint32_t operation = word >> 16 & 0x3ff;
  if (operation < 0x100 && (word & 0xff) == literal) return true;
  // v_mfma_..._f8f6f4, after the word of scales that some begin with.
  if (operation == 0x3ac) return true;
  const bool formats = operation == 0x3ad || operation == 0x3ae;
  if (formats && ((word >> 8 & 7) > 4 || next >> 29 > 4)) return true;
  return (next & 0x1ff) == literal || (next >> 9 & 0x1ff) == literal ||
         (next >> 18 & 0x1ff) == literal;
}

}  // namespace

const char* class_name(Class cls) {
  static constexpr const char* names[class_count] = {
      "salu",  "smem",       "branch", "waitcnt", "nop",    "barrier", "end",  "control", "valu",
      "trans", "packed_f32", "mfma",   "lds",     "buffer", "global",  "flat", "scratch"};
  return names[static_cast<int>(cls)];
}

const Op* find_op(std::string_view name) {
  static const auto table = [] {
    std::unordered_map<std::string_view, const Op*> all;
    for (const auto ops :
         {salu_ops(), valu_ops(), cross_lane_ops(), mfma_ops(), lds_ops(), memory_ops()}) {
      for (const Op& op : ops) all.emplace(op.name, &op);
    }
    return all;
  }();
  const auto found = table.find(name);
  return found == table.end() ? nullptr : found->second;
}

const ArchFacts& facts_of(Arch arch) {
  static constexpr ArchFacts all[] = {{"gfx942", 0x4c, 65536}, {"gfx950", 0x4f, 163840}};
  return all[static_cast<int>(arch)];
}

bool Decoder::knows(Arch arch) {
  return arch == Arch::Gfx942 || GFX9EMU_LLVM >= 20;
}

Decoder::Decoder(Arch arch) : arch_(arch) {
  static std::once_flag once;
  std::call_once(once, [] {
    LLVMInitializeAMDGPUTargetInfo();
    LLVMInitializeAMDGPUTarget();
    LLVMInitializeAMDGPUTargetMC();
    LLVMInitializeAMDGPUDisassembler();
  });
  context_ = LLVMCreateDisasmCPUFeatures("amdgcn-amd-amdhsa", facts_of(arch).name, "", nullptr, 0,
                                         nullptr, nullptr);
}

Decoder::~Decoder() {
  if (context_) LLVMDisasmDispose(context_);
}

Inst Decoder::decode(std::span<const std::byte> code, uint64_t offset) const {
  Inst inst;
  inst.offset = offset;
  inst.size = 4;
  inst.arch = arch_;
  if (code.size() < 4) {
    inst.size = static_cast<uint32_t>(code.size());
    inst.text = "(end of code)";
    return inst;
  }
  uint32_t word = 0;
  std::memcpy(&word, code.data(), 4);
  char text[512] = "";
  // No instruction is longer; LLVM wants them writable, and LLVM 22 a missing literal to be there.
  uint8_t bytes[20] = {};
  const size_t count = code.size() < sizeof bytes ? code.size() : sizeof bytes;
  std::memcpy(bytes, code.data(), count);
  uint32_t second = 0;
  std::memcpy(&second, bytes + 4, 4);
  const bool printable =
      context_ && !has_reserved_sdwa(word, second) && !has_reserved_operand(word, second);
  const size_t size =
      printable ? LLVMDisasmInstruction(context_, bytes, sizeof bytes, 0, text, sizeof text) : 0;
  if (size == 0 || size % 4 != 0 || size > code.size()) {
    char number[32];
    std::snprintf(number, sizeof number, ".long 0x%08x", word);
    inst.text = number;
    return inst;
  }
  inst.size = static_cast<uint32_t>(size);
  inst.has_literal = word >> 31 == 0 && (word & 0x1ff) == 0xff;  // VOP1, VOP2, VOPC
  const std::string error = parse_instruction(text, inst);
  if (!error.empty()) inst.run = nullptr;
  if (inst.name == "ds_swizzle_b32") inst.imm = word & 0xffff;
  return inst;
}

Program Decoder::decode_all(std::span<const std::byte> code, uint64_t base) const {
  Program program;
  program.base = base;
  program.at.assign(code.size() / 4, -1);
  for (uint64_t at = 0; at + 4 <= code.size();) {
    Inst inst = decode(code.subspan(at), base + at);
    program.at[at / 4] = static_cast<int32_t>(program.insts.size());
    at += inst.size;
    program.insts.push_back(std::move(inst));
  }
  return program;
}

}  // namespace gfx9emu
