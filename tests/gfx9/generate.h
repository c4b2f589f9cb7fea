// Assembles gfx942 code while a test runs, with descriptors from tools/amdhsa.
#pragma once
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

// LLVM's programs and Python are there.
inline bool can_generate() {
  return std::system("'" ATTN_PYTHON "' '" ATTN_AMDHSA "' llvm >/dev/null 2>&1") == 0;
}

// The linked code object; empty with the tool's words in *error if it fails.
inline std::vector<std::byte> generate(const std::string& source, std::string* error,
                                       const std::string& cpu = "gfx942") {
  namespace fs = std::filesystem;
  static int count = 0;
  const fs::path stem = fs::temp_directory_path() /
                        ("attn-gfx9-" + std::to_string(getpid()) + "-" + std::to_string(count++));
  const std::string s = stem.string() + ".s", o = stem.string() + ".hsaco",
                    log = stem.string() + ".log";
  std::ofstream(s) << source;
  const std::string command = std::string("'" ATTN_PYTHON "' '" ATTN_AMDHSA "' generate '") + s +
                              "' -o '" + o + "' -mcpu " + cpu + " >'" + log + "' 2>&1";
  const int status = std::system(command.c_str());
  const auto read = [](const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return std::vector<char>((std::istreambuf_iterator<char>(in)), {});
  };
  std::vector<std::byte> bytes;
  if (status == 0) {
    const std::vector<char> chars = read(o);
    bytes.resize(chars.size());
    std::memcpy(bytes.data(), chars.data(), chars.size());
  } else {
    const std::vector<char> chars = read(log);
    error->assign(chars.begin(), chars.end());
  }
  for (const std::string& path : {s, o, log}) fs::remove(path);
  return bytes;
}
