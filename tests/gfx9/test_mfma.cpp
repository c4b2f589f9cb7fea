// MFMA: layouts against AMD's tables, FP8 against published vectors, vector code against integers.
#include <array>
#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "catch.h"
#include "gfx9emu/mfma.h"
#include "gfx9emu/mfma_rows.h"

using namespace gfx9emu;
using enum MfmaType;

namespace {

const std::string data_dir = ATTN_GFX9_DATA_DIR;

int bits_of(MfmaType t) {
  switch (t) {
    case F64:
      return 64;
    case F32:
    case Xf32:
      return 32;
    case F16:
    case Bf16:
      return 16;
    default:
      return 8;
  }
}

// Those of gfx942, then those of gfx950.
std::vector<MfmaShape> all_shapes() {
  std::vector<MfmaShape> all(mfma_shapes().begin(), mfma_shapes().end());
  all.insert(all.end(), gfx950_mfma_shapes().begin(), gfx950_mfma_shapes().end());
  return all;
}

bool small_float(MfmaType t) {
  return t == Fp8 || t == Bf8 || t == E4m3 || t == F16 || t == Bf16;
}

// Registers of the three operands.
struct Registers {
  std::vector<uint32_t> a, b, c, d;
  explicit Registers(const MfmaShape& s)
      : a(s.a_regs * 64), b(s.a_regs * 64), c(s.d_regs * 64), d(s.d_regs * 64, 0xdeadbeef) {}
};

// The vector code of every instruction set that this machine has.
std::vector<const MfmaRows*> all_rows() {
  std::vector<const MfmaRows*> rows{&mfma_rows_baseline};
#if GFX9EMU_X86
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    rows.push_back(&mfma_rows_avx2);
  }
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma")) {
    rows.push_back(&mfma_rows_avx512);
  }
#endif
  return rows;
}
bool run_rows(const MfmaRows& rows, const MfmaShape& s, Registers& r, int c_stride, bool clamp) {
  const uint32_t *a = r.a.data(), *b = r.b.data(), *c = r.c.data();
  if (s.a == F16) return rows.f16(s.m, clamp, a, b, c, c_stride, r.d.data());
  if (s.a == Bf16) return rows.bf16(s.m, clamp, a, b, c, c_stride, r.d.data());
  const auto format = [](MfmaType t) {
    return t == Fp8 ? fp8_format : t == Bf8 ? bf8_format : e4m3_format;
  };
  return rows.f8(format(s.a), format(s.b), s.m, s.k, clamp, a, b, c, c_stride, r.d.data());
}

void put(std::vector<uint32_t>& regs, const MfmaPlace& p, int bits, uint64_t value) {
  uint32_t* r = &regs[p.reg * 64 + p.lane];
  if (bits < 32) {
    const uint32_t mask = ((1u << bits) - 1) << p.bit;
    *r = (*r & ~mask) | (uint32_t(value) << p.bit & mask);
  } else {
    r[0] = uint32_t(value);
    if (bits == 64) r[64] = uint32_t(value >> 32);
  }
}
uint64_t get(const std::vector<uint32_t>& regs, const MfmaPlace& p, int bits) {
  const uint32_t* r = &regs[p.reg * 64 + p.lane];
  if (bits == 64) return r[0] | uint64_t(r[64]) << 32;
  return bits == 32 ? *r : *r >> p.bit & ((1u << bits) - 1);
}

// 1.0, or 1 of I8.
uint64_t one(MfmaType t) {
  switch (t) {
    case Fp8:
    case Bf8:
      return 0x40;
    case E4m3:
      return 0x38;
    case F16:
      return 0x3c00;
    case Bf16:
      return 0x3f80;
    case I8:
      return 1;
    case F64:
      return 0x3ffull << 52;
    default:
      return 0x3f800000;
  }
}

std::vector<std::vector<int>> read_csv(const std::string& path, std::string* header) {
  std::ifstream in(path);
  std::getline(in, *header);
  std::vector<std::vector<int>> rows;
  for (std::string line; std::getline(in, line);) {
    std::vector<int> row;
    std::istringstream cells(line);
    for (std::string cell; std::getline(cells, cell, ',');) row.push_back(std::stoi(cell));
    rows.push_back(row);
  }
  return rows;
}

}  // namespace

