"""test_silicon.py SOURCE_DIR BUILD_DIR PLANTED_LIBRARY: tools/silicon as an owner of a device runs it, on the emulator."""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

SOURCE, BUILD, PLANTED = map(Path, sys.argv[1:4])
sys.path.insert(0, str(SOURCE / "tools"))
from probes import cli, operations, placement, programs, rates  # noqa: E402
from probes.assembler import Assembler  # noqa: E402
from probes.runner import Machine  # noqa: E402

PROGRAM = BUILD / "bin" / "attn-probe-run"


def silicon(*arguments, planted=None, code=0, backend="hip-emu"):
    """(what it printed, its report)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [SOURCE / "tools" / "silicon", "--build", BUILD, "--json", path, *arguments]
        if backend:
            command += ["--backend", backend]
        environment = dict(os.environ)
        if planted:
            command += ["--driver", PLANTED]
            environment["ATTN_PLANTED"] = planted
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        words = f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
        if done.returncode != code:
            raise AssertionError(f"exit code {done.returncode}, not {code}: {words}")
        return done.stdout + done.stderr, json.loads(path.read_text()) if path.exists() else None


class Whole(unittest.TestCase):
    """One run of everything, in short."""

    @classmethod
    def setUpClass(cls):
        cls.text, cls.report = silicon("--short")
        cls.rules = {(rule["group"], rule["name"]): rule for rule in cls.report["rules"]}
        done = subprocess.run([PROGRAM, "--rules"], capture_output=True, text=True, check=True)
        cls.tables = json.loads(done.stdout)

    def test_schema(self):
        try:
            import jsonschema
        except ImportError as error:
            self.skipTest(f"{sys.executable}: {error}; tools/setup --test installs it")
        schema = json.loads((SOURCE / "tools" / "probes" / "report.schema.json").read_text())
        jsonschema.validate(self.report, schema)
        broken = dict(self.report, backend="cuda")
        with self.assertRaises(jsonschema.ValidationError):
            jsonschema.validate(broken, schema)

    def test_nothing_differs_from_itself(self):
        parts = {part["name"]: part for part in self.report["parts"]}
        self.assertEqual({name: part["status"] for name, part in parts.items()},
                         dict.fromkeys(["values", "hazards", "rates", "conformance", "stress", "speed"], "done"))
        self.assertEqual(parts["conformance"]["results"]["failed"], [])
        self.assertEqual(parts["stress"]["results"]["runs"][0]["passed"], 1)
        # Each forward kernel of the catalog was launched, or says why not.
        info = json.loads(subprocess.run([BUILD / "bin" / "attn", "info", "--json"], capture_output=True, text=True).stdout)
        forward = {k["name"] for k in info["kernels"] if k["backend"] == "hip" and k["op"] == "forward"}
        self.assertEqual({row["kernel"] for row in parts["speed"]["results"]["kernels"]}, forward)
        for row in parts["speed"]["results"]["kernels"]:
            self.assertTrue(row["kernel"] in row.get("launches", []) or row.get("declined"), row)
        self.assertIn("emulator", parts["speed"]["results"]["others"]["peers"]["not here"])
        self.assertTrue(self.report["emulated"])
        self.assertIn("EMULATED", self.text)
        known = {"indexed registers", "loads to LDS, scratch", "workgroup i runs on XCD i % 8", "wave w of a workgroup runs on SIMD w % 4"}
        self.assertLessEqual({name for (_, name), rule in self.rules.items() if rule["result"] == "not run"}, known)
        # The emulator warns of this one only.
        self.assertEqual([name.split(":")[0] for (_, name), rule in self.rules.items() if rule["result"] == "not seen"],
                         ["v_cvt_pk to the low half, then to the high half of one VGPR"])

    def test_every_operation_has_a_probe(self):
        """Of the emulator's tables: one that is new there and has no form here fails."""
        probed = {name for group, name in self.rules if group == "operations"}
        elsewhere = {name for group, name in self.rules if group in ("behaviours", "operations")}
        cache = BUILD / "silicon"
        assembler = Assembler(cache)
        _, missing = operations.all_forms(self.tables, assembler)
        self.assertEqual(missing, [])
        for operation in self.tables["operations"]:
            name = operation["name"]
            if name in operations.ELSEWHERE:
                self.assertIn(operations.ELSEWHERE[name], elsewhere, name)
            elif name not in operations.NOTHING_TO_SEE and name not in probed:
                # No instruction of this architecture: the table of memory operations is made for all spaces at once.
                self.assertRegex(name, "^(scratch_atomic|flat_load_lds|buffer_load_lds|buffer_atomic_pk_add_bf16)")
        new = {"name": "v_new_b32", "class": "valu", "load": False, "store": False, "atomic": False}
        added = dict(self.tables, operations=[*self.tables["operations"], new])
        self.assertEqual(operations.all_forms(added, assembler)[1], ["v_new_b32"])

    def test_every_rule_of_wait_states_has_a_pair(self):
        """By the emulator's own word: each rule is the fault of a pair."""
        names = [name for group, name in self.rules if group == "wait states"]
        for rule in self.tables["hazards"]:
            with self.subTest(rule=rule["text"]):
                self.assertTrue(any(name.startswith(rule["text"] + ": ") for name in names))

    def test_every_constant_of_the_model_is_measured(self):
        for name, value in self.tables["constants"].items():
            with self.subTest(constant=name):
                constant = self.report["constants"][name]
                self.assertEqual(constant["result"], "modelled")
                self.assertAlmostEqual(constant["model"], value, delta=0.5)


