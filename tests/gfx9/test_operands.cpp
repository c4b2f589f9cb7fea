// Every operation of the vector and scalar ALUs with every kind of operand. What an operand may be,
// and of which type its constants are, is asked of LLVM's assembler; an operand of any kind must
// then give what a register with the same value gives.
#include <algorithm>
#include <cctype>
#include <fstream>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <sstream>

#include "gfx9/assemble.h"
#include "gfx9emu/mfma.h"
#include "gfx9emu/ops.h"
#include "share.h"

using attn::test::share;
using namespace gfx9emu;
using namespace gfx9emu::test;

namespace {

// The encoding that LLVM gives each line; none where it refuses. LLVM 19, if it is there: later
// ones take op_sel with v_alignbit_b32 and v_pk_fmac_f16, which the ISA does not have.
std::vector<std::optional<std::string>> encode(const std::vector<std::string>& lines) {
  const auto stem = std::filesystem::temp_directory_path() /
                    ("attn-operands-" + std::to_string(reinterpret_cast<uintptr_t>(&lines)));
  const std::string base = stem.string();
  {
    std::ofstream out(base + ".s");
    for (const std::string& l : lines) out << l << "\n";
  }
  const std::string command = std::string(ATTN_LLVM_MC) +
                              " -triple=amdgcn-amd-amdhsa -mcpu=gfx942 --show-encoding " + base +
                              ".s > " + base + ".out 2> " + base + ".err";
  (void)!std::system(command.c_str());
  std::set<size_t> refused;
  std::string line;
  for (std::ifstream err(base + ".err"); std::getline(err, line);) {
    const size_t at = line.find(".s:");
    if (at != line.npos && line.find(": error:") != line.npos) {
      refused.insert(std::stoul(line.substr(at + 3)) - 1);
    }
  }
  std::vector<std::optional<std::string>> all(lines.size());
  size_t next = 0;
  for (std::ifstream out(base + ".out"); std::getline(out, line);) {
    const size_t at = line.find("encoding: ");
    if (at == line.npos) continue;
    while (refused.count(next)) ++next;
    all.at(next++) = line.substr(at + 10);
  }
  for (const char* end : {".s", ".out", ".err"}) std::filesystem::remove(base + end);
  return all;
}

// As LLVM has it.
enum class Constant { F16, Bits16, Bits32, Bits64 };

struct Shape {
  const Op* op = nullptr;
  std::string name;  // with the suffix of its encoding
  int sources = 0;
  bool scalar = false;

