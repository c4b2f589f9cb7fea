// Assembled by tools/amdhsa and run on the emulator: MFMA on one-hot inputs, wait states.
#include <bit>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "catch.h"
#include "gfx9/generate.h"
#include "gfx9/hazard_pairs.h"
#include "gfx9emu/emu.h"
#include "gfx9emu/mfma.h"

using namespace gfx9emu;

namespace {

struct Assembled {
  Memory memory;
  std::unique_ptr<CodeObject> object;

  explicit Assembled(const std::string& source) {
    std::string error;
    const auto bytes = generate(source, &error);
    INFO(error);
    REQUIRE_FALSE(bytes.empty());
    object = CodeObject::load(bytes, &memory, &error);
    INFO(error);
    REQUIRE(object != nullptr);
  }
  template <class T>
  uint64_t put(const std::vector<T>& values) {
    const uint64_t at = memory.allocate(values.size() * sizeof(T));
    REQUIRE(memory.write(at, std::as_bytes(std::span(values))) == "");
    return at;
  }
};

std::string faults_of(const Report& report) {
  std::string text;
  for (const Fault& f : report.faults) text += f.to_string() + "\n";
  return text;
}

// ---- MFMA --------------------------------------------------------------------------------------

// Each workgroup, one wave, takes its own A and B and writes its own D; C is 0.
std::string mfma_kernel(const MfmaShape& s) {
  const std::string name = std::string("run_") + (s.name + 2);
  std::ostringstream out;
  out << "//# kernel " << name << " workgroup=64 workgroup_id=x\n"
      << "//#   ptr a\n//#   ptr b\n//#   ptr d\n"
      << ".globl " << name << "\n.p2align 8\n"
      << name << ":\n"
      << "  s_load_dwordx4 s[8:11], s[0:1], 0\n  s_load_dwordx2 s[12:13], s[0:1], 16\n"
      << "  v_and_b32_e32 v0, 0x3ff, v0\n  v_lshlrev_b32_e32 v0, 2, v0\n"
      << "  s_mul_i32 s3, s2, " << s.a_regs * 256 << "\n"
      << "  v_add_u32_e32 v1, s3, v0\n"
      << "  s_mul_i32 s3, s2, " << s.d_regs * 256 << "\n  s_waitcnt lgkmcnt(0)\n"
      << "  v_add_u32_e32 v0, s3, v0\n";
  for (int r = 0; r < s.a_regs; ++r) {
    out << "  global_load_dword v" << 200 + r << ", v1, s[8:9] offset:" << 256 * r << "\n"
        << "  global_load_dword v" << 204 + r << ", v1, s[10:11] offset:" << 256 * r << "\n";
  }
  const auto range = [](int first, int count) {
    return count == 1
               ? "v" + std::to_string(first)
               : "v[" + std::to_string(first) + ":" + std::to_string(first + count - 1) + "]";
  };
  out << "  s_waitcnt vmcnt(0)\n  " << s.name << " " << range(16, s.d_regs) << ", "
      << range(200, s.a_regs) << ", " << range(204, s.a_regs) << ", 0\n"
      << "  s_nop 15\n  s_nop 15\n";
  for (int r = 0; r < s.d_regs; ++r) {
    if (r == 8 || r == 16 || r == 24) out << "  v_add_u32_e32 v0, 0x800, v0\n";
    out << "  global_store_dword v0, v" << 16 + r << ", s[12:13] offset:" << r % 8 * 256 << "\n";
  }
  out << "  s_endpgm\n";
  return out.str();
}

using Key = std::tuple<int, int, int>;

// Where elements lie: by (block, row, column) of A, B or D. From the published file where there is
// one.
std::map<Key, MfmaPlace> places(const MfmaShape& s, char operand) {
  std::map<Key, MfmaPlace> all;
  const std::string path =
      std::string(ATTN_GFX9_DATA_DIR) + "/layouts/" + s.name + "." + operand + ".csv";
  if (std::ifstream in(path); in) {
    std::string line;
    std::getline(in, line);
    while (std::getline(in, line)) {
      std::array<int, 8> n{};
      std::istringstream cells(line);
      for (int& x : n) {
        std::string cell;
        std::getline(cells, cell, ',');
        x = std::stoi(cell);
      }
      all[{n[0], n[1], n[2]}] = {n[3], n[4], n[6]};
    }
    return all;
  }
  for (int block = 0; block < s.blocks; ++block) {
    for (int x = 0; x < s.m; ++x) {
      for (int k = 0; k < s.k; ++k) {
        if (operand == 'A') all[{block, x, k}] = mfma_a_place(s, block, x, k);
        if (operand == 'B') all[{block, k, x}] = mfma_b_place(s, block, k, x);
      }
      for (int j = 0; operand == 'D' && j < s.n; ++j) {
        all[{block, x, j}] = mfma_d_place(s, block, x, j);
      }
    }
  }
  return all;
}

uint64_t one(MfmaType t) {
  switch (t) {
    case MfmaType::Fp8:
    case MfmaType::Bf8:
      return 0x40;
    case MfmaType::F16:
      return 0x3c00;
    case MfmaType::Bf16:
      return 0x3f80;
    case MfmaType::I8:
      return 1;
    case MfmaType::F64:
      return 0x3ffull << 52;
    default:
      return 0x3f800000;
  }
}

void set(uint32_t* regs, const MfmaPlace& p, uint64_t value) {
  uint32_t* r = regs + p.reg * 64 + p.lane;
  r[0] |= uint32_t(value) << p.bit;
  if (value >> 32) r[64] |= uint32_t(value >> 32);
}

}  // namespace

