"""forward(), Plan and explain() on NumPy arrays: layouts, types, outputs, errors, the cache."""
import gc
import inspect
import itertools
import multiprocessing
import pickle
import threading
import weakref

import unittest

from attn.flash import flash_attn_func
from support import Case, attn, causal, ml_dtypes, np, softmax_attention


class KvBegin(Case):
    """kv_begin against float64 formulas: the first keys are hidden, and still count in positions."""

    def kernels(self):
        found = [k["name"] for k in attn.info()["kernels"] if k["op"] == "forward" and k["backend"] == "cpu"]
        return [("reference", "reference"), *(("cpu", name) for name in found)]

    def run_kernel(self, backend, kernel, *arrays, **options):
        try:
            plan = attn.Plan(*arrays, backend=backend, kernel=kernel, **options)
        except attn.Unsupported as error:  # of another instruction set
            self.assertIn("AVX-512", str(error) + " AVX-512")
            return None
        names = ("seqlens_kv", "kv_begin", "causal_sequences", "cu_seqlens_q", "cu_seqlens_kv", "block_table", "sinks")
        before = attn._attn.launch_count(kernel)
        got = plan(*arrays, return_lse=True, **{name: options[name] for name in names if name in options})
        self.assertEqual(attn._attn.launch_count(kernel), before + 1)
        return got

    def test_against_formula(self):
        lengths, begin = np.array([130, 97, 40, 5], np.int32), np.array([3, 64, 40, 0], np.int32)
        ran = set()
        for (backend, kernel), queries, rule in itertools.product(self.kernels(), (1, 3, 40), (
                {}, {"causal": True}, {"causal": True, "window": (30, 0)}, {"causal_top_left": True})):
            q, k, v = self.qkv(4, queries, 130)
            i, j = np.arange(queries)[:, None], np.arange(130)
            at = i + lengths[:, None, None] - queries
            visible = (j < lengths[:, None, None]) & (j >= begin[:, None, None])
            visible = visible & (j <= at) if "causal" in rule else visible & (i >= 0)
            if "window" in rule:
                visible &= j >= at - 30
            if "causal_top_left" in rule:
                visible &= j <= i
            want = softmax_attention(q, k, v, visible[:, None])
            with self.subTest(kernel, queries=queries, **rule):
                got = self.run_kernel(backend, kernel, q, k, v, seqlens_kv=lengths, kv_begin=begin, **rule)
                if got is None:
                    continue
                ran.add(kernel)
                for a, b in zip(got, want):
                    self.close(a, b, 4e-6)
                # Pages of the same keys, and packed queries.
                table = np.arange(4 * 13, dtype=np.int32).reshape(4, 13)
                pages = [x.reshape(4 * 13, 10, *x.shape[2:]) for x in (k, v)]
                offsets = np.arange(5, dtype=np.int32) * queries
                got = self.run_kernel(backend, kernel, q.reshape(-1, *q.shape[2:]), *pages, seqlens_kv=lengths, kv_begin=begin,
                                      cu_seqlens_q=offsets, max_seqlen_q=queries, block_table=table, **rule)
                self.close(got[0].reshape(q.shape), want[0], 4e-6)
        self.assertGreaterEqual(len(ran), 2)

    def test_segments_and_nan(self):
        """Counted over all segments; what hidden keys hold does not matter."""
        q, k, v = self.qkv(2, 3, 20)
        begin = np.array([7, 12], np.int32)
        visible = np.arange(20) >= begin[:, None, None, None]
        want = softmax_attention(q, k, v, visible & causal(3, 20))
        k[0, :7], v[0, :7], v[1, :12] = np.nan, np.nan, np.nan
        cut = lambda x: [np.ascontiguousarray(x[:, :9]), np.ascontiguousarray(x[:, 9:])]
        for backend in "reference", "cpu":
            for keys in (k, v), (cut(k), cut(v)):
                got = attn.forward(q, *keys, causal=True, kv_begin=begin, return_lse=True, backend=backend)
                for a, b in zip(got, want):
                    self.close(a, b, 4e-6)

    def test_causal_by_sequence(self):
        """Sequences that are not causal beside those that are, with windows and packed queries over pages."""
        lengths, of = np.array([130, 97, 40, 64], np.int32), np.array([1, 0, 0, 1], np.int32)
        i, ran = np.arange(7)[:, None], set()
        for (backend, kernel), left in itertools.product(self.kernels(), (-1, 20)):
            q, k, v = self.qkv(4, 7, 130)
            j, at = np.arange(130), i + lengths[:, None, None] - 7
            visible = (j < lengths[:, None, None]) & ((of[:, None, None] == 0) | (j <= at))
            if left >= 0:
                visible &= (j >= at - left) & (j <= at + left)
            want = softmax_attention(q, k, v, visible[:, None])
            options = {"seqlens_kv": lengths, "causal": True, "causal_sequences": of, "window": (left, left)}
            with self.subTest(kernel, left=left):
                got = self.run_kernel(backend, kernel, q, k, v, **options)
                if got is None:
                    continue
                ran.add(kernel)
                for a, b in zip(got, want):
                    self.close(a, b, 4e-6)
                pages = [x.reshape(52, 10, *x.shape[2:]) for x in (k, v)]
                got = self.run_kernel(backend, kernel, q.reshape(28, *q.shape[2:]), *pages, cu_seqlens_q=np.arange(5, dtype=np.int32) * 7,
                                      max_seqlen_q=7, block_table=np.arange(52, dtype=np.int32).reshape(4, 13), **options)
                self.close(got[0].reshape(q.shape), want[0], 4e-6)
        self.assertGreaterEqual(len(ran), 2)
        self.refuses(ValueError, ["has_causal_sequences is 1", "ATTN_CAUSAL"], attn.forward, q, k, v, causal_sequences=of)
        self.refuses(attn.Unsupported, "causal_sequences", attn.Plan, q, k, v, causal=True, causal_sequences=of, kernel="prefix_cpu")

    def test_refused(self):
        q, k, v = self.qkv()
        self.refuses(ValueError, ["kv_begin[1] is -1", "0 to"], attn.forward, q, k, v, kv_begin=np.array([0, -1], np.int32))
        self.refuses(ValueError, ["kv_begin is i64", "i32"], attn.forward, q, k, v, kv_begin=np.array([0, 1]))
        self.refuses(ValueError, ["kv_begin has shape [3]", "[B]"], attn.forward, q, k, v, kv_begin=np.zeros(3, np.int32))