TEST_CASE("mfma: places equal the published layouts", "[gfx9][mfma]") {
  int files = 0;
  for (const MfmaShape& s : mfma_shapes()) {
    for (const char operand : {'A', 'B', 'D'}) {
      const std::string path = data_dir + "/layouts/" + s.name + "." + operand + ".csv";
      if (!std::filesystem::exists(path)) continue;
      ++files;
      INFO(path);
      std::string header;
      const auto rows = read_csv(path, &header);
      const int bits = operand == 'D' ? 32 : bits_of(operand == 'A' ? s.a : s.b);
      REQUIRE(header == (operand == 'A'   ? "block,i,k,lane,vgpr,byte,bit_lo,bit_hi"
                         : operand == 'B' ? "block,k,j,lane,vgpr,byte,bit_lo,bit_hi"
                                          : "block,i,j,lane,vgpr,byte,bit_lo,bit_hi"));
      REQUIRE(rows.size() == size_t(operand == 'D' ? s.m * s.n : s.m * s.k) * s.blocks);
      bool equal = true;
      for (const auto& r : rows) {
        const auto place = operand == 'A'   ? mfma_a_place
                           : operand == 'B' ? mfma_b_place
                                            : mfma_d_place;
        equal &=
            place(s, r[0], r[1], r[2]) == MfmaPlace{r[3], r[4], r[6]} && r[7] - r[6] == bits - 1;
      }
      CHECK(equal);
    }
  }
  CHECK(files == 30);
}

TEST_CASE("mfma: every place holds one element", "[gfx9][mfma]") {
  for (const MfmaShape& s : all_shapes()) {
    INFO(s.name);
    std::set<std::tuple<int, int, int>> a, b, d;
    for (int block = 0; block < s.blocks; ++block) {
      const auto add = [&](auto& set, const MfmaPlace& p, int regs, int bits) {
        REQUIRE((p.lane >= 0 && p.lane < 64 && p.reg >= 0 && p.bit % bits == 0));
        REQUIRE(p.reg * 32 + p.bit + bits <= regs * 32);
        set.emplace(p.lane, p.reg, p.bit);
      };
      for (int i = 0; i < s.m; ++i) {
        for (int k = 0; k < s.k; ++k) {
          add(a, mfma_a_place(s, block, i, k), s.a_regs, bits_of(s.a));
          add(b, mfma_b_place(s, block, k, i), s.a_regs, bits_of(s.b));
        }
        for (int j = 0; j < s.n; ++j) {
          add(d, mfma_d_place(s, block, i, j), s.d_regs, s.a == F64 ? 64 : 32);
        }
      }
    }
    CHECK(int(a.size() * bits_of(s.a)) == s.a_regs * 64 * 32);
    CHECK(int(b.size() * bits_of(s.b)) == s.a_regs * 64 * 32);
    CHECK(int(d.size() * (s.a == F64 ? 64 : 32)) == s.d_regs * 64 * 32);
  }
}

TEST_CASE("mfma: one-hot inputs land where the layouts say", "[gfx9][mfma]") {
  std::mt19937 rng(1);
  for (const MfmaShape& s : all_shapes()) {
    INFO(s.name);
    const int d_bits = s.a == F64 ? 64 : 32;
    const uint64_t d_one = s.a == I8 ? 1 : one(s.a == F64 ? F64 : F32);
    for (int n = 0; n < 40; ++n) {
      const int block = rng() % s.blocks, i = rng() % s.m, j = rng() % s.n, k = rng() % s.k;
      Registers r(s);
      put(r.a, mfma_a_place(s, block, i, k), bits_of(s.a), one(s.a));
      put(r.b, mfma_b_place(s, block, k, j), bits_of(s.b), one(s.b));
      mfma(s, r.a.data(), r.b.data(), r.c.data(), 64, r.d.data());
      std::vector<uint32_t> want(r.d.size(), 0);
      put(want, mfma_d_place(s, block, i, j), d_bits, d_one);
      REQUIRE(r.d == want);
    }
  }
}

