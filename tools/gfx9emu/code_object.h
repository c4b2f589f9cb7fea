// A linked code object for gfx942 or gfx950, read as the ROCm runtime reads it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gfx9emu/inst.h"
#include "gfx9emu/lines.h"
#include "gfx9emu/memory.h"

namespace gfx9emu {

// The 64-byte kernel descriptor, decoded.
struct Descriptor {
  uint32_t lds_bytes = 0, scratch_bytes = 0, kernarg_bytes = 0;
  int64_t entry_offset = 0;
  // Registers allocated per lane: arch VGPRs below accum_offset, AGPRs from there to `vgprs`.
  uint32_t vgprs = 0, accum_offset = 0;
  uint32_t sgprs = 0;  // usable as s0..; vcc, flat_scratch and xnack_mask come on top
  uint32_t user_sgprs = 0, workitem_id_vgprs = 0;  // 0 x, 1 xy, 2 xyz
  bool workgroup_id_x = false, workgroup_id_y = false, workgroup_id_z = false,
       workgroup_info = false, scratch = false;
  bool dispatch_ptr = false, queue_ptr = false, kernarg_ptr = false, dispatch_id = false,
       flat_scratch_init = false, private_segment_size = false, dynamic_stack = false;
  uint8_t kernarg_preload_dwords = 0, kernarg_preload_offset = 0;
  // The MODE register at entry: round [3:0], denorm [7:4], DX10_CLAMP 8, IEEE 9, FP16_OVFL 23.
  uint32_t mode = 0;
};

struct KernelArg {
  std::string name, value_kind;  // "global_buffer", "by_value", "hidden_*", ...
  uint32_t offset = 0, size = 0;
};

struct Kernel {
  std::string name;
  Descriptor descriptor;
  uint64_t entry = 0;  // offset in the image
  std::vector<KernelArg> args;
  uint32_t kernarg_bytes = 0;  // of the metadata
  uint32_t max_workgroup_size = 1024;
  uint32_t vgpr_count = 0, agpr_count = 0, sgpr_count = 0;  // as the metadata says
  const class CodeObject* object = nullptr;
};

struct Symbol {
  std::string name;
  uint64_t offset = 0, bytes = 0;  // in the image
};

// A feature of the device that code may ask for in e_flags. Any: it works with and without.
enum class Setting : uint8_t { Any, Off, On };

class CodeObject {
 public:
  // Null, and a sentence in *error, if the bytes are not a code object that a gfx942 or gfx950
  // runs. With a Memory the image is loaded there (and freed with the object); without one, it is
  // only read.
  static std::unique_ptr<CodeObject> load(std::span<const std::byte> file, Memory* memory,
                                          std::string* error);
  ~CodeObject();
  CodeObject(const CodeObject&) = delete;
  CodeObject& operator=(const CodeObject&) = delete;

  const std::vector<Kernel>& kernels() const { return kernels_; }
  const Kernel* kernel(std::string_view name) const;  // null: there is none
  const std::vector<Symbol>& variables() const { return variables_; }
  const Program& program() const { return program_; }
  const LineTable& lines() const { return lines_; }
  uint64_t address() const { return address_; }  // of the image in Memory; 0 if only read
  Arch arch() const { return arch_; }
  // What it was made for: repeating loads after page faults, and memory with ECC.
  Setting xnack() const { return xnack_; }
  Setting sramecc() const { return sramecc_; }
  const std::vector<std::byte>& image() const { return image_; }

 private:
  CodeObject() = default;

  std::vector<std::byte> image_;
  std::vector<Kernel> kernels_;
  std::vector<Symbol> variables_;
  Program program_;
  LineTable lines_;
  Memory* memory_ = nullptr;
  uint64_t address_ = 0;
  Arch arch_ = Arch::Gfx942;
  Setting xnack_ = Setting::Any, sramecc_ = Setting::Any;

  friend class Loader;
};

}  // namespace gfx9emu
