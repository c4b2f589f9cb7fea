// Pairs of instructions that need wait states between them, by the rows of data/hazards.json.
// Registers as the prologue of test_emulated.cpp leaves them: v252, v253 and s4, s5 (and s10) hold
// an address, s4..s7 a buffer descriptor, all others 0.
#pragma once
#include <string>
#include <vector>

struct Pair {
  std::string row, first, second;
};

// `d` registers of D.
inline std::vector<Pair> mfma_pairs(const std::string& name, int d) {
  const auto range = [](int first, int count) {
    return "v[" + std::to_string(first) + ":" + std::to_string(first + count - 1) + "]";
  };
  const auto mfma = [&](int to, int a, int b, int c) {
    return name + " " + range(to, d) + ", " + range(a, 2) + ", " + range(b, 2) + ", " + range(c, d);
  };
  const std::string first = mfma(0, 200, 204, 64), mov = "v_mov_b32_e32 ";
  return {
      {"same C->C (same D)", mfma(0, 200, 204, 0), mfma(0, 208, 212, 0)},
      {"overlapped C", first, mfma(96, 208, 212, 2)},
      {"D -> A", first, mfma(96, 2, 212, 128)},
      {"D -> VALU read", first, mov + "v250, v1"},
      {"D -> VALU write (WAW)", first, mov + "v1, v250"},
      {"C read -> VALU write (WAR)", first, mov + "v65, v250"},
      {"A read -> VALU write (WAR)", first, mov + "v200, v250"},
      {"D -> ds_write data", first, "ds_write_b32 v250, v1"},
      {"D -> global_store data", first, "global_store_dword v[252:253], v1, off"},
      {"D <- ds_read (WAW)", first, "ds_read_b32 v1, v250"},
      {"VALU write -> A", mov + "v200, v250", first},
      {"VALU write -> C", mov + "v64, v250", first},
      {"cvt_pk -> B", "v_cvt_pk_fp8_f32 v204, v250, v251", first},
      {"ds_read -> A", "ds_read_b32 v200, v250", first},
  };
}

