// Wait states that gfx942 and gfx950 need between two instructions of a wave and do not insert by
// themselves.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "gfx9emu/inst.h"
#include "gfx9emu/level.h"

namespace gfx9emu {

enum class Severity : uint8_t { Nothing, Warning, Fault };

struct HazardRule {
  const char* text;  // "VALU writes a VGPR, MFMA reads it"
  Severity strict, isa;
  bool (*is_earlier)(const Inst&);
  bool (*is_later)(const Inst&);
  // Wait states needed between the two; 0 where their registers do not meet.
  int (*wait)(const Inst& earlier, const Inst& later);
  bool gfx950_alone = false;  // gfx942 has no such instructions

  Severity severity(Level level) const { return level == Level::Strict ? strict : isa; }
};
std::span<const HazardRule> hazard_rules();
// More than any rule asks for lie behind this.
inline constexpr int hazard_window = 20;

struct Hazard {
  const HazardRule* rule = nullptr;
  int needed = 0;  // wait states
};
// The rule that asks for most between two instructions, faults before warnings. needed 0: none.
Hazard find_hazard(const Inst& earlier, const Inst& later, Level level = Level::Strict);

// Which rules an instruction can be a part of: bit r for hazard_rules()[r].
struct HazardRoles {
  uint64_t earlier = 0, later = 0;
};
HazardRoles hazard_roles(const Inst& inst, Level level = Level::Strict);

// Between two adjacent instructions no wait state passes; one between them is one, s_nop n is n
// + 1.
struct HazardFault {
  const HazardRule* rule = nullptr;
  Severity severity = Severity::Fault;
  const Inst* earlier = nullptr;
  int needed = 0, given = 0;
};

// Loads that follow each other without another instruction between them are repeated together after
// a page fault, where the device does that (XNACK): none may write what another of them reads. A
// scalar load of several dwords may not write what it reads itself.
class Clause {
 public:
  // The instruction whose operand this one overwrites, or null.
  const Inst* issue(const Inst& inst);

 private:
  std::vector<const Inst*> loads_;
};

// What a wave has issued of late. Instructions must outlive it.
class HazardHistory {
 public:
  explicit HazardHistory(Level level = Level::Strict) : level_(level) {}
  // Looks back from `inst`, then records it. `roles` are those of `inst`. Of several, a fault
  // rather than a warning, and what lacks most.
  std::optional<HazardFault> issue(const Inst& inst, const HazardRoles& roles);
  void clear() { count_ = 0; }

 private:
  struct Entry {
    const Inst* inst;
    uint64_t rules;
    uint64_t state;  // wait states that had passed after it
  };
  Level level_;
  std::array<Entry, hazard_window> entries_{};
  int count_ = 0, next_ = 0;
  uint64_t state_ = 0;
};

}  // namespace gfx9emu
