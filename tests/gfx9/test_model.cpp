// The issue model against clocks counted by hand, and LDS bank conflicts.
#include <array>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

#include "catch.h"
#include "gfx9emu/model.h"

using namespace gfx9emu;

namespace {

ModelResult run(const std::string& mix, ModelSettings settings = {}) {
  ModelWaves waves;
  INFO(mix);
  REQUIRE(parse_mix(mix, waves) == "");
  return run_model(waves, settings);
}

}  // namespace

TEST_CASE("model: one wave", "[gfx9][model]") {
  // Back to back MFMA keep the matrix unit busy.
  ModelResult r = run("waves 1\n10 mfma:8");
  CHECK(r.clocks == 320);
  CHECK(r.mfma_share() == 1);
  CHECK(r.held_by_mfma == 9 * 28);

  // Seven VALU fit behind an MFMA of 8 passes, the eighth does not.
  CHECK(run("waves 1\nrepeat 10\nmfma:8 7 valu\nend").mfma_share() == 1);
  CHECK(run("waves 1\nrepeat 10\nmfma:8 8 valu\nend").clocks == 10 * 36);
  CHECK(run("waves 1\nrepeat 10\nmfma:8 2 trans\nend").clocks == 10 * 36);
  ModelSettings alone;
  alone.overlap = false;
  CHECK(run("waves 1\nrepeat 10\nmfma:8 7 valu\nend", alone).clocks == 10 * 60);
  ModelSettings packed;
  packed.packed_f32 = 8;
  CHECK(run("waves 1\n10 packed").clocks == 40);
  CHECK(run("waves 1\n10 packed", packed).clocks == 80);
  CHECK(run("waves 1\nvalu nop:3 valu").clocks == 4 + 16 + 4);

  // Latency is seen only by the wait.
  ModelSettings t;
  t.lds_latency = 64;
  t.memory_latency = 500;
  CHECK(run("waves 1\nlds:1024 valu", t).clocks == 8);
  CHECK(run("waves 1\nlds:1024 wait:lgkm=0 valu", t).clocks == 8 + 64 + 4 + 4);
  CHECK(run("waves 1\nvmem:256 wait:vm=0 valu", t).clocks == 4 + 500 + 4 + 4);
  // Two loads, of which the second may stay away: 4 + 4 clocks of transfer.
  CHECK(run("waves 1\nvmem:256 vmem:256 wait:vm=1 valu", t).clocks == 4 + 500 + 4 + 4);
  CHECK(run("waves 1\nvmem:256 vmem:256 wait:vm=0 valu", t).clocks == 8 + 500 + 4 + 4);
}

TEST_CASE("model: the instruction cache", "[gfx9][model]") {
  // `lines` of code of 128 bytes with two instructions each, `times` over; so many waves.
  const auto loop = [](int lines, int times, bool cold, size_t waves = 1) {
    std::vector<ModelInst> wave;
    for (int i = 0; i < 2 * lines * times; ++i) {
      ModelInst valu;
      valu.code_at = uint32_t(i % (2 * lines)) * 64;
      valu.code_bytes = 64;
      wave.push_back(valu);
    }
    ModelSettings settings;
    settings.instruction_cache = {.bytes = 2048, .line_bytes = 128, .ways = 8, .miss = 500};
    settings.instruction_cache.cold = cold;
    return run_model(ModelWaves(waves, wave), settings);
  };
  // What there is room for stays.
  ModelResult r = loop(16, 3, false);
  CHECK(r.fetch_misses == 0);
  CHECK(r.code_lines == 16);
  CHECK(r.clocks == 3 * 32 * 4);
  r = loop(16, 3, true);
  CHECK(r.fetch_misses == 16);
  CHECK(r.held_by_fetch == 16 * 500);
  CHECK(r.clocks == 3 * 32 * 4 + 16 * 500);
  // One line more is in set 0, whose nine lines push each other out.
  r = loop(17, 3, false);
  CHECK(r.fetch_misses == 2 * 9);
  CHECK(r.clocks == 3 * 34 * 4 + 2 * 9 * 500);
  // Waves that want the same line wait together; each is on another SIMD.
  r = loop(16, 1, true, 4);
  CHECK(r.fetch_misses == 16);
  CHECK(r.clocks == 32 * 4 + 16 * 500);
  // An instruction in two lines waits for both.
  ModelInst both;
  both.code_at = 124, both.code_bytes = 8;
  ModelSettings cold;
  cold.instruction_cache.cold = true;
  r = run_model({{both}}, cold);
  CHECK(r.fetch_misses == 2);
  CHECK(r.clocks == 500 + 4);
}

