"""Tests of attn-fp8-stress: python3 tests/cli/test_stress.py PROGRAM SOURCE_DIR [unittest options].

Kernels with planted bugs are the shipped source with a line or two changed; each must fail a case.
Needs Python's standard library only.
"""
import json
import re
import subprocess
import sys
import unittest
from pathlib import Path

from program import ProgramTest

PROGRAM = sys.argv[1]
SOURCE = Path(sys.argv[2])
INCLUDES = SOURCE / "asm" / "include"
FORWARD = sorted(set(INCLUDES.glob("forward*.inc")) - {INCLUDES / "forward_16bit.inc"})
KERNEL = SOURCE / "asm" / "gfx942" / "fwd_gfx942_fp8_d64.s"
AMDHSA = SOURCE / "tools" / "amdhsa" / "amdhsa"


# Name, replacements in the FORWARD files, the case that shows it. Changes of the steady state only: Skv is a multiple of 64.
BUGS = [
    ("one key dropped per tile", [(  # key 5, which the lanes of the first half have
        """
  v_exp_f32_e32 v[sc+\\i], v[sc+\\i]
""", """
  .if \\i == 5
  s_mov_b32 exec_hi, 0
  v_mov_b32_e32 v[sc+\\i], v[minus_inf]
  s_mov_b32 exec_hi, -1
  .endif
  v_exp_f32_e32 v[sc+\\i], v[sc+\\i]
""")], "normal/3"),
    ("two keys swapped", [(  # keys 0 and 1 of a tile
        """
  v_cvt_pk_fp8_f32 v[p+\\group], v[sc+4*(\\group)], v[sc+4*(\\group)+1]
""", """
  .if (\\group) == 0
  s_mov_b32 exec_hi, 0
  v_swap_b32 v[sc], v[sc+1]
  s_mov_b32 exec_hi, -1
  .endif
  v_cvt_pk_fp8_f32 v[p+\\group], v[sc+4*(\\group)], v[sc+4*(\\group)+1]
""")], "normal/3"),
    ("tile max instead of running max", [(  # the scale of what has been summed is the running maximum's
        """
  v_max3_f32 v[row_max+\\half], v[row_max+\\half], v[tile_max], v[test]
""", """
  v_max_f32_e32 v[tile_max], v[tile_max], v[test]
  v_fma_f32 v[u+1], -v[row_max], v[c], s[offset]
  v_max_f32_e32 v[row_max], v[row_max], v[tile_max]
"""), ("""
  v_exp_f32_e32 v[u], v[test]
""", """
  v_exp_f32_e32 v[u], v[test]
  v_fma_f32 v[shift], -v[tile_max], v[c], s[offset]
""")], "normal/3"),
    ("P scale 2^3", [
        ("s_mov_b32 s[gate], 0x40fccccd ", "s_mov_b32 s[gate], 0x4079999a "),
        ("s_mov_b32 s[offset], 0x40e00000 ", "s_mov_b32 s[offset], 0x40400000 ")], "sink/10/4096"),
    ("row sum of unrounded P, one step late", [(  # that of a tile joins after the next one's scaling
        """
  v_exp_f32_e32 v[sc+\\i], v[sc+\\i]
""", """
  v_exp_f32_e32 v[sc+\\i], v[sc+\\i]
  .if \\i > 0
  v_add_f32_e32 v[u+2], v[u+2], v[sc+\\i-1]
  .endif
  .if \\i == 31
  s_nop 0
  v_add_f32_e32 v[u+2], v[u+2], v[sc+31]
  .endif
"""), ("""
  v_mfma_f32_16x16x32_fp8_fp8 v[sum:sum+3], v[ones:ones+1], v[p+2*(\\step):p+2*(\\step)+1], v[sum:sum+3]
""", "\n"), ("""
  v_add_u32_e32 v[v_at], s[slot], v[lane16]
""", """
  v_add_u32_e32 v[v_at], s[slot], v[lane16]
  v_add_f32_e32 v[sum], v[sum], v[u+2]
  v_mov_b32_e32 v[u+2], 0
"""), ("""
  begin_maximum
.endm
""", """
  begin_maximum
  v_mov_b32_e32 v[u+2], 0
.endm
"""), ("""
  repair_sum
  .if descaled
  unit_to_exponent
""", """
  repair_sum
  v_add_f32_e32 v[sum], v[sum], v[u+2]
  ds_bpermute_b32 v[test], v[partner], v[sum]
  s_waitcnt lgkmcnt(0)
  v_add_f32_e32 v[sum], v[sum], v[test]
  .if descaled
  unit_to_exponent
""")], "normal/3"),
    ("FNUZ read as OCP", [(  # each code then means twice its value
        """
  v_mov_b32_e32 v[c], s[t]
""", """
  v_mul_f32_e64 v[c], 4.0, s[t]
"""), ("""
  v_mul_f32_e32 v[u+1], s[out_factor], v[u+1]
""", """
  v_mul_f32_e32 v[u+1], s[out_factor], v[u+1]
  v_mul_f32_e32 v[u+1], 2.0, v[u+1]
""")], "normal/3"),
]


