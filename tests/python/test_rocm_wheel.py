"""AMD's HIP library as its package for Python has it, in the place of which is the stand-in of tests/mock."""
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import attn

MOCK = Path(attn.__file__).parents[2] / "mock" / "hip_loaded.so"

PROGRAM = '''
import attn
hip = next(b for b in attn.info()["backends"] if b["name"] == "hip")
print(hip["available"], [(d["name"], d["arch"], bool(d["passed_by"]), bool(d["kernels"])) for d in hip["devices"]])
'''


@unittest.skipUnless(MOCK.exists(), "this build has no stand-in for libamdhip64")
@unittest.skipIf(any(b["name"] == "hip" and b["available"] for b in attn.info()["backends"]), "the loader finds a HIP library")
@unittest.skipIf("LD_PRELOAD" in os.environ, "the stand-in's memory is not the sanitizer's")
class Wheel(unittest.TestCase):
    def found(self, folder, arch):
        environment = {**os.environ, "MOCK_GCN_ARCH": arch, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        return done.stdout.strip()

    def test_anywhere_on_the_path(self):
        built = any(k["backend"] == "hip" and k["in_build"] for k in attn.info()["kernels"])
        with tempfile.TemporaryDirectory() as folder:
            lib = Path(folder) / "_rocm_sdk_core" / "lib"
            lib.mkdir(parents=True)
            self.assertEqual(self.found(folder, "gfx942"), "False []")
            (lib / "libamdhip64.so.7").write_text("no library")
            self.assertEqual(self.found(folder, "gfx942"), "False []")
            (lib / "libamdhip64.so.6").symlink_to(MOCK)
            self.assertEqual(self.found(folder, "gfx942"), f"True {[('Mock HIP device', 'gfx942', not built, built)] * 2}")
            self.assertEqual(self.found(folder, "gfx1103"), f"True {[('Mock HIP device', 'gfx1103', True, False)] * 2}")


if __name__ == "__main__":
    unittest.main()
