// What instructions compute, lane by lane, for those that the compiled kernels do not reach.
#include <bit>
#include <cmath>
#include <functional>
#include <random>

#include "gfx9/assemble.h"

using namespace gfx9emu;
using namespace gfx9emu::test;

namespace {

// 64 lanes of v3, v4, v5 as the kernel gets them.
struct In {
  uint32_t a[64], b[64], c[64];
};
using Expected = std::function<uint32_t(const In&, int lane)>;
struct Case {
  std::string name;
  std::string body;  // leaves its result in v2
  Expected expected;
  std::string directives;
};

const std::string begin =
    "s_load_dwordx4 s[4:7], s[0:1], 0x0\n v_and_b32 v0, 0x3ff, v0\n v_lshlrev_b32 v1, 2, v0\n"
    "s_waitcnt lgkmcnt(0)\n global_load_dword v3, v1, s[6:7]\n"
    "global_load_dword v4, v1, s[6:7] offset:256\n global_load_dword v5, v1, s[6:7] offset:512\n"
    "v_mov_b32 v2, -1\n s_waitcnt vmcnt(0)\n s_nop 4\n";
const std::string end = "s_nop 7\n s_waitcnt lgkmcnt(0)\n global_store_dword v1, v2, s[4:5]\n";

float f(uint32_t x) {
  return std::bit_cast<float>(x);
}
uint32_t u(float x) {
  return std::bit_cast<uint32_t>(x);
}
int32_t s(uint32_t x) {
  return static_cast<int32_t>(x);
}

// The value of an FP8 or BF8 code in the FNUZ encoding, from its definition.
double fnuz(uint32_t code, int mantissa, int bias) {
  if ((code & 0xff) == 0x80) return NAN;
  const int exponent = code >> mantissa & ((1 << (7 - mantissa)) - 1);
  const double fraction = (code & ((1 << mantissa) - 1)) / std::ldexp(1.0, mantissa);
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1.0 + fraction, exponent - bias);
  return code & 0x80 ? -magnitude : magnitude;
}
// The nearest code by trying all, ties to the even one.
uint32_t nearest_fnuz(float x, int mantissa, int bias, bool saturate) {
  const double largest = fnuz(0x7f, mantissa, bias);
  const double step = largest - fnuz(0x7e, mantissa, bias);
  if (std::isnan(x)) return 0x80;
  // At the midpoint beyond the largest, the even neighbour is the one that does not exist.
  if (std::fabs(x) >= largest + step / 2) return saturate ? (x < 0 ? 0xff : 0x7f) : 0x80;
  uint32_t best = 0;
  for (uint32_t code = 0; code < 0x80; ++code) {
    const double now = std::fabs(fnuz(code, mantissa, bias) - std::fabs(x));
    const double then = std::fabs(fnuz(best, mantissa, bias) - std::fabs(x));
    if (now < then || (now == then && (code & 1) == 0)) best = code;
  }
  return best == 0 ? 0 : best | (x < 0 ? 0x80 : 0);
}
double half(uint32_t h) {
  const int exponent = h >> 10 & 31;
  const double fraction = (h & 1023) / 1024.0;
  const double magnitude = exponent == 0    ? std::ldexp(fraction, -14)
                           : exponent == 31 ? (fraction == 0 ? INFINITY : NAN)
                                            : std::ldexp(1 + fraction, exponent - 15);
  return h & 0x8000 ? -magnitude : magnitude;
}

Expected cvt_pk(int mantissa, int bias, bool saturate) {
  return [=](const In& in, int l) {
    return 0xffff0000 | nearest_fnuz(f(in.a[l]), mantissa, bias, saturate) |
           nearest_fnuz(f(in.b[l]), mantissa, bias, saturate) << 8;
  };
}

const std::string ovfl = ".amdhsa_fp16_overflow 1\n";
const std::string flush = ".amdhsa_float_denorm_mode_32 0\n";

