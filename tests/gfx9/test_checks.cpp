// Each check: a kernel that breaks the rule faults with its kind, one that keeps it runs.
#include <optional>

#include "gfx9/assemble.h"
#include "gfx9/generate.h"

using namespace gfx9emu;
using namespace gfx9emu::test;

namespace {

struct Case {
  std::string name;
  std::optional<FaultKind> expected;  // none: runs
  std::string body;
  uint32_t block = 64;
};

// s[4:5] out, s[6:7] in, v1 the work item's byte offset.
const std::string begin =
    "s_load_dwordx4 s[4:7], s[0:1], 0x0\n v_and_b32 v0, 0x3ff, v0\n v_lshlrev_b32 v1, 2, v0\n"
    "s_waitcnt lgkmcnt(0)\n";
const std::string store = "global_store_dword v1, v2, s[4:5]\n";
// As `begin`; only the first wave goes on to `body`.
std::string wave_0(const std::string& body, const std::string& label) {
  return "v_readfirstlane_b32 s10, v0\n s_cmp_lg_u32 s10, 0\n s_cbranch_scc1 " + label + "\n" +
         body + label + ":\n";
}

const std::vector<Case> cases = {
    {"ok", {}, begin + "global_load_dword v2, v1, s[6:7]\n s_waitcnt vmcnt(0)\n" + store},

    {"vgpr_range", FaultKind::RegisterRange, begin + "v_mov_b32 v16, 0\n"},
    {"vgpr_tuple_range", FaultKind::RegisterRange,
     begin + "global_load_dwordx4 v[14:17], v1, s[6:7]\n"},
    {"agpr_range", FaultKind::RegisterRange, begin + "v_accvgpr_write_b32 a16, 0\n"},
    {"agpr_in_range", {}, begin + "v_accvgpr_write_b32 a15, 0\n"},
    {"sgpr_range", FaultKind::RegisterRange, "s_mov_b32 s26, 0\n"},
    {"sgpr_in_range", {}, "s_mov_b32 s25, 0\n"},
    {"not_reached", {}, "s_endpgm\n v_mov_b32 v40, 0\n"},

    {"vgpr_undefined", FaultKind::UndefinedRegister, "v_not_b32 v2, v3\n"},
    {"sgpr_undefined", FaultKind::UndefinedRegister, "s_not_b32 s3, s20\n s_add_u32 s3, s3, 1\n"},
    // What is copied may be undefined, and is it still when it is used.
    {"vgpr_copied", {}, "v_mov_b32 v2, v3\n"},
    {"vgpr_copied_used", FaultKind::UndefinedRegister, "v_mov_b32 v2, v3\n v_not_b32 v4, v2\n"},
    {"agpr_copied", {}, "v_accvgpr_read_b32 v2, a0\n v_accvgpr_write_b32 a1, v2\n"},
    {"agpr_copied_used", FaultKind::UndefinedRegister,
     "v_mov_b32 v2, 0\n v_accvgpr_read_b32 v2, a0\n v_not_b32 v4, v2\n"},
    {"sgpr_copied", {}, "s_mov_b32 s3, s20\n s_mov_b64 s[4:5], s[2:3]\n v_mov_b32 v2, s5\n"},
    {"sgpr_copied_used", FaultKind::UndefinedRegister,
     "s_mov_b32 s3, s20\n v_mov_b32 v2, s3\n v_not_b32 v2, v2\n"},
    {"exec_undefined", FaultKind::UndefinedRegister, "s_mov_b64 exec, s[20:21]\n"},
    {"lane_copied", {}, "v_readlane_b32 s4, v2, 3\n s_nop 1\n v_writelane_b32 v3, s4, 5\n"},
    {"lane_copied_used", FaultKind::UndefinedRegister,
     "v_readlane_b32 s4, v2, 3\n s_add_u32 s4, s4, 1\n"},
    {"selected_undefined", FaultKind::UndefinedRegister,
     "v_mov_b32 v3, 1\n v_cmp_eq_u32 vcc, v3, v3\n s_nop 4\n"
     "v_cndmask_b32 v2, v3, v9, vcc\n v_not_b32 v2, v2\n"},
    {"inserted",
     {},
     "v_mov_b32 v3, 1\n s_mov_b32 s4, 0xffff\n v_bfi_b32 v2, s4, v3, v9\n"
     "v_cvt_f32_f16 v4, v2\n"},
    {"inserted_undefined", FaultKind::UndefinedRegister,
     "v_mov_b32 v3, 1\n s_mov_b32 s4, 0xffff\n v_bfi_b32 v2, s4, v3, v9\n v_not_b32 v4, v2\n"},
    // A mask of lanes that grows in a loop begins undefined, and is defined where it counts.
    {"mask_bits",
     {},
     "s_or_b64 s[8:9], s[8:9], exec\n s_andn2_b64 s[10:11], exec, s[8:9]\n"
     "s_cmp_lg_u64 s[10:11], 0\n s_mov_b64 exec, s[10:11]\n",
     32},
    {"mask_bits_used", FaultKind::UndefinedRegister,
     "s_or_b64 s[8:9], s[8:9], exec\n s_cmp_lg_u64 s[8:9], 0\n", 32},
    {"mask_to_exec", FaultKind::UndefinedRegister,
     "s_or_b64 s[8:9], s[8:9], exec\n s_mov_b64 exec, s[8:9]\n", 32},
    {"mask_spilled",
     {},
     "s_or_b64 s[8:9], s[8:9], 15\n v_writelane_b32 v2, s8, 0\n v_mov_b32 v3, v2\n s_nop 0\n"
     "v_readlane_b32 s8, v3, 0\n s_and_b32 s8, s8, 3\n s_add_u32 s8, s8, 1\n"},
    {"mask_spilled_used", FaultKind::UndefinedRegister,
     "s_or_b64 s[8:9], s[8:9], 15\n v_writelane_b32 v2, s8, 0\n v_mov_b32 v3, v2\n s_nop 0\n"
     "v_readlane_b32 s8, v3, 0\n s_and_b32 s8, s8, 16\n s_add_u32 s8, s8, 1\n"},
    {"mask_selects",
     {},
     "v_mov_b32 v3, 1\n s_or_b64 s[8:9], s[8:9], exec\n v_cndmask_b32 v2, v3, v3, s[8:9]\n"
     "v_not_b32 v2, v2\n",
     32},
    {"mask_selects_undefined", FaultKind::UndefinedRegister,
     "v_mov_b32 v3, 1\n s_or_b32 s8, s8, 15\n s_mov_b32 s9, 0\n"
     "v_cndmask_b32 v2, v3, v3, s[8:9]\n",
     32},
    {"scc_by_bits", {}, "s_or_b32 s8, s8, 1\n s_cselect_b32 s9, 1, 2\n"},
    {"scc_by_bits_undefined", FaultKind::UndefinedRegister,
     "s_and_b32 s8, s8, 1\n s_cselect_b32 s9, 1, 2\n"},
    // op_sel takes both halves from one register of the pair.
    {"packed_low_scalar",
     {},
     "v_mov_b32 v2, 1.0\n v_mov_b32 v3, 1.0\n s_mov_b32 s8, 2.0\n"
     "v_pk_mul_f32 v[4:5], v[2:3], s[8:9] op_sel_hi:[1,0]\n"},
    {"packed_scalars", FaultKind::UndefinedRegister,
     "v_mov_b32 v2, 1.0\n v_mov_b32 v3, 1.0\n s_mov_b32 s8, 2.0\n"
     "v_pk_mul_f32 v[4:5], v[2:3], s[8:9]\n"},
    {"indexed_undefined", FaultKind::UndefinedRegister,
     "v_mov_b32 v2, 0\n s_mov_b32 s4, 1\n s_set_gpr_idx_on s4, gpr_idx(SRC0)\n"
     "v_not_b32 v4, v2\n s_set_gpr_idx_off\n"},
    {"indexed_range", FaultKind::RegisterRange,
     "v_mov_b32 v2, 0\n s_mov_b32 s4, 14\n s_set_gpr_idx_on s4, gpr_idx(DST)\n"
     "v_mov_b32 v2, v2\n s_set_gpr_idx_off\n"},
    {"vcc_undefined", FaultKind::UndefinedRegister, "v_cndmask_b32 v2, 0, 1, vcc\n"},
    {"scc_undefined", FaultKind::UndefinedRegister, "s_cselect_b32 s3, 0, 1\n"},
    {"store_undefined", FaultKind::UndefinedRegister, begin + store},
    {"lane_undefined", FaultKind::UndefinedRegister,
     "s_mov_b64 s[8:9], exec\n s_mov_b64 exec, 1\n v_mov_b32 v2, 0\n s_mov_b64 exec, s[8:9]\n"
     "v_not_b32 v3, v2\n"},
    {"lane_defined",
     {},
     "s_mov_b64 s[8:9], exec\n s_mov_b64 exec, 1\n v_mov_b32 v2, 0\n v_not_b32 v3, v2\n"},
    {"half_undefined", FaultKind::UndefinedRegister,
     "v_mov_b32 v3, 1.0\n v_cvt_pk_fp8_f32 v2, v3, v3\n s_nop 3\n v_not_b32 v4, v2\n"},
    {"halves_defined",
     {},
     "v_mov_b32 v3, 1.0\n v_cvt_pk_fp8_f32 v2, v3, v3\n s_nop 3\n"
     "v_cvt_pk_fp8_f32 v2, v3, v3 op_sel:[0,0,1]\n s_nop 3\n v_not_b32 v4, v2\n"},
    {"half_used",
     {},
     "v_mov_b32 v3, 1.0\n v_cvt_pk_fp8_f32 v2, v3, v3\n s_nop 3\n v_cvt_f32_fp8 v4, v2\n"},
    {"unselected_undefined",
     {},
     "v_mov_b32 v3, 1\n v_cmp_eq_u32 vcc, v3, v3\n s_nop 4\n v_cndmask_b32 v2, v9, v3, vcc\n"},

    {"load_not_waited", FaultKind::MissingWaitcnt,
     begin + "global_load_dword v2, v1, s[6:7]\n v_add_u32 v3, v2, v1\n"},
    {"load_overwritten", FaultKind::MissingWaitcnt,
     begin + "global_load_dword v2, v1, s[6:7]\n v_mov_b32 v2, 0\n"},
    {"second_load_not_waited", FaultKind::MissingWaitcnt,
     begin + "global_load_dword v2, v1, s[6:7]\n global_load_dword v3, v1, s[6:7]\n"
             "s_waitcnt vmcnt(1)\n v_add_u32 v4, v3, v1\n"},
    {"first_load_waited",
     {},
     begin + "global_load_dword v2, v1, s[6:7]\n global_load_dword v3, v1, s[6:7]\n"
             "s_waitcnt vmcnt(1)\n v_add_u32 v4, v2, v1\n"},
    {"stores_count",
     {},
     begin + "global_load_dword v2, v1, s[6:7]\n global_store_dword v1, v1, s[4:5]\n"
             "s_waitcnt vmcnt(1)\n v_add_u32 v4, v2, v1\n"},
    {"stores_count_too", FaultKind::MissingWaitcnt,
     begin + "global_load_dword v2, v1, s[6:7]\n global_store_dword v1, v1, s[4:5]\n"
             "s_waitcnt vmcnt(2)\n v_add_u32 v4, v2, v1\n"},
    {"scalar_not_waited", FaultKind::MissingWaitcnt,
     "s_load_dword s4, s[0:1], 0x0\n s_add_u32 s5, s4, 1\n"},
    {"scalar_out_of_order", FaultKind::MissingWaitcnt,
     begin + "s_load_dword s8, s[0:1], 0x0\n s_load_dword s9, s[0:1], 0x4\n"
             "s_waitcnt lgkmcnt(1)\n s_add_u32 s5, s8, 1\n"},
    {"lds_behind_scalar", FaultKind::MissingWaitcnt,
     begin + "v_mov_b32 v2, 0\n ds_write_b32 v1, v2\n ds_read_b32 v3, v1\n"
             "s_load_dword s9, s[0:1], 0x4\n s_waitcnt lgkmcnt(1)\n v_mov_b32 v4, v3\n"},
    {"lds_not_waited", FaultKind::MissingWaitcnt,
     begin + "ds_write_b32 v1, v1\n ds_read_b32 v3, v1\n s_waitcnt vmcnt(0)\n v_mov_b32 v4, v3\n"},
    {"lds_in_order",
     {},
     begin + "ds_write_b32 v1, v1\n ds_read_b32 v3, v1\n ds_read_b32 v4, v1\n"
             "s_waitcnt lgkmcnt(1)\n v_mov_b32 v5, v3\n"},
    {"swizzle_not_waited", FaultKind::MissingWaitcnt,
     begin + "ds_swizzle_b32 v3, v1 offset:0x401f\n v_mov_b32 v4, v3\n"},
    {"dma_not_waited", FaultKind::MissingWaitcnt,
     begin + "s_mov_b32 m0, 0\n s_nop 0\n global_load_lds_dword v1, s[6:7]\n ds_read_b32 v2, v1\n"},
    {"dma_waited",
     {},
     begin +
         "s_mov_b32 m0, 0\n s_nop 0\n global_load_lds_dword v1, s[6:7]\n"
         "s_waitcnt vmcnt(0)\n ds_read_b32 v2, v1\n s_waitcnt lgkmcnt(0)\n" +
         store},
    {"m0_undefined", FaultKind::UndefinedRegister, begin + "global_load_lds_dword v1, s[6:7]\n"},

    {"trans_no_wait_state", FaultKind::MissingWaitStates,
     "v_mov_b32 v2, 1.0\n v_exp_f32 v3, v2\n v_mul_f32 v4, v3, v3\n"},
    {"trans_wait_state",
     {},
     "v_mov_b32 v2, 1.0\n v_exp_f32 v3, v2\n s_nop 0\n v_mul_f32 v4, v3, v3\n"},

    {"lds_undefined", FaultKind::UndefinedLds, begin + "ds_read_b32 v2, v1\n"},
    {"lds_bounds", FaultKind::OutOfBounds, begin + "ds_write_b32 v1, v1 offset:772\n"},
    {"lds_in_bounds", {}, begin + "ds_write_b32 v1, v1 offset:768\n"},
    {"lds_misaligned", FaultKind::Misaligned, begin + "ds_write_b32 v1, v1 offset:2\n"},
    {"lds_race_read", FaultKind::LdsRace,
     begin + "ds_write_b32 v1, v1\n s_waitcnt lgkmcnt(0)\n s_barrier\n v_xor_b32 v2, 0x100, v1\n"
             "ds_write_b32 v1, v1\n s_waitcnt lgkmcnt(0)\n ds_read_b32 v3, v2\n",
     128},
    {"lds_race_write", FaultKind::LdsRace, begin + "v_and_b32 v2, 0xff, v1\n ds_write_b32 v2, v1\n",
     128},
    {"lds_same_value",
     {},
     begin + "v_and_b32 v2, 0xff, v1\n ds_write_b32 v2, v2\n s_waitcnt lgkmcnt(0)\n"
             "ds_read_b32 v3, v2\n",
     128},
    {"lds_same_value_then_another", FaultKind::LdsRace,
     begin + "v_and_b32 v2, 0xff, v1\n ds_write_b32 v2, v2\n s_waitcnt lgkmcnt(0)\n"
             "ds_write_b32 v2, v1\n",
     128},
    {"lds_same_value_read_by_third", FaultKind::LdsRace,
     begin + wave_0("v_and_b32 v2, 0xff, v1\n ds_write_b32 v2, v2\n", "C") +
         "v_and_b32 v2, 0xff, v1\n ds_read_b32 v3, v2\n",
     128},
    {"lds_no_race_atomic",
     {},
     begin + wave_0("v_mov_b32 v3, 0\n ds_write_b32 v1, v3\n", "A") +
         "s_waitcnt lgkmcnt(0)\n s_barrier\n v_and_b32 v2, 0xff, v1\n ds_add_u32 v2, v1\n",
     128},
    {"lds_barrier",
     {},
     begin + "ds_write_b32 v1, v1\n s_waitcnt lgkmcnt(0)\n s_barrier\n v_xor_b32 v2, 0x100, v1\n"
             "ds_read_b32 v3, v2\n",
     128},
    {"lds_barrier_no_wait", FaultKind::LdsRace,
     begin + "ds_write_b32 v1, v1\n s_barrier\n v_xor_b32 v2, 0x100, v1\n ds_read_b32 v3, v2\n",
     128},
    {"lds_overwritten_before_read", FaultKind::LdsRace,
     begin + "ds_write_b32 v1, v1\n s_waitcnt lgkmcnt(0)\n s_barrier\n v_xor_b32 v2, 0x100, v1\n"
             "ds_read_b32 v3, v2\n s_waitcnt lgkmcnt(0)\n ds_write_b32 v1, v3\n",
     128},

    {"global_bounds", FaultKind::OutOfBounds,
     begin + "v_add_u32 v3, 0x300, v1\n global_load_dword v2, v3, s[6:7] offset:4\n"},
    {"global_in_bounds",
     {},
     begin + "v_add_u32 v3, 0x300, v1\n global_load_dword v2, v3, s[6:7]\n"},
    {"global_before", FaultKind::OutOfBounds,
     begin + "global_load_dword v2, v1, s[6:7] offset:-4\n"},
    {"global_null", FaultKind::OutOfBounds,
     "v_mov_b32 v2, 0\n v_mov_b32 v3, 0\n global_load_dword v4, v[2:3], off\n"},
    {"global_undefined", FaultKind::UndefinedMemory, begin + "global_load_dword v2, v1, s[4:5]\n"},
    {"global_misaligned", FaultKind::Misaligned,
     begin + "global_atomic_add v1, v1, s[6:7] offset:2\n"},
    {"kernarg_bounds", FaultKind::OutOfBounds, "s_load_dwordx2 s[4:5], s[0:1], 0xc\n"},

    {"endless", FaultKind::Budget, "L1: s_branch L1\n"},
    {"barrier_missed", FaultKind::Barrier, begin + wave_0("s_barrier\n", "B"), 128},
    {"jump_nowhere", FaultKind::BadJump,
     "s_getpc_b64 s[4:5]\n s_add_u32 s4, s4, 2\n s_setpc_b64 s[4:5]\n"},
    {"trapped", FaultKind::Trap, "s_trap 2\n"},
    {"not_known", FaultKind::UnknownInstruction, "s_getreg_b32 s4, hwreg(HW_REG_TRAPSTS)\n"},
    {"not_code", FaultKind::UnknownInstruction, ".long 0xffffffff\n"},
};

}  // namespace

