"""attn.backward, and autograd of attn.torch and attn.flash against PyTorch's own in float64."""
import importlib.util
import itertools
import unittest
import warnings

from support import Case, attn, np

HAVE = importlib.util.find_spec("torch") is not None
if HAVE:
    import torch
    import torch.nn.functional as F

    import attn.flash
    import attn.torch
    from attn.torch import scaled_dot_product_attention as sdpa


def numeric(x, loss, step=1e-3):
    """dloss/dx by central differences."""
    found = np.zeros(x.shape)
    for at in np.ndindex(*x.shape):
        kept = x[at]
        x[at] = kept + step
        above, right = float(x[at]), loss()
        x[at] = kept - step
        below, left = float(x[at]), loss()
        x[at] = kept
        found[at] = (right - left) / (above - below)
    return found


class Backward(Case):
    def test_differences(self):
        """Against forward() itself in float64."""
        q, k, v = self.qkv(batch=1, seqlen_q=3, seqlen_kv=4, heads=2, heads_kv=1, dim=4)
        bias, sinks = self.normal(1, 2, 1, 4), self.normal(2)
        d_out, d_lse = self.normal(1, 3, 2, 4), self.normal(1, 2, 3)
        options = {"causal": True, "softcap": 2.0, "bias": bias, "sinks": sinks}
        run = lambda **more: attn.forward(q, k, v, **options, return_lse=True, backend="reference", out_dtype="f64")
        loss = lambda: float((run()[0] * d_out).sum() + (run()[1].astype(np.float64) * d_lse).sum())
        out, lse = run()
        want = ("q", "k", "v", "bias", "sinks")
        found = attn.backward(d_out, q, k, v, out, lse, **options, d_lse=d_lse, want=want, backend="reference", dtype="f64")
        for name, x, got in zip(want, (q, k, v, bias, sinks), found):
            with self.subTest(name):
                self.close(got, numeric(x, loss), 2e-3)  # lse is f32, and so its differences
        out, lse = attn.forward(q, k, v, **options, return_lse=True)
        for got, exact in zip(attn.backward(d_out, q, k, v, out, lse, **options, d_lse=d_lse, want=want), found):
            self.close(got, exact, 2e-5)

    def test_kv_begin(self):
        """As a bias of -inf on the first keys, whose own gradients are 0; reference and every host kernel, padded and packed."""
        q, k, v = self.qkv(batch=3, seqlen_q=9, seqlen_kv=70)
        begin, d_out = np.array([0, 66, 70], np.int32), self.normal(3, 9, 4, 16)
        bias = np.where(np.arange(70) < begin[:, None, None, None], -np.inf, 0).astype(np.float32)
        for options in {}, {"causal": True}, {"causal": True, "window": (20, -1)}, {"sinks": self.normal(4)}:
            exact = {**options, "bias": bias, "backend": "reference", "out_dtype": "f64"}
            out, lse = attn.forward(q, k, v, **exact, return_lse=True)
            del exact["out_dtype"]
            want = attn.backward(d_out, q, k, v, out.astype(np.float32), lse, **exact, dtype="f64")
            for backend, bound in ("reference", 1e-6), ("cpu", 1e-5):
                with self.subTest(backend=backend, **options):
                    out, lse = attn.forward(q, k, v, **options, kv_begin=begin, backend=backend, return_lse=True)
                    got = attn.backward(d_out, q, k, v, out, lse, **options, kv_begin=begin, backend=backend)
                    for a, b in zip(got, want):
                        self.close(a, b, bound)
                    self.assertTrue((got[1][1, :66] == 0).all() and (got[2][2] == 0).all())

    def test_outputs(self):
        q, k, v = self.qkv()
        out, lse = attn.forward(q, k, v, return_lse=True)
        d_out = self.normal(*out.shape)
        dq, dk, dv = attn.backward(d_out, q, k, v, out, lse)
        self.assertEqual((dq.shape, dk.shape, dv.shape), (q.shape, k.shape, v.shape))
        sums = [np.ones_like(x) for x in (q, k, v)]
        made = attn.backward(d_out, q, k, v, out, lse, dq=sums[0], dk=sums[1], dv=sums[2], accumulate=True)
        for x, s, g in zip(made, sums, (dq, dk, dv)):
            self.assertIs(x, s)
            self.close(s, 1 + g, 1e-6)
        only, = attn.backward(d_out, q, k, v, out, lse, want=("v",), dv=np.empty_like(v))
        self.close(only, dv, 0)
        first = attn.backward(d_out, q, k, v, out, lse, dtype="f64", backend="reference")
        self.assertEqual(first[0].dtype, np.float64)
        self.close(first[0], dq, 2e-6)

    def test_packed(self):
        """Sequences one after the other are as each by itself."""
        lengths_q, lengths_kv = (3, 0, 5), (4, 2, 7)
        q, k, v = self.normal(9, 4, 8), self.normal(14, 2, 8), self.normal(14, 2, 8)
        cu_q, cu_kv = (np.concatenate(([0], np.cumsum(x))).astype(np.int32) for x in (lengths_q, lengths_kv))
        options = {"causal": True, "cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv}
        out, lse = attn.forward(q, k, v, **options, return_lse=True)
        d_out = self.normal(*out.shape)
        dq, dk, dv = attn.backward(d_out, q, k, v, out, lse, **options)
        for b in range(3):
            a, c = slice(*cu_q[b:b + 2]), slice(*cu_kv[b:b + 2])
            alone = attn.backward(d_out[None, a], q[None, a], k[None, c], v[None, c], out[None, a], lse[None, :, a].copy(), causal=True)
            for got, want in zip((dq[a], dk[c], dv[c]), alone):
                self.close(got[None], want, 1e-6)

    def test_sums_of_nothing(self):
        """Without a batch, queries or keys the gradients of sinks and of a bias that repeats are 0, or keep what they hold."""
        for batch, seqlen_q, seqlen_kv in (0, 5, 7), (2, 0, 7), (2, 5, 0):
            q, k, v = self.normal(batch, seqlen_q, 4, 8), self.normal(batch, seqlen_kv, 2, 8), self.normal(batch, seqlen_kv, 2, 8)
            sinks, lse = self.normal(4), np.zeros((batch, 4, seqlen_q), np.float32)
            for shape in (1, 4, 1, seqlen_kv), (1, 1, seqlen_q, 1), (1, 4, 1, 1):
                for dtype in np.float32, np.float16:
                    bias = np.ones(shape, dtype)
                    run = lambda **more: attn.backward(q, q, k, v, q.copy(), lse, bias=bias, sinks=sinks, want=("bias", "sinks"), **more)
                    with self.subTest(batch=batch, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, shape=shape, dtype=dtype):
                        for held, accumulate in (0, False), (7, True):
                            sums = {"d_bias": np.full(shape, 7, dtype), "d_sinks": np.full(4, 7, np.float32)}
                            for got in run(**sums, accumulate=accumulate):
                                self.assertTrue((got == held).all())
                        for got in run():
                            self.assertTrue((got == 0).all())

    def test_refused(self):
        q, k, v = self.qkv()
        out, lse = attn.forward(q, k, v, return_lse=True)
        good = (out, q, k, v, out, lse)
        refuses = lambda words, *a, error=ValueError, **o: self.refuses(error, words, attn.backward, *a, **o)
        refuses("k is a list of segments; accepted for backward: one array", out, q, [k], [v], out, lse)
        refuses("want has x; accepted: q, k, v, bias, sinks", *good, want=("x",))
        refuses("want has bias; accepted with bias given", *good, want=("bias",))
        refuses("want is a str; accepted: a tuple", *good, want="q", error=TypeError)
        refuses("want is empty", *good, want=())
        refuses("dq is None; accepted with accumulate", *good, accumulate=True)
        refuses("d_bias is given; accepted: None, or its name in want", *good, d_bias=out)
        refuses(["dq is at", "overlaps q"], *good, dq=q)
        refuses("dtype is f16; accepted: q's type, f32, f64", *good, dtype="f16")
        refuses("d_out has shape [1, 9, 4, 16]; accepted: [B, Sq, Hq, Dv] = [2, 9, 4, 16]", out[:1], *good[1:])
        refuses("lse has shape [2, 9, 4]; accepted: [B, Hq, Sq]", *good[:5], lse.reshape(2, 9, 4))
        refuses("seqlens_kv[0] is 14; accepted: 0 to 13", *good, seqlens_kv=np.array([14, 1], np.int32))
        refuses("lse is a NoneType", *good[:5], None, error=TypeError)
        refuses("k_type is f32; accepted for backward: q's type, f16", out, q.astype(np.float16), k, v, out, lse, error=attn.Unsupported)


@unittest.skipUnless(HAVE, "torch is not installed")
class Autograd(Case):
    BOUNDS = {"float32": 2e-5, "bfloat16": 6e-2, "float16": 8e-3}

    def tensor(self, *shape, dtype=None):
        return torch.from_numpy(self.normal(*shape)).to(dtype or torch.float32)

    def same(self, call, want, *inputs, **options):
        """Gradients of the inputs as those of `want` in float64."""
        inputs = [x.detach().requires_grad_() for x in inputs]
        exact = [x.detach().double().requires_grad_() for x in inputs]
        got, truth = call(*inputs, **options), want(*exact, **options)
        weights = torch.from_numpy(self.normal(*got.shape))
        bound = self.BOUNDS[str(got.dtype)[6:]]
        self.close(got.detach().double(), truth.detach(), bound)
        for x, g, t in zip(inputs, torch.autograd.grad((got * weights).sum(), inputs), torch.autograd.grad((truth * weights).sum(), exact)):
            self.assertEqual((g.dtype, g.shape), (x.dtype, x.shape))
            self.close(g.double(), t, bound * max(1, t.abs().max().item()))

    def test_sdpa(self):
        own = F.scaled_dot_product_attention
        before = attn._attn.launch_count("bwd_cpu_avx512") + attn._attn.launch_count("bwd_cpu_avx2") + attn._attn.launch_count("bwd_cpu_baseline")
        for dtype, (length, keys), heads_kv, dim, causal in itertools.product(
                (torch.float32, torch.bfloat16, torch.float16), ((1, 17), (9, 9), (9, 13), (64, 130)), (4, 2, 1), (8, 64), (False, True)):
            if self.rng.random() < 0.6:
                continue
            q, k, v = (self.tensor(2, h, n, dim, dtype=dtype) for h, n in ((4, length), (heads_kv, keys), (heads_kv, keys)))
            with self.subTest(dtype=dtype, length=length, keys=keys, heads_kv=heads_kv, dim=dim, causal=causal):
                self.same(sdpa, own, q, k, v, is_causal=causal, scale=0.3, enable_gqa=heads_kv != 4)
        after = attn._attn.launch_count("bwd_cpu_avx512") + attn._attn.launch_count("bwd_cpu_avx2") + attn._attn.launch_count("bwd_cpu_baseline")
        self.assertGreater(after, before)

    def test_masks(self):
        q, k, v = self.tensor(2, 4, 9, 16), self.tensor(2, 4, 13, 16), self.tensor(2, 4, 13, 8)
        for shape in (9, 13), (1, 13), (9, 1), (4, 9, 13), (2, 1, 1, 13), (1, 1), (2, 4, 9, 13):
            with self.subTest(shape):
                self.same(sdpa, F.scaled_dot_product_attention, q, k, v, self.tensor(*shape))
        mask = torch.from_numpy(self.rng.random((9, 13)) < 0.6)
        mask[:, 0] = True
        self.same(lambda q, k, v: sdpa(q, k, v, mask), lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask), q, k, v)

    def test_shapes(self):
        """Leading dimensions, views, expanded gradients, one input alone."""
        own = F.scaled_dot_product_attention
        for lead in (), (3,), (2, 3, 4):
            self.same(sdpa, own, *(self.tensor(*lead, n, 16) for n in (9, 13, 13)))
        self.same(sdpa, own, self.tensor(2, 4, 9, 16), self.tensor(1, 1, 13, 16), self.tensor(2, 4, 13, 16))
        packed = self.tensor(2, 9, 3, 4, 8)
        split = lambda call: lambda x: call(*(x[:, :, i].transpose(1, 2) for i in range(3)))
        self.same(split(sdpa), split(own), packed)
        q = self.tensor(2, 4, 9, 16)
        v = q.clone().requires_grad_()
        sdpa(q, q, v).sum().backward()
        self.close(v.grad.sum(), q.numel(), 1e-3)  # weights of a row add up to 1
        self.assertIsNone(q.grad)
        with torch.autocast("cpu", torch.bfloat16):
            sdpa(v, v, v).float().sum().backward()

    def test_forward(self):
        """attn.torch.forward: sinks, softcap, ALiBi, lengths and lse."""
        q, k, v, sinks = self.tensor(2, 9, 4, 16), self.tensor(2, 13, 2, 16), self.tensor(2, 13, 2, 16), self.tensor(4)
        lengths, slopes = torch.tensor([13, 5], dtype=torch.int32), torch.tensor([0.5, 0.25, 0.1, 0.0])

        def formula(q, k, v, sinks):
            k, v = (x.repeat_interleave(2, 2) for x in (k, v))
            s = torch.einsum("bihd,bjhd->bhij", q, k) / 4
            s = 3 * torch.tanh(s / 3)
            i, j = torch.arange(9)[:, None], torch.arange(13)
            at = i + lengths[:, None, None] - 9
            s = s - slopes.to(s.dtype)[:, None, None] * (at - j).abs()[:, None]
            visible = (j <= at) & (j < lengths[:, None, None])
            s = s.masked_fill(~visible[:, None], -torch.inf)
            both = torch.cat((s, sinks[None, :, None, None].expand(2, 4, 9, 1)), -1)
            out = torch.einsum("bhij,bjhd->bihd", both.softmax(-1)[..., :-1], v)
            return torch.cat((out.flatten(), both.logsumexp(-1).flatten()))

        def call(q, k, v, sinks):
            out, lse = attn.torch.forward(q, k, v, sinks=sinks, causal=True, softcap=3.0, alibi_slopes=slopes, seqlens_kv=lengths,
                                          return_lse=True)
            return torch.cat((out.flatten(), lse.flatten()))

        self.same(call, formula, q, k, v, sinks)

    def test_merged(self):
        """out and lse of two halves of the keys, merged by PyTorch: the gradients of the whole."""
        def call(q, k, v):
            parts = [attn.torch.forward(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 6), slice(6, 13))]
            weights = torch.stack([lse for _, lse in parts]).softmax(0).transpose(2, 3)[..., None]
            return sum(w * out for w, (out, _) in zip(weights, parts))
        whole = lambda q, k, v: F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True).transpose(1, 2)
        self.same(call, whole, self.tensor(2, 9, 4, 16), self.tensor(2, 13, 2, 16), self.tensor(2, 13, 2, 16))

    def test_flash(self):
        q, k, v = self.tensor(2, 9, 4, 16), self.tensor(2, 9, 2, 16), self.tensor(2, 9, 2, 16)
        own = lambda q, k, v: F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True,
                                                             enable_gqa=True).transpose(1, 2)
        self.same(lambda *x: attn.flash.flash_attn_func(*x, causal=True, deterministic=True), own, q, k, v)
        cu = torch.tensor([0, 4, 9], dtype=torch.int32)
        varlen = lambda *x: attn.flash.flash_attn_varlen_func(*x, cu, cu, 5, 5, causal=True)
        each = lambda q, k, v: torch.cat([own(q[None, a:b], k[None, a:b], v[None, a:b])[0] for a, b in ((0, 4), (4, 9))])
        self.same(varlen, each, q[0], k[0], v[0])
        used = torch.tensor([3, 5], dtype=torch.int32)
        some = lambda *x: attn.flash.flash_attn_varlen_func(*x, cu, cu, 5, 5, seqused_q=used)[4:]
        full = lambda q, k, v: F.scaled_dot_product_attention(*(x[None, 4:].transpose(1, 2) for x in (q, k, v)), enable_gqa=True)[0].transpose(0, 1)
        self.same(some, full, q[0], k[0], v[0])
        slopes = torch.tensor([[0.5, 0.25, 0.1, 0.0], [1.0, 0.5, 0.25, 0.125]])
        bias = -slopes[:, :, None, None] * (torch.arange(9)[:, None] - torch.arange(9)).abs()
        biased = lambda q, k, v: F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), bias.to(q.dtype),
                                                                enable_gqa=True).transpose(1, 2)
        self.same(lambda *x: attn.flash.flash_attn_func(*x, alibi_slopes=slopes), biased, q, k, v)
        leaf = q.clone().requires_grad_()
        self.refuses(ValueError, "out is given where q, k or v requires grad; accepted: None", attn.flash.flash_attn_func, leaf, k, v,
                     out=torch.empty_like(q))

    def test_refused(self):
        q = self.tensor(2, 4, 9, 16)
        leaf = q.clone().requires_grad_()
        gradient, = torch.autograd.grad(sdpa(leaf, q, q).sum(), leaf, create_graph=True)
        self.refuses(ValueError, "the gradient of a gradient is asked for; accepted: first derivatives, attn has no second ones",
                     gradient.sum().backward)
        forward = attn.torch.forward
        self.refuses(attn.Unsupported, "k is float16 where q, k or v requires grad; accepted: q's type", forward, leaf, q.half(), q.half())
        self.refuses(ValueError, "tree is given where q, k or v requires grad; accepted: None", forward, leaf, q, q, tree_keys=2,
                     tree=torch.zeros(2, 4, 2, dtype=torch.int64))
        self.refuses(ValueError, "alibi_slopes requires grad; accepted: slopes that do not", forward, leaf, q, q,
                     alibi_slopes=torch.ones(9, requires_grad=True))
        self.refuses(ValueError, ["q requires grad", "attn.torch has functions with a backward"], attn.forward, leaf, q, q)

    def test_equal_bits(self):
        q, k, v = (self.tensor(2, 4, 300, 32).requires_grad_() for _ in range(3))
        d = self.tensor(2, 4, 300, 32)
        run = lambda: torch.autograd.grad(sdpa(q, k, v, is_causal=True), (q, k, v), d)
        first = run()
        threads = attn.get_num_threads()
        self.addCleanup(attn.set_num_threads, threads)
        for n in 1, 2, 3, 5:
            attn.set_num_threads(n)
            for a, b in zip(first, run()):
                self.assertTrue(torch.equal(a, b))

    def test_checkpoint(self):
        from torch.utils.checkpoint import checkpoint
        q, k, v = (self.tensor(2, 4, 9, 16).requires_grad_() for _ in range(3))
        plain = torch.autograd.grad(sdpa(q, k, v).square().sum(), (q, k, v))
        saved = torch.autograd.grad(checkpoint(sdpa, q, k, v, use_reentrant=False).square().sum(), (q, k, v))
        for a, b in zip(plain, saved):
            self.assertTrue(torch.equal(a, b))

    def test_gradcheck(self):
        """PyTorch's own check, in float32 with the steps that this asks for."""
        q, k, v = (self.tensor(1, 2, 3, 4).requires_grad_() for _ in range(3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that float32 is not double precision
            self.assertTrue(torch.autograd.gradcheck(lambda *x: sdpa(*x, is_causal=True), (q, k, v), eps=1e-2, atol=2e-3, rtol=1e-2))

    def test_opcheck(self):
        if not hasattr(torch.library, "opcheck"):
            self.skipTest(f"torch {torch.__version__} has no torch.library.opcheck")
        leaf = lambda *shape: self.tensor(*shape).requires_grad_()
        torch.library.opcheck(torch.ops.attn.sdpa.default, (leaf(2, 4, 9, 16), leaf(2, 4, 13, 16), leaf(2, 4, 13, 16)))
        torch.library.opcheck(torch.ops.attn.sdpa.default, (leaf(2, 4, 9, 16), leaf(2, 2, 13, 16), leaf(2, 2, 13, 16), leaf(1, 4, 9, 13)),
                              {"enable_gqa": True})
        q, k, v = leaf(2, 9, 4, 16), leaf(2, 13, 2, 16), leaf(2, 13, 2, 16)
        rest = (None,) * 8 + (True, False, -1, -1, None, 0.0, 0, None)
        torch.library.opcheck(torch.ops.attn.forward.default, (q, k, v, None, None, leaf(4), *rest))
        with torch.no_grad():
            out, lse = attn.torch.forward(q, k, v, return_lse=True)
        plain = [x.detach() for x in (out, q, k, v, out, lse)]
        torch.library.opcheck(torch.ops.attn.backward.default,
                              (plain[0], None, *plain[1:], *(None,) * 6, False, False, -1, -1, None, 0.0, None, [True, True, False, False, False]))

    def test_compile(self):
        def compiled(run, **options):
            torch.compiler.reset()
            return torch.compile(run, backend="aot_eager", **options)
        q, k, v = (self.tensor(2, 4, 9, 16).requires_grad_() for _ in range(3))
        for what, run in {"sdpa": lambda q, k, v: sdpa(q, k, v, is_causal=True) * 2,
                          "forward": lambda q, k, v: attn.torch.forward(q, k, v, return_lse=True)[0] * 2}.items():
            for dynamic in False, True:
                with self.subTest(what, dynamic=dynamic):
                    want = torch.autograd.grad(run(q, k, v).square().sum(), (q, k, v))
                    got = torch.autograd.grad(compiled(run, fullgraph=True, dynamic=dynamic)(q, k, v).square().sum(), (q, k, v))
                    for a, b in zip(got, want):
                        self.assertTrue(torch.equal(a, b))

    def test_training(self):
        """Fifty steps of a small layer: as PyTorch's attention, and twice the same bits."""
        def train(attention):
            torch.manual_seed(3)
            layer = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
            optimizer = torch.optim.SGD([p for part in layer for p in part.parameters()], 0.3)
            x, y = torch.randn(4, 20, 16), torch.randn(4, 20, 16)
            losses = []
            for _ in range(50):
                q, k, v = layer[0](x).view(4, 20, 3, 2, 8).transpose(1, 3).unbind(2)
                out = layer[1](attention(q, k, v, is_causal=True).transpose(1, 2).reshape(4, 20, 16))
                loss = F.mse_loss(out, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses, [p.detach().clone() for part in layer for p in part.parameters()]
        mine, parameters = train(sdpa)
        again, same = train(sdpa)
        theirs, _ = train(F.scaled_dot_product_attention)
        self.assertEqual(mine, again)
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(parameters, same)))
        np.testing.assert_allclose(mine, theirs, rtol=1e-4)
        self.assertLess(mine[-1], mine[0])


@unittest.skipUnless(HAVE, "torch is not installed")
class Cuda(Case):
    """Gradients of CUDA tensors, against float64 on the CPU."""
    BOUNDS = {"bfloat16": 3e-2, "float16": 4e-3}

    def setUp(self):
        super().setUp()
        self.gpu("cuda")
        self.before = self.launches()

    def launches(self):
        return sum(attn._attn.launch_count(k["name"]) for k in attn.info()["kernels"] if k["name"].startswith("bwd_sm"))

    def same(self, call, want, *inputs):
        """call's gradients of its CUDA inputs are those of `want` in float64, within a bound relative to their largest element."""
        leaves = [x.detach().requires_grad_() for x in inputs]
        exact = [x.detach().double().cpu().requires_grad_() for x in inputs]
        got, truth = call(*leaves), want(*exact)
        weights = torch.from_numpy(self.normal(*got.shape))
        found = torch.autograd.grad(got, leaves, weights.to(got))
        for x, g, t in zip(leaves, found, torch.autograd.grad(truth, exact, weights.to(got.dtype).double())):
            self.assertEqual((g.dtype, g.shape, g.device), (x.dtype, x.shape, x.device))
            self.close(g.double().cpu(), t, self.BOUNDS[str(inputs[0].dtype)[6:]] * max(1, t.abs().max().item()))
        self.assertGreater(self.launches(), self.before)
        return found

    def tensor(self, *shape, dtype=None):
        return torch.from_numpy(self.normal(*shape)).to("cuda", dtype or torch.bfloat16)

    def test_sdpa(self):
        own = F.scaled_dot_product_attention
        for dtype, heads_kv, dim, causal in itertools.product((torch.bfloat16, torch.float16), (4, 2), (40, 64, 128, 256), (False, True)):
            q, k, v = (self.tensor(2, h, 200, dim, dtype=dtype) for h in (4, heads_kv, heads_kv))
            with self.subTest(dtype=dtype, heads_kv=heads_kv, dim=dim, causal=causal):
                options = {"is_causal": causal, "enable_gqa": heads_kv != 4}
                self.same(lambda *x: sdpa(*x, **options), lambda *x: own(*x, **options), q, k, v)

    def test_views(self):
        """Slices of one tensor, and a gradient whose rows are not at multiples of 16 bytes."""
        own = F.scaled_dot_product_attention
        split = lambda call: lambda x: call(*(x[:, :, i].transpose(1, 2) for i in range(3)), is_causal=True)
        self.same(split(sdpa), split(own), self.tensor(2, 100, 3, 4, 64))
        q, k, v = (self.tensor(2, 4, 100, 64) for _ in range(3))
        odd = lambda call: lambda *x: torch.cat((call(*x), x[0][..., :3]), -1)
        self.same(odd(sdpa), odd(own), q, k, v)

    def test_mask(self):
        q, k, v, mask = self.tensor(2, 4, 90, 64), self.tensor(2, 4, 130, 64), self.tensor(2, 4, 130, 64), self.tensor(90, 130)
        self.same(lambda *x: sdpa(*x, mask), lambda *x: F.scaled_dot_product_attention(*x, mask.double().cpu()), q, k, v)

    def test_packed(self):
        q, k, v = self.tensor(150, 4, 64), self.tensor(150, 2, 64), self.tensor(150, 2, 64)
        cu = torch.tensor([0, 40, 150], dtype=torch.int32, device="cuda")
        own = lambda q, k, v: F.scaled_dot_product_attention(*(x[None].transpose(1, 2) for x in (q, k, v)), is_causal=True,
                                                             enable_gqa=True)[0].transpose(0, 1)
        each = lambda *x: torch.cat([own(*(t[a:b] for t in x)) for a, b in ((0, 40), (40, 150))])
        self.same(lambda *x: attn.flash.flash_attn_varlen_func(*x, cu, cu, 110, 110, causal=True), each, q, k, v)

    def test_sinks_and_lse(self):
        """As the CPU's own, which test_forward compares with a formula."""
        q, k, v, sinks = self.tensor(2, 90, 4, 64), self.tensor(2, 130, 2, 64), self.tensor(2, 130, 2, 64), self.tensor(4, dtype=torch.float32)

        def gradients(device, dtype):
            leaves = [x.detach().to(device, dtype if x.dim() > 1 else None).requires_grad_() for x in (q, k, v, sinks)]
            out, lse = attn.torch.forward(*leaves[:3], sinks=leaves[3], causal=True, window=(50, -1), softcap=4.0, return_lse=True)
            return torch.autograd.grad(out.float().square().sum() + lse.sin().sum(), leaves)

        for name, g, t in zip(("q", "k", "v", "sinks"), gradients("cuda", torch.bfloat16), gradients("cpu", torch.float32)):
            with self.subTest(name):
                self.close(g.double().cpu(), t.double(), 3e-2 * max(1, t.abs().max().item()))

    def test_equal_bits(self):
        from torch.utils.checkpoint import checkpoint
        q, k, v = (self.tensor(2, 8, 500, 128).requires_grad_() for _ in range(3))
        d = self.tensor(2, 8, 500, 128)
        causal = lambda *x: sdpa(*x, is_causal=True)
        first = torch.autograd.grad(causal(q, k, v), (q, k, v), d)
        for run in causal, causal, lambda *x: checkpoint(causal, *x, use_reentrant=False):
            for a, b in zip(first, torch.autograd.grad(run(q, k, v), (q, k, v), d)):
                self.assertTrue(torch.equal(a, b))

    def test_backward(self):
        """attn.backward itself, into arrays that are there."""
        q, k, v, d = (self.tensor(2, 90, 4, 64) for _ in range(4))
        out, lse = attn.forward(q, k, v, causal=True, return_lse=True)
        dq, dk, dv = attn.backward(d, q, k, v, out, lse, causal=True)
        sums = [torch.ones_like(x, dtype=torch.float32) for x in (q, k, v)]
        attn.backward(d, q, k, v, out, lse, causal=True, dq=sums[0], dk=sums[1], dv=sums[2], accumulate=True)
        for s, g in zip(sums, (dq, dk, dv)):
            self.close(s.cpu(), 1 + g.double().cpu(), 2e-2)

    def test_bias(self):
        """A float mask has a gradient, of every shape that it may have, and the same bits every time."""
        q, k, v = (self.tensor(2, 4, n, 64) for n in (90, 130, 130))
        for shape in ((90, 130), (1, 4, 90, 130), (2, 1, 90, 130), (2, 1, 1, 130), (2, 4, 90, 130), (4, 1, 130)):
            mask = self.tensor(*shape)
            for hidden in (torch.zeros(90, 130), torch.ones(90, 130).tril(20).log()):
                call = lambda attention: lambda q, k, v, m: attention(q, k, v, attn_mask=m + hidden.to(m))
                with self.subTest(shape=shape, hides=bool(hidden.isinf().any())):
                    self.same(call(sdpa), call(F.scaled_dot_product_attention), q, k, v, mask)
                    leaves = [x.detach().requires_grad_() for x in (q, k, v, mask)]
                    first, again = (torch.autograd.grad(call(sdpa)(*leaves), leaves, q) for _ in range(2))
                    for x, y in zip(first, again):
                        self.assertTrue(torch.equal(x, y))

    def test_opcheck(self):
        leaf = lambda *shape: self.tensor(*shape).requires_grad_()  # noqa: E731
        # Whether compiled gradients are these is test_compile's: opcheck's own tolerance is that of bf16's last bit.
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(torch.ops.attn.sdpa.default, (leaf(2, 4, 90, 64), leaf(2, 4, 130, 64), leaf(2, 4, 130, 64)), test_utils=tests)
        q, k, v = leaf(2, 90, 4, 64), leaf(2, 130, 2, 64), leaf(2, 130, 2, 64)
        torch.library.opcheck(torch.ops.attn.forward.default, (q, k, v, None, None, None, *(None,) * 8, True, False, -1, -1, None, 0.0, 0, None),
                              test_utils=tests)
        with torch.no_grad():
            out, lse = attn.torch.forward(q, k, v, return_lse=True)
        plain = [x.detach() for x in (out, q, k, v, out, lse)]
        torch.library.opcheck(torch.ops.attn.backward.default,
                              (plain[0], None, *plain[1:], *(None,) * 6, False, False, -1, -1, None, 0.0, None, [True, True, True, False, False]),
                              test_utils=tests)

    def test_compile(self):
        q, k, v = (self.tensor(2, 4, 200, 64).requires_grad_() for _ in range(3))
        run = lambda q, k, v: sdpa(q, k, v, is_causal=True)  # noqa: E731
        d = self.tensor(2, 4, 200, 64)
        want = torch.autograd.grad(run(q, k, v), (q, k, v), d)
        for dynamic in False, True:
            torch.compiler.reset()
            compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=dynamic)
            for a, b in zip(torch.autograd.grad(compiled(q, k, v), (q, k, v), d), want):
                self.assertTrue(torch.equal(a, b))

    def test_refused(self):
        q = self.tensor(2, 4, 9, 64)
        self.refuses(attn.Unsupported, "q is float32 where q, k or v requires grad; accepted: q's type, float16 or bfloat16", sdpa,
                     q.float().requires_grad_(), q.float(), q.float())


if __name__ == "__main__":
    unittest.main()
