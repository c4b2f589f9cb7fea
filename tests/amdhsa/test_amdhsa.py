"""Tests of tools/amdhsa: python3 tests/amdhsa/test_amdhsa.py SOURCE_DIR [unittest options]."""
import json
import os
import random
import re
import struct
import unittest
from unittest import mock

from common import LLVM, Case, Failure, descriptor_place, granules, llvm_tool

from amdhsa import check, code_object, generate, msgpack
from amdhsa.target import TARGETS

HEAD = "//# kernel k workgroup=256{}\n.globl k\n.p2align 8\n.type k, @function\nk:\n"


def kernel(body, options=""):
    """A file of one kernel without arguments."""
    return HEAD.format(options) + body + "\n  s_endpgm\n"


# v0..v147, 32x32 accumulators among them.
WIDE = """
  v_mov_b32 v0, 0
  v_mfma_f32_32x32x16_fp8_fp8 v[132:147], v[4:5], v[6:7], 0
"""
HAND_WRITTEN = """
.globl k
.p2align 8
.type k, @function
k: {body}
  s_endpgm
.rodata
.p2align 6
.amdhsa_kernel k
  .amdhsa_group_segment_fixed_size {lds}
  .amdhsa_next_free_vgpr {vgprs}
  .amdhsa_accum_offset {accum}
  .amdhsa_next_free_sgpr {sgprs}
  .amdhsa_kernarg_size 8
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_tg_split {tg_split}
.end_amdhsa_kernel
.amdgpu_metadata
---
amdhsa.version: [1, 2]
amdhsa.target: amdgcn-amd-amdhsa--gfx942
amdhsa.kernels:
  - .name: k
    .symbol: k.kd
    .args:
      - {{.name: out, .offset: {offset}, .size: 8, .value_kind: global_buffer, .address_space: global}}
    .kernarg_segment_size: 8
    .kernarg_segment_align: 8
    .group_segment_fixed_size: {lds}
    .private_segment_fixed_size: 0
    .max_flat_workgroup_size: {workgroup}
    .wavefront_size: 64
    .sgpr_count: {sgpr_count}
    .vgpr_count: {vgpr_count}
    .agpr_count: {agprs}
...
.end_amdgpu_metadata
"""


class Objects(Case):
    def hand_written(self, body, without=(), **values):
        """A code object whose descriptor and metadata are those given, less the keys `without`."""
        values = {"lds": 0, "vgprs": 8, "accum": 4, "sgprs": 10, "tg_split": 0, "offset": 0,
                  "workgroup": 256, "agprs": 0, **values}
        values.setdefault("vgpr_count", values["vgprs"])
        values.setdefault("sgpr_count", values["sgprs"] + 6)
        text = HAND_WRITTEN.format(body=body, **values)
        text = "".join(line for line in text.splitlines(True) if not line.lstrip(" -").startswith(without))
        source = self.write("hand.s", text)
        LLVM.assemble(source, self.folder / "hand.o", "gfx942")
        LLVM.link([self.folder / "hand.o"], self.folder / "hand.hsaco")
        return self.folder / "hand.hsaco"

    def found(self, path):
        """(errors, warnings) of check, which tells them by its exit code too."""
        done = self.amdhsa("check", path, "--json")
        self.assertIn(done.returncode, (0, 1), done.stderr)
        result, = json.loads(done.stdout)["kernels"]
        self.assertEqual(done.returncode, int(bool(result["errors"])))
        return result["errors"], result["warnings"]

    def patched(self, path, offset, data):
        """A copy of an object with other bytes in the descriptor of k."""
        at = descriptor_place(path, "k") + offset
        content = path.read_bytes()
        copy = self.folder / "patched.hsaco"
        copy.write_bytes(content[:at] + data + content[at + len(data):])
        return copy