class StressTest(ProgramTest):
    program = PROGRAM
    stress = ProgramTest.run_program


class Usage(StressTest):
    def test_bad_usage(self):
        for args, says in [
            (["--seq", "0"], "--seq"),
            (["--seq", "many"], "--seq"),
            (["--heads", "-1"], "--heads"),
            (["--dim", "0"], "--dim"),
            (["--seed", "x"], "--seed"),
            (["--case", "matri"], '"matri" is none of matrix normal'),
            (["--case", "matrix/row"], '"matrix/row" is none of'),
            (["--backend", "tpu"], "tpu"),
            (["--kernel-file", __file__], "--kernel-file needs --backend"),
            (["--backend", "hip-emu", "--kernel-file", "nowhere"], "nowhere"),
            (["--backend", "cpu", "--kernel-file", __file__], "kernel_file"),
            (["--self-check", "0"], "--self-check"),
            (["--self-check", "1", "--backend", "cpu"], "--backend"),
            (["--self-check", "1", "--seq", "64"], "--seq"),
            (["run"], "run"),
        ]:
            with self.subTest(args=args):
                self.stress(*args, code=2, says=says)
        self.json_error("--json", "--dump", code=2, says="--dump")

    def test_help(self):
        text = self.stress("--help")
        self.assertIn("Usage: attn-fp8-stress", text)
        self.assertIn("Exit codes", text)
        self.assertRegex(self.stress("--version"), r"^\d+\.\d+\.\d+\n$")

    def test_table(self):
        out = self.stress("--backend", "cpu", "--seq", 65, "--heads", 1, "--dim", 32, "--case", "one-hot/4")
        self.assertIn("f8_e4m3fn, B1 H1 D32 seed 1\n", out)
        self.assertRegex(out, r"one-hot/4/random +65 +65 .* pass\n")
        self.assertIn("cpu: 2 cases, 0 failed", out)
        self.assertIn("no FP8 kernel has passed", out)

    def test_json(self):
        small = "--backend", "cpu", "--seq", 33, "--heads", 2, "--dim", 32, "--seed", 7
        report = self.json(*small, "--case", "sink/8/4096")
        self.assertEqual({name: report[name] for name in ("seed", "seqlen", "heads", "head_dim")},
                         {"seed": 7, "seqlen": 33, "heads": 2, "head_dim": 32})
        backend, = report["backends"]
        self.assertEqual((backend["backend"], backend["passed"], backend["failed"]), ("cpu", 1, 0))
        case, = backend["cases"]
        self.assertEqual((case["seqlen_q"], case["seqlen_kv"], case["pass"]), (33, 4096, True))
        self.assertLess(case["max_error"], 1e-4)
        groups = {case["case"].split("/")[0] for case in self.json(*small)["backends"][0]["cases"]}
        self.assertEqual(groups, {"normal", "uniform", "positive", "sparse", "one-hot", "sequential", "sink", "matrix"})

    def test_dump(self):
        small = "--backend", "cpu", "--seq", 20, "--heads", 1, "--dim", 16
        out = self.stress(*small, "--case", "one-hot/4/one-hot", "--dump")
        self.assertIn("codes are f8_e4m3fn", out)
        self.assertIn("  48 4 ", out)  # the code of 4 beside its value
        self.assertNotIn("codes are", self.stress(*small, "--dump"))  # nothing has failed

    def test_self_check(self):
        out = self.stress("--self-check", 1)
        self.assertRegex(out, r"one key dropped per tile +1 +0 +0\n")
        self.assertIn("model: 215 cases, 0 failed", out)
        report = self.json("--self-check", 2)
        self.assertEqual((report["choices"], report["cases"], report["cases_failed"], report["wrong"]), (2, 430, 0, []))
        # The bugs planted in the kernel below, by the same names.
        self.assertEqual([bug["bug"] for bug in report["bugs"]], [name for name, *_ in BUGS])
        for bug in report["bugs"]:
            self.assertEqual((bug["fails"] + bug["changes_nothing"], bug["passes"]), (2, 0), bug)

    def test_backends(self):
        info = subprocess.run([Path(PROGRAM).with_name("attn"), "info", "--json"], capture_output=True, check=True)
        absent = [b for b in json.loads(info.stdout)["backends"] if not b["available"]]
        for backend in absent:
            self.stress("--backend", backend["name"], code=3, says=backend["reason"])
        # All that are here: cpu is, and does not count.
        tiny = "--seq", 1, "--heads", 1, "--dim", 64, "--case", "normal/1"
        if {"cuda", "hip", "hip-emu"} <= {b["name"] for b in absent}:
            self.stress(*tiny, code=3, says="no backend with an FP8 kernel is here", prints=True)

    def test_what_no_kernel_takes(self):
        self.stress("--backend", "hip-emu", "--dim", 24, "--case", "normal/1", code=4, says="head_dim is 24")


