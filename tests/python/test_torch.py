"""attn.torch: scaled_dot_product_attention against PyTorch's own, its operators, patch() and the model of transformers."""
import importlib.util
import itertools
import threading
import unittest
import warnings

from support import Case, attn, np

HAVE = importlib.util.find_spec("torch") is not None
if HAVE:
    import torch
    import torch.nn.functional as F

    import attn.torch
    from attn.torch import scaled_dot_product_attention as sdpa


@unittest.skipUnless(HAVE, "torch is not installed")
class TorchCase(Case):
    def setUp(self):
        super().setUp()
        self.compiler()

    def compiler(self):
        """Whether torch.compile has what it needs."""

    def tensor(self, *shape, dtype=None):
        return torch.from_numpy(self.normal(*shape)).to(dtype or torch.float32)


class Sdpa(TorchCase):
    BOUNDS = {"float32": 6e-6, "bfloat16": 1.6e-2, "float16": 2e-3}

    def same(self, q, k, v, mask=None, **options):
        """As torch in float64, rows that see nothing 0."""
        want = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)),
                                              mask if mask is None or mask.dtype == torch.bool else mask.double(), **options)
        got = sdpa(q, k, v, mask, **options)
        self.assertEqual((got.dtype, got.shape), (q.dtype, want.shape))
        self.close(got.double(), want.nan_to_num(0), self.BOUNDS[str(q.dtype).rpartition(".")[2]])
        return got

    def test_grid(self):
        """torch's parameters: types, lengths, heads, head sizes, causal from the top left, scale, the memory order of q, k, v."""
        for dtype, (length, keys), heads_kv, dim, dim_v, causal, scale, order in itertools.product(
                (torch.float32, torch.bfloat16, torch.float16), ((1, 1), (1, 17), (9, 9), (9, 13), (13, 9), (64, 130)), (4, 2, 1),
                (8, 64), (8, 64), (False, True), (None, 0.3), ("BHSD", "BSHD")):
            if self.rng.random() < 0.6:
                continue
            q, k, v = self.tensor(2, 4, length, dim), self.tensor(2, heads_kv, keys, dim), self.tensor(2, heads_kv, keys, dim_v)
            q, k, v = (x.to(dtype) for x in (q, k, v))
            if order == "BSHD":
                q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
            with self.subTest(dtype=dtype, length=length, keys=keys, heads_kv=heads_kv, dim=dim, dim_v=dim_v, causal=causal):
                got = self.same(q, k, v, is_causal=causal, scale=scale, enable_gqa=heads_kv != 4)
                if dim == dim_v:
                    self.assertEqual(got.stride(), q.stride())

    def test_masks(self):
        q, k, v = self.tensor(2, 4, 9, 16), self.tensor(2, 4, 13, 16), self.tensor(2, 4, 13, 8)
        for shape in (9, 13), (1, 13), (9, 1), (4, 9, 13), (1, 9, 13), (2, 1, 1, 13), (2, 4, 9, 13), (1, 4, 9, 1), (1, 1), (2, 1, 9, 13):
            for boolean in False, True:
                with self.subTest(shape=shape, boolean=boolean):
                    mask = torch.from_numpy(self.rng.random(shape) < 0.6) if boolean else self.tensor(*shape)
                    self.same(q, k, v, mask)
                    self.same(q, k, v, mask.expand(2, 4, 9, 13))
        mask = torch.zeros(9, 13, dtype=torch.bool)
        self.close(sdpa(q, k, v, mask), np.zeros((2, 4, 9, 8)), 0)
        for dtype in torch.bfloat16, torch.float16:
            self.same(*(x.to(dtype) for x in (q, k, v)), torch.from_numpy(self.rng.random((9, 13)) < 0.6))
            self.same(*(x.to(dtype) for x in (q, k, v)), self.tensor(9, 13).to(dtype))

    def test_shapes(self):
        for lead in (), (3,), (2, 3, 4):
            q, k, v = self.tensor(*lead, 9, 16), self.tensor(*lead, 13, 16), self.tensor(*lead, 13, 16)
            self.same(q, k, v)
            self.same(q, k, v, self.tensor(9, 13))
            self.same(q, k, v, self.tensor(*lead, 9, 13))
            self.same(q, k, v, is_causal=True)
        q = self.tensor(2, 4, 9, 16)
        self.same(q, self.tensor(1, 4, 13, 16), self.tensor(1, 4, 13, 16))
        self.same(self.tensor(2, 4, 0, 16), self.tensor(2, 4, 13, 16), self.tensor(2, 4, 13, 16))
        base = self.tensor(2, 9, 3, 4, 16)  # one projection's, as models slice them
        self.same(*(base[:, :, i].transpose(1, 2) for i in range(3)))

    def test_subclass_and_autocast(self):
        class Own(torch.Tensor):
            pass
        q, k, v = (self.tensor(2, 4, 9, 16) for _ in range(3))
        own = sdpa(q.as_subclass(Own), k.as_subclass(Own), v.as_subclass(Own))
        self.assertIs(type(own), Own)
        self.close(own, sdpa(q, k, v), 0)
        with torch.autocast("cpu", torch.bfloat16):
            got = sdpa(q, k, v, self.tensor(9, 9))
        self.assertEqual(got.dtype, torch.bfloat16)
        with torch.no_grad():
            sdpa(q.requires_grad_(), k, v)

    def test_refused(self):
        q, k, v = self.tensor(2, 4, 9, 16), self.tensor(2, 2, 13, 16), self.tensor(2, 2, 13, 16)
        same = (q, q, q)
        refuses = lambda error, words, *a, **o: self.refuses(error, words, sdpa, *a, **o)
        refuses(ValueError, "dropout_p is 0.1; accepted: 0, attn has no dropout", *same, dropout_p=0.1)
        refuses(ValueError, "enable_gqa is False with 4 heads of q and 2 of k and v; accepted: True", q, k, v)
        refuses(ValueError, "is_causal is True; accepted with attn_mask: False", *same, torch.ones(9, 9), is_causal=True)
        refuses(ValueError, ["k: head_dim is 8", "accepted: 16 as in q"], q, q[..., :8].contiguous(), q)
        refuses(ValueError, "attn_mask has shape [1, 1, 9, 12]", *same, torch.ones(9, 12))
        refuses(ValueError, ["attn_mask is f64", "f32"], *same, torch.ones(9, 9, dtype=torch.float64))
        refuses(ValueError, ["q is f64; accepted: f32"], *(q.double(),) * 3)
        refuses(ValueError, ["q is f8_e4m3fn; accepted: f32, f16, bf16"], *(q.to(torch.float8_e4m3fn),) * 3)
        refuses(ValueError, ["q: the last dimension has stride 2", "accepted: 1"], q[..., ::2], *(q[..., :8],) * 2)
        refuses(ValueError, ["have shapes [2, 4, 9, 16], [3, 4, 9, 16]", "accepted: dimensions before", "equal, or 1"], q, *(self.tensor(3, 4, 9, 16),) * 2)
        refuses(ValueError, "have shapes [3], [3], [3]; accepted: [..., L, E]", *(torch.ones(3),) * 3)
        refuses(ValueError, ["q is a Tensor on the device meta"], *(torch.empty(2, 4, 9, 16, device="meta"),) * 3)


    def test_broadcast(self):
        """All dimensions before the last two, K's and V's apart, against torch, which refuses some masks."""
        served = 0
        for (length, keys), batches, heads, gqa, (mask, causal) in itertools.product(
                ((3, 5), (1, 1)), itertools.product((1, 3), repeat=3), itertools.product((1, 2, 4), repeat=3), (False, True),
                ((None, False), ((3, 5), False), ((3, 4, 1, 1), False), (None, True))):
            q, k, v = (self.tensor(b, h, n, d)
                       for b, h, n, d in zip(batches, heads, (length, keys, keys), (16, 16, 8)))
            mask = None if mask is None else self.tensor(*mask)[..., :length, :keys]
            options = {"is_causal": causal, "enable_gqa": gqa}
            try:
                want = F.scaled_dot_product_attention(q, k, v, mask, **options)
            except RuntimeError:
                continue
            with self.subTest(batches=batches, heads=heads, keys=keys, mask=mask is not None, **options):
                self.close(sdpa(q, k, v, mask, **options), want, 1e-5)
            served += 1
        self.assertGreater(served, 500)
        for shapes in (((2, 4, 3, 16), (4, 5, 16), (5, 16)), ((3, 16), (2, 4, 5, 16), (1, 5, 16)), ((1, 3, 16), (4, 5, 16), (4, 5, 16)),
                       ((5, 1, 4, 3, 16), (2, 1, 5, 16), (1, 2, 4, 5, 16)), ((4, 3, 16), (2, 5, 16), (2, 5, 16))):
            with self.subTest(shapes):
                self.same(*(self.tensor(*s) for s in shapes), enable_gqa=shapes[1] == (2, 5, 16))
        mask = self.tensor(5, 2, 1, 3, 5)
        self.same(self.tensor(5, 2, 4, 3, 16), self.tensor(5, 1, 4, 5, 16), self.tensor(2, 4, 5, 16), mask)
        self.refuses(ValueError, ["attn_mask has shape [3, 2, 1, 3, 5]", "[5, 2]"], sdpa, self.tensor(5, 2, 4, 3, 16),
                     *(self.tensor(2, 4, 5, 16),) * 2, self.tensor(3, 2, 1, 3, 5))
        q, k = self.tensor(2, 4, 3, 16), self.tensor(2, 3, 5, 16)
        self.refuses(ValueError, "key has 3 heads; accepted: divisors of 4", sdpa, q, k, k[:, :1], enable_gqa=True)

    def test_scale_0(self):
        q, k, v = self.tensor(2, 4, 9, 16), self.tensor(2, 4, 13, 16), self.tensor(2, 4, 13, 16)
        seen, bias = torch.from_numpy(self.rng.random((9, 13)) < 0.6), self.tensor(9, 13)
        for mask, causal, weights in ((None, False, torch.ones(9, 13)), (seen, False, seen), (bias, False, bias.exp()),
                                      (None, True, torch.ones(9, 13).tril())):  # torch 2.15 gives NaN for the last one
            weights = weights.double() / weights.double().sum(-1, keepdim=True)
            self.close(sdpa(q, k, v, mask, scale=0.0, is_causal=causal), weights @ v.double(), 2e-6)
        self.close(sdpa(q, k, v, scale=0)[0, 0, 0], v[0, 0].mean(0), 1e-6)
        self.same(q, k, v, scale=-0.3)
        with attn.torch.patch() as taken:
            self.close(F.scaled_dot_product_attention(q, k, v, scale=0.0)[0, 0, 0], v[0, 0].mean(0), 1e-6)
        self.assertEqual(taken.taken, 1)