TEST_CASE("model: waves that share", "[gfx9][model]") {
  // Waves 0 and 4 are on one SIMD, wave 1 on another.
  CHECK(run("waves 5\ngroup 0-0\n10 valu\ngroup 4-4\n10 valu").clocks == 80);
  CHECK(run("waves 2\n10 valu").clocks == 40);
  CHECK(run("waves 8\n100 mfma:8").mfma_share() == 1);
  // The matrix unit of one wave and the vector port of the other: each MFMA needs the port for 4.
  const ModelResult r = run("waves 5\ngroup 0-0\n10 mfma:8\ngroup 4-4\n70 valu");
  CHECK(r.clocks == 320);
  CHECK(r.port_clocks == 40 + 280);
  // LDS serves one wave at a time.
  ModelSettings t;
  t.lds_latency = 64;
  CHECK(run("waves 8\n16 lds:1024 wait:lgkm=0", t).lds_clocks == 1024);
  CHECK(run("waves 8\n16 lds:1024 wait:lgkm=0", t).clocks == 1024 + 64 + 4);
}

TEST_CASE("model: barriers and priority", "[gfx9][model]") {
  // The short wave waits for the long one.
  ModelResult r = run("waves 2\ngroup 0-0\nvalu barrier valu\ngroup 1-1\n100 valu barrier valu");
  CHECK(r.clocks == 400 + 4 + 4);
  CHECK(r.held_by_barrier == 396);
  // The same beside another workgroup, which waits for nobody.
  ModelSettings pairs;
  pairs.workgroup = 2;
  r =
      run("waves 4\ngroup 0-0\nvalu barrier valu\ngroup 1-1\n100 valu barrier valu\ngroup 2-3\n9 "
          "valu barrier valu",
          pairs);
  CHECK(r.clocks == 400 + 4 + 4);
  CHECK(r.held_by_barrier == 396);
  // A wave that has ended is not waited for.
  CHECK(run("waves 2\ngroup 0-0\nbarrier valu\ngroup 1-1\nvalu").clocks == 8);
  // The wave of higher priority is done first; both take turns without.
  const auto first_done = [](const std::string& prio) {
    // Wave 4 ends with a long wait, so that the end tells when it got there.
    ModelSettings t;
    t.memory_latency = 1000;
    return run("waves 5\ngroup 0-0\n50 valu\ngroup 4-4\n" + prio + "50 valu vmem:64 wait:vm=0", t)
        .clocks;
  };
  CHECK(first_done("prio:3 ") < first_done(""));
}

TEST_CASE("model: mixes that are wrong", "[gfx9][model]") {
  ModelWaves waves;
  const auto error = [&](const char* text) { return parse_mix(text, waves); };
  CHECK(error("") == "waves is missing");
  CHECK(error("valu") == "line 1: valu stands before waves");
  CHECK(error("waves 0") == "line 1: waves needs a number from 1 to 64");
  CHECK(error("waves 1\nwaves 1") == "line 2: waves is given twice");
  CHECK(error("waves 1\nvalue") == "line 2: value is no instruction");
  CHECK(error("waves 1\nmfma:17") == "line 2: mfma:17 has not 1 to 16 passes");
  CHECK(error("waves 1\n\nwait:xm=1") == "line 3: wait:xm=1 is no wait");
  CHECK(error("waves 1\nend") == "line 2: end has no repeat");
  CHECK(error("waves 1\nrepeat 2\nvalu") == "repeat without end");
  CHECK(error("waves 1\ngroup 0-1") == "line 2: group needs waves FIRST-LAST of those there are");
  CHECK(error("waves 1\nrepeat 99999\n99999 valu\nend") ==
        "line 4: end closes more than 10 million instructions");
}

