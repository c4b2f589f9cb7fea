// What the FP8 forward kernels issue in the steady state of the loop without a mask, and what the
// issue model makes of it, beside AMD's own kernel in the same model. docs/gfx942.md has the table.
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>

#include "catch.h"
#include "gfx9/assemble.h"
#include "gfx9/forward_kernarg.h"
#include "gfx9/shipped.h"
#include "gfx9emu/convert.h"
#include "gfx9emu/emu.h"
#include "gfx9emu/model.h"

using namespace gfx9emu;

namespace {

// How the model is asked: the two rates of packed f32, data that moves the maximum, and nothing
// beside an MFMA.
struct Asked {
  const char* text;
  int packed_f32;
  bool random, overlap;
};
constexpr Asked asked[] = {{"packed f32 at 4 clocks", 4, false, true},
                           {"packed f32 at 8 clocks", 8, false, true},
                           {"packed f32 at 4 clocks, random data", 4, true, true},
                           {"packed f32 at 4 clocks, nothing behind an MFMA", 4, false, false}};

ModelSettings settings_of(const Asked& how) {
  ModelSettings settings;
  settings.packed_f32 = how.packed_f32;
  settings.overlap = how.overlap;
  return settings;
}

struct Run {
  Counters wave;  // of one wave
  ModelWaves waves;
  int vmcnt_0 = 0;  // waits for all memory
};

Run run(const CodeObject& object, const std::string& name, std::span<const std::byte> kernarg,
        Memory& memory, Dim3 block, Level level = Level::Strict) {
  Options options;
  options.trace = true;
  options.level = level;
  const Report report = launch(memory, *object.kernel(name), {1}, block, kernarg, 0, options);
  for (const Fault& f : report.faults) UNSCOPED_INFO(f.to_string());
  REQUIRE(report.ok());
  Run result;
  result.wave = report.waves[0];
  result.waves = model_waves(object.program(), report.traces);
  for (const ModelInst& i : result.waves[0]) {
    result.vmcnt_0 += i.cls == Class::Wait && i.vmcnt == 0;
  }
  return result;
}

// N(0, 1) in e4m3fnuz or, of two bytes, in bf16; or zeros.
void* values(Memory& memory, uint64_t count, int bytes, bool random) {
  std::mt19937_64 source(count);
  std::normal_distribution<float> normal;
  std::vector<uint8_t> codes(count * static_cast<uint64_t>(bytes));
  for (uint64_t i = 0; random && i < count; ++i) {
    const uint32_t f = std::bit_cast<uint32_t>(normal(source));
    if (bytes == 1) {
      codes[i] = static_cast<uint8_t>(f32_to_fnuz<3, 8>(f, true));
    } else {
      const uint16_t b = static_cast<uint16_t>(f >> 16);
      std::memcpy(&codes[2 * i], &b, 2);
    }
  }
  const uint64_t at = memory.allocate(codes.size());
  memory.write(at, std::as_bytes(std::span(codes)));
  return reinterpret_cast<void*>(at);
}

// 256 queries of one head over so many tiles; with zeros no maximum ever moves.
Run run_forward(const std::string& name, int dim, int tiles, bool random) {
  Memory memory;
  const auto object = attn::test::load_shipped(name, &memory);
  REQUIRE(object);
  attn_gfx942_forward_kernarg a = attn::test::zero_queries(
      memory, dim, tiles, values(memory, uint64_t(tiles) * 128 * dim, 1, random));
  a.q = values(memory, uint64_t{256} * dim, 1, random);
  if (random) a.scale = 1.4426950f / std::sqrt(static_cast<float>(dim));
  return run(*object, name, std::as_bytes(std::span(&a, 1)), memory, {512});
}

// Clocks per tile of a compute unit that prepares K and V, eight workgroups at a time.
double prepare_clocks(int dim, const ModelSettings& settings) {
  Memory memory;
  const auto object = attn::test::load_shipped("prepare_gfx942_fp8", &memory);
  REQUIRE(object);
  attn_gfx942_prepare_kernarg a{};
  a.k = values(memory, uint64_t{64} * dim, 1, true);
  a.v = values(memory, uint64_t{64} * dim, 1, true);
  a.prepared = attn::test::zeros(memory, uint64_t{128} * dim);
  a.k_stride[1] = a.v_stride[1] = dim;
  a.seqlen_q = 256;
  a.seqlen_kv = 64;
  a.band = {attn_gfx942_unbounded, attn_gfx942_unbounded, attn_gfx942_unbounded};
  a.tiles = 1;
  a.head_dim = a.head_dim_v = a.padded_dim = dim;
  const Run one =
      run(*object, "prepare_gfx942_fp8", std::as_bytes(std::span(&a, 1)), memory, {uint32_t(dim)});
  constexpr int workgroups = 8;
  ModelWaves waves;
  for (int i = 0; i < workgroups; ++i) {
    waves.insert(waves.end(), one.waves.begin(), one.waves.end());
  }
  return double(run_model(waves, settings).clocks) / workgroups;
}

// The share of AMD's loop by the counts of its mix.
double amd_share(const ModelSettings& settings) {
  std::ifstream in(std::string(ATTN_GFX9_MIX_DIR) + "/fmha_fwd_hd128_fp8.mix");
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  ModelWaves waves;
  REQUIRE(parse_mix(text, waves) == "");
  return run_model(waves, settings).mfma_share();
}

// fmha_fwd_v3_args of AITER, an argument in each 16 bytes; strides are bytes.
std::vector<std::byte> aiter_kernarg(Memory& memory, int tiles, int bytes, bool random) {
  constexpr uint32_t dim = 128, queries = 256;
  const uint32_t keys = static_cast<uint32_t>(tiles) * 64, row = dim * static_cast<uint32_t>(bytes);
  std::vector<std::byte> kernarg;
  const auto put = [&](auto value) {
    kernarg.resize(kernarg.size() + 16);
    std::memcpy(kernarg.data() + kernarg.size() - 16, &value, sizeof value);
  };
  put(attn::test::zeros(memory, queries * dim * 2));
  put(values(memory, queries * dim, bytes, random));
  for (int i = 0; i < 2; ++i) put(values(memory, uint64_t{keys} * dim, bytes, random));
  put(attn::test::zeros(memory, queries * 4));  // lse
  put(random ? 0.08838835f : 1.0f);
  const uint32_t q[] = {row, queries * row, row, queries * row}, kv[] = {row, row, keys * row};
  put(queries);
  for (const uint32_t x : q) put(x);
  put(uint32_t{1});  // queries of a K/V head
  for (const uint32_t x : kv) put(x);
  for (const uint32_t x : {5u, 1u, keys, dim, dim, 1u}) put(x);
  for (const uint32_t x : kv) put(x);
  for (const uint32_t x : {dim * 2, dim * 2, queries * dim * 2}) put(x);
  for (int i = 0; i < 2; ++i) put(uint64_t{0});
  put(queries * 4);
  for (int i = 0; i < 2; ++i) put(uint64_t{0});
  if (bytes == 2) return kernarg;
  // Descales of 1, and their strides.
  const float one = 1;
  const uint64_t descale = memory.allocate(4);
  memory.write(descale, std::as_bytes(std::span(&one, 1)));
  for (int i = 0; i < 3; ++i) put(descale);
  for (int i = 0; i < 6; ++i) put(uint32_t{0});
  return kernarg;
}

Run run_aiter(const std::string& path, int tiles, bool random) {
  Memory memory;
  std::string error;
  const auto object = CodeObject::load(test::read_file(path), &memory, &error);
  INFO(path << ": " << error);
  REQUIRE(object);
  const int bytes = path.find("fp8") != path.npos ? 1 : 2;
  const auto kernarg = aiter_kernarg(memory, tiles, bytes, random);
  return run(*object, object->kernels()[0].name, kernarg, memory, {512}, Level::Isa);
}

// Tiles of two runs, whose difference is the steady state.
constexpr int few = 16, many = 32, between = many - few;

double step_clocks(const Run& a, const Run& b, const ModelSettings& settings) {
  return double(run_model(b.waves, settings).clocks - run_model(a.waves, settings).clocks) /
         between;
}

}  // namespace

