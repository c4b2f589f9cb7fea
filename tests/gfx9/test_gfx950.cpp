// What gfx950 has of its own: fp8 of the OCP kind, longer waits after an MFMA, more LDS; and that
// its kernels, which are assembled from the sources of gfx942's, compute the same.
#include <bit>
#include <cmath>
#include <cstring>
#include <iostream>
#include <limits>
#include <random>

#include "catch.h"
#include "core/dtype.h"
#include "gfx9/assemble.h"
#include "gfx9/generate.h"
#include "gfx9/hazard_pairs.h"
#include "gfx9/shipped.h"
#include "gfx9emu/convert.h"
#include "gfx9emu/decode.h"
#include "gfx9emu/hazards.h"

using namespace gfx9emu;
using namespace gfx9emu::test;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

template <int mantissa, int bias>
void check_conversions(const attn::SmallFloat& format) {
  const auto is_nan = [&](uint32_t code) { return std::isnan(attn::value_of(format, code)); };
  std::vector<float> values = {0, infinity, std::nanf(""), 1e30f, 1e-30f, 465, 57345, 65536};
  for (uint32_t code = 0; code < 256; ++code) {
    const float got = std::bit_cast<float>(f8_to_f32<mantissa, bias>(code));
    const double want = attn::value_of(format, code);
    INFO("code " << code);
    if (is_nan(code)) {
      CHECK(std::isnan(got));
      continue;
    }
    CHECK(std::bit_cast<uint32_t>(got) == std::bit_cast<uint32_t>(float(want)));
    if (code >= format.max_code) continue;
    const float next = float(attn::value_of(format, code + 1)), tie = (float(want) + next) / 2;
    for (const float x :
         {float(want), tie, std::nextafter(tie, 0.0f), std::nextafter(tie, infinity)})
      values.push_back(x);
  }
  // Between the largest and what would follow it.
  const float largest = float(attn::value_of(format, format.max_code));
  const float step = largest - float(attn::value_of(format, format.max_code - 1));
  for (const float x : {largest, largest + step / 2, largest + step})
    for (const float near : {x, std::nextafter(x, 0.0f), std::nextafter(x, infinity)})
      values.push_back(near);
  for (const float magnitude : values) {
    for (const float x : {magnitude, -magnitude}) {
      for (const bool saturate : {false, true}) {
        INFO(x << ", saturate " << saturate);
        const uint32_t got = f32_to_f8<mantissa, bias>(std::bit_cast<uint32_t>(x), saturate);
        const uint32_t want = attn::encode(format, x, saturate);
        if (is_nan(want)) {
          CHECK(is_nan(got));
        } else {
          CHECK(got == want);
        }
      }
    }
  }
}

// What the kernel writes to 64 * `words` words for one wave, given as many words for each lane as
// `in` has.
std::vector<uint32_t> run(const std::vector<std::byte>& file, int words,
                          const std::vector<uint32_t>& in) {
  Memory memory;
  std::string error;
  const auto object = CodeObject::load(file, &memory, &error);
  INFO(error);
  REQUIRE(object);
  const uint64_t addresses[] = {memory.allocate(256 * uint64_t(words)),
                                memory.allocate(4 * in.size())};
  memory.write(addresses[1], std::as_bytes(std::span(in)));
  const Report report =
      launch(memory, object->kernels()[0], {1}, {64}, std::as_bytes(std::span(addresses)), 0, {});
  INFO(faults_of(report));
  REQUIRE(report.ok());
  std::vector<uint32_t> out(64 * words);
  memory.read(addresses[0], std::as_writable_bytes(std::span(out)));
  return out;
}

Inst inst(const std::string& text) {
  Inst i;
  i.arch = Arch::Gfx950;
  INFO(text);
  REQUIRE(parse_instruction(text, i) == "");
  return i;
}
int wait_states(const std::string& first, const std::string& second) {
  const Hazard found = find_hazard(inst(first), inst(second));
  return found.rule && found.rule->strict == Severity::Fault ? found.needed : 0;
}

}  // namespace

TEST_CASE("gfx950: conversions of every fp8 code and of what lies between") {
  check_conversions<3, 7>(attn::fp8_format(ATTN_F8_E4M3FN));
  check_conversions<2, 15>(attn::fp8_format(ATTN_F8_E5M2));
  check_conversions<3, 8>(attn::fp8_format(ATTN_F8_E4M3FNUZ));
}