class Layouts(Case):
    def test_strides_are_honoured(self):
        q, k, v = self.qkv()
        want, want_lse = softmax_attention(q, k, v, causal(9, 13))

        def head_major(x):
            return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)

        def padded(x):
            room = np.full((x.shape[0] + 1, x.shape[1] + 3, x.shape[2] + 1, x.shape[3] + 5), np.nan, x.dtype)
            room[1:, 2:-1, :-1, 3:-2] = x
            return room[1:, 2:-1, :-1, 3:-2]

        def every_second(x):
            room = np.full((x.shape[0], 2 * x.shape[1], *x.shape[2:]), np.nan, x.dtype)
            room[:, ::2] = x
            return room[:, ::2]

        for layout in head_major, padded, every_second:
            for backend in "reference", "cpu":
                with self.subTest(layout=layout.__name__, backend=backend):
                    out, lse = attn.forward(layout(q), layout(k), layout(v), causal=True, return_lse=True,
                                            backend=backend)
                    self.close(out, want)
                    self.close(lse, want_lse)

    def test_broadcast_strides(self):
        q, k, v = self.qkv()
        one = np.broadcast_to(k[:1], k.shape), np.broadcast_to(v[:1], v.shape)  # read-only, stride 0
        self.close(attn.forward(q, *one), softmax_attention(q, *one)[0])
        repeated = np.broadcast_to(k[0, 0, 0], k.shape)
        self.refuses(ValueError, ["k: all strides are 0"], attn.forward, q, repeated, v)

    def test_strides_that_are_none(self):
        q, k, v = self.qkv()
        self.refuses(ValueError, ["q: the last dimension has stride 2", "accepted: 1"],
                     attn.forward, np.repeat(q, 2, axis=3)[..., ::2], k, v)
        self.refuses(ValueError, ["k: the last dimension has stride -1"], attn.forward, q, k[..., ::-1], v)
        room = np.zeros(2 * q.size, np.float32)
        odd = np.lib.stride_tricks.as_strided(room, q.shape, (q.strides[0] + 2, *q.strides[1:]))
        self.refuses(ValueError, ["q cannot be read", "whole elements"], attn.forward, odd, k, v)

    def test_bias_broadcasts(self):
        q, k, v = self.qkv()
        for shape in (2, 4, 9, 13), (1, 4, 9, 13), (2, 1, 1, 13), (1, 1, 9, 13), (1, 1, 1, 13), (2, 4, 9, 1), (1, 4, 1, 1):
            bias = self.normal(*shape)
            s = np.einsum("bihd,bjhd->bhij", q.astype(np.float64), np.repeat(k, 2, 2)) / 4 + bias
            p = np.exp(s)
            want = np.einsum("bhij,bjhd->bihd", p / p.sum(-1, keepdims=True), np.repeat(v, 2, 2))
            with self.subTest(shape):
                self.close(attn.forward(q, k, v, bias=bias), want)
        self.refuses(ValueError, "bias", attn.forward, q, k, v, bias=self.normal(1, 1, 1, 1))
        self.refuses(ValueError, ["bias has shape [2, 4, 9, 12]", "[2, 4, 9, 13]"], attn.forward, q, k, v,
                     bias=self.normal(2, 4, 9, 12))
        one = self.qkv(batch=1)
        self.close(attn.forward(*one, bias=self.normal(1, 1, 1, 1)), softmax_attention(*one)[0])

    def test_no_elements(self):
        q, k, v = self.qkv()
        nothing = np.empty((2, 0, 2, 16), np.float32)
        for empty in nothing, k[:, 3:3], nothing.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3):
            out, lse = attn.forward(q, empty, empty, return_lse=True)
            self.assertTrue((out == 0).all() and (lse == -np.inf).all())
            self.close(attn.forward(q, [empty, k], [empty, v]), softmax_attention(q, k, v)[0])

    def test_tree(self):
        """A bit per query for each of the last keys, beside the causal rule; packed q too."""
        q, k, v = self.qkv(seqlen_q=9, seqlen_kv=80)
        for keys in 1, 9, 64, 65, 77:
            tree = self.rng.integers(0, 2 ** 64, (2, 9, 2), np.uint64)
            bits = np.unpackbits(tree.view(np.uint8), axis=-1, bitorder="little")[:, None, :, :keys].astype(bool)
            visible = np.broadcast_to(causal(9, 80), (2, 1, 9, 80)).copy()
            visible[..., -keys:] &= bits
            want, want_lse = softmax_attention(q, k, v, visible)
            for backend in "reference", "cpu":
                options = {"causal": True, "tree_keys": keys, "return_lse": True, "backend": backend}
                out, lse = attn.forward(q, k, v, tree=tree, **options)
                self.close(out, want)
                self.close(lse, want_lse)
                offsets = np.array([0, 9, 18], np.int32)
                packed = attn.forward(q.reshape(18, 4, 16), k, v, tree=tree.reshape(18, 2), cu_seqlens_q=offsets,
                                      max_seqlen_q=9, **options)
                self.close(packed[0].reshape(out.shape), want)
                plan = attn.Plan(q, k, v, tree=tree, causal=True, tree_keys=keys, backend=backend)
                self.close(plan(q, k, v, tree=tree), want)
                self.refuses(ValueError, ["tree is NULL"], plan, q, k, v)
        self.refuses(ValueError, ["tree_keys is 0", "1 to 128"], attn.forward, q, k, v, tree=tree)
        self.refuses(ValueError, ["tree_keys is 129", "0 to 128"], attn.forward, q, k, v, tree=tree, tree_keys=129)
        self.refuses(ValueError, ["tree is NULL"], attn.forward, q, k, v, tree_keys=3)
        self.refuses(ValueError, ["tree has shape [2, 9]", "[B, Sq, 2]"], attn.forward, q, k, v, tree=tree[..., 0].copy(), tree_keys=3)
        self.refuses(ValueError, ["tree is f64", "accepted: u64, i64"], attn.forward, q, k, v, tree=tree * 1.0, tree_keys=3)
        self.close(attn.forward(q, k, v, tree=tree.view(np.int64), tree_keys=3),
                   attn.forward(q, k, v, tree=tree, tree_keys=3), 0)

    def test_negative_strides(self):
        """A view that runs backwards begins at its first element; nothing is copied."""
        q, k, v = self.qkv()
        want, want_lse = softmax_attention(q, k, v, causal(9, 13))
        for axes in (0,), (1,), (2,), (0, 1, 2):
            back = [np.flip(np.ascontiguousarray(np.flip(x, axes)), axes) for x in (q, k, v)]
            self.assertLess(min(back[0].strides), 0)
            out = np.flip(np.full(q.shape, np.nan, np.float32), axes)
            for backend in "reference", "cpu":
                got, lse = attn.forward(*back, causal=True, return_lse=True, backend=backend)
                self.close(got, want)
                self.close(lse, want_lse)
                self.assertIs(attn.forward(*back, causal=True, out=out, backend=backend), out)
                self.close(out, want)
                stored = attn.quantize(back[1], "f8_e5m2", backend=backend)[0]
                np.testing.assert_array_equal(stored.astype(np.float32), k.astype(ml_dtypes.float8_e5m2).astype(np.float32))
                self.close(attn.merge([(out, lse)], backend=backend)[0], want)
        bias = self.normal(2, 4, 9, 13)
        for axes in (3,), (0, 1, 2, 3):
            back = np.flip(np.ascontiguousarray(np.flip(bias, axes)), axes)
            self.close(attn.forward(q, k, v, bias=back), attn.forward(q, k, v, bias=bias), 0)
        packed = [np.ascontiguousarray(x[0][::-1])[::-1] for x in (q, k, v)]
        offsets = np.array([0, 9], np.int32), np.array([0, 13], np.int32)
        self.close(attn.forward(*packed, cu_seqlens_q=offsets[0], cu_seqlens_kv=offsets[1]),
                   softmax_attention(q[:1], k[:1], v[:1])[0][0])
        pages = [np.ascontiguousarray(x[0, :12].reshape(3, 4, 2, 16)[::-1])[::-1] for x in (k, v)]
        self.close(attn.forward(q[:1], *pages, block_table=np.array([[0, 1, 2]], np.int32)),
                   softmax_attention(q[:1], k[:1, :12], v[:1, :12])[0])
        blocks = attn.quantize(self.normal(2, 13, 2, 32), "q8_0")[0]
        wide = self.normal(2, 9, 4, 32)
        back = np.ascontiguousarray(blocks[:, ::-1])[:, ::-1]
        self.close(attn.forward(wide, back, back), attn.forward(wide, blocks, blocks), 0)

    def test_no_batch(self):
        """Nothing to do, of each layout and function."""
        q, k, v = self.qkv()
        none, i32 = [x[:0] for x in (q, k, v)], np.int32
        for backend in "reference", "cpu":
            out, lse = attn.forward(*none, causal=True, bias=self.normal(1, 4, 9, 13), sinks=np.zeros(4, np.float32),
                                    seqlens_kv=np.zeros(0, i32), k_descale=np.ones((0, 2), np.float32), return_lse=True,
                                    block_mask=attn.BlockMask.from_dense(causal(9, 13)), backend=backend)
            self.assertEqual((out.shape, lse.shape), ((0, 9, 4, 16), (0, 4, 9)))
            self.assertIsNone(attn.check(*none, seqlens_kv=np.zeros(0, i32), backend=backend))
            out, lse = attn.forward(q[0, :0], k[:0], v[:0], cu_seqlens_q=np.zeros(1, i32), return_lse=True, backend=backend)
            self.assertEqual((out.shape, lse.shape), ((0, 4, 16), (4, 0)))
            out = attn.forward(none[0], k[0], v[0], cu_seqlens_kv=np.zeros(1, i32), backend=backend)
            self.assertEqual(out.shape, (0, 9, 4, 16))
            out = attn.forward(none[0], k, v, block_table=np.zeros((0, 3), i32), backend=backend)
            self.assertEqual(out.shape, (0, 9, 4, 16))
            self.assertEqual([x.shape for x in attn.merge([(none[0], np.zeros((0, 4, 9), np.float32))], backend=backend)],
                             [(0, 9, 4, 16), (0, 4, 9)])
            for scale in 1, "amax":
                stored, descale = attn.quantize(none[1], "f8_e5m2", scale=scale, backend=backend)
                self.assertEqual((stored.shape, descale.tolist()), ((0, 13, 2, 16), [1]))

    def test_rows_of_no_sequence(self):
        """With packed q, rows beyond cu_seqlens_q[-1] are 0 and -inf, whatever the memory held."""
        q, k, v = self.qkv(batch=1)
        for backend in "reference", "cpu":
            for end in 0, 5:
                out = np.full((9, 4, 16), np.nan, np.float32)
                out, lse = attn.forward(q[0], k, v, cu_seqlens_q=np.array([0, end], np.int32), max_seqlen_q=end, out=out,
                                        return_lse=True, backend=backend)
                want, want_lse = softmax_attention(q[:, :end], k, v)
                self.close(out, np.concatenate([want[0], np.zeros((9 - end, 4, 16))]))
                self.close(lse, np.concatenate([want_lse[0], np.full((4, 9 - end), -np.inf)], axis=1))

    def test_out_of_its_own(self):
        """Memory that out shares with an input, strides considered, is refused; what lies between rows is free."""
        q, k, v = self.qkv()
        room = np.zeros(2 * q.size, np.float32)
        room[:q.size] = q.ravel()
        view = room[:q.size].reshape(q.shape)
        want = softmax_attention(q, k, v)[0]
        for backend in "reference", "cpu":
            for shift in 0, 1, 64, q.size - 1:
                out = room[shift:shift + q.size].reshape(q.shape)
                self.refuses(ValueError, ["out", "q"], attn.forward, view, k, v, out=out, backend=backend)
            self.close(attn.forward(view, k, v, out=room[q.size:].reshape(q.shape), backend=backend), want)
            self.refuses(ValueError, ["out", "bias"], attn.forward, q, k, v, bias=room[:936].reshape(2, 4, 9, 13),
                         out=room[900:900 + q.size].reshape(q.shape), backend=backend)

    def test_packed_and_paged_strides(self):
        q, k, v = self.qkv(batch=1, seqlen_q=7, seqlen_kv=12)
        want = softmax_attention(q, k, v)[0]
        offsets = np.array([0, 7], np.int32), np.array([0, 12], np.int32)
        wide = [np.concatenate([x[0], x[0]], axis=1)[:, :x.shape[2]] for x in (q, k, v)]
        out, lse = attn.forward(*wide, cu_seqlens_q=offsets[0], cu_seqlens_kv=offsets[1], return_lse=True)
        self.close(out, want[0])
        self.assertEqual(lse.shape, (4, 7))
        # pages of 4 keys, the pool in reverse order
        pages = [np.concatenate([np.full((1, 4, 2, 16), np.nan, np.float32), x[0].reshape(3, 4, 2, 16)[::-1]])
                 for x in (k, v)]
        table = np.array([[3, 2, 1]], np.int32)
        self.close(attn.forward(q, *pages, block_table=table), want)

    def test_segments(self):
        q, k, v = self.qkv(seqlen_kv=20)
        want, want_lse = softmax_attention(q, k, v, causal(9, 20))
        cuts = [(0, 5), (5, 6), (6, 20)]
        parts = [k[:, a:b] for a, b in cuts], tuple(v[:, a:b] for a, b in cuts)
        for backend in "reference", "cpu":
            out, lse = attn.forward(q, *parts, causal=True, return_lse=True, backend=backend)
            self.close(out, want)
            self.close(lse, want_lse)
        lengths = np.array([3, 5], np.int32)
        out = attn.forward(q, *parts, seqlens_kv=[lengths, None, None])
        for b in range(2):
            keep = np.r_[0:lengths[b], 5:20]
            self.close(out[b:b + 1], softmax_attention(q[b:b + 1], k[b:b + 1, keep], v[b:b + 1, keep])[0])
        self.refuses(ValueError, ["seqlens_kv has 2 elements", "accepted: 3"], attn.forward, q, *parts,
                     seqlens_kv=[lengths, None])
        self.refuses(ValueError, "seqlens_kv is not a list", attn.forward, q, *parts, seqlens_kv=lengths)
        self.refuses(ValueError, "k is a list, v a ndarray; accepted: an array for each, or lists", attn.forward, q, parts[0], v)
        self.refuses(ValueError, ["k[1]: head_dim is 15", "accepted: 16"], attn.forward, q,
                     [k, k[..., :15]], [v, v])
        self.refuses(ValueError, "k is an empty list", attn.forward, q, [], [])

    def test_shared_segments(self):
        q, k, v = self.qkv(seqlen_q=1, seqlen_kv=20)
        k_prefix, v_prefix = (np.ascontiguousarray(x[:1, :7]) for x in (k, v))
        k_flat, v_flat = (np.concatenate([np.repeat(prefix, 2, 0), own], 1) for prefix, own in ((k_prefix, k), (v_prefix, v)))
        want, want_lse = softmax_attention(q, k_flat, v_flat)
        call = dict(shared_segments=1, causal=True, return_lse=True)
        for options in {"backend": "reference"}, {"backend": "cpu"}:
            out, lse = attn.forward(q, [k_prefix, k], [v_prefix, v], **call, **options)
            self.close(out, want)
            self.close(lse, want_lse)
        plan = attn.Plan(q, [k_prefix, k], [v_prefix, v], kernel="prefix_cpu", shared_segments=1, causal=True)
        self.assertEqual(plan.kernel, "prefix_cpu")
        self.close(plan(q, [k_prefix, k], [v_prefix, v]), want)
        found = attn.explain(q, [k_prefix, k], [v_prefix, v], kernel="prefix_cpu", shared_segments=1)
        self.assertEqual([part["computes"] for part in found["parts"]],
                         ["shared segments", "own segments", "merge"])
        # pages, a length and descales of a batch of 1
        pages = [np.concatenate([x[:, :4], np.pad(x[:, 4:], ((0, 0), (0, 1), (0, 0), (0, 0)))]) for x in (k_prefix, v_prefix)]
        out = attn.forward(q, [pages[0], k], [pages[1], v], block_table=[np.array([[0, 1]], np.int32), None],
                           seqlens_kv=[np.array([7], np.int32), None], v_descale=[np.ones((1, 2), np.float32), None],
                           shared_segments=1)
        self.close(out, want)
        self.refuses(ValueError, ["k[0]: batch is 2", "accepted: 1 as in a shared segment"], attn.forward, q, [k, k], [v, v],
                     shared_segments=1)
        self.refuses(ValueError, ["seqlens_kv[0] has shape [2]", "[1]"], attn.forward, q, [k_prefix, k], [v_prefix, v],
                     seqlens_kv=[np.array([7, 7], np.int32), None], shared_segments=1)
        self.refuses(ValueError, ["shared_segments is 3", "accepted: 0 to 2"], attn.forward, q, [k, k], [v, v], shared_segments=3)
        offsets = np.array([0, 7], np.int32)
        self.refuses(ValueError, "cu_seqlens_kv", attn.forward, q, [k_prefix[0], k], [v_prefix[0], v],
                     cu_seqlens_kv=[offsets, None], shared_segments=1)


