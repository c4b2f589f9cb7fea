// JSON texts beside a JSON library's.
#include <nlohmann/json.hpp>
#include <random>

#include "api/json.h"
#include "catch.h"

using namespace attn;

TEST_CASE("json: values", "[json]") {
  const Json inner = JsonObject{{"a", 1}, {"b\"", JsonList{}}, {"c", JsonObject{}}};
  const Json all = JsonList{inner, true, false, nullptr, "x\\y\n", int64_t{-1} << 63, ~uint64_t{0}};
  const auto parsed = nlohmann::json::parse(all.text);
  CHECK(parsed == nlohmann::json::parse(R"([{"a":1,"b\"":[],"c":{}},true,false,null,"x\\y\n",)"
                                        R"(-9223372036854775808,18446744073709551615])"));
}

TEST_CASE("json: any bytes become valid text", "[json]") {
  // Bytes of every kind: ASCII, control, continuation, starts of 2, 3 and 4, never valid ones.
  const unsigned char kinds[] = {'a',  '"',  '\\', 0,    9,    0x1f, 0x7f, 0x80, 0x8f,
                                 0x90, 0x9f, 0xa0, 0xbf, 0xc0, 0xc1, 0xc2, 0xdf, 0xe0,
                                 0xe2, 0xed, 0xef, 0xf0, 0xf3, 0xf4, 0xf5, 0xff};
  std::mt19937 random(1);
  int valid = 0;
  for (int i = 0; i < 100000; ++i) {
    std::string bytes(random() % 6, 0);
    for (char& b : bytes) b = char(kinds[random() % sizeof kinds]);
    std::string strict;
    try {
      strict = nlohmann::json(bytes).dump();
    } catch (const nlohmann::json::type_error&) {  // no UTF-8
    }
    const std::string text = Json(bytes).text;
    const auto parsed = nlohmann::json::parse(text, nullptr, false);
    INFO("bytes " << nlohmann::json(std::vector<uint8_t>(bytes.begin(), bytes.end())).dump());
    REQUIRE(parsed.is_string());
    REQUIRE_NOTHROW(parsed.dump());
    if (strict.empty()) {
      REQUIRE(text.find("\xef\xbf\xbd") != std::string::npos);
    } else {
      REQUIRE(parsed.get<std::string>() == bytes);
      ++valid;
    }
  }
  CHECK(valid > 1000);
}