TEST_CASE("gfx950: fp8 is what the code object's processor has") {
  if (!can_assemble()) ATTN_SKIP("no llvm-mc and ld.lld");
  const Source source = {"k", R"(
    s_load_dwordx4 s[4:7], s[0:1], 0
    v_lshlrev_b32 v1, 2, v0
    v_lshlrev_b32 v2, 4, v0
    s_waitcnt lgkmcnt(0)
    global_load_dword v3, v1, s[6:7]
    s_waitcnt vmcnt(0)
    v_mov_b32 v4, 0
    v_mov_b32 v5, 0
    v_cvt_pk_fp8_f32 v4, v3, v3
    v_cvt_pk_bf8_f32 v5, v3, v3
    v_cvt_f32_fp8 v6, v4
    v_cvt_f32_bf8 v7, v5
    global_store_dwordx4 v2, v[4:7], s[4:5])",
                         ""};
  std::vector<uint32_t> in(64, std::bit_cast<uint32_t>(1.0f));
  in[1] = std::bit_cast<uint32_t>(300.0f);
  in[2] = std::bit_cast<uint32_t>(-0.0f);
  const auto words = [&](const char* cpu) { return run(assemble({source}, "", cpu), 4, in); };
  const auto gfx942 = words("gfx942");
  CHECK(gfx942[0] == 0x4040);
  CHECK(gfx942[4] == 0x8080);  // NaN
  CHECK(gfx942[8] == 0);
  CHECK(gfx942[1] == 0x4040);
  if (!Decoder::knows(Arch::Gfx950)) ATTN_SKIP("LLVM does not know gfx950");
  const auto gfx950 = words("gfx950");
  CHECK(gfx950[0] == 0x3838);
  CHECK(gfx950[4] == 0x7979);  // 288
  CHECK(gfx950[8] == 0x8080);  // -0
  CHECK(gfx950[1] == 0x3c3c);
  for (const auto& out : {gfx942, gfx950})
    for (const int type : {2, 3}) CHECK(std::bit_cast<float>(out[type]) == 1.0f);
  CHECK(std::bit_cast<float>(gfx950[6]) == 288.0f);
}

TEST_CASE("gfx950: 160 KiB of LDS, and no fp8 MFMA of gfx942's shapes") {
  if (!can_generate()) ATTN_SKIP("no LLVM or no Python");
  if (!Decoder::knows(Arch::Gfx950)) ATTN_SKIP("LLVM does not know gfx950");
  const auto kernel = [](const std::string& body) {
    return "//# kernel k workgroup=64 lds=163840\n.globl k\n.p2align 8\n.type k, @function\nk:\n" +
           body + "\n s_endpgm\n";
  };
  const auto report = [&](const std::string& body) {
    std::string error;
    const auto file = generate(kernel(body), &error, "gfx950");
    INFO(error);
    REQUIRE(error == "");
    Memory memory;
    const auto object = CodeObject::load(file, &memory, &error);
    INFO(error);
    REQUIRE(object);
    CHECK(object->arch() == Arch::Gfx950);
    return launch(memory, object->kernels()[0], {1}, {64}, {}, 0, {});
  };
  const std::string last = "v_mov_b32 v0, 0x27ffc\n v_mov_b32 v1, 7\n ds_write_b32 v0, v1\n";
  CHECK(report(last).ok());
  CHECK_FALSE(report("v_mov_b32 v0, 0x28000\n v_mov_b32 v1, 7\n ds_write_b32 v0, v1\n").ok());
  const Report mfma = report("v_mfma_f32_16x16x32_fp8_fp8 v[0:3], v[4:5], v[6:7], 0");
  REQUIRE_FALSE(mfma.ok());
  CHECK(mfma.faults[0].kind == FaultKind::UnknownInstruction);
}

