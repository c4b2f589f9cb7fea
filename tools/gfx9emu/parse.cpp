// From LLVM's text of an instruction to an Inst.
#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include "gfx9emu/address.h"
#include "gfx9emu/decode.h"
#include "gfx9emu/mfma.h"
#include "gfx9emu/ops.h"

namespace gfx9emu {
namespace {

using std::string_view;

string_view trim(string_view s) {
  while (!s.empty() && (s.front() == ' ' || s.front() == '\t')) s.remove_prefix(1);
  while (!s.empty() && (s.back() == ' ' || s.back() == '\t')) s.remove_suffix(1);
  return s;
}

// At separators outside brackets.
std::vector<string_view> split(string_view s, char separator) {
  std::vector<string_view> parts;
  int depth = 0;
  size_t begin = 0;
  for (size_t i = 0; i <= s.size(); ++i) {
    if (i == s.size() || (s[i] == separator && depth == 0)) {
      const string_view part = trim(s.substr(begin, i - begin));
      if (!part.empty()) parts.push_back(part);
      begin = i + 1;
    } else if (s[i] == '[' || s[i] == '(') {
      ++depth;
    } else if (s[i] == ']' || s[i] == ')') {
      --depth;
    }
  }
  return parts;
}

bool eat(string_view& s, string_view prefix) {
  if (!s.starts_with(prefix)) return false;
  s.remove_prefix(prefix.size());
  return true;
}

bool eat_end(string_view& s, string_view suffix) {
  if (!s.ends_with(suffix)) return false;
  s.remove_suffix(suffix.size());
  return true;
}

bool parse_int(string_view s, int64_t& value) {
  const bool negative = eat(s, "-");
  const int base = eat(s, "0x") ? 16 : 10;
  uint64_t magnitude = 0;
  const auto [end, code] = std::from_chars(s.data(), s.data() + s.size(), magnitude, base);
  if (code != std::errc() || end != s.data() + s.size()) return false;
  value = static_cast<int64_t>(negative ? 0 - magnitude : magnitude);
  return true;
}

// "5" or "[2:7]" after the letter of a register file.
bool parse_range(string_view s, RegFile file, RegRange& range) {
  int64_t first = 0, last = 0;
  if (eat(s, "[")) {
    const size_t colon = s.find(':');
    if (colon == s.npos || !s.ends_with("]")) return false;
    if (!parse_int(s.substr(0, colon), first)) return false;
    if (!parse_int(s.substr(colon + 1, s.size() - colon - 2), last)) return false;
  } else {
    if (!parse_int(s, first)) return false;
    last = first;
  }
  if (first < 0 || last < first || last > 511) return false;
  range = {file, static_cast<uint16_t>(first), static_cast<uint16_t>(last - first + 1)};
  return true;
}

// The type whose constants an operand has.
Type constant_type(const Inst& inst, Type type, int source) {
  if (type == Type::Mix) return inst.op_sel_hi >> source & 1 ? Type::F16 : Type::F32;
  return type == Type::PkF16 ? Type::F16 : type;
}
bool is_packed(Type type) {
  return type == Type::PkB16 || type == Type::PkF16 || type == Type::PkB32 || type == Type::PkF32;
}
bool is_wide(Type type) {
  return type == Type::B64 || type == Type::I64 || type == Type::F64;
}

// Of the inline constants with a fraction, and of their negatives.
constexpr uint32_t f16_two_pi_inverse = 0x3118, f32_two_pi_inverse = 0x3e22f983;
constexpr uint64_t f64_two_pi_inverse = 0x3fc45f306dc9c882;

// Powers of two and 0 alone.
uint32_t to_f16(double value) {
  const uint32_t f = std::bit_cast<uint32_t>(static_cast<float>(value));
  return value == 0 ? f >> 16 : (f >> 16 & 0x8000) | ((f >> 23 & 0xff) - 112) << 10;
}

// As an operand of `type` reads an inline constant: f16 operands have it in their low half and 0
// above it, integers of 16 bits read the low half of the f32 one.
uint64_t inline_float(double value, Type type) {
  const bool is_two_pi_inverse = value > 0.159 && value < 0.16;
  if (type == Type::F16) return is_two_pi_inverse ? f16_two_pi_inverse : to_f16(value);
  if (is_wide(type)) return is_two_pi_inverse ? f64_two_pi_inverse : std::bit_cast<uint64_t>(value);
  return is_two_pi_inverse ? f32_two_pi_inverse
                           : std::bit_cast<uint32_t>(static_cast<float>(value));
}

// LLVM before 20 prints the f16 code for an inline constant of 16 bits and an integer's type.
bool is_inline_float(uint32_t code, double& value) {
  for (const double x : {0.5, 1.0, 2.0, 4.0, -0.5, -1.0, -2.0, -4.0}) {
    if (code == to_f16(x)) return value = x, true;
  }
  return code == f16_two_pi_inverse && (value = 0.15915494, true);
}

bool parse_constant(string_view s, Type type, bool has_literal, uint64_t& bits) {
  // Newer LLVM's way to write a literal that could be an inline constant.
  if ((eat(s, "lit(") || eat(s, "lit64(")) && eat_end(s, ")")) has_literal = true;
  int64_t integer = 0;
  double value = 0;
  if (parse_int(s, integer)) {
    const bool hex = s.find("0x") != s.npos;
    const uint64_t low = static_cast<uint32_t>(integer);
    if (!is_wide(type)) {
      bits = low;
    } else if (hex && type == Type::F64) {
      bits = low << 32;
    } else if (hex && type == Type::I64) {
      bits = static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(low)));
    } else {
      bits = static_cast<uint64_t>(integer);
    }
    if (hex && type == Type::B16 && !has_literal &&
        is_inline_float(static_cast<uint32_t>(low), value)) {
      bits = inline_float(value, type);
    }
    return true;
  }
  char* end = nullptr;
  const std::string copy(s);
  value = std::strtod(copy.c_str(), &end);
  if (copy.empty() || *end != '\0') return false;
  bits = inline_float(value, type);
  return true;
}

