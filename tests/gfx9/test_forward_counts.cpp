// What the forward kernels issue in the steady state of the loop without a mask, and what the issue
// model makes of it, beside AMD's own kernels in the same model. docs/gfx942.md has the tables.
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <vector>

#include "asm/gfx942/prepare_args.h"
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

ModelSettings settings_of(const Asked& how, Arch arch = Arch::Gfx942) {
  ModelSettings settings(arch);
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

enum class Values { zeros, fnuz, ocp, bf16, f16 };  // N(0, 1), but for zeros

int bytes_of(Values type) {
  return type == Values::fnuz || type == Values::ocp ? 1 : 2;
}
void* values(Memory& memory, uint64_t bytes, Values type) {
  if (type == Values::zeros) return attn::test::zeros(memory, bytes);
  std::mt19937_64 source(bytes);
  std::normal_distribution<float> normal;
  std::vector<uint8_t> codes(bytes);
  for (uint64_t i = 0; i < bytes; i += uint64_t(bytes_of(type))) {
    const float x = normal(source);
    const uint32_t f = std::bit_cast<uint32_t>(x);
    const uint32_t code = type == Values::fnuz   ? f32_to_f8<3, 8>(f, true)
                          : type == Values::ocp  ? f32_to_f8<3, 7>(f, true)
                          : type == Values::bf16 ? f >> 16
                                                 : f32_to_f16(f, false);
    std::memcpy(&codes[i], &code, size_t(bytes_of(type)));
  }
  const uint64_t at = memory.allocate(codes.size());
  memory.write(at, std::as_bytes(std::span(codes)));
  return reinterpret_cast<void*>(at);
}

// The kernels of a type.
struct Forward {
  const char* name;
  Values type;
  uint32_t threads;
  int rows;  // queries of a wave
  // Mixes of AMD's kernels for head_dim 128, in the first of which weights are rounded as here.
  std::vector<const char*> amd;
  const char* prepare;
  int workgroups_d64;  // that a compute unit has at a time
  Arch arch = Arch::Gfx942;
  bool direct = false;  // K and V are rows, which no launch prepares

  std::string prefix() const { return std::string("fwd_") + facts_of(arch).name + "_" + name; }
  std::string kernel(int dim) const {
    return prefix() + "_d" + std::to_string(dim) + (direct ? "_direct" : "");
  }
  int bytes() const { return bytes_of(type); }
  int workgroups(int dim) const { return dim == 64 ? workgroups_d64 : 1; }
};

ModelWaves times(int n, const ModelWaves& workgroup) {
  ModelWaves all;
  for (int i = 0; i < n; ++i) all.insert(all.end(), workgroup.begin(), workgroup.end());
  return all;
}

// 256 queries of one head over so many tiles; with zeros no maximum ever moves.
Run run_forward(const Forward& f, int dim, int tiles, bool random) {
  const std::string name = f.kernel(dim);
  Memory memory;
  const auto object = attn::test::load_shipped(name, &memory);
  REQUIRE(object);
  const Values type = random ? f.type : Values::zeros;
  const uint64_t row = uint64_t(dim) * uint64_t(f.bytes());
  auto* tiles_at = static_cast<char*>(values(memory, uint64_t(tiles) * 128 * row, type));
  attn_gfx950_direct_kernarg kernarg{
      .forward = attn::test::zero_queries(memory, dim, tiles, tiles_at, f.bytes()),
      .k = tiles_at,
      .v = tiles_at + uint64_t(tiles) * 64 * row};
  kernarg.k_stride[1] = kernarg.v_stride[1] = int64_t(row);
  attn_gfx942_forward_kernarg& a = kernarg.forward;
  a.q = values(memory, 256 * row, type);
  if (random) a.scale = 1.4426950f / std::sqrt(static_cast<float>(dim));
  const auto bytes = std::as_bytes(std::span(&kernarg, 1));
  return run(*object, name, f.direct ? bytes : bytes.first(sizeof a), memory, {f.threads});
}

// Clocks per tile of a compute unit that prepares K and V, eight workgroups at a time.
double prepare_clocks(const Forward& f, int dim, ModelSettings settings) {
  Memory memory;
  const auto object = attn::test::load_shipped(f.prepare, &memory);
  REQUIRE(object);
  const int row = dim * f.bytes();
  attn_gfx942_prepare_kernarg a{};
  attn_gfx942_kv_segment& segment = a.segment[0];
  segment.k = values(memory, 64 * uint64_t(row), f.type);
  segment.v = values(memory, 64 * uint64_t(row), f.type);
  segment.k_stride[1] = segment.v_stride[1] = row;
  segment.lengths.capacity = 64;
  a.prepared = attn::test::zeros(memory, 128 * uint64_t(row));
  a.seqlen_q = 256;
  a.seqlen_kv = 64;
  a.band = {attn_gfx942_unbounded, attn_gfx942_unbounded, attn_gfx942_unbounded};
  a.tiles = a.num_segments = 1;
  a.head_dim = a.head_dim_v = a.padded_dim = dim;
  const Run one = run(*object, f.prepare, std::as_bytes(std::span(&a, 1)), memory, {uint32_t(row)});
  constexpr int workgroups = 8;
  settings.workgroup = int(one.waves.size());
  return double(run_model(times(workgroups, one.waves), settings).clocks) / workgroups;
}

// The share of AMD's loop by the counts of its mix.
double amd_share(const char* mix, const ModelSettings& settings) {
  std::ifstream in(std::string(ATTN_GFX9_MIX_DIR) + "/" + mix + ".mix");
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
  const Values type = !random ? Values::zeros : bytes == 1 ? Values::fnuz : Values::bf16;
  put(values(memory, queries * row, type));
  for (int i = 0; i < 2; ++i) put(values(memory, uint64_t{keys} * row, type));
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

// Of a compute unit with so many workgroups of this kind.
double step_clocks(const Run& a, const Run& b, ModelSettings settings, int workgroups = 1) {
  settings.workgroup = int(a.waves.size());
  return double(run_model(times(workgroups, b.waves), settings).clocks -
                run_model(times(workgroups, a.waves), settings).clocks) /
         between / workgroups;
}

// Returns the clocks as asked first.
double check_forward(const Forward& f, int dim) {
  const Run a = run_forward(f, dim, few, false), b = run_forward(f, dim, many, false);
  const Run random_a = run_forward(f, dim, few, true);
  const Run random_b = run_forward(f, dim, many, true);
  const bool fp8 = f.bytes() == 1;
  const double share = 32.0 / f.rows / between;  // of 64 keys x 32 queries
  const auto per_tile = [&](auto member) {
    return double(member(b.wave) - member(a.wave)) * share;
  };
  const auto issues = [&](Class c) {
    return per_tile([&](const Counters& n) { return n.instructions[int(c)]; });
  };
  const double passes = per_tile([](const Counters& n) { return n.mfma_passes; });
  const double states = per_tile([](const Counters& n) { return n.wait_states; });
  const double conflicts = per_tile([](const Counters& n) { return n.lds_conflict_cycles; });
  const double vector = issues(Class::Valu) + issues(Class::PackedF32) + issues(Class::Trans);
  const bool gfx950 = f.arch == Arch::Gfx950;
  const double products = 32.0 * dim / 128 * f.bytes() / (gfx950 ? 4 : 1);
  std::cout << f.kernel(dim) << ", per wave and 64 keys x 32 queries: MFMA " << issues(Class::Mfma)
            << " (" << passes << " passes), transcendental " << issues(Class::Trans) << ", packed "
            << issues(Class::PackedF32) << ", other VALU " << issues(Class::Valu) << ", LDS "
            << issues(Class::Lds) << ", memory " << issues(Class::Buffer) << ", SALU "
            << issues(Class::Salu) << ", barriers " << issues(Class::Barrier) << ", wait states "
            << states << ", conflicts " << conflicts << "\n";
  CHECK(issues(Class::Mfma) == products + (gfx950 ? 1 : fp8 ? 4 : 0));
  CHECK(vector <= (fp8 ? 100 : 170));
  CHECK(issues(Class::Lds) <= 26.0 * dim / 128);
  CHECK(states <= 4);
  CHECK(conflicts == 0);
  CHECK(a.vmcnt_0 == b.vmcnt_0);
  double first = 0;
  for (const Asked& how : asked) {
    const ModelSettings settings = settings_of(how, f.arch);
    const int workgroups = f.workgroups(dim);
    const double clocks = how.random ? step_clocks(random_a, random_b, settings, workgroups)
                                     : step_clocks(a, b, settings, workgroups);
    if (first == 0) first = clocks;
    const double useful = 2 * products * (gfx950 ? 64 : 32);  // clocks of two waves' products
    // K and V are prepared once for all queries of a K/V head: here 4096 of one head.
    const double prepared = f.direct ? 0 : prepare_clocks(f, dim, settings) / (4096 / 256);
    std::cout << "  " << how.text << ": " << clocks
              << " clocks per 64 keys and 64 queries on a SIMD, useful MFMA "
              << 100 * useful / clocks << " %, " << 100 * useful / (clocks + prepared)
              << " % with the prepare launch of 4096 queries";
    for (size_t n = 0; n < f.amd.size() && dim == 128; ++n) {
      const double ratio = useful / clocks / amd_share(f.amd[n], settings);
      std::cout << ", " << ratio << " times " << f.amd[n];
      if (n == 0 && !how.random && how.overlap) CHECK(ratio >= (fp8 ? 1.15 : 1.1));
    }
    std::cout << "\n";
  }
  if (gfx950) {
    ModelSettings slow = settings_of(asked[0], f.arch);
    slow.trans = 16;
    std::cout << "  transcendentals as slow as gfx942's: "
              << step_clocks(a, b, slow, f.workgroups(dim)) << " clocks\n";
  }
  return first;
}

// What stands between dot products and masks.
struct Terms {
  const char* text;
  const char* kernel;
  bool alibi;
  float cap;
  bool bias;
};
constexpr Terms all_terms[] = {{"nothing", "_score", false, 0, false},
                               {"ALiBi", "_score", true, 0, false},
                               {"softcap", "_score", false, 1, false},
                               {"a bias in f32", "_bias", false, 0, true}};

Run run_terms(const Terms& terms, int dim, int tiles) {
  const std::string name = "fwd_gfx942_bf16_d" + std::to_string(dim) + terms.kernel;
  Memory memory;
  const auto object = attn::test::load_shipped(name, &memory);
  REQUIRE(object);
  attn_gfx942_bias_kernarg a{};
  a.score.forward = attn::test::zero_queries(
      memory, dim, tiles, attn::test::zeros(memory, uint64_t(tiles) * 256 * uint64_t(dim)), 2);
  const float slope = 0.1f;
  if (terms.alibi) {
    void* slopes = attn::test::zeros(memory, 4);
    memory.write(reinterpret_cast<uint64_t>(slopes), std::as_bytes(std::span(&slope, 1)));
    a.score.alibi_slopes = static_cast<const float*>(slopes);
  }
  a.score.cap = terms.cap;
  if (terms.bias) {
    a.bias_bytes = int64_t{256} * tiles * 64 * 4;
    a.bias = attn::test::zeros(memory, uint64_t(a.bias_bytes));
    a.bias_stride[2] = tiles * 64 * 4, a.bias_stride[3] = 4;
    a.bias_type = 1;
  }
  const auto bytes = std::as_bytes(std::span(&a, 1));
  return run(*object, name, terms.bias ? bytes : bytes.first(sizeof a.score), memory, {256});
}

// Over one segment, whose tiles have descales of 1.
Run run_descaled(int dim, int tiles) {
  const std::string name = "fwd_gfx942_fp8_d" + std::to_string(dim) + "_descaled";
  Memory memory;
  const auto object = attn::test::load_shipped(name, &memory);
  REQUIRE(object);
  std::vector<attn_gfx942_tile_record> records(static_cast<size_t>(tiles));
  for (int n = 0; n < tiles; ++n) records[size_t(n)] = {0, 1, 64 * n, 1, 0, tiles, 0};
  const auto bytes = std::as_bytes(std::span(records));
  void* at = attn::test::zeros(memory, bytes.size());
  memory.write(reinterpret_cast<uint64_t>(at), bytes);
  attn_gfx942_descaled_kernarg a{};
  a.forward = attn::test::zero_queries(
      memory, dim, tiles, attn::test::zeros(memory, uint64_t(tiles) * 128 * uint64_t(dim)), 1);
  a.tile_records = static_cast<const attn_gfx942_tile_record*>(at);
  a.num_segments = 1;
  return run(*object, name, std::as_bytes(std::span(&a, 1)), memory, {512});
}

// Over blocks of 64 x 64 of one kind, whose PARTIAL ones show all.
Run run_masked(const std::string& type, int dim, int tiles, uint8_t kind) {
  const std::string name = "fwd_gfx942_" + type + "_d" + std::to_string(dim) + "_mask";
  const int bytes = type == "fp8" ? 1 : 2;
  Memory memory;
  const auto object = attn::test::load_shipped(name, &memory);
  REQUIRE(object);
  attn_gfx942_mask_kernarg a{};
  a.forward = attn::test::zero_queries(
      memory, dim, tiles, attn::test::zeros(memory, uint64_t(tiles) * 128 * uint64_t(dim * bytes)),
      bytes);
  const auto filled = [&](uint64_t count, uint8_t value) {
    void* at = attn::test::zeros(memory, count);
    memory.fill(reinterpret_cast<uint64_t>(at), value, count);
    return at;
  };
  const uint64_t blocks = 4 * uint64_t(tiles);
  a.block_mask.kinds = static_cast<const unsigned char*>(filled(blocks, kind));
  a.block_mask.index = static_cast<const int*>(filled(4 * blocks, 0));
  a.block_mask.bits = static_cast<const unsigned*>(filled(64 * 64 / 8, 0xff));
  a.block_mask.rows = 4;
  a.block_mask.columns = tiles;
  a.block_mask.block_q_log2 = a.block_mask.block_k_log2 = 6;
  a.block_mask.partials = 1;
  return run(*object, name, std::as_bytes(std::span(&a, 1)), memory, {bytes == 1 ? 512u : 256u});
}

// In FP8 over pages, all of which there are.
Run run_paged(int dim, int tiles) {
  const std::string name = "fwd_gfx942_fp8_d" + std::to_string(dim);
  Memory memory;
  const auto object = attn::test::load_shipped(name, &memory);
  REQUIRE(object);
  attn_gfx942_forward_kernarg a = attn::test::zero_queries(
      memory, dim, tiles, attn::test::zeros(memory, uint64_t(tiles) * 128 * uint64_t(dim)), 1);
  a.missing =
      static_cast<const unsigned long long*>(attn::test::zeros(memory, 8 * uint64_t(tiles)));
  return run(*object, name, std::as_bytes(std::span(&a, 1)), memory, {512});
}

constexpr int from = 4, to = 8;  // tiles

// What a loop issues for 64 keys and 32 queries, and the clocks of 64 queries; memory is always
// there.
void print_loop(const std::string& what, const Run& a, const Run& b, int rows, int workgroups,
                double products) {
  const auto issues = [&](Class c) {
    return double(b.wave.instructions[int(c)] - a.wave.instructions[int(c)]) / (to - from) * 32 /
           rows;
  };
  ModelSettings settings;
  settings.memory_latency = settings.scalar_latency = 0;
  settings.memory_bytes_per_clock = 1 << 20;
  settings.workgroup = int(a.waves.size());
  const double clocks = double(run_model(times(workgroups, b.waves), settings).clocks -
                               run_model(times(workgroups, a.waves), settings).clocks) /
                        (to - from) / workgroups;
  std::cout << what << ", per wave and 64 keys x 32 queries: transcendental "
            << issues(Class::Trans) << ", packed " << issues(Class::PackedF32) << ", other VALU "
            << issues(Class::Valu) << ", memory " << issues(Class::Buffer)
            << ", SALU, jumps and s_load "
            << issues(Class::Salu) + issues(Class::Branch) + issues(Class::Smem) << "; " << clocks
            << " clocks per 64 keys and 64 queries on a SIMD, useful MFMA "
            << 100 * products * 2 * 32 / clocks << " %; instruction cache: ";
  const ModelResult warm = run_model(times(workgroups, b.waves), settings);
  settings.instruction_cache.cold = true;
  const ModelResult cold = run_model(times(workgroups, b.waves), settings);
  std::cout << warm.fetch_misses << " misses in " << to << " tiles, " << cold.fetch_misses
            << " where nothing is in it, for " << cold.clocks - warm.clocks << " clocks\n";
  CHECK(warm.fetch_misses == 0);
  CHECK(issues(Class::Mfma) == products + (rows == 32 ? 4 : 0));  // sums of weights in FP8
}

}  // namespace

TEST_CASE("the code of every kernel fits the instruction cache", "[gfx9][model]") {
  const int room = ModelSettings().instruction_cache.bytes;
  for (const bool slow : {false, true})
    for (const std::string& name : attn::test::shipped_kernels(slow)) {
      Memory memory;
      const auto object = attn::test::load_shipped(name, &memory);
      if (!object) ATTN_SKIP("no code object of " + name);
      const auto& insts = object->program().insts;
      const uint64_t bytes = insts.back().offset + insts.back().size - insts.front().offset;
      INFO(name << " has " << bytes << " bytes of code; the instruction cache, which two compute "
                << "units share, has " << room);
      CHECK(bytes <= uint64_t(room));
    }
}

// Beside the table of the loops without them.
TEST_CASE("forward: what softcap, ALiBi, a bias, descales, pages and block masks take",
          "[gfx9][model]") {
  Memory memory;
  if (!attn::test::load_shipped("fwd_gfx942_bf16_d128_score", &memory))
    ATTN_SKIP("this build has no gfx942 kernels");
  for (const int dim : {64, 128}) {
    for (const Terms& terms : all_terms)
      print_loop("fwd_gfx942_bf16_d" + std::to_string(dim) + terms.kernel + " with " + terms.text,
                 run_terms(terms, dim, from), run_terms(terms, dim, to), 64, dim == 64 ? 2 : 1,
                 dim / 2);
    const std::string fp8 = "fwd_gfx942_fp8_d" + std::to_string(dim);
    print_loop(fp8 + "_descaled", run_descaled(dim, from), run_descaled(dim, to), 32, 1, dim / 4);
    print_loop(fp8 + " over pages", run_paged(dim, from), run_paged(dim, to), 32, 1, dim / 4);
    for (const char* type : {"fp8", "bf16", "f16"})
      for (const uint8_t kind : {attn_kind_full, attn_kind_partial}) {
        const bool bytes = type == std::string("fp8");
        print_loop("fwd_gfx942_" + std::string(type) + "_d" + std::to_string(dim) + "_mask, " +
                       (kind == attn_kind_full ? "FULL" : "PARTIAL"),
                   run_masked(type, dim, from, kind), run_masked(type, dim, to, kind),
                   bytes ? 32 : 64, bytes || dim == 128 ? 1 : 2, bytes ? dim / 4 : dim / 2);
      }
  }
  std::cout << std::flush;
}

TEST_CASE("forward: what the loops issue", "[gfx9][model]") {
  Memory memory;
  if (!attn::test::load_shipped("fwd_gfx942_fp8_d128", &memory))
    ATTN_SKIP("this build has no gfx942 kernels");
  for (const int dim : {64, 128}) {
    const double fp8 = check_forward(
        {"fp8", Values::fnuz, 512, 32, {"fmha_fwd_hd128_fp8"}, "prepare_gfx942_fp8", 1}, dim);
    if (attn::test::load_shipped("fwd_gfx950_fp8_d128", &memory)) {
      Forward f{"fp8", Values::ocp, 512, 32, {}, "prepare_gfx950_fp8", 1, Arch::Gfx950};
      const double clocks = check_forward(f, dim);
      std::cout << "  " << fp8 / clocks << " times gfx942's rate per clock\n";
      CHECK(fp8 / clocks >= (dim == 128 ? 1.9 : 1.6));
      f.direct = true;
      if (dim == 128) CHECK(check_forward(f, dim) <= 1.01 * clocks);
    }
    check_forward(
        {"bf16",
         Values::bf16,
         256,
         64,
         {"fmha_fwd_hd128_bf16_rtne", "fmha_fwd_hd128_bf16_rtna", "fmha_fwd_hd128_bf16_rtz"},
         "prepare_gfx942_16bit",
         2},
        dim);
    check_forward({"f16", Values::f16, 256, 64, {}, "prepare_gfx942_16bit", 2}, dim);
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
