"""Tests of `amdhsa hazards`: python3 tests/amdhsa/test_hazards.py SOURCE_DIR [unittest options]."""
import json
import unittest

from common import LLVM, Case, skip

if not (LLVM.folder / "llc").exists():
    skip(f"{LLVM.folder} has no llc")
if int(LLVM.version.split(".")[0]) not in (19, 22):
    skip(f"amdhsa hazards has been tried with LLVM 19 and 22, {LLVM.version} is here")

KERNEL = """//# kernel k workgroup=64
.globl k
.p2align 8
.type k, @function
k:
{}
  s_endpgm
"""
MFMA = "v_mfma_f32_32x32x16_fp8_fp8 v[0:15], v[20:21], v[22:23], 0"


class Hazards(Case):
    def hazards(self, body, *options):
        """{instruction: wait states LLVM adds}, [whether each s_nop is needed]."""
        path = self.generate(KERNEL.format("\n".join(body)), *options)
        done = self.amdhsa("hazards", "--s-nops", "--json", path)
        found = json.loads(done.stdout)["kernels"][0]
        self.assertEqual(done.returncode, int(bool(found["missing"])))
        text = self.amdhsa("hazards", path).stdout
        self.assertEqual("kernel k: ok" in text, not found["missing"])
        return ({row["instruction"]: row["wait_states"] for row in found["missing"]},
                [row["needed"] for row in found["s_nops"]])

    def test_missing(self):
        read = "v_mov_b32_e32 v30, v1"
        self.assertEqual(self.hazards([MFMA, read]), ({read: 11}, []))
        self.assertEqual(self.hazards([MFMA, "s_nop 9", read]), ({read: 1}, [True]))
        self.assertEqual(self.hazards([MFMA, "s_nop 10", read]), ({}, [True]))

    def test_gfx950_waits_longer(self):
        if not LLVM.knows("gfx950"):
            self.skipTest(f"LLVM {LLVM.version} does not know gfx950")
        read = "v_mov_b32_e32 v30, v1"
        self.assertEqual(self.hazards([MFMA, "s_nop 10", read], "-mcpu", "gfx950"), ({read: 1}, [True]))
        self.assertEqual(self.hazards([MFMA, "s_nop 11", read], "-mcpu", "gfx950"), ({}, [True]))

    def test_not_needed(self):
        self.assertEqual(self.hazards(["v_exp_f32_e32 v0, v1", "s_nop 0", "v_exp_f32_e32 v2, v0", "s_nop 0",
                                       "v_mul_f32_e32 v3, v2, v2"]), ({}, [False, True]))

    def test_over_branches(self):
        # The s_nop stands where a branch leads.
        body = ["loop:", "v_readfirstlane_b32 s4, v0", "s_cmp_eq_u32 s4, 0", "s_cbranch_scc0 out",
                "v_add_u32_e32 v0, 1, v0", "s_branch loop", "out:", "s_nop 3", "v_mov_b32_e32 v1, s4"]
        self.assertEqual(self.hazards(body), ({}, [False]))
        # Round the loop: one wait state of the four.
        body = ["s_mov_b32 s2, 0", "loop:", "v_readlane_b32 s4, v0, s3", "v_add_u32_e32 v1, 1, v1",
                "s_cmp_eq_u32 s2, 0", "v_readfirstlane_b32 s3, v1", "s_cbranch_scc1 loop"]
        self.assertEqual(self.hazards(body), ({"v_readlane_b32 s4, v0, s3": 3}, []))

    def test_over_calls(self):
        # Into a function and out of it; the call and the return are a wait state each.
        read, other = "v_mov_b32_e32 v30, v1", "v_mov_b32_e32 v31, v1"
        body = [MFMA, "s_call_b64 s[6:7], function", other, "s_endpgm", "function:", read, "s_setpc_b64 s[6:7]"]
        self.assertEqual(self.hazards(body), ({read: 10, other: 8}, []))
        body = ["s_call_b64 s[6:7], function", other, "s_endpgm", "function:", MFMA, "s_setpc_b64 s[6:7]"]
        self.assertEqual(self.hazards(body), ({other: 10}, []))
        # To each of several calls.
        body = ["s_call_b64 s[6:7], function", "s_nop 9", read, "s_call_b64 s[6:7], function", other, "s_endpgm",
                "function:", MFMA, "s_setpc_b64 s[6:7]"]
        self.assertEqual(self.hazards(body), ({other: 10}, [True]))

    def test_many_instructions(self):
        """What kernels hold is understood."""
        code = """
            v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7] op_sel_hi:[1,0,1]
            v_cvt_pk_fp8_f32 v8, v2, v3
            v_perm_b32 v1, v2, v3, s4
            v_max3_f32 v9, v2, v3, v4
            v_cvt_pk_fp8_f32 v8, v4, v5 op_sel:[0,0,1]
            buffer_load_dwordx4 v[12:15], v10, s[4:7], s8 offen offset:16
            ds_read_b128 v[16:19], v10 offset:16
            ds_bpermute_b32 v1, v2, v3
            ds_swizzle_b32 v1, v2 offset:4
            ds_write2_b64 v1, v[4:5], v[6:7]
            s_mov_b32 m0, s9
            s_nop 0
            buffer_load_dword v10, s[4:7], s8 offen lds
            v_addc_co_u32_e32 v3, vcc, v4, v5, vcc
            v_add_co_u32_e64 v3, s[4:5], v4, v5
            v_mov_b32_sdwa v1, v2 dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE src0_sel:WORD_1
            s_bitset0_b64 s[4:5], s6
            s_and_saveexec_b64 s[6:7], vcc
            global_store_dwordx4 v[4:5], v[12:15], off
            global_load_dword v0, v4, s[4:5]
            global_atomic_add v2, v[4:5], v1, off sc0
            s_setprio 1
            s_setreg_imm32_b32 hwreg(HW_REG_MODE,23,1),1
            s_waitcnt vmcnt(3) lgkmcnt(0)
            s_barrier"""
        # The last of three memory instructions would be repeated together with the load.
        self.assertEqual(self.hazards(code.splitlines()),
                         ({"global_load_dword v0, v4, s[4:5]": 1, "global_atomic_add v2, v[4:5], v1, off sc0": 1},
                          [True]))

    def test_replays(self):
        """What XNACK needs, as the code object says."""
        body = ["global_load_dword v0, v4, s[4:5]", "global_load_dword v4, v5, s[4:5]"]
        self.assertEqual(self.hazards(body), ({body[1]: 1}, []))
        path = self.generate(KERNEL.format("\n".join(body)))
        data = bytearray(path.read_bytes())
        data[49] = data[49] & ~3 | 2  # of e_flags: xnack off
        path.write_bytes(data)
        self.assertEqual(self.amdhsa("hazards", path).returncode, 0)


if __name__ == "__main__":
    unittest.main()