bool parse_register(string_view s, RegRange& range) {
  struct Named {
    string_view name;
    uint16_t first, count;
  };
  static constexpr Named named[] = {
      {"vcc", scalar::vcc, 2},
      {"vcc_lo", scalar::vcc, 1},
      {"vcc_hi", scalar::vcc + 1, 1},
      {"exec", scalar::exec, 2},
      {"exec_lo", scalar::exec, 1},
      {"exec_hi", scalar::exec + 1, 1},
      {"m0", scalar::m0, 1},
      {"flat_scratch", scalar::flat_scratch, 2},
      {"flat_scratch_lo", scalar::flat_scratch, 1},
      {"flat_scratch_hi", scalar::flat_scratch + 1, 1},
      {"xnack_mask", scalar::xnack_mask, 2},
      {"xnack_mask_lo", scalar::xnack_mask, 1},
      {"xnack_mask_hi", scalar::xnack_mask + 1, 1},
      {"scc", scalar::scc, 1},
      {"src_scc", scalar::scc, 1},
  };
  for (const Named& n : named) {
    if (s == n.name) {
      range = {RegFile::Scalar, n.first, n.count};
      return true;
    }
  }
  if (eat(s, "ttmp")) {
    if (!parse_range(s, RegFile::Scalar, range) || range.first + range.count > 16) return false;
    range.first += scalar::ttmp0;
    return true;
  }
  if (s.size() < 2 || !(std::isdigit(static_cast<unsigned char>(s[1])) || s[1] == '[')) {
    return false;
  }
  const char file = s[0];
  s.remove_prefix(1);
  if (file == 'v') return parse_range(s, RegFile::Vgpr, range) && range.first + range.count <= 256;
  if (file == 'a') return parse_range(s, RegFile::Agpr, range) && range.first + range.count <= 256;
  if (file == 's') {
    return parse_range(s, RegFile::Scalar, range) && range.first + range.count <= 102;
  }
  return false;
}