  Type type(int n) const { return op->types.src[n]; }
  // How many registers a source has, and whether it is a lane mask.
  bool pair(int n) const {
    const Type t = type(n);
    return t == Type::B64 || t == Type::I64 || t == Type::F64 || t == Type::PkF32 ||
           t == Type::PkB32;
  }
  bool mask(int n) const {
    return !scalar && n == 2 &&
           (op->name == "v_cndmask_b32" || op->name.find("_co_") != op->name.npos);
  }
  bool has(const char* part) const { return op->name.find(part) != op->name.npos; }
};

// Registers of the kernels: sources in v[10 + 2n] or s[10 + 2n], results in v[20:21] and s[8:9], a
// copy of a source in v[16:17] or s[16:17], a lane mask in s[10:11].
std::string reg(const Shape& s, int n, bool copy = false) {
  if (s.mask(n)) return s.name.ends_with("_e32") ? "vcc" : "s[10:11]";
  const std::string file = s.scalar ? "s" : "v";
  const int first = copy ? 16 : 10 + 2 * n;
  if (!s.pair(n)) return file + std::to_string(first);
  return file + "[" + std::to_string(first) + ":" + std::to_string(first + 1) + "]";
}
std::string destinations(const Shape& s) {
  const Op& op = *s.op;
  if (op.dsts == 0) return "";
  const Type t = op.types.dst;
  const bool wide =
      t == Type::B64 || t == Type::I64 || t == Type::F64 || t == Type::PkF32 || t == Type::PkB32;
  const bool to_scalar = s.scalar || op.name.starts_with("v_cmp");
  std::string text = std::string(to_scalar ? "s" : "v") +
                     (wide ? (to_scalar ? "[8:9]" : "[20:21]") : (to_scalar ? "8" : "20"));
  if (s.name.ends_with("_e32") && to_scalar && !s.scalar) text = "vcc";
  if (op.dsts == 2) text += s.name.ends_with("_e32") ? ", vcc" : ", s[8:9]";
  return text;
}
std::string text(const Shape& s, const std::vector<std::string>& sources,
                 const std::string& modifiers = "") {
  std::string line = s.name + " " + destinations(s);
  for (size_t n = 0; n < sources.size(); ++n) {
    line += (n == 0 && s.op->dsts == 0 ? "" : ", ") + sources[n];
  }
  return line + (modifiers.empty() ? "" : " " + modifiers);
}
std::vector<std::string> registers(const Shape& s) {
  std::vector<std::string> all;
  for (int n = 0; n < s.sources; ++n) all.push_back(reg(s, n));
  return all;
}
// "[0,1,0]": one bit of `count`.
std::string bit(int n, int count) {
  std::string list = "[";
  for (int i = 0; i < count; ++i) list += (i ? "," : "") + std::string(i == n ? "1" : "0");
  return list + "]";
}

// What these tests have no place for: no sources, other lanes, jumps, constants of their own.
bool left_out(const Op& op) {
  static const std::set<std::string_view> names = {"v_nop",
                                                   "v_swap_b32",
                                                   "v_accvgpr_read_b32",
                                                   "v_accvgpr_write_b32",
                                                   "v_accvgpr_mov_b32",
                                                   "v_fmaak_f32",
                                                   "v_fmamk_f32",
                                                   "s_getpc_b64",
                                                   "s_movk_i32",
                                                   "s_cmovk_i32",
                                                   "s_addk_i32",
                                                   "s_mulk_i32",
                                                   "s_getreg_b32",
                                                   "s_setreg_b32",
                                                   "s_setreg_imm32_b32"};
  return names.count(op.name) != 0 || op.name.starts_with("s_cmpk_") ||
         op.name.starts_with("s_set_gpr_idx") || op.name.starts_with("s_movrel");
}

// All shapes that LLVM takes.
std::vector<Shape> find_shapes() {
  std::vector<Shape> candidates;
  const auto add = [&](const Op& op, bool scalar, const char* suffix) {
    for (int sources = 1; sources <= 3; ++sources) {
      candidates.push_back({&op, std::string(op.name) + suffix, sources, scalar});
    }
  };
  // Under a sanitizer an eighth, which is more than 100 encodings.
  uint64_t ops = 0;
  const auto tested = [&](const Op& op) {
    if (left_out(op)) return false;
    uint64_t number = ops++;
    return attn::test::in_turn(number, attn::test::sanitized ? 8 : 1);
  };
  for (const Op& op : valu_ops()) {
    if (!tested(op)) continue;
    for (const char* suffix : {"_e32", "_e64", ""}) add(op, false, suffix);
  }
  for (const Op& op : salu_ops()) {
    if (op.cls == Class::Salu && tested(op)) add(op, true, "");
  }
  std::vector<std::string> lines;
  for (const Shape& s : candidates) lines.push_back(text(s, registers(s)));
  const auto encoded = encode(lines);
  // One name for each encoding: a plain name is that of another where there are others. LLVM lets a
  // comparison leave out its vcc, so that the longest list of sources counts.
  std::vector<Shape> all;
  std::set<std::string> seen;
  for (size_t i = 0; i < candidates.size(); ++i) {
    const Shape& s = candidates[i];
    if (!encoded[i] || !seen.insert(std::string(s.op->name) + *encoded[i]).second) continue;
    if (!all.empty() && all.back().name == s.name) all.pop_back();
    all.push_back(s);
  }
  return all;
}

// A line, and one that must leave the same: `before` prepares v[16:17] or s[16:17].
struct Pair {
  std::string what, line, before, other, after;
};

struct Float {
  const char* text;
  uint32_t f16, f32;
  uint64_t f64;
};
constexpr Float floats[] = {{"1.0", 0x3c00, 0x3f800000, 0x3ff0000000000000},
                            {"-0.5", 0xb800, 0xbf000000, 0xbfe0000000000000},
                            {"0.15915494309189532", 0x3118, 0x3e22f983, 0x3fc45f306dc9c882},
                            {"-4.0", 0xc400, 0xc0800000, 0xc010000000000000},
                            {"2.0", 0x4000, 0x40000000, 0x4000000000000000}};
constexpr int integers[] = {-16, 64, -1, 1, 33};
constexpr uint32_t literal = 0xc2a5b791;

std::string hex(uint64_t x) {
  std::ostringstream out;
  out << "0x" << std::hex << x;
  return out.str();
}

// Moves a value to the copy.
std::string set_copy(const Shape& s, int n, uint64_t value) {
  const std::string move = s.scalar ? "s_mov_b32 s" : "v_mov_b32 v";
  std::string lines = move + "16, " + hex(value & 0xffffffff) + "\n";
  if (s.pair(n)) lines += move + "17, " + hex(value >> 32) + "\n";
  return lines;
}
// Copies source n, its registers changed by a mask.
std::string flip_copy(const Shape& s, int n, const char* op, uint32_t low, uint32_t high) {
  const std::string from = std::to_string(10 + 2 * n), next = std::to_string(11 + 2 * n);
  std::string lines = std::string("v_") + op + "_b32 v16, " + hex(low) + ", v" + from + "\n";
  if (s.pair(n)) lines += std::string("v_") + op + "_b32 v17, " + hex(high) + ", v" + next + "\n";
  return lines;
}

class Builder {
 public:
  explicit Builder(std::vector<Shape> shapes) : shapes_(std::move(shapes)) {}