TEST_CASE("mfma: the published fp8 vectors, bit by bit", "[gfx9][mfma]") {
  const auto file = nlohmann::json::parse(std::ifstream(data_dir + "/mfma_fp8_vectors.json"));
  const auto& vectors = file.at("vectors");
  REQUIRE(vectors.size() == 2000);
  std::mt19937 rng(2);
  int wrong = 0;
  for (const auto& v : vectors) {
    const std::string ah = v.at("A"), bh = v.at("B");
    const int count = int(ah.size() / 2);
    const std::string name = std::string("v_mfma_f32_") +
                             (count == 16 ? "32x32x16_" : "16x16x32_") +
                             v.at("ka").get<std::string>() + "_" + v.at("kb").get<std::string>();
    const MfmaShape* s = find_mfma(name);
    REQUIRE(s != nullptr);
    Registers r(*s);
    const int i = rng() % s->m, j = rng() % s->n;
    for (int k = 0; k < count; ++k) {
      put(r.a, mfma_a_place(*s, 0, i, k), 8, std::stoul(ah.substr(2 * k, 2), nullptr, 16));
      put(r.b, mfma_b_place(*s, 0, k, j), 8, std::stoul(bh.substr(2 * k, 2), nullptr, 16));
    }
    const MfmaPlace d = mfma_d_place(*s, 0, i, j);
    const uint32_t want = uint32_t(std::stoul(v.at("d").get<std::string>(), nullptr, 16));
    put(r.c, d, 32, std::stoul(v.at("c").get<std::string>(), nullptr, 16));
    mfma(*s, r.a.data(), r.b.data(), r.c.data(), 64, r.d.data());
    wrong += get(r.d, d, 32) != want;
    mfma_by_element(*s, r.a.data(), r.b.data(), r.c.data(), 64, r.d.data());
    wrong += get(r.d, d, 32) != want;
  }
  CHECK(wrong == 0);
}

TEST_CASE("mfma: the vector code equals the element code", "[gfx9][mfma]") {
  std::mt19937 rng(3);
  for (const MfmaShape& s : all_shapes()) {
    if (!small_float(s.a) || s.blocks != 1) continue;
    INFO(s.name);
    const int bits = bits_of(s.a);
    const uint32_t mask = (1u << bits) - 1;
    const auto special = [](MfmaType t, uint32_t code) {
      return t == F16    ? (code & 0x7c00) == 0x7c00
             : t == Bf16 ? (code & 0x7f80) == 0x7f80
             : t == E4m3 ? (code & 0x7f) == 0x7f
                         : code == 0x80;
    };
    int by_rows = 0;
    for (int round = 0; round < 80; ++round) {
      Registers r(s);
      // All codes; few distinct exponents, so that sums cancel; many zeros and subnormals; and now
      // and then NaN and infinity.
      const int kind = round % 4;
      const auto code = [&](MfmaType t) {
        uint32_t x = rng() & mask;
        if (kind == 1) x = uint32_t(one(t)) ^ (rng() & mask >> 4) ^ (rng() % 2 << (bits - 1));
        if (kind == 2 && rng() % 2) x &= 1u << (bits - 1) | mask >> 5;
        // bf16 products near 2^128 are a case of their own.
        if (t == Bf16 && kind == 0 && round % 8) x = (x & 0x807f) | (0x20 + rng() % 0x80) << 7;
        if (round % 16 != 15 && special(t, x)) x = 0;
        return x;
      };
      for (auto* regs : {&r.a, &r.b}) {
        for (uint32_t& x : *regs) {
          for (int bit = 0; bit < 32; bit += bits) {
            x |= code(regs == &r.a ? s.a : s.b) << bit;
          }
        }
      }
      for (uint32_t& x : r.c) {
        x = round % 3 == 0   ? uint32_t(rng())
            : round % 3 == 1 ? 0
                             : (rng() & 0x807fffff) | (100 + rng() % 60) << 23;
      }
      MfmaModifiers m;
      m.fp16_ovfl = round % 5 == 0;
      const bool constant_c = round % 7 == 0;
      if (constant_c) std::fill(r.c.begin(), r.c.end(), r.c[0]);
      std::vector<uint32_t> want(r.d.size());
      mfma_by_element(s, r.a.data(), r.b.data(), r.c.data(), 64, want.data(), m);
      mfma(s, r.a.data(), r.b.data(), r.c.data(), constant_c ? 0 : 64, r.d.data(), m);
      REQUIRE(r.d == want);
      for (const MfmaRows* rows : all_rows()) {
        std::fill(r.d.begin(), r.d.end(), 0);
        if (!run_rows(*rows, s, r, constant_c ? 0 : 64, m.fp16_ovfl)) continue;
        ++by_rows;
        REQUIRE(r.d == want);
      }
    }
    CHECK(by_rows >= 40);
  }
}

