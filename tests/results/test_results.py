"""What programs read of a run of a Catch2 program, by a small one (cases.cpp): test_results.py PROGRAM

Lists and summaries differ between versions of Catch2; what is read must not.
"""
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]
PROGRAM = Path(sys.argv.pop(1)).resolve() if len(sys.argv) > 1 else None
sys.path += [str(SOURCE / "tests"), str(SOURCE / "tests/device"), str(SOURCE / "tools")]
import conformance  # noqa: E402
import count  # noqa: E402
import mutants  # noqa: E402
import races  # noqa: E402
from probes import programs  # noqa: E402

USUAL = ["results: passes", "results: a comma, a [bracket], a back\\slash", "results: skipped at once", "results: skipped in part"]


def run(*arguments):
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True)


class Results(unittest.TestCase):
    def bin(self, **scripts):
        """A folder with attn-tests, and these shell scripts, first on PATH."""
        folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        (folder / "attn-tests").symlink_to(PROGRAM)
        for name, text in scripts.items():
            path = folder / name.replace("_", "-")
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(0o755)
        return folder, dict(os.environ, PATH=f"{folder}:{os.environ['PATH']}")

    def test_names(self):
        listed = run("--list-test-names-only")
        self.assertEqual((listed.returncode, listed.stdout.splitlines(), listed.stderr), (0, USUAL, ""))
        self.assertEqual(conformance.cases(PROGRAM, None), USUAL)
        self.assertEqual(conformance.cases(PROGRAM, "*skipped*"), USUAL[2:])
        self.assertEqual(conformance.cases(PROGRAM, "[long]"), ["results: hidden"])
        # As tests/CMakeLists.txt divides attn-tests: arguments are joined by "and", commas by "or". Where there are only exclusions
        # Catch2 2.13 runs hidden cases too.
        self.assertEqual(conformance.cases(PROGRAM, "~[long]*hidden,*passes"), USUAL[:1])
        self.assertEqual(run("~*skipped*", "~*comma*", "~[.]", "--list-test-names-only").stdout.splitlines(), USUAL[:1])

    def test_no_case(self):
        self.assertEqual(run("no such case").returncode, 2)
        self.assertEqual(conformance.cases(PROGRAM, "no such case"), [])

    def test_each_case_alone(self):
        rows = {name: conformance.run(PROGRAM, name, 60) for name in [*USUAL, "results: hidden", "results: fails"]}
        self.assertEqual({name: (row["result"], row["assertions"]) for name, row in rows.items()},
                         {USUAL[0]: ("passed", 2), USUAL[1]: ("passed", 1), USUAL[2]: ("skipped", 1), USUAL[3]: ("passed", 4),
                          "results: hidden": ("passed", 1), "results: fails": ("failed", 3)})
        self.assertEqual(rows[USUAL[2]]["why"], ["nothing is here"])
        self.assertIn("1 == 2", rows["results: fails"]["output"])

    def test_conformance(self):
        folder, environment = self.bin(nvidia_smi="echo 'A device, 1.2, 700.00 W, 1980 MHz'")
        done = subprocess.run([sys.executable, SOURCE / "tests/device/conformance.py", folder, folder / "out.json", "abc", "--jobs", "2"],
                              capture_output=True, text=True, env=environment)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("3 passed, 0 failed, 0 cut off, 1 skipped, 8 assertions", done.stdout)
        self.assertEqual([row["case"] for row in json.loads((folder / "out.json").read_text())["cases"]], USUAL)

    def test_shards(self):
        folder, ran = Path(tempfile.mkdtemp()), 0
        self.addCleanup(shutil.rmtree, folder)
        shard = [sys.executable, SOURCE / "tests/shard.py"]
        for part in (1, 2, 3):
            done = subprocess.run([*shard, f"{part}/3", folder, PROGRAM, "~[.],[long]"], capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            ran += (count.catch_counts(done.stdout) or (0,))[0]
        self.assertEqual(ran, len(USUAL) + 1)
        self.assertNotEqual(subprocess.run([*shard, "1/1", folder, PROGRAM, "[failing]"], stdout=subprocess.DEVNULL).returncode, 0)

    def test_a_kernel_that_no_part_launched(self):
        folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        check = [sys.executable, SOURCE / "tests/shard.py", "check/2", folder]
        (folder / "launches.1").write_text("3\tfwd_a\ttest\n0\tfwd_b\ttest\n")
        for launches, code, says in [(0, 1, "FAILED: no test has launched fwd_b"), (2, 0, "launched: fwd_b 2")]:
            (folder / "launches.2").write_text(f"0\tfwd_a\tother\n{launches}\tfwd_b\tother\n")
            done = subprocess.run(check, capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stdout), (code, f"launched: fwd_a 3\n{says}\n"))
        (folder / "launches.2").write_text("")
        (folder / "launches.1").write_text("")
        self.assertEqual(subprocess.run(check, stdout=subprocess.DEVNULL).returncode, 1)

    def test_count(self):
        for filters, code, counts in [((), 0, (4, 0, 2)), (["*skipped at once"], 0, (1, 0, 1)), (["*passes"], 0, (1, 0, 0)),
                                      (["*passes,*fails,*at once"], None, (3, 1, 1))]:
            done = run(*filters)
            self.assertEqual(count.catch_counts(done.stdout), counts, done.stdout)
            if code is None:
                self.assertNotEqual(done.returncode, 0)
            else:
                self.assertEqual(done.returncode, code)

    def test_the_failed_case(self):
        found = programs.FAILED_CASE.search(run("*passes,*fails").stdout)
        self.assertEqual(found["name"], "results: fails")
        self.assertTrue(found["where"].split("/")[-1].startswith("cases.cpp:"), found["where"])
        self.assertEqual(found["what"].strip(), "CHECK( 1 == 2 )")

    def test_mutants(self):
        folder, _ = self.bin()
        for filters, code in [(["*passes"], 0), (["*fails"], 1)]:
            mutants.TESTS["k"] = filters
            for mistake in ("unchanged", "x"):
                mutants.file_of(folder, "k", mistake).write_text("")
            done, output, _ = mutants.run(folder, PROGRAM, "k", "x", 0, {})
            self.assertEqual((done != 0, "All tests passed" in output, "FAILED" in output), (code == 1, code == 0, code == 1))
        done, output, _ = mutants.run(folder, PROGRAM, "k", "of no file", 0, {})
        self.assertEqual((done, "is not there" in output), (None, True))

    def test_a_mutant_that_is_stale(self):
        folder, environment = self.bin(nvcc='while [ "$1" != -o ]; do shift; done; touch "$2"')
        usual = mutants.MUTANTS
        try:
            mutants.MUTANTS = [(mutants.MERGE, "stale", "merge/merge_cuda.cu", "no such text", ""), next(m for m in usual if m[0] == mutants.MERGE)]
            with contextlib.redirect_stdout(io.StringIO()) as text:
                self.assertEqual(mutants.compile_all(SOURCE, folder, folder / "nvcc", [mutants.MERGE]), 1)
        finally:
            mutants.MUTANTS = usual
        self.assertIn("stale: FAILED: kernels/merge/merge_cuda.cu has no", text.getvalue())
        self.assertEqual(len(list(folder.glob("merge_cuda-*.fatbin"))), 2)

    def test_sanitize(self):
        log = 'while [ "$1" != --log-file ]; do shift; done; echo "========= ERROR SUMMARY: 0 errors" >"$2"; shift 2; exec "$@"'
        folder, environment = self.bin(compute_sanitizer=log)
        environment.update(TOOLS="memcheck", TESTS="none", KERNELS="fwd_sm80_bf16_d64 fwd_sm80_bf16_d128 fwd_sm80_bf16_d256")
        done = subprocess.run([SOURCE / "tests/device/sanitize.sh", folder, folder / "logs"], capture_output=True, text=True, env=environment)
        lines = {line.split()[1]: line.split("  ")[-1].strip() for line in done.stdout.splitlines() if " fwd_" in line}
        self.assertEqual(lines, {"fwd_sm80_bf16_d64": "clean", "fwd_sm80_bf16_d128": "clean", "fwd_sm80_bf16_d256": "not of this test"},
                         done.stdout + done.stderr)

    def test_races(self):
        first = "========= Error: Race reported between Write access at void ns::One<int, (bool)1>::join_groups(bool)+0x10 in swapped.cuh:1"
        known = f"{first}\n=========     and Read access at ns::One<int>::join_groups(bool)+0x20 in swapped.cuh:9 [128 hazards]\n"
        self.assertEqual(races.pairs(known), {("join_groups swapped.cuh",) * 2: 1})
        for text, code in (known, 0), (known.replace("One<int>::join_groups", "other"), 1), (known.replace(" in swapped.cuh:9", ""), 1):
            log = Path(tempfile.mkdtemp()) / "log"
            self.addCleanup(shutil.rmtree, log.parent)
            log.write_text(text)
            done = subprocess.run([sys.executable, SOURCE / "tests/device/races.py", log], capture_output=True, text=True)
            self.assertEqual((done.returncode, "NOT KNOWN" in done.stdout), (code, code == 1), done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