bool parse_operand(string_view s, Type type, bool has_literal, Operand& op) {
  if (eat(s, "sext(")) {
    op.sext = true;
    eat_end(s, ")");
  }
  // "-v1", "-|v1|", "neg(1)", but "-1" is a constant.
  if (eat(s, "neg(")) {
    op.neg = true;
    eat_end(s, ")");
  } else if (s.size() > 1 && s[0] == '-' && !std::isdigit(static_cast<unsigned char>(s[1]))) {
    op.neg = true;
    s.remove_prefix(1);
  }
  if (eat(s, "|")) {
    op.abs = true;
    eat_end(s, "|");
  } else if (eat(s, "abs(")) {
    op.abs = true;
    eat_end(s, ")");
  }
  if (s == "off") {
    op.kind = Operand::Kind::Off;
    return true;
  }
  if (parse_register(s, op.reg)) {
    op.kind = Operand::Kind::Register;
    return true;
  }
  uint64_t aperture = 0;
  if (s == "src_shared_base") aperture = lds_aperture;
  if (s == "src_private_base") aperture = scratch_aperture;
  if (s == "src_shared_limit") aperture = lds_aperture + 0xffffffff;
  if (s == "src_private_limit") aperture = scratch_aperture + 0xffffffff;
  if (aperture != 0) {
    // As a 32-bit source the register is the aperture's high half.
    op.kind = Operand::Kind::Constant;
    op.value = is_wide(type) ? aperture : aperture >> 32;
    return true;
  }
  if (parse_constant(s, type, has_literal, op.value)) {
    op.kind = Operand::Kind::Constant;
    return true;
  }
  return false;
}

bool parse_sdwa(string_view s, Sdwa& sel) {
  static constexpr string_view names[] = {"BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3",
                                          "WORD_0", "WORD_1", "DWORD"};
  for (int i = 0; i < 7; ++i) {
    if (s == names[i]) {
      sel = static_cast<Sdwa>(i);
      return true;
    }
  }
  return false;
}

// "[1,0,1]" into bits 0, 1, 2.
bool parse_bits(string_view s, uint8_t& bits, int* count = nullptr) {
  if (!eat(s, "[") || !eat_end(s, "]")) return false;
  bits = 0;
  int n = 0;
  for (const string_view part : split(s, ',')) {
    if (part != "0" && part != "1") return false;
    if (part == "1") bits |= 1 << n;
    ++n;
  }
  if (count) *count = n;
  return n > 0 && n <= 4;
}

bool parse_dpp(string_view name, string_view value, Inst& inst) {
  static const std::unordered_map<string_view, Dpp> with_value = {
      {"row_shl", Dpp::RowShl},   {"row_shr", Dpp::RowShr},          {"row_ror", Dpp::RowRor},
      {"wave_shl", Dpp::WaveShl}, {"wave_rol", Dpp::WaveRol},        {"wave_shr", Dpp::WaveShr},
      {"wave_ror", Dpp::WaveRor}, {"row_newbcast", Dpp::RowNewbcast}};
  int64_t n = 0;
  if (name == "quad_perm") {
    if (!eat(value, "[") || !eat_end(value, "]")) return false;
    int shift = 0;
    for (const string_view lane : split(value, ',')) {
      if (!parse_int(lane, n) || n < 0 || n > 3 || shift > 6) return false;
      inst.dpp_arg |= static_cast<uint8_t>(n << shift);
      shift += 2;
    }
    inst.dpp = Dpp::QuadPerm;
    return shift == 8;
  }
  if (name == "row_bcast") {
    inst.dpp = value == "15" ? Dpp::RowBcast15 : Dpp::RowBcast31;
    return value == "15" || value == "31";
  }
  const auto found = with_value.find(name);
  if (found == with_value.end() || !parse_int(value, n) || n < 0 || n > 15) return false;
  inst.dpp = found->second;
  inst.dpp_arg = static_cast<uint8_t>(n);
  return true;
}