TEST_CASE("checks find what is wrong, and nothing else") {
  if (!can_assemble()) ATTN_SKIP("no llvm-mc and ld.lld");
  std::vector<Source> sources;
  for (const Case& c : cases) sources.push_back({c.name, c.body, ""});
  static const auto file = assemble(sources);  // the test starts again for each section
  for (const Case& c : cases) {
    for (const uint64_t seed : {0, 1, 2}) {
      DYNAMIC_SECTION(c.name << ", seed " << seed) {
        Memory memory;
        std::string error;
        const auto object = CodeObject::load(file, &memory, &error);
        INFO(error);
        REQUIRE(object);
        const uint64_t args[] = {memory.allocate(1024, "out"), memory.allocate(1024, "in")};
        memory.fill(args[1], 0, 1024);
        const Report report =
            launch(memory, *object->kernel(c.name), {1}, {c.block}, std::as_bytes(std::span(args)),
                   0, {.seed = seed, .instruction_budget = 1000});
        INFO(faults_of(report));
        REQUIRE(report.ok() == !c.expected);
        if (!c.expected) continue;
        const Fault& f = report.faults.back();
        CHECK(fault_name(f.kind) == std::string(fault_name(*c.expected)));
        CHECK(f.kernel == c.name);
        CHECK(!f.where.instruction.empty());
        const bool names_earlier = f.kind == FaultKind::MissingWaitStates ||
                                   f.kind == FaultKind::MissingWaitcnt ||
                                   f.kind == FaultKind::LdsRace;
        CHECK(f.has_earlier == names_earlier);
      }
    }
  }
}

