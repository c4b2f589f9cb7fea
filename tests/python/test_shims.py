"""The distribution libattn-flash-attn, attn.xformers and attn.diffusers against formulas in float64 and the packages' own masks and models."""
import importlib.util
import inspect
import pathlib
import sys
import unittest
import unittest.mock

from support import Case, attn, causal, np, softmax_attention

SHIM = pathlib.Path(__file__).resolve().parents[2] / "python/libattn-flash-attn"
have = lambda *names: all(importlib.util.find_spec(name) for name in names)
if have("torch"):
    import torch

    import attn.torch


def host(x):
    """An array, or a tensor of any device, as NumPy's."""
    return x if isinstance(x, np.ndarray) else x.detach().cpu().numpy()


def launches(backend):
    return sum(attn._attn.launch_count(k["name"]) for k in attn.info()["kernels"] if k["backend"] == backend)


class Flash(Case):
    DEVICE, TYPE, BOUND = "cpu", "float32", 2e-6

    def setUp(self):
        super().setUp()
        names = ("flash_attn", "flash_attn.bert_padding", "flash_attn.flash_attn_interface", "flash_attn_interface")
        if any(name in sys.modules for name in names) or have("flash_attn"):
            self.skipTest("another flash_attn is installed")
        sys.path.insert(0, str(SHIM))
        self.addCleanup(lambda: (sys.path.remove(str(SHIM)), [sys.modules.pop(name, None) for name in names]))

    def given(self, *arrays):
        """What the shim gets for these; zeros are for its results."""
        return arrays

    def near(self, got, want, bound=1):
        self.close(host(got), want, bound * self.BOUND)

    def test_version_2(self):
        import flash_attn
        from flash_attn import flash_attn_interface
        q, k, v = self.qkv(seqlen_q=9, seqlen_kv=9)
        want = softmax_attention(q, k, v, causal(9, 9), scale=0.3)[0]
        self.near(flash_attn.flash_attn_func(*self.given(q, k, v), 0.0, 0.3, True), want)
        self.near(flash_attn_interface.flash_attn_func(*self.given(q, k, v), 0.0, 0.3, True), want)
        self.assertTrue(flash_attn.__version__.startswith("2."))
        for name in flash_attn.__all__:
            self.assertIs(getattr(flash_attn_interface, name), getattr(attn.flash, name))

    def test_version_3(self):
        """Positions of version 3, all functions."""
        import flash_attn_interface as three
        q, k, v = self.qkv(seqlen_q=9, seqlen_kv=9)
        want, want_lse = softmax_attention(q, k, v, causal(9, 9), scale=0.3)
        arrays = self.given(q, k, v)
        self.near(three.flash_attn_func(*arrays, 0.3, True), want)
        out, lse = three.flash_attn_func(*arrays, 0.3, True, return_attn_probs=True)
        self.near(lse, want_lse)
        flat = self.given(*(x.reshape(18, *x.shape[2:]) for x in (q, k, v)))
        offsets, = self.given(np.array([0, 9, 18], np.int32))
        self.near(three.flash_attn_varlen_func(*flat, offsets, offsets, 9, 9, None, None, 0.3, True), want.reshape(18, 4, 16))
        qkv, full = self.given(np.concatenate((q, k, v), 2), np.stack((q, np.repeat(k, 2, 2), np.repeat(v, 2, 2)), 2))
        self.near(three.flash_attn_qkvpacked_func(qkv, 0.3, True, num_heads_q=4), want)
        self.near(three.flash_attn_qkvpacked_func(full, 0.3, True), want)
        q, k, v, *caches = self.given(q, k, v, *(np.zeros((2, 12, 2, 16), np.float32) for _ in range(2)))
        self.near(three.flash_attn_with_kvcache(q, *caches, k, v, None, None, None, 0, softmax_scale=0.3, causal=True), want)
        options = set(inspect.signature(attn.flash.flash_attn_with_kvcache).parameters)
        self.assertLessEqual(set(inspect.signature(three.flash_attn_with_kvcache).parameters), options)

    def test_steps(self):
        """What a ring of devices does: some keys at a time, merged by lse; then gradients of each part from out and lse of all keys."""
        from flash_attn import flash_attn_interface as two
        q, k, v = self.qkv(seqlen_q=8, seqlen_kv=12)
        d_out = self.normal(*q.shape)
        want, want_lse = attn.forward(q, k, v, scale=0.3, softcap=20.0, return_lse=True)
        expected = attn.backward(d_out, q, k, v, want, want_lse, scale=0.3, softcap=20.0)
        arguments = dict(dropout_p=0.0, softmax_scale=0.3, causal=False, window_size_left=-1, window_size_right=-1, softcap=20.0,
                         alibi_slopes=None)
        halves = slice(0, 7), slice(7, 12)
        parts = [two._flash_attn_forward(*self.given(q, k[:, x], v[:, x]), return_softmax=False, **arguments) for x in halves]
        self.assertTrue(all(len(part) == 4 and part[2:] == (None, None) for part in parts))
        parts = [[host(x) for x in part[:2]] for part in parts]
        lse = np.logaddexp(parts[0][1], parts[1][1])
        self.near(lse, want_lse)
        self.near(sum(np.exp(part[1] - lse).transpose(0, 2, 1)[..., None] * part[0] for part in parts), want)
        for lengths in None, np.array([0, 8, 16], np.int32):
            flat = (lambda x: x) if lengths is None else lambda x: np.ascontiguousarray(x).reshape(-1, *x.shape[2:])
            sums = 0
            for x in halves:
                arrays = self.given(*map(flat, (d_out, q, k[:, x], v[:, x], want)))
                gradients = self.given(*map(flat, (np.zeros_like(q), np.zeros_like(k)[:, x], np.zeros_like(v)[:, x])))
                if lengths is None:
                    all_lse, = self.lse(want_lse)
                    two._flash_attn_backward(*arrays, all_lse, *gradients, deterministic=False, **arguments)
                else:
                    offsets = self.given(lengths, np.array([0, 1, 2], np.int32) * k[:, x].shape[1])
                    all_lse, = self.lse(np.ascontiguousarray(want_lse.transpose(1, 0, 2)).reshape(4, 16))
                    out, lse, *_ = two._flash_attn_varlen_forward(*arrays[1:4], *offsets, 8, 12, return_softmax=False, **arguments)
                    self.near(out, flat(parts[x.start > 0][0]))
                    self.near(host(lse).reshape(4, 2, 8).transpose(1, 0, 2), parts[x.start > 0][1])
                    two._flash_attn_varlen_backward(*arrays, all_lse, *gradients, *offsets, 8, 12, deterministic=False, **arguments)
                self.near(gradients[1], flat(expected[1][:, x]), 4)
                self.near(gradients[2], flat(expected[2][:, x]), 4)
                sums = sums + host(gradients[0])
            self.near(sums, flat(expected[0]), 4)
        self.refuses(ValueError, ["dropout_p is 0.5", "accepted: 0"], two._flash_attn_varlen_backward, *arrays, all_lse, *gradients, *offsets, 8, 12,
                     deterministic=False, **{**arguments, "dropout_p": 0.5})

    def lse(self, *arrays):
        """These for the shim, in f32."""
        return arrays

    @unittest.skipUnless(have("torch"), "torch is not installed")
    def test_bert_padding(self):
        from flash_attn.bert_padding import pad_input, unpad_input, unpad_input_for_concatenated_sequences
        x = torch.randn(3, 7, 4, 16, device=self.DEVICE, requires_grad=True)
        mask = (torch.arange(7) < torch.tensor([[5], [7], [2]])).to(self.DEVICE)
        packed, indices, offsets, longest, used = unpad_input(x, mask)
        self.assertEqual((offsets.tolist(), longest, used.tolist(), offsets.dtype), ([0, 5, 12, 14], 7, [5, 7, 2], torch.int32))
        self.assertTrue(torch.equal(packed, x[mask]))
        back = pad_input(packed, indices, 3, 7)
        self.assertTrue(torch.equal(back, x * mask[..., None, None]))
        back.sum().backward()
        self.assertTrue(torch.equal(x.grad, mask[..., None, None].expand_as(x).float()))
        unused = torch.tensor([[0] * 7, [0] * 7, [0, 0, 1, 0, 0, 0, 0]], device=self.DEVICE)
        *_, more, longest, used = unpad_input(x.detach(), mask, unused)
        self.assertEqual((more.tolist(), used.tolist()), ([0, 5, 12, 15], [5, 7, 2]))
        lengths = torch.tensor([[3, 2, 0, 0, 0, 0, 0], [7, 0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0]], device=self.DEVICE)
        packed, _, offsets, longest = unpad_input_for_concatenated_sequences(x, lengths)
        self.assertEqual((packed.shape[0], offsets.tolist(), longest), (14, [0, 3, 5, 12, 13, 14], 7))
        packed = packed.detach().to(getattr(torch, self.TYPE))
        out = attn.flash.flash_attn_varlen_func(*(packed,) * 3, offsets, offsets, longest, longest, causal=True)
        begin = [0, 3, 5, 12, 13]
        for at, end in zip(begin, offsets[1:].tolist()):
            one = host(packed[None, at:end])
            self.near(out[at:end], softmax_attention(one, one, one, causal(end - at, end - at))[0][0])


