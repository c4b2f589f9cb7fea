// The type conversions against an independent search over the decoded tables.
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <random>
#include <vector>

#include "../catch.h"
#include "attn/attn.hpp"
#include "core/dtype.h"

namespace attn {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

struct Format {
  attn_dtype type;
  int bits;
  double max;
  bool has_inf, has_negative_zero;
};
const Format formats[] = {{ATTN_F16, 16, 65504, true, true},
                          {ATTN_BF16, 16, 0x1.fep127, true, true},
                          {ATTN_F8_E4M3FN, 8, 448, false, true},
                          {ATTN_F8_E5M2, 8, 57344, true, true},
                          {ATTN_F8_E4M3FNUZ, 8, 240, false, false}};

double value_of(const Format& f, uint32_t code) {
  unsigned char bytes[2] = {uint8_t(code), uint8_t(code >> 8)};
  return decode_element(f.type, bytes, 0);
}
uint32_t code_of(const Format& f, double x, bool saturate = false) {
  unsigned char bytes[2] = {0, 0};
  encode_element(f.type, bytes, 0, x, saturate);
  return bytes[0] | uint32_t(bytes[1]) << 8;
}

// The finite values >= 0 in order; index = code, because magnitudes are ordered as their codes.
std::vector<double> magnitudes(const Format& f) {
  std::vector<double> values;
  for (uint32_t code = 0; code < 1u << (f.bits - 1); ++code) {
    const double x = value_of(f, code);
    if (std::isfinite(x)) values.push_back(x);
  }
  return values;
}

// What IEEE rounding makes of x >= 0: a search for the neighbours, ties to the even code. One step
// beyond the largest value counts as a neighbour too: from half way on, x is out of range.
double nearest(const Format& f, const std::vector<double>& values, double x) {
  const size_t n = values.size();
  const double beyond = values[n - 1] + (values[n - 1] - values[n - 2]);
  size_t above = 0;
  while (above < n && values[above] < x) ++above;
  const double up = above < n ? values[above] : beyond;
  if (above == 0) return 0;
  const double down = values[above - 1];
  const long double from_down = (long double)x - down, from_up = (long double)up - x;
  const bool take_up = from_up < from_down || (from_up == from_down && above % 2 == 0);
  if (!take_up) return down;
  if (above < n) return up;
  return f.has_inf ? infinity : std::nan("");
}

bool same(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b));
}

TEST_CASE("dtype: names, sizes and limits") {
  CHECK(std::string(dtype_name(ATTN_F8_E4M3FN)) == "f8_e4m3fn");
  for (int t = ATTN_F32; t < end_of_dtypes; ++t) {
    CHECK(dtype_from_name(dtype_name(attn_dtype(t))) == attn_dtype(t));
  }
  CHECK(dtype_from_name("float") == ATTN_DTYPE_NONE);
  CHECK(dtype_from_name("none") == ATTN_DTYPE_NONE);
  CHECK(std::string(dtype_name(attn_dtype(99))) == "none");
  CHECK(dtype_bytes(ATTN_Q8_0, 64) == 68);
  CHECK(dtype_bytes(ATTN_Q4_0, 64) == 36);
  CHECK(dtype_bytes(ATTN_BF16, 5) == 10);
  for (const Format& f : formats) CHECK(type_info(f.type).max_finite == f.max);
}

