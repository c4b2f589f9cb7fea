// Which masks of ggml are ranges of keys: those made from ranges, and no others.
#include <algorithm>
#include <random>
#include <vector>

#include "../catch.h"
#include "integrations/ggml/mask.h"

using attn::ggml::Mask;
using attn::ggml::Ranges;
using attn::ggml::ranges_of;

namespace {

constexpr uint16_t hidden = 0xfc00, zero = 0, minus_zero = 0x8000, one = 0x3c00;

struct Array {
  int64_t batch, rows, keys, stride;
  std::vector<uint16_t> data;

  Array(int64_t batch, int64_t rows, int64_t keys)
      : batch(batch), rows(rows), keys(keys), stride(keys + 3), data(batch * rows * stride, one) {
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t i = 0; i < rows; ++i) std::fill_n(row(b, i), keys, hidden);
  }
  uint16_t* row(int64_t b, int64_t i) { return data.data() + (b * rows + i) * stride; }
  Mask mask() const { return {data.data(), batch, rows, keys, rows * stride, stride}; }
};

Array expand(const Ranges& ranges, int64_t rows, int64_t keys) {
  Array array(int64_t(ranges.end.size()), rows, keys);
  for (int64_t b = 0; b < array.batch; ++b) {
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t last = ranges.end[b] - 1 - (ranges.causal ? rows - 1 - i : 0);
      for (int64_t j = ranges.begin[b]; j <= last; ++j) {
        if (ranges.window_left < 0 || last - j <= ranges.window_left) array.row(b, i)[j] = zero;
      }
    }
  }
  return array;
}

}  // namespace

TEST_CASE("ggml's masks: ranges are found again") {
  std::mt19937 random(1);
  const auto below = [&](int64_t n) { return int64_t(random() % uint64_t(n)); };
  for (int round = 0; round < 2000; ++round) {
    const int64_t rows = 1 + below(9), keys = rows + 1 + below(40);
    Ranges made;
    made.causal = below(2) == 1;
    if (made.causal && below(2) == 1) made.window_left = below(12);
    for (int64_t b = 0; b <= below(3); ++b) {
      const int64_t end = rows + below(keys - rows + 1);
      made.end.push_back(int32_t(end));
      made.begin.push_back(int32_t(below(end - rows + 1)));
    }
    Array array = expand(made, rows, keys);
    for (uint16_t& x : array.data)
      if (x == zero && below(3) == 0) x = minus_zero;
    const auto found = ranges_of(array.mask());
    INFO("round " << round << ", " << rows << " rows, " << keys << " keys");
    // Entries of a batch may be unlike: a window that reaches back to the first key is none.
    if (!found) {
      REQUIRE(made.window_left >= 0);
      REQUIRE(made.end.size() > 1);
      continue;
    }
    Array again = expand(*found, rows, keys);
    for (size_t i = 0; i < array.data.size(); ++i) {
      REQUIRE((again.data[i] & 0x7fff) == (array.data[i] & 0x7fff));
    }
  }
}

TEST_CASE("ggml's masks: what is no range is a bias") {
  const Ranges causal{true, -1, {0}, {20}};
  Array array = expand(causal, 4, 24);
  REQUIRE(ranges_of(array.mask()));
  SECTION("a key in the middle is hidden") {
    array.row(0, 2)[7] = hidden;
  }
  SECTION("a key after the end is visible") {
    array.row(0, 1)[23] = zero;
  }
  SECTION("a number") {
    array.row(0, 3)[19] = one;
  }
  SECTION("a row sees nothing") {
    std::fill_n(array.row(0, 0), 24, hidden);
  }
  SECTION("ends that are no diagonal") {
    array.row(0, 1)[18] = zero;
  }
  SECTION("causal and not") {
    array = expand({true, -1, {0, 0}, {20, 20}}, 4, 24);
    for (int64_t i = 0; i < 4; ++i) std::fill_n(array.row(1, i), 20, zero);
  }
  REQUIRE_FALSE(ranges_of(array.mask()));
}
