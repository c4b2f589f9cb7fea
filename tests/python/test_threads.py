"""Threads of the host backends, and signals that arrive during a call."""
import os
import signal
import subprocess
import sys
import threading
import time
import unittest

from support import Case, attn, np, softmax_attention


def os_threads():
    return len(os.listdir("/proc/self/task"))


@unittest.skipUnless(os.path.isdir("/proc/self/task"), "/proc counts no threads here")
class Threads(Case):
    def setUp(self):
        super().setUp()
        attn.cache_clear()
        attn.set_num_threads(1)
        self.addCleanup(attn.set_num_threads, 0)
        self.alone = os_threads()
        self.q, self.k, self.v = self.qkv()

    def test_calls_use_what_was_set(self):
        want = softmax_attention(self.q, self.k, self.v)[0]
        for n in 3, 1, 5, 2:
            attn.set_num_threads(n)
            self.assertEqual(attn.get_num_threads(), n)
            for backend in "cpu", "reference":
                self.close(attn.forward(self.q, self.k, self.v, backend=backend), want)
            out, lse = attn.forward(self.q, self.k, self.v, return_lse=True)
            attn.merge([(out, lse)])
            attn.quantize(self.k, "q8_0" if self.k.shape[3] % 32 == 0 else "f8_e4m3fn")
            # One pool for each backend, and none of those before.
            self.assertEqual(os_threads() - self.alone, 2 * (n - 1))

    def test_a_plan_keeps_its_threads(self):
        plan = attn.Plan(self.q, self.k, self.v, num_threads=4)
        self.assertEqual(os_threads() - self.alone, 3)
        self.assertEqual(attn.get_num_threads(), 1)
        default = attn.Plan(self.q, self.k, self.v)
        attn.set_num_threads(2)
        want = softmax_attention(self.q, self.k, self.v)[0]
        self.close(plan(self.q, self.k, self.v), want)
        self.close(default(self.q, self.k, self.v), want)
        self.assertEqual(os_threads() - self.alone, 3)
        del plan
        attn.set_num_threads(1)
        self.assertEqual(os_threads(), self.alone)
        self.assertEqual(attn.explain(self.q, self.k, self.v, num_threads=2)["backend"], "cpu")

    def test_the_default_again(self):
        """A plan of the default number of threads still runs when another number was set and then the default again."""
        attn.set_num_threads(0)
        plan, want = attn.Plan(self.q, self.k, self.v), softmax_attention(self.q, self.k, self.v)[0]
        attn.set_num_threads(attn.get_num_threads() + 1)
        attn.set_num_threads(0)
        self.close(attn.forward(self.q, self.k, self.v), want)
        self.close(plan(self.q, self.k, self.v), want)

    def test_refused(self):
        self.refuses(ValueError, ["threads is -1", "1 to 4096"], attn.set_num_threads, -1)
        self.refuses(ValueError, ["threads is 4097"], attn.set_num_threads, 4097)
        self.refuses(ValueError, ["num_threads is -2", "1 to 4096"], attn.Plan, self.q, self.k, self.v, num_threads=-2)
        self.refuses(TypeError, "", attn.set_num_threads, "two")
        self.assertEqual(attn.get_num_threads(), 1)

    def test_the_default(self):
        cores = len(os.sched_getaffinity(0))
        code = ("import os, attn; first = attn.get_num_threads(); os.environ['OMP_NUM_THREADS'] = '9'; "
                "attn.set_num_threads(4); set = attn.get_num_threads(); attn.set_num_threads(0); "
                "print(first, set, attn.get_num_threads())")
        for text, want in ((None, cores), ("3", 3), ("2,4", 2), ("0", cores), ("-1", cores), ("many", cores), ("", cores),
                           ("3 threads", cores), ("99999999999999999999", cores)):
            environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
            if text is not None:
                environment["OMP_NUM_THREADS"] = text
            run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
            with self.subTest(text):
                self.assertEqual(run.stdout.split(), [str(want), "4", str(want)])

    def test_after_a_fork(self):
        attn.set_num_threads(3)
        want = attn.forward(self.q, self.k, self.v)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            same = attn.get_num_threads() == 3 and np.array_equal(attn.forward(self.q, self.k, self.v), want)
            os._exit(0 if same else 1)
        self.assertEqual(os.waitpid(child, 0)[1], 0)


class Signals(Case):
    BOUND = 2  # seconds; on a quiet machine it takes a twentieth

    def setUp(self):
        super().setUp()
        self.handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.addCleanup(lambda: signal.signal(signal.SIGINT, self.handler))

    def ends(self, name, call):
        """A SIGINT ends the call, which takes many seconds otherwise."""
        sent = []

        def send():
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        with self.subTest(name):
            timer = threading.Timer(0.2, send)
            timer.start()
            with self.assertRaises(KeyboardInterrupt):
                call()
            took = time.monotonic() - sent[0]
            timer.join()
            self.assertLess(took, self.BOUND)

    @staticmethod
    def repeated(keys, dim=64):
        """[2, keys, 1, dim] in the memory of one row."""
        row = np.ones(dim + 1, np.float32)
        return np.lib.stride_tricks.as_strided(row, (2, keys, 1, dim), (4, 0, 4, 4))

    def test_interrupts_a_long_call(self):
        one = np.ones((2, 1, 1, 64), np.float32)
        many = np.ones((2, 1 << 14, 1, 64), np.float32)
        for backend, keys in ("cpu", (1 << 31) - 2), ("reference", 1 << 26):
            long, short = self.repeated(keys), self.repeated(1 << 20)
            self.ends(f"{backend}, one query", lambda: attn.forward(one, long, long, backend=backend))
            self.ends(f"{backend}, many queries", lambda: attn.forward(many, short, short, backend=backend))
            # What comes after is as it always is.
            q, k, v = self.qkv()
            self.close(attn.forward(q, k, v, backend=backend), softmax_attention(q, k, v)[0])
        self.ends("a mask", lambda: attn.BlockMask.from_window(1 << 17, 1 << 17, (100, 0), block_size=(64, 64)))
        parts = [(np.ones((1, 1 << 20, 1, 64), np.float16), np.zeros((1, 1, 1 << 20), np.float32))]
        self.ends("merge", lambda: attn.merge(parts * 256))

    def test_a_handler_that_raises_nothing_ends_nothing(self):
        calls = []
        signal.signal(signal.SIGINT, lambda *_: calls.append(time.monotonic()))
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        keys = self.repeated(1 << 20)
        out = None
        while not calls:
            out = attn.forward(np.ones((2, 64, 1, 64), np.float32), keys, keys)
        self.close(out, np.ones((2, 64, 1, 64)))

    def test_an_exception_of_another_handler(self):
        class Own(Exception):
            pass

        def handler(*_):
            raise Own("from the handler")

        signal.signal(signal.SIGINT, handler)
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        keys = self.repeated((1 << 31) - 2)
        with self.assertRaisesRegex(Own, "from the handler"):
            attn.forward(np.ones((2, 1, 1, 64), np.float32), keys, keys)


if __name__ == "__main__":
    unittest.main()