// Sizes as others publish them: IEEE 754, OCP's and Graphcore's fp8, and of ggml's blocks the
// static_asserts of ggml-common.h, sizeof(block_q8_0) and its siblings for QK8_0 = 32 elements. Of
// servers' caches: OCP's e2m1 and NVIDIA's scales of 16 elements; FlashMLA's 656 bytes of a token;
// vLLM's 584, of which 8 are scales.
struct Published {
  attn_dtype type;
  const char* name;
  attn_dtype_kind kind;
  int elements, bytes;
  double max;
};
const Published published[] = {
    {ATTN_F32, "f32", ATTN_KIND_FLOAT, 1, 4, std::numeric_limits<float>::max()},
    {ATTN_F16, "f16", ATTN_KIND_FLOAT, 1, 2, 65504},
    {ATTN_BF16, "bf16", ATTN_KIND_FLOAT, 1, 2, 3.3895313892515355e38},
    {ATTN_F8_E4M3FN, "f8_e4m3fn", ATTN_KIND_FP8, 1, 1, 448},
    {ATTN_F8_E5M2, "f8_e5m2", ATTN_KIND_FP8, 1, 1, 57344},
    {ATTN_F8_E4M3FNUZ, "f8_e4m3fnuz", ATTN_KIND_FP8, 1, 1, 240},
    {ATTN_Q8_0, "q8_0", ATTN_KIND_GGML, 32, 34, 0},
    {ATTN_Q4_0, "q4_0", ATTN_KIND_GGML, 32, 18, 0},
    {ATTN_F64, "f64", ATTN_KIND_FLOAT, 1, 8, std::numeric_limits<double>::max()},
    {ATTN_Q4_1, "q4_1", ATTN_KIND_GGML, 32, 20, 0},
    {ATTN_Q5_0, "q5_0", ATTN_KIND_GGML, 32, 22, 0},
    {ATTN_Q5_1, "q5_1", ATTN_KIND_GGML, 32, 24, 0},
    {ATTN_IQ4_NL, "iq4_nl", ATTN_KIND_GGML, 32, 18, 0},
    {ATTN_I8, "i8", ATTN_KIND_CODES, 1, 1, 127},
    {ATTN_I4, "i4", ATTN_KIND_CODES, 2, 1, 7},
    {ATTN_F8_E4M3FN_TOKEN, "f8_e4m3fn_token", ATTN_KIND_CACHE, 1, 1, 448},
    {ATTN_NVFP4, "nvfp4", ATTN_KIND_CACHE, 16, 8, 6},
    {ATTN_MLA_656, "mla_656", ATTN_KIND_CACHE, 576, 656, 0},
    {ATTN_MLA_584, "mla_584", ATTN_KIND_CACHE, 512, 576, 0},
};

TEST_CASE("dtype: the table is what others publish") {
  REQUIRE(attn_dtype_info(attn_dtype(std::size(published) + 1)) == nullptr);
  CHECK(attn_dtype_info(ATTN_DTYPE_NONE) == nullptr);
  CHECK(attn_dtype_info(attn_dtype(-1)) == nullptr);
  CHECK(dtypes().size() == std::size(published));
  for (const Published& want : published) {
    INFO(want.name);
    const attn_dtype_properties* got = attn_dtype_info(want.type);
    REQUIRE(got);
    CHECK(got->struct_size == sizeof *got);
    CHECK(got->type == want.type);
    CHECK(std::string(got->name) == want.name);
    CHECK(got->kind == want.kind);
    CHECK(got->block_elements == want.elements);
    CHECK(got->block_bytes == want.bytes);
    CHECK(got->has_scales == (want.kind == ATTN_KIND_CODES ||
                              (want.kind == ATTN_KIND_CACHE && want.type != ATTN_MLA_656)));
    CHECK((got->scale_bytes > 0) == (got->has_scales != 0));
    CHECK(got->output_only == (want.type == ATTN_F64));
    CHECK(got->max_finite == want.max);
    const int64_t elements = want.elements > 64 ? 2 * want.elements : 64;
    CHECK(dtype_bytes(want.type, elements) == elements / want.elements * want.bytes);
    CHECK(std::string(dtypes()[size_t(want.type) - 1].name) == want.name);
  }
}

TEST_CASE("dtype: lists of types follow from the table") {
  CHECK(type_names(0).empty());
  CHECK(type_names(float_types) == "f32, f16, bf16");
  CHECK(type_names(fp8_types, " or ") == "f8_e4m3fn, f8_e5m2 or f8_e4m3fnuz");
  CHECK(type_names(scaled_types, " and ") == "i8 and i4");
  CHECK(
      type_names(kv_types) ==
      "f32, f16, bf16, f8_e4m3fn, f8_e5m2, f8_e4m3fnuz, q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl, i8, "
      "i4, f8_e4m3fn_token, nvfp4, mla_656, mla_584");
  for (int t = ATTN_F32; t < end_of_dtypes; ++t) {
    const auto same = [&](auto type) { CHECK(type.type == attn_dtype(t)); };
    CHECK(with_type<kv_types>(attn_dtype(t), same) == (t != ATTN_F64));
  }
}

TEST_CASE("dtype: every code survives decoding and encoding") {
  for (const Format& f : formats) {
    INFO(dtype_name(f.type));
    int nans = 0;
    for (uint32_t code = 0; code < 1u << f.bits; ++code) {
      const double x = value_of(f, code);
      const uint32_t back = code_of(f, x);
      if (std::isnan(x)) {
        ++nans;
        if (!std::isnan(value_of(f, back))) FAIL("NaN code " << code << " became " << back);
      } else if (back != code) {
        FAIL("code " << code << " = " << x << " became " << back);
      }
      float row;
      unsigned char bytes[2] = {uint8_t(code), uint8_t(code >> 8)};
      decode_row(f.type, bytes, 0, 1, &row);
      if (!same(row, x)) FAIL("code " << code << " decodes to " << row << " and " << x);
    }
    const int expected = f.type == ATTN_F16         ? 2 * 1023
                         : f.type == ATTN_BF16      ? 2 * 127
                         : f.type == ATTN_F8_E5M2   ? 6
                         : f.type == ATTN_F8_E4M3FN ? 2
                                                    : 1;
    CHECK(nans == expected);
    CHECK(magnitudes(f).back() == f.max);
  }
}