TEST_CASE("loads that are repeated after page faults find their operands again") {
  if (!can_assemble()) ATTN_SKIP("no llvm-mc and ld.lld");
  const std::vector<std::pair<std::string, bool>> bodies = {
      {"s_load_dwordx2 s[0:1], s[0:1], 0x4\n", false},
      {"s_load_dwordx2 s[0:1], s[0:1], 0x8\n", true},  // not in two parts
      {"s_load_dword s0, s[0:1], 0x0\n", true},        // it has written nothing before
      {"s_load_dwordx2 s[4:5], s[0:1], 0x0\n s_load_dwordx2 s[0:1], s[2:3], 0x0\n", false},
      {begin + "v_mov_b32 v3, v1\n global_load_dword v2, v1, s[6:7]\n"
               "global_load_dword v1, v3, s[6:7]\n",
       false},
      {begin + "v_mov_b32 v3, v1\n global_load_dword v2, v1, s[6:7]\n s_nop 0\n"
               "global_load_dword v1, v3, s[6:7]\n",
       true},
      {begin + "global_load_dword v1, v1, s[6:7]\n", true},
  };
  for (const char* setting : {"", ":xnack+", ":xnack-"}) {
    for (const auto& [body, good] : bodies) {
      INFO(setting << " " << body);
      // The second scalar load's address is of no use otherwise.
      std::string code = body;
      if (const size_t at = code.find("s[2:3]"); at != code.npos) {
        code = "s_mov_b64 s[2:3], s[0:1]\n" + code;
      }
      const auto file = assemble({{"k", code, ""}}, setting);
      Memory memory;
      std::string error;
      const auto object = CodeObject::load(file, &memory, &error);
      INFO(error);
      REQUIRE(object);
      const uint64_t args[] = {memory.allocate(1024, "out"), memory.allocate(1024, "in")};
      memory.fill(args[1], 0, 1024);
      for (const Level level : {Level::Strict, Level::Isa}) {
        const Report report = launch(memory, object->kernels()[0], {1}, {64},
                                     std::as_bytes(std::span(args)), 0, {.level = level});
        INFO(faults_of(report));
        const bool asked = level == Level::Strict && setting != std::string(":xnack-");
        CHECK(report.ok() == (good || !asked));
        if (!report.ok()) CHECK(report.faults[0].kind == FaultKind::Replay);
      }
    }
  }
}