// A lane's bytes of A meet the same bytes of B in the lane of the other's row or column, whatever k
// they are; D is laid out as on gfx942.
TEST_CASE("gfx950: f8f6f4 MFMA against float64") {
  if (!can_assemble()) ATTN_SKIP("no llvm-mc and ld.lld");
  if (!Decoder::knows(Arch::Gfx950)) ATTN_SKIP("LLVM does not know gfx950");
  const Source source = {"k", R"(
    s_load_dwordx4 s[4:7], s[0:1], 0
    v_lshlrev_b32 v1, 6, v0
    v_mul_u32_u24 v2, 80, v0
    s_waitcnt lgkmcnt(0)
    global_load_dwordx4 v[16:19], v1, s[6:7]
    global_load_dwordx4 v[20:23], v1, s[6:7] offset:16
    global_load_dwordx4 v[24:27], v1, s[6:7] offset:32
    global_load_dwordx4 v[28:31], v1, s[6:7] offset:48
    s_waitcnt vmcnt(0)
    v_mfma_f32_32x32x64_f8f6f4 v[32:47], v[16:23], v[24:31], 0
    v_mfma_f32_16x16x128_f8f6f4 v[48:51], v[16:23], v[24:31], 0
    s_nop 15
    s_nop 3
    global_store_dwordx4 v2, v[32:35], s[4:5]
    global_store_dwordx4 v2, v[36:39], s[4:5] offset:16
    global_store_dwordx4 v2, v[40:43], s[4:5] offset:32
    global_store_dwordx4 v2, v[44:47], s[4:5] offset:48
    global_store_dwordx4 v2, v[48:51], s[4:5] offset:64)",
                         ".amdhsa_next_free_vgpr 64\n.amdhsa_accum_offset 64\n"};
  std::mt19937 rng(6);
  std::vector<uint32_t> in(64 * 16);
  uint8_t* bytes = reinterpret_cast<uint8_t*>(in.data());
  for (size_t i = 0; i < 4 * in.size(); ++i) {
    bytes[i] = uint8_t(rng());
    if (i % 5 == 0) bytes[i] &= 0x87;                 // subnormal
    if ((bytes[i] & 0x7f) == 0x7f) bytes[i] ^= 0x10;  // not NaN
  }
  const attn::SmallFloat& e4m3 = attn::fp8_format(ATTN_F8_E4M3FN);
  const auto value = [&](int operand, int lane, int byte) {
    return attn::value_of(e4m3, bytes[64 * lane + 32 * operand + byte]);
  };
  const auto out = run(assemble({source}, "", "gfx950"), 20, in);
  const auto check = [&](int size, int lane, int reg, float got) {
    const int groups = 64 / size, row = reg / 4 * 4 * groups + lane / size * 4 + reg % 4;
    double want = 0, all = 0;
    for (int group = 0; group < groups; ++group)
      for (int byte = 0; byte < 32; ++byte) {
        const double x =
            value(0, row + size * group, byte) * value(1, lane % size + size * group, byte);
        want += x, all += std::abs(x);
      }
    INFO("lane " << lane << ", register " << reg);
    REQUIRE(std::abs(got - want) <= all * 0x1p-20);
  };
  for (int lane = 0; lane < 64; ++lane)
    for (int reg = 0; reg < 20; ++reg)
      check(reg < 16 ? 32 : 16, lane, reg % 16, std::bit_cast<float>(out[size_t(20 * lane + reg)]));
}

TEST_CASE("gfx950: transposing reads of bytes from LDS") {
  if (!can_assemble()) ATTN_SKIP("no llvm-mc and ld.lld");
  if (!Decoder::knows(Arch::Gfx950)) ATTN_SKIP("LLVM does not know gfx950");
  const Source source = {"k", R"(
    s_load_dwordx4 s[4:7], s[0:1], 0
    v_lshlrev_b32 v1, 4, v0
    v_lshlrev_b32 v2, 3, v0
    v_and_b32 v3, 14, v0
    v_lshlrev_b32 v3, 5, v3
    v_and_b32 v4, 1, v0
    v_lshl_add_u32 v3, v4, 3, v3
    v_lshrrev_b32 v4, 4, v0
    v_lshl_add_u32 v3, v4, 4, v3
    s_waitcnt lgkmcnt(0)
    global_load_dwordx4 v[16:19], v1, s[6:7]
    s_waitcnt vmcnt(0)
    ds_write_b128 v1, v[16:19]
    s_waitcnt lgkmcnt(0)
    ds_read_b64_tr_b8 v[6:7], v3 offset:512
    s_waitcnt lgkmcnt(0)
    global_store_dwordx2 v2, v[6:7], s[4:5])",
                         ".amdhsa_next_free_vgpr 32\n.amdhsa_accum_offset 32\n"};
  // Rows of 64 bytes; each 16 lanes read 8 rows of 16 columns, a lane half a row.
  std::vector<uint32_t> in(256);
  uint8_t* bytes = reinterpret_cast<uint8_t*>(in.data());
  for (size_t i = 0; i < 1024; ++i) bytes[i] = uint8_t(i * 37 + i / 64 * 11);
  const auto out = run(assemble({source}, "", "gfx950"), 2, in);
  for (size_t lane = 0; lane < 64; ++lane)
    for (size_t row = 0; row < 8; ++row) {
      INFO("lane " << lane << ", row " << row);
      CHECK((out[2 * lane + row / 4] >> row % 4 * 8 & 0xff) == bytes[64 * (8 + row) + lane]);
    }
}

