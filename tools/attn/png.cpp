#include "attn/png.h"

#include <algorithm>

namespace attn::tools {
namespace {

std::string big_endian(uint32_t value) {
  return {static_cast<char>(value >> 24), static_cast<char>(value >> 16),
          static_cast<char>(value >> 8), static_cast<char>(value)};
}

uint32_t crc32(const std::string& bytes) {
  static const auto table = [] {
    std::array<uint32_t, 256> made{};
    for (uint32_t n = 0; n < 256; ++n) {
      made[n] = n;
      for (int bit = 0; bit < 8; ++bit)
        made[n] = made[n] & 1 ? 0xedb88320u ^ made[n] >> 1 : made[n] >> 1;
    }
    return made;
  }();
  uint32_t crc = ~0u;
  for (const char c : bytes) crc = table[(crc ^ static_cast<uint8_t>(c)) & 255] ^ crc >> 8;
  return ~crc;
}

uint32_t adler32(const std::string& bytes) {
  uint32_t a = 1, b = 0;
  for (const char c : bytes) {
    a = (a + static_cast<uint8_t>(c)) % 65521;
    b = (b + a) % 65521;
  }
  return b << 16 | a;
}

std::string chunk(const std::string& type, const std::string& data) {
  return big_endian(static_cast<uint32_t>(data.size())) + type + data +
         big_endian(crc32(type + data));
}

// A zlib stream of stored blocks.
std::string stored(const std::string& data) {
  std::string out = "\x78\x01";
  for (size_t at = 0; at < data.size(); at += 65535) {
    const size_t n = std::min<size_t>(65535, data.size() - at);
    const bool last = at + n == data.size();
    for (const size_t part : {size_t{last}, n & 255, n >> 8, ~n & 255, ~n >> 8 & 255})
      out += static_cast<char>(part);
    out.append(data, at, n);
  }
  return out + big_endian(adler32(data));
}

}  // namespace

std::string png_bytes(const Picture& picture) {
  const std::string eight_bit_palette{8, 3, 0, 0, 0};
  std::string palette, rows;
  for (const auto& colour : picture.palette) palette.append(colour.begin(), colour.end());
  for (uint32_t y = 0; y < picture.height; ++y) {
    rows += '\0';  // no filter
    const auto row = picture.pixels.begin() + static_cast<std::ptrdiff_t>(y) * picture.width;
    rows.append(row, row + picture.width);
  }
  return "\x89PNG\r\n\x1a\n" +
         chunk("IHDR", big_endian(picture.width) + big_endian(picture.height) + eight_bit_palette) +
         chunk("PLTE", palette) + chunk("IDAT", stored(rows)) + chunk("IEND", "");
}

}  // namespace attn::tools