TEST_CASE("the other half of a register that a load writes half of, with ECC and without") {
  if (!can_assemble()) ATTN_SKIP("no llvm-mc and ld.lld");
  const std::string loads =
      begin +
      "v_mov_b32 v2, 0x12345678\n v_mov_b32 v3, v2\n s_nop 0\n"
      "global_load_short_d16 v2, v1, s[6:7]\n s_nop 0\n "
      "global_load_sbyte_d16_hi v3, v1, s[6:7] offset:1\n v_mov_b32 v4, 0x9abcdef0\n"
      "ds_write_b32 v1, v1\n ds_read_i8_d16 v4, v1\n s_waitcnt vmcnt(0) lgkmcnt(0)\n";
  const std::string stores =
      "global_store_dword v1, v2, s[4:5]\n global_store_dword v1, v3, s[4:5] offset:256\n"
      "global_store_dword v1, v4, s[4:5] offset:512\n";
  const std::string halves =
      "global_store_short v1, v2, s[4:5]\n global_store_short_d16_hi v1, v3, s[4:5] offset:256\n"
      "global_store_short v1, v4, s[4:5] offset:512\n";
  for (const char* setting : {"", ":sramecc+", ":sramecc-"}) {
    const auto file =
        assemble({{"whole", loads + stores, ""}, {"half", loads + halves, ""}}, setting);
    Memory memory;
    std::string error;
    const auto object = CodeObject::load(file, &memory, &error);
    INFO(setting << " " << error);
    REQUIRE(object);
    const uint64_t args[] = {memory.allocate(1024, "out"), memory.allocate(1024, "in")};
    std::vector<uint32_t> in(256, 0xabcd89ef), out(256);
    memory.write(args[1], std::as_bytes(std::span(in)));
    const auto run = [&](const char* name, bool checks) {
      memory.fill(args[0], 0, 1024);
      const Report report = launch(memory, *object->kernel(name), {1}, {64},
                                   std::as_bytes(std::span(args)), 0, {.checks = checks});
      INFO(faults_of(report));
      memory.read(args[0], std::as_writable_bytes(std::span(out)));
      return report.ok();
    };
    const bool kept = setting == std::string(":sramecc-"), any = setting == std::string();
    // Code for both may not look at the other half, which this device clears.
    CHECK(run("whole", true) == !any);
    CHECK(run("half", true));
    CHECK(run("whole", false));
    CHECK(out[3] == (kept ? 0x123489efu : 0x000089efu));
    CHECK(out[64 + 3] == (kept ? 0xff895678u : 0xff890000u));
    CHECK(out[128 + 60] == (kept ? 0x9abcfff0u : 0x0000fff0u));
  }
}