@unittest.skipUnless(HAVE and importlib.util.find_spec("torch.nn.attention.bias"), "torch has no torch.nn.attention.bias")
class CausalBias(TorchCase):
    """torch.nn.attention.bias: tensors whose storage nobody writes."""

    def cases(self):
        from torch.nn.attention.bias import causal_lower_right, causal_upper_left
        for length, keys in (9, 9), (4, 9), (9, 4), (1, 7):
            for make in causal_upper_left, causal_lower_right:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that L > S gives NaN, which it does not
                    mask = make(length, keys)
                visible = torch.ones(length, keys, dtype=torch.bool).tril(keys - length if make is causal_lower_right else 0)
                for lead in (2, 4), (3,), (), (2, 2, 2):
                    q, k, v = (self.tensor(*lead, n, 16) for n in (length, keys, keys))
                    want = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), visible).nan_to_num(0)
                    with self.subTest(make.__name__, length=length, keys=keys, lead=lead):
                        yield q, k, v, mask, want

    def test_eager(self):
        for q, k, v, mask, want in self.cases():
            self.close(sdpa(q, k, v, mask), want, 2e-6)
            with attn.torch.patch() as taken:
                self.close(F.scaled_dot_product_attention(q, k, v, mask), want, 2e-6)
                self.assertEqual((taken.calls, taken.taken), (1, 1), taken)
                self.close(F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask).nan_to_num(0), want, 1e-6)
                self.assertEqual((taken.calls, taken.taken), (2, 1), taken)

    def test_compiled(self):
        for q, k, v, mask, want in self.cases():
            if q.dim() in (2, 5):
                continue
            torch.compiler.reset()
            run = lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask) * 1
            ours = lambda q, k, v, mask: sdpa(q, k, v, mask) * 1
            self.close(torch.compile(ours, fullgraph=True, backend="aot_eager")(q, k, v, mask), want, 2e-6)
            with attn.torch.patch() as taken:
                fast = torch.compile(run, fullgraph=True, backend="aot_eager")
                self.close(fast(q, k, v, mask), want, 2e-6)
                self.assertEqual(taken.taken, q.dim() == 4)  # others are torch's
                self.close(fast(q.double(), k.double(), v.double(), mask).nan_to_num(0), want, 1e-6)
                self.assertEqual(taken.taken, q.dim() == 4)

    def test_elsewhere(self):
        """Sizes that are not the call's, and functions that know no such class."""
        from torch.nn.attention.bias import causal_lower_right, causal_upper_left
        q = self.tensor(2, 4, 9, 16)
        mask = causal_lower_right(9, 9)
        self.refuses(ValueError, "attn_mask is a CausalBias of [4, 9]; accepted: [L, S] = [9, 9]", sdpa, q, q, q, causal_upper_left(4, 9))
        self.refuses(ValueError, "is_causal is True", sdpa, q, q, q, mask, is_causal=True)
        for call in (lambda: sdpa(q, mask, mask), lambda: sdpa(mask, q, q), lambda: attn.forward(q, q, q, bias=mask),
                     lambda: attn.torch.forward(q, q, q, bias=mask), lambda: attn.BlockMask.from_dense(mask),
                     lambda: torch.ops.attn.forward(q, q, q, mask, *(None,) * 10, False, False, -1, -1, None, 0.0, 0, None),
                     lambda: torch.ops.attn.sdpa(q, q, q, mask), lambda: attn.quantize(mask, "f8_e4m3fn"),
                     lambda: attn.merge([(mask, mask)])):
            self.refuses(attn.InvalidArgument, "is a CausalBias, which computes for itself (__torch_function__)", call)