// The halves that meet change places: lanes 32 to 63 of the first register, 0 to 31 of the second.
TEST_CASE("gfx950: v_permlane32_swap, and the wait states in front of it", "[gfx9][hazards]") {
  const std::string swap = "v_permlane32_swap_b32_e32 v3, v4";
  for (const char* first : {"v_mov_b32_e32 v3, v9", "v_mov_b32_e32 v4, v9"})
    CHECK(wait_states(first, swap) == 2);
  CHECK(wait_states("v_mov_b32_e32 v5, v9", swap) == 0);
  if (!can_assemble()) ATTN_SKIP("no llvm-mc and ld.lld");
  if (!Decoder::knows(Arch::Gfx950)) ATTN_SKIP("LLVM does not know gfx950");
  const Source source = {"k", R"(
    s_load_dwordx4 s[4:7], s[0:1], 0
    v_lshlrev_b32 v1, 3, v0
    s_waitcnt lgkmcnt(0)
    global_load_dwordx2 v[4:5], v1, s[6:7]
    s_waitcnt vmcnt(0)
    v_permlane32_swap_b32 v4, v5
    global_store_dwordx2 v1, v[4:5], s[4:5])",
                         ""};
  std::vector<uint32_t> in(128);
  for (uint32_t i = 0; i < in.size(); ++i) in[i] = 1000 * (i % 2) + i / 2;
  const auto out = run(assemble({source}, "", "gfx950"), 2, in);
  for (uint32_t lane = 0; lane < 64; ++lane) {
    INFO("lane " << lane);
    CHECK(out[2 * lane] == (lane < 32 ? lane : 1000 + lane - 32));
    CHECK(out[2 * lane + 1] == (lane < 32 ? lane + 32 : 1000 + lane));
  }
}

// Lane l's bytes land at M0 + the constant offset + 16 l or 12 l, wherever they are from; the
// constant offset moves the address in memory too. Beyond the descriptor's bytes, each dword by
// itself is 0.
TEST_CASE("gfx950: loads to LDS of 12 and 16 bytes a lane") {
  if (!can_assemble()) ATTN_SKIP("no llvm-mc and ld.lld");
  if (!Decoder::knows(Arch::Gfx950)) ATTN_SKIP("LLVM does not know gfx950");
  constexpr uint32_t words = 1024, m0 = 96, offset = 32;
  std::vector<uint32_t> in(words);
  for (uint32_t i = 0; i < words; ++i) in[i] = 0x10000 + i;
  // What lane l reads, before the constant offset: 20 bytes further for each lane, in reverse.
  const auto from = [](uint32_t lane) { return 20 * (63 - lane); };
  // 768 bytes of LDS from m0 + offset on: 64 lanes' 12 or 48 lanes' 16.
  const auto got = [&](const std::string& load, uint32_t dwords) {
    const Source source = {"k",
                           R"(
    s_load_dwordx4 s[4:7], s[0:1], 0
    v_sub_u32 v1, 63, v0
    v_mul_u32_u24 v1, 20, v1
    v_lshlrev_b32 v2, 4, v0
    v_lshlrev_b32 v4, 2, v0
    s_movk_i32 m0, 96
    s_waitcnt lgkmcnt(0)
    s_mov_b32 s8, s6
    s_and_b32 s9, s7, 0xffff
    s_movk_i32 s10, 1244
    s_mov_b32 s11, 0x00020000
    )" + std::string(dwords == 4 ? "s_mov_b32 exec_hi, 0xffff\n" : "") +
                               load + R"(
    s_mov_b64 exec, -1
    s_waitcnt vmcnt(0)
    ds_read_b32 v8, v4 offset:128
    ds_read_b32 v9, v4 offset:384
    ds_read_b32 v10, v4 offset:640
    s_waitcnt lgkmcnt(0)
    global_store_dwordx3 v2, v[8:10], s[4:5])",
                           ""};
    const auto out = run(assemble({source}, "", "gfx950"), 4, in);
    std::vector<uint32_t> lds(192);
    for (uint32_t i = 0; i < lds.size(); ++i) lds[i] = out[4 * (i % 64) + i / 64];
    return lds;
  };
  for (const uint32_t dwords : {3u, 4u}) {
    const std::string x = "x" + std::to_string(dwords);
    const auto buffer =
        got("buffer_load_dword" + x + " v1, s[8:11], 0 offen offset:32 lds", dwords);
    const auto global = got("global_load_lds_dword" + x + " v1, s[6:7] offset:32", dwords);
    for (uint32_t lane = 0; lane < 192 / dwords; ++lane)
      for (uint32_t i = 0; i < dwords; ++i) {
        INFO("dwords " << dwords << ", lane " << lane << ", dword " << i);
        const uint32_t at = from(lane) + offset + 4 * i;
        CHECK(global[lane * dwords + i] == in[at / 4]);
        CHECK(buffer[lane * dwords + i] == (at + 4 <= 1244 ? in[at / 4] : 0));
      }
  }
  static_assert(m0 + offset == 128);
}

