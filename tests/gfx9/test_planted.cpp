// Bugs of the kinds that were made in hand-written attention kernels, planted one at a time in
// tile.s: each is reported, or the result is far from the float64 reference.
#include <cmath>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "catch.h"
#include "core/dtype.h"
#include "gfx9/generate.h"
#include "gfx9emu/emu.h"
#include "gfx9emu/model.h"

using namespace gfx9emu;

namespace {

constexpr int tiles = 3, keys = 32 * tiles, queries = 64, dim = 16, dim_v = 32;

struct Data {
  std::vector<uint8_t> q, k, vt;
  std::vector<double> out;  // float64 attention of the same codes
};

Data make_data() {
  // No two rows or columns alike; scores that grow from tile to tile, so that the maximum moves.
  std::mt19937 rng(5);
  std::normal_distribution<double> normal;
  const auto code = [&](double x) { return uint8_t(attn::encode(attn::e4m3fnuz_format, x, true)); };
  const auto value = [](uint8_t c) { return attn::value_of(attn::e4m3fnuz_format, c); };
  Data d;
  for (int i = 0; i < queries * dim; ++i) d.q.push_back(code(normal(rng)));
  for (int i = 0; i < keys * dim; ++i) d.k.push_back(code(normal(rng) * (1 + i / (32 * dim))));
  for (int v = 0; v < dim_v; ++v) {
    for (int j = 0; j < keys; ++j) d.vt.push_back(code(normal(rng) + 0.25 * v - 0.125 * (j % 32)));
  }
  for (int i = 0; i < queries; ++i) {
    std::vector<double> p(keys);
    double most = -1e300, sum = 0;
    for (int j = 0; j < keys; ++j) {
      for (int e = 0; e < dim; ++e) p[j] += value(d.q[i * dim + e]) * value(d.k[j * dim + e]);
      p[j] *= 0.25;
      most = std::max(most, p[j]);
    }
    for (double& x : p) sum += x = std::exp(x - most);
    for (int v = 0; v < dim_v; ++v) {
      double o = 0;
      for (int j = 0; j < keys; ++j) o += p[j] / sum * value(d.vt[v * keys + j]);
      d.out.push_back(o);
    }
  }
  return d;
}

// The error of each row against its size, the largest; or the fault.
struct Result {
  std::string fault;
  double error = 0;
  ModelResult model;  // of the run's trace
};

Result run(const std::string& source, const Data& data, float scale, uint64_t seed) {
  struct Made {
    std::vector<std::byte> bytes;
    std::string error;
  };
  static std::map<std::string, Made> made;  // each source once, for all seeds
  const auto [at, is_new] = made.try_emplace(source);
  if (is_new) at->second.bytes = generate(source, &at->second.error);
  const auto& [bytes, words] = at->second;
  if (bytes.empty()) return {"amdhsa: " + words, 0, {}};
  std::string error;
  Memory memory;
  const auto object = CodeObject::load(bytes, &memory, &error);
  if (!object) return {error, 0, {}};
  const auto put = [&](const std::vector<uint8_t>& from) {
    const uint64_t at = memory.allocate(from.size());
    memory.write(at, std::as_bytes(std::span(from)));
    return at;
  };
  std::vector<float> out(queries * dim_v);
  struct {
    uint64_t q, k, vt, out;
    int32_t tiles;
    float scale;
  } args{put(data.q), put(data.k), put(data.vt), memory.allocate(out.size() * 4), tiles, scale};
  memory.fill(args.out, 0xff, out.size() * 4);
  Options options;
  options.seed = seed;
  options.instruction_budget = 1 << 16;
  options.trace = true;
  const Report report = launch(memory, *object->kernel("tile"), {1}, {128},
                               std::as_bytes(std::span(&args, 1)), 0, options);
  Result r;
  for (const Fault& f : report.faults) {
    if (!f.warning && r.fault.empty()) r.fault = f.to_string();
  }
  r.model = run_model(model_waves(object->program(), report.traces), {});
  memory.read(args.out, std::as_writable_bytes(std::span(out)));
  for (int i = 0; i < queries; ++i) {
    double difference = 0, size = 0;
    for (int v = 0; v < dim_v; ++v) {
      const double x = data.out[i * dim_v + v], e = double(out[i * dim_v + v]) - x;
      difference += e * e;
      size += x * x;
    }
    const double relative = std::sqrt(difference / size);
    r.error = std::isnan(relative) ? INFINITY : std::max(r.error, relative);
  }
  return r;
}

struct Bug {
  const char *what, *from, *to;
  float scale = 1;  // times the right one
};

const Bug bugs[] = {
    {"v_exp taken for e^x", "", "", 0.6931472f},
    {"OCP codes read as FNUZ without the factor", "", "", 4},
    {"rows of D taken as consecutive", "offset:32", "offset:16"},
    {"P as A and V as B", "v[16:17], v[24:25]", "v[24:25], v[16:17]"},
    {"V in the order of keys, P in the order of D", "s[12:13] offset:8", "s[12:13] offset:4"},
    {"the running maximum not kept", "v_mov_b32_e32 v12, v14", "v_mov_b32_e32 v12, v12"},
    {"address not advanced in the loop", "  v_add_u32_e32 v10, 32, v10\n", ""},
    {"scalar offset not advanced in the loop", "  s_add_u32 s29, s29, 0x200\n", ""},
    {"num_records too small", "s_lshl_b32 s26, s16, 9", "s_lshl_b32 s26, s16, 8"},
    {"buffer descriptor overwritten", "s_mov_b32 s28, 0\n",
     "s_mov_b32 s28, 0\n  s_mov_b32 s25, 0\n"},
    {"M0 the same for all waves", "s_mov_b32 m0, s22", "s_mov_b32 m0, 0"},
    {"M0 never set", "  s_mov_b32 m0, s22\n", ""},
    {"no wait state after M0", "  s_nop 0\n", ""},
    {"LDS-DMA waited for by lgkmcnt", "s_waitcnt vmcnt(0)", "s_waitcnt lgkmcnt(0)"},
    {"LDS-DMA not waited for, later loads are", "s_waitcnt vmcnt(0)", "s_waitcnt vmcnt(5)"},
    {"no barrier after the write to LDS",
     "  s_barrier                                     // K is there\n", ""},
    {"no barrier before LDS is written again",
     "  s_barrier                                     // K is read\n", ""},
    {"ds_read not waited for", "  s_waitcnt lgkmcnt(0)\n  s_barrier  ", "  s_barrier  "},
    {"ds_bpermute not waited for",
     "  s_waitcnt lgkmcnt(0)                          // other half\n", ""},
    {"a wait state too few behind an MFMA", "s_nop 10", "s_nop 9"},
    {"no wait state between v_cvt and MFMA", "  s_nop 1\n", ""},
    {"LDS declared too small", "lds=512", "lds=256"},
    {"an argument not declared", "//#   ptr out     f32 [64, 32]\n", ""},
    {"half of k forgotten in the LDS address", "  v_lshl_add_u32 v8, v4, 3, v8\n", ""},
    {"wave forgotten in the address of Q", "  v_add_u32_e32 v5, s21, v5\n  global_load",
     "  global_load"},
    {"wave forgotten in the address of out", "  v_add_u32_e32 v5, s21, v5\n  global_store",
     "  global_store"},
    {"the high half not selected", " op_sel:[0,0,1]", ""},
    {"sum not rescaled", "  v_mul_f32_e32 v13, v13, v15\n", ""},
    {"accumulator not rescaled", "v_mul_f32_e32 v[r], v15, v[r]", "v_mov_b32_e32 v[r], v[r]"},
    {"half of the sum", "  v_add_f32_e32 v13, v13, v15\n", ""},
    {"maximum of half of the keys", "  v_max_f32_e32 v14, v14, v15\n", ""},
    {"not divided by the sum", "v_rcp_f32_e32 v13, v13", "v_mov_b32_e32 v13, 1.0"},
    {"one tile too many", "s_cmp_lt_u32", "s_cmp_le_u32"},
    {"one tile too few", "s_add_u32 s28, s28, 1", "s_add_u32 s28, s28, 2"},
    {"the second step takes the first's weights", "v[18:19], v[26:27]", "v[18:19], v[24:25]"},
    {"accumulator not set before the loop", ".set r, 32\n  .rept 16\n  v_mov_b32_e32 v[r], 0",
     ".set r, 32\n  .rept 15\n  v_mov_b32_e32 v[r], 0"},
    {"weights beyond the largest fp8 value", "0x40e00000", "0x41200000"},
    {"EXEC left with one lane", "  v_lshlrev_b32_e32 v5, 7, v3\n",
     "  s_mov_b64 exec, 1\n  v_lshlrev_b32_e32 v5, 7, v3\n"},
    {"address not aligned", "v_lshlrev_b32_e32 v8, 4, v3", "v_lshl_or_b32 v8, v3, 4, 2"},
    {"endless loop", "s_add_u32 s28, s28, 1", "s_add_u32 s28, s28, 0"},
    {"a barrier for one wave only", "s_waitcnt vmcnt(0)\n",
     "s_waitcnt vmcnt(0)\n  s_cmp_eq_u32 s20, 0\n  s_cbranch_scc1 next_tile\n"},
    {"no end", "  s_endpgm\n", ""},
};

}  // namespace