// Bits of a float result are compared as they are, NaN too where the test says so.
const std::vector<Case> cases = {
    // DPP
    {"quad_perm", "v_mov_b32_dpp v2, v3 quad_perm:[3,0,2,1] row_mask:0xf bank_mask:0xf\n",
     [](const In& in, int l) { return in.a[(l & ~3) + std::array{3, 0, 2, 1}[l & 3]]; }, ""},
    {"row_shr_keeps", "v_mov_b32_dpp v2, v3 row_shr:3 row_mask:0xf bank_mask:0xf\n",
     [](const In& in, int l) { return l % 16 < 3 ? ~0u : in.a[l - 3]; }, ""},
    {"row_shl_zero", "v_mov_b32_dpp v2, v3 row_shl:5 row_mask:0xf bank_mask:0xf bound_ctrl:0\n",
     [](const In& in, int l) { return l % 16 > 10 ? 0 : in.a[l + 5]; }, ""},
    {"row_ror", "v_add_u32_dpp v2, v3, v4 row_ror:4 row_mask:0xf bank_mask:0xf\n",
     [](const In& in, int l) { return in.a[(l & ~15) + (l + 12) % 16] + in.b[l]; }, ""},
    {"row_mirror", "v_mov_b32_dpp v2, v3 row_mirror row_mask:0xf bank_mask:0xf\n",
     [](const In& in, int l) { return in.a[l ^ 15]; }, ""},
    {"row_half_mirror", "v_mov_b32_dpp v2, v3 row_half_mirror row_mask:0xf bank_mask:0xf\n",
     [](const In& in, int l) { return in.a[l ^ 7]; }, ""},
    {"row_bcast15", "v_mov_b32_dpp v2, v3 row_bcast:15 row_mask:0xa bank_mask:0xf\n",
     [](const In& in, int l) { return l / 16 % 2 == 0 ? ~0u : in.a[(l & ~15) - 1]; }, ""},
    {"row_bcast31", "v_mov_b32_dpp v2, v3 row_bcast:31 row_mask:0xc bank_mask:0xf\n",
     [](const In& in, int l) { return l < 32 ? ~0u : in.a[31]; }, ""},
    {"row_newbcast", "v_mov_b32_dpp v2, v3 row_newbcast:6 row_mask:0xf bank_mask:0xf\n",
     [](const In& in, int l) { return in.a[(l & ~15) + 6]; }, ""},
    {"bank_mask", "v_mov_b32_dpp v2, v3 quad_perm:[0,1,2,3] row_mask:0xf bank_mask:0x5\n",
     [](const In& in, int l) { return l / 4 % 2 == 0 ? in.a[l] : ~0u; }, ""},

    // SDWA
    {"sdwa_bytes",
     "v_add_u32_sdwa v2, v3, sext(v4) dst_sel:DWORD src0_sel:BYTE_1 src1_sel:BYTE_3\n",
     [](const In& in, int l) {
       return (in.a[l] >> 8 & 255) + static_cast<uint32_t>(static_cast<int8_t>(in.b[l] >> 24));
     },
     ""},
    {"sdwa_preserve",
     "v_mov_b32 v2, v5\n s_nop 1\n v_or_b32_sdwa v2, v3, v4 dst_sel:BYTE_2 "
     "dst_unused:UNUSED_PRESERVE src0_sel:WORD_1 src1_sel:DWORD\n",
     [](const In& in, int l) {
       return (in.c[l] & 0xff00ffff) | (((in.a[l] >> 16) | in.b[l]) & 255) << 16;
     },
     ""},
    {"sdwa_pad", "v_and_b32_sdwa v2, v3, v4 dst_sel:WORD_1 dst_unused:UNUSED_PAD\n",
     [](const In& in, int l) { return (in.a[l] & in.b[l]) << 16; }, ""},

    // Between lanes
    {"swizzle_xor", "ds_swizzle_b32 v2, v3 offset:0x241f\n",
     [](const In& in, int l) { return in.a[l ^ 9]; }, ""},
    {"swizzle_quad", "ds_swizzle_b32 v2, v3 offset:swizzle(QUAD_PERM,1,1,3,0)\n",
     [](const In& in, int l) { return in.a[(l & ~3) + std::array{1, 1, 3, 0}[l & 3]]; }, ""},
    {"bpermute", "v_mul_u32_u24 v6, 28, v0\n ds_bpermute_b32 v2, v6, v3 offset:4\n",
     [](const In& in, int l) { return in.a[(7 * l + 1) % 64]; }, ""},
    {"permute", "v_mul_u32_u24 v6, 28, v0\n ds_permute_b32 v2, v6, v3\n",
     [](const In& in, int l) { return in.a[(55 * l) % 64]; }, ""},  // 7 * 55 = 1 mod 64
    {"readlane",
     "s_mov_b32 s8, 77\n v_readlane_b32 s9, v3, s8\n v_readlane_b32 s10, v3, 5\n"
     "s_add_u32 s9, s9, s10\n v_mov_b32 v2, s9\n",
     [](const In& in, int) { return in.a[13] + in.a[5]; }, ""},
    {"writelane", "v_mov_b32 v2, v3\n v_writelane_b32 v2, 9, 17\n",
     [](const In& in, int l) { return l == 17 ? 9 : in.a[l]; }, ""},
    {"mbcnt", "v_mbcnt_lo_u32_b32 v2, -1, 5\n v_mbcnt_hi_u32_b32 v2, -1, v2\n",
     [](const In&, int l) { return 5u + static_cast<uint32_t>(l); }, ""},

    // Bits
    {"perm", "v_mov_b32 v6, 0x0c070104\n v_perm_b32 v2, v3, v4, v6\n",
     [](const In& in, int l) {
       return (in.a[l] & 255) | (in.b[l] >> 8 & 255) << 8 | (in.a[l] >> 24) << 16;
     },
     ""},
    {"alignbit", "v_alignbit_b32 v2, v3, v4, 12\n",
     [](const In& in, int l) { return in.a[l] << 20 | in.b[l] >> 12; }, ""},
    {"alignbyte", "v_alignbyte_b32 v2, v3, v4, 3\n",
     [](const In& in, int l) { return in.a[l] << 8 | in.b[l] >> 24; }, ""},
    {"bfe", "v_bfe_i32 v2, v3, 5, 7\n",
     [](const In& in, int l) { return static_cast<uint32_t>(s(in.a[l] << 20) >> 25); }, ""},
    {"bfi", "v_bfi_b32 v2, v3, v4, v5\n",
     [](const In& in, int l) { return (in.a[l] & in.b[l]) | (~in.a[l] & in.c[l]); }, ""},
    {"mad_64",
     "v_mov_b32 v7, 1\n v_mov_b32 v6, v5\n v_mad_u64_u32 v[8:9], vcc, v3, v4, v[6:7]\n"
     "v_mov_b32 v2, v9\n",
     [](const In& in, int l) {
       return static_cast<uint32_t>((uint64_t{in.a[l]} * in.b[l] + in.c[l] + (1ull << 32)) >> 32);
     },
     ""},
    {"carry", "v_add_co_u32 v6, vcc, v3, v4\n v_addc_co_u32 v2, vcc, 0, v5, vcc\n",
     [](const In& in, int l) { return in.c[l] + (in.a[l] + in.b[l] < in.a[l] ? 1 : 0); }, ""},
    {"saturate", "v_add_u32_e64 v2, v3, v4 clamp\n",
     [](const In& in, int l) {
       const uint64_t sum = uint64_t{in.a[l]} + in.b[l];
       return sum >> 32 ? ~0u : static_cast<uint32_t>(sum);
     },
     ""},
    {"mul_24", "v_mad_i32_i24 v2, v3, v4, v5\n",
     [](const In& in, int l) {
       const int64_t p = int64_t{s(in.a[l] << 8) >> 8} * (s(in.b[l] << 8) >> 8);
       return static_cast<uint32_t>(p) + in.c[l];
     },
     ""},

    // Floating point
    {"modifiers", "v_fma_f32 v2, -v3, |v4|, -|v5|\n",
     [](const In& in, int l) {
       return u(std::fma(-f(in.a[l]), std::fabs(f(in.b[l])), -std::fabs(f(in.c[l]))));
     },
     ""},
    {"clamp", "v_mul_f32_e64 v2, v3, v4 clamp\n",
     [](const In& in, int l) {
       const float x = f(in.a[l]) * f(in.b[l]);
       return u(x > 1 ? 1.0f : x > 0 ? x : 0.0f);
     },
     ""},
    {"omod", "v_add_f32_e64 v2, v3, v4 div:2\n",
     [](const In& in, int l) { return u((f(in.a[l]) + f(in.b[l])) * 0.5f); }, flush},
    {"med3", "v_med3_f32 v2, v3, v4, v5\n",
     [](const In& in, int l) {
       float x[] = {f(in.a[l]), f(in.b[l]), f(in.c[l])};
       std::sort(x, x + 3);
       return u(x[1]);
     },
     ""},
    {"subnormal_kept", "v_mov_b32 v6, 0x00400000\n v_mul_f32 v2, 1.0, v6\n",
     [](const In&, int) { return 0x00400000u; }, ""},
    {"subnormal_flushed", "v_mov_b32 v6, 0x80400000\n v_mul_f32 v2, 1.0, v6\n",
     [](const In&, int) { return 0x80000000u; }, flush},
    {"subnormal_moved", "v_mov_b32 v6, 0x00400000\n v_max_f32 v7, v6, v6\n v_mov_b32 v2, v6\n",
     [](const In&, int) { return 0x00400000u; }, flush},
    {"result_flushed", "v_mov_b32 v6, 0x00800000\n v_mul_f32 v2, 0.5, v6\n",
     [](const In&, int) { return 0u; }, flush},
    {"mode_written",
     "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 3\n v_mov_b32 v6, 0x00800000\n"
     "v_mul_f32 v2, 0.5, v6\n",
     [](const In&, int) { return 0x00400000u; }, flush},
    {"round_to_zero",
     "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), 3\n v_mov_b32 v6, 0x3f800001\n"
     "v_mul_f32 v2, v6, v6\n",
     [](const In&, int) { return 0x3f800002u; }, ""},
    {"packed",
     "v_mov_b32 v6, v3\n v_mov_b32 v7, v4\n v_mov_b32 v8, v5\n v_mov_b32 v9, v3\n"
     "v_pk_fma_f32 v[10:11], v[6:7], v[8:9], v[8:9] op_sel:[1,0,0] op_sel_hi:[0,0,1] "
     "neg_lo:[0,1,0] neg_hi:[0,0,1]\n v_sub_f32 v2, v10, v11\n",
     [](const In& in, int l) {
       const float a = f(in.a[l]), b = f(in.b[l]), c = f(in.c[l]);
       return u(std::fma(b, -c, c) - std::fma(a, c, -a));
     },
     ""},
    {"exp2", "v_mov_b32 v6, 0x40600000\n v_exp_f32 v2, v6\n",
     [](const In&, int) { return u(static_cast<float>(std::exp2(3.5))); }, ""},
    {"log2", "v_and_b32 v6, 0x7fffffff, v3\n v_log_f32 v2, v6\n",
     [](const In& in, int l) {
       return u(static_cast<float>(std::log2(std::fabs(double{f(in.a[l])}))));
     },
     ""},
    {"exp_underflow", "v_mov_b32 v6, 0xc3000000\n v_exp_f32 v2, v6\n",
     [](const In&, int) { return 0u; }, ""},
    {"mix", "v_fma_mix_f32 v2, v3, v4, v5 op_sel:[1,0,0] op_sel_hi:[1,0,0]\n",
     [](const In& in, int l) {
       return u(std::fma(static_cast<float>(half(in.a[l] >> 16)), f(in.b[l]), f(in.c[l])));
     },
     ""},
    // Of f32 where op_sel_hi does not say f16, constants too.
    {"mix_f32", "v_fma_mix_f32 v2, v3, 2.0, v5\n",
     [](const In& in, int l) { return u(std::fma(f(in.a[l]), 2.0f, f(in.c[l]))); }, ""},
    {"mixlo_constant", "v_mov_b32 v6, 0\n v_fma_mixlo_f16 v2, v6, v6, 4.0 op_sel_hi:[1,1,0]\n",
     [](const In&, int) { return 0xffff4400u; }, ""},
    {"dot2_constant", "v_mov_b32 v6, 0\n v_dot2_f32_f16 v2, v6, v6, 0.5\n",
     [](const In&, int) { return 0x3f000000u; }, ""},
    {"dot2_signs",
     "v_mov_b32 v6, 0x40003c00\n v_mov_b32 v7, 0x44003800\n"
     "v_dot2_f32_f16 v2, v6, v7, 0 neg_lo:[1,0,0]\n",
     [](const In&, int) { return u(-1.0f * 0.5f + 2.0f * 4.0f); }, ""},

    // FP8 and BF8
    {"to_fp8", "v_cvt_pk_fp8_f32 v2, v3, v4\n", cvt_pk(3, 8, false), ""},
    {"to_fp8_saturated", "v_cvt_pk_fp8_f32 v2, v3, v4\n", cvt_pk(3, 8, true), ovfl},
    {"to_bf8", "v_cvt_pk_bf8_f32 v2, v3, v4\n", cvt_pk(2, 16, false), ""},
    {"to_bf8_saturated", "v_cvt_pk_bf8_f32 v2, v3, v4\n", cvt_pk(2, 16, true), ovfl},
    {"to_fp8_high", "v_cvt_pk_fp8_f32 v2, -v3, |v4| op_sel:[0,0,1]\n",
     [](const In& in, int l) {
       return 0xffff | nearest_fnuz(-f(in.a[l]), 3, 8, false) << 16 |
              nearest_fnuz(std::fabs(f(in.b[l])), 3, 8, false) << 24;
     },
     ""},
    {"to_fp8_stochastic", "v_mov_b32 v6, 0\n v_cvt_sr_fp8_f32 v2, v3, v6 op_sel:[0,0,0,1]\n",
     [](const In& in, int l) {
       // With a seed of 0 it truncates.
       const float x = f(in.a[l]);
       uint32_t best = 0;
       for (uint32_t code = 0; code < 0x80; ++code) {
         if (fnuz(code, 3, 8) <= std::fabs(x)) best = code;
       }
       if (std::fabs(x) >= 256) return 0xff80ffffu;
       return 0xff00ffff | (best == 0 ? 0 : best | (x < 0 ? 0x80 : 0)) << 16;
     },
     ""},
    {"from_fp8", "v_cvt_f32_fp8_sdwa v2, v3 src0_sel:BYTE_2\n",
     [](const In& in, int l) {
       const uint32_t code = in.a[l] >> 16 & 255;
       return code == 0x80 ? 0x7fc00000 : u(static_cast<float>(fnuz(code, 3, 8)));
     },
     ""},
    {"from_bf8_pair", "v_cvt_pk_f32_bf8_sdwa v[6:7], v3 src0_sel:WORD_1\n v_mov_b32 v2, v7\n",
     [](const In& in, int l) {
       const uint32_t code = in.a[l] >> 24;
       return code == 0x80 ? 0x7fc00000 : u(static_cast<float>(fnuz(code, 2, 16)));
     },
     ""},

    // Scalar
    {"saveexec",
     "v_cmp_gt_u32 vcc, 20, v0\n s_and_saveexec_b64 s[8:9], vcc\n v_mov_b32 v2, 7\n"
     "s_mov_b64 exec, s[8:9]\n",
     [](const In&, int l) { return l < 20 ? 7 : ~0u; }, ""},
    {"cmpx", "v_cmpx_lt_f32 exec, v3, v4\n v_mov_b32 v2, 7\n s_mov_b64 exec, -1\n",
     [](const In& in, int l) { return f(in.a[l]) < f(in.b[l]) ? 7 : ~0u; }, ""},
    {"gpr_index_source",
     "v_mov_b32 v6, 7\n v_mov_b32 v7, v3\n s_mov_b32 s8, 0x104\n"
     "s_set_gpr_idx_on s8, gpr_idx(SRC0)\n v_add_u32 v2, v3, v3\n s_set_gpr_idx_off\n"
     "v_add_u32 v2, v2, v6\n",
     [](const In& in, int l) { return 2 * in.a[l] + 7; }, ""},
    {"gpr_index_destination",
     "v_mov_b32 v6, 7\n s_set_gpr_idx_on 0, 0\n s_set_gpr_idx_idx 3\n"
     "s_set_gpr_idx_mode gpr_idx(SRC1,DST)\n v_sub_u32 v3, v4, v3\n s_set_gpr_idx_off\n"
     "v_mov_b32 v2, v6\n",
     [](const In& in, int l) { return in.b[l] - 7; }, ""},
    {"scalar_moved",
     "s_mov_b32 s8, 1\n s_mov_b32 s10, 5\n s_mov_b32 s11, 6\n s_mov_b32 m0, 2\n s_nop 0\n"
     "s_movrels_b64 s[12:13], s[8:9]\n s_movreld_b32 s7, s13\n v_mov_b32 v2, s9\n"
     "v_add_u32 v2, s12, v2\n",
     [](const In&, int) { return 11u; }, ""},
    {"call",
     "s_getpc_b64 s[8:9]\n s_add_u32 s8, s8, F1-.\n s_addc_u32 s9, s9, 0\n"
     "s_swappc_b64 s[10:11], s[8:9]\n s_branch E1\n F1: v_mov_b32 v2, 3\n s_setpc_b64 s[10:11]\n"
     "E1: v_add_u32 v2, 1, v2\n",
     [](const In&, int) { return 4u; }, ""},
    {"loop",
     "s_mov_b32 s8, 5\n v_mov_b32 v2, 0\n L9: v_add_u32 v2, v2, v3\n s_sub_u32 s8, s8, 1\n"
     "s_cmp_lg_u32 s8, 0\n s_cbranch_scc1 L9\n",
     [](const In& in, int l) { return 5 * in.a[l]; }, ""},
};