TEST_CASE("emulated: MFMA on one-hot inputs reproduces the layouts", "[gfx9][emulated]") {
  if (!can_generate()) ATTN_SKIP("tools/amdhsa finds no LLVM for gfx942");
  std::string source;
  for (const MfmaShape& s : mfma_shapes()) source += mfma_kernel(s);
  Assembled code(source);
  for (const MfmaShape& s : mfma_shapes()) {
    INFO(s.name);
    const Kernel* kernel = code.object->kernel(std::string("run_") + (s.name + 2));
    REQUIRE(kernel != nullptr);
    const auto a = places(s, 'A'), b = places(s, 'B'), d = places(s, 'D');
    const uint64_t d_one = one(s.a == MfmaType::I8    ? MfmaType::I8
                               : s.a == MfmaType::F64 ? MfmaType::F64
                                                      : MfmaType::F32);
    const size_t a_words = s.a_regs * 64, d_words = s.d_regs * 64;
    // One element of one operand at 1, and of the other the row or column that meets it.
    for (const char hot : {'A', 'B'}) {
      const auto& elements = hot == 'A' ? a : b;
      std::vector<uint32_t> as(elements.size() * a_words), bs(as.size());
      std::vector<uint32_t> want(elements.size() * d_words);
      size_t group = 0;
      for (const auto& [key, place] : elements) {
        const auto [block, row, column] = key;
        set((hot == 'A' ? as : bs).data() + group * a_words, place, one(hot == 'A' ? s.a : s.b));
        for (int x = 0; x < s.m; ++x) {
          if (hot == 'A') {
            set(&bs[group * a_words], b.at({block, column, x}), one(s.b));
            set(&want[group * d_words], d.at({block, row, x}), d_one);
          } else {
            set(&as[group * a_words], a.at({block, x, row}), one(s.a));
            set(&want[group * d_words], d.at({block, x, column}), d_one);
          }
        }
        ++group;
      }
      const uint64_t args[3] = {code.put(as), code.put(bs), code.memory.allocate(want.size() * 4)};
      const Report report = launch(code.memory, *kernel, {uint32_t(group)}, {64},
                                   std::as_bytes(std::span(args)), 0, {});
      REQUIRE(faults_of(report) == "");
      std::vector<uint32_t> got(want.size());
      REQUIRE(code.memory.read(args[2], std::as_writable_bytes(std::span(got))) == "");
      CHECK(got == want);
      for (const uint64_t at : args) code.memory.free(at);
    }
  }
}

// ---- wait states -------------------------------------------------------------------------------

namespace {

struct Case {
  Pair pair;
  int needed;
};

std::vector<Case> hazard_cases() {
  const auto table =
      nlohmann::json::parse(std::ifstream(std::string(ATTN_GFX9_DATA_DIR) + "/hazards.json"))
          .at("table");
  std::vector<Case> cases;
  for (const auto& [key, name, d] : mfma_tables) {
    for (const Pair& p : mfma_pairs(name, d)) cases.push_back({p, table.at(key).at(p.row)});
  }
  for (const Pair& p : other_pairs) {
    const auto& other = table.at("other");
    cases.push_back({p, other.contains(p.row) ? other.at(p.row).get<int>() : std::stoi(p.row)});
  }
  return cases;
}

std::string nops(int states) {
  std::string text;
  for (; states > 0; states -= 16) {
    text += "  s_nop " + std::to_string(std::min(states, 16) - 1) + "\n";
  }
  return text;
}

}  // namespace

