// Kernels from assembly text, for tests of the emulator.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "catch.h"
#include "gfx9emu/emu.h"

namespace gfx9emu::test {

inline std::vector<std::byte> read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const std::vector<char> chars((std::istreambuf_iterator<char>(in)), {});
  std::vector<std::byte> bytes(chars.size());
  if (!chars.empty()) std::memcpy(bytes.data(), chars.data(), chars.size());
  return bytes;
}

struct Source {
  std::string name, body;
  // Each kernel has 16 arch VGPRs, 16 AGPRs, s0..s25, 1024 bytes of LDS; f32 subnormals are kept.
  // Directives here, "NAME VALUE" a line, take the place of such defaults.
  std::string directives;
};

// All kernels in one code object: NAME(out, in), both pointers, s[0:1] the kernarg segment, s2 the
// workgroup, v0 the work item.
// `settings` are those of the target: ":xnack-", ":sramecc+".
inline std::vector<std::byte> assemble(const std::vector<Source>& kernels,
                                       const std::string& settings = "",
                                       const std::string& cpu = "gfx942") {
  const bool xnack = settings.starts_with(":x"), sramecc = settings.starts_with(":s");
  std::string text = ".amdgcn_target \"amdgcn-amd-amdhsa--" + cpu + settings + "\"\n.text\n";
  std::string metadata = ".amdgpu_metadata\namdhsa.version: [1, 2]\namdhsa.kernels:\n";
  for (const Source& k : kernels) {
    text += ".globl " + k.name + "\n.p2align 8\n.type " + k.name + ",@function\n" + k.name + ":\n" +
            k.body + "\ns_endpgm\n";
    text += ".rodata\n.p2align 6\n.amdhsa_kernel " + k.name + "\n" + k.directives;
    const std::pair<const char*, int> defaults[] = {{".amdhsa_user_sgpr_kernarg_segment_ptr", 1},
                                                    {".amdhsa_kernarg_size", 16},
                                                    {".amdhsa_next_free_vgpr", 32},
                                                    {".amdhsa_accum_offset", 16},
                                                    {".amdhsa_next_free_sgpr", 26},
                                                    {".amdhsa_group_segment_fixed_size", 1024},
                                                    {".amdhsa_float_denorm_mode_32", 3}};
    for (const auto& [name, value] : defaults) {
      if (k.directives.find(name) != std::string::npos) continue;
      text += std::string(name) + " " + std::to_string(value) + "\n";
    }
    text += ".end_amdhsa_kernel\n.text\n";
    metadata += "  - .name: " + k.name + "\n    .symbol: " + k.name +
                ".kd\n    .kernarg_segment_size: 16\n    .kernarg_segment_align: 8\n"
                "    .group_segment_fixed_size: 1024\n    .private_segment_fixed_size: 0\n"
                "    .wavefront_size: 64\n    .sgpr_count: 32\n    .vgpr_count: 32\n"
                "    .max_flat_workgroup_size: 1024\n    .args:\n"
                "      - {.offset: 0, .size: 8, .value_kind: global_buffer}\n"
                "      - {.offset: 8, .size: 8, .value_kind: global_buffer}\n";
  }
  text += metadata + ".end_amdgpu_metadata\n";

  const auto folder = std::filesystem::temp_directory_path() /
                      ("attn-gfx9-" + std::to_string(reinterpret_cast<uintptr_t>(&text)) + "-" +
                       std::to_string(std::hash<std::string>()(text)));
  std::filesystem::create_directories(folder);
  const std::string base = (folder / "k").string(), bin = ATTN_LLVM_BIN_DIR;
  std::ofstream(base + ".s") << text;
  const std::string command =
      bin + "/llvm-mc -triple=amdgcn-amd-amdhsa -mcpu=" + cpu +
      (xnack || sramecc ? std::string(" -mattr=") + settings.back() + (xnack ? "xnack" : "sramecc")
                        : std::string()) +
      " -filetype=obj " + base + ".s -o " + base + ".o && " + bin + "/ld.lld -shared " + base +
      ".o -o " + base + ".co";
  const int status = std::system(command.c_str());
  const std::vector<std::byte> bytes = read_file(base + ".co");
  std::filesystem::remove_all(folder);
  REQUIRE(status == 0);
  return bytes;
}

inline bool can_assemble() {
  return std::filesystem::exists(std::string(ATTN_LLVM_BIN_DIR) + "/llvm-mc") &&
         std::filesystem::exists(std::string(ATTN_LLVM_BIN_DIR) + "/ld.lld");
}

inline std::string faults_of(const Report& report) {
  std::string text;
  for (const Fault& f : report.faults) text += f.to_string() + "\n";
  return text;
}

}  // namespace gfx9emu::test
