// ggml's blocks: bytes worked by hand, and blocks of values beside ggml's own arithmetic, written
// from its description: float32, the reciprocal of d as it is before it is stored.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "../catch.h"
#include "../types.h"
#include "core/ggml.h"

namespace attn {
namespace {

const std::vector<attn_dtype> ggml = test::list_of(ggml_types);
constexpr size_t most_bytes = 34;
constexpr float nan = std::numeric_limits<float>::quiet_NaN();
constexpr float inf = std::numeric_limits<float>::infinity();

using Bytes = std::vector<unsigned char>;
// The last 16 or 32 bytes of a block are 0 but for those named.
Bytes block_of(attn_dtype type, Bytes head, std::vector<std::pair<int, int>> codes) {
  Bytes block = std::move(head);
  const size_t codes_at = block.size();
  block.resize(size_t(dtype_bytes(type)));
  for (const auto& [index, byte] : codes) block[codes_at + size_t(index)] = uint8_t(byte);
  return block;
}

TEST_CASE("ggml: elements are what the bytes say") {
  const auto values = [](attn_dtype type, const Bytes& block, std::vector<int> at) {
    REQUIRE(int64_t(block.size()) == dtype_bytes(type));
    std::vector<double> x;
    for (int i : at) x.push_back(decode_element(type, block.data(), i));
    return x;
  };
  using Values = std::vector<double>;
  // 0x3800 is 0.5 as f16, 0x4000 2, 0xc000 -2, 0x3c00 1.
  CHECK(values(ATTN_Q8_0, block_of(ATTN_Q8_0, {0x00, 0x38}, {{0, 0x81}, {31, 0x7f}}), {0, 1, 31}) ==
        Values{-63.5, 0, 63.5});
  CHECK(values(ATTN_Q4_0, block_of(ATTN_Q4_0, {0x00, 0x38}, {{0, 0x91}, {15, 0xf0}}),
               {0, 15, 16, 31, 1}) == Values{-3.5, -4, 0.5, 3.5, -4});
  CHECK(values(ATTN_Q4_1, block_of(ATTN_Q4_1, {0x00, 0x38, 0x00, 0xc0}, {{0, 0x91}, {15, 0xf0}}),
               {0, 15, 16, 31, 1}) == Values{-1.5, -2, 2.5, 5.5, -2});
  // Fifth bits of the elements 0, 9, 16 and 31.
  CHECK(values(ATTN_Q5_0,
               block_of(ATTN_Q5_0, {0x00, 0x40, 0x01, 0x02, 0x01, 0x80}, {{0, 0x91}, {15, 0xf0}}),
               {0, 1, 9, 15, 16, 31}) == Values{2, -32, 0, -32, 18, 30});
  CHECK(values(ATTN_Q5_1,
               block_of(ATTN_Q5_1, {0x00, 0x40, 0x00, 0x3c, 0x01, 0x02, 0x01, 0x80},
                        {{0, 0x91}, {15, 0xf0}}),
               {0, 1, 9, 15, 16, 31}) == Values{35, 1, 33, 1, 51, 63});
  CHECK(values(ATTN_IQ4_NL, block_of(ATTN_IQ4_NL, {0x00, 0x38}, {{0, 0x91}, {15, 0xf8}}),
               {0, 15, 16, 31, 1}) == Values{-52, 0.5, 6.5, 56.5, -63.5});
}

TEST_CASE("ggml: elements under a d or m of 0, subnormal, infinite and NaN") {
  for (attn_dtype type : ggml) {
    INFO(dtype_name(type));
    const BlockLayout layout = block_layout(type);
    // Code 1 in all elements, which is a value other than 0 in each type.
    const auto value = [&](uint16_t d, uint16_t m) {
      unsigned char block[most_bytes];
      std::fill_n(block, most_bytes, uint8_t(layout.code_bytes == 32 ? 0x01 : 0x11));
      if (layout.has_bit) std::fill_n(block + dtype_bytes(type) - 20, 4, uint8_t(0));
      std::memcpy(block, &d, 2);
      if (layout.has_min) std::memcpy(block + 2, &m, 2);
      return decode_element(type, block, 5);
    };
    const double unit = value(0x3c00, 0);
    CHECK(std::abs(unit) >= 1);
    CHECK(value(0, 0) == 0);
    CHECK(value(0x0001, 0) == unit * 0x1p-24);
    CHECK(value(0x8123, 0) == unit * -0x123 * 0x1p-24);
    CHECK(value(0x7c00, 0) == unit * inf);
    CHECK(std::isnan(value(0x7e01, 0)));
    if (!layout.has_min) continue;
    CHECK(value(0, 0x0001) == 0x1p-24);
    CHECK(value(0x3c00, 0x7c00) == inf);
    CHECK(std::isnan(value(0x3c00, 0x7e01)));
    // Exact, where float32 would lose the smaller one.
    CHECK(value(0x0001, 0x7bff) == 65504 + 0x1p-24);
  }
}

struct Block {
  float d, m;
  int code[32];
};

Block with_sign(const float* x, float n, float add, int most) {
  float amax = 0, max = 0;
  for (int i = 0; i < 32; ++i) {
    if (amax < std::fabs(x[i])) amax = std::fabs(x[i]), max = x[i];
  }
  const float d = max / -n, id = d != 0 ? 1.0f / d : 0.0f;
  Block block{f16_value(f16_code(d)), 0, {}};
  for (int i = 0; i < 32; ++i) block.code[i] = std::min(most, int(x[i] * id + add));
  return block;
}
Block with_min(const float* x, int most) {
  float min = x[0], max = x[0];
  for (int i = 0; i < 32; ++i) min = std::fmin(min, x[i]), max = std::fmax(max, x[i]);
  const float d = (max - min) / float(most), id = d != 0 ? 1.0f / d : 0.0f;
  Block block{f16_value(f16_code(d)), f16_value(f16_code(min)), {}};
  for (int i = 0; i < 32; ++i) block.code[i] = std::min(most, int((x[i] - min) * id + 0.5f));
  return block;
}
Block bytes_of(const float* x) {
  float amax = 0;
  for (int i = 0; i < 32; ++i) amax = std::fmax(amax, std::fabs(x[i]));
  const float d = amax / 127.0f, id = d != 0 ? 1.0f / d : 0.0f;
  Block block{f16_value(f16_code(d)), 0, {}};
  for (int i = 0; i < 32; ++i) block.code[i] = int(std::round(x[i] * id));
  return block;
}
Block next_values(const float* x) {
  constexpr int table[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                             1,    13,   25,  38,  53,  69,  89,  113};
  float amax = 0, max = 0;
  for (int i = 0; i < 32; ++i) {
    if (amax < std::fabs(x[i])) amax = std::fabs(x[i]), max = x[i];
  }
  const float id = max != 0 ? 1 / (max / -127) : 0;
  Block block{};
  double above = 0, below = 0;
  for (int i = 0; i < 32; ++i) {
    const auto distance = [&](int n) { return std::fabs(x[i] * id - float(table[n])); };
    int best = 15;
    for (int n = 14; n >= 0; --n)
      if (distance(n) < distance(best)) best = n;
    block.code[i] = best;
    above += double(x[i]) * x[i] * x[i] * table[best];
    below += double(x[i]) * x[i] * table[best] * table[best];
  }
  block.d = below > 0 ? f16_value(f16_code(float(above / below))) : 0;
  return block;
}
Block by_ggml(attn_dtype type, const float* x) {
  switch (type) {
    case ATTN_Q8_0:
      return bytes_of(x);
    case ATTN_Q4_0:
      return with_sign(x, 8, 8.5f, 15);
    case ATTN_Q5_0:
      return with_sign(x, 16, 16.5f, 31);
    case ATTN_Q4_1:
      return with_min(x, 15);
    case ATTN_Q5_1:
      return with_min(x, 31);
    default:
      return next_values(x);
  }
}

TEST_CASE("ggml: blocks of values") {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  for (int round = 0; round < 500; ++round) {
    float x[32];
    const float sigma = std::exp2(float(round % 24 - 12));
    for (float& value : x) value = sigma * normal(random) + (round % 3 == 0 ? 2 * sigma : 0);
    if (round == 0) std::fill_n(x, 32, 0.0f);
    if (round == 1) std::fill_n(x, 32, -3.25f);
    for (attn_dtype type : ggml) {
      INFO(dtype_name(type) << " round " << round);
      unsigned char bytes[most_bytes];
      encode_block(type, x, bytes, false);
      const Block want = by_ggml(type, x);
      const unsigned char* codes = bytes + dtype_bytes(type) - (type == ATTN_Q8_0 ? 32 : 16);
      for (int i = 0; i < 32; ++i) {
        int code = type == ATTN_Q8_0 ? int(int8_t(codes[i]))
                   : i < 16          ? codes[i] & 15
                                     : codes[i - 16] >> 4;
        if (type == ATTN_Q5_0 || type == ATTN_Q5_1) code |= (codes[i / 8 - 4] >> i % 8 & 1) << 4;
        REQUIRE(code == want.code[i]);
        const double value = type == ATTN_IQ4_NL ? iq4_nl_values[code]
                             : type == ATTN_Q4_0 ? code - 8
                             : type == ATTN_Q5_0 ? code - 16
                                                 : code;
        REQUIRE(decode_element(type, bytes, i) == value * want.d + want.m);
      }
    }
  }
}

// Blocks with one value that is worked by hand, so that a mistake of both above shows.
TEST_CASE("ggml: a block of values, worked by hand") {
  float x[32] = {-4, 3.5f, 1};
  x[16] = 2;
  const auto encoded = [&](attn_dtype type) {
    Bytes block(size_t(dtype_bytes(type)));
    encode_block(type, x, block.data(), false);
    return block;
  };
  // d = -4 / -8 = 0.5; codes 0, 15, 10, at 16: 12, all else 8.
  Bytes want = block_of(ATTN_Q4_0, {0x00, 0x38}, {});
  std::fill(want.begin() + 2, want.end(), uint8_t(0x88));
  want[2] = 0xc0, want[3] = 0x8f, want[4] = 0x8a;
  CHECK(encoded(ATTN_Q4_0) == want);
  // m = -4, d = 7.5 / 15 = 0.5; codes 0, 15, 10, at 16: 12, all else 8.
  want.insert(want.begin() + 2, {0x00, 0xc4});
  CHECK(encoded(ATTN_Q4_1) == want);
  // d = -4 / -16 = 0.25; codes 0, 30, 20, at 16: 24, all else 16.
  want =
      block_of(ATTN_Q5_0, {0x00, 0x34, 0xfe, 0xff, 0xff, 0xff}, {{0, 0x80}, {1, 0x0e}, {2, 0x04}});
  CHECK(encoded(ATTN_Q5_0) == want);
  // m = -4, d = 15.5 / 31 = 0.5; codes 0, 31, 10, at 16: 12, all else 8.
  x[1] = 11.5f;
  want = block_of(ATTN_Q5_1, {0x00, 0x38, 0x00, 0xc4, 0x02, 0x00, 0x00, 0x00}, {});
  std::fill(want.begin() + 8, want.end(), uint8_t(0x88));
  want[8] = 0xc0, want[9] = 0x8f, want[10] = 0x8a;
  CHECK(encoded(ATTN_Q5_1) == want);
  // 127 times 0.5 with 113 of it: codes 0 and 15; 0 is nearer to 1 than to -10; d = 0.5 as before.
  std::fill_n(x, 32, 0.0f);
  x[0] = -63.5f, x[31] = 56.5f;
  want = block_of(ATTN_IQ4_NL, {0x00, 0x38}, {});
  std::fill(want.begin() + 2, want.end(), uint8_t(0x88));
  want[2] = 0x80, want[17] = 0xf8;
  CHECK(encoded(ATTN_IQ4_NL) == want);
}

TEST_CASE("ggml: blocks of values they cannot hold") {
  for (attn_dtype type : ggml) {
    INFO(dtype_name(type));
    const auto block = [&](float odd, bool saturate) {
      float x[32] = {odd, 1};
      unsigned char bytes[most_bytes];
      encode_block(type, x, bytes, saturate);
      std::pair<double, double> values(decode_element(type, bytes, 0),
                                       decode_element(type, bytes, 2));
      return values;
    };
    for (bool saturate : {false, true}) {
      CHECK(std::isnan(block(nan, saturate).first));
      CHECK(std::isnan(block(nan, saturate).second));
      CHECK(std::isfinite(block(1e-42f, saturate).first));
    }
    for (float odd : {inf, -inf, 3e38f, -3e38f}) {
      CHECK(std::isnan(block(odd, false).first));
      CHECK(std::isnan(block(odd, false).second));
      CHECK(std::isfinite(block(odd, true).first));
    }
  }
  const auto lowest = [](attn_dtype type, float odd) {
    float x[32] = {odd, 1};
    unsigned char bytes[most_bytes];
    encode_block(type, x, bytes, true);
    return decode_element(type, bytes, 0);
  };
  for (float odd : {-3e38f, -inf}) {
    CHECK(lowest(ATTN_Q8_0, odd) == -127.0 * 65504);
    CHECK(lowest(ATTN_Q4_0, odd) == -8.0 * 65504);
    CHECK(lowest(ATTN_Q5_0, odd) == -16.0 * 65504);
    CHECK(lowest(ATTN_Q4_1, odd) == -65504);
    CHECK(lowest(ATTN_Q5_1, odd) == -65504);
    CHECK(lowest(ATTN_IQ4_NL, odd) == -127.0 * 65504);
  }
  CHECK(lowest(ATTN_Q4_1, inf) == 15.0 * 65504);
}

TEST_CASE("ggml: names") {
  for (attn_dtype type : ggml) {
    CHECK(dtype_from_name(dtype_name(type)) == type);
    CHECK(dtype_is_ggml(type));
    CHECK(dtype_block(type) == 32);
    CHECK(dtype_bytes(type) == block_layout(type).size());
  }
  CHECK_FALSE(dtype_is_ggml(ATTN_F64));
}

}  // namespace
}  // namespace attn
