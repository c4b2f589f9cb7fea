// What the decode kernels issue for a tile of 64 keys in `plain_tile`, how much they have on its
// way, and what the issue model makes of it. docs/gfx942.md has the table.
#include <algorithm>
#include <deque>
#include <iostream>

#include "catch.h"
#include "gfx9/forward_kernarg.h"
#include "gfx9/maker.h"
#include "gfx9/shipped.h"
#include "gfx9emu/model.h"

using namespace gfx9emu;

namespace {

constexpr int waves = 4;

struct Run {
  Counters wave;  // of one wave
  ModelWaves model;
};

attn_dtype cache_type(const std::string& name) {
  if (name.find("_q8_0_") != name.npos) return ATTN_Q8_0;
  if (name.find("_q4_0_") != name.npos) return ATTN_Q4_0;
  if (name.find("_fp8_") != name.npos) return ATTN_F8_E4M3FNUZ;
  return name.find("_bf16_") != name.npos ? ATTN_BF16 : ATTN_F16;
}
int head_dim(const std::string& name) {
  return name.ends_with("d128") ? 128 : 64;
}

// 16 rows of one head over so many tiles for each wave of a workgroup. Of zeros: no maximum moves.
Run run_decode(const std::string& name, int tiles, bool lse) {
  Memory memory;
  const auto object = attn::test::load_shipped(name, &memory);
  REQUIRE(object);
  const attn_dtype type = cache_type(name);
  attn_segment segment{};
  segment.struct_size = sizeof segment;
  segment.k_type = segment.v_type = type;
  segment.seqlen = int64_t{waves} * tiles * 64;
  attn_problem in{};
  in.struct_size = sizeof in;
  in.batch = in.heads_kv = in.seqlen_q = 1;
  in.heads_q = 16;
  in.head_dim = head_dim(name);
  in.q_type = type == ATTN_BF16 ? ATTN_BF16 : ATTN_F16;
  in.out_type = ATTN_F32;
  in.max_sms = 1;
  in.num_segments = 1, in.segments = &segment;
  attn::Problem p;
  attn::test::require(attn::make_problem(&in, &p));
  const auto zeros = [&](int64_t bytes) { return attn::test::zeros(memory, uint64_t(bytes)); };
  attn_segment_args kv{};
  kv.struct_size = sizeof kv;
  const int64_t bytes = attn::dtype_bytes(type, segment.seqlen * in.head_dim);
  kv.k = zeros(bytes), kv.v = zeros(bytes);
  attn::Args args{};
  args.segment = &kv;
  args.q = zeros(attn::dtype_bytes(in.q_type, in.heads_q * in.head_dim));
  args.out = zeros(4 * in.heads_q * in.head_dim);
  if (lse) args.lse = static_cast<float*>(zeros(4 * in.heads_q));
  const attn::Recipe recipe = attn::test::recipe_of(name, p);
  attn::test::ShippedProblem problem;
  attn::test::fill(recipe.steps[0], p, &args, zeros(int64_t(recipe.workspace)), &problem);
  REQUIRE(problem.launch.grid[0] == 1);
  Options options;
  options.trace = true;
  const Report report =
      launch(memory, *object->kernel(name), {1}, {64 * waves}, problem.kernarg, 0, options);
  for (const Fault& f : report.faults) UNSCOPED_INFO(f.to_string());
  REQUIRE(report.ok());
  return {report.waves[0], model_waves(object->program(), report.traces)};
}

// The fewest bytes that a wave has asked for and not got when it comes to a wait for some of them,
// between its first and last tiles.
uint32_t least_on_the_way(const std::vector<ModelInst>& wave) {
  std::deque<uint32_t> asked;
  std::vector<uint32_t> at_waits;
  for (const ModelInst& i : wave) {
    if (i.bytes > 0) asked.push_back(i.bytes);
    if (i.cls != Class::Wait || i.vmcnt == 255) continue;
    uint32_t bytes = 0;
    for (const uint32_t b : asked) bytes += b;
    at_waits.push_back(bytes);
    while (asked.size() > i.vmcnt) asked.pop_front();
  }
  const auto quarter = std::ptrdiff_t(at_waits.size() / 4);
  return *std::min_element(at_waits.begin() + quarter, at_waits.end() - quarter);
}

}  // namespace

TEST_CASE("decode: what a tile issues", "[gfx9][model]") {
  constexpr int few = 8, many = 24, between = many - few;
  for (const std::string& name : attn::test::shipped_kernels(true)) {
    if (!name.starts_with("decode_")) continue;
    Memory memory;
    if (!attn::test::load_shipped(name, &memory)) ATTN_SKIP("no code object of " + name);
    INFO(name);
    const Run a = run_decode(name, few, false), b = run_decode(name, many, false);
    const Run with_lse_a = run_decode(name, few, true), with_lse_b = run_decode(name, many, true);
    const auto per_tile = [&](auto member) {
      return double(member(b.wave) - member(a.wave)) / between;
    };
    const auto issues = [&](Class c) {
      return per_tile([&](const Counters& n) { return n.instructions[int(c)]; });
    };
    const double all = per_tile([](const Counters& n) { return n.total(); });
    const double with_lse = double(with_lse_b.wave.total() - with_lse_a.wave.total()) / between;
    const double read = per_tile([](const Counters& n) { return n.global_read_bytes; });
    const attn_dtype type = cache_type(name);
    const int64_t elements = int64_t{2} * 64 * head_dim(name);
    const double tile_bytes = double(attn::dtype_bytes(type, elements));
    // ggml blocks: a scale of 2 bytes, which each lane that multiplies by it loads; the rest are
    // codes.
    const bool blocks = attn::dtype_is_ggml(type);
    const double codes = tile_bytes - (blocks ? 2 * double(elements) / 32 : 0);
    const double scale_loads = blocks ? codes / 2 / 1024 + 16 : 0;  // with each of K, of 16 rows
    const double copies = 2 * tile_bytes / 1024;  // a load and a store of 16 bytes a lane
    const uint32_t on_the_way = least_on_the_way(b.model[0]);
    // With memory that is always there: what issue alone takes.
    ModelSettings settings;
    settings.memory_latency = 0, settings.memory_bytes_per_clock = 1 << 20;
    const double clocks =
        double(run_model(b.model, settings).clocks) - double(run_model(a.model, settings).clocks);
    std::cout << name << ", per wave, 64 keys and 16 rows: loads " << issues(Class::Buffer) << " ("
              << read << " bytes), MFMA " << issues(Class::Mfma) << ", transcendental "
              << issues(Class::Trans) << ", packed " << issues(Class::PackedF32) << ", other VALU "
              << issues(Class::Valu) << ", SALU and jumps "
              << issues(Class::Salu) + issues(Class::Branch) << ", waits " << issues(Class::Wait)
              << ", s_nop " << issues(Class::Nop) << ", in all " << all << " (" << with_lse
              << " with lse), " << all / copies << " times a copy's loads and stores; "
              << on_the_way << " bytes on their way at least; " << clocks / between
              << " clocks of four waves if memory is always there, "
              << waves * between * tile_bytes / clocks << " bytes a clock\n";
    CHECK(read == codes + 128 * scale_loads);                    // each byte of K and V once,
    CHECK(issues(Class::Buffer) == codes / 1024 + scale_loads);  // 16 bytes a lane
    CHECK(issues(Class::Lds) == 0);
    CHECK(issues(Class::Barrier) == 0);
    CHECK(issues(Class::Global) + issues(Class::Smem) == 0);
    CHECK(on_the_way >= read);
  }
  std::cout << std::flush;
}
