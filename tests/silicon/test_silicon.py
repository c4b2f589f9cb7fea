"""test_silicon.py SOURCE_DIR BUILD_DIR PLANTED_LIBRARY: tools/silicon as an owner of a device runs it, on the emulator."""
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SOURCE, BUILD, PLANTED = map(Path, sys.argv[1:4])
sys.path.insert(0, str(SOURCE / "tools"))
from probes import operations, placement, rates  # noqa: E402
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
        self.assertEqual({part["name"]: part["status"] for part in self.report["parts"]},
                         {part["name"]: "done" for part in self.report["parts"]})
        self.assertTrue(self.report["emulated"])
        self.assertIn("EMULATED", self.text)
        known = {"loads to LDS, scratch", "workgroup i runs on XCD i % 8", "wave w of a workgroup runs on SIMD w % 4"}
        self.assertEqual({name for (_, name), rule in self.rules.items() if rule["result"] == "not run"}, known)
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

    def test_no_build(self):
        text, _ = silicon("--build", "/no/such/build", code=4)
        self.assertIn("/no/such/build has no attn and no attn-probe-run", text)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[4:], verbosity=2)
