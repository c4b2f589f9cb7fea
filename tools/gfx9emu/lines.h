// Source lines from DWARF's .debug_line.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace gfx9emu {

struct Line {
  uint64_t offset = 0;  // first byte of code that this line stands for
  uint32_t file = 0;
  uint32_t line = 0;  // 0: none from here on
};

struct LineTable {
  std::vector<std::string> files;
  std::vector<Line> lines;  // by offset

  // "softmax.s:120", or "" where nothing is known.
  std::string find(uint64_t offset) const;
};

// Of the sections' bytes. What is malformed ends the table early.
LineTable read_line_table(std::span<const std::byte> debug_line,
                          std::span<const std::byte> debug_line_str,
                          std::span<const std::byte> debug_str);

}  // namespace gfx9emu