bool parse_modifier(string_view s, Inst& inst, int sources) {
  const size_t colon = s.find(':');
  const string_view name = s.substr(0, colon);
  const string_view value = colon == s.npos ? string_view() : s.substr(colon + 1);
  if (colon == s.npos) {
    if (s == "clamp") return inst.clamp = true;
    if (s == "offen") return inst.offen = true;
    if (s == "idxen") return inst.idxen = true;
    if (s == "sc0" || s == "glc") return inst.sc0 = true;
    if (s == "sc1" || s == "scc") return inst.sc1 = true;
    if (s == "nt" || s == "slc") return inst.nt = true;
    if (s == "lds") return inst.is_lds_dma = true;
    if (s == "gds") return inst.gds = true;
    if (s == "row_mirror") return inst.dpp = Dpp::RowMirror, true;
    if (s == "row_half_mirror") return inst.dpp = Dpp::RowHalfMirror, true;
    return false;
  }
  int64_t n = 0;
  int count = 0;
  if (name == "op_sel") {
    if (!parse_bits(value, inst.op_sel, &count)) return false;
    // One bit more than there are sources: the last is the destination's.
    if (count == sources + 1 && (inst.op_sel >> sources & 1)) {
      inst.op_sel = static_cast<uint8_t>((inst.op_sel & ((1 << sources) - 1)) | 8);
    }
    return true;
  }
  if (name == "op_sel_hi") return parse_bits(value, inst.op_sel_hi);
  if (name == "neg_lo") return parse_bits(value, inst.neg_lo);
  if (name == "neg_hi") return parse_bits(value, inst.neg_hi);
  if (name == "neg") {  // v_mfma_f64: of A, B, C
    return parse_bits(value, inst.blgp);
  }
  if (name == "dst_sel") return parse_sdwa(value, inst.dst_sel);
  if (name == "src0_sel") return parse_sdwa(value, inst.op[inst.dst_count].sel);
  if (name == "src1_sel") return parse_sdwa(value, inst.op[inst.dst_count + 1].sel);
  if (name == "dst_unused") {
    inst.dst_unused = value == "UNUSED_PAD" ? 0 : value == "UNUSED_SEXT" ? 1 : 2;
    return true;
  }
  if (parse_dpp(name, value, inst)) return true;
  if (name == "offset" && value.starts_with("swizzle(")) return true;  // taken from the encoding
  if (!parse_int(value, n)) return false;
  if (name == "mul" && (n == 2 || n == 4)) return inst.omod = n == 2 ? 1 : 2, true;
  if (name == "div" && n == 2) return inst.omod = 3, true;
  if (name == "row_mask") return inst.row_mask = n & 15, true;
  if (name == "bank_mask") return inst.bank_mask = n & 15, true;
  // LLVM prints the set bit as 1, older releases as 0.
  if (name == "bound_ctrl") return inst.bound_ctrl = true;
  if (name == "cbsz") return inst.cbsz = n & 7, true;
  if (name == "abid") return inst.abid = n & 15, true;
  if (name == "blgp") return inst.blgp = n & 7, true;
  if (name == "offset" || name == "offset0") return inst.mem_offset = static_cast<int32_t>(n), true;
  if (name == "offset1") return inst.mem_offset1 = static_cast<int32_t>(n), true;
  return false;
}

bool parse_waitcnt(string_view rest, Inst& inst) {
  int64_t n = 0;
  if (parse_int(rest, n)) {
    inst.imm = n;
    inst.vmcnt = (n & 15) | ((n >> 14 & 3) << 4);
    inst.expcnt = n >> 4 & 7;
    inst.lgkmcnt = n >> 8 & 15;
    return true;
  }
  for (string_view part : split(rest, ' ')) {
    uint8_t* counter = eat(part, "vmcnt(")     ? &inst.vmcnt
                       : eat(part, "lgkmcnt(") ? &inst.lgkmcnt
                       : eat(part, "expcnt(")  ? &inst.expcnt
                                               : nullptr;
    if (part == "&") continue;
    if (!counter || !eat_end(part, ")") || !parse_int(part, n) || n < 0 || n > 63) return false;
    *counter = static_cast<uint8_t>(n);
  }
  return true;
}

// "gpr_idx(SRC0,DST)"
bool parse_gpr_idx(string_view s, Inst& inst) {
  static constexpr std::pair<string_view, uint32_t> names[] = {
      {"SRC0", 1}, {"SRC1", 2}, {"SRC2", 4}, {"DST", gpr_idx_dst}};
  if (!eat(s, "gpr_idx(") || !eat_end(s, ")")) return false;
  inst.imm = 0;
  for (const string_view part : split(s, ',')) {
    const auto* known = std::find_if(std::begin(names), std::end(names),
                                     [&](const auto& n) { return n.first == part; });
    if (known == std::end(names)) return false;
    inst.imm |= known->second;
  }
  return true;
}