TEST_CASE("planted bugs are noticed", "[gfx9][planted]") {
  if (!can_generate()) ATTN_SKIP("tools/amdhsa finds no LLVM for gfx942");
  std::ifstream in(ATTN_GFX9_TILE);
  const std::string source{std::istreambuf_iterator<char>(in), {}};
  const Data data = make_data();
  const float scale = 0.25f * 1.442695f;
  double right = 0;
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const Result r = run(source, data, scale, seed);
    INFO(r.fault);
    REQUIRE(r.fault == "");
    right = std::max(right, r.error);
    // Two waves, three MFMA of 8 passes per tile; a b64 read of all lanes takes 4 clocks of LDS.
    CHECK(r.model.mfma_clocks == 2 * tiles * 3 * 32);
    CHECK(r.model.instructions[int(Class::Barrier)] == 2 * tiles * 2);
    CHECK(r.model.lds_clocks >= 2 * tiles * 4);
    CHECK(r.model.clocks > tiles * 3 * 32);
  }
  INFO("error without a bug: " << right);
  REQUIRE(right < 0.06);  // the weights have three bits of mantissa

  int faults = 0, wrong = 0;
  for (const Bug& bug : bugs) {
    INFO(bug.what);
    std::string broken = source;
    if (*bug.from) {
      const size_t at = broken.find(bug.from);
      REQUIRE(at != std::string::npos);
      broken.replace(at, std::strlen(bug.from), bug.to);
    }
    Result r;
    for (uint64_t seed = 0; seed < 3 && r.fault.empty() && !(r.error > 2 * right); ++seed) {
      r = run(broken, data, scale * bug.scale, seed);
    }
    faults += !r.fault.empty();
    wrong += r.fault.empty() && r.error > 2 * right;
    INFO(r.error);
    CHECK((!r.fault.empty() || r.error > 2 * right));
  }
  std::cout << "planted bugs: " << std::size(bugs) << ", " << faults << " reported, " << wrong
            << " with a wrong result" << std::endl;
}