TEST_CASE("dtype: rounding is to the nearest value, ties to even, once") {
  for (const Format& f : formats) {
    INFO(dtype_name(f.type));
    const std::vector<double> values = magnitudes(f);
    const auto check = [&](double x, double expected) {
      for (double sign : {1.0, -1.0}) {
        const double got = value_of(f, code_of(f, sign * x));
        double want = sign * expected;
        if (want == 0 && !f.has_negative_zero) want = 0;
        if (!same(got, want)) FAIL("" << std::hexfloat << sign * x << " became " << got);
        const double saturated = value_of(f, code_of(f, sign * x, true));
        if (!std::isfinite(expected)) want = dtype_is_fp8(f.type) ? sign * f.max : want;
        if (!same(saturated, want)) {
          FAIL("" << std::hexfloat << sign * x << " saturated to " << saturated);
        }
      }
    };
    // Around every midpoint and every value, by the smallest step of a double: a conversion by way
    // of float would round these to the midpoint first.
    for (size_t code = 0; code < values.size(); ++code) {
      const double low = values[code];
      const double high =
          code + 1 < values.size() ? values[code + 1] : low + (low - values[code - 1]);
      const double mid = low + (high - low) / 2;
      const bool last = code + 1 == values.size();
      const double beyond = f.has_inf ? infinity : std::nan("");
      const double up = last ? beyond : high;
      check(low, low);
      check(std::nextafter(mid, 0.0), low);
      check(mid, code % 2 == 0 ? low : up);
      check(std::nextafter(mid, infinity), up);
    }
    std::mt19937_64 random(1);
    const int count = f.bits == 8 ? 20000 : 200;
    std::uniform_real_distribution<double> uniform(0, f.max * 1.1), power(-45, 20);
    for (int n = 0; n < count; ++n) {
      const double x = n % 2 ? uniform(random) : std::exp2(power(random));
      check(x, nearest(f, values, x));
    }
    check(infinity, f.has_inf ? infinity : std::nan(""));
    check(1e300, f.has_inf ? infinity : std::nan(""));
    check(1e-300, 0);
    check(5e-324, 0);
    CHECK(std::isnan(value_of(f, code_of(f, std::nan("")))));
    CHECK(std::isnan(value_of(f, code_of(f, std::nan(""), true))));
    CHECK(code_of(f, 0.0) == 0);
    CHECK(code_of(f, -0.0) == (f.has_negative_zero ? 1u << (f.bits - 1) : 0u));
  }
}

TEST_CASE("dtype: OCP e4m3fn becomes FNUZ exactly, at half the value") {
  for (int code = 0; code < 256; ++code) {
    const double ocp = e4m3fn_values[code];
    const double fnuz = e4m3fnuz_values[fnuz_half_of_e4m3fn(uint8_t(code))];
    INFO(code);
    if (std::isnan(ocp))
      CHECK(std::isnan(fnuz));
    else
      CHECK(2 * fnuz == ocp);
  }
  CHECK(fnuz_half_of_e4m3fn(0x80) == 0);
}

TEST_CASE("dtype: known codes") {
  CHECK(e4m3fn_values[0x01] == 0x1p-9f);
  CHECK(e4m3fn_values[0x38] == 1.0f);
  CHECK(e4m3fnuz_values[0x40] == 1.0f);
  CHECK(e4m3fnuz_values[0x01] == 0x1p-10f);
  CHECK(e5m2_values[0x3c] == 1.0f);
  CHECK(e5m2_values[0x01] == 0x1p-16f);
  CHECK(std::isinf(e5m2_values[0x7c]));
  CHECK(f16_value(0x3c00) == 1.0f);
  CHECK(f16_value(0x0001) == 0x1p-24f);
  CHECK(f16_code(65519.999) == 0x7bff);
  CHECK(f16_code(65520) == 0x7c00);
  CHECK(bf16_code(0x1p-133) == 1);
}

}  // namespace
}  // namespace attn