// "hwreg(HW_REG_MODE, 23, 1)"
bool parse_hwreg(string_view s, Inst& inst) {
  static const std::unordered_map<string_view, int> names = {
      {"HW_REG_MODE", 1},    {"HW_REG_STATUS", 2},        {"HW_REG_TRAPSTS", 3},
      {"HW_REG_HW_ID", 4},   {"HW_REG_GPR_ALLOC", 5},     {"HW_REG_LDS_ALLOC", 6},
      {"HW_REG_IB_STS", 7},  {"HW_REG_SH_MEM_BASES", 15}, {"HW_REG_TBA_LO", 16},
      {"HW_REG_TBA_HI", 17}, {"HW_REG_TMA_LO", 18},       {"HW_REG_TMA_HI", 19},
      {"HW_REG_XCC_ID", 20}};
  if (!eat(s, "hwreg(") || !eat_end(s, ")")) return false;
  const auto parts = split(s, ',');
  if (parts.size() != 1 && parts.size() != 3) return false;
  int64_t id = 0, offset = 0, size = 32;
  const auto named = names.find(parts[0]);
  if (named != names.end()) {
    id = named->second;
  } else if (!parse_int(parts[0], id)) {
    return false;
  }
  if (parts.size() == 3 && (!parse_int(parts[1], offset) || !parse_int(parts[2], size))) {
    return false;
  }
  if (id < 0 || id > 63 || offset < 0 || offset > 31 || size < 1 || size > 32) return false;
  inst.hwreg = static_cast<uint8_t>(id);
  inst.hwreg_offset = static_cast<uint8_t>(offset);
  inst.hwreg_size = static_cast<uint8_t>(size);
  return true;
}

void add(std::vector<RegRange>& list, RegFile file, uint16_t first, uint16_t count) {
  list.push_back({file, first, count});
}

// The register of a pair that a source reads, or both.
RegRange read_range(const Inst& inst, Type type, int source) {
  const RegRange& r = inst.op[inst.dst_count + source].reg;
  if (r.count != 2 || (type != Type::PkF32 && type != Type::PkB32)) return r;
  const bool low_from_second = inst.op_sel >> source & 1;
  const bool high_from_second = inst.op_sel_hi >> source & 1;
  // v_pk_mov_b32 takes one half of its result from each source.
  if (type == Type::PkF32 && low_from_second != high_from_second) return r;
  return {r.file, static_cast<uint16_t>(r.first + low_from_second), 1};
}

void collect_registers(Inst& inst) {
  const uint16_t flags = inst.flags;
  inst.dst_is_read = flags & reads_dst || (inst.cls == Class::Buffer && inst.is_atomic);
  inst.own_lanes = flags & own_lanes;
  const bool plain = !inst.is_sdwa && inst.dpp == Dpp::None;
  inst.selects = flags & selects;
  inst.copies = flags & (copies | selects) && plain;
  inst.lane_mask = flags & lane_mask;
  inst.inserts = flags & inserts && !inst.op[1].is_vector();
  const bool keeps = inst.dst_is_read || inst.keeps_half;
  for (int i = 0; i < inst.op_count; ++i) {
    const Operand& o = inst.op[i];
    if (!o.is_register()) continue;
    const bool is_dst = i < inst.dst_count;
    if (is_dst) inst.writes.push_back(o.reg);
    if (!is_dst || inst.dst_is_read || (keeps && i == 0)) inst.reads.push_back(o.read);
  }
  if (flags & writes_scc) add(inst.writes, RegFile::Scalar, scalar::scc, 1);
  if (flags & reads_scc) add(inst.reads, RegFile::Scalar, scalar::scc, 1);
  if (flags & reads_vcc) add(inst.reads, RegFile::Scalar, scalar::vcc, 2);
  if (flags & writes_vcc) add(inst.writes, RegFile::Scalar, scalar::vcc, 2);
  const bool reads_index = flags & (reads_m0 | moves_src | moves_dst);
  if (reads_index || inst.is_lds_dma) add(inst.reads, RegFile::Scalar, scalar::m0, 1);
  if (flags & writes_m0) add(inst.writes, RegFile::Scalar, scalar::m0, 1);
  if (flags & reads_exec) add(inst.reads, RegFile::Scalar, scalar::exec, 2);
  if (flags & writes_exec) add(inst.writes, RegFile::Scalar, scalar::exec, 2);
}

uint8_t sdwa_halves(Sdwa sel) {
  switch (sel) {
    case Sdwa::Byte0:
    case Sdwa::Byte1:
    case Sdwa::Word0:
      return 1;
    case Sdwa::Byte2:
    case Sdwa::Byte3:
    case Sdwa::Word1:
      return 2;
    default:
      return 3;
  }
}

uint8_t half_by(bool high) {
  return high ? 2 : 1;
}