inline const std::vector<Pair> other_pairs = {
    {"exp -> mul", "v_exp_f32_e32 v0, v1", "v_mul_f32_e32 v2, v0, v3"},
    {"exp -> exp", "v_exp_f32_e32 v0, v1", "v_exp_f32_e32 v2, v0"},
    {"exp -> cvt_pk", "v_exp_f32_e32 v0, v1", "v_cvt_pk_fp8_f32 v2, v0, v3"},
    {"cvt_pk lo -> cvt_pk hi same reg", "v_cvt_pk_fp8_f32 v0, v1, v2",
     "v_cvt_pk_fp8_f32 v0, v3, v4 op_sel:[0,0,1]"},
    {"cvt_pk hi -> mov", "v_cvt_pk_fp8_f32 v0, v1, v2 op_sel:[0,0,1]", "v_mov_b32_e32 v3, v0"},
    {"cvt_pk lo -> mov", "v_cvt_pk_fp8_f32 v0, v1, v2", "v_mov_b32_e32 v3, v0"},
    {"valu sgpr -> valu const", "v_readfirstlane_b32 s4, v0", "v_add_f32_e32 v1, s4, v2"},
    {"readfirstlane -> s_add", "v_readfirstlane_b32 s4, v0", "s_add_i32 s5, s4, 1"},
    {"readfirstlane -> vmem saddr", "v_readfirstlane_b32 s4, v252",
     "global_load_dword v1, v2, s[4:5]"},
    {"valu -> readfirstlane", "v_mov_b32_e32 v0, v1", "v_readfirstlane_b32 s4, v0"},
    {"cmp vcc -> cndmask", "v_cmp_gt_f32_e32 vcc, v0, v1", "v_cndmask_b32_e32 v2, v3, v4, vcc"},
    {"global_store x4 -> valu write data", "global_store_dwordx4 v[252:253], v[4:7], off",
     "v_mov_b32_e32 v5, v9"},
    {"dpp after valu", "v_mov_b32_e32 v0, v1",
     "v_mov_b32_dpp v2, v0 row_shl:1 row_mask:0xf bank_mask:0xf"},
    {"s_mov m0 -> buffer_load lds", "s_mov_b32 m0, s8",
     "buffer_load_dword v0, s[4:7], 0 offen lds"},
    {"valu sgpr -> readlane lane select", "v_readfirstlane_b32 s4, v0",
     "v_readlane_b32 s5, v1, s4"},
    {"cvt_pk hi -> mfma B", "v_cvt_pk_fp8_f32 v204, v1, v2 op_sel:[0,0,1]",
     "v_mfma_f32_32x32x16_fp8_fp8 v[0:15], v[200:201], v[204:205], v[0:15]"},
    {"exp -> mfma A", "v_exp_f32_e32 v200, v1",
     "v_mfma_f32_32x32x2_f32 v[0:15], v200, v204, v[0:15]"},
    {"buffer_store x4 (soffset imm) -> valu write data",
     "buffer_store_dwordx4 v[4:7], v0, s[4:7], 0 offen", "v_mov_b32_e32 v5, v9"},
    {"buffer_store x4 (soffset sgpr) -> valu write data",
     "buffer_store_dwordx4 v[4:7], v0, s[4:7], s8 offen", "v_mov_b32_e32 v5, v9"},
    {"ds_write_b128 -> valu write data", "ds_write_b128 v0, v[4:7]", "v_mov_b32_e32 v5, v9"},
    {"accvgpr_write -> mfma C", "v_accvgpr_write_b32 a0, v1",
     "v_mfma_f32_32x32x16_fp8_fp8 a[0:15], v[200:201], v[204:205], a[0:15]"},
    {"mfma D(acc) -> accvgpr_read",
     "v_mfma_f32_32x32x16_fp8_fp8 a[0:15], v[200:201], v[204:205], a[0:15]",
     "v_accvgpr_read_b32 v1, a3"},
    {"VALU writes EXEC -> mfma (from source text/ISA, not run)", "v_cmpx_gt_f32_e32 vcc, v0, v1",
     "v_mfma_f32_32x32x16_fp8_fp8 v[16:31], v[200:201], v[204:205], v[16:31]"},
    // Not in the file: measured the same way, for MFMA outside the matrix unit and of other
    // lengths.
    {"18", "v_mfma_f32_32x32x2_f32 v[0:15], v200, v204, v[64:79]", "v_mov_b32_e32 v250, v1"},
    {"10", "v_mfma_f32_16x16x4_f32 v[0:3], v200, v204, v[64:67]", "v_mov_b32_e32 v250, v1"},
    {"8", "v_mfma_f32_16x16x4_f32 v[0:3], v200, v204, v[64:67]",
     "v_mfma_f32_16x16x4_f32 v[96:99], v200, v204, v[2:5]"},
    {"0", "v_mfma_f32_16x16x4_f32 v[0:3], v200, v204, v[64:67]", "v_mov_b32_e32 v65, v250"},
    {"2", "v_mfma_i32_4x4x4_16b_i8 v[0:3], v200, v204, v[0:3]",
     "v_mfma_i32_4x4x4_16b_i8 v[0:3], v200, v204, v[0:3]"},
    {"5", "v_mfma_i32_4x4x4_16b_i8 v[0:3], v200, v204, v[0:3]", "v_mov_b32_e32 v250, v1"},
    {"1", "v_mfma_i32_4x4x4_16b_i8 v[0:3], v200, v204, v[64:67]", "v_mov_b32_e32 v65, v250"},
    {"19", "v_mfma_f32_32x32x4_2b_f16 v[0:31], v[200:201], v[204:205], v[64:95]",
     "v_mov_b32_e32 v250, v1"},
    {"9", "v_mfma_f32_32x32x16_fp8_fp8 v[0:15], v[200:201], v[204:205], v[64:79]",
     "v_mfma_f32_16x16x32_fp8_fp8 v[96:99], v[200:201], v[204:205], v[0:3]"},
    {"18", "v_mfma_f64_16x16x4_f64 v[0:7], v[200:201], v[204:205], v[64:71]",
     "ds_write_b32 v250, v1"},
    {"11", "v_mfma_f64_16x16x4_f64 v[0:7], v[200:201], v[204:205], v[64:71]",
     "ds_read_b32 v1, v250"},
    {"4", "v_mfma_f64_4x4x4_4b_f64 v[0:1], v[200:201], v[204:205], v[0:1]",
     "v_mfma_f64_4x4x4_4b_f64 v[0:1], v[200:201], v[204:205], v[0:1]"},
    // From the ISA manual.
    {"4", "v_cmp_gt_f32_e32 vcc, v0, v1", "v_div_fmas_f32 v2, v3, v4, v5"},
    {"5", "v_cmpx_gt_f32_e32 vcc, v0, v1",
     "v_mov_b32_dpp v2, v3 row_shl:1 row_mask:0xf bank_mask:0xf"},
    {"4", "v_cmpx_gt_f32_e32 vcc, v0, v1", "v_readfirstlane_b32 s4, v7"},
    {"2", "s_setreg_b32 hwreg(HW_REG_MODE, 0, 4), s8", "s_getreg_b32 s1, hwreg(HW_REG_MODE)"},
    {"0", "s_mov_b32 s4, s5", "v_add_f32_e32 v1, s4, v2"},
    {"0", "s_mov_b32 s4, s10", "global_load_dword v1, v2, s[4:5]"},
};

struct MfmaTable {
  const char *table, *name;
  int d_regs;
};
inline constexpr MfmaTable mfma_tables[] = {{"32x32x16_fp8", "v_mfma_f32_32x32x16_fp8_fp8", 16},
                                            {"16x16x32_fp8", "v_mfma_f32_16x16x32_fp8_fp8", 4},
                                            {"32x32x8_f16", "v_mfma_f32_32x32x8_f16", 16},
                                            {"16x16x16_f16", "v_mfma_f32_16x16x16_f16", 4}};
