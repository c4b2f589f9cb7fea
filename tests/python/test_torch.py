"""attn.torch: scaled_dot_product_attention against PyTorch's own, its operators, patch() and the model of transformers."""
import importlib.util
import itertools
import unittest

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
        refuses(ValueError, "dropout_p is 0.1; accepted: 0, attn is for inference", *same, dropout_p=0.1)
        refuses(ValueError, "enable_gqa is False with 4 heads of q and 2 of k and v; accepted: True", q, k, v)
        refuses(ValueError, "is_causal is True; accepted with attn_mask: False", *same, torch.ones(9, 9), is_causal=True)
        refuses(ValueError, ["k: head_dim is 8", "accepted: 16 as in q"], q, q[..., :8].contiguous(), q)
        refuses(ValueError, "attn_mask has shape [1, 1, 9, 12]", *same, torch.ones(9, 12))
        refuses(ValueError, ["attn_mask is f64", "f32"], *same, torch.ones(9, 9, dtype=torch.float64))
        refuses(ValueError, ["q is f64; accepted: f32"], *(q.double(),) * 3)
        refuses(ValueError, ["q is f8_e4m3fn; accepted: f32, f16, bf16"], *(q.to(torch.float8_e4m3fn),) * 3)
        refuses(ValueError, ["q: the last dimension has stride 2", "accepted: 1"], q[..., ::2], *(q[..., :8],) * 2)
        refuses(ValueError, ["k: batch is 3", "accepted: 2 as in q"], q, *(self.tensor(3, 4, 9, 16),) * 2)
        refuses(ValueError, ["q requires grad", "no_grad"], q.clone().requires_grad_(), q, q)
        refuses(ValueError, ["attn_mask requires grad"], *same, torch.ones(9, 9, requires_grad=True))
        refuses(ValueError, "query has shape [3]", *(torch.ones(3),) * 3)
        refuses(ValueError, ["q cannot be read", "meta"], *(torch.empty(2, 4, 9, 16, device="meta"),) * 3)


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

    def test_grad_is_refused_compiled_too(self):
        q = self.tensor(2, 4, 9, 16).requires_grad_()
        self.refuses(ValueError, "query requires grad", torch.ops.attn.sdpa, q, q, q)
        self.refuses(Exception, "requires grad", self.compiled(lambda q: sdpa(q, q, q)), q)
        with torch.no_grad():
            self.compiled(lambda q: sdpa(q, q, q))(q)


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
        self.assertEqual((taken.calls, taken.taken, sum(taken.others.values()), inner.taken), (4, 1, 3, 1))
        for words in "dropout_p is 0.5", "f64", "q requires grad":
            self.assertTrue(any(words in reason for reason in taken.others), taken.others)
        self.assertIn("1 of 4 calls taken\n  1 to torch: dropout_p is 0.5", repr(taken))

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
        q, k, v = (self.tensor(2, 4, n, 64).cuda().half() for n in (9, 13, 13))
        torch.library.opcheck(torch.ops.attn.sdpa.default, (q, k, v, None, True, None, False),
                              test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))

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

    def test_compiled_and_training(self):
        eager, ours = self.models("Llama")
        tokens = torch.from_numpy(self.rng.integers(3, 80, (2, 9)))
        with torch.no_grad():
            got = torch.compile(ours, fullgraph=True, backend="aot_eager")(tokens, use_cache=False).logits
            self.close(got, eager(tokens).logits, 2e-5)
        self.refuses(ValueError, "requires grad", ours, tokens)


if __name__ == "__main__":
    unittest.main()