TEST_CASE("mfma: values against float64", "[gfx9][mfma]") {
  std::mt19937 rng(4);
  std::normal_distribution<float> normal;
  for (const MfmaShape& s : all_shapes()) {
    if (s.a == Fp8 || s.a == Bf8) continue;
    INFO(s.name);
    Registers r(s);
    const auto random = [&](MfmaType t) -> uint64_t {
      const float x = normal(rng);
      switch (t) {
        case F64:
          return std::bit_cast<uint64_t>(double(x));
        // Normal numbers of either sign, about 1.
        case F16:
          return (rng() & 0x83ff) | (13 + rng() % 4) << 10;
        case Bf16:
          return std::bit_cast<uint32_t>(x) >> 16;
        case I8:
          return rng() & 255;
        case E4m3:  // all but NaN
          return rng() % 0x7f | (rng() % 2 << 7);
        default:
          return std::bit_cast<uint32_t>(x);
      }
    };
    const auto value = [](MfmaType t, uint64_t code) -> double {
      switch (t) {
        case F64:
          return std::bit_cast<double>(code);
        case F16:
          return (code & 0x8000 ? -1 : 1) *
                 std::ldexp(double((code & 0x3ff) | 0x400), int(code >> 10 & 31) - 25);
        case Bf16:
          return std::bit_cast<float>(uint32_t(code) << 16);
        case I8:
          return int8_t(code);
        case E4m3: {  // 4 bits of exponent with bias 7, 3 of fraction
          const int exponent = int(code >> 3 & 15), fraction = int(code & 7);
          const double magnitude =
              exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
          return code & 0x80 ? -magnitude : magnitude;
        }
        case Xf32:
          return std::bit_cast<float>(uint32_t(code) & ~0x1fffu);
        default:
          return std::bit_cast<float>(uint32_t(code));
      }
    };
    const int bits = bits_of(s.a), d_bits = s.a == F64 ? 64 : 32;
    const MfmaType dt = s.a == F64 ? F64 : F32;
    for (int block = 0; block < s.blocks; ++block) {
      for (int i = 0; i < s.m; ++i) {
        for (int k = 0; k < s.k; ++k) {
          put(r.a, mfma_a_place(s, block, i, k), bits, random(s.a));
          put(r.b, mfma_b_place(s, block, k, i), bits, random(s.b));
        }
        for (int j = 0; j < s.n; ++j) {
          put(r.c, mfma_d_place(s, block, i, j), d_bits, s.a == I8 ? rng() % 1000 : random(dt));
        }
      }
    }
    mfma(s, r.a.data(), r.b.data(), r.c.data(), 64, r.d.data());
    for (int block = 0; block < s.blocks; ++block) {
      for (int i = 0; i < s.m; ++i) {
        for (int j = 0; j < s.n; ++j) {
          const MfmaPlace p = mfma_d_place(s, block, i, j);
          const uint64_t c = get(r.c, p, d_bits), d = get(r.d, p, d_bits);
          double want = s.a == I8 ? double(int32_t(c)) : value(dt, c), size = std::abs(want);
          for (int k = 0; k < s.k; ++k) {
            const double x = value(s.a, get(r.a, mfma_a_place(s, block, i, k), bits)) *
                             value(s.b, get(r.b, mfma_b_place(s, block, k, j), bits));
            want += x;
            size += std::abs(x);
          }
          const double got = s.a == I8 ? double(int32_t(d)) : value(dt, d);
          // Products keep 24 bits below the largest; the result is rounded once per group.
          const double bound = s.a == I8 ? 0 : size * (s.a == F64 ? 0x1p-50 : 0x1p-22);
          REQUIRE(std::abs(got - want) <= bound);
        }
      }
    }
  }
}