  // By shape.
  std::vector<std::vector<Pair>> build() {
    ask();
    std::vector<std::vector<Pair>> all;
    for (size_t i = 0; i < shapes_.size(); ++i) all.push_back(pairs(shapes_[i], i));
    return all;
  }

  // What LLVM takes although nobody says what it does: the emulator must refuse it.
  std::vector<std::string> unknown;

 private:
  static std::vector<std::string> with(const Shape& s, int n, const std::string& source) {
    std::vector<std::string> all = registers(s);
    all[n] = source;
    return all;
  }
  std::string constant_line(const Shape& s, int n, const std::string& c) const {
    // Packed f32 has constants in the low half alone.
    const bool low_only = s.type(n) == Type::PkF32;
    std::string modifiers = low_only ? "op_sel_hi:[" : "";
    for (int i = 0; low_only && i < s.sources; ++i)
      modifiers += std::string(i ? "," : "") + (i == n ? "0" : "1");
    return text(s, with(s, n, c), modifiers + (low_only ? "]" : ""));
  }
  // Lines that LLVM is asked about, once for all.
  template <class F>
  void for_questions(F f) {
    for (const Shape& s : shapes_) {
      for (int n = 0; n < s.sources; ++n) {
        const std::string r = reg(s, n);
        if (s.mask(n)) continue;
        for (const char* c : {"1.0", "0x3c00", "0x3f800000", "0x3ff0000000000000"}) {
          f(constant_line(s, n, c));
        }
        for (const Float& x : floats) f(constant_line(s, n, x.text));
        for (const int x : integers) f(constant_line(s, n, std::to_string(x)));
        f(text(s, with(s, n, hex(literal))));
        f(text(s, with(s, n, hex(literal & 0xffff))));
        if (s.scalar) continue;
        f(text(s, with(s, n, scalar_source(s, n))));
        f(text(s, with(s, n, "-" + r)));
        f(text(s, with(s, n, "|" + r + "|")));
        f(text(s, registers(s), "neg_lo:" + bit(n, s.sources)));
        f(text(s, registers(s), "neg_hi:" + bit(n, s.sources)));
        f(text(s, registers(s), "op_sel:" + bit(n, s.sources)));
        f(text(s, registers(s), "op_sel_hi:" + bit(n, s.sources)));
        f(text(s, registers(s), "op_sel:" + bit(n, s.sources + 1)));
      }
      f(text(s, registers(s), "op_sel:" + bit(s.sources, s.sources + 1)));
    }
  }
  void ask() {
    std::vector<std::string> lines;
    for_questions([&](const std::string& line) { lines.push_back(line); });
    std::sort(lines.begin(), lines.end());
    lines.erase(std::unique(lines.begin(), lines.end()), lines.end());
    const auto encoded = encode(lines);
    for (size_t i = 0; i < lines.size(); ++i) answers_[lines[i]] = encoded[i];
  }
  std::optional<std::string> answer(const std::string& line) const { return answers_.at(line); }
  bool takes(const std::string& line) const { return answer(line).has_value(); }