class OnGpu(Case):
    """Makes what a test of the host gives to a shim arrays of a GPU, in f16. Each test ran kernels there."""
    DEVICE, TYPE, BOUND = "cuda", "float16", 2e-3

    def setUp(self):
        self.gpu("cuda")
        super().setUp()
        before = launches("cuda")
        self.addCleanup(lambda: self.assertGreater(launches("cuda"), before))

    def normal(self, *shape, **options):
        return super().normal(*shape, **options).astype(np.float16).astype(np.float32)

    def given(self, *arrays):
        return [torch.from_numpy(x).to("cuda", torch.float16 if x.dtype == np.float32 else None) for x in arrays]

    def lse(self, *arrays):
        return [torch.from_numpy(x).cuda() for x in arrays]


class FlashOnGpu(OnGpu, Flash):
    pass


@unittest.skipUnless(have("torch", "xformers"), "torch or xformers is not installed")
class Xformers(Case):
    def test_biases(self):
        """Every bias that is taken, against what xformers makes of it in memory."""
        import xformers.ops.fmha.attn_bias as biases
        from attn.xformers import _RULES, memory_efficient_attention
        lengths_q, lengths_k = [3, 1, 4], [5, 6, 4]
        packed = lambda kind: getattr(biases, kind).from_seqlens(lengths_q, lengths_k)
        padded = lambda kind, *more: getattr(biases, kind).from_seqlens(lengths_q, 8, lengths_k, *more)
        tables = torch.tensor([[2, 0], [5, 3], [1, 4]], dtype=torch.int32)
        unpaged = {"PagedBlockDiagonalPaddedKeysMask": "BlockDiagonalPaddedKeysMask",
                   "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": "BlockDiagonalCausalWithOffsetPaddedKeysMask"}
        made = {
            "LowerTriangularMask": biases.LowerTriangularMask(),
            "LowerTriangularMaskWithTensorBias": biases.LowerTriangularMask().add_bias(torch.from_numpy(self.normal(2, 4, 9, 9))),
            "LowerTriangularFromBottomRightMask": biases.LowerTriangularFromBottomRightMask(),
            "LowerTriangularFromBottomRightLocalAttentionMask": biases.LowerTriangularFromBottomRightLocalAttentionMask(3),
            "LocalAttentionFromBottomRightMask": biases.LocalAttentionFromBottomRightMask(window_left=2, window_right=1),
            "BlockDiagonalMask": packed("BlockDiagonalMask"),
            "BlockDiagonalCausalMask": packed("BlockDiagonalCausalMask"),
            "BlockDiagonalCausalFromBottomRightMask": packed("BlockDiagonalCausalFromBottomRightMask"),
            "BlockDiagonalCausalLocalAttentionFromBottomRightMask":
                packed("BlockDiagonalCausalMask").make_local_attention_from_bottomright(3),
            "BlockDiagonalPaddedKeysMask": padded("BlockDiagonalPaddedKeysMask"),
            "BlockDiagonalCausalWithOffsetPaddedKeysMask": padded("BlockDiagonalCausalWithOffsetPaddedKeysMask"),
            "BlockDiagonalCausalLocalAttentionPaddedKeysMask": biases.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(
                q_seqlen=lengths_q, kv_padding=8, kv_seqlen=lengths_k, window_size=2),
            "BlockDiagonalLocalAttentionPaddedKeysMask": biases.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local(
                q_seqlen=lengths_q, kv_padding=8, kv_seqlen=lengths_k, window_left=2, window_right=1),
            **{paged: padded(plain).make_paged(tables, 4, getattr(biases, paged)) for paged, plain in unpaged.items()}}
        self.assertEqual(sorted(made), sorted(_RULES))
        for kind, bias in made.items():
            blocks = "BlockDiagonal" in kind
            queries = 8 if blocks else 9
            keys = 24 if "PaddedKeys" in kind else 15 if blocks else 9 if kind.startswith("LowerTriangularMask") else 13
            for groups in False, True:
                with self.subTest(kind, groups=groups):
                    q, k, v = (torch.from_numpy(x) for x in self.qkv(1 if blocks else 2, queries, keys))
                    mask = bias.materialize((q.shape[0], 4, queries, keys), torch.float32).double()
                    want = torch.softmax(torch.einsum("bihd,bjhd->bhij", q.double(), k.double().repeat_interleave(2, 2)) / 4 + mask, -1)
                    want = torch.einsum("bhij,bjhd->bihd", want.nan_to_num(0), v.double().repeat_interleave(2, 2))
                    if groups:
                        q, k, v = q.unflatten(2, (2, 2)), *(x[:, :, :, None].expand(-1, -1, -1, 2, -1) for x in (k, v))
                        want = want.unflatten(2, (2, 2))
                    before = {name["name"]: attn._attn.launch_count(name["name"]) for name in attn.info()["kernels"]}
                    got = memory_efficient_attention(q, k, v, bias)
                    self.assertEqual(sum(attn._attn.launch_count(name) - n for name, n in before.items()), 1)
                    self.close(got, want, 4e-6)

    def test_refused(self):
        import xformers.ops.fmha.attn_bias as biases
        from attn.xformers import memory_efficient_attention
        q = torch.from_numpy(self.normal(1, 8, 4, 16))
        run = lambda bias=None, **options: memory_efficient_attention(q, q, q, bias, **options)
        local = biases.BlockDiagonalCausalMask.from_seqlens([3, 5]).make_local_attention(2)
        self.refuses(ValueError, ["attn_bias is a BlockDiagonalCausalLocalAttentionMask", "LowerTriangularMask"], run, local)
        self.refuses(ValueError, ["p is 0.5", "accepted: 0"], run, p=0.5)
        self.refuses(ValueError, "op is", run, op=(1, 2))