TEST_CASE("gfx950: wide loads to LDS are checked as others are") {
  if (!can_assemble()) ATTN_SKIP("no llvm-mc and ld.lld");
  if (!Decoder::knows(Arch::Gfx950)) ATTN_SKIP("LLVM does not know gfx950");
  const auto fault = [](const std::string& m0, const std::string& wait) {
    const Source source = {"k",
                           R"(
    s_load_dwordx4 s[4:7], s[0:1], 0
    v_lshlrev_b32 v1, 4, v0
    s_movk_i32 m0, )" + m0 + R"(
    s_waitcnt lgkmcnt(0)
    global_load_lds_dwordx4 v1, s[6:7]
    )" + wait + R"(
    ds_read_b128 v[4:7], v1
    s_waitcnt lgkmcnt(0) vmcnt(0)
    global_store_dwordx4 v1, v[4:7], s[4:5])",
                           ""};
    Memory memory;
    std::string error;
    const auto object = CodeObject::load(assemble({source}, "", "gfx950"), &memory, &error);
    INFO(error);
    REQUIRE(object);
    const uint64_t addresses[] = {memory.allocate(1024), memory.allocate(1024)};
    memory.fill(addresses[1], 1, 1024);
    return faults_of(launch(memory, object->kernels()[0], {1}, {64},
                            std::as_bytes(std::span(addresses)), 0, {}));
  };
  CHECK(fault("0", "s_waitcnt vmcnt(0)") == "");
  CHECK(fault("0", "s_nop 0").find("before the s_waitcnt vmcnt") != std::string::npos);
  CHECK(fault("8", "s_waitcnt vmcnt(0)").find("multiple of 16") != std::string::npos);
  CHECK(fault("16", "s_waitcnt vmcnt(0)").find("LDS") != std::string::npos);  // 16 bytes too far
}

