"""test_train.py SOURCE_DIR: examples/train.py, a few steps, with libattn's attention and with PyTorch's."""
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

EXAMPLES = Path(sys.argv[1]) / "examples"
NEEDS = ("torch", "tqdm")


@unittest.skipUnless(os.environ.get("PYTHONPATH"), "this build has no Python package")
@unittest.skipUnless(all(map(importlib.util.find_spec, NEEDS)), f"{' or '.join(NEEDS)} is not installed")
class Train(unittest.TestCase):
    def run_of(self, *options):
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            done = subprocess.run([sys.executable, EXAMPLES / "train.py", "--steps", "12", "--seqlen", "96", "--json", file.name, *options],
                                  capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            return json.loads(Path(file.name).read_text())

    def test_as_with_torch(self):
        runs = self.run_of()
        ours, torch = runs["libattn"], runs["torch"]
        self.assertLess(ours["losses"][-1], ours["losses"][0] - 1)
        for a, b in zip(ours["losses"], torch["losses"]):
            self.assertAlmostEqual(a, b, delta=1e-4)
        # Not the same kernels: the last bits of the weights tell which.
        self.assertNotEqual(ours["weights"], torch["weights"])
        again = self.run_of("--attention", "libattn")["libattn"]
        self.assertEqual((again["losses"], again["weights"]), (ours["losses"], ours["weights"]))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