@unittest.skipUnless(have("torch", "diffusers"), "torch or diffusers is not installed")
class Diffusers(Case):
    """Tiny models with random weights: diffusers' native attention in f32, and ours."""
    DEVICE, TYPE, BOUND = "cpu", "float32", 1e-5

    def models(self):
        import diffusers
        flux = lambda: diffusers.FluxTransformer2DModel(
            patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8])
        wan = lambda: diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=16, freq_dim=32,
            ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32)
        unet = lambda: diffusers.UNet2DConditionModel(
            block_out_channels=(16, 32), layers_per_block=1, sample_size=16, in_channels=4, out_channels=4, cross_attention_dim=8,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=2, norm_num_groups=2)
        autoencoder = lambda: diffusers.AutoencoderKL(  # one head of 512 in the middle of each half, as in Stable Diffusion's
            block_out_channels=(16, 512), layers_per_block=1, norm_num_groups=8, latent_channels=4,
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2)
        tensor = lambda *shape: torch.from_numpy(self.normal(*shape))
        yield "image transformer", flux, dict(
            hidden_states=tensor(1, 16, 4), encoder_hidden_states=tensor(1, 8, 32), pooled_projections=tensor(1, 32),
            timestep=torch.tensor([1.0]), img_ids=torch.zeros(16, 3), txt_ids=torch.zeros(8, 3)), True
        yield "video transformer", wan, dict(hidden_states=tensor(1, 4, 2, 8, 8), encoder_hidden_states=tensor(1, 7, 16),
                                             timestep=torch.tensor([5])), True
        yield "UNet", unet, dict(sample=tensor(1, 4, 16, 16), timestep=torch.tensor([3]), encoder_hidden_states=tensor(1, 5, 8)), False
        yield "autoencoder", autoencoder, dict(sample=tensor(1, 3, 16, 16)), False

    def test_models(self):
        """By the registry where a model asks it, else by attn.torch.patch()."""
        import attn.diffusers
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, attention_backend
        self.assertIn(AttentionBackendName("libattn"), _AttentionBackendRegistry.list_backends())
        attn.diffusers.register()
        self.assertEqual([name.value for name in AttentionBackendName].count("libattn"), 1)
        for name, make, arguments, asks in self.models():
            with self.subTest(name), torch.no_grad():
                torch.manual_seed(1)
                model = make().eval().to(self.DEVICE)
                want = host(model(**self.there(arguments)).sample)
                dtype, calls = getattr(torch, self.TYPE), []
                model, arguments = model.to(dtype), self.there(arguments, dtype)
                spy = unittest.mock.Mock(side_effect=lambda **options: (calls.append(1), attn.diffusers.libattn(**options))[1])
                with unittest.mock.patch.dict(_AttentionBackendRegistry._backends, {AttentionBackendName("libattn"): spy}), \
                        attention_backend("libattn"):
                    got = model(**arguments).sample
                self.assertEqual(len(calls) > 0, asks)
                self.close(host(got), want, self.BOUND)
                with attn.torch.patch() as taken:
                    got = model(**arguments).sample
                self.assertGreater(taken.taken, 0)
                self.close(host(got), want, self.BOUND)

    def there(self, tensors, dtype=None):
        return {name: x.to(self.DEVICE, dtype if x.is_floating_point() else None) for name, x in tensors.items()}

    def test_function(self):
        """Masks of two and four dimensions, bools and numbers, causal, lse, against float64."""
        import attn.diffusers
        q, k, v = self.qkv()
        seen = self.rng.random((2, 13)) < 0.7
        seen[:, 0] = True
        want, want_lse = softmax_attention(q, k, v, seen[:, None, None])
        top_left = np.arange(13) <= np.arange(9)[:, None]
        want_causal = softmax_attention(q, k, v, top_left, scale=0.3)[0]
        q, k, v, seen = (torch.from_numpy(x).to(self.DEVICE) for x in (q, k, v, seen))
        q, k, v = (x.to(getattr(torch, self.TYPE)) for x in (q, k, v))
        for mask in seen, seen[:, None, None], seen[:, None, None].expand(2, 4, 9, 13), torch.where(seen, 0.0, -np.inf).to(q.dtype):
            out, lse = attn.diffusers.libattn(q, k, v, mask, return_lse=True)
            self.close(host(out), want, self.BOUND)
            self.close(host(lse), want_lse.transpose(0, 2, 1), self.BOUND)
        self.close(host(attn.diffusers.libattn(q, k, v, is_causal=True, scale=0.3)), want_causal, self.BOUND)
        self.refuses(ValueError, ["dropout_p is 0.1", "accepted: 0"], attn.diffusers.libattn, q, k, v, dropout_p=0.1)


class DiffusersOnGpu(OnGpu, Diffusers):
    BOUND = 6e-3


if __name__ == "__main__":
    unittest.main()
