"""test_ranks.py PREFILL DECODE MOCK_NCCL: examples over several GPUs, with several processes on a stand-in for NCCL."""
import os
import subprocess
import sys
import unittest

PROGRAMS, NCCL = sys.argv[1:3], sys.argv[3]


class Ranks(unittest.TestCase):
    def run_of(self, program, *options, nccl=NCCL):
        return subprocess.run([program, "--backend", "cpu", "--nccl", nccl, *map(str, options)], capture_output=True, text=True, timeout=120)

    def test_ranks_agree_with_one_process(self):
        for program in PROGRAMS:
            for ranks in 1, 2, 4:
                with self.subTest(program=program, ranks=ranks):
                    done = self.run_of(program, "--ranks", ranks, "--tokens", 256)
                    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                    self.assertIn(f"{ranks} of {ranks} ranks agree", done.stdout)

    def test_a_rank_gives_up(self):
        for program in PROGRAMS:
            with self.subTest(program=program):
                done = self.run_of(program, "--ranks", 3, "--tokens", 96, "--fail", 1)
                self.assertEqual(done.returncode, 1)
                self.assertIn("0 of 3 ranks agree", done.stdout)
                for rank in 0, 2:
                    self.assertIn(f"rank {rank}: ncclAllGather: another rank gave up", done.stderr)
                self.assertFalse([name for name in os.listdir("/dev/shm") if name.startswith("attn-mock-nccl")])

    def test_no_library(self):
        done = self.run_of(PROGRAMS[0], "--ranks", 2, nccl="/nowhere/libnccl.so.2")
        self.assertEqual(done.returncode, 1)
        self.assertIn("NCCL is not there", done.stderr)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[4:]])