In inputs(uint64_t seed) {
  std::mt19937_64 random(seed);
  In in;
  for (auto* list : {in.a, in.b, in.c}) {
    for (int l = 0; l < 64; ++l) {
      // Floats over the range of FP8 and beyond, both signs; no infinities and NaN.
      const int exponent = static_cast<int>(random() % 34) - 18;
      const double x = std::ldexp(1.0 + static_cast<double>(random() % 4096) / 4096, exponent);
      list[l] = u(static_cast<float>(random() % 2 ? x : -x)) | (seed % 2 ? random() & 0x7ff : 0);
    }
  }
  return in;
}

}  // namespace

TEST_CASE("instructions compute what they should") {
  if (!can_assemble()) ATTN_SKIP("no llvm-mc and ld.lld");
  std::vector<Source> sources;
  for (const Case& c : cases) sources.push_back({c.name, begin + c.body + end, c.directives});
  static const auto file = assemble(sources);  // the test starts again for each section
  Memory memory;
  std::string error;
  const auto object = CodeObject::load(file, &memory, &error);
  INFO(error);
  REQUIRE(object);
  const uint64_t args[] = {memory.allocate(256, "out"), memory.allocate(768, "in")};
  for (const Case& c : cases) {
    DYNAMIC_SECTION(c.name) {
      for (uint64_t seed = 0; seed < 16; ++seed) {
        const In in = inputs(seed);
        memory.write(args[1], std::as_bytes(std::span(&in, 1)));
        const Report report = launch(memory, *object->kernel(c.name), {1}, {64},
                                     std::as_bytes(std::span(args)), 0, {.hazards = false});
        INFO(faults_of(report));
        REQUIRE(report.ok());
        uint32_t out[64], expected[64];
        memory.read(args[0], std::as_writable_bytes(std::span(out)));
        for (int l = 0; l < 64; ++l) expected[l] = c.expected(in, l);
        for (int l = 0; l < 64; ++l) {
          INFO("lane " << l << ": " << std::hex << in.a[l] << " " << in.b[l] << " " << in.c[l]);
          REQUIRE(out[l] == expected[l]);
        }
      }
    }
  }
}