  static std::string scalar_source(const Shape& s, int n) { return s.pair(n) ? "s[12:13]" : "s12"; }

  std::optional<Constant> constant_of(const Shape& s, int n) const {
    const auto one = answer(constant_line(s, n, "1.0"));
    if (!one) return {};
    if (answer(constant_line(s, n, "0x3f800000")) == one) return Constant::Bits32;
    if (answer(constant_line(s, n, "0x3c00")) == one) return Constant::F16;
    if (answer(constant_line(s, n, "0x3ff0000000000000")) == one) return Constant::Bits64;
    return Constant::Bits16;
  }

  std::vector<Pair> pairs(const Shape& s, size_t number) {
    std::vector<Pair> all;
    for (int n = 0; n < s.sources; ++n) {
      if (s.mask(n)) continue;
      constants(s, n, number, all);
      if (!s.scalar) modifiers(s, n, all);
    }
    if (!s.scalar) destination(s, all);
    return all;
  }

  void constants(const Shape& s, int n, size_t number, std::vector<Pair>& all) {
    const auto add = [&](const std::string& what, const std::string& line, uint64_t value) {
      all.push_back({what, line, set_copy(s, n, value), text(s, with(s, n, reg(s, n, true))), ""});
    };
    std::optional<Constant> type = constant_of(s, n);
    // LLVM has these as f16 whatever op_sel_hi says, which here says f32.
    if (type && s.has("_fma_mix")) type = Constant::Bits32;
    for (size_t i = 0; type && i < 2; ++i) {
      const Float& x = floats[(number + 2 * i + static_cast<size_t>(n)) % std::size(floats)];
      const uint64_t value = *type == Constant::F16      ? x.f16
                             : *type == Constant::Bits64 ? x.f64
                                                         : x.f32;
      const std::string line = constant_line(s, n, x.text);
      if (takes(line)) add(x.text, line, value | (s.type(n) == Type::PkF32 ? value << 32 : 0));
    }
    const int x = integers[(number + static_cast<size_t>(n)) % std::size(integers)];
    const std::string line = constant_line(s, n, std::to_string(x));
    if (takes(line)) {
      const uint64_t low = static_cast<uint32_t>(x);
      add(std::to_string(x), line,
          s.type(n) == Type::PkF32 ? low | low << 32 : static_cast<uint64_t>(int64_t{x}));
    }
    const uint32_t bits =
        type == Constant::F16 || type == Constant::Bits16 ? literal & 0xffff : literal;
    const std::string literal_line = text(s, with(s, n, hex(bits)));
    if (takes(literal_line)) {
      const bool is_signed = s.has("_i64");
      const uint64_t wide = s.has("f64") ? uint64_t{bits} << 32
                            : is_signed ? static_cast<uint64_t>(int64_t{static_cast<int32_t>(bits)})
                                        : bits;
      add("literal", literal_line, type == Constant::Bits64 ? wide : bits);
    }
    if (s.scalar) return;
    const std::string scalar_line = text(s, with(s, n, scalar_source(s, n)));
    if (takes(scalar_line)) {
      all.push_back({"SGPR", scalar_line, "v_mov_b32 v16, s12\n v_mov_b32 v17, s13\n",
                     text(s, with(s, n, reg(s, n, true))), ""});
    }
  }