// Measured: llc 22 -mcpu=gfx950 -run-pass post-RA-hazard-rec.
TEST_CASE("gfx950: wait states after an MFMA", "[gfx9][hazards]") {
  for (const auto& [name, d, longer] :
       {std::tuple{"v_mfma_f32_32x32x8_f16", 16, 4}, {"v_mfma_f32_16x16x16_f16", 4, 0}}) {
    for (const Pair& pair : mfma_pairs(name, d)) {
      INFO(name << ": " << pair.row);
      const int want = pair.row == "overlapped C"                 ? 6
                       : pair.row == "C read -> VALU write (WAR)" ? 3
                       : pair.row.starts_with("D ")               ? 8
                                                                  : 0;
      if (want != 0) CHECK(wait_states(pair.first, pair.second) == want + longer);
    }
  }
  for (const auto& [name, d, passes] : {std::tuple{"v_mfma_f32_32x32x64_f8f6f4", "v[0:15]", 16},
                                        {"v_mfma_f32_16x16x128_f8f6f4", "v[0:3]", 8}}) {
    INFO(name);
    const std::string mfma = std::string(name) + " ", d_text = d;
    const std::string other = d_text == "v[0:3]" ? "v[64:67]" : "v[64:79]";
    const std::string moved = d_text == "v[0:3]" ? "v[2:5]" : "v[2:17]";
    const std::string first = mfma + d_text + ", v[200:207], v[208:215], " + other;
    CHECK(wait_states(first, "v_mov_b32_e32 v250, v1") == passes + 4);
    CHECK(wait_states(first, "v_mov_b32_e32 v1, v250") == passes + 4);
    CHECK(wait_states(first, "ds_write_b32 v250, v1") == passes + 4);
    CHECK(wait_states(first, "v_mov_b32_e32 v65, v250") == passes - 1);
    CHECK(wait_states(first, mfma + other + ", v[0:7], v[208:215], 0") == passes + 4);
    CHECK(wait_states(first, mfma + other + ", v[200:207], v[208:215], " + moved) == passes + 2);
    CHECK(wait_states(mfma + d_text + ", v[200:207], v[208:215], " + d_text,
                      mfma + d_text + ", v[200:207], v[208:215], " + d_text) == 0);
    CHECK(wait_states("v_cvt_pk_fp8_f32 v207, v1, v2", first) == 2);
  }
  const std::string i8 = "v_mfma_i32_4x4x4_16b_i8 ", f32 = "v_mfma_f32_32x32x2_f32 ",
                    f64 = "v_mfma_f64_16x16x4_f64 ", read = "v_mov_b32_e32 v250, v1",
                    write = "v_mov_b32_e32 v1, v250", store = "ds_write_b32 v250, v1";
  const std::string of_i8 = i8 + "v[0:3], v200, v204, v[64:67]";
  CHECK(wait_states(of_i8, i8 + "v[96:99], v200, v204, v[2:5]") == 4);
  CHECK(wait_states(of_i8, read) == 5);
  CHECK(wait_states(of_i8, write) == 5);
  const std::string of_f32 = f32 + "v[0:15], v200, v204, v[64:79]";
  CHECK(wait_states(of_f32, read) == 18);
  CHECK(wait_states(of_f32, f32 + "v[96:111], v200, v204, v[2:17]") == 16);
  const std::string of_f64 = f64 + "v[0:7], v[200:201], v[204:205], v[64:71]";
  CHECK(wait_states(of_f64, read) == 19);
  CHECK(wait_states(of_f64, write) == 11);
  CHECK(wait_states(of_f64, store) == 18);
  CHECK(wait_states(of_f64, f64 + "v[96:103], v[200:201], v[204:205], v[2:9]") == 17);
  CHECK(wait_states(of_f64, f64 + "v[96:103], v[2:3], v[204:205], v[64:71]") == 19);
}

namespace {

// One of each kind of kernel but for block masks, which take long; those of decode in fp8 take
// other types on gfx950.
bool is_compared(const std::string& name) {
  if (attn::test::on_gfx950(name).empty() || name.find("_fp8") != name.npos) return false;
  if (name.starts_with("fwd_"))
    return !name.ends_with("_mask") &&
           (name.find("_f16_d64") != name.npos || name.ends_with("bf16_d128"));
  if (name.starts_with("decode_"))
    return name.find("bf16_d64") != name.npos || name.ends_with("0_d128");
  return true;
}

}  // namespace

TEST_CASE("gfx950: kernels give the bytes that gfx942's give, in no more clocks", "[gfx9]") {
  if (!Decoder::knows(Arch::Gfx950)) ATTN_SKIP("LLVM does not know gfx950");
  std::vector<std::string> names = attn::test::shipped_kernels();
  for (const std::string& name : attn::test::shipped_kernels(true)) names.push_back(name);
  int compared = 0;
  for (const std::string& name : names) {
    if (!is_compared(name)) continue;
    const std::string other = attn::test::on_gfx950(name);
    INFO(other);
    attn::test::ShippedRun runs[2];
    for (int i = 0; i < 2; ++i) {
      Memory memory;
      const std::string& of = i == 0 ? name : other;
      const auto object = attn::test::load_shipped(of, &memory);
      if (!object) ATTN_SKIP("no code object of " + of);
      CHECK(object->arch() == (i == 0 ? Arch::Gfx942 : Arch::Gfx950));
      runs[i] = attn::test::run_shipped(of, *object, memory, {.trace = true});
      REQUIRE(runs[i].fault == "");
    }
    CHECK(runs[0].outputs == runs[1].outputs);
    std::cout << other << ": " << runs[1].clocks << " clocks by the issue model, on gfx942 "
              << runs[0].clocks << std::endl;
    CHECK(runs[1].clocks <= runs[0].clocks);
    ++compared;
  }
  CHECK(compared == 12);
}
