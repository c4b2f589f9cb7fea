"""test_serve.py SOURCE_DIR SERVE LOOP PLANTED LIBATTN: examples/serve.py, serve.cpp and loop.c on small cases, and with mistakes."""
import os
import pty
import re
import subprocess
import sys
import unittest
from pathlib import Path

SOURCE, SERVE, LOOP, PLANTED, LIBATTN = Path(sys.argv[1]), *sys.argv[2:6]
SMALL = "--sequences 12 --tokens 12 --prompt 24 --batch 6 --chunk 20"


class Server:
    def serve(self, options, **environment):
        done = subprocess.run([*self.command, "--check", *options.split()], capture_output=True, text=True,
                              env=dict(os.environ, **environment))
        return done.returncode, done.stdout, done.stderr

    def as_without_cache(self, options, **environment):
        """Steps and preemptions of a run."""
        code, out, err = self.serve(options, **environment)
        self.assertEqual((code, err), (0, ""), out)
        match = re.fullmatch(r"(\d+) sequences, (\d+) tokens in [\d.]+ s: \d+ tokens/s; (\d+) steps, (\d+) preempted\n"
                             r"(\d+) of \5 tokens as without cache\n", out)
        self.assertTrue(match and match[2] == match[5], out)
        return int(match[3]), int(match[4])

    def test_small_cases(self):
        for options in ("", "--batch 1", "--chunk 1", "--chunk 100", "--page-size 1", "--page-size 64", "--layers 1",
                        "--layers 3", "--sequences 1", "--tokens 1", "--prompt 1", "--seed 2"):
            with self.subTest(options):
                self.as_without_cache(f"{SMALL} {options}")

    def test_64_at_a_time(self):
        self.as_without_cache("--sequences 80 --batch 64 --tokens 8 --prompt 16", OMP_NUM_THREADS="2")

    def test_too_few_pages(self):
        ample = self.as_without_cache(f"{SMALL} --page-size 4 --pages 54")
        tight = self.as_without_cache(f"{SMALL} --page-size 4 --pages 14")
        self.assertEqual(ample[1], 0)
        self.assertGreater(tight[1], 0)
        self.assertGreater(tight[0], ample[0])

    def test_mistakes_show(self):
        preload = {"LD_PRELOAD": f"{PLANTED} {LIBATTN}"}
        self.assertEqual(self.serve(SMALL, **preload)[0], 0)
        for mistake in "lengths", "pages":
            with self.subTest(mistake):
                code, out, err = self.serve(SMALL, PLANTED=mistake, **preload)
                self.assertEqual((code, err), (1, ""), out)
                right, total = re.search(r"^(\d+) of (\d+) tokens", out, re.M).groups()
                self.assertLess(int(right), int(total))

    def test_on_cuda(self):
        """By graphs: 16-bit caches, of which logits that lie close may change places."""
        code, out, err = self.serve(f"{SMALL} --backend cuda")
        absent = re.search("driver missing|driver version|no device|libcuda.so.1|cuInit: error 100|No module named 'torch'|NVIDIA driver|CUDA GPUs|compiled with CUDA", err)
        if code == 1 and absent:
            self.skipTest(err.strip())
        self.as_without_cache(f"{SMALL} --backend cuda")
        self.as_without_cache(f"{SMALL} --backend cuda --page-size 5 --pages 12")

    def test_options(self):
        for options in "--what 1", "--batch 0", "--batch x", "--batch", "--backend tpu":
            with self.subTest(options):
                self.assertEqual(self.serve(options)[0], 2)
        self.assertEqual(self.serve("--help")[0], 0)

    def test_bar_on_a_terminal(self):
        try:
            ours, theirs = pty.openpty()
        except OSError as error:
            self.skipTest(f"no terminal can be made here: {error}")
        done = subprocess.run([*self.command, *SMALL.split()], stdout=subprocess.PIPE, stderr=theirs)
        os.close(theirs)
        text = b""
        try:
            while True:
                text += os.read(ours, 100000)
        except OSError:  # its end, where the other side is closed
            os.close(ours)
        self.assertEqual(done.returncode, 0)
        self.assertTrue(text.decode().endswith(f"\r[{'#' * 40}] 12/12 sequences\r\n"), text)


class InCpp(Server, unittest.TestCase):
    command = [SERVE]


@unittest.skipUnless(os.environ.get("PYTHONPATH"), "this build has no Python package")
class InPython(Server, unittest.TestCase):
    command = [sys.executable, str(SOURCE / "examples" / "serve.py")]


class Loop(unittest.TestCase):
    def test_mistakes_show(self):
        for mistake, code in ("", 0), ("lengths", 1), ("pages", 1):
            with self.subTest(mistake):
                done = subprocess.run([LOOP], capture_output=True, text=True,
                                      env=dict(os.environ, PLANTED=mistake, LD_PRELOAD=f"{PLANTED} {LIBATTN}"))
                self.assertEqual((done.returncode, done.stderr), (code, ""), done.stdout)
                self.assertIn("313 tokens", done.stdout)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[6:], verbosity=2)