  void modifiers(const Shape& s, int n, std::vector<Pair>& all) {
    const std::string other = text(s, with(s, n, reg(s, n, true)));
    const auto add = [&](const std::string& line, const std::string& before) {
      if (takes(line)) all.push_back({"modifier", line, before, other, ""});
    };
    const auto packed = [&](const char* name) {
      return text(s, registers(s), name + (":" + bit(n, s.sources)));
    };
    const std::optional<Constant> type = constant_of(s, n);
    const bool mixes = s.has("_fma_mix"), half = type == Constant::F16 && !mixes;
    const uint32_t sign = half ? 0x8000 : 0x80000000;
    if (!s.has("v_pk_") && !s.has("v_dot")) {
      // In pairs the sign is in the high register.
      const uint32_t low = s.pair(n) ? 0 : sign;
      add(text(s, with(s, n, "-" + reg(s, n))), flip_copy(s, n, "xor", low, sign));
      add(text(s, with(s, n, "|" + reg(s, n) + "|")), flip_copy(s, n, "and", ~low, ~sign));
      if (half || type == Constant::Bits16) {
        const std::string shifted = "v_lshrrev_b32 v16, 16, " + reg(s, n) + "\n";
        add(text(s, registers(s), "op_sel:" + bit(n, s.sources + 1)), shifted);
        add(packed("op_sel"), shifted);
      }
      if (mixes) add(packed("op_sel_hi"), "v_cvt_f32_f16 v16, " + reg(s, n) + "\n");
    } else if (s.op->types.dst == Type::PkF32) {
      const std::string next = "v" + std::to_string(11 + 2 * n);
      add(packed("neg_lo"), flip_copy(s, n, "xor", sign, 0));
      add(packed("neg_hi"), flip_copy(s, n, "xor", 0, sign));
      add(packed("op_sel"), "v_mov_b32 v16, " + next + "\n v_mov_b32 v17, " + next + "\n");
    } else {
      // Two halves of a register. Of integers nobody says what a sign does.
      if (half) {
        add(packed("neg_lo"), flip_copy(s, n, "xor", 0x8000, 0));
        add(packed("neg_hi"), flip_copy(s, n, "xor", 0x80000000, 0));
      } else {
        for (const char* name : {"neg_lo", "neg_hi"}) {
          if (takes(packed(name))) unknown.push_back(packed(name));
        }
      }
      if (s.has("v_pk_mov")) {
        const std::string next = "v" + std::to_string(11 + 2 * n);
        add(packed("op_sel"), "v_mov_b32 v16, " + next + "\n v_mov_b32 v17, " + next + "\n");
      } else if (half || s.has("v_pk_")) {
        add(packed("op_sel"), "v_perm_b32 v16, " + reg(s, n) + ", " + reg(s, n) + ", s14\n");
      }
    }
  }

  // A result in the high half: what the low one would be, and the other half as it was.
  void destination(const Shape& s, std::vector<Pair>& all) {
    const std::string line = text(s, registers(s), "op_sel:" + bit(s.sources, s.sources + 1));
    const bool packed = s.has("v_pk_") || s.has("v_dot") || s.has("_fma_mix");
    if (packed || s.has("v_cvt_sr_") || !takes(line)) return;
    if (s.has("v_pack_")) return unknown.push_back(line);  // of both halves
    all.push_back({"op_sel of the destination", line, "", text(s, registers(s)),
                   "v_lshlrev_b32 v20, 16, v20\n v_bfi_b32 v20, s15, v18, v20\n"});
  }

