"""What holds for the sources themselves: which folder includes which, and their layout."""
import contextlib
import importlib.util
import io
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).parent))
import includes  # noqa: E402

TREE = Path(__file__).resolve().parents[2]


def said(tree):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        failed = includes.main([str(tree)])
    return failed, out.getvalue()


class Includes(unittest.TestCase):
    def tree(self, files):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        for name, text in files.items():
            path = Path(folder.name) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return said(folder.name)

    def test_this_tree(self):
        failed, text = said(TREE)
        self.assertFalse(failed, text)
        self.assertGreater(int(text.split()[0]), 500)

    def test_upwards(self):
        failed, text = self.tree({"src/core/a.h": '#pragma once\n#include "plan/b.h"\n', "src/plan/b.h": ""})
        self.assertTrue(failed)
        self.assertIn("src/core/a.h:2: src/core includes src/plan (src/plan/b.h); accepted: ", text)

    def test_device_code_and_host(self):
        failed, text = self.tree({"kernels/forward_sm90/a.cuh": '#include "../../src/core/b.h"\n', "src/core/b.h": "",
                                  "kernels/shared/c.h": '#include "../ptx/d.h"\n', "kernels/ptx/d.h": "",
                                  "src/plan/e.cpp": '#include "kernels/forward_sm90/tiles.h"\n', "kernels/forward_sm90/tiles.h": ""})
        self.assertTrue(failed)
        for place in ("kernels/forward_sm90/a.cuh:1", "kernels/shared/c.h:1", "src/plan/e.cpp:1"):
            self.assertIn(place, text)

    def test_what_a_family_shares_with_its_kernels(self):
        failed, text = self.tree({"src/kernels/a.cpp": '#include "kernels/forward_sm90/tiles.h"\n#include "kernels/forward_sm90/b_args.h"\n',
                                  "kernels/forward_sm90/tiles.h": "", "kernels/forward_sm90/b_args.h": ""})
        self.assertFalse(failed, text)

    def test_circle(self):
        failed, text = self.tree({"src/core/a.h": '#include "core/b.h"\n', "src/core/b.h": '#include "a.h"\n'})
        self.assertTrue(failed)
        self.assertIn("files in a circle: src/core/a.h -> src/core/b.h -> src/core/a.h", text)

    def test_the_picture_of_the_handbook(self):
        done = subprocess.run([sys.executable, Path(__file__).parent / "includes.py", "--picture"],
                              capture_output=True, text=True, check=True)
        arrows = [line.split("->")[0].split()[0] + " -> " + ", ".join(sorted(w for w in line.split("->")[1].split()
                  if not w.rstrip(",").isdigit())) for line in done.stdout.splitlines() if "->" in line]
        handbook = (TREE / "HACKING.md").read_text()
        for arrow in arrows:
            if arrow.startswith("src/"):
                self.assertIn(arrow, handbook)


class Lists(unittest.TestCase):
    def test_every_gfx9_kernel_is_among_those_that_the_emulator_tests_run(self):
        listed = (TREE / "tests" / "gfx9" / "shipped.cpp").read_text()
        names = [path.stem for path in (TREE / "asm").glob("gfx*/*.s")]
        self.assertGreater(len(names), 5)
        for name in names:
            self.assertIn(f'"{name}"', listed)


class Layout(unittest.TestCase):
    def test_clang_format(self):
        found = importlib.util.find_spec("clang_format")
        if not found:
            self.skipTest(f"{sys.executable} has no clang-format; tools/setup --test installs it")
        program = Path(found.origin).parent / "data" / "bin" / "clang-format"
        endings = (".cpp", ".h", ".hpp", ".c", ".cu", ".cuh")
        tops = ("include", "src", "kernels", "asm", "python", "integrations", "tools", "tests", "examples", "bench")
        files = [path for top in tops for path in sorted((TREE / top).rglob("*")) if path.suffix in endings]
        self.assertGreater(len(files), 200)
        done = subprocess.run([program, "--dry-run", "-Werror", *files], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr[:4000] + f"\n{program} -i FILES mends it")


if __name__ == "__main__":
    unittest.main(verbosity=2)