class Types(Case):
    def test_ml_dtypes(self):
        q, k, v = self.qkv(dim=32)
        for name, result in (("bfloat16", ml_dtypes.bfloat16), ("float8_e4m3fn", ml_dtypes.bfloat16),
                             ("float8_e5m2", ml_dtypes.bfloat16), ("float8_e4m3fnuz", ml_dtypes.bfloat16),
                             ("float16", np.float16)):
            with self.subTest(name):
                dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
                small = [x.astype(dtype) for x in (q, k, v)]
                want = softmax_attention(*small)[0]
                self.close(attn.forward(*small, out_dtype="f32"), want, 4e-6)
                out = attn.forward(*small)
                self.assertEqual(out.dtype, result)
                self.close(out, want, 2.0 ** -8 * np.abs(want).max())
                self.assertEqual(attn.forward(q, small[1], small[2]).dtype, np.float32)

    def test_out_dtype(self):
        q, k, v = self.qkv()
        for given in ("bf16", "bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)):
            self.assertEqual(attn.forward(q, k, v, out_dtype=given).dtype, ml_dtypes.bfloat16)
        for given in ("f16", np.float16, np.dtype("float16")):
            self.assertEqual(attn.forward(q, k, v, out_dtype=given).dtype, np.float16)
        scale = np.array([16], np.float32)
        stored = attn.forward(q, k, v, out_dtype="f8_e4m3fn", out_scale=scale)
        self.assertEqual(stored.dtype, ml_dtypes.float8_e4m3fn)
        self.close(stored.astype(np.float32) / 16, softmax_attention(q, k, v)[0], 0.15)
        self.refuses(ValueError, ["out_dtype is <class 'numpy.int32'>", "accepted"], attn.forward, q, k, v, out_dtype=np.int32)
        self.refuses(ValueError, ["out_dtype is f17", "accepted"], attn.forward, q, k, v, out_dtype="f17")

    def test_ggml(self):
        q, k, v = self.qkv(dim=64)
        for kind, size, bound in (("q8_0", 68, 0.03), ("q4_0", 36, 0.4), ("q4_1", 40, 0.4), ("q5_0", 44, 0.2), ("q5_1", 48, 0.2),
                                  ("iq4_nl", 36, 0.4)):
            blocks = [attn.quantize(x, kind)[0] for x in (k, v)]
            self.assertEqual((blocks[0].dtype, blocks[0].shape[-1]), (np.uint8, size))
            out = attn.forward(q, *blocks, k_type=kind, v_type=kind)
            error = np.abs(out - softmax_attention(q, k, v)[0]).max()
            self.assertLess(error, bound)
            self.assertGreater(error, 0)
            every_second = [np.repeat(x, 2, axis=1)[:, ::2] for x in blocks]
            self.close(attn.forward(q, *every_second, k_type=kind, v_type=kind), out, 0)
            if kind in ("q8_0", "q4_0"):
                self.close(attn.forward(q, *blocks), out, 0)
            self.close(attn.forward(q, [k[:, :4], blocks[0][:, 4:]], [v[:, :4], blocks[1][:, 4:]], k_type=[None, kind],
                                    v_type=[None, kind]), softmax_attention(q, k, v)[0], bound)
        self.refuses(ValueError, ["k is u8", "44", "q8_0 (34 bytes)", "k_type"], attn.forward, q, attn.quantize(k, "q5_0")[0], v)
        self.refuses(ValueError, ["type of k is f16", "q5_1"], attn.forward, q, k, v, k_type="f16")
        self.refuses(ValueError, ["v is f32", "of q4_1: u8, multiples of 20"], attn.forward, q, k, v, v_type="q4_1")
        self.refuses(ValueError, ["k_type is not a list"], attn.forward, q, [k], [v], k_type="q4_1")

    def test_scales_beside(self):
        q, k, v = self.qkv(dim=48)
        for kind, dtype, last, bound in (("i8", np.int8, 48, 0.03), ("i4", np.uint8, 24, 0.4)):
            (k_codes, k_scale), (v_codes, v_scale) = (attn.quantize(x, kind) for x in (k, v))
            self.assertEqual((k_codes.dtype, k_codes.shape, k_scale.dtype, k_scale.shape),
                             (dtype, (2, 13, 2, last), np.float16, (2, 13, 2)))
            named = {"k_type": "i4", "v_type": "i4"} if kind == "i4" else {}
            out = attn.forward(q, k_codes, v_codes, k_scale=k_scale, v_scale=v_scale, **named)
            error = np.abs(out - softmax_attention(q, k, v)[0]).max()
            self.assertLess(error, bound)
            self.assertGreater(error, 0)
            twice = [np.repeat(x, 2, axis=1)[:, ::2] for x in (k_codes, v_codes, k_scale, v_scale)]
            self.close(attn.forward(q, *twice[:2], k_scale=twice[2], v_scale=twice[3], **named), out, 0)
            lists = {name: [None, value] for name, value in (("k_scale", k_scale[:, 4:]), ("v_scale", v_scale[:, 4:]), *named.items())}
            mixed = attn.forward(q, [k[:, :4], k_codes[:, 4:]], [v[:, :4], v_codes[:, 4:]], **lists)
            self.close(mixed, softmax_attention(q, k, v)[0], bound)
        codes, scale = attn.quantize(k, "i8")
        self.refuses(ValueError, ["k_scale is None", "k in i8", "f16 scales"], attn.forward, q, codes, v)
        self.refuses(ValueError, ["v_scale is given", "v in f32"], attn.forward, q, codes, v, k_scale=scale, v_scale=scale)
        self.refuses(ValueError, ["k_scale is f32", "f16"], attn.forward, q, codes, v, k_scale=scale.astype(np.float32))
        self.refuses(ValueError, ["k_scale has shape [2, 13]", "[2, 13, 2]"], attn.forward, q, codes, v, k_scale=scale[..., 0].copy())
        self.refuses(ValueError, ["v is f32", "of i4: u8"], attn.forward, q, k, v, v_type="i4")

    def test_ggml_mask(self):
        q, k, v = self.qkv()
        mask = np.where(np.arange(13) <= np.arange(9)[:, None] + 4, -np.abs(np.arange(13) - np.arange(9)[:, None] - 4.0), -np.inf)
        slopes = np.array([0.5, 0.25, 0, 2], np.float32)
        bias = np.where(np.isinf(mask), mask, slopes[:, None, None] * np.where(np.isinf(mask), 0, mask)).astype(np.float32)
        want = attn.forward(q, k, v, bias=bias[None], backend="reference")
        for backend in "reference", "cpu":
            out = attn.forward(q, k, v, bias=mask.astype(np.float16)[None, None], bias_slopes=slopes, backend=backend)
            self.close(out, want, 1e-6)
        self.refuses(ValueError, "ATTN_BIAS_SLOPES without a bias;", attn.forward, q, k, v, bias_slopes=slopes)
        self.refuses(ValueError, ["bias_slopes has shape [3]", "[Hq]"], attn.forward, q, k, v, bias=bias[None], bias_slopes=slopes[1:])

    def test_types_that_are_none(self):
        q, k, v = self.qkv()
        self.refuses(ValueError, ["q is f64", "f32"], attn.forward, q.astype(np.float64), k, v)
        self.refuses(ValueError, ["k is i32", "f32"], attn.forward, q, k.astype(np.int32), v)
        self.refuses(ValueError, ["v is", "int4"], attn.forward, q, k, v.astype(ml_dtypes.int4))
        self.refuses(ValueError, ["sinks is f64", "accepted: f32"], attn.forward, q, k, v, sinks=np.ones(4))
        self.refuses(ValueError, ["seqlens_kv is i64", "accepted: i32"], attn.forward, q, k, v,
                     seqlens_kv=np.array([3, 4]))
        self.refuses(TypeError, ["k is a int", "accepted"], attn.forward, q, 3, v)
        self.refuses(TypeError, ["sinks is a list"], attn.forward, q, k, v, sinks=[1.0] * 4)


class Outputs(Case):
    def test_out_is_filled_and_returned(self):
        q, k, v = self.qkv()
        want = softmax_attention(q, k, v)[0]
        out = np.full_like(q, np.nan)
        self.assertIs(attn.forward(q, k, v, out=out), out)
        self.close(out, want)
        room = np.full((2, 4, 9, 20), np.nan, np.float32)
        view = room.transpose(0, 2, 1, 3)[..., 2:-2]
        got, lse = attn.forward(q, k, v, out=view, return_lse=True)
        self.assertIs(got, view)
        self.close(room[..., 2:-2].transpose(0, 2, 1, 3), want)
        self.assertTrue(np.isnan(room[..., :2]).all() and np.isnan(room[..., -2:]).all())
        half = np.empty(q.shape, ml_dtypes.bfloat16)
        self.close(attn.forward(q, k, v, out=half), want, 0.02)

    def test_out_that_is_none(self):
        q, k, v = self.qkv()
        self.refuses(ValueError, ["out has shape [2, 9, 4, 15]", "[2, 9, 4, 16]"], attn.forward, q, k, v,
                     out=np.empty((2, 9, 4, 15), np.float32))
        self.refuses(ValueError, ["out is f32", "accepted: f16"], attn.forward, q, k, v, out=np.empty_like(q),
                     out_dtype="f16")
        frozen = np.empty_like(q)
        frozen.flags.writeable = False
        self.refuses(ValueError, ["out is read-only"], attn.forward, q, k, v, out=frozen)
        self.refuses(ValueError, ["out_stride"], attn.forward, q, k, v,
                     out=np.lib.stride_tricks.as_strided(np.empty_like(q), q.shape, (0, *q.strides[1:])))

    def test_inputs_are_not_kept(self):
        q, k, v = self.qkv()
        gone = [weakref.ref(x) for x in (q, k, v)]
        attn.forward(q, k, v)
        plan = attn.Plan(q, k, v)
        del q, k, v
        gc.collect()
        self.assertEqual([ref() for ref in gone], [None] * 3)
        self.assertEqual(plan(*self.qkv()).shape, (2, 9, 4, 16))


class Arguments(Case):
    def test_signature(self):
        self.assertEqual(
            str(inspect.signature(attn.forward)),
            "(q, k, v, *, causal=False, causal_top_left=False, window=(-1, -1), scale=None, softcap=0.0, bias=None, "
            "alibi_slopes=None, sinks=None, block_mask=None, tree=None, tree_keys=0, seqlens_kv=None, kv_begin=None, "
            "causal_sequences=None, query_start=None, key_start=None, key_places=None, ready=None, cu_seqlens_q=None, "
            "cu_seqlens_kv=None, max_seqlen_q=None, max_seqlen_kv=None, block_table=None, shared_segments=0, q_descale=None, k_descale=None, "
            "v_descale=None, k_type=None, v_type=None, k_scale=None, v_scale=None, head_dim_v=None, lists=None, list_lengths=None, "
            "list_block=None, list_queries=None, list_of_pool=None, no_positions=None, bias_slopes=None, out_scale=None, "
            "out_dtype=None, return_lse=False, out=None, lse=None, accumulate=False, backend='auto')")

    def test_calls(self):
        """What Python says of a function's arguments, these functions say of theirs."""
        q, k, v = self.qkv()
        plan = attn.Plan(q, k, v)
        np.testing.assert_array_equal(plan(v=v, k=k, q=q), attn.forward(v=v, q=q, k=k))
        for name, call in ("forward", attn.forward), ("check", attn.check), ("explain", attn.explain), ("Plan", attn.Plan), ("plan", plan):
            with self.subTest(name):
                self.refuses(TypeError, "required positional argument: 'v'", call, q, k)
                self.refuses(TypeError, "positional arguments", call, q, k, v, q)
                self.refuses(TypeError, "multiple values for argument 'k'", call, q, k, v, k=k)
                self.refuses(TypeError, f"{name}() got an unexpected keyword argument 'causl'", call, q, k, v, causl=True)
                self.refuses(TypeError, "'attn_mask'", call, q, k, v, attn_mask=q)
        self.refuses(TypeError, "'kernel'", attn.forward, q, k, v, kernel="cpu_baseline")
        self.assertIs(pickle.loads(pickle.dumps(attn.forward)), attn.forward)
        self.refuses(TypeError, "not initialised", attn.Plan.__new__(attn.Plan), q, k, v)

    def test_types_of_numpy(self):
        """Each is taken for what it is."""
        q, k, v = self.qkv()
        names = {"float64": "f64", "int8": "i8", "int32": "i32", "int64": "i64", "longlong": "i64", "uint8": "u8", "uint32": "u32", "uint64": "u64",
                 "ulonglong": "u64", "bool": "bool", "int16": "int16", "complex64": "complex64"}
        for dtype, name in names.items():
            self.refuses(ValueError, [f"sinks is {name};", "f32"], attn.forward, q, k, v, sinks=np.zeros(4, dtype))
        for dtype in np.float32, np.float16:
            x, y, z = (a.astype(dtype) for a in (q, k, v))
            out = attn.forward(x, y, z)
            self.assertEqual(out.dtype, dtype)
            self.close(out, softmax_attention(x, y, z)[0], 2e-6 if dtype == np.float32 else 1e-3)
        strange = np.zeros(q.shape, [("byte", "u1"), ("value", "f4")])["value"]
        self.refuses(ValueError, ["q cannot be read", "whole elements"], attn.forward, strange, k, v)

    def test_dimensions(self):
        q, k, v = self.qkv()
        self.refuses(ValueError, ["q has shape [1, 1, 2, 9, 4, 16]", "[B, Sq, Hq, D]"], attn.forward,
                     q[None, None], k, v)
        self.refuses(ValueError, ["k has 9 dimensions", "at most 8"], attn.forward, q, k.reshape((1,) * 5 + k.shape), v)

    def test_scale_0(self):
        """All visible keys weigh the same but for what is added to the scores."""
        q, k, v = self.qkv(dtype=np.float32)
        q, k = q * 1e4, k * 1e4
        seen, bias = causal(9, 13), self.normal(2, 4, 9, 13)
        sinks, slopes = self.normal(4), np.abs(self.normal(4))
        far = np.abs(np.arange(9)[:, None] + 4 - np.arange(13))
        zeros = np.zeros((2, 4, 9, 13))
        for name, options, scores, visible in (("plain", {}, zeros, None), ("causal", {"causal": True}, zeros, seen),
                                               ("softcap", {"softcap": 5.0}, zeros, None), ("bias", {"bias": bias}, bias, None),
                                               ("all", {"bias": bias, "softcap": 0.5, "causal": True}, bias, seen),
                                               ("alibi", {"alibi_slopes": slopes}, -slopes[:, None, None] * far + zeros, None),
                                               ("sinks", {"sinks": sinks, "causal": True}, zeros, seen)):
            p = np.exp(scores) * (1 if visible is None else visible)
            total = p.sum(-1) + (np.exp(sinks)[:, None] if name == "sinks" else 0)
            want = np.einsum("bhij,bjhd->bihd", p / total[..., None], np.repeat(v, 2, 2).astype(np.float64))
            for backend, scale in itertools.product(("reference", "cpu"), (0, 0.0, -0.0, np.float32(0))):
                with self.subTest(name, backend=backend, scale=scale):
                    out, lse = attn.forward(q, k, v, scale=scale, return_lse=True, backend=backend, **options)
                    self.close(out, want)
                    self.close(lse, np.log(total))
                    plan = attn.Plan(q, k, v, scale=scale, backend=backend, **{n: x for n, x in options.items()})
                    arrays = {n: x for n, x in options.items() if isinstance(x, np.ndarray)}
                    self.close(plan(q, k, v, **arrays), want)
        self.close(flash_attn_func(q, k, v, softmax_scale=0), attn.forward(q, k, v, scale=0), 0)
        q, k = q * 1e-4, k * 1e-4
        self.close(attn.forward(q, k, v, scale=-0.5), attn.forward(-q, k, v, scale=0.5))

    def test_wide_windows(self):
        q, k, v = self.qkv()
        for backend in "reference", "cpu":
            for wide in 2**31 - 1, 2**31, 2**32 + 1, 2**62, 2**63 - 1:
                for window, same in ((wide, 2), (-1, 2)), ((3, wide), (3, -1)), ((wide, wide), (-1, -1)):
                    with self.subTest(backend=backend, window=window):
                        self.close(attn.forward(q, k, v, window=window, backend=backend),
                                   attn.forward(q, k, v, window=same, backend=backend), 0)
                        if backend == "cpu":
                            self.close(flash_attn_func(q, k, v, window_size=window),
                                       attn.forward(q, k, v, window=same), 0)
            mask = attn.BlockMask.from_window(9, 13, (2**63 - 1, 2))
            self.close(attn.forward(q, k, v, block_mask=mask, backend=backend), attn.forward(q, k, v, window=(-1, 2), backend=backend))

    def test_sentences(self):
        q, k, v = self.qkv()
        i32 = np.int32
        self.refuses(ValueError, ["q has shape [9, 4, 16]", "[B, Sq, Hq, D]"], attn.forward, q[0], k, v)
        self.refuses(ValueError, ["v has shape [2, 12, 2, 16]", "[2, 13, 2, any]"], attn.forward, q, k, v[:, 1:])
        self.refuses(ValueError, ["k: batch is 1", "accepted: 2 as in q"], attn.forward, q, k[:1], v[:1])
        self.refuses(ValueError, "heads_q", attn.forward, q[:, :, :3], k, v)
        self.refuses(ValueError, ["scale is 1e-60", "f32 can hold"], attn.forward, q, k, v, scale=1e-60)
        self.refuses(ValueError, ["window_left is -3; accepted: 0 and above, or -1 (unbounded)"], attn.forward, q, k, v, window=(-3, 0))
        self.refuses(ValueError, ["window[1] is 9223372036854775808"], attn.forward, q, k, v, window=(0, 2**63))
        self.refuses(TypeError, ["window is a tuple", "pair"], attn.forward, q, k, v, window=(1,))
        self.refuses(TypeError, ["softcap is a str", "a number"], attn.forward, q, k, v, softcap="x")
        self.refuses(TypeError, ["block_mask is a ndarray", "a BlockMask"], attn.forward, q, k, v, block_mask=q)
        self.refuses(ValueError, ["backend is vulkan", "auto, reference, cpu, cuda, hip"], attn.forward, q, k, v,
                     backend="vulkan")
        self.refuses(ValueError, ["backend is cuda", "host memory"], attn.forward, q, k, v, backend="cuda")
        self.refuses(ValueError, ["backend is hip-emu"], attn.forward, q, k, v, backend="hip-emu")
        self.refuses(ValueError, ["seqlens_kv has shape [3]", "[2]"], attn.forward, q, k, v, seqlens_kv=np.ones(3, i32))
        self.refuses(ValueError, ["seqlens_kv[0] is 14"], attn.forward, q, k, v, seqlens_kv=np.array([14, 1], i32))
        self.refuses(ValueError, ["segment 1: seqlens_kv[0] is 14"], attn.forward, q, [k, k], [v, v],
                     seqlens_kv=[None, np.array([14, 1], i32)])
        self.refuses(ValueError, ["max_seqlen_kv is 27; accepted: up to", "= 26"], attn.forward, q, k, v,
                     block_table=np.zeros((2, 2), i32), max_seqlen_kv=27)
        self.refuses(ValueError, ["max_seqlen_q is -1"], attn.Plan, q[0], k[:1], v[:1], cu_seqlens_q=np.array([0, 9], i32), max_seqlen_q=-1)
        self.refuses(ValueError, ["max_seqlen_q"], attn.forward, q, k, v, max_seqlen_q=9)
        self.refuses(ValueError, ["cu_seqlens_kv and seqlens_kv"], attn.forward, q, k[0], v[0],
                     cu_seqlens_kv=np.array([0, 3, 13], i32), seqlens_kv=np.ones(2, i32))
        self.refuses(ValueError, ["k_descale has shape [3]", "[1]"], attn.forward, q, k, v,
                     k_descale=np.ones(3, np.float32))
        self.refuses(ValueError, ["alibi_slopes is not contiguous"], attn.forward, q, k, v,
                     alibi_slopes=np.ones(8, np.float32)[::2])

    def test_what_attn_h_takes_for_a_default(self):
        """0 sizes, strides, numbers and names that in C mean "unset" are not reached by way of an array or option."""
        q, k, v = self.qkv()
        calls = attn.forward, attn.Plan, attn.explain, attn.check
        none = v[..., :0]
        for call in calls:
            self.refuses(ValueError, ["v has shape [2, 13, 2, 0]", "head_dim_v of 1 or more"], call, q, k, none)
            self.refuses(ValueError, ["v has shape [2, 13, 2, 0]"], call, q, k, none, out=np.empty((2, 9, 4, 0), np.float32))
            self.refuses(ValueError, ["v[0] has shape [2, 13, 2, 0]"], call, q, [k, k], [none, v])
            self.refuses(ValueError, ["v[1] has shape [2, 13, 2, 0]"], call, q, [k, k], [v, none])
            self.refuses(ValueError, ["head_dim is 0"], call, q[..., :0], k[..., :0], v)
            self.refuses(ValueError, ["scale is 1e-50", "f32"], call, q, k, v, scale=1e-50)
            self.refuses(ValueError, ["scale is 1e+300", "f32"], call, q, k, v, scale=1e300)
            self.refuses(ValueError, ["softcap is 1e-60", "f32"], call, q, k, v, softcap=1e-60)
        for call in calls[1:]:
            self.refuses(ValueError, ["kernel is empty text"], call, q, k, v, kernel="")
        self.refuses(ValueError, ["out has shape [2, 9, 4, 0]"], attn.forward, q, k, v, out=np.empty((2, 9, 4, 0), np.float32))
        self.refuses(ValueError, ["kernel has characters"], attn.Plan, q, k, v, kernel="reference\0", backend="reference")
        # what 32 bits would cut down to 4 keys
        pages = np.broadcast_to(k[:1, :1], (3, 2 ** 32 + 4, 2, 16))
        table = np.zeros((2, 3), np.int32)
        self.refuses(ValueError, ["k has shape [3, 4294967300, 2, 16]", "2^31"], attn.forward, q, pages, pages, block_table=table)
        long = np.broadcast_to(k[:1, :1], (1, 2 ** 31 - 1, 2, 16))
        self.refuses(ValueError, ["block_table has shape [2, 3]", "2^31"], attn.forward, q, long, long, block_table=table)
        huge = np.broadcast_to(k[:, :1], (2, 2 ** 41, 2, 16))
        self.refuses(ValueError, ["k has shape", "2^40"], attn.forward, q, huge, huge)
        # 306 bytes are 9 blocks of q8_0 or 17 of q4_0
        stored = attn.quantize(self.normal(2, 13, 2, 288), "q8_0")[0]
        self.refuses(ValueError, ["v is u8", "288 elements of q8_0 or 544 of q4_0"], attn.forward, q, k, stored)
        wide = self.normal(2, 9, 4, 288)
        self.close(attn.forward(wide, stored, stored), attn.forward(wide, stored, stored, backend="reference"))

    def test_repeated_elements(self):
        """A stride of 0 is read as it is: four zeros of a bias and three of k mean "contiguous" in C."""
        q, k, v = self.qkv()
        for keep in itertools.product((False, True), repeat=3):
            repeat = [x[tuple(slice(None) if kept else slice(1) for kept in keep)] for x in (k, v)]
            repeat = [np.broadcast_to(x, k.shape) for x in repeat]
            for backend in "reference", "cpu":
                if any(keep):
                    self.close(attn.forward(q, *repeat, backend=backend), softmax_attention(q, *repeat)[0])
                else:
                    self.refuses(ValueError, "k: all strides are 0", attn.forward, q, *repeat, backend=backend)
        one = np.broadcast_to(k[:, 0, 0], (9, 4, 2, 16)).transpose(2, 0, 1, 3)
        self.close(attn.quantize(one, "f8_e5m2")[0].astype(np.float32), one.astype(ml_dtypes.float8_e5m2).astype(np.float32))
        out, lse = attn.forward(q, k, v, return_lse=True)
        same = np.broadcast_to(out[:, :1], out.shape), np.ascontiguousarray(np.broadcast_to(lse[:, :, :1], lse.shape))
        self.close(attn.merge([same])[0], same[0])

    def test_no_elements_of_small_arrays(self):
        q, k, v = self.qkv()
        none = k[:, :0], v[:, :0]
        out, lse = attn.forward(q, *none, bias=np.empty((2, 4, 9, 0), np.float32), return_lse=True)
        self.assertTrue((out == 0).all() and (lse == -np.inf).all())
        pages = np.empty((0, 4, 2, 16), np.float32)
        self.assertTrue((attn.forward(q, pages, pages, block_table=np.empty((2, 0), np.int32)) == 0).all())
        blocks = np.empty((2, 2, 0), np.float32)
        self.assertTrue((attn.forward(q, *none, k_descale=blocks, v_descale=blocks) == 0).all())
        nothing = np.empty((0, 4, 16), np.float32), np.zeros(3, np.int32)
        self.assertEqual(attn.forward(nothing[0], k, v, cu_seqlens_q=nothing[1], max_seqlen_q=0).shape, (0, 4, 16))

    def test_kinds_of_numbers(self):
        """NumPy's scalars, and arrays without dimensions, are Python's."""
        q, k, v = self.qkv()
        want, want_lse = attn.forward(q, k, v, causal=True, scale=0.25, softcap=2, window=(4, 1), return_lse=True)
        for true in np.True_, np.array(True):
            out, lse = attn.forward(q, k, v, causal=true, scale=np.float64(0.25), softcap=np.int8(2), return_lse=true,
                                    window=np.array([4, 1]))
            np.testing.assert_array_equal(out, want)
            np.testing.assert_array_equal(lse, want_lse)
        top = attn.forward(q, k, v, causal_top_left=True)
        np.testing.assert_array_equal(attn.forward(q, k, v, causal=np.False_, causal_top_left=np.True_), top)
        out = attn.Plan(q, k, v, split_invariant=np.True_, kv_prefix_stable=np.False_, fixed_split=np.int64(4),
                        max_sms=np.array(0), scale=np.array(0.5))(q, k, v, return_lse=np.False_)
        self.close(out, softmax_attention(q, k, v, scale=0.5)[0])
        packed = attn.forward(q[0], k[:1], v[:1], cu_seqlens_q=np.array([0, 9], np.int32), max_seqlen_q=np.uint8(9))
        self.close(packed, softmax_attention(q[:1], k[:1], v[:1])[0][0])
        for wrong in 1, 0.0, "yes", None, [True], np.array([True]), np.int64(1):
            self.refuses(TypeError, ["causal is a", "a bool"], attn.forward, q, k, v, causal=wrong)
        for wrong in 2.0, np.float32(2), "2", np.array([1, 2]):
            self.refuses(TypeError, ["max_sms is a", "an integer"], attn.Plan, q, k, v, max_sms=wrong)
        self.refuses(TypeError, ["window[0] is a float", "integers"], attn.forward, q, k, v, window=(1.5, 2))
        self.refuses(ValueError, ["max_sms is 4294967297", "2147483647"], attn.Plan, q, k, v, max_sms=2 ** 32 + 1)
        self.refuses(ValueError, ["fixed_split is 1180591620717411303424"], attn.Plan, q, k, v, fixed_split=2 ** 70)

    def test_subclasses_of_numpy(self):
        class Own(np.ndarray):
            pass
        q, k, v = self.qkv()
        self.close(attn.forward(q.view(Own), k.view(Own), v), softmax_attention(q, k, v)[0])
        masked = np.ma.masked_array(k, mask=k > 0)
        self.refuses(ValueError, ["k is a MaskedArray", "without a mask"], attn.forward, q, masked, v)
        self.refuses(ValueError, ["x is a MaskedArray"], attn.quantize, masked, "f8_e5m2")

    def test_errors_by_status(self):
        q, k, v = self.qkv()
        offsets = np.array([0, 9], np.int32)
        unsupported = self.refuses(attn.Unsupported, ["bias with packed q"], attn.forward, q[0], k[:1], v[:1],
                                   cu_seqlens_q=offsets, bias=self.normal(1, 4, 9, 13))
        self.assertIsInstance(unsupported, NotImplementedError)
        self.assertIsInstance(unsupported, attn.Error)
        self.refuses(attn.InvalidArgument, "cuda", attn.Plan, q, k, v, kernel="fwd_sm80_bf16_d128")
        self.refuses(attn.InvalidArgument, ["ATTN_FP8_PRECISE", "an fp8 q_type"], attn.Plan, q, k, v, fp8_precise=True)
        self.assertTrue(issubclass(attn.InvalidArgument, ValueError))
        self.assertTrue(issubclass(attn.OutOfMemory, MemoryError))

    def test_grad(self):
        class Parameter(np.ndarray):
            requires_grad = True
        q, k, v = self.qkv()

        class Tensor:  # of no framework that attn knows
            def __init__(self, array, grad):
                self.array, self.requires_grad = array, grad

            def __dlpack__(self, **options):
                return self.array.__dlpack__(**options)

            def __dlpack_device__(self):
                return self.array.__dlpack_device__()
        want = softmax_attention(q, k, v)[0]
        self.close(attn.forward(Tensor(q, False), k, Tensor(v, False)), want)
        self.refuses(ValueError, ["v requires grad", "backward"], attn.forward, q, k, Tensor(v, True))
        self.refuses(ValueError, ["bias requires grad"], attn.forward, q, k, v,
                     bias=Tensor(self.normal(2, 4, 9, 13), True))
        self.refuses(ValueError, ["q requires grad"], attn.forward, q.view(Parameter), k, v)


class Checks(Case):
    """check() says what a run takes as it is."""

    def test_pages(self):
        q, k, v = self.qkv(seqlen_kv=4)
        table, lengths = np.array([[0, 1], [1, 0]], np.int32), np.array([8, 3], np.int32)
        arguments = q, k, v
        options = {"block_table": table, "seqlens_kv": lengths, "causal": True}
        for backend in "reference", "cpu":
            self.assertIsNone(attn.check(*arguments, **options, backend=backend))
            table[1, 1] = 7  # beyond what lengths[1] needs
            attn.check(*arguments, **options, backend=backend)
            for bad in 2, -1:
                table[0, 1] = bad
                attn.forward(*arguments, **options, backend=backend)
                self.refuses(attn.InvalidArgument, [f"block_table[0, 1] is {bad}", "accepted: 0 to 1"], attn.check,
                             *arguments, **options, backend=backend)
                self.refuses(attn.InvalidArgument, [f"segment 1: block_table[0, 1] is {bad}"], attn.check, q, [k, k], [v, v],
                             block_table=[None, table], seqlens_kv=[None, lengths], backend=backend)
            table[0, 1] = 1
            self.refuses(attn.InvalidArgument, ["block_table[0, 0] is 0; accepted: no page, since num_pages is 0"], attn.check, q, k[:0], v[:0],
                         **options, backend=backend)

    def test_lengths(self):
        q, k, v = self.qkv()
        self.refuses(attn.InvalidArgument, ["seqlens_kv[1] is 14", "0 to 13"], attn.check, q, k, v,
                     seqlens_kv=np.array([13, 14], np.int32))
        self.refuses(attn.InvalidArgument, ["cu_seqlens_kv[1] is -1"], attn.check, q, k[0], v[0],
                     cu_seqlens_kv=np.array([0, -1, 3], np.int32))
        self.refuses(attn.InvalidArgument, ["cu_seqlens_q[0] is 1"], attn.check, q[0], k, v,
                     cu_seqlens_q=np.array([1, 3, 9], np.int32))
        self.assertIsNone(attn.check(q[0], k, v, cu_seqlens_q=np.array([0, 3, 9], np.int32), return_lse=True,
                                     kernel="cpu_baseline", out=np.empty_like(q[0])))

    def test_the_plan_of_forward(self):
        """What forward() takes, check() takes, and neither plans anew for a number of tokens or keys that the other's plan serves."""
        attn.cache_clear()
        q, (k, v) = self.normal(257, 4, 16), (self.normal(20, 16, 2, 16) for _ in range(2))
        call = dict(cu_seqlens_q=np.array([0, 100, 257], np.int32), block_table=np.arange(20, dtype=np.int32).reshape(2, 10),
                    seqlens_kv=np.array([70, 140], np.int32), max_seqlen_kv=130)
        attn.forward(q, k, v, **call)
        self.assertIsNone(attn.check(q, k, v, **call))
        self.assertIsNone(attn.check(q[:250], k, v, **{**call, "cu_seqlens_q": np.array([0, 100, 250], np.int32)}))
        self.assertEqual(attn.cache_info()["misses"], 2)  # 288 tokens, and 256
        self.refuses(attn.InvalidArgument, ["cu_seqlens_q[2] is 257", "up to 256 tokens"], attn.check, q[:256], k, v, **call)

    def test_arguments(self):
        q, k, v = self.qkv()
        self.refuses(TypeError, "kernal", attn.check, q, k, v, kernal="x")
        self.refuses(ValueError, ["head_dim"], attn.check, q, k[..., :4], v)
        mask = attn.BlockMask.from_dense(causal(9, 13), block_size=4)
        self.assertIsNone(attn.check(q, k, v, block_mask=mask))


class Plans(Case):
    def test_cache(self):
        q, k, v = self.qkv()
        counts = lambda: {name: attn.cache_info()[name] for name in ("plans", "hits", "misses")}
        attn.cache_clear()
        first = attn.forward(q, k, v, causal=True)
        self.assertEqual(counts(), {"plans": 1, "hits": 0, "misses": 1})
        more = [x + 1 for x in (q, k, v)]
        before = attn._attn.launch_count(attn.Plan(q, k, v, causal=True).kernel)
        self.close(attn.forward(*more, causal=True), softmax_attention(*more, causal(9, 13))[0])
        np.testing.assert_array_equal(attn.forward(q, k, v, causal=True), first)
        self.assertEqual(attn._attn.launch_count(attn.Plan(q, k, v, causal=True).kernel), before + 2)
        self.assertEqual(counts(), {"plans": 1, "hits": 2, "misses": 1})
        attn.forward(q, k, v, causal=True, backend="reference")
        attn.forward(q, k, v)
        attn.forward(q, k[:, :-1], v[:, :-1], causal=True)
        self.assertEqual(counts(), {"plans": 4, "hits": 2, "misses": 4})
        attn.cache_clear()
        self.assertEqual(counts(), {"plans": 0, "hits": 0, "misses": 0})

    def test_types(self):
        """attn.types() against NumPy's and ml_dtypes' sizes and what quantize() makes; attn_info's table is the same."""
        types = attn.types()
        self.assertEqual({t.pop("name"): t for t in attn.info()["types"]},
                         {name: {key: t[key] for key in t if key != "dtype"} for name, t in types.items()})
        arrays = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "f8_e4m3fn": "float8_e4m3fn", "f8_e5m2": "float8_e5m2",
                  "f8_e4m3fnuz": "float8_e4m3fnuz", "f64": "float64", "i8": "int8"}
        self.assertEqual({name: t["dtype"] for name, t in types.items() if t["dtype"] != "uint8"}, arrays)
        for name, dtype in arrays.items():
            size = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
            self.assertEqual((types[name]["block_elements"], types[name]["block_bytes"]), (1, size), name)
        x = self.normal(1, 3, 2, 64)
        for name, t in types.items():
            if t["kind"] == "float":
                self.refuses(ValueError, [f"dtype is {name}", ", ".join(n for n in types if types[n]["kind"] != "float")],
                             attn.quantize, x, name)
                continue
            dim = max(64, t["block_elements"])
            stored, scale = attn.quantize(self.normal(1, 3, 2, dim), name, scale="amax" if t["kind"] == "fp8" else 1)[:2]
            self.assertEqual((str(stored.dtype), stored.shape[-1] * stored.itemsize),
                             (t["dtype"], dim // t["block_elements"] * t["block_bytes"]), name)
            shape = (1, 3, 2) if t["scale_elements"] == 0 else (1, 3, 2, dim // t["scale_elements"])
            self.assertEqual(scale is not None and scale.shape == shape, t["has_scales"], name)
            if t["has_scales"]:
                self.assertEqual(scale.itemsize, t["scale_bytes"], name)

    def test_cache_has_an_end(self):
        attn.cache_clear()
        q = self.normal(1, 300, 1, 4)
        for n in range(1, 300):
            attn.forward(q[:, :n], q, q)
        self.assertEqual(attn.cache_info()["plans"], 256)
        attn.forward(q[:, :299], q, q)
        self.assertEqual(attn.cache_info()["hits"], 1)
        attn.forward(q[:, :1], q, q)  # long gone
        self.assertEqual(attn.cache_info()["hits"], 1)

    def test_batches_of_packed_queries_share_plans(self):
        """Eight plans from a power of two to the next serve all numbers of tokens; out and lse have those of the call."""
        attn.cache_clear()
        _, k, v = self.qkv(batch=3, seqlen_kv=40)
        for n, total in enumerate((257, 264, 288, 280, 289, 320)):
            q, offsets = self.normal(total, 4, 16), np.array([0, 40, 41, total - n % 3], np.int32)
            out, lse = attn.forward(q, k, v, cu_seqlens_q=offsets, return_lse=True)
            self.assertEqual((out.shape, lse.shape), ((total, 4, 16), (4, total)))
            for b, (i, j) in enumerate(zip(offsets, offsets[1:])):
                want, want_lse = softmax_attention(q[None, i:j], k[b:b + 1], v[b:b + 1])
                self.close(out[i:j], want[0])
                self.close(lse[:, i:j], want_lse[0])
            self.assertTrue((out[offsets[-1]:] == 0).all() and np.isneginf(lse[:, offsets[-1]:]).all())
        self.assertEqual(attn.cache_info()["misses"], 2)
        self.refuses(ValueError, ["191", "129"], attn.forward, q, k, v, cu_seqlens_q=np.array([0, 129, total, total], np.int32), max_seqlen_q=129)
        by_heads = np.empty((4, total, 16), np.float32).transpose(1, 0, 2)  # whose stride of heads would be too small for more tokens
        np.testing.assert_array_equal(attn.forward(q, k, v, cu_seqlens_q=offsets, out=by_heads), out)

    def test_most_keys_of_pages(self):
        """max_seqlen_kv in place of a table's room: plans in steps of 64 keys, the same results."""
        attn.cache_clear()
        q, k, v = self.qkv(batch=2, seqlen_q=3, seqlen_kv=160)
        lengths, table = np.array([70, 129], np.int32), np.arange(20, dtype=np.int32).reshape(2, 10)
        pages = [np.ascontiguousarray(x.reshape(20, 16, 2, 16)) for x in (k, v)]
        call = dict(block_table=table, seqlens_kv=lengths, causal=True)
        for most in (129, 130, 159, 192, None, 160):
            with self.subTest(most):
                out = attn.forward(q, *pages, max_seqlen_kv=most and min(most, 160), **call)
                for b, n in enumerate(lengths):
                    self.close(out[b], softmax_attention(q[b:b + 1], k[b:b + 1, :n], v[b:b + 1, :n], causal(3, n))[0][0])
        self.assertEqual(attn.cache_info()["misses"], 1)  # all are planned for 160
        # Without lengths it is the number of keys.
        out = attn.forward(q, *pages, max_seqlen_kv=100, block_table=table, causal=True)
        self.close(out, softmax_attention(q, k[:, :100], v[:, :100], causal(3, 100))[0])
        self.refuses(ValueError, ["max_seqlen_kv is 0", "1 or more"], attn.forward, q, *pages, max_seqlen_kv=0, **call)
        self.refuses(ValueError, ["161", "160"], attn.forward, q, *pages, max_seqlen_kv=161, **call)
        self.refuses(ValueError, ["max_seqlen_kv is given", "None"], attn.forward, q, k, v, max_seqlen_kv=160)

    def test_lengths_share_a_workspace(self):
        """Decoding of 300 lengths, with arrays of each length, keeps one workspace of the largest one's size."""
        attn.cache_clear()
        q, k, v = self.qkv(batch=2, seqlen_q=1, seqlen_kv=300)
        for n in range(1, 301):
            parts = np.ascontiguousarray(k[:, :n]), np.ascontiguousarray(v[:, :n])
            self.close(attn.forward(q, *parts, causal=True), softmax_attention(q, *parts)[0])
        found = attn.cache_info()
        self.assertEqual((found["misses"], found["workspaces"]), (300, 1))
        largest = attn.Plan(q, k, v, causal=True).workspace
        self.assertLessEqual(largest, found["workspace_bytes"])
        self.assertLessEqual(found["workspace_bytes"], largest * 9 // 8 + 4096)
        attn.set_num_threads(attn.get_num_threads())
        self.assertEqual(attn.cache_info()["workspaces"], 0)

    def test_plan(self):
        q, k, v = self.qkv()
        plan = attn.Plan(q, k, v, causal=True, kernel="cpu_baseline")
        self.assertEqual((plan.kernel, plan.backend), ("cpu_baseline", "cpu"))
        self.assertGreaterEqual(plan.workspace, 0)
        before = attn._attn.launch_count("cpu_baseline")
        out, lse = plan(q, k, v, return_lse=True)
        self.assertEqual(attn._attn.launch_count("cpu_baseline"), before + 1)
        want, want_lse = softmax_attention(q, k, v, causal(9, 13))
        self.close(out, want)
        self.close(lse, want_lse)
        self.refuses(ValueError, "the plan was made for", plan, q[:, 1:], k, v)
        self.refuses(ValueError, "the plan was made for", plan, q, k, v, sinks=np.zeros(4, np.float32))
        self.refuses(TypeError, "causal", plan, q, k, v, causal=False)
        self.refuses(TypeError, "kernal", attn.Plan, q, k, v, kernal="x")
        sinks = attn.Plan(q, k, v, sinks=np.zeros(4, np.float32), backend="reference")
        self.close(sinks(q, k, v, sinks=np.full(4, -np.inf, np.float32)), softmax_attention(q, k, v)[0])

    def test_what_differs_from_the_plan(self):
        q, k, v = self.qkv()
        lengths, begin = np.array([5, 13], np.int32), np.zeros(2, np.int32)
        plan = attn.Plan(q, k, v, seqlens_kv=lengths)
        self.close(plan(q, k, v, seqlens_kv=lengths), attn.forward(q, k, v, seqlens_kv=lengths))
        half = [x.astype(np.float16) for x in (q, k, v)]
        for words, arrays, options in (
                ("q: type is f16, the plan's f32", half, {}),
                ("k: type is f16, the plan's f32", (q, half[1], v), {}),
                ("q: batch is 1, the plan's 2", (q[:1], k[:1], v[:1]), {"seqlens_kv": lengths[:1]}),
                ("q: queries of a sequence is 8, the plan's 9", (q[:, 1:], k, v), {}),
                ("k: keys of a sequence is 12, the plan's 13", (q, k[:, 1:], v[:, 1:]), {}),
                ("number of segments is 2, the plan's 1", (q, [k, k], [v, v]), {"seqlens_kv": [lengths, lengths]}),
                ("seqlens_kv is not given, the plan was made with it", (q, k, v), {"seqlens_kv": None}),
                ("kv_begin is given, the plan was made without", (q, k, v), {"kv_begin": begin}),
                ("sinks is given, the plan was made without", (q, k, v), {"sinks": np.zeros(4, np.float32)}),
                ("the plan was made for; accepted: the same shapes", (np.repeat(q, 2, 1)[:, ::2], k, v), {})):
            with self.subTest(words):
                self.refuses(attn.InvalidArgument, ["the arrays are not as those", words], plan, *arrays, **{"seqlens_kv": lengths, **options})

    def test_explain_and_info(self):
        q, k, v = self.qkv()
        said = attn.explain(q, k, v, kernel="cpu_baseline")
        self.assertEqual(said["kernel"], "cpu_baseline")
        self.assertEqual(attn.explain(q, k, v, backend="reference")["kernel"], "reference")
        info = attn.info()
        self.assertEqual(info["version"], attn.__version__)
        self.assertIn("reference", [kernel["name"] for kernel in info["kernels"]])

    def test_threads(self):
        q, k, v = self.qkv(seqlen_q=60, seqlen_kv=80)
        want = attn.forward(q, k, v, causal=True)
        wrong = []

        def work():
            for _ in range(30):
                if not np.array_equal(attn.forward(q, k, v, causal=True), want):
                    wrong.append(1)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])

    def test_fork(self):
        q, k, v = self.qkv(seqlen_q=60, seqlen_kv=80)
        want = attn.forward(q, k, v)
        fork = multiprocessing.get_context("fork")
        plan = attn.Plan(q, k, v)

        def work():  # the parent's threads are not there
            raise SystemExit(not all(np.array_equal(call(q, k, v), want) for call in (attn.forward, plan)))
        child = fork.Process(target=work)
        child.start()
        child.join(60)
        self.assertEqual(child.exitcode, 0)


if __name__ == "__main__":
    unittest.main()
