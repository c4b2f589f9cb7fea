// Wait states: every row that was measured from the compiler, at its number and one below.
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "catch.h"
#include "gfx9/hazard_pairs.h"
#include "gfx9emu/decode.h"
#include "gfx9emu/hazards.h"

using namespace gfx9emu;

namespace {

Inst inst(const std::string& text) {
  Inst i;
  INFO(text);
  REQUIRE(parse_instruction(text, i) == "");
  return i;
}

// The wait states between `first` and `second` at which nothing is said, and what is said below.
void check(const Pair& pair, int needed) {
  INFO(pair.row << ": " << pair.first << " / " << pair.second);
  const Inst first = inst(pair.first), second = inst(pair.second);
  const Hazard found = find_hazard(first, second);
  CHECK((found.rule && found.rule->strict != Severity::Fault ? 0 : found.needed) == needed);

  std::vector<Inst> nops;
  for (int n = 0; n < 16; ++n) nops.push_back(inst("s_nop " + std::to_string(n)));
  const Inst other = inst("s_mov_b32 s90, 0");
  const auto faults = [&](int wait_states, bool by_nop) {
    HazardHistory history;
    const auto issue = [&](const Inst& i) { return history.issue(i, hazard_roles(i)); };
    bool fault = false;
    issue(first);
    if (by_nop) {
      for (; wait_states > 16; --wait_states) issue(other);
      if (wait_states > 0) fault |= issue(nops[wait_states - 1]).has_value();
    } else {
      for (int n = 0; n < wait_states; ++n) fault |= issue(other).has_value();
    }
    const auto last = issue(second);
    if (last && last->severity == Severity::Fault) {
      CHECK(last->needed == needed);
      CHECK(last->given < needed);
      CHECK(last->earlier == &first);
    }
    return fault || (last && last->severity == Severity::Fault);
  };
  for (const bool by_nop : {false, true}) {
    CHECK_FALSE(faults(needed, by_nop));
    if (needed > 0) CHECK(faults(needed - 1, by_nop));
    if (needed > 0) CHECK(faults(0, by_nop));
  }
}

}  // namespace

TEST_CASE("hazards: every measured row, and one wait state fewer", "[gfx9][hazards]") {
  const std::string path = std::string(ATTN_GFX9_DATA_DIR) + "/hazards.json";
  const auto table = nlohmann::json::parse(std::ifstream(path)).at("table");
  size_t rows = 0;
  for (const auto& [key, name, d] : mfma_tables) {
    size_t found = 0;
    for (const Pair& pair : mfma_pairs(name, d)) {
      check(pair, table.at(key).at(pair.row).get<int>());
      ++found;
    }
    CHECK(found == table.at(key).size());
    rows += found;
  }
  size_t others = 0;
  for (const Pair& pair : other_pairs) {
    const bool listed = table.at("other").contains(pair.row);
    check(pair, listed ? table.at("other").at(pair.row).get<int>() : std::stoi(pair.row));
    others += listed;
  }
  CHECK(others == table.at("other").size());
  CHECK(rows + others == 79);
}

TEST_CASE("hazards: low then high half is a warning", "[gfx9][hazards]") {
  const Inst low = inst("v_cvt_pk_fp8_f32 v0, v1, v2");
  const Inst high = inst("v_cvt_pk_fp8_f32 v0, v3, v4 op_sel:[0,0,1]");
  const Hazard found = find_hazard(low, high);
  REQUIRE(found.rule != nullptr);
  CHECK(found.rule->strict == Severity::Warning);
  CHECK(found.needed == 1);
  CHECK(find_hazard(low, inst("v_cvt_pk_fp8_f32 v5, v3, v4 op_sel:[0,0,1]")).rule == nullptr);
  // A fault hides the warning.
  HazardHistory history;
  const Inst exp = inst("v_exp_f32_e32 v3, v6");
  history.issue(exp, hazard_roles(exp));
  history.issue(low, hazard_roles(low));
  CHECK(history.issue(high, hazard_roles(high))->severity == Severity::Warning);
  history.issue(low, hazard_roles(low));
  history.issue(exp, hazard_roles(exp));
  const auto fault = history.issue(high, hazard_roles(high));
  REQUIRE(fault.has_value());
  CHECK(fault->severity == Severity::Fault);
}

TEST_CASE("hazards: a carry-in is a source like any other", "[gfx9][hazards]") {
  // As LLVM has it; the manual asks for no wait states there.
  const Inst add = inst("v_add_co_u32_e32 v0, vcc, v1, v2");
  const Hazard carry = find_hazard(add, inst("v_addc_co_u32_e32 v3, vcc, v4, v5, vcc"));
  REQUIRE(carry.rule != nullptr);
  CHECK(carry.rule->strict == Severity::Fault);
  CHECK(carry.needed == 2);
  const Inst first = inst("v_readfirstlane_b32 s4, v0");
  const Hazard source = find_hazard(first, inst("v_addc_co_u32_e32 v3, vcc, s4, v5, vcc"));
  REQUIRE(source.rule != nullptr);
  CHECK(source.needed == 2);
}

TEST_CASE("hazards: level isa asks for what the manual documents", "[gfx9][hazards]") {
  // What the manual does not name, or what AMD's kernels do with fewer.
  const struct {
    const char *first, *second;
    Severity isa;
  } pairs[] = {
      {"v_cmp_gt_f32_e32 vcc, v0, v1", "v_cndmask_b32_e32 v2, v3, v4, vcc", Severity::Nothing},
      {"v_add_co_u32_e32 v0, vcc, v1, v2", "v_addc_co_u32_e32 v3, vcc, v4, v5, vcc",
       Severity::Nothing},
      {"s_mov_b32 m0, s8", "buffer_load_dword v0, s[4:7], 0 offen lds", Severity::Nothing},
      {"s_mov_b32 m0, s8", "global_load_lds_dword v0, s[4:5]", Severity::Fault},
      {"v_readlane_b32 s4, v0, 3", "v_add_f32_e32 v1, s4, v2", Severity::Warning},
      {"v_mfma_f32_16x16x32_fp8_fp8 v[0:3], v[8:9], v[10:11], 0", "v_mul_f32_e32 v4, v0, v5",
       Severity::Warning},
      {"v_mfma_f32_16x16x32_fp8_fp8 v[0:3], v[8:9], v[10:11], 0",
       "v_mfma_f32_16x16x32_fp8_fp8 v[4:7], v[0:1], v[10:11], 0", Severity::Fault},
      {"v_exp_f32_e32 v0, v1", "v_mul_f32_e32 v2, v0, v3", Severity::Fault},
  };
  for (const auto& p : pairs) {
    INFO(p.first << " / " << p.second);
    const Inst first = inst(p.first), second = inst(p.second);
    REQUIRE(find_hazard(first, second).rule != nullptr);
    CHECK(find_hazard(first, second).rule->strict == Severity::Fault);
    const Hazard found = find_hazard(first, second, Level::Isa);
    CHECK((found.rule ? found.rule->isa : Severity::Nothing) == p.isa);
    HazardHistory history(Level::Isa);
    history.issue(first, hazard_roles(first, Level::Isa));
    const auto issued = history.issue(second, hazard_roles(second, Level::Isa));
    CHECK((issued ? issued->severity : Severity::Nothing) == p.isa);
  }
}