  std::vector<Shape> shapes_;
  std::map<std::string, std::optional<std::string>> answers_;
};

// v[10:15] and v[18:19] are inputs, s[10:15] too; s[10:11] is a lane mask, s14 and s15 are what
// `modifiers` and `destination` need.
const std::string begin =
    "s_load_dwordx4 s[4:7], s[0:1], 0x0\n v_and_b32 v0, 0x3ff, v0\n v_lshlrev_b32 v1, 5, v0\n"
    "s_waitcnt lgkmcnt(0)\n global_load_dwordx4 v[10:13], v1, s[6:7]\n"
    "global_load_dwordx4 v[16:19], v1, s[6:7] offset:16\n s_waitcnt vmcnt(0)\n"
    "v_mov_b32 v14, v16\n v_mov_b32 v15, v17\n v_readfirstlane_b32 s12, v11\n"
    "v_readfirstlane_b32 s13, v10\n s_mov_b32 s14, 0x07060302\n s_mov_b32 s15, 0xffff\n"
    "s_mov_b32 s10, 0x5a5a1234\n s_mov_b32 s11, 0x8f0f7777\n v_lshlrev_b32 v1, 2, v0\n"
    "s_movk_i32 s16, 77\n s_movk_i32 s17, 78\n";

std::string v(int n) {
  return "v" + std::to_string(n);
}

// Runs both lines of a pair from the same state and stores where what they leave differs.
std::string compare(const Pair& pair, size_t at) {
  const std::string state =
      "s_mov_b64 vcc, s[10:11]\n s_mov_b64 s[8:9], s[10:11]\n s_cmp_lg_u32 s12, s13\n"
      "v_mov_b32 v20, v18\n v_mov_b32 v21, v19\n";
  const auto keep = [](int to) {
    std::string lines = "s_cselect_b32 s22, 1, 0\n s_mov_b64 s[24:25], exec\n s_mov_b64 exec, -1\n";
    for (const char* from : {"v20", "v21", "s8", "s9", "vcc_lo", "vcc_hi", "s22", "s24", "s25"}) {
      lines += "v_mov_b32 " + v(to++) + ", " + from + "\n";
    }
    return lines;
  };
  std::string body = state + pair.line + "\n" + keep(32) + pair.before + state + pair.other + "\n" +
                     pair.after + keep(41) + "v_mov_b32 v2, 0\n";
  for (int i = 32; i < 41; ++i) {
    body +=
        "v_xor_b32 " + v(i) + ", " + v(i) + ", " + v(i + 9) + "\n v_or_b32 v2, v2, " + v(i) + "\n";
  }
  return body + "v_add_u32 v3, " + hex(256 * at) + ", v1\n global_store_dword v3, v2, s[4:5]\n";
}

// Eight words a lane: small integers, f32 and f16 near 1, and any bits.
std::vector<uint32_t> inputs() {
  std::mt19937_64 random(5);
  std::vector<uint32_t> words(64 * 8);
  for (uint32_t& w : words) {
    const uint32_t bits = static_cast<uint32_t>(random());
    switch (random() % 4) {
      case 0:
        w = bits % 64;
        break;
      case 1:
        w = 0x3f000000 + (bits & 0x80ffffff);
        break;
      case 2:
        w = 0x38003800 + (bits & 0x87ff87ff);
        break;
      default:
        w = bits;
    }
  }
  return words;
}

// Runs a kernel of `count` comparisons; by comparison whether any lane differs.
std::vector<bool> differing(const CodeObject& object, Memory& memory, const std::string& name,
                            size_t count) {
  const uint64_t out = memory.allocate(256 * count), in = memory.allocate(2048);
  const auto words = inputs();
  memory.write(in, std::as_bytes(std::span(words)));
  const uint64_t args[] = {out, in};
  const Report report = launch(memory, *object.kernel(name), {1}, {64},
                               std::as_bytes(std::span(args)), 0, {.hazards = false});
  INFO(name << ": " << faults_of(report));
  CHECK(report.ok());
  std::vector<bool> differs(count, false);
  if (report.ok()) {
    std::vector<uint32_t> bits(64 * count);
    memory.read(out, std::as_writable_bytes(std::span(bits)));
    for (size_t i = 0; i < count; ++i) {
      const auto first = bits.begin() + static_cast<ptrdiff_t>(64 * i);
      differs[i] = std::any_of(first, first + 64, [](uint32_t x) { return x != 0; });
    }
  }
  memory.free(out);
  memory.free(in);
  return differs;
}

const std::string registers_64 = ".amdhsa_next_free_vgpr 64\n.amdhsa_accum_offset 64\n";

}  // namespace