class Model(unittest.TestCase):
    def test_constants_come_back(self):
        """Kernels that run on other constants tell those: what they measure is what their names say."""
        other = {"issue_clocks": 5, "valu_clocks": 6, "trans_clocks": 24, "packed_f32_clocks": 9, "clocks_per_pass": 5,
                 "barrier_clocks": 31, "simds": 2, "lds_latency": 111, "scalar_latency": 99, "memory_latency": 513,
                 "memory_bytes_per_clock": 32, "overlap": False}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "constants.json"
            path.write_text(json.dumps({"constants": {name: {"value": value} for name, value in other.items()}}))
            emulator = Machine(PROGRAM, "emulator", constants=path)
            found = rates.run(Assembler(BUILD / "silicon"), emulator, None, True, lambda _: None, "MFMA and 7")
            self.assertEqual({c.name: round(c.value) for c in found if c.name in other}, other)
            mix = SOURCE / "tools" / "gfx9emu" / "mixes" / "fmha_fwd_hd128_fp8.mix"
            command = [BUILD / "bin" / "gfx9emu-model", "--constants", path, mix]
            said = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            self.assertEqual({name: said["settings"][name] for name in other}, other)
            self.assertEqual(sorted(said["measured"]), sorted(other))
            self.assertNotIn("packed_f32_4", said)

            for text, why in [("[]", "no JSON object"), ("{}", 'no object "constants"'),
                              ('{"constants": {"simds": {"value": "four"}}}', "simds is \"four\""),
                              ('{"constants": {"overlap": {"value": 1}}}', "overlap is 1"),
                              ('{"constants": {}}', "none of the model's constants"),
                              ('{"emulated": true, "constants": {}}', "nothing was measured")]:
                path.write_text(text)
                done = subprocess.run(command, capture_output=True, text=True)
                self.assertEqual((done.returncode, done.stdout), (1, ""))
                self.assertIn(why, done.stderr)

    def test_the_way_of_a_device(self):
        """Readings that kernels store, in the place of the model's: the emulator's clock counts instructions."""
        assembler, quiet = Assembler(BUILD / "silicon"), lambda _: None
        emulator, device = Machine(PROGRAM, "emulator"), Machine(PROGRAM, "hip-emu")
        with mock.patch.object(rates, "CORE_CLOCK", rates.CORE_CLOCK.replace("10000", "2")):
            found = {c.name: c for c in rates.run(assembler, emulator, device, False, quiet, "MFMA and 7")}
        self.assertEqual(found["memory_latency"].result, "differs")
        self.assertEqual((found["core clock under VALU"].value, found["core clock under VALU"].result), (100, "measured"))
        self.assertNotIn(None, [c.value for c in found.values()])
        rate, source = placement.group_source("ds_read_b128")
        cases = [placement.addresses(16, (0, lane), 128) for lane in range(1, 5)]
        clocks = placement.clocks_of(rate, assembler.build("group", source), device, cases, False)
        self.assertEqual(len(clocks), 4)
        xcds, simds = placement.run_where(assembler, device, False, quiet)
        self.assertEqual((xcds.result, simds.result), ("differs", "differs"))

    def test_lanes_of_a_group(self):
        self.assertEqual(placement.written([[0, 1, 2, 3, 20], [4], [8, 9]]), "0-3,20 4 8-9")

    def test_workgroups_and_waves_elsewhere(self):
        """The verdicts on placement, of readings that the emulator does not have."""
        def words(xcd, simd):
            return [word for i in range(placement.WORKGROUPS) for w in range(placement.WAVES)
                    for word in (simd(i, w) << 4, xcd(i))]
        good = words(lambda i: (5, 1, 2, 3, 4, 0, 6, 7)[i % 8], lambda i, w: (i + w) % 4)
        self.assertEqual(placement.judge_xcds("x", good).result, "agreed")
        self.assertEqual(placement.judge_simds("x", good).result, "agreed")
        bad = words(lambda i: i // 8 % 8, lambda i, w: w // 2)
        self.assertEqual(placement.judge_xcds("x", bad).result, "differs")
        rule = placement.judge_simds("x", bad)
        self.assertEqual((rule.result, rule.emulator, rule.device), ("differs", "0 1 2 3 0 1 2 3", "0 0 1 1 2 2 3 3"))


class Planted(unittest.TestCase):
    """Devices that do not keep to a rule."""

    def test_conversion(self):
        _, report = silicon("--short", "--match", "v_cvt_pk_fp8_f32", "--only", "values", planted="fp8", code=1)
        results = {(rule["group"], rule["name"].split(", ")[0]): rule for rule in report["rules"]}
        for group in "operations", "modes", "sweeps":
            rule = results[group, "v_cvt_pk_fp8_f32"]
            self.assertEqual(rule["result"], "differs")
            self.assertGreater(rule["differing"], 10)
            self.assertNotEqual(rule["emulator"], rule["device"])
        self.assertIn("v_cvt_pk_fp8_f32 v16, v8, v10", results["operations", "v_cvt_pk_fp8_f32"]["what"])

    def test_matrix(self):
        _, report = silicon("--short", "--match", "32x32x16_fp8_bf8", "--only", "values", planted="order", code=1)
        results = {rule["group"]: rule["result"] for rule in report["rules"]}
        self.assertEqual(results, {"operations": "differs", "modes": "differs", "vectors": "differs"})

    def test_what_is_not_planted_agrees(self):
        _, report = silicon("--short", "--match", "v_cvt_pk_bf8_f32", "--only", "values", planted="fp8")
        self.assertEqual({rule["result"] for rule in report["rules"]}, {"agreed"})

    def test_wait_states(self):
        _, report = silicon("--short", "--match", "v_exp_f32", "--only", "hazards", planted="lax")
        self.assertEqual({rule["result"] for rule in report["rules"]}, {"not seen"})
        self.assertTrue(all(rule["device"] == "right with 0" for rule in report["rules"]))

    def test_a_launch_that_ends_the_program(self):
        _, report = silicon("--short", "--match", "entry state", "--only", "values", planted="crash", code=1)
        rules = {rule["name"]: rule for rule in report["rules"]}
        crashed = rules.pop("entry state of a wave in part")
        self.assertEqual((crashed["result"], crashed["what"]), ("differs", "the program was ended by signal 6"))
        self.assertEqual({rule["result"] for rule in rules.values()}, {"agreed"})  # those before it and behind it

    def test_another_device(self):
        text, report = silicon("--short", planted="other", code=3)
        self.assertIn("gfx90a; the probes are for gfx942", text)
        self.assertIsNone(report)


class OtherPrograms(unittest.TestCase):
    """What attn-tests, attn-fp8-stress and attn bench may say, by stand-ins that say it."""

    def programs(self, name, text):
        folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
        return programs.Programs(folder, "hip")

    def test_a_failing_test(self):
        dashes = "-" * 79
        made = self.programs("attn-tests", f"""cat <<END
{dashes}
forward: two
  causal
{dashes}
/tree/tests/x.cpp:10
{"." * 79}

/tree/tests/x.cpp:12: FAILED:
  CHECK( 1 == 2 )

{"=" * 79}
test cases: 2 | 1 passed | 1 failed
assertions: 9 | 8 passed | 1 failed

SKIPPED: 3
END
exit 1""")
        results, failures = programs.conformance(made, False, lambda _: None)
        self.assertEqual(results, {"tests": 2, "failed": ["forward: two"], "skipped": 3})
        self.assertEqual(failures, ["forward: two: x.cpp:12: CHECK( 1 == 2 )"])

    def test_a_kernel_that_was_never_launched(self):
        made = self.programs("attn-tests", """
            echo 'All tests passed (3 assertions in 1 test case)'
            echo 'fwd_x was never launched'
            exit 1""")
        self.assertEqual(programs.conformance(made, False, lambda _: None)[1], ["attn-tests: fwd_x was never launched"])

    def test_without_git(self):
        with mock.patch.dict(os.environ, PATH="/nowhere"):
            self.assertEqual(cli.commit(), "unknown")

    def test_a_program_that_crashes(self):
        made = self.programs("attn-tests", "kill -SEGV $$")
        with self.assertRaisesRegex(RuntimeError, "attn-tests: ended by signal 11"):
            programs.conformance(made, False, lambda _: None)

    def test_a_failing_case(self):
        case = {"case": "sink/8", "kernel": "k", "ratio_to_model": 1.5, "share_of_max_v": 0.1, "pass": False, "broken": "too far"}
        report = json.dumps({"backends": [{"passed": 0, "failed": 1, "cases": [case]}]})
        results, failures = programs.stress(self.programs("attn-fp8-stress", f"echo '{report}'; exit 1"), True, lambda _: None)
        self.assertEqual(results[0]["failed"], ["sink/8"])
        self.assertEqual(failures, ["sink/8 of 64, 64: too far"])

    def test_times(self):
        row = {"median_us": 100.0, "tflops": 500.0, "gbytes_per_s": 1.0,
               "launches": [{"kernel": "prepare", "warm_us": 20.0}, {"kernel": "fwd_x", "warm_us": 80.0}]}
        kernel = {"name": "fwd_x", "op": "forward", "backend": "hip", "in_build": True, "in": ["bf16", "f32"],
                  "kv": ["bf16", "q8_0"], "head_dim": {"multiple": 16, "max": 128}}
        made = self.programs("attn", f"""
            case "$*" in
            info*) echo '{json.dumps({"kernels": [kernel]})}' ;;
            *q8_0*) echo '{json.dumps({"error": {"message": "no q8_0 here"}})}'; exit 4 ;;
            *) echo '{json.dumps({"cases": [row]})}' ;;
            esac""")
        rows = programs.speed(made, True, lambda _: None)
        self.assertEqual([row["kv"] for row in rows], ["bf16", "q8_0"])
        self.assertEqual((rows[0]["kernel_alone_us"], rows[0]["kernel_alone_tflops"]), (80, 625))
        self.assertEqual(rows[1]["declined"], "no q8_0 here")
        lines = programs.speed_lines(rows, {"AITER": {"not here": "no module"}, "hipBLASLt": {"bf16, TFLOP/s": 700.1}})
        self.assertIn("100.0 us    500.0 TFLOP/s, without prepare       80.0 us    625.0", lines[0])
        self.assertEqual(lines[1:], ["1 cases that kernels decline (--json)", "AITER: not here: no module",
                                     "hipBLASLt: bf16, TFLOP/s 700.1"])

    def test_peers_that_are_not_here(self):
        try:
            import torch
            self.skipTest(f"PyTorch {torch.__version__} is here")
        except ImportError:
            pass
        self.assertEqual(programs.peers(lambda _: None)["AITER"], {"not here": "No module named 'torch'"})


class Usage(unittest.TestCase):
    def test_no_library(self):
        text, _ = silicon("--driver", "/no/such/library.so", code=3, backend="hip")
        self.assertEqual(text.count("\n"), 1)
        self.assertTrue(text.startswith("silicon: hip: "))
        self.assertIn("/no/such/library.so", text)

    def test_the_emulator_is_no_device(self):
        text, _ = silicon("--driver", BUILD / "lib" / "libattn-hipemu.so", code=3, backend="hip")
        self.assertIn("is the gfx9 emulator", text)

    def test_no_such_device(self):
        text, _ = silicon("--device", "7", code=3)
        self.assertIn("device: 7; this hip-emu driver has 1", text)

    def test_no_such_part(self):
        text, _ = silicon("--only", "values,nothing", code=2)
        self.assertIn("'nothing' is no part", text)

    def test_no_folder_for_the_report(self):
        text, _ = silicon("--json", "/no/such/folder/report.json", code=2)
        self.assertIn("--json: there is no folder /no/such/folder", text)

    def test_builds_that_fail(self):
        """From a tree that is not built, with a cmake that only says why."""
        for says, sentence in [("-- attn: gfx9 emulator: left out, LLVM >= 17 not found",
                                "(attn: gfx9 emulator: left out, LLVM >= 17 not found); tools/setup installs what it needs"),
                               ("error: no compiler", "cmake --preset release failed, see ")]:
            with self.subTest(says=says), tempfile.TemporaryDirectory() as folder:
                tree, stub = Path(folder) / "tree", Path(folder) / "bin" / "cmake"
                ignored = shutil.ignore_patterns("*.cpp", "__pycache__")
                shutil.copytree(SOURCE / "tools", tree / "tools", ignore=ignored)
                (tree / "tests").mkdir()
                shutil.copy(SOURCE / "tests" / "count.py", tree / "tests")
                stub.parent.mkdir()
                stub.write_text(f"#!/bin/sh\necho '{says}'\nexit 1\n")
                stub.chmod(0o755)
                done = subprocess.run([tree / "tools" / "silicon"], capture_output=True, text=True,
                                      env=dict(os.environ, PATH=f"{stub.parent}:{os.environ['PATH']}"))
                self.assertEqual((done.returncode, done.stdout), (4, ""), done.stderr)
                self.assertEqual(done.stderr.count("\n"), 1)
                self.assertIn(sentence, done.stderr)

    def test_no_build(self):
        text, _ = silicon("--build", "/no/such/build", code=4)
        self.assertIn("/no/such/build has no attn and no attn-probe-run", text)


class RealLibraries(unittest.TestCase):
    """AMD's libamdhip64 as far as there is no device. ATTN_HIP_ROOTS: folders, with ":" between them, that Debian's packages of
    it and of all that it needs, its C library too, are unpacked in."""

    def test_no_device(self):
        roots = [Path(root) for root in os.environ.get("ATTN_HIP_ROOTS", "").split(":") if root]
        if not roots:
            self.skipTest("ATTN_HIP_ROOTS names no unpacked libamdhip64")
        for root in roots:
            with self.subTest(root=root), tempfile.TemporaryDirectory() as build:
                library = next(root.rglob("libamdhip64.so.[567]"))
                loader = next(path for path in root.rglob("ld-linux-*.so.*") if path.parent == library.parent)
                needs = subprocess.run(["ldd", PROGRAM], capture_output=True, text=True, check=True).stdout
                folders = dict.fromkeys([str(library.parent), *(str(Path(word).parent) for word in needs.split()
                                                                if word.startswith("/"))])
                for program in (BUILD / "bin").iterdir():
                    wrapper = Path(build) / "bin" / program.name
                    wrapper.parent.mkdir(exist_ok=True)
                    wrapper.write_text(f'#!/bin/sh\nexec {loader} --library-path {":".join(folders)} {program} "$@"\n')
                    wrapper.chmod(0o755)
                text, _ = silicon("--driver", library, "--build", build, code=3, backend="hip")
                self.assertEqual(text, "silicon: hipInit(0): hipErrorNoDevice (100): no ROCm-capable device is detected\n")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[4:], verbosity=2)