class Meanings(TorchCase):
    """Tensors whose storage is, or is not, their value."""

    def kinds(self):
        """name -> (what makes one of a [2, 4, 9, 16], the words of its refusal or None, whether torch attends to it)"""
        class Own(torch.Tensor):
            pass

        class Override(torch.Tensor):
            @classmethod
            def __torch_function__(cls, function, types, arguments=(), options=None):
                return super().__torch_function__(function, types, arguments, options or {})

        class Wrapper(torch.Tensor):
            @staticmethod
            def __new__(cls, inner):
                made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
                made.inner = inner
                return made

            @classmethod
            def __torch_dispatch__(cls, function, types, arguments=(), options=None):
                plain = lambda x: x.inner if isinstance(x, Wrapper) else x
                return function(*map(plain, arguments), **{name: plain(x) for name, x in (options or {}).items()})

        import torch.distributed as distributed
        from torch.masked import masked_tensor
        kinds = {"Parameter": (lambda x: torch.nn.Parameter(x, requires_grad=False), None, True),
                 "Own": (lambda x: x.as_subclass(Own), None, True),
                 "Override": (lambda x: x.as_subclass(Override), "is a Override, which computes for itself (__torch_function__)", True),
                 "Wrapper": (Wrapper, "is a Wrapper, which computes for itself (__torch_dispatch__)", True),
                 "MaskedTensor": (lambda x: masked_tensor(x, x > -9), "is a MaskedTensor, which computes for itself", False),
                 "nested": (lambda x: torch.nested.nested_tensor(list(x)), "is a nested Tensor", True),
                 "jagged": (lambda x: torch.nested.nested_tensor([y.transpose(0, 1) for y in x], layout=torch.jagged).transpose(1, 2),
                            "is a NestedTensor, which computes for itself", True),
                 "sparse": (lambda x: x.to_sparse(), "is a Tensor of layout torch.sparse_coo", False),
                 "mkldnn": (lambda x: x.to_mkldnn(), "is a Tensor of layout torch._mkldnn", False),
                 "quantized": (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8), "is a quantized Tensor", False),
                 "meta": (lambda x: x.to("meta"), "is a Tensor on the device meta", True),
                 "functional": (torch._to_functional_tensor, "is a functional Tensor", True),
                 "zeros": (lambda x: torch._efficientzerotensor(*x.shape), "is a Tensor of zeros without memory", True),
                 "uninitialized": (lambda x: torch.nn.UninitializedParameter(requires_grad=False),
                                   "is a UninitializedParameter, which computes for itself", False)}
        if hasattr(torch.nn, "Buffer"):
            kinds["Buffer"] = torch.nn.Buffer, None, True
        if distributed.is_available() and distributed.is_gloo_available():
            from torch.distributed.tensor import Replicate, distribute_tensor
            if not distributed.is_initialized():
                distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
                self.addCleanup(distributed.destroy_process_group)
            mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
            kinds["DTensor"] = lambda x: distribute_tensor(x, mesh, [Replicate()]), "is a DTensor, which computes for itself", True
        return kinds

    @staticmethod
    def plain(x):
        if type(x).__name__ == "DTensor":
            return x.to_local()
        return torch.stack(x.unbind()) if x.is_nested else x

    def test_every_function(self):
        q = self.tensor(2, 4, 9, 16)
        lse, lengths = torch.zeros(2, 9, 4), torch.zeros(2, dtype=torch.int32)
        append = lambda k_new, cache: attn.torch.kv_append(k_new, q, cache, q.clone(), lengths)
        for name, (make, words, _) in self.kinds().items():
            calls = {"sdpa's query": lambda: sdpa(make(q), q, q), "key": lambda: sdpa(q, make(q), q), "value": lambda: sdpa(q, q, make(q)),
                     "mask": lambda: sdpa(q, q, q, make(torch.zeros(2, 4, 9, 9))), "q": lambda: attn.forward(make(q), q, q),
                     "k": lambda: attn.forward(q, make(q), q), "bias": lambda: attn.torch.forward(q, q, q, bias=make(torch.zeros(2, 9, 4, 4))),
                     "torch's v": lambda: attn.torch.forward(q, q, make(q)), "plan": lambda: attn.Plan(make(q), q, q),
                     "merge": lambda: attn.merge([(make(q), lse)]), "quantize": lambda: attn.quantize(make(q), "f8_e4m3fn"),
                     "cache": lambda: append(q, make(q.clone())), "new": lambda: append(make(q.clone()), q.clone())}
            for what, call in calls.items():
                with self.subTest(name, what=what), torch.no_grad():
                    self.refuses(attn.Error, words, call) if words else call()

    @staticmethod
    def torch_can(run, *tensors):
        """Whether this release of torch, unpatched, does that with its own attention."""
        torch.compiler.reset()
        try:
            with torch.no_grad():
                run(*tensors)
        except Exception:
            return False
        return True

    def test_patched(self):
        """What torch attends to, patched or not, is attended to alike; the rest are torch's errors."""
        q = self.tensor(2, 4, 9, 16)
        want = F.scaled_dot_product_attention(q, q, q)
        for name, (make, words, attends) in self.kinds().items():
            served = attends and (words is None or self.torch_can(F.scaled_dot_product_attention, make(q), make(q), make(q)))
            with self.subTest(name), torch.no_grad(), attn.torch.patch() as taken:
                if served:
                    got = F.scaled_dot_product_attention(make(q), make(q), make(q))
                    if name not in ("meta", "functional", "zeros"):
                        self.close(self.plain(got), want, 2e-6)
                else:
                    with self.assertRaises(Exception) as caught:
                        F.scaled_dot_product_attention(make(q), make(q), make(q))
                    self.assertNotIsInstance(caught.exception, attn.Error)
                self.assertEqual((taken.calls, taken.taken), (1, words is None), taken)
                if words:
                    self.assertIn(words, next(iter(taken.others)))

    def test_compiled(self):
        q = self.tensor(2, 4, 9, 16)
        kinds = self.kinds()
        want = sdpa(q, q, q)
        for name in "Parameter", "Own", "Override", "Wrapper", "DTensor", "jagged":
            if name not in kinds:
                continue
            make, words, _ = kinds[name]
            own = lambda q: F.scaled_dot_product_attention(q, q, q) * 1
            compiles = self.torch_can(torch.compile(own, backend="aot_eager"), make(q))
            for what, run in {"sdpa": lambda q: sdpa(q, q, q) * 1, "forward": lambda q: attn.torch.forward(q, q, q) * 1}.items():
                torch.compiler.reset()
                with self.subTest(name, what=what), torch.no_grad():
                    if not words and not compiles:
                        self.skipTest(f"torch {torch.__version__} does not compile its own attention over {name}")
                    fast = torch.compile(run, fullgraph=words is None, backend="aot_eager")
                    if words:
                        self.refuses(attn.Error, words, fast, make(q))
                    else:
                        self.close(fast(make(q)), run(q), 0)
            torch.compiler.reset()
            with self.subTest(name, what="patch"), torch.no_grad(), attn.torch.patch() as taken:
                if not compiles:
                    self.skipTest(f"torch {torch.__version__} does not compile its own attention over {name}")
                got = torch.compile(own, backend="aot_eager")(make(q))
                self.close(self.plain(got), want, 2e-6)
                self.assertEqual(taken.taken, words is None)

    def test_traced(self):
        """Fake tensors and tracers, which stand in: the operator is in the graph."""
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx
        q = self.tensor(2, 4, 9, 16)
        for name, run in {"sdpa": lambda q: sdpa(q, q, q), "forward": lambda q: attn.torch.forward(q, q, q)}.items():
            fake = FakeTensorMode().from_tensor(q)
            self.assertEqual((run(fake).shape, type(run(fake)).__name__), (q.shape, "FakeTensor"))
            for mode in "real", "fake", "symbolic":
                graph = make_fx(run, tracing_mode=mode)(q)
                self.assertIn(name, [node.name for node in graph.graph.nodes])
                self.close(graph(q * 2), run(q * 2), 0)


