// libFuzzer target: any bytes as a code object, and any bytes as the code of a kernel, which is
// then run. What the emulator refuses or faults on must come with a sentence.
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "gfx9emu/emu.h"

using namespace gfx9emu;

namespace {

void check(bool good) {
  if (!good) std::abort();
}

template <class T>
void put(std::vector<std::byte>& file, size_t at, T value) {
  if (file.size() < at + sizeof value) file.resize(at + sizeof value);
  std::memcpy(file.data() + at, &value, sizeof value);
}

// A code object of one kernel, k(out, in), around the given code. The file is
// loaded as it is: 0 header, 64 program headers, 256 symbols and their names, 512 descriptor, 1024
// section headers, 2048 metadata, 4096 code.
std::vector<std::byte> wrap(std::vector<std::byte> code) {
  while (code.empty() || code.size() % 4 != 0) code.push_back({});
  std::vector<std::byte> file;
  std::memcpy((file.resize(4096), file.data()), "\177ELF\2\1\1\100\3", 9);
  put<uint16_t>(file, 16, 3);
  put<uint16_t>(file, 18, 224);
  put<uint64_t>(file, 32, 64);
  put<uint64_t>(file, 40, 1024);
  put<uint32_t>(file, 48, 0x54c);
  put<uint16_t>(file, 54, 56);
  put<uint16_t>(file, 56, 3);
  put<uint16_t>(file, 58, 64);
  put<uint16_t>(file, 60, 2);
  nlohmann::json kernel = {{".name", "k"},
                           {".symbol", "k.kd"},
                           {".kernarg_segment_size", 16},
                           {".group_segment_fixed_size", 4096},
                           {".private_segment_fixed_size", 64},
                           {".max_flat_workgroup_size", 128}};
  kernel[".args"] = {{{".offset", 0}, {".size", 8}, {".value_kind", "global_buffer"}},
                     {{".offset", 8}, {".size", 8}, {".value_kind", "global_buffer"}}};
  const auto metadata = nlohmann::json::to_msgpack({{"amdhsa.kernels", {kernel}}});
  put<uint32_t>(file, 2048, 7);
  put<uint32_t>(file, 2052, static_cast<uint32_t>(metadata.size()));
  put<uint32_t>(file, 2056, 32);
  std::memcpy(file.data() + 2060, "AMDGPU", 7);
  std::memcpy(file.data() + 2068, metadata.data(), metadata.size());
  // Symbol 1: k.kd at 512.
  std::memcpy(file.data() + 400, "\0k.kd", 6);
  put<uint32_t>(file, 280, 1);
  put<uint64_t>(file, 288, 512);
  put<uint32_t>(file, 1024 + 4, 11);
  put<uint64_t>(file, 1024 + 24, 256);
  put<uint64_t>(file, 1024 + 32, 48);
  put<uint32_t>(file, 1024 + 40, 1);
  put<uint32_t>(file, 1088 + 4, 3);
  put<uint64_t>(file, 1088 + 24, 400);
  put<uint64_t>(file, 1088 + 32, 6);
  // Descriptor: 64 VGPRs, 32 of them arch, 106 SGPRs, f16 and f32 subnormals kept.
  put<uint32_t>(file, 512, 4096);
  put<uint32_t>(file, 516, 64);
  put<uint32_t>(file, 520, 16);
  put<uint64_t>(file, 528, 4096 - 512);
  put<uint32_t>(file, 556, 7);
  put<uint32_t>(file, 560, 7 | 12 << 6 | 0xf0000);
  put<uint32_t>(file, 564, 1 | 2 << 1 | 1 << 7);
  put<uint16_t>(file, 568, 8);
  file.insert(file.end(), code.begin(), code.end());
  const auto segment = [&](size_t n, uint32_t type, uint32_t flags, uint64_t at, uint64_t size) {
    const size_t header = 64 + 56 * n;
    put(file, header, type);
    put(file, header + 4, flags);
    for (const size_t field : {8, 16}) put(file, header + field, at);
    for (const size_t field : {32, 40}) put(file, header + field, size);
  };
  segment(0, 1, 4, 0, 4096);
  segment(1, 1, 5, 4096, file.size() - 4096);
  segment(2, 4, 4, 2048, 20 + metadata.size());
  return file;
}

bool is_sentence(const std::string& s) {
  return !s.empty() && s.size() < 2000 && s.find('\n') == s.npos;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const uint8_t choice = data[0];
  std::vector<std::byte> bytes(size - 1);
  std::memcpy(bytes.data(), data + 1, size - 1);
  // The bytes are the file; or changes of a good file, offset and value; or code.
  std::vector<std::byte> file = bytes;
  if (choice % 4 == 1) {
    file = wrap({});
    for (size_t i = 0; i + 3 <= bytes.size(); i += 3) {
      const size_t at = static_cast<size_t>(bytes[i]) | static_cast<size_t>(bytes[i + 1]) << 8;
      file[at % file.size()] = bytes[i + 2];
    }
  } else if (choice % 4 >= 2) {
    file = wrap(bytes);
  }
  Memory memory;
  std::string error;
  const auto object = CodeObject::load(file, &memory, &error);
  if (!object) {
    check(is_sentence(error));
    check(choice % 4 < 2);
    return 0;
  }
  const uint64_t args[] = {memory.allocate(1024), memory.allocate(1024)};
  memory.fill(args[1], 0x3c, 1024);
  for (const Kernel& kernel : object->kernels()) {
    const Report report =
        launch(memory, kernel, {1}, {choice & 64 ? 100u : 64u}, std::as_bytes(std::span(args)), 0,
               {.checks = (choice & 16) == 0, .seed = choice & 32u, .instruction_budget = 500});
    for (const Fault& f : report.faults) check(is_sentence(f.to_string()));
  }
  return 0;
}
