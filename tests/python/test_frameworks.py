"""Arrays of PyTorch, JAX and CuPy, where they are installed; on a GPU where one is."""
import ctypes
import importlib.util
import os
import unittest
import warnings

from support import Case, attn, causal, ml_dtypes, np, softmax_attention

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def needs(name):
    return unittest.skipUnless(importlib.util.find_spec(name), f"{name} is not installed")


def cuda_backend():
    return next(b for b in attn.info()["backends"] if b["name"] == "cuda")


class Claimed:
    """A host array that says it lies on another device of DLPack's, of no framework that attn knows."""

    class Tensor(ctypes.Structure):
        _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]

    def __init__(self, array, device):
        self.array, self.device, self.streams = array, device, []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, stream=None):
        self.streams.append(stream)
        capsule = self.array.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.POINTER(self.Tensor), [ctypes.py_object, ctypes.c_char_p]
        tensor = pointer(capsule, b"dltensor").contents
        tensor.device_type, tensor.device_id = self.device
        return capsule


class Dlpack(Case):
    CPU, CUDA, CUDA_HOST, METAL, ROCM = 1, 2, 3, 8, 10

    def test_pinned_memory_is_host_memory(self):
        q, k, v = self.qkv()
        pinned = Claimed(k, (self.CUDA_HOST, 0))
        out = attn.forward(q, pinned, v)
        self.assertEqual(pinned.streams, [None])
        self.close(out, softmax_attention(q, k, v)[0])
        self.close(attn.forward(Claimed(q, (self.CPU, 0)), k, v), out, 0)

    def test_devices(self):
        q, k, v = self.qkv()
        self.refuses(ValueError, ["k is in cuda device 1", "accepted: host memory, where q is"], attn.forward, q,
                     Claimed(k, (self.CUDA, 1)), v)
        self.refuses(ValueError, ["v is in hip device 0"], attn.forward, q, k, Claimed(v, (self.ROCM, 0)))
        self.refuses(ValueError, ["q is on a device of DLPack type 8"], attn.forward, Claimed(q, (self.METAL, 0)), k, v)
        self.refuses(ValueError, ["backend is hip", "accepted for arrays in cuda device 0: auto, cuda"], attn.forward,
                     Claimed(q, (self.CUDA, 0)), k, v, backend="hip")
        for device, default_stream in ((self.CUDA, 1), (self.ROCM, 0)):
            far = Claimed(q, (device, 900))
            self.refuses(attn.Error, "", attn.forward, far, k, v)  # no such device, or no driver
            self.assertEqual(far.streams, [default_stream])


