"""test_configure.py SOURCE_DIR: what is decided and said before anything is compiled."""
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SOURCE = sys.argv[1]
QUIET = ["-DATTN_BUILD_TOOLS=OFF", "-DATTN_BUILD_TESTS=OFF", "-DATTN_PYTHON=OFF"]


class Configure(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.bin = Path(self.folder.name) / "bin"
        self.bin.mkdir()

    def nvcc(self, release):
        """Puts an nvcc on PATH; PATH has no other."""
        program = self.bin / "nvcc"
        program.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {release}, V{release}.1\n")
        program.chmod(0o755)

    def configure(self, *options, fails=False):
        path = [folder for folder in os.environ["PATH"].split(":") if not (Path(folder) / "nvcc").exists()]
        # cc and cmake may lie where an nvcc lies.
        for program in ("cmake", "ninja", "cc", "c++", "as", "ld", "python3"):
            found = subprocess.run(["sh", "-c", f"command -v {program}"], capture_output=True, text=True).stdout.strip()
            if found and not (self.bin / program).exists():
                (self.bin / program).symlink_to(found)
        environment = dict(os.environ, PATH=":".join([str(self.bin), *path]), CUDA_HOME="", CUDA_PATH="")
        done = subprocess.run(
            ["cmake", "-G", "Ninja", "-S", SOURCE, "-B", self.folder.name + "/build", *options],
            capture_output=True, text=True, env=environment)
        said = done.stdout + done.stderr
        self.assertEqual(done.returncode != 0, fails, said)
        return " ".join(said.split())

    def test_cuda(self):
        gfx9 = "-DATTN_GFX9=OFF"
        said = self.configure(*QUIET, gfx9)
        self.assertIn("CUDA kernels: left out, no nvcc on PATH", said)
        self.assertIn("GFX9 kernels: left out, ATTN_GFX9 is OFF", said)
        said = self.configure(*QUIET, gfx9, "-DATTN_CUDA=OFF")
        self.assertIn("CUDA kernels: left out, ATTN_CUDA is OFF", said)
        self.nvcc("11.8")
        said = self.configure(*QUIET, gfx9, "-DATTN_CUDA=AUTO")
        self.assertRegex(said, "CUDA kernels: left out, .*/nvcc is 11.8, 12.8 is needed")
        said = self.configure(*QUIET, gfx9, "-DATTN_CUDA=ON", fails=True)
        self.assertRegex(said, "ATTN_CUDA=ON needs: .*/nvcc is 11.8, 12.8 is needed")
        self.nvcc("13.0")
        said = self.configure(*QUIET, gfx9, "-DATTN_CUDA=AUTO")
        self.assertRegex(said, r"CUDA kernels: \d+, nvcc 13.0, .*/nvcc \(ATTN_CUDA is AUTO\)")

    def test_all_that_is_missing_is_said_at_once(self):
        empty = self.folder.name + "/empty"
        Path(empty).mkdir()
        found_in = ["-DCMAKE_FIND_ROOT_PATH=" + empty, "-DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY",
                    "-DCMAKE_FIND_ROOT_PATH_MODE_PACKAGE=ONLY", "-DCMAKE_FIND_ROOT_PATH_MODE_PROGRAM=NEVER"]
        self.nvcc("11.8")
        missing = ["Catch2", "CLI11", "nlohmann_json"]
        packages = ["catch2", "libcli11-dev", "nlohmann-json3-dev"]
        said = self.configure(*found_in, "-DATTN_CUDA=ON", fails=True)
        for name in [*missing, "ATTN_CUDA=ON", "apt-get install " + " ".join(packages)]:
            self.assertIn(name, said)
        self.assertNotIn("compiler identification", said)  # before anything is tried
        # Without tools and tests, none of it is needed.
        self.configure(*found_in, *QUIET, "-DATTN_CUDA=OFF", "-DATTN_GFX9=OFF")

    def declaration(self, line, fails=False):
        folder = Path(self.folder.name)
        (folder / "k.cu").write_text(line + "\n#include <nothing>\n")
        (folder / "read.cmake").write_text(
            f"include({SOURCE}/kernels/declaration.cmake)\nattn_cuda_declaration(k.cu archs bytes embedded)\n"
            'message("archs ${archs}, bytes ${bytes}, embedded ${embedded}")\n')
        done = subprocess.run(["cmake", "-P", "read.cmake"], cwd=folder, capture_output=True, text=True)
        self.assertEqual(done.returncode != 0, fails, done.stderr)
        return " ".join(done.stderr.split())

    def test_what_a_cuda_file_declares(self):
        self.assertIn("archs sm_80;sm_90a;compute_80, bytes 0, embedded TRUE",
                      self.declaration("//# architectures sm_80 sm_90a compute_80"))
        self.assertIn("archs compute_90, bytes 64, embedded FALSE",
                      self.declaration("//# architectures compute_90 local_bytes=64 not_in_library"))
        for line in ("", "// A kernel.", "//# architectures", "//# architectures local_bytes=8",
                     "//# architectures sm_80 gfx942", "//# archs sm_80"):
            said = self.declaration(line, fails=True)
            self.assertIn(f'k.cu begins with "{line}"', said)
            self.assertIn("accepted: //# architectures, then some of sm_XX, sm_XXa, compute_XX", said)

    def test_no_compiler(self):
        # A name that is not there, as an empty PATH would leave it.
        os.environ["CXX"] = os.environ["CC"] = "no-such-compiler"
        self.addCleanup(os.environ.pop, "CXX")
        self.addCleanup(os.environ.pop, "CC")
        said = self.configure(*QUIET, fails=True)
        self.assertIn("a C++20 compiler", said)
        self.assertIn("apt-get install g++", said)

    def test_gfx9_off_leaves_the_emulator_out(self):
        said = self.configure("-DATTN_BUILD_TESTS=OFF", "-DATTN_PYTHON=OFF", "-DATTN_CUDA=OFF", "-DATTN_GFX9=OFF")
        self.assertIn("gfx9 emulator: left out, ATTN_GFX9 is OFF", said)

    def test_what_gfx9_leaves_out(self):
        said = self.configure(*QUIET, "-DATTN_CUDA=OFF")
        if "GFX9 kernels: left out" in said:
            self.skipTest("no LLVM for gfx9 kernels")
        version = int(re.search(r"GFX9 kernels: \d+, LLVM (\d+)", said).group(1))
        left_out = re.search(r"gfx950 kernels: left out, LLVM \S+ in \S+ does not know gfx950; LLVM 20 and newer know gfx950", said)
        self.assertEqual(bool(left_out), version < 20, said)

    def test_another_architecture(self):
        if not any((Path(p) / "aarch64-linux-gnu-g++").exists() for p in os.environ["PATH"].split(":")):
            self.skipTest("no aarch64-linux-gnu-g++")
        self.nvcc("13.0")
        said = self.configure("--toolchain", SOURCE + "/cmake/toolchains/aarch64-linux-gnu.cmake")
        self.assertIn("CUDA kernels: left out, cross-compiling", said)
        self.assertIn("Python package: left out, cross-compiling", said)
        self.assertRegex(said, "gfx9 emulator: left out, (.* does not link for aarch64|LLVM >= 17 not found)")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
