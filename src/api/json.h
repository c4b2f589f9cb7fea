// JSON texts, made from the inside out.
#pragma once
#include <concepts>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace attn {

// A value's text.
struct Json {
  Json(std::nullptr_t) : text("null") {}
  Json(bool value) : text(value ? "true" : "false") {}
  template <std::integral T>
  Json(T value) : text(std::to_string(value)) {}
  // Bytes that are no UTF-8 become U+FFFD.
  Json(std::string_view value);
  Json(const char* value) : Json(std::string_view(value)) {}
  Json(const std::string& value) : Json(std::string_view(value)) {}
  Json(const std::vector<Json>& list);
  Json(const std::vector<std::pair<const char*, Json>>& object);

  std::string text;
};
using JsonList = std::vector<Json>;
using JsonObject = std::vector<std::pair<const char*, Json>>;

}  // namespace attn