class EmulatedTest(StressTest):
    def setUp(self):
        super().setUp()
        info = json.loads(subprocess.run([Path(PROGRAM).with_name("attn"), "info", "--json"],
                                         capture_output=True, check=True).stdout)
        reason = next(b["reason"] for b in info["backends"] if b["name"] == "hip-emu")
        if not any(k["name"] == KERNEL.stem and k["in_build"] for k in info["kernels"]):
            reason = f"{KERNEL.stem} is not in this build"
        if reason:
            print(f"SKIP: {reason}")
            self.skipTest(reason)


class Shipped(EmulatedTest):
    def test_every_case(self):
        # The queries of a sink's case are all the same: two waves of them will do.
        groups = dict.fromkeys(("normal", "uniform", "positive", "sparse", "one-hot", "sequential", "matrix"), 130)
        groups["sink"] = 40
        for dim, heads in ((128, 1), (64, 2)):
            cases = 0
            for group, seq in groups.items():
                with self.subTest(dim=dim, group=group):
                    out = self.stress("--backend", "hip-emu", "--seq", seq, "--heads", heads, "--dim", dim, "--case", group)
                    self.assertIn(f"fwd_gfx942_fp8_d{dim} on hip-emu (emulated), f8_e4m3fnuz, B1 H{heads}", out)
                    cases += int(re.search(r"hip-emu: (\d+) cases, 0 failed", out).group(1))
            self.assertEqual(cases, 215)

    def test_as_good_as_its_model(self):
        # The model's own relative Frobenius error is above 3 % there.
        for dim, seed, case in ((64, 4, "matrix/column-random-random/1"), (64, 90210, "matrix/column-random-random/1"),
                                (128, 1, "uniform/-1..1"), (128, 4, "matrix/uniform-random-random/1"),
                                (128, 6, "matrix/uniform-random-random/1")):
            with self.subTest(dim=dim, seed=seed):
                report = self.json("--backend", "hip-emu", "--seq", 173, "--heads", 1, "--dim", dim, "--seed", seed,
                                   "--case", case)
                case, = report["backends"][0]["cases"]
                self.assertGreater(case["rel_fro"], 0.03)
                self.assertLess(case["ratio_to_model"], 1)


class Planted(EmulatedTest):
    """The kernel for head_dim 64, from its source, with and without a bug."""

    def kernel(self, replacements):
        """The code object of the kernel, with changed FORWARD files; what is launched in front of it is the library's."""
        texts = {path: path.read_text() for path in FORWARD}
        for before, after in replacements:
            found = [path for path, text in texts.items() for _ in range(text.count(before))]
            self.assertEqual(len(found), 1, f"a file has changed; the bug wants {before!r} once in {INCLUDES}/forward*.inc")
            texts[found[0]] = texts[found[0]].replace(before, after)
        for path, text in texts.items():
            (self.dir / path.name).write_text(text)
        made = self.path("kernel.hsaco")
        subprocess.run([sys.executable, AMDHSA, "generate", KERNEL, "-o", made,
                        "-I", self.dir, "-I", INCLUDES], check=True)
        return made

    def run_case(self, kernel, case, code):
        seq = 64 if case.startswith("sink") else 512
        return self.stress("--backend", "hip-emu", "--kernel-file", kernel, "--seq", seq, "--heads", 1,
                           "--dim", 64, "--case", case, code=code)

    def test_without_a_bug(self):
        kernel = self.kernel([])
        for case in {case for _, _, case in BUGS}:
            self.assertIn("fwd_gfx942_fp8_d64 from", self.run_case(kernel, case, 0))

    def test_bugs(self):
        for name, replacements, case in BUGS:
            with self.subTest(bug=name):
                self.assertIn("FAIL", self.run_case(self.kernel(replacements), case, 1))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
