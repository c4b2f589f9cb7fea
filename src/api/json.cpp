#include "api/json.h"

#include <cstdint>

namespace attn {
namespace {

// The length of the UTF-8 sequence at the start of `text`; 0 if there is none.
size_t utf8_length(std::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? uint8_t(text[i]) : 0; };
  const uint8_t first = byte(0);
  if (first < 0x80) return 1;
  const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  for (size_t i = 1; i < length; ++i)
    if (byte(i) >> 6 != 2) return 0;
  uint32_t code = first & (0xff >> (length + 1));
  for (size_t i = 1; i < length; ++i) code = code << 6 | (byte(i) & 0x3f);
  constexpr uint32_t smallest[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = code >= 0xd800 && code < 0xe000;
  return first >= 0xc0 && first < 0xf8 && code >= smallest[length] && code < 0x110000 && !surrogate
             ? length
             : 0;
}

template <class Row>
std::string joined(char open, const std::vector<Row>& rows, char close) {
  std::string text(1, open);
  for (const Row& row : rows) {
    if (text.size() > 1) text += ',';
    if constexpr (requires { row.first; })
      text += Json(row.first).text + ':' + row.second.text;
    else
      text += row.text;
  }
  return text + close;
}

}  // namespace

Json::Json(std::string_view value) : text("\"") {
  constexpr char hex[] = "0123456789abcdef";
  while (!value.empty()) {
    const size_t length = utf8_length(value);
    const char c = value[0];
    if (length == 0) {
      text += "\xef\xbf\xbd";
    } else if (length > 1) {
      text += value.substr(0, length);
    } else if (uint8_t(c) < 0x20) {
      text += {'\\', 'u', '0', '0', hex[c >> 4], hex[c & 15]};
    } else {
      if (c == '"' || c == '\\') text += '\\';
      text += c;
    }
    value.remove_prefix(length == 0 ? 1 : length);
  }
  text += '"';
}
Json::Json(const JsonList& list) : text(joined('[', list, ']')) {}
Json::Json(const JsonObject& object) : text(joined('{', object, '}')) {}

}  // namespace attn