TEST_CASE("model: AMD's FP8 loop", "[gfx9][model]") {
  std::ifstream in(ATTN_GFX9_MIX_DIR "/fmha_fwd_hd128_fp8.mix");
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  ModelWaves waves;
  REQUIRE(parse_mix(text, waves) == "");
  const auto json = nlohmann::json::parse(model_json(waves, {}));
  // The counts of one wave and step.
  const auto& n = json.at("instructions");
  const int steps = 8 * 64;
  CHECK(n.at("mfma") == 32 * steps);
  CHECK(n.at("trans") == 33 * steps);
  CHECK(n.at("packed_f32") == 31 * steps);
  CHECK(n.at("valu") == (32 + 32 + 16 + 16 + 8) * steps);
  CHECK(n.at("lds") == (8 + 32 + 4 + 1) * steps);
  CHECK(n.at("buffer") == 8 * steps);
  // The vector port alone allows no more than this: two waves' 1196 or 1320 clocks for 2048 of
  // MFMA.
  const double at4 = json.at("packed_f32_4").at("mfma_share");
  const double at8 = json.at("packed_f32_8").at("mfma_share");
  CHECK(at4 <= 2048 / 2392.0);
  CHECK(at8 <= 2048 / 2640.0);
  CHECK(at8 <= at4);
  CHECK(at8 > 0.3);
  // Where nothing runs behind an MFMA, a wave's 1024 clocks of MFMA stand beside its 1068 of VALU.
  const double alone = json.at("no_overlap").at("mfma_share");
  CHECK(alone <= 1024 / 2092.0);
  CHECK(alone > 0.45);
}

TEST_CASE("lds: bank conflicts", "[gfx9][model]") {
  std::array<uint32_t, 64> a{};
  const auto clocks = [&](int bytes, bool store, uint64_t exec = ~0ull) {
    return lds_clocks(bytes, store, exec, a);
  };
  const auto stride = [&](uint32_t bytes) {
    for (uint32_t l = 0; l < 64; ++l) a[l] = l * bytes;
  };
  stride(4);
  CHECK(clocks(4, false).clocks == 2);
  CHECK(clocks(4, false).conflicts == 0);
  CHECK(clocks(4, false, 0xffffffff).clocks == 1);
  CHECK(clocks(4, false, 0).clocks == 0);
  stride(8);
  CHECK(clocks(4, false).clocks == 4);
  CHECK(clocks(8, false).clocks == 4);
  CHECK(clocks(8, false).conflicts == 0);
  stride(128);
  CHECK(clocks(4, false).clocks == 64);
  CHECK(clocks(4, false).conflicts == 62);
  stride(132);
  CHECK(clocks(4, false).conflicts == 0);
  stride(0);  // one word for all
  CHECK(clocks(4, false).clocks == 2);
  stride(16);
  CHECK(clocks(16, false).clocks == 8);
  CHECK(clocks(16, true).clocks == 8);
  stride(1);
  CHECK(clocks(1, true).clocks == 2);

  // Rows of 128 bytes, 16-byte units: all in one bank group as they are, none if swizzled by row.
  for (uint32_t l = 0; l < 64; ++l) a[l] = l % 32 * 128 + l / 32 * 16;
  CHECK(clocks(16, false).conflicts == 8 * 7);
  for (uint32_t c = 0; c < 4; ++c) {
    for (uint32_t l = 0; l < 64; ++l) a[l] = l % 32 * 128 + ((2 * c + l / 32) ^ (l % 8)) * 16;
    CHECK(clocks(16, false).conflicts == 0);
  }
  // Rows of 136 bytes, as AMD's kernel has.
  for (uint32_t l = 0; l < 64; ++l) a[l] = l % 32 * 136 + l / 32 * 16;
  CHECK(clocks(8, false).conflicts == 0);
}