class Operators(TorchCase):
    def compiled(self, function):
        return torch.compile(function, fullgraph=True, backend="aot_eager")

    def test_opcheck(self):
        q, k, v = self.tensor(2, 4, 9, 16), self.tensor(2, 2, 13, 16), self.tensor(2, 2, 13, 8)
        options = {"test_utils": ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")}
        for op in torch.ops.attn.sdpa, torch.ops.attn.sdpa_or_torch:
            torch.library.opcheck(op.default, (q, k, v, self.tensor(1, 1, 9, 13), False, None, True), **options)
            torch.library.opcheck(op.default, (q, q, q, None, True, 0.5, False), **options)
        none = (None,) * 11
        torch.library.opcheck(torch.ops.attn.forward.default, (q, self.tensor(2, 5, 3, 16), self.tensor(2, 5, 3, 8), *none, True, False,
                                                               -1, -1, None, 0.0, 0, None), **options)
        cache = self.tensor(2, 20, 2, 16)
        lengths = torch.tensor([3, 5], dtype=torch.int32)
        angles = self.tensor(20, 8)
        for q_new, advance in (None, False), (self.tensor(2, 3, 4, 16), True):
            torch.library.opcheck(torch.ops.attn.kv_append.default, (
                self.tensor(2, 3, 2, 16), self.tensor(2, 3, 2, 16), cache, cache.clone(), lengths, q_new, None, None, None, None,
                angles.cos(), angles.sin(), None, False, advance), **options)

    def test_compile(self):
        """No graph breaks, sizes that change, and the answers of calls that are not compiled."""
        def block(q, k, v, mask):
            return sdpa(q * 2, k, v, mask, enable_gqa=True) + sdpa(q, k, v, is_causal=True, enable_gqa=True)
        fast = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
        for length, keys in (9, 13), (9, 13), (5, 20):
            q, k, v = self.tensor(2, 4, length, 16), self.tensor(2, 2, keys, 16), self.tensor(2, 2, keys, 16)
            mask = torch.from_numpy(self.rng.random((length, keys)) < 0.6)
            self.close(fast(q, k, v, mask), block(q, k, v, mask), 1e-6)

    def test_compile_of_a_step(self):
        def step(q, k_new, v_new, k, v, lengths):
            attn.torch.kv_append(k_new, v_new, k, v, lengths, advance_seqlens=True)
            out, lse = attn.torch.forward(q, k, v, seqlens_kv=lengths, causal=True, return_lse=True)
            return out * 1, lse
        q, new = self.tensor(2, 1, 4, 16), self.tensor(2, 1, 2, 16)
        caches = [self.tensor(2, 20, 2, 16) for _ in range(2)]
        both = []
        for run in step, self.compiled(step):
            k, v = (c.clone() for c in caches)
            lengths = torch.tensor([3, 5], dtype=torch.int32)
            both.append((*run(q, new, new, k, v, lengths), k, v, lengths))
        for got, want in zip(*both):
            self.close(got, want, 0)
        self.assertEqual(both[0][4].tolist(), [4, 6])

    def test_wide_windows(self):
        q = self.tensor(2, 9, 4, 16)
        want = attn.forward(q, q, q, window=(-1, 2))
        for wide in 2**31, 2**63 - 1:
            run = lambda q: attn.torch.forward(q, q, q, window=(wide, 2), scale=None)
            self.close(run(q), want, 0)
            self.close(self.compiled(run)(q), want, 0)
        run = lambda q: attn.torch.forward(q, q, q, scale=0.0)
        self.close(self.compiled(run)(q), run(q), 0)
        self.close(run(q)[:, 0], q.mean(1), 1e-6)

    def test_grad_is_refused_compiled_too(self):
        """Of operators without a backward."""
        cache, lengths = self.tensor(2, 9, 4, 16), torch.zeros(2, dtype=torch.int32)
        append = lambda new: attn.torch.kv_append(new, new, cache, cache.clone(), lengths)
        new = self.tensor(2, 1, 4, 16).requires_grad_()
        self.refuses(ValueError, "k_new requires grad", append, new)
        self.refuses(Exception, "k_new requires grad", self.compiled(append), new)
        with torch.no_grad():
            self.compiled(append)(new)


class Patch(TorchCase):
    def test_counts(self):
        q = self.tensor(2, 4, 9, 16)
        own = F.scaled_dot_product_attention
        with attn.torch.patch() as taken:
            self.assertIsNot(F.scaled_dot_product_attention, own)
            F.scaled_dot_product_attention(q, q, q)
            F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
            F.scaled_dot_product_attention(q.double(), q.double(), q.double())
            leaf = q.clone().requires_grad_()
            F.scaled_dot_product_attention(leaf, q, q).sum().backward()
            with attn.torch.patch() as inner:
                F.scaled_dot_product_attention(q, q, q)
        self.assertIs(F.scaled_dot_product_attention, own)
        self.assertIsNotNone(leaf.grad)
        self.assertEqual((taken.calls, taken.taken, sum(taken.others.values()), inner.taken), (4, 2, 2, 1))
        for words in "dropout_p is 0.5", "f64":
            self.assertTrue(any(words in reason for reason in taken.others), taken.others)
        self.assertIn("2 of 4 calls taken\n  1 to torch: dropout_p is 0.5", repr(taken))

    def test_any_order(self):
        """Patches that overlap without nesting, on one thread and on several: torch's function comes back."""
        q, own = self.tensor(2, 4, 9, 16), F.scaled_dot_product_attention
        for first in 0, 1:
            a, b = patches = attn.torch.patch(), attn.torch.patch()
            counts = [patch.__enter__() for patch in patches]
            F.scaled_dot_product_attention(q, q, q)
            patches[first].__exit__(None, None, None)
            F.scaled_dot_product_attention(q, q, q)
            patches[1 - first].__exit__(None, None, None)
            self.assertIs(F.scaled_dot_product_attention, own)
            self.assertEqual([count.calls for count in counts], [0, 2] if first == 0 else [1, 1])
        failures = []

        def loop(seed):
            random = np.random.default_rng(seed)
            for _ in range(40):
                some = [attn.torch.patch() for _ in range(3)]
                for patch in some:
                    patch.__enter__()
                try:
                    F.scaled_dot_product_attention(q, q, q)
                except Exception as error:
                    failures.append(error)
                for i in random.permutation(3):
                    some[i].__exit__(None, None, None)
        with attn.torch.patch() as taken:
            threads = [threading.Thread(target=loop, args=(seed,)) for seed in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            F.scaled_dot_product_attention(q, q, q)
            self.assertEqual(taken.calls, 1)
        self.assertEqual(failures, [])
        self.assertIs(F.scaled_dot_product_attention, own)

    def test_another_patch(self):
        """One that somebody else makes meanwhile stays, and is what a later patch() puts back."""
        q, own = self.tensor(2, 4, 9, 16), F.scaled_dot_product_attention
        self.addCleanup(setattr, F, "scaled_dot_product_attention", own)
        for nested in False, True:
            first = attn.torch.patch()
            taken = first.__enter__()
            before, calls = F.scaled_dot_product_attention, []

            def other(*arguments, **options):
                calls.append(1)
                return before(*arguments, **options)
            F.scaled_dot_product_attention = other
            F.scaled_dot_product_attention(q, q, q)
            self.assertEqual((taken.calls, len(calls)), (1, 1))
            if nested:
                with attn.torch.patch() as inner:
                    F.scaled_dot_product_attention(q, q, q)
                    first.__exit__(None, None, None)
                self.assertEqual((inner.taken, len(calls)), (1, 1))
            else:
                first.__exit__(None, None, None)
            self.assertIs(F.scaled_dot_product_attention, other)
            count = len(calls)
            self.close(F.scaled_dot_product_attention(q, q, q), own(q, q, q), 0)  # through attn's, which is torch's now
            self.assertEqual((taken.calls, len(calls)), (1, count + 1))
            F.scaled_dot_product_attention = before  # as the other one ends
            with attn.torch.patch() as last:
                F.scaled_dot_product_attention(q, q, q)
            self.assertEqual((last.taken, taken.calls), (1, 1))
            self.assertIs(F.scaled_dot_product_attention, own)

    def test_broadcast(self):
        """What has the sizes of query is attn's; compiled, the rest is torch's."""
        few, many = self.tensor(1, 1, 9, 16), self.tensor(3, 4, 9, 16)
        run = lambda q, k: F.scaled_dot_product_attention(q, k, k) * 1
        for q, k, compiled in (few, many, 0), (many, few, 1):
            want = run(q, k)
            with torch.no_grad(), attn.torch.patch() as taken:
                self.close(run(q, k), want, 2e-6)
                self.assertEqual(taken.taken, 1)
                self.close(torch.compile(run, fullgraph=True, backend="aot_eager")(q, k), want, 2e-6)
                self.assertEqual(taken.taken, 1 + compiled)

    def test_a_model(self):
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        x = self.tensor(2, 9, 32)
        want = model(x).detach()  # with gradients: torch's own
        model.train(False)
        with torch.no_grad(), attn.torch.patch() as taken:
            torch.backends.mha.set_fastpath_enabled(False)
            self.addCleanup(torch.backends.mha.set_fastpath_enabled, True)
            got = model(x)
        self.assertEqual((taken.calls, taken.taken), (2, 2))
        self.close(got, want, 1e-5)

    def test_compiled(self):
        q = self.tensor(2, 4, 9, 16)
        fast = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True) * 2, fullgraph=True,
                             backend="aot_eager")
        want = F.scaled_dot_product_attention(q, q, q, is_causal=True) * 2
        with torch.no_grad(), attn.torch.patch() as taken:
            self.close(fast(q), want, 1e-5)
            self.close(fast(q.double()), want, 1e-5)
        self.assertEqual((taken.calls, taken.taken), (2, 1))
        self.close(fast(q), want, 1e-5)
        self.assertEqual(taken.calls, 2)


