// What the FP8 forward kernels issue in the steady state of the loop without a mask, and what the
// issue model makes of it, beside AMD's own kernel in the same model. docs/gfx942.md has the table.
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>

#include "catch.h"
#include "gfx9/forward_kernarg.h"
#include "gfx9/shipped.h"
#include "gfx9emu/emu.h"
#include "gfx9emu/model.h"

using namespace gfx9emu;

namespace {

struct Run {
  Counters wave;            // of one wave
  uint64_t clocks[2] = {};  // packed f32 at 4 and at 8
  int vmcnt_0 = 0;          // waits for all memory
};

// 256 queries of one head over so many tiles of zeros, where no maximum ever moves.
Run run(const std::string& name, int dim, int tiles) {
  Memory memory;
  const auto object = attn::test::load_shipped(name, &memory);
  REQUIRE(object);
  const attn_gfx942_forward_kernarg a = attn::test::zero_queries(
      memory, dim, tiles, attn::test::zeros(memory, uint64_t(tiles) * 128 * dim));
  std::vector<std::byte> kernarg(sizeof a);
  std::memcpy(kernarg.data(), &a, sizeof a);
  Options options;
  options.trace = true;
  const Report report = launch(memory, *object->kernel(name), {1}, {512}, kernarg, 0, options);
  for (const Fault& f : report.faults) UNSCOPED_INFO(f.to_string());
  REQUIRE(report.faults.empty());
  Run result;
  result.wave = report.waves[0];
  const ModelWaves waves = model_waves(object->program(), report.traces);
  for (const int packed : {4, 8}) {
    ModelSettings settings;
    settings.packed_f32 = packed;
    result.clocks[packed / 8] = run_model(waves, settings).clocks;
  }
  for (const ModelInst& i : waves[0]) result.vmcnt_0 += i.cls == Class::Wait && i.vmcnt == 0;
  return result;
}

// Of AMD's loop, for packed f32 at 4 and 8 clocks.
double amd_share(int packed) {
  std::ifstream in(std::string(ATTN_GFX9_MIX_DIR) + "/fmha_fwd_hd128_fp8.mix");
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  ModelWaves waves;
  REQUIRE(parse_mix(text, waves) == "");
  ModelSettings settings;
  settings.packed_f32 = packed;
  return run_model(waves, settings).mfma_share();
}

}  // namespace

TEST_CASE("forward fp8: what the loop issues", "[gfx9][model]") {
  Memory memory;
  if (!attn::test::load_shipped("fwd_gfx942_fp8_d128", &memory))
    ATTN_SKIP("this build has no gfx942 kernels");
  for (const int dim : {64, 128}) {
    const std::string name = "fwd_gfx942_fp8_d" + std::to_string(dim);
    constexpr int few = 16, many = 32, tiles = many - few;
    const Run a = run(name, dim, few), b = run(name, dim, many);
    const auto per_tile = [&](auto member) {
      return double(member(b.wave) - member(a.wave)) / tiles;
    };
    const auto issues = [&](Class c) {
      return per_tile([&](const Counters& n) { return n.instructions[int(c)]; });
    };
    const double passes = per_tile([](const Counters& n) { return n.mfma_passes; });
    const double states = per_tile([](const Counters& n) { return n.wait_states; });
    const double conflicts = per_tile([](const Counters& n) { return n.lds_conflict_cycles; });
    const double vector = issues(Class::Valu) + issues(Class::PackedF32) + issues(Class::Trans);
    const double useful = 32.0 * dim / 128 * 32;  // clocks of a wave's products
    std::cout << name << ", per wave and 64 keys x 32 queries: MFMA " << issues(Class::Mfma) << " ("
              << passes << " passes), transcendental " << issues(Class::Trans) << ", packed "
              << issues(Class::PackedF32) << ", other VALU " << issues(Class::Valu) << ", LDS "
              << issues(Class::Lds) << ", memory " << issues(Class::Buffer) << ", SALU "
              << issues(Class::Salu) << ", barriers " << issues(Class::Barrier) << ", wait states "
              << states << ", conflicts " << conflicts << "\n";
    CHECK(issues(Class::Mfma) == 4 + 32 * dim / 128);
    CHECK(vector <= 100);
    CHECK(issues(Class::Lds) <= 26.0 * dim / 128);
    CHECK(states <= 4);
    CHECK(conflicts == 0);
    CHECK(a.vmcnt_0 == b.vmcnt_0);
    for (const int packed : {4, 8}) {
      const double clocks = double(b.clocks[packed / 8] - a.clocks[packed / 8]) / tiles;
      const double share = 2 * useful / clocks;
      const double ratio = share / amd_share(packed);
      std::cout << "  packed f32 at " << packed << " clocks: " << clocks
                << " clocks per step of two waves on a SIMD, useful MFMA " << 100 * share << " %, "
                << ratio << " times AMD's loop\n";
      if (dim == 128) CHECK(ratio >= 1.15);
    }
  }
  std::cout << std::flush;
}
