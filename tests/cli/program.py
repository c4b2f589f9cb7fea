"""A program as a script sees it: exit code, one sentence on failure, output."""
import json
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path


class ProgramTest(unittest.TestCase):
    program = None  # path; its file name stands in front of every sentence

    def setUp(self):
        self.dir = Path(tempfile.mkdtemp(prefix="attn-cli-"))
        self.addCleanup(shutil.rmtree, self.dir)

    def path(self, name):
        return str(self.dir / name)

    def run_program(self, *args, code=0, says=None, prints=False):
        """Checks the exit code and, on failure, that stderr is one sentence that has `says` and, unless it
        `prints`, that stdout is empty."""
        name = Path(self.program).name
        run = subprocess.run([self.program, *map(str, args)], capture_output=True, text=True, timeout=300)
        words = f"{name} {' '.join(map(str, args))}\n{run.stdout}{run.stderr}"
        self.assertEqual(run.returncode, code, words)
        if code >= 2:
            if not prints:
                self.assertEqual(run.stdout, "", words)
            asides = "is not used", "WARNING: kernels come from"
            lines = [line for line in run.stderr.splitlines() if not any(aside in line for aside in asides)]
            self.assertEqual(len(lines), 1, words)
            self.assertTrue(lines[0].startswith(f"{name}: "), words)
        if says is not None:
            self.assertIn(says, run.stderr if code >= 2 else run.stdout, words)
        return run.stdout

    def json(self, *args, code=0):
        return json.loads(self.run_program(*args, "--json", code=code))

    def json_error(self, *args, code, says):
        """With --json a failure is one object on stdout, and nothing of it on stderr."""
        run = subprocess.run([self.program, *map(str, args)], capture_output=True, text=True, timeout=300)
        words = f"{' '.join(map(str, args))}\n{run.stdout}{run.stderr}"
        self.assertEqual(run.returncode, code, words)
        self.assertEqual(run.stderr, "", words)
        report = json.loads(run.stdout)
        self.assertEqual(list(report), ["error"], words)
        self.assertEqual(report["error"]["exit_code"], code, words)
        self.assertIn(says, report["error"]["message"], words)
        return report["error"]["status"]
