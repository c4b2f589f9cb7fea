"""Plans and masks that go to other processes: by fork, and pickled; and their copies."""
import copy
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import unittest

from support import Case, attn, np, softmax_attention

SHARED = {}  # what children of a fork find


def in_child(call):
    """What call() returns, in the child of a fork, pickled."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        try:
            result = pickle.dumps(call())
        except BaseException as error:
            result = pickle.dumps(error)
        with os.fdopen(write, "wb") as pipe:
            pipe.write(result)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    status = os.waitpid(child, 0)[1]
    if status:
        raise AssertionError(f"the child ended with status {status}")
    result = pickle.loads(data)
    if isinstance(result, BaseException):
        raise result
    return result


def run_shared(seed):
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(x.shape).astype(np.float32) for x in SHARED["arrays"]]
    return arrays, SHARED["plan"](*arrays), attn.forward(*arrays, causal=True)


@unittest.skipUnless(hasattr(os, "fork"), "there is no fork here")
class Forks(Case):
    def setUp(self):
        super().setUp()
        attn.set_num_threads(3)
        self.addCleanup(attn.set_num_threads, 0)
        self.q, self.k, self.v = self.qkv(seqlen_kv=300)

    def plans(self):
        """By name, with their run-time arguments."""
        few, long = self.q[:1, :1, :2].copy(), [self.normal(1, 5000, 1, 16) for _ in range(2)]
        arrays = self.q, self.k, self.v
        mask = attn.BlockMask.from_window(9, 300, (40, 0), block_size=16)
        lengths = np.array([7, 300], np.int32)
        return {"cpu": (attn.Plan(*arrays), arrays, {}),
                "reference": (attn.Plan(*arrays, causal=True, backend="reference"), arrays, {}),
                "window, softcap": (attn.Plan(*arrays, window=(9, 0), softcap=4.0), arrays, {"return_lse": True}),
                "lengths": (attn.Plan(*arrays, seqlens_kv=lengths), arrays, {"seqlens_kv": lengths}),
                "mask": (attn.Plan(*arrays, block_mask=mask), arrays, {"block_mask": mask}),
                "one thread": (attn.Plan(*arrays, num_threads=1), arrays, {}),
                "splits": (attn.Plan(few, *long, fixed_split=64, num_threads=2), (few, *long), {})}

    def test_plans_work_in_the_child(self):
        plans = self.plans()
        self.assertGreater(plans["splits"][0].workspace, 0)
        want = {name: plan(*arrays, **options) for name, (plan, arrays, options) in plans.items()}

        def run():
            twice = [{name: plan(*arrays, **options) for name, (plan, arrays, options) in plans.items()} for _ in range(2)]
            grandchild = in_child(lambda: plans["cpu"][0](*plans["cpu"][1]))
            return twice, grandchild, {name: plan.kernel for name, (plan, _, _) in plans.items()}

        twice, grandchild, kernels = in_child(run)
        self.assertEqual(kernels, {name: plan.kernel for name, (plan, _, _) in plans.items()})
        for got in twice:
            for name in plans:
                with self.subTest(name):
                    np.testing.assert_array_equal(np.concatenate([np.ravel(x) for x in got[name]]),
                                                  np.concatenate([np.ravel(x) for x in want[name]]))
        np.testing.assert_array_equal(grandchild, want["cpu"])
        self.close(want["cpu"], softmax_attention(self.q, self.k, self.v)[0])
        for name, (plan, arrays, options) in plans.items():  # and here they still do
            np.testing.assert_array_equal(plan(*arrays, **options)[0], want[name][0])

    def test_a_plan_in_the_child_is_as_strict(self):
        plan = attn.Plan(self.q, self.k, self.v)
        for arrays in (self.q, self.k[:, :9], self.v[:, :9]), tuple(x.astype(np.float16) for x in (self.q, self.k, self.v)):
            with self.assertRaisesRegex(attn.InvalidArgument, "the arrays are not as those"):
                in_child(lambda: plan(*arrays))

    def test_plans_that_only_the_child_drops(self):
        plans = self.plans()

        def drop():
            plans.clear()
            attn.cache_clear()
            attn.set_num_threads(2)
            return attn.forward(self.q, self.k, self.v)

        self.close(in_child(drop), softmax_attention(self.q, self.k, self.v)[0])

    def test_kept_plans_of_functions(self):
        arrays = self.q, self.k, self.v
        first = attn.forward(*arrays, return_lse=True)
        calls = {"forward": lambda: attn.forward(*arrays),
                 "merge": lambda: attn.merge([first, first])[0],
                 "quantize": lambda: attn.quantize(self.k, "f8_e4m3fn")[0].view(np.uint8)}
        want = {name: call() for name, call in calls.items()}
        for name, got in in_child(lambda: {name: call() for name, call in calls.items()}).items():
            np.testing.assert_array_equal(got, want[name])

    def test_masks_in_the_child(self):
        i, j = np.arange(9)[:, None] + 291, np.arange(300)
        window, dense = (j >= i - 40) & (j <= i), self.rng.random((9, 300)) < 0.5
        masks = [attn.BlockMask.from_window(9, 300, (40, 0), block_size=16), attn.BlockMask.from_dense(dense, block_size=16)]
        got = in_child(lambda: [attn.forward(self.q, self.k, self.v, block_mask=m) for m in (masks[0] | masks[1], masks[0] & masks[1])])
        for out, visible in zip(got, (window | dense, window & dense)):
            self.close(out, softmax_attention(self.q, self.k, self.v, visible)[0])

    def test_multiprocessing(self):
        SHARED.update(plan=attn.Plan(self.q, self.k, self.v), arrays=(self.q, self.k, self.v))
        self.addCleanup(SHARED.clear)
        SHARED["plan"](*SHARED["arrays"])
        with multiprocessing.get_context("fork").Pool(2) as pool:
            for arrays, got, causal in pool.map(run_shared, range(4)):
                self.close(got, softmax_attention(*arrays)[0])
                np.testing.assert_array_equal(causal, attn.forward(*arrays, causal=True))

    def test_gpu_plans_do_not(self):
        torch = self.gpu("cuda")
        arrays = [torch.zeros(1, 64, 1, 64, dtype=torch.float16, device="cuda")] * 3
        plan = attn.Plan(*arrays)
        with self.assertRaisesRegex(attn.InvalidArgument, "the plan of cuda was made before a fork; accepted"):
            in_child(lambda: plan(*arrays))


class Copies(Case):
    def masks(self):
        dense = self.rng.random((2, 4, 45, 70)) < 0.4
        kinds = np.array([[0, 1, 2], [3, 3, 1]], np.uint8)
        index = np.array([[-1, -1, -1], [1, 0, -1]], np.int32)
        yield attn.BlockMask.from_dense(dense, block_size=(8, 24))
        yield attn.BlockMask.from_dense(dense[0, 0], block_size=64)
        yield attn.BlockMask.from_documents([20, 25], causal=True, block_size=16)
        yield attn.BlockMask.from_window(45, 70, (-1, -1), block_size=16)  # all FULL: no bits
        yield attn.BlockMask.from_kinds(kinds, 45, 70, block_size=(32, 30), index=index, bits=self.rng.random((2, 32, 30)) < 0.5)
        yield attn.BlockMask.from_window(45, 70, (10, 0), block_size=16) | attn.BlockMask.from_dense(dense[0, 0], block_size=16)
        yield attn.BlockMask.from_window(0, 0, (-1, 0))

    def test_masks(self):
        for mask in self.masks():
            self.assertIs(copy.copy(mask), mask)
            self.assertIs(copy.deepcopy({"mask": [mask]})["mask"][0], mask)
            batch, heads, seqlen_q, seqlen_kv = mask.shape
            q, k, v = self.qkv(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
            for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
                with self.subTest(mask=mask, protocol=protocol):
                    again = pickle.loads(pickle.dumps(mask, protocol))
                    self.assertIsNot(again, mask)
                    self.assertEqual(repr(again), repr(mask))
                    got, want = (attn.forward(q, k, v, block_mask=m) for m in (again, mask))
                    np.testing.assert_array_equal(got, want)
        named = type("Named", (attn.BlockMask,), {"__module__": __name__})
        globals()["Named"] = named
        self.addCleanup(globals().pop, "Named")
        self.assertIs(type(pickle.loads(pickle.dumps(named.from_window(9, 9, (1, 1))))), named)

    def test_masks_in_a_new_process(self):
        dense = self.rng.random((45, 70)) < 0.4
        q, k, v = self.qkv(seqlen_q=45, seqlen_kv=70)
        data = pickle.dumps((attn.BlockMask.from_dense(dense, block_size=16), q, k, v))
        code = ("import attn, pickle, sys; mask, q, k, v = pickle.load(sys.stdin.buffer); "
                "sys.stdout.buffer.write(pickle.dumps(attn.forward(q, k, v, block_mask=mask)))")
        run = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True)
        self.close(pickle.loads(run.stdout), softmax_attention(q, k, v, dense)[0])

    def test_gpu_masks(self):
        torch = self.gpu("cuda")
        q, k, v = (torch.from_numpy(x.astype(np.float16)).cuda() for x in self.qkv(seqlen_q=200, seqlen_kv=333, dim=64))
        dense = self.rng.random((200, 333)) < 0.5
        for mask in attn.BlockMask.from_dense(torch.from_numpy(dense).cuda()), attn.BlockMask.from_window(200, 333, (40, 0), device="cuda"):
            torch.cuda.synchronize()
            again = pickle.loads(pickle.dumps(mask))
            self.assertEqual(again.device, "cuda:0")
            self.assertTrue(torch.equal(*(attn.forward(q, k, v, block_mask=m) for m in (again, mask))))

    def test_plans(self):
        q, k, v = self.qkv()
        plan = attn.Plan(q, k, v, causal=True)
        self.assertIs(copy.copy(plan), plan)
        self.assertIs(copy.deepcopy([plan])[0], plan)
        np.testing.assert_array_equal(copy.deepcopy(plan)(q, k, v), attn.forward(q, k, v, causal=True))
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            self.refuses(TypeError, ["a Plan", "cannot be pickled; accepted: Plan(q, k, v, **options)"], pickle.dumps, plan, protocol)


if __name__ == "__main__":
    unittest.main()