TEST_CASE("forward fp8: what the loop issues", "[gfx9][model]") {
  Memory memory;
  if (!attn::test::load_shipped("fwd_gfx942_fp8_d128", &memory))
    ATTN_SKIP("this build has no gfx942 kernels");
  for (const int dim : {64, 128}) {
    const std::string name = "fwd_gfx942_fp8_d" + std::to_string(dim);
    const Run a = run_forward(name, dim, few, false), b = run_forward(name, dim, many, false);
    const Run random_a = run_forward(name, dim, few, true);
    const Run random_b = run_forward(name, dim, many, true);
    const auto per_tile = [&](auto member) {
      return double(member(b.wave) - member(a.wave)) / between;
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
    for (const Asked& how : asked) {
      const ModelSettings settings = settings_of(how);
      const double clocks =
          how.random ? step_clocks(random_a, random_b, settings) : step_clocks(a, b, settings);
      const double share = 2 * useful / clocks;
      // K and V are prepared once for all queries of a K/V head: here 4096 of one head.
      const double prepared = prepare_clocks(dim, settings) / (4096 / 256);
      const double ratio = share / amd_share(settings);
      std::cout << "  " << how.text << ": " << clocks
                << " clocks per step of two waves on a SIMD, useful MFMA " << 100 * share << " %, "
                << 100 * 2 * useful / (clocks + prepared)
                << " % with the prepare launch of 4096 queries, " << ratio
                << " times AMD's loop by its mix\n";
      if (dim == 128 && !how.random && how.overlap) CHECK(ratio >= 1.15);
    }
  }
  std::cout << std::flush;
}

// The loop of AMD's kernel from its own code object, whose file ATTN_AITER_FMHA names.
TEST_CASE("AMD's forward kernel by trace", "[.][gfx9][model][aiter]") {
  const char* path = std::getenv("ATTN_AITER_FMHA");
  if (!path) ATTN_SKIP("ATTN_AITER_FMHA names no code object of AITER's fmha_v3_fwd");
  const Run zeros_a = run_aiter(path, few, false), zeros_b = run_aiter(path, many, false);
  const Run random_a = run_aiter(path, few, true), random_b = run_aiter(path, many, true);
  const auto per_tile = [&](Class c) {
    return double(zeros_b.wave.instructions[int(c)] - zeros_a.wave.instructions[int(c)]) / between;
  };
  const double passes = double(zeros_b.wave.mfma_passes - zeros_a.wave.mfma_passes) / between;
  std::cout << path << ", per wave and 64 keys x 32 queries: MFMA " << per_tile(Class::Mfma) << " ("
            << passes << " passes), transcendental " << per_tile(Class::Trans) << ", packed "
            << per_tile(Class::PackedF32) << ", other VALU " << per_tile(Class::Valu) << ", LDS "
            << per_tile(Class::Lds) << ", memory " << per_tile(Class::Buffer) << ", SALU "
            << per_tile(Class::Salu) << ", barriers " << per_tile(Class::Barrier) << "\n";
  for (const Asked& how : asked) {
    const ModelSettings settings = settings_of(how);
    const double clocks = how.random ? step_clocks(random_a, random_b, settings)
                                     : step_clocks(zeros_a, zeros_b, settings);
    std::cout << "  " << how.text << ": " << clocks
              << " clocks per step of two waves on a SIMD, MFMA "
              << 100 * 2 * passes * settings.pass / clocks << " %\n";
  }
  std::cout << std::flush;
  CHECK(passes > 0);
}