TEST_CASE("mfma: overflow, infinity and NaN", "[gfx9][mfma]") {
  const auto run = [](const char* name, uint64_t a, uint64_t b, uint32_t c, bool clamp) {
    const MfmaShape& s = *find_mfma(name);
    Registers r(s);
    put(r.a, mfma_a_place(s, 0, 0, 0), bits_of(s.a), a);
    put(r.b, mfma_b_place(s, 0, 0, 0), bits_of(s.b), b);
    put(r.c, mfma_d_place(s, 0, 0, 0), 32, c);
    MfmaModifiers m;
    m.fp16_ovfl = clamp;
    mfma(s, r.a.data(), r.b.data(), r.c.data(), 64, r.d.data(), m);
    const uint32_t d = uint32_t(get(r.d, mfma_d_place(s, 0, 0, 0), 32));
    // The row below has its own products, all zero.
    REQUIRE(get(r.d, mfma_d_place(s, 0, 1, 1), 32) == 0);
    return d;
  };
  constexpr uint32_t inf = 0x7f800000, nan = 0x7fc00000, largest = 0x7f7fffff;
  const char *fp8 = "v_mfma_f32_32x32x16_fp8_fp8", *f16 = "v_mfma_f32_32x32x8_f16",
             *bf16 = "v_mfma_f32_32x32x8_bf16", *f32 = "v_mfma_f32_32x32x2_f32";
  CHECK(run(fp8, 0x80, 0x40, 0, false) == nan);
  CHECK(run(fp8, 0x80, 0x00, 0, false) == nan);
  CHECK(run(fp8, 0x40, 0x40, inf, false) == inf);
  CHECK(run(fp8, 0x40, 0x40, 0x7f800001, false) == nan);
  const char* e4m3 = "v_mfma_f32_32x32x64_f8f6f4";
  CHECK(run(e4m3, 0x7f, 0x38, 0, false) == nan);
  CHECK(run(e4m3, 0xff, 0x00, 0, false) == nan);
  CHECK(run(e4m3, 0x80, 0x38, 0, false) == 0);
  CHECK(run(e4m3, 0x7e, 0x7e, 0, false) == std::bit_cast<uint32_t>(448.0f * 448));
  CHECK(run(e4m3, 0x01, 0x01, 0, false) == std::bit_cast<uint32_t>(0x1p-18f));
  CHECK(run(f16, 0x7c00, 0x3c00, 0, false) == inf);
  CHECK(run(f16, 0x7c00, 0x0000, 0, false) == nan);
  CHECK(run(f16, 0x7c00, 0xbc00, inf, false) == nan);
  CHECK(run(bf16, 0x7f7f, 0x3f80, largest, false) == inf);
  CHECK(run(bf16, 0x7f7f, 0x3f80, largest, true) == largest);
  CHECK(run(bf16, 0x7f80, 0x3f80, 0, true) == inf);
  CHECK(run(f32, 0x7f7fffff, 0x40000000, 0, false) == inf);
  CHECK(run(f32, 0x7f7fffff, 0xc0000000, 0, true) == (largest | 1u << 31));
  // Subnormals are kept.
  CHECK(run(f16, 0x0001, 0x3c00, 0, false) == 0x33800000);
  CHECK(run(bf16, 0x0001, 0x3f80, 0, false) == 0x00010000);
}

TEST_CASE("mfma: D over C and over A", "[gfx9][mfma]") {
  std::mt19937 rng(5);
  for (const char* name : {"v_mfma_f32_32x32x16_fp8_fp8", "v_mfma_f32_16x16x16_f16",
                           "v_mfma_i32_16x16x32_i8", "v_mfma_f32_4x4x4_16b_bf16"}) {
    INFO(name);
    const MfmaShape& s = *find_mfma(name);
    std::vector<uint32_t> file(64 * 64);
    for (uint32_t& x : file) x = rng() & 0x3f3f3f3f;
    const auto at = [&](int reg) { return file.data() + 64 * reg; };
    // A v0, B v4, C v8; D the same, one above, one below, and over A and B.
    for (const int d : {8, 9, 7, 0}) {
      const auto before = file;
      std::vector<uint32_t> want(s.d_regs * 64);
      mfma_by_element(s, at(0), at(4), at(8), 64, want.data());
      mfma(s, at(0), at(4), at(8), 64, at(d));
      CHECK(std::equal(want.begin(), want.end(), at(d)));
      file = before;
    }
  }
}