class Registers(Objects):
    def counted(self, body, options="", name="k"):
        """(accum_offset, next_free_vgpr, next_free_sgpr) that generate writes."""
        done = self.amdhsa("generate", "--emit-s", self.write("k.s", kernel(body, options)))
        self.assertEqual(done.returncode, 0, done.stderr)
        return tuple(int(re.search(rf"\.amdhsa_{field} (\d+)", done.stdout).group(1))
                     for field in ("accum_offset", "next_free_vgpr", "next_free_sgpr"))

    def test_the_allocation_that_was_too_small(self):
        path = self.hand_written(WIDE, vgprs=48, accum=48)
        errors, _ = self.found(path)
        self.assertEqual(len(errors), 2)
        self.assertIn("accum_offset 48 is too small, 148 is needed", errors[0])
        self.assertIn("v_mfma_f32_32x32x16_fp8_fp8 v[132:147]", errors[0])
        self.assertIn("48 VGPRs are allocated, 148 are needed", errors[1])
        made = self.generate(kernel(WIDE))
        self.assertEqual(self.found(made), ([], []))
        self.assertEqual(granules(made, "k")[::2], (152 // 8 - 1, 148 // 4 - 1))

    def test_agprs_lie_behind_arch_vgprs(self):
        body = "  v_mov_b32 v40, v0\n  v_accvgpr_write_b32 a15, v0\n"
        self.assertEqual(self.counted(body)[:2], (44, 60))
        # LLVM's own symbol, asked for in the same code.
        source = self.write("llvm.s", f"k: {body}.set llvm_says, .amdgcn.next_free_vgpr\n")
        LLVM.assemble(source, self.folder / "llvm.o", "gfx942")
        symbols = llvm_tool("llvm-readelf", "-sW", self.folder / "llvm.o")
        says, = (line.split()[1] for line in symbols.splitlines() if line.endswith("llvm_says"))
        self.assertEqual(int(says, 16), 41)

    def test_widths_are_those_of_the_encoding(self):
        for body, expected in [
                ("", (4, 1, 5)),
                ("v_mov_b32 v7, 0", (8, 8, 5)),
                ("v_mov_b32 v255, 0", (256, 256, 5)),
                ("v_mfma_f32_16x16x32_fp8_fp8 v[8:11], v[4:5], v[6:7], 0", (12, 12, 5)),
                ("v_mfma_f32_32x32x16_fp8_fp8 a[0:15], v[4:5], a[20:21], 0", (8, 30, 5)),
                ("v_mfma_f64_16x16x4_f64 v[0:7], v[8:9], v[10:11], v[12:19]", (20, 20, 5)),
                ("ds_read_b128 v[20:23], v2", (24, 24, 5)),
                ("ds_read_b32 a5, v0", (4, 10, 5)),
                ("ds_write2_b64 v0, v[2:3], v[30:31] offset1:1", (32, 32, 5)),
                ("global_load_dwordx3 v[4:6], v[8:9], off", (12, 10, 5)),
                ("global_store_dwordx4 v0, a[252:255], s[10:11]", (4, 260, 12)),
                ("buffer_load_dword v9, v1, s[20:23], s30 offen", (12, 10, 31)),
                ("buffer_load_dword v9, s[20:23], 0 offen lds", (12, 10, 24)),
                ("s_load_dwordx16 s[16:31], s[0:1], 0x0", (4, 1, 32)),
                ("s_mov_b64 s[100:101], exec", (4, 1, 102)),
                ("v_add_co_u32 v3, vcc, v2, v1", (4, 4, 5)),
                ("v_mov_b32_dpp v30, v5 quad_perm:[0,1,2,3] row_mask:0xf bank_mask:0xf", (32, 31, 5)),
                ("v_add_u32_sdwa v30, v1, v2 dst_sel:BYTE_0 src0_sel:WORD_1 src1_sel:DWORD", (32, 31, 5)),
                ("v_pk_fma_f32 v[2:3], v[4:5], s[40:41], v[6:7] op_sel_hi:[0,1,1]", (8, 8, 42)),
                ("v_fma_f32 v1, -|v33|, s44, v2", (36, 34, 45)),
                ("v_readlane_b32 s50, v3, s51", (4, 4, 52)),
                ("v_cvt_pk_f32_fp8 v[60:61], v1", (64, 62, 5)),
                ("s_nop 0 // v200 is in a comment", (4, 1, 5)),
                (".set top, 90\n.macro put r, n\nv_mov_b32 v[\\r+\\n], 0\n.endm\nput top, 3", (96, 94, 5)),
                (".irp r, 3, 70, 9\nv_mov_b32 v\\r, 0\n.endr", (72, 71, 5)),
        ]:
            with self.subTest(body=body):
                self.assertEqual(self.counted(body), expected)

    def test_only_what_can_be_reached_counts(self):
        for body, expected in [
                ("s_endpgm\nv_mov_b32 v99, 0", 1),
                ("s_branch over\nv_mov_b32 v99, 0\nover: v_mov_b32 v3, 0", 4),
                ("s_branch over\n.long 0xffffffff\nover: v_mov_b32 v3, 0", 4),
                ("s_cbranch_scc0 other\ns_endpgm\nother: v_mov_b32 v99, 0", 100),
                ("loop: v_mov_b32 v9, 0\ns_cbranch_vccnz loop", 10),
                ("s_call_b64 s[6:7], sub\ns_endpgm\nsub: v_mov_b32 v99, 0", 100),
                ("s_getpc_b64 s[6:7]\ns_setpc_b64 s[6:7]\nv_mov_b32 v99, 0", 100),
        ]:
            with self.subTest(body=body):
                self.assertEqual(self.counted(body)[1], expected)
        self.assertIn("execution reaches address", self.refused(kernel(".long 0xffffffff")))
        self.assertIn("execution reaches address", self.refused(HEAD.format("") + "v_mov_b32 v0, 0\n"))

    def test_indexed_registers_need_a_bound(self):
        body = "s_set_gpr_idx_on s3, gpr_idx(SRC0)\nv_mov_b32 v1, v2\ns_set_gpr_idx_off"
        sentence = self.refused(kernel(body))
        self.assertIn("kernel k: 's_set_gpr_idx_on s3, gpr_idx(SRC0)' indexes registers", sentence)
        self.assertIn("indexed_vgprs=N", sentence)
        self.assertEqual(self.counted(body, " indexed_vgprs=77")[1], 77)
        self.assertEqual(self.counted(body, " indexed_vgprs=1")[1], 3)
        self.assertIn("indexed_sgprs=N", self.refused(kernel("s_movrels_b32 s3, s5")))
        self.assertEqual(self.counted("s_movrels_b32 s3, s5", " indexed_sgprs=40")[2], 40)
        self.assertIn("indexed_vgprs 300 is not in 0 to 256", self.refused(kernel(body, " indexed_vgprs=300")))
        errors, warnings = self.found(self.generate(kernel(body, " indexed_vgprs=3")))
        self.assertEqual(errors, [])
        self.assertIn("indexes registers", warnings[0])

    def test_tuples_start_even(self):
        # v_mfma_f32_16x16x32_fp8_fp8 v[8:11], v[5:6], v[6:7], v[8:11], which the assembler refuses.
        odd = ".long 0xd3f30008, 0x04220d05"
        sentence = "v[5:6] in 'v_mfma_f32_16x16x32_fp8_fp8 v[8:11], v[5:6], v[6:7], v[8:11]'"
        self.assertIn(sentence, self.refused(kernel(odd)))
        self.assertRegex(self.refused(kernel("global_load_dwordx2 v[5:6], v[2:3], off")),
                         "must be 64 bit aligned|invalid operand for instruction")
        errors, _ = self.found(self.hand_written(odd, vgprs=16, accum=12))
        self.assertIn(sentence, errors[0])

    def test_ids_at_entry_are_allocated(self):
        for ids, expected in ("none", 2), ("x", 3), ("xz", 4), ("xyz", 5):
            self.assertEqual(self.counted("", f" workgroup_id={ids}")[2], expected)


WIDE_CODE = "v_mov_b32 v200, 0\n"
CALL = """s_getpc_b64 s[4:5]
  s_add_u32 s4, s4, {0}@rel32@lo+4
  s_addc_u32 s5, s5, {0}@rel32@hi+12
  s_swappc_b64 s[30:31], s[4:5]
"""
RETURN = "s_setpc_b64 s[30:31]\n"
FAR = '.section {}, "ax", @progbits\n'


class Linked(Objects):
    """What a kernel reaches is known in the linked object alone."""

    def counts(self, text):
        """{kernel: {field: value}} of the descriptors that generate writes, which check accepts."""
        done = self.amdhsa("generate", "--emit-s", self.write("k.s", text), "-o", self.folder / "k.hsaco")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.amdhsa("check", self.folder / "k.hsaco").returncode, 0)
        return {name: {field: int(value) for field, value in re.findall(r"\.amdhsa_(\w+) (\d+)", text)}
                for name, text in re.findall(r"\.amdhsa_kernel (\w+)\n(.*?)\.end_amdhsa_kernel", done.stdout, re.S)}

    def test_code_elsewhere_counts(self):
        function = "f: " + WIDE_CODE
        for what, text in {
                "branch to another section": kernel("s_branch f") + FAR.format("far") + function + "s_endpgm\n",
                "and to one that is linked into .text":
                    kernel("s_branch f") + FAR.format(".text.f") + function + "s_endpgm\n",
                "conditional branch": kernel("s_cbranch_scc1 f") + FAR.format("far") + function + "s_endpgm\n",
                "branch to another kernel": "//# kernel b workgroup=64\n" + kernel("s_branch b")
                    + ".globl b\n.p2align 8\nb: " + WIDE_CODE + "s_endpgm\n",
                "into the middle of another kernel": "//# kernel b workgroup=64\n" + kernel("s_branch inside")
                    + ".globl b\n.p2align 8\nb: s_endpgm\ninside: " + WIDE_CODE + "s_endpgm\n",
                "branch to a global label": kernel("s_branch f") + ".globl f\n.protected f\n" + function + "s_endpgm\n",
                "call": kernel("s_call_b64 s[30:31], f") + FAR.format("far") + function + RETURN,
                "call of a weak function": kernel("s_call_b64 s[30:31], f") + FAR.format("far")
                    + ".weak f\n.protected f\n" + function + RETURN,
                "call through an address": kernel(CALL.format("f")) + FAR.format("far") + function + RETURN,
                "call within .text": kernel(CALL.format("f")) + function + RETURN,
                "jump through an address": kernel(CALL.format("f").replace("s_swappc_b64 s[30:31],", "s_setpc_b64"))
                    + FAR.format("far") + function + "s_endpgm\n",
                "call of a call": kernel("s_call_b64 s[30:31], g") + FAR.format("near")
                    + "g: v_writelane_b32 v1, s30, 0\nv_writelane_b32 v1, s31, 1\n" + CALL.format("f")
                    + "v_readlane_b32 s31, v1, 1\nv_readlane_b32 s30, v1, 0\n" + RETURN
                    + FAR.format("far") + function + RETURN,
                "into a table": kernel("s_getpc_b64 s[4:5]\ns_add_u32 s4, s4, s6\ns_addc_u32 s5, s5, 0\ns_setpc_b64 s[4:5]")
                    + FAR.format("far") + function + "s_endpgm\n",
                "padding and data before it": kernel("s_branch f") + FAR.format("far")
                    + ".long 0xffffffff, 0xd3f30008\n.p2align 8, 0\n" + function + "s_endpgm\n",
                "kernel in a section of its own": FAR.format("mine") + kernel(WIDE_CODE),
        }.items():
            with self.subTest(what):
                k = self.counts(text)["k"]
                self.assertEqual((k["next_free_vgpr"], k["accum_offset"]), (201, 204))

    def test_all_that_a_function_uses_counts(self):
        # Each kind of register, in code that two of three kernels call.
        function = (FAR.format("far") + "f: v_accvgpr_write_b32 a7, v9\ns_mov_b32 s77, 0\nv_cmp_eq_u32 vcc, v0, v1\n"
                    + RETURN)
        body = "\n.globl {0}\n.p2align 8\n{0}: {1}\ns_endpgm\n"
        text = "".join(f"//# kernel {name} workgroup=64\n" for name in "abc")
        for name, call in ("a", "s_call_b64 s[30:31], f"), ("b", "s_cbranch_scc0 f"), ("c", ""):
            text += body.format(name, call)
        # f returns, which b alone has not called: its return address is a's.
        fields = "next_free_vgpr", "accum_offset", "next_free_sgpr", "reserve_vcc"
        made = {name: tuple(k[f] for f in fields) for name, k in self.counts(text + function).items()}
        self.assertEqual(made, {"a": (20, 12, 78, 1), "b": (20, 12, 78, 1), "c": (1, 4, 5, 0)})

        call = kernel("s_call_b64 s[30:31], f") + FAR.format("far") + "f: {}\n" + RETURN
        for instruction, sentence in [
                ("scratch_load_dword v1, off, off", "accesses scratch; declare scratch=BYTES"),
                ("s_set_gpr_idx_on s3, gpr_idx(SRC0)", "declare indexed_vgprs=N"),
                (".long 0xd3f30008, 0x04220d05", "starts at an odd register"),
        ]:
            with self.subTest(instruction):
                self.assertIn(sentence, self.refused(call.format(instruction)))

    def test_check_sees_other_sections(self):
        call = "\n  " + CALL.format("f") + "  s_endpgm\n" + FAR.format("far") + "f: " + WIDE_CODE + RETURN + ".text\n"
        errors, _ = self.found(self.hand_written(call))
        self.assertIn("8 VGPRs are allocated, 201 are needed: 'v_mov_b32_e32 v200, 0'", errors[1])
        loaded = "s_load_dwordx2 s[4:5], s[0:1], 0x0\n s_setpc_b64 s[4:5]"
        errors, warnings = self.found(self.hand_written(loaded))
        self.assertEqual(errors, [])
        self.assertIn("leads to what neither s_getpc_b64 nor a call of this file says; what it needs is not counted",
                      warnings[0])

    def test_what_cannot_be_followed(self):
        f = ".globl f\nf: " + WIDE_CODE + "s_endpgm\n"
        unseen = "leads to what neither s_getpc_b64 nor a call of this file says"
        for what, text, sentence in [
                ("loaded", kernel("s_load_dwordx2 s[4:5], s[0:1], 0x0\ns_swappc_b64 s[30:31], s[4:5]"), unseen),
                ("loaded and changed", kernel("s_load_dwordx2 s[4:5], s[0:1], 0x0\ns_add_u32 s4, s4, 16\n"
                                              "s_addc_u32 s5, s5, 0\ns_setpc_b64 s[4:5]"), unseen),
                ("of a lane", kernel("v_readfirstlane_b32 s4, v0\nv_readfirstlane_b32 s5, v1\ns_setpc_b64 s[4:5]"), unseen),
                ("not written", kernel("s_setpc_b64 s[0:1]"), unseen),
                ("vcc", kernel("s_setpc_b64 vcc"), unseen),
                ("global offset table", kernel(CALL.format("f").replace("rel32", "gotpcrel32").replace(
                    "s_swap", "s_load_dwordx2 s[4:5], s[4:5], 0x0\n  s_swap")) + FAR.format("far") + f, unseen),
                ("into an instruction", kernel("s_getpc_b64 s[4:5]\ns_add_u32 s4, s4, 6\ns_addc_u32 s5, s5, 0\n"
                                               "s_setpc_b64 s[4:5]"), unseen),
                ("out of the file", kernel("s_branch 0x4000"), "execution reaches address"),
                ("into data", kernel("s_branch f") + FAR.format("far") + "f: .long 0xffffffff\n", "execution reaches address"),
                ("symbol of another's", kernel("s_branch f") + f, "'f' is global, so that another code object's may take"),
                ("the same, as an address", kernel(CALL.format("f")) + FAR.format("far") + f, "write '.protected f'"),
                ("symbol of none", kernel("") + ".data\n.quad f\n", "uses 'f', which it does not define"),
                ("weak symbol of none", kernel("") + ".weak f\n.data\n.quad f\n", "uses 'f', which it does not define"),
        ]:
            with self.subTest(what):
                self.assertIn(sentence, self.refused(text))

    def test_what_is_generated_is_refused(self):
        own = HAND_WRITTEN.format(body="s_nop 0", lds=0, vgprs=8, accum=4, sgprs=10, tg_split=0, offset=0,
                                  workgroup=256, agprs=0, vgpr_count=8, sgpr_count=16)
        descriptor, metadata = own[own.index(".rodata"):own.index(".amdgpu_metadata")], own[own.index(".amdgpu_metadata"):]
        for text, sentence in [
                (kernel("") + metadata, "has metadata of its own; .amdgpu_metadata is generated"),
                (kernel("") + descriptor, "kernel k: the file has a descriptor of its own"),
                (kernel("") + descriptor.replace("_kernel k", "_kernel b"), "kernel b: the file has a descriptor of its own"),
                (".amdhsa_code_object_version 4\n" + kernel(""), "that of code object version 4; 5 is generated"),
                ('.amdgcn_target "amdgcn-amd-amdhsa--gfx90a"\n' + kernel(""), "does not match the specified target id"),
        ]:
            with self.subTest(sentence=sentence):
                self.assertIn(sentence, self.refused(text))
        self.generate('.amdgcn_target "amdgcn-amd-amdhsa--gfx942"\n' + kernel(""))

    def test_what_is_written_has_passed_check(self):
        source = self.write("k.s", kernel(WIDE_CODE))
        for changes, sentence in [
                ({"next_free_vgpr 201": "next_free_vgpr 204", "vgpr_count: 201": "vgpr_count: 209"},
                 "the metadata's .vgpr_count 209 is an allocation of 216, the descriptor's is 208"),
                ({"accum_offset 204": "accum_offset 8"}, "accum_offset 8 is too small, 204 is needed"),
                ({"next_free_vgpr 201": "next_free_vgpr 8", "accum_offset 204": "accum_offset 8"},
                 "accum_offset 8 is too small, 204 is needed"),
                ({"next_free_vgpr 201": "next_free_vgpr 300", "vgpr_count: 201": "vgpr_count: 300"},
                 "304 VGPRs are larger than needed"),
        ]:
            def wrong(*arguments, made=generate.directives):
                text = made(*arguments)
                for before, after in changes.items():
                    self.assertEqual(text.count(before), 1)
                    text = text.replace(before, after)
                return text
            with self.subTest(sentence), mock.patch.object(generate, "directives", wrong):
                with self.assertRaises(Failure) as caught:
                    generate.generate(LLVM, source, TARGETS["gfx942"])
                self.assertIn("kernel k: what was generated does not pass check: ", str(caught.exception))
                self.assertIn(sentence, str(caught.exception))


class Declarations(Objects):
    def test_kernarg_is_the_c_struct(self):
        text = """//# kernel k workgroup=64x4 lds=used scratch=16
            //#   not a declaration: it does not start the line
//#   u8      flag
//#   ptr     out     [rows, 64] float32
//#   i16[3]  steps
//#   f32     scale
//#   ptr[2]  in
//#   i32     n
.set used, 3 * 1024
.globl k
.p2align 8
k:
  s_load_dwordx2 s[4:5], s[0:1], k.out
  s_load_dword s6, s[0:1], k.scale
  s_load_dword s7, s[0:1], k.n
  s_endpgm
"""
        path = self.generate(text)
        self.assertEqual(self.found(path), ([], []))
        layout = [("flag", 0, 1, "by_value"), ("out", 8, 8, "global_buffer"), ("steps", 16, 6, "by_value"),
                  ("scale", 24, 4, "by_value"), ("in", 32, 16, "by_value"), ("n", 48, 4, "by_value")]
        made = json.loads(self.amdhsa("report", path, "--json").stdout)
        self.assertEqual(made["target"], "gfx942")
        report, = made["kernels"]
        self.assertEqual([tuple(a.values()) for a in report["kernarg"]], layout)
        self.assertEqual(report["kernarg_bytes"], 56)
        self.assertEqual((report["lds_bytes"], report["scratch_bytes"]), (3072, 16))
        self.assertEqual((report["workgroup"], report["workitem_ids"]), (256, "xy"))
        # The code has the same offsets, LLVM's reading of the note the same arguments.
        loads = re.findall(r"s\[0:1\], (0x\w+)", llvm_tool("llvm-objdump", "-d", path))
        self.assertEqual([int(offset, 16) for offset in loads], [8, 24, 48])
        note = llvm_tool("llvm-readelf", "-n", path)
        found = re.findall(r"\.name: +(?:!str )?(\w+)\n +\.offset: +(\d+)\n +\.size: +(\d+)\n +\.value_kind: +(\w+)", note)
        self.assertEqual([(n, int(o), int(s), k) for n, o, s, k in found], layout)
        self.assertEqual(note.count(".address_space:  global"), 1)
        for line in (".kernarg_segment_size: 56", ".max_flat_workgroup_size: 256", ".wavefront_size: 64",
                     ".symbol:         k.kd", ".uniform_work_group_size: 1"):
            self.assertIn(line, note)
        for line in self.amdhsa("report", path).stdout, self.amdhsa("check", path).stdout:
            self.assertIn("k", line)

    def test_mode_and_ids(self):
        def fields(options):
            path = self.generate(kernel("", options))
            data = path.read_bytes()[descriptor_place(path, "k"):][:64]
            rsrc1, rsrc2, properties = struct.unpack_from("<IIH", data, 48)
            return {"denorm": rsrc1 >> 16 & 15, "dx10": rsrc1 >> 21 & 1, "ieee": rsrc1 >> 23 & 1,
                    "ovfl": rsrc1 >> 26 & 1, "ids": rsrc2 >> 7 & 7, "user": rsrc2 >> 1 & 31,
                    "round": rsrc1 >> 12 & 15, "properties": properties}
        usual = {"denorm": 15, "dx10": 0, "ieee": 0, "ovfl": 0, "ids": 7, "user": 2, "round": 0,
                 "properties": 8}
        self.assertEqual(fields(""), usual)
        self.assertEqual(
            fields(" denorm_f32=flush dx10_clamp=1 ieee_mode=1 fp16_overflow=1 workgroup_id=xz"),
            {**usual, "denorm": 12, "dx10": 1, "ieee": 1, "ovfl": 1, "ids": 5})
        self.assertEqual(fields(" denorm_f16_f64=flush")["denorm"], 3)

    def test_several_kernels_in_a_file(self):
        text = ("//# kernel a workgroup=64\n//# ptr p\n//# i32 n\n//# kernel b workgroup=64\n//# i32 n\n"
                ".globl a\n.p2align 8\na: s_load_dword s3, s[0:1], a.n\nv_mov_b32 v9, 0\ns_endpgm\n"
                ".globl b\n.p2align 8\nb: s_load_dword s3, s[0:1], b.n\nv_mov_b32 v99, 0\ns_endpgm\n")
        made = json.loads(self.amdhsa("report", self.generate(text), "--json").stdout)["kernels"]
        self.assertEqual([(k["name"], k["vgprs"]["arch"], k["kernarg_bytes"]) for k in made],
                         [("a", 10, 16), ("b", 100, 4)])

    def test_sentences(self):
        declared = "//# kernel k workgroup=64\n"
        for text, sentence in [
                ("s_endpgm\n", "declares no kernel"),
                ("//# ptr out\n", "neither 'kernel NAME workgroup=N ...' nor an argument"),
                ("//# kernel 4k workgroup=64\n", "'4k' is not a name"),
                ("//# kernel k\n", "kernel k: workgroup '' is not threads as X, XxY or XxYxZ"),
                ("//# kernel k workgroup=0\n", "kernel k: workgroup 0 has 0 threads; 1 to 1024"),
                ("//# kernel k workgroup=64x32\n", "has 2048 threads; 1 to 1024 are accepted"),
                ("//# kernel k workgroup=64 vgprs=9\n", "kernel k: 'vgprs=9' is not KEY=VALUE with a key of lds"),
                ("//# kernel k workgroup=64 lds=1 lds=1\n", "kernel k: lds is said twice"),
                ("//# kernel k workgroup=64 ieee_mode=2\n", "kernel k: ieee_mode '2' is not one of 0, 1"),
                (declared + "//# int n\n", "kernel k: argument n: type 'int' is not one of ptr, i64"),
                (declared + "//# i32 n\n//# ptr n\n", "kernel k: argument n is declared twice"),
                (declared + "//# i32[0] n\n", "argument n: 0 elements; 1 to 4096 are accepted"),
                (declared + "//# i64[513] n\n", "argument n ends at byte 4104; at most 4096"),
                (declared + declared, "kernel k is declared twice"),
                (declared + "//# arguments nowhere.inc\n", "refused.s:2: there is no file nowhere.inc; searched: "),
                (declared + "//# arguments a.inc b.inc\n", "refused.s:2: 'arguments' takes one file name; 2 are given"),
                ("//# arguments a.inc\n", "neither 'kernel NAME workgroup=N ...' nor an argument"),
                (declared, "kernel k is declared, but the file has no label 'k:'"),
                (declared + "k: s_endpgm\n", "kernel k: its label is local; write '.globl k'"),
                (declared + "s_nop 0\n.globl k\nk: s_endpgm\n", "kernel k is not aligned to 256 bytes"),
                (declared + ".rodata\n.globl k\n.p2align 8\nk: .long 0\n.text\n s_endpgm\n",
                 "kernel k is in section .rodata, which is not for code"),
                (kernel("", " lds=65537"), "kernel k: lds 65537 is not in 0 to 65536"),
                (kernel("", " lds=-1"), "kernel k: lds -1 is not in 0 to 65536"),
                (kernel("", " lds=k"), "kernel k: lds 'k' is neither a number nor an absolute symbol"),
                (kernel("scratch_load_dword v1, off, off"), "accesses scratch; declare scratch=BYTES"),
                (kernel("v_mov_b32 v0"), "error: too few operands for instruction"),
                (kernel("v_mov_b32 v0, k.nothing"), "k.nothing"),
                (kernel("v_mov_b32 v255, 0\nv_accvgpr_write_b32 a255, 0").replace("workgroup=256", "workgroup=512"),
                 "kernel k: a workgroup of 512 threads does not fit: 512 VGPRs let 256 threads run"),
                (kernel("") + ".rodata\n.p2align 6\n.amdhsa_kernel k\n.amdhsa_next_free_vgpr 8\n"
                 ".amdhsa_next_free_sgpr 8\n.amdhsa_accum_offset 4\n.end_amdhsa_kernel\n",
                 "kernel k: the file has a descriptor of its own"),
        ]:
            with self.subTest(sentence=sentence):
                self.assertIn(sentence, self.refused(text))
        self.assertIn("-mcpu: 'gfx90a' is not one of gfx942, gfx950", self.refused(kernel(""), "-mcpu", "gfx90a"))
        for arguments in [("generate", self.folder / "none.s", "-o", "x"), ("check", self.folder / "none"),
                          ("report", self.folder), ("generate", self.folder / "x.s"), ("check",), ()]:
            done = self.amdhsa(*arguments)
            self.assertEqual(done.returncode, 2)
            self.assertIn("amdhsa", done.stderr)


class Checks(Objects):
    def test_larger_is_a_warning_with_its_cost(self):
        body = "  v_mov_b32 v40, 0\n"
        self.assertEqual(self.found(self.hand_written(body, vgprs=48, accum=44)), ([], []))
        errors, warnings = self.found(self.hand_written(body, vgprs=256, accum=44))
        self.assertEqual(errors, [])
        self.assertIn("larger than needed (44 and 41), which allows 2 waves per SIMD instead of 8", warnings[0])
        _, warnings = self.found(self.hand_written(body, vgprs=64, accum=48))
        self.assertIn("costs no occupancy", warnings[0])
        _, warnings = self.found(self.hand_written(body, vgprs=48, accum=44, sgprs=102))
        self.assertIn("112 SGPRs are more than needed (9), which allows 7 waves per SIMD", warnings[0])

    def test_too_small(self):
        for body, values, sentence in [
                ("v_mov_b32 v8, 0\n", {"vgprs": 8, "accum": 8}, "accum_offset 8 is too small, 12 is needed"),
                ("v_mov_b32 v8, 0\n", {"vgprs": 8, "accum": 8}, "8 VGPRs are allocated, 9 are needed"),
                ("v_accvgpr_write_b32 a12, 0\n", {"vgprs": 16, "accum": 4, "agprs": 13},
                 "16 VGPRs are allocated, 17 are needed: 'v_accvgpr_write_b32 a12, 0'"),
                ("v_accvgpr_write_b32 a12, 0\n", {"vgprs": 24, "accum": 16, "agprs": 13},
                 "24 VGPRs are allocated, 29 are needed"),
                ("s_mov_b32 s27, 0\n", {"sgprs": 26}, "32 SGPRs are allocated, 34 are needed: s0..s27"),
                ("v_accvgpr_write_b32 a12, 0\n", {"vgprs": 24}, ".agpr_count is 0, the code uses 13"),
                ("scratch_load_dword v1, off, off\n", {}, "accesses scratch, which the descriptor does not enable"),
        ]:
            with self.subTest(sentence=sentence):
                errors, _ = self.found(self.hand_written(body, **values))
                self.assertTrue(any(sentence in error for error in errors), errors)

    def test_older_metadata(self):
        """Without a target, and with AGPRs that are not counted."""
        path = self.hand_written("v_accvgpr_write_b32 a3, 0", without=("amdhsa.target", ".agpr_count"),
                                 vgprs=8, accum=4)
        self.assertEqual(self.found(path), ([], []))

    def test_arch_vgprs_where_agprs_lie(self):
        """Refused with AGPRs and without, however many registers are allocated in all."""
        for body, values in [
                ("v_mov_b32 v7, 0\n", {"vgprs": 8, "accum": 4}),
                ("v_mov_b32 v7, 0\n", {"vgprs": 512, "accum": 4}),
                ("v_mov_b32 v7, 0\nv_accvgpr_write_b32 a0, 0\n", {"vgprs": 16, "accum": 4, "agprs": 1})]:
            with self.subTest(body=body, **values):
                errors, _ = self.found(self.hand_written(body, **values))
                self.assertIn("accum_offset 4 is too small, 8 is needed: 'v_mov_b32", errors[0])
                self.assertIn("touches v7", errors[0])
        path = self.hand_written("v_mov_b32 v7, 0\n", vgprs=8, accum=4)
        done = self.amdhsa("check", path)
        self.assertEqual(done.returncode, 1)
        self.assertIn("accum_offset 4 is too small", done.stdout + done.stderr)
        errors, _ = self.found(self.hand_written("v_mov_b32 v7, 0\n", vgprs=8, accum=8))
        self.assertEqual(errors, [])

    def test_what_is_not_accepted(self):
        for values, sentence in [
                ({"lds": 65540}, "65540 bytes of LDS; at most 65536"),
                ({"tg_split": 1}, "TG_SPLIT"),
                ({"offset": 4}, "out ends at kernarg byte 12 of 8"),
                ({"workgroup": 2048}, ".max_flat_workgroup_size is 2048; 1 to 1024"),
                ({"vgpr_count": 9}, ".vgpr_count 9 is an allocation of 16, the descriptor's is 8"),
                ({"sgpr_count": 17}, ".sgpr_count 17 is an allocation of 32, the descriptor's is 16"),
                ({"vgprs": 512, "accum": 256, "workgroup": 512}, "a workgroup of 512 threads"),
        ]:
            with self.subTest(sentence=sentence):
                errors, _ = self.found(self.hand_written("s_nop 0", **values))
                self.assertEqual(len(errors), 1, errors)
                self.assertIn(sentence, errors[0])

    def test_descriptor_against_metadata(self):
        path = self.generate(kernel("s_nop 0", " lds=512 scratch=8").replace("\n", "\n//# ptr out\n", 1))
        self.assertEqual(self.found(path), ([], []))
        rsrc1, rsrc2, properties = struct.unpack_from(
            "<IIH", path.read_bytes(), descriptor_place(path, "k") + 48)
        word = struct.Struct("<I").pack
        for offset, data, sentence in [
                (0, word(1024), "group_segment_fixed_size is 512, the descriptor's 1024"),
                (4, word(0), "private_segment_fixed_size is 8, the descriptor's 0"),
                (8, word(4), "kernarg_segment_size is 8, the descriptor's 4"),
                (12, word(1), "bytes 12 to 15 is not 0"),
                (48, word(rsrc1 + 1), ".vgpr_count 1 is an allocation of 8, the descriptor's is 16"),
                (52, word(rsrc2 - 2), "user SGPR count is 1, its properties enable 2"),
                (52, word(rsrc2 & ~1), "scratch is not enabled"),
                (52, word(rsrc2 | 1 << 15), "GRANULATED_LDS_SIZE is not 0"),
                (56, word(properties | 1 << 10), "wave32"),
                (56, word(properties & ~8), "no kernarg_segment_ptr"),
        ]:
            with self.subTest(sentence=sentence):
                errors, _ = self.found(self.patched(path, offset, data))
                self.assertTrue(any(sentence in error for error in errors), errors)
        # SGPRs beyond the metadata's harm nothing, and 0 bytes of kernarg are not said.
        errors, warnings = self.found(self.patched(path, 48, word(rsrc1 + (2 << 6))))
        self.assertEqual(errors, [])
        self.assertIn(".sgpr_count 11 is an allocation of 16, the descriptor's is 32", "".join(warnings))
        self.assertEqual(self.found(self.patched(path, 8, word(0))), ([], []))
        for data, sentence in [(struct.pack("<q", 1 << 40), "where there is no code"),
                               (struct.pack("<q", -64), "where there is no code")]:
            done = self.amdhsa("check", self.patched(path, 16, data))
            self.assertEqual(done.returncode, 2)
            self.assertIn(sentence, done.stderr)

    def test_occupancy(self):
        target = TARGETS["gfx942"]
        # Waves per SIMD by registers: AMD's table for 512 registers, granule 8.
        for vgprs, waves in [(8, 8), (64, 8), (72, 7), (80, 6), (96, 5), (128, 4), (168, 3), (256, 2), (512, 1)]:
            self.assertEqual(target.waves_by_vgprs(vgprs), waves)
        self.assertEqual([target.waves_by_sgprs(s) for s in (16, 96, 112)], [8, 8, 7])
        self.assertEqual(target.workgroups(256, 112, 65536, 512), 1)
        # gfx950: 160 KiB in granules of 1280 bytes.
        self.assertEqual(TARGETS["gfx950"].workgroups(32, 112, 18 * 1280, 64), 7)
        self.assertEqual(TARGETS["gfx950"].workgroups(32, 112, 18 * 1280 + 1, 64), 6)
        self.assertEqual(target.waves_per_simd(256, 112, 65536, 512), 2)
        self.assertEqual(target.workgroups(128, 96, 16384, 256), 4)
        self.assertEqual(target.workgroups(128, 96, 16385, 256), 3)
        self.assertEqual(target.workgroups(256, 96, 0, 1024), 0)


class BadObjects(Objects):
    def unreadable(self, data):
        path = self.folder / "bad.hsaco"
        path.write_bytes(data)
        done = self.amdhsa("check", path)
        self.assertEqual(done.returncode, 2, done.stdout)
        return done.stderr

    def test_sentences(self):
        good = self.generate(kernel("s_nop 0")).read_bytes()
        hand = self.hand_written("s_nop 0")
        for data, sentence in [
                (b"", "is not an ELF file"), (b"\x7fELF", "is truncated"), (good[:40], "is truncated"),
                (good[:1000], "is truncated"), (b"MZ" + good[2:], "is not an ELF file"),
                (good[:4] + b"\1" + good[5:], "not a 64-bit little-endian ELF file"),
                (good[:18] + b"\x3e\0" + good[20:], "is for ELF machine 62, not AMDGPU"),
                (good[:7] + b"\0" + good[8:], "has OS ABI 0, not AMDGPU HSA"),
                (good[:48] + b"\x3f" + good[49:], "is for processor 0x3f of e_flags, not for gfx942 (0x4c)"),
                ((self.folder / "hand.o").read_bytes(), "is not linked"),
                (good.replace(b"--gfx942", b"--gfx90a"), "the metadata is for amdgcn-amd-amdhsa--gfx90a"),
                (good.replace(b"\0k.kd\0", b"\0k_kd\0"), "kernel k has metadata but no symbol k.kd"),
                (good.replace(b"k.kd\xb8", b"x.kd\xb8"), "kernel k has a descriptor but no metadata"),
                (good.replace(b"AMDGPU\0", b"AMDGPX\0"), "has 0 AMDGPU metadata notes, not 1"),
                (good.replace(b".wavefront_size@", b".wavefront_siZe@"), "has no .wavefront_size"),
                (good.replace(b".wavefront_size@", b".wavefront_size\xc3"), ".wavefront_size is not an integer"),
        ]:
            with self.subTest(sentence=sentence):
                self.assertIn(sentence, self.unreadable(data))
        self.assertEqual(self.amdhsa("check", hand).returncode, 0)

    def test_mutations_end_in_a_sentence(self):
        good = self.generate(kernel(WIDE + "loop: s_cbranch_scc0 loop", " lds=512")
                             .replace("\n", "\n//# ptr out\n//# i32 n\n", 1)).read_bytes()
        rng = random.Random(1)
        path = self.folder / "mutated.hsaco"
        refused = 0
        for i in range(250):
            data = bytearray(good)
            if i % 5 == 0:
                del data[rng.randrange(len(data)):]
            else:
                # The headers at both ends, the note, the symbols: where a reader can go wrong.
                low, high = rng.choice([(0, 64), (64, 0x600), (len(good) - 1200, len(good)), (0, len(good))])
                for _ in range(rng.choice([1, 1, 2, 8])):
                    data[rng.randrange(low, high)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
            path.write_bytes(data)
            try:
                check.check(code_object.load(path, LLVM))
            except Failure as failure:
                refused += 1
                self.assertTrue(str(failure))
        self.assertGreater(refused, 50)

    def test_messagepack(self):
        self.assertEqual(msgpack.read(bytes.fromhex("83 a161 01 a162 92c3cd0102 a163 d0ff")),
                         {"a": 1, "b": [True, 258], "c": -1})
        for data in b"", b"\xa5abc", b"\xdd\xff\xff\xff\xff", b"\x91" * 100, b"\xc1", b"\x81\x01\x01":
            with self.assertRaises(Failure):
                msgpack.read(data)
        rng = random.Random(2)
        for _ in range(20000):
            try:
                msgpack.read(rng.randbytes(rng.randrange(1, 40)))
            except Failure:
                pass


class Tools(Objects):
    def folder_of(self, names):
        folder = self.folder / "bin"
        folder.mkdir()
        for name in names:
            (folder / name).symlink_to(LLVM.folder / name)
        return folder

    def test_architectures(self):
        text = "//# architectures gfx942 gfx950\n" + kernel("s_nop 0", " lds=65536").replace(" k ", " k_gfx942 ").replace(
            ".globl k", ".globl k_gfx942").replace("type k,", "type k_gfx942,").replace("\nk:", "\nk_gfx942:")
        plain = self.generate("\n" + text.split("\n", 1)[1]).read_bytes()
        self.assertEqual(self.generate(text).read_bytes(), plain)
        self.assertIn("refused.s:1: this file is for gfx942, not for gfx950",
                      self.refused(text.replace(" gfx950", ""), "-mcpu", "gfx950"))
        if not LLVM.knows("gfx950"):
            self.skipTest(f"LLVM {LLVM.version} does not know gfx950")
        path = self.generate(text.replace("lds=65536", "lds=163840"), "-mcpu", "gfx950")
        made = json.loads(self.amdhsa("report", path, "--json").stdout)
        self.assertEqual((made["target"], made["kernels"][0]["name"]), ("gfx950", "k_gfx950"))
        self.assertIn("kernel k_gfx950: lds 163841 is not in 0 to 163840",
                      self.refused(text.replace("lds=65536", "lds=163841"), "-mcpu", "gfx950"))
        self.assertIn("0x54f", llvm_tool("llvm-readelf", "-h", path))

    def test_clang_assembles_where_llvm_mc_is_missing(self):
        if not (LLVM.folder / "clang").exists():
            self.skipTest(f"{LLVM.folder} has no clang")
        folder = self.folder_of(["clang", "ld.lld", "llvm-objdump"])
        text = kernel(WIDE + "s_load_dword s3, s[0:1], k.n").replace("\n", "\n//# i32 n\n", 1)
        made = [self.generate(text, name=name, *options)
                for name, options in [("k", ()), ("clang", ("--llvm", folder))]]
        sections = [llvm_tool("llvm-objdump", "-s", "-j", ".text", "-j", ".rodata", "-j", ".note", path)
                    .split("\n", 2)[2] for path in made]
        self.assertEqual(*sections)

    def test_which_llvm(self):
        usual = self.amdhsa("llvm", env={})
        self.assertEqual(usual.stdout, f"LLVM {LLVM.version} in {LLVM.folder}\n")
        for mcpu, says in [("gfx942", "knows"), ("gfx999", "does not know")]:
            self.assertEqual(self.amdhsa("llvm", "--knows", mcpu).stdout,
                             f"LLVM {LLVM.version} in {LLVM.folder} {says} {mcpu}\n")
        folder = self.folder_of(["llvm-mc", "llvm-objdump"])
        self.assertIn("has no ld.lld", self.amdhsa("llvm", "--llvm", folder).stderr)
        linker = folder / "ld.lld"
        linker.write_text("#!/bin/sh\necho LLD 16.0.6\n")
        linker.chmod(0o755)
        self.assertIn("ld.lld 16.0.6", self.amdhsa("llvm", "--llvm", folder).stderr)
        # ROCm's own comes first, if it will do.
        rocm = self.folder / "rocm/llvm"
        rocm.mkdir(parents=True)
        (rocm / "bin").symlink_to(folder)
        env = {"ROCM_PATH": str(self.folder / "rocm")}
        self.assertEqual(self.amdhsa("llvm", env=env).stdout, usual.stdout)
        linker.unlink()
        linker.symlink_to(LLVM.folder / "ld.lld")
        self.assertEqual(self.amdhsa("llvm", env=env).stdout, f"LLVM {LLVM.version} in {rocm / 'bin'}\n")

    def test_source_lines_and_no_paths(self):
        self.write("add.inc", ".macro twice r\nv_mov_b32 v\\r, 0\nv_mov_b32 v\\r, 1\n.endm\n")
        path = self.generate('.include "add.inc"\n' + kernel("  twice 3\n  s_nop 1"))
        lines = re.findall(r"; \S*k\.s:(\d+)\n\s+(\S+)", llvm_tool("llvm-objdump", "-d", "-l", path))
        self.assertEqual(lines, [("7", "v_mov_b32_e32"), ("8", "s_nop"), ("9", "s_endpgm")])
        self.write("here.s", kernel(""))
        self.assertEqual(self.amdhsa("generate", "here.s", "-o", "here.hsaco", env={}).returncode, 0)
        self.assertNotIn(os.fsencode(self.folder), (self.folder / "here.hsaco").read_bytes())


if __name__ == "__main__":
    unittest.main()