TEST_CASE("operands: constants, scalars and modifiers are what a register of that value is",
          "[gfx9][operands]") {
  if (!can_assemble()) ATTN_SKIP("no llvm-mc and ld.lld");
  const std::vector<Shape> shapes = find_shapes();
  Builder builder(shapes);
  const auto pairs = builder.build();
  // Many of them in a kernel; a launch looks at all of the code.
  struct Place {
    const Pair* pair;
    size_t kernel, at;
  };
  std::vector<Source> sources;
  std::vector<Place> places;
  size_t at = 0;
  for (size_t i = 0; i < shapes.size(); ++i) {
    if (i % 64 == 0) {
      sources.push_back({"k" + std::to_string(sources.size()), begin, registers_64});
      at = 0;
    }
    for (const Pair& pair : pairs[i]) {
      sources.back().body += compare(pair, at);
      places.push_back({&pair, sources.size() - 1, at++});
    }
  }
  const size_t kernels = sources.size();
  sources.push_back({"unknown", "", registers_64});
  for (const std::string& line : builder.unknown) sources.back().body += line + "\n";
  Memory memory;
  std::string error;
  const auto object = CodeObject::load(assemble(sources), &memory, &error);
  INFO(error);
  REQUIRE(object);
  std::vector<std::vector<bool>> differs;
  for (size_t k = 0; k < kernels; ++k) {
    const size_t count = static_cast<size_t>(
        std::count_if(places.begin(), places.end(), [&](const Place& p) { return p.kernel == k; }));
    differs.push_back(differing(*object, memory, sources[k].name, count));
  }
  for (const Place& p : places) {
    INFO(p.pair->what << ": " << p.pair->line << " against " << p.pair->before << p.pair->other);
    CHECK_FALSE(differs[p.kernel][p.at]);
  }
  const auto first = object->program().find(object->kernel("unknown")->entry);
  for (size_t i = 0; i < builder.unknown.size(); ++i) {
    const Inst& inst = object->program().insts[static_cast<size_t>(first) + i];
    INFO(inst.text);
    CHECK(inst.run == nullptr);
  }
  std::cout << "operands: " << shapes.size() << " encodings, " << places.size() << " comparisons, "
            << builder.unknown.size() << " refused" << std::endl;
  CHECK(shapes.size() > (attn::test::sanitized ? 100u : 600u));
}

