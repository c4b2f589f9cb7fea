"""The library's code objects: python3 tests/amdhsa/test_shipped.py SOURCE_DIR OBJECT.hsaco... [unittest options]."""
import sys
import unittest
from pathlib import Path

from common import LLVM, Case


class Check(Case):
    def examine(self, path):
        done = self.amdhsa("check", path)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertNotIn("warning:", done.stdout)


class Hazards(Case):
    """Wait states again, by LLVM's hazard recognizer."""

    def setUp(self):
        super().setUp()
        if not (LLVM.folder / "llc").exists():
            self.skipTest(f"{LLVM.folder} has no llc")
        if int(LLVM.version.split(".")[0]) not in (19, 22):
            self.skipTest(f"amdhsa hazards has been tried with LLVM 19 and 22, {LLVM.version} is here")

    def examine(self, path):
        done = self.amdhsa("hazards", path)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


objects = [Path(word).resolve() for word in sys.argv[1:] if word.endswith(".hsaco")]
sys.argv = [word for word in sys.argv if not word.endswith(".hsaco")]
for path in objects:
    for case in Check, Hazards:
        setattr(case, f"test_{path.stem}", lambda self, path=path: self.examine(path))

if __name__ == "__main__":
    if not objects:
        sys.exit("no code object is given")
    unittest.main(verbosity=2)
