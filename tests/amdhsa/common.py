"""Runs amdhsa for its tests; needs Python's standard library only."""
import contextlib
import io
import os
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

SOURCE = Path(sys.argv.pop(1)).resolve()
AMDHSA = SOURCE / "tools" / "amdhsa" / "amdhsa"
sys.dont_write_bytecode = True
sys.path.insert(0, str(SOURCE / "tools"))

from amdhsa import cli
from amdhsa.failure import Failure
from amdhsa.llvm import find_llvm

SKIPPED = 77


def skip(why):
    print(f"skipped: {why}")
    sys.exit(SKIPPED)


try:
    LLVM = find_llvm()
except Failure as failure:
    skip(failure)


def llvm_tool(name, *arguments):
    return subprocess.run([LLVM.folder / name, *map(str, arguments)], check=True, capture_output=True,
                          text=True).stdout


class Case(unittest.TestCase):
    """Works in a folder of its own."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def amdhsa(self, *arguments, env=None):
        """What the program does: in this process, which has found LLVM already, but where `env` is given."""
        arguments = [str(argument) for argument in arguments]
        if env is None:
            out, err = io.StringIO(), io.StringIO()
            there = os.getcwd()
            os.chdir(self.folder)
            try:
                with (contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
                      mock.patch.object(cli, "find_llvm", lambda folder: find_llvm(folder) if folder else LLVM)):
                    code = cli.main(arguments)
            except SystemExit as done:  # argparse's
                code = done.code
            finally:
                os.chdir(there)
            done = subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())
        else:
            done = subprocess.run([sys.executable, AMDHSA, *arguments], capture_output=True, text=True,
                                  cwd=self.folder, env={**os.environ, **env})
        self.assertIn(done.returncode, (0, 1, 2), done.stderr)
        self.assertNotIn("Traceback", done.stderr)
        return done

    def write(self, name, text):
        path = self.folder / name
        path.write_text(text)
        return path

    def generate(self, text, *options, name="k"):
        """A linked object of an assembly text."""
        output = self.folder / f"{name}.hsaco"
        done = self.amdhsa("generate", self.write(f"{name}.s", text), "-o", output, *options)
        self.assertEqual(done.returncode, 0, done.stderr)
        return output

    def refused(self, text, *options):
        """The sentence by which generate refuses a text."""
        output = self.folder / "refused.hsaco"
        done = self.amdhsa("generate", self.write("refused.s", text), "-o", output, *options)
        self.assertEqual(done.returncode, 2, done.stdout)
        self.assertFalse(output.exists())
        self.assertTrue(done.stderr.startswith("amdhsa: "), done.stderr)
        return done.stderr[len("amdhsa: "):].strip()


def descriptor_place(path, kernel):
    """Offset in the file of a kernel's descriptor, as LLVM sees it."""
    address = next(int(words[1], 16) for words in map(str.split, llvm_tool(
        "llvm-readelf", "-sW", path).splitlines()) if words and words[-1] == f"{kernel}.kd")
    for words in map(str.split, llvm_tool("llvm-readelf", "-SW", path).replace("[ ", "[").splitlines()):
        if len(words) > 5 and words[1] == ".rodata":
            return address - int(words[3], 16) + int(words[4], 16)
    raise AssertionError("no .rodata")


def granules(path, kernel):
    """(VGPRs, SGPRs, accum_offset) as the descriptor encodes them, fields of AMD's documentation."""
    data = path.read_bytes()[descriptor_place(path, kernel):][:64]
    rsrc3, rsrc1 = struct.unpack_from("<II", data, 44)
    return rsrc1 & 63, rsrc1 >> 6 & 15, rsrc3 & 63