TEST_CASE("emulated: one wait state fewer faults, the listed number passes", "[gfx9][emulated]") {
  if (!can_generate()) ATTN_SKIP("tools/amdhsa finds no LLVM for gfx942");
  const std::vector<Case> cases = hazard_cases();
  std::ostringstream out;
  out << "//# kernel pairs workgroup=64 lds=4096\n//#   ptr buffer\n//#   i32 which\n"
         ".globl pairs\n.p2align 8\npairs:\n"
         "  s_load_dwordx2 s[4:5], s[0:1], 0\n  s_load_dword s11, s[0:1], 8\n"
         "  s_movk_i32 s6, 0x1000\n  s_mov_b32 s7, 0x20000\n  s_mov_b32 s8, 0\n"
         "  s_mov_b32 m0, 0\n  s_mov_b64 vcc, 0\n  s_waitcnt lgkmcnt(0)\n  s_mov_b32 s10, s4\n"
         "  .set r, 0\n  .rept 256\n  v_mov_b32_e32 v[r], 0\n  .set r, r + 1\n  .endr\n"
         "  .set r, 0\n  .rept 16\n  v_accvgpr_write_b32 a[r], 0\n  .set r, r + 1\n  .endr\n"
         "  v_mov_b32_e32 v252, s4\n  v_mov_b32_e32 v253, s5\n"
         "  v_mov_b32_e32 v254, 0\n  v_mov_b32_e32 v255, 0\n"
         "  ds_write_b64 v250, v[254:255]\n  s_waitcnt lgkmcnt(0)\n  s_nop 15\n  s_nop 15\n";
  int count = 0;
  std::string bodies;
  for (const Case& c : cases) {
    for (const int states : {c.needed, c.needed - 1}) {
      const std::string number = std::to_string(count++);
      out << "  s_cmp_eq_u32 s11, " << number << "\n  s_cbranch_scc0 not_" << number
          << "\n  s_branch case_" << number << "\nnot_" << number << ":\n";
      bodies += "case_" + number + ":\n";
      if (states >= 0) {
        bodies += "  " + c.pair.first + "\n" + nops(states) + "  " + c.pair.second + "\n";
      }
      bodies += "  s_waitcnt vmcnt(0) lgkmcnt(0)\n  s_endpgm\n";
    }
  }
  out << "  s_endpgm\n" << bodies;
  Assembled code(out.str());
  const Kernel* kernel = code.object->kernel("pairs");
  REQUIRE(kernel != nullptr);
  const uint64_t buffer = code.put(std::vector<uint32_t>(1024, 0));
  struct {
    uint64_t buffer;
    int32_t which;
  } args{buffer, 0};
  for (const Case& c : cases) {
    for (const int states : {c.needed, c.needed - 1}) {
      INFO(c.pair.row << ": " << c.pair.first << " / " << c.pair.second << ", " << states
                      << " wait states");
      const Report report = launch(code.memory, *kernel, {1}, {64},
                                   std::as_bytes(std::span(&args, 1)).first(12), 0, {});
      ++args.which;
      if (states < 0) continue;
      if (c.pair.first.starts_with("ds_read")) {  // needs a wait, and no wait states
        REQUIRE_FALSE(report.ok());
        CHECK(report.faults.back().kind == FaultKind::MissingWaitcnt);
        continue;
      }
      INFO(faults_of(report));
      if (states == c.needed) {
        CHECK(report.ok());
      } else {
        REQUIRE_FALSE(report.ok());
        const Fault& f = report.faults.back();
        CHECK(f.kind == FaultKind::MissingWaitStates);
        CHECK(f.where.instruction == c.pair.second);
        CHECK(f.has_earlier);
        CHECK(f.earlier.instruction == c.pair.first);
      }
      // Left to the compiler's pass or to no check at all, the same code runs on.
      Options off;
      off.hazards = false;
      --args.which;
      CHECK(launch(code.memory, *kernel, {1}, {64}, std::as_bytes(std::span(&args, 1)).first(12), 0,
                   off)
                .ok());
      ++args.which;
    }
  }
}
