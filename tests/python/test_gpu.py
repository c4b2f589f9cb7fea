"""On a CUDA device: captures in the idioms that PyTorch documents, the node cases of ONNX in f16, arrays of CuPy and JAX."""
import ctypes
import importlib.util
import unittest

import test_onnx
from support import Case, attn, causal, np, softmax_attention

HAVE = importlib.util.find_spec("torch") is not None
if HAVE:
    import torch

    import attn.onnx
    import attn.torch


class GpuCase(Case):
    def setUp(self):
        super().setUp()
        self.gpu("cuda")

    def qkv(self, **sizes):
        """One query, so that blocks leave parts in the workspace and count who has come."""
        arrays = super().qkv(**{"batch": 1, "seqlen_q": 1, "seqlen_kv": 4096, "heads": 8, "heads_kv": 2, "dim": 128, **sizes})
        return [torch.from_numpy(x).cuda().half() for x in arrays]

    def good(self, out, q, k, v):
        self.close(out.cpu(), softmax_attention(*(x.double().cpu() for x in (q, k, v)))[0], 2e-3)


class AtTheEnd:
    """Arrays that end where mapped memory does: beyond, any access, also of the copy engine, is a fault."""
    class Where(ctypes.Structure):
        _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]  # 1: device

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.properties = (ctypes.c_int * 8)(1, 0, 1, torch.cuda.current_device())  # CUmemAllocationProp: pinned, on the device
        self.piece = ctypes.c_size_t()
        self.run("cuMemGetAllocationGranularity", ctypes.byref(self.piece), self.properties, 0)

    def run(self, name, *arguments):
        if status := getattr(self.cuda, name)(*arguments):
            raise RuntimeError(f"{name}: {status}")

    def __call__(self, x):
        """A copy of x, which is kept until the process ends."""
        bytes_ = x.numel() * x.element_size()
        size = ctypes.c_size_t(-(-bytes_ // self.piece.value) * self.piece.value)
        at, memory = ctypes.c_uint64(), ctypes.c_uint64()
        self.run("cuMemAddressReserve", ctypes.byref(at), ctypes.c_size_t(size.value + self.piece.value), ctypes.c_size_t(0), ctypes.c_uint64(0),
                 ctypes.c_uint64(0))
        self.run("cuMemCreate", ctypes.byref(memory), size, self.properties, ctypes.c_uint64(0))
        self.run("cuMemMap", at, size, ctypes.c_size_t(0), memory, ctypes.c_uint64(0))
        self.run("cuMemSetAccess", at, size, (ctypes.c_int * 3)(1, torch.cuda.current_device(), 3), ctypes.c_size_t(1))
        self.__cuda_array_interface__ = {"shape": (bytes_,), "typestr": "|u1", "data": (at.value + size.value - bytes_, False), "version": 3}
        copy = torch.as_tensor(self, device="cuda").view(x.dtype).view(x.shape)
        return copy.copy_(x)


class Capacities(GpuCase):
    def test_fewer_tokens_than_planned(self):
        """A plan for more tokens reads and writes nothing after a call's last one."""
        end = AtTheEnd()
        cases = {"long": ([300, 500, 145], 600, {}), "tokens": ([1] * 66, 200, {"most": 1}), "some": ([3, 1, 60, 5, 1], 200, {}),
                 "pages": ([300, 500, 145], 600, {"pages": 64}), "mixed": ([1] * 40 + [700], 800, {"pages": 64}),
                 "mixed, e4m3": ([1] * 40 + [700], 800, {"pages": 64, "cache": torch.float8_e4m3fn}),
                 "e4m3": ([300, 500, 145], 600, {"pages": 64, "cache": torch.float8_e4m3fn})}
        for name, (lengths, keys, options) in cases.items():
            with self.subTest(name):
                page, cache = options.get("pages"), options.get("cache", torch.float16)
                total, batch = sum(lengths), len(lengths)
                k, v = (torch.randn(batch, -(-keys // 64) * 64, 2, 64, device="cuda").to(cache) for _ in range(2))
                call = {"causal": True, "max_seqlen_q": options.get("most"), "seqlens_kv": torch.full((batch,), keys, dtype=torch.int32, device="cuda")}
                stored = (k, v)
                if page:
                    stored = [x.reshape(-1, page, 2, 64) for x in stored]
                    call["block_table"] = torch.arange(len(stored[0]), dtype=torch.int32, device="cuda").view(batch, -1)
                q = torch.randn(total + 1, 8, 64, device="cuda").half()
                offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
                attn.forward(q, *stored, cu_seqlens_q=offsets, **call)
                plans = attn.cache_info()["misses"]
                out, lse = end(torch.full_like(q[:total], torch.nan)), end(torch.full((8, total), torch.nan, device="cuda"))
                attn.forward(end(q[:total]), *stored, cu_seqlens_q=offsets, out=out, lse=lse, return_lse=True, **call)
                torch.cuda.synchronize()
                self.assertEqual(attn.cache_info()["misses"], plans)
                for b in {0, batch // 2, batch - 1}:
                    i, j = int(offsets[b]), int(offsets[b + 1])
                    host = [x.double().cpu() for x in (q[None, i:j], k[b:b + 1, :keys], v[b:b + 1, :keys])]
                    want, want_lse = softmax_attention(*host, causal(j - i, keys))
                    self.close(out[i:j].double().cpu(), want[0], 4e-3)
                    self.close(lse[:, i:j].double().cpu(), want_lse[0], 4e-3)


class Capture(GpuCase):
    def test_unprepared(self):
        q, k, v = self.qkv()
        plan, out, graph = attn.Plan(q, k, v), torch.empty_like(q), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plan(q, k, v, out=out)
            fresh = attn.forward(q, k, v)
        for seed in range(3):
            q.copy_(torch.randn(q.shape, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            self.good(out, q, k, v)
            self.good(fresh, q, k, v)

    def test_warmed_up_in_a_side_stream(self):
        q, k, v = self.qkv()
        plan, out, graph, stream = attn.Plan(q, k, v), torch.empty_like(q), torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                plan(q, k, v, out=out)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            plan(q, k, v, out=out)
        out.zero_()
        graph.replay()
        self.good(out, q, k, v)

    def test_several_graphs_at_once(self):
        """Graphs of one plan, replayed at the same time in different streams."""
        problems = [self.qkv() for _ in range(4)]
        plan, graphs, outs = attn.Plan(*problems[0]), [], [torch.empty_like(q) for q, _, _ in problems]
        for (q, k, v), out in zip(problems, outs):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                for _ in range(20):
                    plan(q, k, v, out=out)
        streams = [torch.cuda.Stream() for _ in graphs]
        torch.cuda.synchronize()
        for _ in range(50):
            for graph, stream in zip(graphs, streams):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for out, problem in zip(outs, problems):
            self.good(out, *problem)

    def test_shared_pool(self):
        """Graphs that share a pool, replayed in the order of their capture."""
        q, k, v = self.qkv()
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(first):
            a = attn.forward(q, k, v)
        with torch.cuda.graph(second, pool=first.pool()):
            b = attn.forward(a, k, v)
        for _ in range(5):
            first.replay()
            second.replay()
        self.good(a, q, k, v)
        self.good(b, a, k, v)

    def test_graphed_callables(self):
        q, k, v = (x.transpose(1, 2) for x in self.qkv(seqlen_q=130, seqlen_kv=130))

        class Attention(torch.nn.Module):
            def forward(self, q, k, v):
                return attn.torch.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        with torch.no_grad():
            out = torch.cuda.make_graphed_callables(Attention().eval(), (q, k, v))(q, k, v)
        self.good(out.transpose(1, 2), *(x.transpose(1, 2) for x in (q, k, v)))

    def test_pool_is_given_back(self):
        q, k, v = self.qkv()

        def once():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                attn.forward(q, k, v)
            graph.replay()
            torch.cuda.synchronize()

        once()
        before = torch.cuda.memory_allocated()
        for _ in range(20):
            once()
        self.assertEqual(torch.cuda.memory_allocated(), before)


@unittest.skipUnless(importlib.util.find_spec("onnx"), "onnx is not installed")
class NodeCasesInF16(GpuCase):
    """docs/onnx.md has the table."""

    def test_all(self):
        served, refused, cases = 0, {}, test_onnx.node_cases()

        def on_device(x):
            x = torch.from_numpy(np.ascontiguousarray(x.astype(np.float32) if x.dtype.kind in "fV" else x))
            return x.cuda().half() if x.is_floating_point() else x.cuda()

        for case, node, attributes in cases:
            inputs, outputs = case.data_sets[0]
            given = iter(inputs)
            arguments = [on_device(next(given)) if name else None for name in node.input]
            with self.subTest(case.name):
                try:
                    results = attn.onnx.attention(*arguments, **attributes,
                                                  qk_matmul_output=len(node.output) > 3 and bool(node.output[3]))
                except attn.Error as error:
                    refused[case.name] = str(error)
                    continue
                for got, want in zip((r for r, name in zip(results, node.output) if name), outputs, strict=True):
                    self.assertEqual(tuple(got.shape), want.shape)
                    self.close(got.float().cpu(), want.astype(np.float32), 5e-3, 5e-3)
                served += 1
        print(f"Attention node cases on cuda in f16: {served} of {len(cases)} served")
        for name, reason in refused.items():
            print(f"  {name}: {reason[:300]}")
        self.assertGreaterEqual(served, 0.8 * len(cases))


def cuda_provider():
    """Whether onnxruntime is there with its CUDA provider."""
    if not HAVE or importlib.util.find_spec("onnxruntime") is None:  # torch has the libraries that the provider needs
        return False
    import onnxruntime
    return "CUDAExecutionProvider" in onnxruntime.get_available_providers()


@unittest.skipUnless(importlib.util.find_spec("onnx") and cuda_provider(), "no onnx, or no onnxruntime with a CUDA provider")
class OnnxruntimeOnCuda(GpuCase):
    """The custom operator in onnxruntime's CUDA provider."""

    def launches(self):
        return sum(attn._attn.launch_count(k["name"]) for k in attn.info()["kernels"] if k["backend"] == "cuda")

    def session(self, model):
        import onnxruntime
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # errors are raised
        options.register_custom_ops_library(attn.onnx.library())
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CUDAExecutionProvider"])

    def test_node_cases_in_f16(self):
        """docs/onnx.md has what is refused."""
        from onnx import TensorProto
        served, refused, left = 0, {}, []
        for case, node, _ in test_onnx.node_cases():
            model = type(case.model)()
            model.CopyFrom(case.model)
            if not attn.onnx.use_libattn(model):
                left.append(case.name)
                continue
            model.ir_version = min(model.ir_version, 10)
            for entry in model.opset_import:
                entry.version = min(entry.version, 24)  # no node of ONNX's own is left
            for value in [*model.graph.input, *model.graph.output, *model.graph.value_info]:
                if value.type.tensor_type.elem_type in (TensorProto.FLOAT, TensorProto.BFLOAT16):
                    value.type.tensor_type.elem_type = TensorProto.FLOAT16
            inputs, outputs = case.data_sets[0]
            halves = [x.astype(np.float32).astype(np.float16) if x.dtype.kind in "fV" else x for x in inputs]
            feed = dict(zip((x.name for x in model.graph.input), halves))
            with self.subTest(case.name):
                session, before = self.session(model), self.launches()
                try:
                    results = session.run(None, feed)
                except Exception as error:
                    self.assertIn("libattn: ", str(error))
                    refused[case.name] = str(error).partition("libattn: ")[2]
                    continue
                self.assertGreater(self.launches(), before)
                for got, want in zip(results, outputs, strict=True):
                    self.assertEqual(got.shape, want.shape)
                    self.close(got, want.astype(np.float32), 5e-3, 5e-3)
                for got, again in zip(results, session.run(None, feed)):  # in memory that was used
                    np.testing.assert_array_equal(got, again)
                served += 1
        print(f"Attention node cases in onnxruntime on cuda in f16: {served} served, {len(refused)} refused, {len(left)} left")
        for reason in sorted(set(refused.values())):
            print(f"  {sum(r == reason for r in refused.values())} {reason}")
        self.assertGreaterEqual(served, 50)


class Arrays(GpuCase):
    def from_dlpack(self, module):
        q, k, v = self.qkv(seqlen_q=70)
        return (q, k, v), [module.from_dlpack(x) for x in (q, k, v)]

    @unittest.skipUnless(importlib.util.find_spec("cupy"), "cupy is not installed")
    def test_cupy(self):
        import cupy
        tensors, arrays = self.from_dlpack(cupy)
        out = attn.forward(*arrays)
        self.assertIsInstance(out, cupy.ndarray)
        self.good(torch.from_dlpack(out), *tensors)

    @unittest.skipUnless(importlib.util.find_spec("jax"), "jax is not installed")
    def test_jax(self):
        import jax
        try:
            jax.devices("cuda")
        except RuntimeError as error:
            self.skipTest(f"jax: {error}")
        tensors, arrays = self.from_dlpack(jax.dlpack)
        self.good(torch.from_dlpack(attn.forward(*arrays)), *tensors)

    def test_many_calls(self):
        """10^5 calls: device and host memory stay where they were."""
        q, k, v = self.qkv(seqlen_kv=500)
        allocated, device, host = self.growth(lambda: attn.forward(q, k, v), 1000, 100_000)
        self.assertEqual(allocated, 0)
        self.assertLess(device, 1 << 20)
        self.assertLess(host, 4 << 20)


if __name__ == "__main__":
    unittest.main()