TEST_CASE("mfma: broadcast and lane patterns", "[gfx9][mfma]") {
  const MfmaShape& s = *find_mfma("v_mfma_f32_16x16x1_4b_f32");
  Registers r(s);
  for (int lane = 0; lane < 64; ++lane) {
    r.a[lane] = std::bit_cast<uint32_t>(float(lane + 1));
    r.b[lane] = std::bit_cast<uint32_t>(float(100 + lane));
  }
  const auto value = [&](int block, int i, int j) {
    return std::bit_cast<float>(uint32_t(get(r.d, mfma_d_place(s, block, i, j), 32)));
  };
  const auto run = [&](MfmaModifiers m) {
    REQUIRE(mfma_refuses(s, m) == "");
    mfma(s, r.a.data(), r.b.data(), r.c.data(), 64, r.d.data(), m);
  };
  const auto expect = [&](std::function<int(int)> a_block, std::function<int(int)> b_lane) {
    for (int block = 0; block < 4; ++block) {
      for (int i = 0; i < 16; ++i) {
        for (int j = 0; j < 16; ++j) {
          const float a = float(16 * a_block(block) + i + 1);
          const float b = float(100 + b_lane(16 * block + j));
          REQUIRE(value(block, i, j) == a * b);
        }
      }
    }
  };
  const auto same = [](int x) { return x; };
  run({});
  expect(same, same);
  run({.cbsz = 2, .abid = 3});
  expect([](int) { return 3; }, same);
  run({.cbsz = 1, .abid = 1});
  expect([](int block) { return block / 2 * 2 + 1; }, same);
  run({.blgp = 1});
  expect(same, [](int lane) { return lane % 32; });
  run({.blgp = 2});
  expect(same, [](int lane) { return 32 + lane % 32; });
  run({.blgp = 3});
  expect(same, [](int lane) { return (lane + 16) % 64; });
  run({.blgp = 6});
  expect(same, [](int lane) { return 32 + lane % 16; });

  const auto refusal = [](const char* name, MfmaModifiers m) {
    return mfma_refuses(*find_mfma(name), m);
  };
  CHECK(refusal("v_mfma_f32_32x32x2_f32", {.cbsz = 1}).find("cbsz 1") != std::string::npos);
  CHECK(refusal("v_mfma_f32_16x16x1_4b_f32", {.cbsz = 1, .abid = 2}).find("abid 2") !=
        std::string::npos);
  CHECK(refusal("v_mfma_f32_32x32x16_fp8_fp8", {.blgp = 1}).find("blgp 1") != std::string::npos);
  for (const MfmaModifiers m : {MfmaModifiers{.cbsz = 1}, MfmaModifiers{.blgp = 4}})
    CHECK(refusal("v_mfma_f32_16x16x128_f8f6f4", m).find("e4m3") != std::string::npos);
  CHECK(refusal("v_mfma_f32_16x16x128_f8f6f4", {}) == "");

  // Of f64 the same bits are signs.
  const MfmaShape& s64 = *find_mfma("v_mfma_f64_4x4x4_4b_f64");
  Registers q(s64);
  put(q.a, mfma_a_place(s64, 1, 2, 3), 64, std::bit_cast<uint64_t>(2.0));
  put(q.b, mfma_b_place(s64, 1, 3, 0), 64, std::bit_cast<uint64_t>(5.0));
  put(q.c, mfma_d_place(s64, 1, 2, 0), 64, std::bit_cast<uint64_t>(1.0));
  for (const uint8_t neg : {0, 1, 2, 3, 4, 7}) {
    MfmaModifiers m;
    m.blgp = neg;
    mfma(s64, q.a.data(), q.b.data(), q.c.data(), 64, q.d.data(), m);
    const double sign = (neg & 1) == (neg >> 1 & 1) ? 1 : -1;
    CHECK(std::bit_cast<double>(get(q.d, mfma_d_place(s64, 1, 2, 0), 64)) ==
          sign * 10 + (neg & 4 ? -1 : 1));
  }
}

TEST_CASE("mfma: names", "[gfx9][mfma]") {
  CHECK(find_mfma("v_mfma_scale_f32_32x32x64_f8f6f4") == nullptr);
  CHECK(find_mfma("v_mfma_f32_32x32x2bf16") == nullptr);
  CHECK(mfma_shapes().size() == 32);
}