TEST_CASE("operands: C of an MFMA as a constant, and all of them in AGPRs", "[gfx9][operands]") {
  if (!can_assemble()) ATTN_SKIP("no llvm-mc and ld.lld");
  const auto range = [](const char* file, int first, int count) {
    const std::string begin_at = std::to_string(first);
    if (count == 1) return file + begin_at;
    return file + ("[" + begin_at + ":" + std::to_string(first + count - 1) + "]");
  };
  // A in v10, B in v14; D in v64 and v96 or the AGPRs of these numbers, C in v128.
  const auto line = [&](const MfmaShape& s, const char* file, int d, const std::string& c) {
    const bool agprs = file[0] == 'a';
    return std::string(s.name) + " " + range(file, d, s.d_regs) + ", " +
           range(file, agprs ? 0 : 10, s.a_regs) + ", " + range(file, agprs ? 4 : 14, s.a_regs) +
           ", " + c;
  };
  struct Case {
    const MfmaShape* shape;
    std::string constant;
    uint64_t value;
  };
  std::vector<std::string> lines;
  for (const MfmaShape& s : mfma_shapes()) {
    for (const char* c : {"1.0", "0x3f800000", "0x3ff0000000000000"}) {
      lines.push_back(line(s, "v", 64, c));
    }
  }
  const auto encoded = encode(lines);
  std::vector<Case> cases;
  for (size_t i = 0; i < mfma_shapes().size(); ++i) {
    const MfmaShape& s = mfma_shapes()[i];
    if (!share(i)) continue;
    INFO(s.name);
    const bool f32 = encoded[3 * i] == encoded[3 * i + 1],
               f64 = encoded[3 * i] == encoded[3 * i + 2];
    REQUIRE(encoded[3 * i]);
    REQUIRE(f32 != f64);
    for (const Float& x : floats) cases.push_back({&s, x.text, f64 ? x.f64 : x.f32});
    cases.push_back({&s, "-16", static_cast<uint64_t>(int64_t{-16})});
    cases.push_back({&s, "", 0});
  }
  std::vector<Source> sources;
  for (size_t i = 0; i < cases.size(); ++i) {
    const auto& [s, constant, value] = cases[i];
    if (i % 32 == 0)
      sources.push_back({"k" + std::to_string(i / 32), begin,
                         ".amdhsa_next_free_vgpr 288\n.amdhsa_accum_offset 160\n"});
    std::string body = "v_mov_b32 v14, v18\n v_mov_b32 v15, v19\n";
    const bool f64 = s->a == MfmaType::F64;
    for (int r = 0; r < s->d_regs; ++r) {
      body += "v_mov_b32 " + v(128 + r) + ", " +
              (constant.empty() ? v(10 + r % 4)
                                : hex(f64 && r % 2 ? value >> 32 : value & 0xffffffff)) +
              "\n";
    }
    body += line(*s, "v", 64, range("v", 128, s->d_regs)) + "\n";
    if (constant.empty()) {
      for (int r = 0; r < 4; ++r) {
        body += "v_accvgpr_write_b32 a" + std::to_string(r) + ", " + v(10 + r) +
                "\n v_accvgpr_write_b32 a" + std::to_string(4 + r) + ", " + v(14 + r) + "\n";
      }
      for (int r = 0; r < s->d_regs; ++r)
        body += "v_accvgpr_write_b32 a" + std::to_string(64 + r) + ", " + v(128 + r) + "\n";
      body += line(*s, "a", 96, range("a", 64, s->d_regs)) + "\n";
      for (int r = 0; r < s->d_regs; ++r)
        body += "v_accvgpr_read_b32 " + v(96 + r) + ", a" + std::to_string(96 + r) + "\n";
    } else {
      body += line(*s, "v", 96, constant) + "\n";
    }
    body += "v_mov_b32 v2, 0\n";
    for (int r = 0; r < s->d_regs; ++r) {
      body += "v_xor_b32 v4, " + v(64 + r) + ", " + v(96 + r) + "\n v_or_b32 v2, v2, v4\n";
    }
    sources.back().body += body + "v_add_u32 v3, " + hex(256 * (i % 32)) +
                           ", v1\n global_store_dword v3, v2, s[4:5]\n";
  }
  Memory memory;
  std::string error;
  const auto object = CodeObject::load(assemble(sources), &memory, &error);
  INFO(error);
  REQUIRE(object);
  for (size_t k = 0; k < sources.size(); ++k) {
    const size_t count = std::min<size_t>(32, cases.size() - 32 * k);
    const auto differs = differing(*object, memory, sources[k].name, count);
    for (size_t i = 0; i < count; ++i) {
      INFO(cases[32 * k + i].shape->name << ", C " << cases[32 * k + i].constant);
      CHECK_FALSE(differs[i]);
    }
  }
}