// Of a source that is no memory operation's.
uint8_t source_halves(const Inst& inst, Type type, int source) {
  const bool low_from_high = inst.op_sel >> source & 1;
  const bool high_from_high = inst.op_sel_hi >> source & 1;
  switch (type) {
    case Type::B16:
    case Type::F16:
    case Type::Fp8:
      return half_by(low_from_high);
    case Type::PkB16:
    case Type::PkF16:
      return half_by(low_from_high) | half_by(high_from_high);
    case Type::Mix:
      return high_from_high ? half_by(low_from_high) : 3;
    default:
      return 3;
  }
}

// Fills `halves`; true if the instruction keeps a half of its destination.
bool find_halves(const Types& types, Inst& inst) {
  const int d = inst.dst_count;
  const bool vector_memory = inst.mem_bytes != 0;
  if (vector_memory) {
    // Data of stores and atomics is the last vector operand of ds_*, and follows the address
    // elsewhere.
    if (inst.is_load && !inst.is_lds_dma && d == 1 && inst.d16 != 0) {
      inst.halves[0] = half_by(inst.d16 == 2);
      return true;
    }
    if (inst.is_store && !inst.is_atomic && inst.mem_bytes < 4) {
      const int data = inst.cls == Class::Buffer ? 0 : 1;
      inst.halves[data] = half_by(inst.d16 == 2);
    }
    return false;
  }
  if (inst.is_sdwa) {
    for (int i = d; i < inst.op_count; ++i) inst.halves[i] = sdwa_halves(inst.op[i].sel);
    if (inst.dst_unused != 2 || inst.dst_sel == Sdwa::Dword) return false;
    inst.halves[0] = sdwa_halves(inst.dst_sel);
    return true;
  }
  for (int n = 0; n < 3 && d + n < inst.op_count; ++n) {
    inst.halves[d + n] = source_halves(inst, types.src[n], n);
  }
  if (types.keeps == Keeps::Nothing) return false;
  inst.halves[0] =
      types.keeps == Keeps::Other ? half_by(inst.op_sel & 8) : half_by(types.keeps == Keeps::Low);
  return true;
}

}  // namespace

