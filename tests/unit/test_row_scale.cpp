// i8 and i4: codes and scales of values worked by hand.
#include <cmath>
#include <limits>
#include <vector>

#include "../catch.h"
#include "core/row_scale.h"

namespace attn {
namespace {

using Bytes = std::vector<unsigned char>;
constexpr double inf = std::numeric_limits<double>::infinity();

Bytes codes_of(attn_dtype type, const std::vector<double>& x, uint16_t scale) {
  Bytes bytes(size_t(dtype_bytes(type, int64_t(x.size()))));
  encode_codes(type, bytes.data(), 0, int64_t(x.size()), x.data(), scale);
  return bytes;
}

TEST_CASE("row scale: bytes") {
  // Of 0x3800, 0.5. Halves go to the even code, and no code is -128 or -8.
  CHECK(codes_of(ATTN_I8, {-63.5, 0, 1, 0.75, 0.25, 63.5, 100, -100}, 0x3800) ==
        Bytes{0x81, 0x00, 0x02, 0x02, 0x00, 0x7f, 0x7f, 0x81});
  CHECK(codes_of(ATTN_I4, {-3.5, 0, 1, 0.75, 0.25, 3.5, 100, -100}, 0x3800) ==
        Bytes{0x09, 0x22, 0x70, 0x97});
  const unsigned char bytes[] = {0x09, 0x28, 0x70, 0x9f};
  std::vector<double> values(8);
  decode_row(ATTN_I4, bytes, 0, 8, values.data());
  CHECK(values == std::vector<double>{-7, 0, -8, 2, 0, 7, -1, -7});
  CHECK(decode_element(ATTN_I4, bytes, 3) == 2);
  CHECK(decode_element(ATTN_I8, bytes, 3) == -97);
  CHECK(dtype_bytes(ATTN_I4, 128) == 64);
}

TEST_CASE("row scale: scales") {
  for (bool saturate : {false, true}) {
    CHECK(row_scale(ATTN_I8, 63.5, false, saturate) == 0x3800);
    CHECK(row_scale(ATTN_I4, 3.5, false, saturate) == 0x3800);
    CHECK(row_scale(ATTN_I8, 0, false, saturate) == 0);
    // A subnormal scale, and one that underflows.
    CHECK(row_scale(ATTN_I8, 127 * 0x1p-24, false, saturate) == 0x0001);
    CHECK(row_scale(ATTN_I8, 127 * 0x1p-26, false, saturate) == 0);
    CHECK(std::isnan(f16_value(row_scale(ATTN_I8, 1, true, saturate))));
  }
  for (double amax : {inf, 1e30}) {
    CHECK(row_scale(ATTN_I4, amax, false, true) == 0x7bff);
    CHECK(std::isnan(f16_value(row_scale(ATTN_I4, amax, false, false))));
  }
  CHECK(codes_of(ATTN_I8, {inf, -1e30, 1, 0}, 0x7bff) == Bytes{0x7f, 0x81, 0, 0});
  for (uint16_t scale : {0x0000, 0x7e00})
    CHECK(codes_of(ATTN_I8, {5, -inf, std::nan(""), 0}, scale) == Bytes{0, 0, 0, 0});
}

}  // namespace
}  // namespace attn
