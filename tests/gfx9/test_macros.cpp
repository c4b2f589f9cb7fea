// The macros of asm/include, each against what its comment promises, with all checks on.
#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>

#include "catch.h"
#include "core/dtype.h"
#include "gfx9emu/emu.h"

#ifdef ATTN_GFX9_MACROS

using namespace gfx9emu;

namespace {

uint32_t random_bits(uint32_t n) {
  uint64_t h = (n + 1) * 0x9e3779b97f4a7c15ull;
  h = (h ^ (h >> 31)) * 0xbf58476d1ce4e5b9ull;
  return uint32_t(h >> 32);
}
float random_float(uint32_t n) {
  return (float(random_bits(n) >> 8) / (1 << 23) - 1) * 100;
}

// Runs one wave of a kernel of macros.s. The first argument is the address of `in` if there is one,
// the next that of a result of `bytes`; `rest` follows.
class Macros {
 public:
  Macros() {
    std::ifstream file(ATTN_GFX9_MACROS, std::ios::binary);
    REQUIRE(file);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    std::string error;
    object_ = CodeObject::load(std::as_bytes(std::span(text)), &memory_, &error);
    INFO(error);
    REQUIRE(object_);
  }

  uint64_t upload(std::span<const std::byte> bytes) {
    const uint64_t address = memory_.allocate(bytes.size());
    REQUIRE(memory_.write(address, bytes) == "");
    return address;
  }
  uint64_t room(uint64_t bytes) { return memory_.allocate(bytes); }
  template <class T>
  std::vector<T> download(uint64_t address, size_t count) {
    std::vector<T> values(count);
    REQUIRE(memory_.read(address, std::as_writable_bytes(std::span(values))) == "");
    return values;
  }

  void run(const char* name, const std::vector<uint64_t>& arguments) {
    const Kernel* kernel = object_->kernel(name);
    REQUIRE(kernel);
    for (uint64_t seed = 0; seed < 4; ++seed) {
      Options options;
      options.seed = seed;
      const auto kernarg = std::as_bytes(std::span(arguments)).first(kernel->kernarg_bytes);
      const Report report = launch(memory_, *kernel, {}, {64, 1, 1}, kernarg, 0, options);
      for (const Fault& fault : report.faults) INFO(fault.to_string());
      INFO(name << (report.faults.empty() ? "" : report.faults[0].to_string()));
      REQUIRE(report.faults.empty());
    }
  }

 private:
  Memory memory_;
  std::unique_ptr<CodeObject> object_;
};

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

}  // namespace

TEST_CASE("macros: reductions over a wave", "[gfx9][macros]") {
  Macros macros;
  std::vector<float> in(64);
  for (uint32_t n = 0; n < 64; ++n) in[n] = float(int(random_bits(n) % 2001) - 1000);
  in[17] = 5000, in[42] = -6000;  // and so sums are exact
  float sum = 0;
  uint32_t sum_u32 = 0, max_u32 = 0;
  for (float x : in) {
    sum += x;
    sum_u32 += std::bit_cast<uint32_t>(x);
    max_u32 = std::max(max_u32, std::bit_cast<uint32_t>(x));
  }
  const uint64_t out = macros.room(20);
  macros.run("reduce", {macros.upload(bytes_of(in)), out});
  const auto got = macros.download<uint32_t>(out, 5);
  CHECK(std::bit_cast<float>(got[0]) == 5000);
  CHECK(std::bit_cast<float>(got[1]) == -6000);
  CHECK(std::bit_cast<float>(got[2]) == sum);
  CHECK(got[3] == max_u32);
  CHECK(got[4] == sum_u32);
}

TEST_CASE("macros: the partner lane", "[gfx9][macros]") {
  Macros macros;
  std::vector<uint32_t> in(64);
  for (uint32_t n = 0; n < 64; ++n) in[n] = random_bits(n);
  const uint64_t out = macros.room(256);
  macros.run("partner", {macros.upload(bytes_of(in)), out});
  const auto got = macros.download<uint32_t>(out, 64);
  for (size_t n = 0; n < 64; ++n) CHECK(got[n] == in[n ^ 32]);
}

