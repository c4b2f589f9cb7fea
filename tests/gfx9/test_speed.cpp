// How fast the emulator is: attn-gfx9-tests "[speed]".
#include <chrono>
#include <iostream>
#include <string>
#include <thread>

#include "catch.h"
#include "gfx9/assemble.h"

using namespace gfx9emu;
using namespace gfx9emu::test;

namespace {

// A loop of 32 MFMA and 210 other instructions, in the proportions of an FP8 attention kernel.
std::string loop(int rounds) {
  std::string s;
  const auto add = [&](const std::string& line) { s += line + "\n"; };
  const auto v = [](int r) { return "v" + std::to_string(r); };
  const auto range = [](int first, int count) {
    return "v[" + std::to_string(first) + ":" + std::to_string(first + count - 1) + "]";
  };
  for (int r = 1; r < 128; ++r) add("v_mov_b32 " + v(r) + ", 0");
  // The first wave writes what all read.
  add("v_lshlrev_b32 v127, 4, v0\n v_and_b32 v127, 0x3f0, v127\n v_lshrrev_b32 v126, 6, v0");
  add("s_nop 0\n v_readfirstlane_b32 s6, v126\n s_cmp_lg_u32 s6, 0\n s_cbranch_scc1 written");
  add("ds_write_b128 v127, v[64:67]\n written:");
  add("s_movk_i32 s4, " + std::to_string(rounds) + "\n s_waitcnt lgkmcnt(0)\n s_barrier\n loop:");
  int n = 0;
  const auto other = [&] {
    const int r = 80 + 2 * (n % 8);
    switch (n++ % 13) {
      case 0:
      case 5:
        return add("v_exp_f32 " + v(96 + n % 8) + ", " + v(r));
      case 1:
      case 6:
        return add("v_fma_f32 " + v(r) + ", v70, v71, v72");
      case 2:
      case 7:
        return add("v_add_f32 " + v(r) + ", v73, v74");
      case 3:
      case 8:
        return add("v_pk_mul_f32 " + range(104 + 2 * (n % 4), 2) + ", v[74:75], v[76:77]");
      case 4:
        return add("v_max3_f32 " + v(112 + n % 4) + ", v70, v71, v72");
      case 9:
        return add("v_cvt_pk_fp8_f32 " + v(116 + n % 4) + ", v70, v71");
      case 10:
        return add("ds_read_b128 v[120:123], v127");
      case 11:
        return add("s_add_u32 s5, s4, s2");
      default:
        return add("s_waitcnt lgkmcnt(0)");
    }
  };
  for (int m = 0; m < 32; ++m) {
    const std::string acc = range(16 * (m % 4), 16);
    add("v_mfma_f32_32x32x16_fp8_fp8 " + acc + ", v[64:65], v[66:67], " + acc);
    for (int i = 0; i < (m < 14 ? 7 : 6); ++i) other();
  }
  add("s_waitcnt lgkmcnt(0)\n s_sub_u32 s4, s4, 1\n s_cmp_lg_u32 s4, 0\n s_cbranch_scc1 loop");
  return s;
}

}  // namespace

TEST_CASE("speed of the emulator", "[.][gfx9][speed]") {
  if (!can_assemble()) ATTN_SKIP("no llvm-mc and ld.lld");
  const auto file = assemble({{"k", loop(200),
                               ".amdhsa_next_free_vgpr 128\n.amdhsa_accum_offset 128\n"
                               ".amdhsa_group_segment_fixed_size 1024\n"}});
  Memory memory;
  std::string error;
  const auto object = CodeObject::load(file, &memory, &error);
  INFO(error);
  REQUIRE(object);
  const std::byte args[16] = {};
  const uint32_t cores = std::max(1u, std::thread::hardware_concurrency());
  for (const bool checks : {false, true}) {
    for (const uint32_t threads : {1u, cores}) {
      const auto begin = std::chrono::steady_clock::now();
      const Report report = launch(memory, object->kernels()[0], {2 * threads}, {512}, args, 0,
                                   {.checks = checks, .threads = int(threads)});
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
      INFO(faults_of(report));
      REQUIRE(report.ok());
      CHECK(report.counters.instructions[int(Class::Mfma)] == 2ull * threads * 8 * 200 * 32);
      std::cout << (checks ? "with checks, " : "without checks, ") << threads
                << " threads: " << double(report.counters.total()) / seconds.count() / 1e6
                << " million wave instructions per second" << std::endl;
    }
  }
}