std::string parse_instruction(std::string_view text, Inst& inst) {
  text = trim(text);
  inst.text = std::string(text);
  // Tabs separate in LLVM's text.
  for (char& c : inst.text) {
    if (c == '\t') c = ' ';
  }
  const string_view line = inst.text;
  const size_t space = line.find(' ');
  string_view name = line.substr(0, space);
  const string_view rest = space == line.npos ? string_view() : trim(line.substr(space));
  if (eat_end(name, "_e64")) inst.is_e64 = true;
  if (eat_end(name, "_sdwa")) inst.is_sdwa = true;
  eat_end(name, "_dpp");
  eat_end(name, "_e32");
  inst.name = std::string(name);

  const Op* op = inst.arch == Arch::Gfx950 ? find_op(inst.name + ".ocp") : nullptr;
  if (!op) op = find_op(inst.name);
  if (!op) return "no such operation is known";
  inst.cls = op->cls;
  inst.run = op->run;
  inst.lanes = op->lanes;
  inst.dst_count = op->dsts;
  inst.mem_bytes = op->bytes;
  inst.is_load = op->load;
  inst.is_store = op->store;
  inst.atomic = op->atomic;
  inst.is_atomic = op->atomic != Atomic::None;
  inst.sign = op->sign;
  inst.d16 = op->d16;
  inst.stride = op->stride;
  if (op->cls == Class::Mfma) {
    inst.mfma = find_mfma(name);
    inst.passes = inst.mfma->passes;
    if (inst.arch == Arch::Gfx950) {
      using enum MfmaType;
      const MfmaType a = inst.mfma->a;
      if (a == Fp8 || a == Bf8 || a == Xf32) return "not emulated as gfx950 has it";
      if (a == F64 && inst.mfma->blocks == 1) inst.passes = 16;
    }
  }

  if (name == "s_waitcnt") return parse_waitcnt(rest, inst) ? "" : "its counters";
  std::vector<string_view> parts = split(rest, ',');
  std::vector<string_view> modifiers;
  if (!parts.empty()) {
    modifiers = split(parts.back(), ' ');
    parts.back() = modifiers.front();
    modifiers.erase(modifiers.begin());
  }
  const bool vector_memory = op->cls == Class::Buffer || op->cls == Class::Global ||
                             op->cls == Class::Flat || op->cls == Class::Scratch;
  for (const string_view m : modifiers) {
    // Whether the data goes to LDS or is returned decides what the operands are.
    if (m == "lds" && vector_memory) inst.is_lds_dma = true;
    if (m == "sc0" && vector_memory && inst.is_atomic) inst.is_load = true;
  }
  if (name.starts_with("global_load_lds") || name.starts_with("scratch_load_lds")) {
    inst.is_lds_dma = true;
  }
  if (vector_memory) inst.dst_count = inst.is_load && !inst.is_lds_dma ? 1 : 0;

  const int sources = static_cast<int>(parts.size()) - inst.dst_count;
  if (op->types.src[0] == Type::Mix) inst.op_sel_hi = 0;  // where the text does not say
  for (const string_view m : modifiers) {
    if (!parse_modifier(m, inst, sources)) return "its modifier " + std::string(m);
  }
  // The bits of op_sel_hi beyond the sources mean nothing.
  inst.op_sel_hi &= (1 << std::clamp(sources, 0, 3)) - 1;
  for (const string_view part : parts) {
    int64_t n = 0;
    if (part.starts_with("hwreg(")) {
      if (!parse_hwreg(part, inst)) return "its hardware register " + std::string(part);
      if (name.starts_with("s_setreg")) inst.dst_count = 0;
      continue;
    }
    if (part.starts_with("gpr_idx(")) {
      if (!parse_gpr_idx(part, inst)) return "its operand " + std::string(part);
      continue;
    }
    const bool scalar_imm =
        op->cls == Class::Branch || op->cls == Class::Nop || op->cls == Class::Control ||
        name.starts_with("s_movk_") || name.starts_with("s_cmovk_") ||
        name.starts_with("s_addk_") || name.starts_with("s_mulk_") || name.starts_with("s_cmpk_") ||
        name == "s_call_b64" || name == "s_trap" || name.starts_with("s_setreg_imm32");
    if (scalar_imm && parse_int(part, n)) {
      inst.imm = n;
      continue;
    }
    if (op->cls == Class::Control || op->cls == Class::End) {
      parse_modifier(part, inst, 0);  // of buffer_wbl2 and buffer_inv; else sendmsg(...)
      continue;
    }
    if (inst.op_count == inst.op.size()) return "more than 6 operands";
    Operand& o = inst.op[inst.op_count];
    const int source = inst.op_count - inst.dst_count;
    const Type type = source >= 0 && source < 3 ? op->types.src[source] : Type::B32;
    if (!parse_operand(part, constant_type(inst, type, source), inst.has_literal, o)) {
      return "its operand " + std::string(part);
    }
    const bool packed = type == Type::PkF16 || type == Type::PkF32 || type == Type::Mix;
    const bool takes_sign = is_float(type) && (!packed || type == Type::Mix);
    const bool has_packed_sign = source >= 0 && (inst.neg_lo | inst.neg_hi) >> source & 1;
    if (((o.neg || o.abs) && !takes_sign) || (has_packed_sign && !packed))
      return "the sign of its operand " + std::string(part);
    ++inst.op_count;
    o.read = source >= 0 ? read_range(inst, type, source) : o.reg;
  }
  if (inst.op_count < inst.dst_count) return "too few operands";
  // Of three or two packed sources there is no fourth.
  if (inst.op_sel & 8 && op->types.keeps != Keeps::Other && !is_packed(op->types.src[0])) {
    return "op_sel of its destination";
  }
  inst.keeps_half = find_halves(op->types, inst);
  inst.flags = op->flags;
  inst.bits = op->bits;
  collect_registers(inst);
  return "";
}

void set_other_half(Inst& inst, D16 other_half) {
  if (!inst.is_load || inst.d16 == 0) return;
  inst.other_half = other_half;
  inst.keeps_half = other_half == D16::Keeps;
  inst.reads.clear();
  inst.writes.clear();
  collect_registers(inst);
}

Inst move_registers(const Inst& inst, RegFile file, uint16_t by, uint32_t which) {
  Inst moved = inst;
  for (int i = 0; i < inst.op_count; ++i) {
    Operand& o = moved.op[i];
    const uint32_t bit = i < inst.dst_count ? gpr_idx_dst : 1u << (i - inst.dst_count);
    if (!(which & bit) || !o.is_register() || o.reg.file != file) continue;
    o.reg.first += by;
    o.read.first += by;
  }
  moved.reads.clear();
  moved.writes.clear();
  collect_registers(moved);
  return moved;
}

}  // namespace gfx9emu