TEST_CASE("macros: packing and unpacking fp8", "[gfx9][macros]") {
  Macros macros;
  std::vector<float> in(512);
  for (uint32_t n = 0; n < in.size(); ++n) in[n] = random_float(n) * std::ldexp(1.0f, -int(n % 16));
  in[3] = 300, in[9] = NAN, in[20] = -0.0f, in[33] = 248, in[34] = 247.9f;
  const uint64_t out = macros.room(512), values = macros.room(1024);
  macros.run("fp8", {macros.upload(bytes_of(in)), out, values});
  const auto codes = macros.download<uint8_t>(out, 512);
  for (size_t n = 0; n < in.size(); ++n) {
    INFO("element " << n << ": " << in[n]);
    CHECK(int(codes[n]) == int(attn::encode(attn::e4m3fnuz_format, in[n], false)));
  }
  const auto decoded = macros.download<float>(values, 256);
  for (size_t n = 0; n < decoded.size(); ++n) {
    const double want = attn::value_of(attn::e4m3fnuz_format, codes[n / 4 * 8 + n % 4]);
    CHECK((decoded[n] == want || (std::isnan(decoded[n]) && std::isnan(want))));
  }
}

TEST_CASE("macros: OCP codes to FNUZ codes of half the value", "[gfx9][macros]") {
  Macros macros;
  std::vector<uint8_t> in(256);
  for (size_t n = 0; n < 256; ++n) in[n] = uint8_t(n * 37);  // every code, neighbours unlike
  const uint64_t out = macros.room(256);
  macros.run("ocp", {macros.upload(bytes_of(in)), out});
  const auto got = macros.download<uint8_t>(out, 256);
  for (size_t n = 0; n < 256; ++n) {
    INFO("code " << int(in[n]));
    CHECK(int(got[n]) == int(attn::fnuz_half_of_e4m3fn(in[n])));
  }
}

TEST_CASE("macros: 64-bit products", "[gfx9][macros]") {
  Macros macros;
  const uint64_t cases[][3] = {{5, 7, 3},
                               {~uint64_t{0}, 1, 1},
                               {0x123456789abcdef0, 0xfedcba9876543210, 0xffffffff},
                               {uint64_t{1} << 40, uint64_t{1} << 33, 0x7fffffff},
                               {0, ~uint64_t{0}, 12345}};  // a stride of -1
  for (const auto& [sum, stride, index] : cases) {
    const uint64_t out = macros.room(8);
    macros.run("mad", {out, sum, stride, index});
    CHECK(macros.download<uint64_t>(out, 1)[0] == sum + index * stride);
  }
}

// Quotients of all sizes: those beyond 2^21 want the reciprocal refined.
TEST_CASE("macros: quotients", "[gfx9][macros]") {
  Macros macros;
  constexpr uint32_t most = 0xffffffff;
  const uint64_t out = macros.room(8);
  for (const uint32_t d : {1u, 2u, 3u, 7u, 10u, 63u, 304u, 641u, 65537u, 0x7fffffffu, most}) {
    for (const uint32_t n : {0u, 1u, d - 1, d, most / d * d - 1, most / d * d, most, 123456789u}) {
      INFO(n << " / " << d);
      const uint64_t from = macros.upload(bytes_of(std::vector<uint32_t>{n, d}));
      macros.run("quotient", {from, out});
      CHECK(macros.download<uint32_t>(out, 2) == std::vector<uint32_t>{n / d, n % d});
    }
  }
}

TEST_CASE("macros: loads to LDS, cut off at the buffer's end", "[gfx9][macros]") {
  Macros macros;
  std::vector<uint32_t> in(64);
  for (uint32_t n = 0; n < 64; ++n) in[n] = random_bits(n) | 1;
  const uint64_t from = macros.upload(bytes_of(in));
  for (uint64_t count : {64, 63, 32, 1, 0}) {
    const uint64_t out = macros.room(256);
    macros.run("dma", {from, out, count * 4});
    const auto got = macros.download<uint32_t>(out, 64);
    for (size_t n = 0; n < 64; ++n) {
      INFO("count " << count << " element " << n);
      CHECK(got[n] == (63 - n < count ? in[63 - n] : 0));
    }
  }
}

#endif