class Gpu(TorchCase):
    def setUp(self):
        super().setUp()
        self.gpu("cuda", "hip")

    def test_grid(self):
        """Where a kernel takes it, as torch in float32; counted."""
        served, refused = 0, {}
        for dtype, (length, keys), heads_kv, dim, masked, causal in itertools.product(
                (torch.float16, torch.bfloat16), ((1, 17), (1, 500), (9, 13), (130, 130), (200, 77)), (4, 2), (64, 128),
                (None, "bool", "float", "keys"), (False, True)):
            if masked and causal:
                continue
            q, k, v = (self.tensor(2, h, n, dim).cuda().to(dtype) for h, n in ((4, length), (heads_kv, keys), (heads_kv, keys)))
            mask = None
            if masked:
                seen = torch.from_numpy(self.rng.random((2, 1, 1 if masked == "keys" else length, keys)) < 0.7).cuda()
                mask = self.tensor(2, 1, length, keys).cuda().to(dtype) if masked == "float" else seen
            options = {"is_causal": causal, "enable_gqa": heads_kv != 4}
            with self.subTest(dtype=dtype, length=length, keys=keys, heads_kv=heads_kv, dim=dim, masked=masked, causal=causal):
                try:
                    got = sdpa(q, k, v, mask, **options)
                except attn.Unsupported as error:
                    refused[str(error)[:200]] = refused.get(str(error)[:200], 0) + 1
                    continue
                wide = mask if mask is None or mask.dtype == torch.bool else mask.float()
                want = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), wide, **options)
                self.close(got.float().cpu(), want.nan_to_num(0).cpu(), 2e-2 if dtype == torch.bfloat16 else 4e-3)
                served += 1
        print(f"sdpa on a GPU: {served} served, refused: {refused}")
        self.assertGreater(served, 100)

    def test_compile_and_capture(self):
        q, k, v = (self.tensor(2, 4, n, 64).cuda().half() for n in (1, 500, 500))
        want = F.scaled_dot_product_attention(q, k, v)
        for mode in None, "reduce-overhead":
            fast = torch.compile(lambda q, k, v: sdpa(q, k, v) * 1, fullgraph=True, mode=mode)
            for _ in range(4):
                self.close(fast(q, k, v).cpu(), want.cpu(), 4e-3)
        with torch.no_grad(), attn.torch.patch() as taken:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = F.scaled_dot_product_attention(q, k, v)
            graph.replay()
        self.assertEqual(taken.taken, 1)
        self.close(out.cpu(), want.cpu(), 4e-3)

    def test_opcheck(self):
        """Every operator, with what autograd records where it has gradients."""
        half = lambda *shape: self.tensor(*shape).cuda().half()
        options = {"test_utils": ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")}
        check = lambda operator, *arguments: torch.library.opcheck(operator.default, arguments, **options)
        for grad in False, True:
            q, k, v = (half(2, 4, n, 64).requires_grad_(grad) for n in (9, 13, 13))
            for operator in (torch.ops.attn.sdpa,) if grad else (torch.ops.attn.sdpa, torch.ops.attn.sdpa_or_torch):
                check(operator, q, k, v, None, True, None, False)
                check(operator, q, k, v, half(1, 1, 9, 13), False, 0.5, False)
            q, k, v = (half(2, n, h, 64).requires_grad_(grad) for n, h in ((9, 4), (13, 2), (13, 2)))
            check(torch.ops.attn.forward, q, k, v, *(None,) * 11, True, False, -1, -1, None, 0.0, 0, None)
        with torch.no_grad():
            out, lse = attn.torch.forward(q, k, v, causal=True, return_lse=True)
            check(torch.ops.attn.backward, half(2, 9, 4, 64), None, q, k, v, out, lse, *(None,) * 6, True, False, -1, -1, None, 0.0, None,
                  [True, True, True, False, False])
        new, cache, angles = half(2, 3, 2, 64), half(2, 20, 2, 64), self.tensor(20, 32).cuda()
        lengths = torch.tensor([3, 5], dtype=torch.int32, device="cuda")
        for q_new, advance in (None, False), (half(2, 3, 4, 64), True):
            check(torch.ops.attn.kv_append, new, new.clone(), cache, cache.clone(), lengths, q_new, None, None, None, None, angles.cos(), angles.sin(),
                  None, False, advance)

    def test_compile_of_steps(self):
        """A decode step (append, forward over lengths) and a training step, compiled by inductor: the bits of calls that are not compiled."""
        def decode(q, new, k, v, lengths):
            attn.torch.kv_append(new, new, k, v, lengths, advance_seqlens=True)
            return attn.torch.forward(q, k, v, seqlens_kv=lengths, causal=True)

        def train(q, k, v):
            out = attn.torch.forward(q, k, v, causal=True)
            return torch.autograd.grad(out.float().square().sum(), (q, k, v))
        half = lambda *shape: self.tensor(*shape).cuda().half()
        q, new, caches = half(2, 1, 4, 64), half(2, 1, 2, 64), [half(2, 20, 2, 64) for _ in range(2)]
        both = []
        with torch.no_grad():
            for run in decode, torch.compile(decode, fullgraph=True):
                k, v = (c.clone() for c in caches)
                lengths = torch.tensor([3, 5], dtype=torch.int32, device="cuda")
                both.append((run(q, new, k, v, lengths), k, v, lengths))
        for got, want in zip(*both):
            self.assertTrue(torch.equal(got, want))
        arrays = [half(2, 130, h, 64).requires_grad_() for h in (4, 2, 2)]
        fast = torch.compile(lambda q, k, v: attn.torch.forward(q, k, v, causal=True), fullgraph=True)
        out = fast(*arrays)
        for got, want in zip(torch.autograd.grad(out.float().square().sum(), arrays), train(*arrays)):
            self.assertTrue(torch.equal(got, want))

    def test_memory_does_not_grow(self):
        q, k, v = (self.tensor(1, 4, n, 64).cuda().half() for n in (1, 500, 500))
        allocated, device, _ = self.growth(lambda: sdpa(q, k, v), 1000, 20000)
        self.assertEqual(allocated, 0)
        self.assertLess(device, 1 << 20)


@unittest.skipUnless(HAVE and importlib.util.find_spec("transformers"), "transformers is not installed")
class Transformers(TorchCase):
    """Small models with random weights against transformers' own eager attention."""

    SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "vocab_size": 80, "max_position_embeddings": 64}

    def models(self, kind, **config):
        import attn.transformers  # registers
        import transformers
        torch.manual_seed(1)
        eager, ours = (
            getattr(transformers, f"{kind}ForCausalLM")._from_config(  # which keeps the name in the configuration
                getattr(transformers, f"{kind}Config")(**{**self.SIZES, **config}), attn_implementation=name).eval()
            for name in ("eager", "libattn"))
        ours.load_state_dict(eager.state_dict())
        return eager, ours

    def test_models(self):
        tokens = torch.from_numpy(self.rng.integers(3, 80, (2, 17)))
        padded = torch.ones(2, 17, dtype=torch.long)
        padded[0, :6] = 0
        for kind, config in (("Llama", {}), ("Mistral", {"sliding_window": 5}),
                             ("Gemma2", {"head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 3.0}),
                             ("GptOss", {"head_dim": 16, "sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1})):
            eager, ours = self.models(kind, **config)
            for mask in None, padded:
                with self.subTest(kind, padded=mask is not None), torch.no_grad():
                    before = {k["name"]: attn._attn.launch_count(k["name"]) for k in attn.info()["kernels"] if k["backend"] == "cpu"}
                    got, want = (m(tokens, attention_mask=mask, use_cache=True) for m in (ours, eager))
                    ran = sum(attn._attn.launch_count(name) - n for name, n in before.items())
                    self.assertEqual(ran, 2)  # once in each layer of ours
                    seen = slice(None) if mask is None else mask.bool()
                    self.close(got.logits[seen], want.logits[seen], 2e-5)
                    step = tokens[:, :1]
                    longer = None if mask is None else torch.cat((mask, mask.new_ones(2, 1)), 1)
                    got, want = (m(step, attention_mask=longer, past_key_values=o.past_key_values)
                                 for m, o in ((ours, got), (eager, want)))
                    self.close(got.logits, want.logits, 2e-5)

    def test_compiled(self):
        eager, ours = self.models("Llama")
        tokens = torch.from_numpy(self.rng.integers(3, 80, (2, 9)))
        with torch.no_grad():
            got = torch.compile(ours, fullgraph=True, backend="aot_eager")(tokens, use_cache=False).logits
            self.close(got, eager(tokens).logits, 2e-5)


if __name__ == "__main__":
    unittest.main()
