// At level isa a warning stands where AMD's own kernels (the 1281 code objects for gfx942 of
// amd-aiter 0.1.7) give fewer wait states.
// The tables are those of the CDNA3 ISA manual (4.5 and the MFMA tables of chapter 7) as LLVM's
// hazard recognizer applies them; figures for f32, f64 and mixed MFMA were measured from llc 19,
// those of gfx950 from llc 22.
#include "gfx9emu/hazards.h"

#include <algorithm>
#include <string_view>

#include "gfx9emu/mfma.h"

namespace gfx9emu {
namespace {

// ---- kinds of instructions ---------------------------------------------------------------------

bool mfma(const Inst& i) {
  return i.cls == Class::Mfma;
}
bool trans(const Inst& i) {
  return i.cls == Class::Trans;
}
bool valu(const Inst& i) {
  return i.cls == Class::Valu || i.cls == Class::Trans || i.cls == Class::PackedF32;
}
bool plain_valu(const Inst& i) {
  return valu(i) && !trans(i);
}
bool vmem(const Inst& i) {
  return i.cls == Class::Buffer || i.cls == Class::Global || i.cls == Class::Flat ||
         i.cls == Class::Scratch;
}
bool memory(const Inst& i) {
  return vmem(i) || i.cls == Class::Lds;
}
bool salu(const Inst& i) {
  return i.cls == Class::Salu;
}
bool starts(const Inst& i, std::string_view prefix) {
  return i.name.starts_with(prefix);
}
bool dot(const Inst& i) {
  return valu(i) && starts(i, "v_dot");
}
bool dpp(const Inst& i) {
  return valu(i) && i.dpp != Dpp::None;
}
bool reads_lane(const Inst& i) {
  return starts(i, "v_readlane") || starts(i, "v_readfirstlane");
}
bool selects_lane(const Inst& i) {
  return starts(i, "v_readlane") || starts(i, "v_writelane");
}
bool crosses_lanes(const Inst& i) {
  return reads_lane(i) || starts(i, "v_writelane");
}
bool div_fmas(const Inst& i) {
  return starts(i, "v_div_fmas");
}
bool sets_register(const Inst& i) {
  return starts(i, "s_setreg");
}
bool accesses_register(const Inst& i) {
  return sets_register(i) || starts(i, "s_getreg");
}
bool converts_to_fp8(const Inst& i) {
  return starts(i, "v_cvt_pk_fp8_f32") || starts(i, "v_cvt_pk_bf8_f32");
}
bool converts_low(const Inst& i) {
  return converts_to_fp8(i) && !(i.op_sel & 8);
}
bool converts_high(const Inst& i) {
  return converts_to_fp8(i) && (i.op_sel & 8);
}
// The result lands in another part of the register than it was computed in.
bool shifts_result(const Inst& i) {
  return valu(i) && ((i.op_sel & 8) || (i.is_sdwa && i.dst_sel != Sdwa::Dword));
}
bool swaps_lanes(const Inst& i) {
  return starts(i, "v_permlane");
}
bool is_buffer_dma(const Inst& i) {
  return i.is_lds_dma && i.cls == Class::Buffer;
}
bool needs_m0(const Inst& i) {
  return (i.is_lds_dma && !is_buffer_dma(i)) || starts(i, "s_sendmsg") || starts(i, "s_movrel") ||
         (i.cls == Class::Lds && i.name.find("addtid") != std::string::npos);
}
// Stores of more than 64 bits fetch their data late; a buffer store with an SGPR offset has the
// time.
const Operand& data_of_store(const Inst& i) {
  return i.op[i.cls == Class::Buffer ? 0 : i.dst_count + 1];
}
bool wide_store(const Inst& i) {
  if (!vmem(i) || !i.is_store || data_of_store(i).reg.count <= 2) return false;
  return i.cls != Class::Buffer || !i.op[3].is_register();
}

// ---- registers ---------------------------------------------------------------------------------

bool is_vector(const RegRange& r) {
  return r.file != RegFile::Scalar;
}
bool is_sgpr(const RegRange& r) {
  return r.file == RegFile::Scalar && r.first < scalar::scc;
}
bool is_exec(const RegRange& r) {
  return r.overlaps({RegFile::Scalar, scalar::exec, 2});
}
bool is_vcc(const RegRange& r) {
  return r.overlaps({RegFile::Scalar, scalar::vcc, 2});
}
bool is_m0(const RegRange& r) {
  return r.overlaps({RegFile::Scalar, scalar::m0, 1});
}

template <bool (*kind)(const RegRange&)>
bool any(const std::vector<RegRange>& list) {
  return std::any_of(list.begin(), list.end(), kind);
}
template <bool (*kind)(const RegRange&)>
bool meet(const std::vector<RegRange>& a, const std::vector<RegRange>& b) {
  for (const RegRange& x : a) {
    if (!kind(x)) continue;
    for (const RegRange& y : b) {
      if (x.overlaps(y)) return true;
    }
  }
  return false;
}
bool meet(const RegRange& a, const std::vector<RegRange>& b) {
  return std::any_of(b.begin(), b.end(), [&](const RegRange& r) { return a.overlaps(r); });
}
bool meet(const Operand& a, const Operand& b) {
  return a.is_register() && b.is_register() && a.reg.overlaps(b.reg);
}
bool meet(const Operand& a, const std::vector<RegRange>& b) {
  return a.is_register() && meet(a.reg, b);
}

// An MFMA's D, A, B, C.
const Operand& d_of(const Inst& i) {
  return i.op[0];
}
const Operand& a_of(const Inst& i) {
  return i.op[1];
}
const Operand& b_of(const Inst& i) {
  return i.op[2];
}
const Operand& c_of(const Inst& i) {
  return i.op[3];
}
bool f64(const Inst& i) {
  return starts(i, "v_mfma_f64");
}
bool xdl(const Inst& i) {
  const MfmaShape* s = find_mfma(i.name);
  return s == nullptr || s->xdl;
}

bool longer(const Inst& i) {
  return i.arch == Arch::Gfx950 && xdl(i);
}

// From D to what overwrites it.
int overwrite_wait(const Inst& i) {
  if (f64(i)) return i.passes >= 8 ? 11 : 6;
  return i.passes + (xdl(i) ? 3 : 2) + (longer(i) && i.passes > 2);
}
// From D to anything that reads it and is not an accumulation.
int result_wait(const Inst& i) {
  return f64(i) && i.passes == 16 ? 19 : overwrite_wait(i);
}
int result_to_memory_wait(const Inst& i) {
  return f64(i) ? (i.passes >= 8 ? 18 : 9) : result_wait(i);
}
int accumulate_wait(const Inst& e, const Inst& l) {
  if (!meet(d_of(e), c_of(l))) return 0;
  if (d_of(e).reg == c_of(l).reg) {  // a chain, which is interlocked but for the shortest
    if (f64(e)) return e.passes >= 8 || xdl(l) ? 0 : 4;
    return e.passes == 2 ? 2 : 0;
  }
  if (xdl(e)) return e.passes + 1 + longer(e);
  if (xdl(l)) return 0;
  return f64(e) ? (e.passes >= 8 ? e.passes + 1 : 4) : e.passes;
}

// `n` if a register of `kind` that the first writes is read by the second.
template <bool (*kind)(const RegRange&), int n>
int read_after_write(const Inst& e, const Inst& l) {
  return meet<kind>(e.writes, l.reads) ? n : 0;
}
// The mask that v_cndmask, or the carry that v_addc and its like, takes.
const Operand& mask_of(const Inst& i) {
  return i.op[i.dst_count + 2];
}
bool reads_mask(const Inst& i) {
  return i.lane_mask && mask_of(i).is_scalar();
}
int read_mask(const Inst& e, const Inst& l) {
  return meet(mask_of(l), e.writes) ? 2 : 0;
}
int read_constant(const Inst& e, const Inst& l) {
  for (const RegRange& w : e.writes) {
    if (!is_sgpr(w)) continue;
    for (const RegRange& r : l.reads) {
      if (w.overlaps(r) && !(reads_mask(l) && r == mask_of(l).reg)) return 2;
    }
  }
  return 0;
}
template <int n>
int always(const Inst&, const Inst&) {
  return n;
}

template <bool (*is)(const Inst&), bool (*kind)(const RegRange&)>
bool writes(const Inst& i) {
  return is(i) && any<kind>(i.writes);
}
template <bool (*is)(const Inst&), bool (*kind)(const RegRange&)>
bool reads(const Inst& i) {
  return is(i) && any<kind>(i.reads);
}

int same_opcode_ab(const Inst& e, const Inst& l) {
  // The accumulator of a chain of the same v_dot is forwarded.
  if (e.name != l.name) return meet<is_vector>(e.writes, l.reads) ? 3 : 0;
  return meet(l.op[1], e.writes) || meet(l.op[2], e.writes) ? 3 : 0;
}

// ---- the table ---------------------------------------------------------------------------------

using enum Severity;

const HazardRule rules[] = {
    // MFMA
    {"VALU writes a VGPR, MFMA reads it", Fault, Fault, writes<valu, is_vector>, mfma,
     read_after_write<is_vector, 2>},
    {"VALU writes EXEC, then MFMA", Fault, Fault, writes<valu, is_exec>, mfma, always<4>},
    {"MFMA writes D, MFMA accumulates onto it", Fault, Fault, mfma, mfma, accumulate_wait},
    {"MFMA writes D, MFMA reads it as A or B", Fault, Fault, mfma, mfma,
     [](const Inst& e, const Inst& l) {
       return meet(d_of(e), a_of(l)) || meet(d_of(e), b_of(l)) ? result_wait(e) : 0;
     }},
    {"MFMA writes D, VALU reads it", Fault, Warning, mfma, reads<valu, is_vector>,
     [](const Inst& e, const Inst& l) { return meet(d_of(e), l.reads) ? result_wait(e) : 0; }},
    {"MFMA writes D, a memory or LDS instruction reads it", Fault, Fault, mfma,
     reads<memory, is_vector>,
     [](const Inst& e, const Inst& l) {
       return meet(d_of(e), l.reads) ? result_to_memory_wait(e) : 0;
     }},
    {"MFMA writes D, VALU overwrites it", Fault, Warning, mfma, writes<valu, is_vector>,
     [](const Inst& e, const Inst& l) { return meet(d_of(e), l.writes) ? overwrite_wait(e) : 0; }},
    {"MFMA writes D, a load overwrites it", Fault, Fault, mfma, writes<memory, is_vector>,
     [](const Inst& e, const Inst& l) { return meet(d_of(e), l.writes) ? overwrite_wait(e) : 0; }},
    {"MFMA reads C, VALU overwrites it", Fault, Fault, mfma, writes<valu, is_vector>,
     [](const Inst& e, const Inst& l) {
       return meet(c_of(e), l.writes) && xdl(e) ? e.passes - 1 : 0;
     }},

    // Vector registers
    {"transcendental writes a VGPR, other VALU reads it", Fault, Fault, trans, plain_valu,
     read_after_write<is_vector, 1>},
    {"VALU writes a shifted part of a VGPR (op_sel or SDWA), VALU reads it", Fault, Fault,
     shifts_result, valu, read_after_write<is_vector, 1>},
    {"v_cvt_pk to the low half, then to the high half of one VGPR", Warning, Warning, converts_low,
     converts_high,
     [](const Inst& e, const Inst& l) { return meet<is_vector>(e.writes, l.writes) ? 1 : 0; }},
    {"VALU writes a VGPR, v_readlane or v_readfirstlane reads it", Fault, Fault,
     writes<valu, is_vector>, reads_lane, read_after_write<is_vector, 1>},
    {"VALU writes a VGPR, DPP reads it", Fault, Warning, writes<valu, is_vector>, dpp,
     [](const Inst& e, const Inst& l) {
       // Only the first source goes through the crossbar.
       return meet(l.op[l.dst_count], e.writes) ? 2 : 0;
     }},
    {"VALU writes a VGPR, v_permlane32_swap reads it", Fault, Fault, writes<valu, is_vector>,
     swaps_lanes, read_after_write<is_vector, 2>, true},
    {"v_dot writes a VGPR, other VALU or its A or B reads it", Fault, Fault, dot, valu,
     same_opcode_ab},
    {"v_dot writes a VGPR, another VALU operation overwrites it", Fault, Fault, dot, valu,
     [](const Inst& e, const Inst& l) {
       return e.name != l.name && meet<is_vector>(e.writes, l.writes) ? 3 : 0;
     }},
    {"a store of more than 64 bits reads its data, VALU overwrites it", Fault, Fault, wide_store,
     [](const Inst& i) { return (valu(i) || mfma(i)) && any<is_vector>(i.writes); },
     [](const Inst& e, const Inst& l) { return meet(data_of_store(e), l.writes) ? 2 : 0; }},

    // Scalar registers
    {"VALU writes an SGPR or VCC, VALU reads it", Fault, Warning, writes<valu, is_sgpr>,
     reads<valu, is_sgpr>, read_constant},
    // The manual asks for none here; the compiler treats it as any other source.
    {"VALU writes an SGPR or VCC, VALU reads it as a lane mask or carry", Fault, Nothing,
     writes<valu, is_sgpr>, reads_mask, read_mask},
    {"VALU writes an SGPR, a memory instruction reads it", Fault, Warning, writes<valu, is_sgpr>,
     reads<vmem, is_sgpr>, read_after_write<is_sgpr, 5>},
    {"VALU writes an SGPR, v_readlane or v_writelane selects a lane by it", Fault, Fault,
     writes<valu, is_sgpr>, selects_lane,
     [](const Inst& e, const Inst& l) { return meet(l.op[2], e.writes) ? 4 : 0; }},
    {"VALU writes VCC, v_div_fmas reads it", Fault, Fault, writes<valu, is_vcc>, div_fmas,
     always<4>},
    {"VALU writes EXEC, then v_readlane, v_readfirstlane or v_writelane", Fault, Fault,
     writes<valu, is_exec>, crosses_lanes, always<4>},
    {"VALU writes EXEC, then DPP", Fault, Fault, writes<valu, is_exec>, dpp, always<5>},
    {"SALU writes M0, then LDS-DMA, s_sendmsg or s_movrel", Fault, Fault, writes<salu, is_m0>,
     needs_m0, always<1>},
    // The manual names global and scratch.
    {"SALU writes M0, then LDS-DMA of a buffer", Fault, Nothing, writes<salu, is_m0>, is_buffer_dma,
     always<1>},
    {"s_setreg, then s_getreg or s_setreg of the same register", Fault, Fault, sets_register,
     accesses_register, [](const Inst& e, const Inst& l) { return e.hwreg == l.hwreg ? 2 : 0; }},
};
static_assert(std::size(rules) <= 64);

}  // namespace

std::span<const HazardRule> hazard_rules() {
  return rules;
}

HazardRoles hazard_roles(const Inst& inst, Level level) {
  HazardRoles roles;
  for (size_t r = 0; r < std::size(rules); ++r) {
    if (rules[r].severity(level) == Nothing) continue;
    if (rules[r].is_earlier(inst)) roles.earlier |= 1ull << r;
    if (rules[r].is_later(inst)) roles.later |= 1ull << r;
  }
  return roles;
}

Hazard find_hazard(const Inst& earlier, const Inst& later, Level level) {
  Hazard found;
  Severity worst = Nothing;
  for (const HazardRule& r : rules) {
    const Severity severity = r.severity(level);
    if (severity == Nothing || !r.is_earlier(earlier) || !r.is_later(later)) continue;
    const int needed = r.wait(earlier, later);
    if (needed == 0) continue;
    if (severity > worst || (severity == worst && needed > found.needed)) {
      found = {&r, needed};
      worst = severity;
    }
  }
  return found;
}

std::optional<HazardFault> HazardHistory::issue(const Inst& inst, const HazardRoles& roles) {
  std::optional<HazardFault> found;
  if (roles.later != 0) {
    // From the latest back.
    for (int n = 1; n <= count_; ++n) {
      const Entry& e = entries_[(next_ - n + hazard_window) % hazard_window];
      const uint64_t given = state_ - e.state;
      if (given >= hazard_window) break;
      for (uint64_t both = e.rules & roles.later; both != 0; both &= both - 1) {
        const HazardRule& r = rules[__builtin_ctzll(both)];
        const int needed = r.wait(*e.inst, inst);
        if (needed <= int(given)) continue;
        const Severity severity = r.severity(level_);
        const bool better =
            !found || severity > found->severity ||
            (severity == found->severity && needed - int(given) > found->needed - found->given);
        if (better) found = HazardFault{&r, severity, e.inst, needed, int(given)};
      }
    }
  }
  state_ += inst.cls == Class::Nop ? uint64_t(inst.imm) + 1 : 1;
  if (roles.earlier != 0) {
    entries_[next_] = {&inst, roles.earlier, state_};
    next_ = (next_ + 1) % hazard_window;
    count_ = std::min(count_ + 1, hazard_window);
  }
  return found;
}

const Inst* Clause::issue(const Inst& inst) {
  const bool scalar = inst.cls == Class::Smem;
  if (!scalar && !vmem(inst)) {
    loads_.clear();
    return nullptr;
  }
  if (!loads_.empty() && (loads_[0]->cls == Class::Smem) != scalar) loads_.clear();
  // Stores begin anew; they write no register.
  if (!inst.is_load) {
    loads_.clear();
    return nullptr;
  }
  loads_.push_back(&inst);
  // By itself a load of one dword is repeated only as long as it has written nothing, and the
  // compiler lets vector loads be.
  const bool alone = loads_.size() == 1;
  if (alone && (!scalar || inst.op[0].reg.count == 1)) return nullptr;
  for (const Inst* other : loads_) {
    for (const RegRange& written : inst.writes) {
      if (meet(written, other->reads)) return other;
    }
  }
  return nullptr;
}

}  // namespace gfx9emu
