"""test_prefill.py PREFILL MOCK_NCCL: examples/prefill.cpp with several processes on a stand-in for NCCL."""
import os
import subprocess
import sys
import unittest

PREFILL, NCCL = sys.argv[1:3]


class Prefill(unittest.TestCase):
    def run_of(self, *options):
        return subprocess.run([PREFILL, "--backend", "cpu", "--nccl", NCCL, *map(str, options)], capture_output=True, text=True, timeout=120)

    def test_ranks_agree_with_one_process(self):
        for ranks in 1, 2, 4:
            done = self.run_of("--ranks", ranks, "--tokens", 256)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertIn(f"{ranks} of {ranks} ranks agree", done.stdout)

    def test_a_rank_gives_up(self):
        done = self.run_of("--ranks", 3, "--tokens", 96, "--fail", 1)
        self.assertEqual(done.returncode, 1)
        self.assertIn("0 of 3 ranks agree", done.stdout)
        for rank in 0, 2:
            self.assertIn(f"rank {rank}: ncclAllGather: another rank gave up", done.stderr)
        self.assertFalse([name for name in os.listdir("/dev/shm") if name.startswith("attn-mock-nccl")])

    def test_no_library(self):
        done = subprocess.run([PREFILL, "--backend", "cpu", "--nccl", "/nowhere/libnccl.so.2", "--ranks", "2"], capture_output=True, text=True,
                              timeout=120)
        self.assertEqual(done.returncode, 1)
        self.assertIn("NCCL is not there", done.stderr)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