@needs("torch")
class Torch(Case):
    def tensors(self, dtype, device="cpu", **shape):
        import torch
        return [torch.from_numpy(x).to(device).to(dtype) for x in self.qkv(**shape)]

    def test_types(self):
        import torch
        for dtype in torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2:
            with self.subTest(dtype):
                q, k, v = self.tensors(dtype)
                want = softmax_attention(*(x.to(torch.float64) for x in (q, k, v)))[0]
                out, lse = attn.forward(q, k, v, return_lse=True)
                self.assertIsInstance(out, torch.Tensor)
                self.assertEqual(out.dtype, torch.bfloat16 if dtype.itemsize == 1 else dtype)
                self.assertEqual(lse.dtype, torch.float32)
                self.close(out.to(torch.float64), want, 2e-6 if dtype == torch.float32 else 0.01)
                self.assertEqual(attn.forward(q, k, v, out_dtype=torch.float16).dtype, torch.float16)

    def test_layouts(self):
        import torch
        q, k, v = self.tensors(torch.float32)
        want = softmax_attention(q, k, v, causal(9, 13))[0]
        heads = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        out = torch.empty(2, 4, 9, 16).transpose(1, 2)
        self.assertIs(attn.forward(*heads, causal=True, out=out), out)
        self.close(out, want)

    def test_grad(self):
        import torch
        q, k, v = self.tensors(torch.float32)
        k.requires_grad_()
        self.refuses(ValueError, ["k requires grad"], attn.forward, q, k, v)
        with torch.no_grad():
            k *= 1
        attn.forward(q, k.detach(), v)

    def test_grad_is_off(self):
        """A model's parameters are taken where torch records nothing, and nowhere else."""
        import torch
        q, k, v = self.tensors(torch.float32)
        sinks = torch.nn.Parameter(torch.zeros(4))
        weights = [torch.nn.Parameter(x) for x in (q, k, v)]
        want, want_lse = attn.forward(q, k, v, sinks=sinks.detach(), return_lse=True)
        part = (want.clone().requires_grad_(), want_lse)
        calls = (lambda: attn.forward(q, k, v, sinks=sinks), lambda: attn.forward(*weights, sinks=sinks),
                 lambda: attn.Plan(*weights, sinks=sinks)(q, weights[1], v, sinks=sinks),
                 lambda: attn.merge([part])[0],
                 lambda: attn.forward(q, k, v, sinks=sinks.detach(), out=torch.empty_like(q).requires_grad_()))
        for call in calls:
            for off in torch.no_grad(), torch.inference_mode():
                with off:
                    out = call()
                    self.close(out.detach(), want, 0)
            self.refuses(ValueError, ["requires grad", "no_grad", "backward"], call)
        with torch.no_grad():
            stored, _ = attn.quantize(weights[1], "f8_e5m2")
            self.assertIs(type(stored), torch.Tensor)
            self.assertFalse(attn.forward(*weights).requires_grad)
        self.refuses(ValueError, ["x requires grad"], attn.quantize, weights[1], "f8_e5m2")

    def test_subclasses(self):
        import torch

        class Own(torch.Tensor):
            pass

        q, k, v = self.tensors(torch.float32)
        own = [x.as_subclass(Own) for x in (q, k, v)]
        want, want_lse = attn.forward(q, k, v, return_lse=True)
        out, lse = attn.forward(*own, return_lse=True)
        self.assertEqual([type(out), type(lse)], [Own, Own])
        self.close(out, want, 0)
        self.close(lse, want_lse, 0)
        self.assertIs(type(attn.forward(q, own[1], v)), torch.Tensor)
        self.assertIs(type(attn.merge([(out, lse)])[0]), Own)
        stored, descale = attn.quantize(own[1], torch.float8_e4m3fn, scale=2)
        self.assertEqual([type(stored), type(descale)], [Own, Own])
        self.close(stored.float(), attn.quantize(k, torch.float8_e4m3fn, scale=2)[0].float(), 0)
        mask = attn.BlockMask.from_dense(torch.from_numpy(causal(9, 13)).as_subclass(Own), block_size=4)
        self.close(attn.forward(*own, block_mask=mask), attn.forward(q, k, v, causal=True))

        class Short(torch.Tensor):
            def new_empty(self, shape, **options):
                return torch.empty(1, **options)
        self.refuses(ValueError, ["out as torch makes it has shape [1]"], attn.forward, q.as_subclass(Short), k, v)

    def test_memory_that_is_not_the_value(self):
        """Negative bit, sparse, meta, vmap, nested, classes that compute for themselves: an attn.Error that says so, of
        every function and of an argument of each kind."""
        import torch

        class Wrapper(torch.Tensor):
            @staticmethod
            def __new__(cls, inner):
                return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

            @classmethod
            def __torch_dispatch__(cls, function, types, arguments=(), options=None):
                raise AssertionError(function)

        class Logs(Wrapper):
            @staticmethod
            def __new__(cls, inner):
                return torch.Tensor._make_subclass(cls, inner)

        q, k, v = self.tensors(torch.float32)
        sinks, lse = torch.zeros(4), torch.zeros(2, 4, 9)
        made = {"negative bit": torch._neg_view, "layout torch.sparse_coo": lambda x: x.to_sparse(), "meta": lambda x: x.to("meta"),
                "is a Wrapper": Wrapper, "is a Logs": Logs}
        for words, make in made.items():
            calls = {"q": lambda: attn.forward(make(q), k, v), "k": lambda: attn.forward(q, make(k), v),
                     "v[1]": lambda: attn.forward(q, [k, k], [v, make(v)]),
                     "sinks": lambda: attn.forward(q, k, v, sinks=make(sinks)),
                     "bias": lambda: attn.Plan(q, k, v, bias=make(torch.zeros(2, 4, 9, 13))),
                     "out": lambda: attn.forward(q, k, v, out=make(torch.empty_like(q))),
                     "parts[0][0]": lambda: attn.merge([(make(q), lse)]),
                     "parts[1][1]": lambda: attn.merge([(q, lse), (q, make(lse))]),
                     "x": lambda: attn.quantize(make(k), "f8_e4m3fn"),
                     "scale": lambda: attn.quantize(k, "f8_e4m3fn", scale=make(torch.ones(1)))}
            for name, call in calls.items():
                with self.subTest(words, name=name):
                    said = self.refuses(attn.Error, [words, "accepted"], call)
                    self.assertEqual(str(said).split()[0], name)
            if words != "negative bit":  # a mask's bools have none
                dense, kinds = make(torch.ones(9, 13, dtype=torch.uint8)), torch.full((1, 1), 3, dtype=torch.uint8)
                self.refuses(attn.Error, ["dense", words], attn.BlockMask.from_dense, dense)
                bits = make(torch.ones(1, 128, 128, dtype=torch.bool))
                index = torch.zeros(1, 1, dtype=torch.int32)
                self.refuses(attn.Error, ["bits", words], attn.BlockMask.from_kinds, kinds, 9, 13, index=index, bits=bits)
                self.refuses(attn.Error, ["kinds", words], attn.BlockMask.from_kinds, make(kinds), 9, 13)
        for call in (lambda x: attn.forward(x, x, x), lambda x: attn.quantize(x, "f8_e5m2"),
                     lambda x: attn.merge([(x, lse)])):
            self.refuses(attn.Error, ["wrapped by torch.func"], torch.vmap(call), q[None])
        nested = torch.nested.nested_tensor([q[0], q[1, :5]])
        self.refuses(attn.Error, ["q is a nested Tensor"], attn.forward, nested, k, v)
        self.refuses(attn.Error, ["q is a quantized Tensor"], attn.forward, torch.quantize_per_tensor(q, 0.1, 0, torch.qint8), k, v)
        for dtype in filter(None, (torch.complex64, torch.int16, torch.float64, getattr(torch, "float8_e8m0fnu", None))):
            name = {torch.float64: "f64"}.get(dtype, str(dtype).removeprefix("torch."))
            for argument in "q", "sinks":
                arrays = {"q": q, "sinks": torch.ones(q.shape[2]), argument: (q if argument == "q" else torch.ones(q.shape[2])).to(dtype)}
                self.refuses(attn.Error, [f"{argument} is {name}; accepted: f32"], attn.forward, k=k, v=v, **arrays)
        if hasattr(torch, "int4"):  # whose elements are bytes
            self.refuses(attn.Error, ["k is int4", "accepted"], attn.forward, q, torch.empty(k.shape, dtype=torch.int4), v)
        self.refuses(attn.Error, ["q is complex64"], attn.forward, q.to(torch.complex64).conj(), k, v)
        self.close(attn.forward(torch._neg_view(q).resolve_neg(), k, v), attn.forward(-q, k, v), 0)

    def test_no_elements(self):
        """Torch's empty tensors have no address."""
        import torch
        q, k, v = self.tensors(torch.float32)
        none = k[:, :0].clone(), v[:, :0].clone()
        blocks = torch.empty(2, 2, 0)
        out, lse = attn.forward(q, *none, bias=torch.empty(2, 4, 9, 0), k_descale=blocks, v_descale=blocks, return_lse=True)
        self.assertTrue((out == 0).all() and (lse == -float("inf")).all())
        pages = torch.empty(0, 4, 2, 16)
        attn.check(q, pages, pages, block_table=torch.empty(2, 0, dtype=torch.int32))
        self.assertTrue((attn.forward(q, pages, pages, block_table=torch.empty(2, 0, dtype=torch.int32)) == 0).all())
        stored, descale = attn.quantize(none[0], "f8_e4m3fn", scale="amax", per=64)
        self.assertEqual((tuple(stored.shape), tuple(descale.shape)), ((2, 0, 2, 16), (2, 2, 0)))
        mask = attn.BlockMask.from_dense(torch.empty(9, 0, dtype=torch.bool))
        self.assertTrue((attn.forward(q, *none, block_mask=mask) == 0).all())
        self.refuses(ValueError, "v has shape [2, 13, 2, 0]", attn.forward, q, k, v[..., :0])

    def test_numbers(self):
        import torch
        q, k, v = self.tensors(torch.float32)
        out = attn.forward(q, k, v, causal=torch.tensor(True), scale=torch.tensor(0.25), window=torch.tensor([4, 0]))
        self.close(out, attn.forward(q, k, v, causal=True, scale=0.25, window=(4, 0)), 0)
        mask = attn.BlockMask.from_documents(torch.tensor([4, 5]), block_size=torch.tensor(4))
        self.assertEqual(mask.shape, (1, 1, 9, 9))
        self.refuses(TypeError, "causal is a Tensor", attn.forward, q, k, v, causal=torch.tensor(1))
        self.refuses(TypeError, "scale is a Tensor", attn.forward, q, k, v, scale=torch.tensor(1., device="meta"))

    def test_frameworks_mix_on_the_host(self):
        import torch
        q, k, v = self.tensors(torch.float32)
        out = attn.forward(q, k.numpy(), v)
        self.assertIsInstance(out, torch.Tensor)
        self.close(out, softmax_attention(q, k, v)[0])
        self.refuses(ValueError, "out is of another framework", attn.forward, q, k, v, out=np.empty((2, 9, 4, 16), np.float32))

    def test_merge_quantize_masks(self):
        import torch
        q, k, v = self.tensors(torch.float32)
        out, lse = attn.merge([attn.forward(q, k[:, :6], v[:, :6], return_lse=True),
                               attn.forward(q, k[:, 6:], v[:, 6:], return_lse=True)])
        self.close(out, softmax_attention(q, k, v)[0])
        stored, descale = attn.quantize(k, torch.float8_e4m3fn, scale="amax", per="head")
        self.assertEqual((stored.dtype, tuple(descale.shape)), (torch.float8_e4m3fn, (2, 2)))
        self.close(stored.float() * descale[:, None, :, None], k, 0.2)
        mask = attn.BlockMask.from_dense(torch.from_numpy(causal(9, 13)), block_size=4)
        self.close(attn.forward(q, k, v, block_mask=mask), softmax_attention(q, k, v, causal(9, 13))[0])

    def test_gpu(self):
        torch = self.gpu("cuda")
        q, k, v = self.tensors(torch.float16, "cuda", seqlen_q=200, seqlen_kv=333, dim=64)
        want, want_lse = softmax_attention(*(x.double().cpu() for x in (q, k, v)), causal(200, 333))
        out, lse = attn.forward(q, k, v, causal=True, return_lse=True)
        self.assertEqual((out.device, out.dtype), (q.device, torch.float16))
        self.close(out.cpu(), want, 2e-3)
        self.close(lse.cpu(), want_lse, 2e-3)
        self.refuses(ValueError, ["sinks is in host memory", "cuda device 0"], attn.forward, q, k, v,
                     sinks=torch.zeros(4))
        self.refuses(ValueError, ["backend is cpu", "cuda"], attn.forward, q, k, v, backend="cpu")

    def test_gpu_stream(self):
        torch = self.gpu("cuda")
        q, k, v = self.tensors(torch.float16, "cuda", dim=64, seqlen_q=128, seqlen_kv=128)
        want = attn.forward(q, k, v)
        late = torch.zeros_like(q)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            late.copy_(q)  # seen only by what runs in this stream
            out = attn.forward(late, k, v)
        stream.synchronize()
        self.assertTrue(torch.equal(out, want))

    def test_gpu_that_is_not_current(self):
        """A call runs where its tensors are, in the stream that is current there, and leaves the current device alone."""
        torch = self.gpu("cuda")
        if torch.cuda.device_count() < 2:
            self.skipTest("one GPU; two are needed")
        self.assertEqual(torch.cuda.current_device(), 0)
        host = self.tensors(torch.float16, seqlen_q=200, seqlen_kv=333, dim=64)
        q, k, v = (x.to("cuda:1") for x in host)
        want, want_lse = softmax_attention(*(x.double() for x in host), causal(200, 333))
        plan = attn.Plan(q, k, v, causal=True)
        parts = [attn.forward(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in ((0, 100), (100, 333))]
        merged = attn.merge(parts)
        stored, descale = attn.quantize(k, "f8_e4m3fn", scale=2)
        dense = attn.BlockMask.from_dense(torch.from_numpy(causal(200, 333)).to("cuda:1"))
        window = attn.BlockMask.from_window(200, 333, (-1, 0), device=q.device)
        self.assertEqual([dense.device, window.device], ["cuda:1"] * 2)
        out, lse = attn.forward(q, k, v, causal=True, return_lse=True)
        results = [out, lse, *merged, stored, descale, plan(q, k, v), attn.forward(q, k, v, block_mask=dense),
                   attn.forward(q, k, v, block_mask=window)]
        attn.check(q, k, v, causal=True, seqlens_kv=torch.tensor([333, 12], dtype=torch.int32, device="cuda:1"))
        with torch.cuda.device(1):
            self.assertEqual(attn.BlockMask.from_window(9, 9, (-1, 0), device=torch.device("cuda")).device, "cuda:1")
        self.assertEqual([x.device for x in results], [q.device] * len(results))
        self.assertEqual(torch.cuda.current_device(), 0)
        torch.cuda.synchronize(1)
        self.close(lse.cpu(), want_lse, 2e-3)
        for got in out, *results[6:]:
            self.close(got.cpu(), want, 4e-3)
        self.close(merged[0].cpu(), softmax_attention(*(x.double() for x in host))[0], 4e-3)
        self.assertEqual(descale.tolist(), [2])
        self.close(stored.cpu().float() * 2, host[1].float(), 0.3)
        stream, late = torch.cuda.Stream(1), torch.zeros_like(q)
        torch.cuda.synchronize(1)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            late.copy_(q)
            torch.cuda.set_device(0)  # the stream stays the current one of its device
            in_order = attn.forward(late, k, v, causal=True)
        stream.synchronize()
        self.assertTrue(torch.equal(in_order, out))
        self.refuses(ValueError, ["k is in cuda device 0", "accepted: cuda device 1"], attn.forward, q, k.to("cuda:0"), v)

    def test_gpu_graph(self):
        torch = self.gpu("cuda")
        q, k, v = self.tensors(torch.float16, "cuda", dim=64, seqlen_q=1, seqlen_kv=500)
        plan, out = attn.Plan(q, k, v), torch.empty_like(q)
        self.assertGreater(plan.workspace, 0)
        attn.cache_clear()
        calls = {"plan": lambda: plan(q, k, v, out=out), "forward": lambda: out.copy_(attn.forward(q, k, v)),
                 "new plan": lambda: attn.Plan(q, k, v, fixed_split=128)(q, k, v, out=out),
                 "twice": lambda: (plan(q, k, v, out=out), plan(q, k, v, out=out))}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            plan(q, k, v, out=out)  # has a workspace for this stream, which no graph uses
        side.synchronize()
        graphs, pool = [], None
        for name, call in calls.items():
            for options in {}, {"stream": side}, {"pool": "shared"}, {"capture_error_mode": "thread_local"}:
                graph = torch.cuda.CUDAGraph()
                if "pool" in options:
                    options = {"pool": pool} if pool else {}
                with torch.cuda.graph(graph, **options):
                    call()
                pool = pool or graph.pool()
                graphs.append((name, options, graph))
        for name, options, graph in graphs + graphs[::-1]:
            with self.subTest(name, **options):
                q.copy_(q.flip(0))
                out.zero_()
                graph.replay()
                torch.cuda.synchronize()
                self.close(out.cpu(), softmax_attention(*(x.double().cpu() for x in (q, k, v)))[0], 2e-3)
        streams = [torch.cuda.Stream() for _ in range(2)]  # replays beside each other, and beside the plan
        for _ in range(50):
            for stream, (_, _, graph) in zip(streams, graphs):
                with torch.cuda.stream(stream):
                    graph.replay()
            again = plan(q, k, v)
        torch.cuda.synchronize()
        self.close(again.cpu(), out.cpu(), 0)

    def test_gpu_masks(self):
        torch = self.gpu("cuda")
        q, k, v = self.tensors(torch.float16, "cuda", seqlen_q=200, seqlen_kv=333, dim=64)
        i, j = np.arange(200)[:, None], np.arange(333)
        dense = self.rng.random((200, 333)) < 0.5
        window = (j >= i + 133 - 40) & (j <= i + 133)
        intervals = torch.tensor(np.stack([j // 4, np.full(333, 200)], -1)[:, None], dtype=torch.int32, device="cuda")
        masks = {"dense": (attn.BlockMask.from_dense(torch.from_numpy(dense).cuda()), dense),
                 "intervals": (attn.BlockMask.from_intervals(intervals, 200), i >= j // 4),
                 "window": (attn.BlockMask.from_window(200, 333, (40, 0), device=q.device), window)}
        masks["union"] = masks["dense"][0] | masks["window"][0], dense | window
        for name, (mask, visible) in masks.items():
            with self.subTest(name):
                self.assertEqual(mask.device, "cuda:0")
                out = attn.forward(q, k, v, block_mask=mask)
                self.close(out.cpu(), softmax_attention(*(x.double().cpu() for x in (q, k, v)), visible)[0], 4e-3)
        self.refuses(ValueError, ["block_mask is in cuda device 0", "host memory"], attn.forward,
                     q.float().cpu(), k.float().cpu(), v.float().cpu(), block_mask=masks["window"][0])


@needs("jax")
class Jax(Case):
    def test_host(self):
        import jax
        host = jax.devices("cpu")[0]
        for name in "float32", "bfloat16", "float8_e4m3fn":
            arrays = [jax.device_put(x.astype(np.dtype(name) if name == "float32" else getattr(ml_dtypes, name)), host)
                      for x in self.qkv()]
            out, lse = attn.forward(*arrays, causal=True, return_lse=True)
            self.assertIsInstance(out, jax.Array)
            want, want_lse = softmax_attention(*map(np.asarray, arrays), causal(9, 13))
            self.close(out, want, 2e-6 if name == "float32" else 0.02)
            self.close(lse, want_lse, 2e-6)
        with jax.default_device(host):
            self.assertEqual(float(jax.numpy.zeros((2, 9, 4, 16)).sum()), 0)  # memory of others was left alone
        self.refuses(ValueError, "out is a JAX array", attn.forward, *arrays, out=out)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # jax makes f32 of f64 and says so
            self.refuses(ValueError, ["out as jax makes it is f32", "f64"], attn.forward, *arrays, out_dtype="f64",
                         backend="reference")
        self.refuses(TypeError, "q is a", jax.jit(lambda q: attn.forward(q, *arrays[1:])), arrays[0])

    def test_gpu(self):
        import jax
        try:
            device = jax.devices("gpu")[0]
        except RuntimeError:
            self.skipTest("jax has no GPU")
        if not cuda_backend()["available"]:
            self.skipTest("cuda is not available")
        arrays = [jax.device_put(x.astype(np.float16), device) for x in self.qkv(dim=64, seqlen_kv=300)]
        arrays[0] = arrays[0] * 2
        out = attn.forward(*arrays)
        self.assertEqual(out.device, device)
        self.close(out, softmax_attention(*map(np.asarray, arrays))[0], 2e-3)


@needs("cupy")
class Cupy(Case):
    def test_gpu(self):
        import cupy
        try:
            cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            self.skipTest(f"cupy has no GPU: {error}")
        if not cuda_backend()["available"]:
            self.skipTest("cuda is not available")
        arrays = [cupy.asarray(x.astype(np.float16)) for x in self.qkv(dim=64, seqlen_kv=300)]
        with cupy.cuda.Stream(non_blocking=True) as stream:
            late = arrays[0] * 2
            out = attn.forward(late, *arrays[1:], causal=True)
        stream.synchronize()
        self.assertIsInstance(out, cupy.ndarray)
        want = softmax_attention(*(x.get() for x in (late, *arrays[1:])), causal(9, 300))[0]
        self.close(out.get(), want, 2e-3)


if __name__ == "__main__":
    unittest.main()
