// Pictures of few colours as PNG.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace attn::tools {

struct Picture {
  uint32_t width = 0, height = 0;
  std::vector<std::array<uint8_t, 3>> palette;
  std::vector<uint8_t> pixels;  // [height, width] indices into the palette
};

// The bytes of a PNG file; its data is stored, not compressed.
std::string png_bytes(const Picture& picture);

}  // namespace attn::tools