TEST_CASE("freed memory is not for kernels") {
  if (!can_assemble()) ATTN_SKIP("no llvm-mc and ld.lld");
  const auto file = assemble({{"k", begin + "global_load_dword v2, v1, s[6:7]\n", ""}});
  Memory memory;
  std::string error;
  const auto object = CodeObject::load(file, &memory, &error);
  REQUIRE(object);
  const uint64_t args[] = {memory.allocate(1024), memory.allocate(1024)};
  memory.fill(args[1], 0, 1024);
  CHECK(
      launch(memory, object->kernels()[0], {1}, {64}, std::as_bytes(std::span(args)), 0, {}).ok());
  CHECK(memory.free(args[1]).empty());
  const Report report =
      launch(memory, object->kernels()[0], {1}, {64}, std::as_bytes(std::span(args)), 0, {});
  REQUIRE(report.faults.size() == 1);
  CHECK(report.faults[0].kind == FaultKind::UseAfterFree);
  CHECK(memory.free(args[1]) != "");
  CHECK(memory.free(12345) != "");
}

TEST_CASE("what no argument declares is undefined, in the padding of the kernarg segment too") {
  if (!can_generate()) ATTN_SKIP("no LLVM or no Python");
  const auto run = [](const std::string& arguments, const std::string& body) {
    std::string error;
    const auto file = generate("//# kernel k workgroup=64\n//# ptr p\n" + arguments +
                                   ".globl k\n.p2align 8\n.type k, @function\nk:\n" + body +
                                   "s_waitcnt lgkmcnt(0)\ns_add_u32 s2, s7, 1\ns_endpgm\n",
                               &error);
    Memory memory;
    const auto object = CodeObject::load(file, &memory, &error);
    INFO(error);
    REQUIRE(object);
    CHECK(object->kernels()[0].kernarg_bytes == 16);
    const uint64_t args[2] = {};
    return launch(memory, object->kernels()[0], {1}, {64}, std::as_bytes(std::span(args)), 0, {});
  };
  const std::string n = "//# i32 n\n", m = "//# i32 m\n";
  for (const char* load : {"s_load_dword s7, s[0:1], 12\n", "s_load_dwordx4 s[4:7], s[0:1], 0\n"}) {
    INFO(load);
    const Report report = run(n, load);
    REQUIRE(report.faults.size() == 1);
    CHECK(report.faults[0].kind == FaultKind::UndefinedRegister);
    CHECK(run(n + m, load).ok());
  }
  // Taken along and not used.
  CHECK(run(n, "s_load_dwordx4 s[4:7], s[0:1], 0\ns_waitcnt lgkmcnt(0)\ns_mov_b32 s7, s6\n").ok());
}

TEST_CASE("a launch that cannot be is refused") {
  if (!can_assemble()) ATTN_SKIP("no llvm-mc and ld.lld");
  const auto file = assemble({{"k", "", ""}});
  Memory memory;
  std::string error;
  const auto object = CodeObject::load(file, &memory, &error);
  REQUIRE(object);
  const Kernel& k = object->kernels()[0];
  const std::byte args[16] = {};
  const auto refused = [&](Dim3 grid, Dim3 block, size_t bytes, uint32_t lds) {
    const Report r = launch(memory, k, grid, block, std::span(args).first(bytes), lds, {});
    return !r.ok() && r.faults[0].kind == FaultKind::BadLaunch && !r.faults[0].message.empty();
  };
  CHECK_FALSE(refused({1}, {64}, 16, 0));
  CHECK(refused({0}, {64}, 16, 0));
  CHECK(refused({1}, {0}, 16, 0));
  CHECK(refused({1}, {1025}, 16, 0));
  CHECK(refused({1}, {64}, 15, 0));
  CHECK(refused({1}, {64}, 16, 65536));
  CHECK_FALSE(refused({1}, {64}, 16, 65536 - 1024));
}
