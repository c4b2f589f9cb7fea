"""attn.onnx: the operator's rules written out in float64, the node cases of the package onnx where it is installed, and the custom
operator in onnxruntime where that is."""
import functools
import importlib.util
import itertools
import math
import os
import unittest

from support import Case, attn, ml_dtypes, np

import attn.onnx

# What the library does not compute, by the case's name.
REFUSED = {"test_attention_local_window_gqa_rank4_mask": "softmax_precision is DOUBLE"}


def written_out(q, k, v, mask=None, lengths=None, past=0, causal=False, left=-1, right=-1, softcap=0.0, scale=None):
    """(Y, scores by mode) of [B, H, S, D], float64, a row at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, heads, seqlen_q, dim = q.shape
    total = k.shape[2]
    out, modes = np.zeros((batch, heads, seqlen_q, v.shape[3])), np.zeros((4, batch, heads, seqlen_q, total))
    if mask is not None:
        mask = np.broadcast_to(mask, (batch, heads, seqlen_q, mask.shape[-1]))  # keys after the last dimension are not seen
    for b, h, i in itertools.product(range(batch), range(heads), range(seqlen_q)):
        kv = h // (heads // k.shape[1])
        raw = k[b, kv] @ q[b, h, i] * (scale or 1 / math.sqrt(dim))
        capped = softcap * np.tanh(raw / softcap) if softcap else raw
        place = i + (past if lengths is None else lengths[b] - seqlen_q)
        biased = capped.copy()
        for j in range(total):
            seen = (lengths is None or j < lengths[b]) and not (causal and j > place)
            seen = seen and (left < 0 or j >= place - left) and (right < 0 or j <= place + right)
            if mask is not None and seen:
                if j >= mask.shape[-1]:
                    seen = False
                elif mask.dtype == bool:
                    seen = mask[b, h, i, j]
                else:
                    biased[j] += mask[b, h, i, j]
            if not seen:
                biased[j] = -math.inf
        p = np.exp(biased - biased.max()) if np.isfinite(biased.max()) else np.zeros(total)
        p = p / p.sum() if p.sum() else p
        out[b, h, i] = p @ v[b, kv]
        modes[:, b, h, i] = raw, capped, biased, p
    return out, modes


@functools.cache
def node_cases():
    """(case, its Attention node, the node's attributes) of the package onnx; other cases have a function written out."""
    import warnings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other operators' cases
        from onnx import helper
        from onnx.backend.test.case.node import collect_testcases
        found = collect_testcases("Attention")
    nodes = [(case, case.model.graph.node) for case in found]
    return [(case, node[0], {a.name: helper.get_attribute_value(a) for a in node[0].attribute})
            for case, node in nodes if len(node) == 1 and node[0].op_type == "Attention"]


MASK_SHAPES = ((1,), (9,), (5, 1), (5, 9), (1, 9), (4, 5, 9), (2, 1, 1, 9), (2, 4, 5, 9), (1, 1, 5, 1), (1, 1, 1, 1), (5, 6), (2, 4, 5, 1),
               (0,), (5, 0), (3,))  # of [2, 4, 5, 9]


class Rules(Case):
    def test_offsets_windows_and_lengths(self):
        """Every combination of few and many keys, a past or lengths, causal, windows."""
        for seqlen_q, new, past, causal, left, right, lengths in itertools.product(
                (3, 7), (2, 3, 9), (0, 4), (0, 1), (-1, 0, 2), (-1, 0, 2), (False, True)):
            if past and lengths:
                continue
            q, k, v = (self.normal(2, h, s, 8) for h, s in ((4, seqlen_q), (2, past + new), (2, past + new)))
            n = np.array([1, past + new], np.int64) if lengths else None
            cut = (k[:, :, past:], v[:, :, past:], None, k[:, :, :past], v[:, :, :past]) if past else (k, v)
            with self.subTest(seqlen_q=seqlen_q, new=new, past=past, causal=causal, window=(left, right), lengths=lengths):
                got = attn.onnx.attention(q, *cut, nonpad_kv_seqlen=n, is_causal=causal, left_window_size=left,
                                          right_window_size=right)
                self.close(got[0], written_out(q, k, v, None, n, past, causal, left, right)[0])
                np.testing.assert_array_equal(got[1], k)
                np.testing.assert_array_equal(got[2], v)
                self.assertIsNone(got[3])

    def test_masks(self):
        q, k, v = self.normal(2, 4, 5, 8), self.normal(2, 2, 9, 8), self.normal(2, 2, 9, 6)
        n = np.array([4, 9], np.int64)
        for shape in MASK_SHAPES:
            for boolean, causal, lengths in itertools.product((False, True), (0, 1), (None, n)):
                mask = self.rng.random(shape) < 0.7 if boolean else self.normal(*shape)
                with self.subTest(shape=shape, boolean=boolean, causal=causal, lengths=lengths is not None):
                    got = attn.onnx.attention(q, k, v, mask, nonpad_kv_seqlen=lengths, is_causal=causal, softcap=1.5)
                    self.close(got[0], written_out(q, k, v, mask, lengths, 0, causal, softcap=1.5)[0])

    def test_scores(self):
        q, k, v = self.normal(2, 4, 5, 8), self.normal(2, 2, 9, 8), self.normal(2, 2, 9, 6)
        mask = self.rng.random((5, 9)) < 0.5
        mask[2] = False
        for mode in range(4):
            got = attn.onnx.attention(q, k, v, mask, is_causal=1, softcap=2.0, scale=0.3, qk_matmul_output=True,
                                      qk_matmul_output_mode=mode)
            self.close(got[3], written_out(q, k, v, mask, causal=True, softcap=2.0, scale=0.3)[1][mode])

    def test_probabilities_of_any_scores(self):
        """Rows of mode 3 add up to 1 whatever their scores are: masks at the type's least number, scores of 1e6, mixed, and rows of 0
        where nothing is seen."""
        for dtype, step in (np.float32, 1e-6), (np.float16, 2**-11), (ml_dtypes.bfloat16, 2**-8):
            least = float(ml_dtypes.finfo(dtype).min)
            q, k, v = (self.normal(2, h, s, 8, dtype=dtype) for h, s in ((4, 7), (2, 9), (2, 9)))
            mask = np.zeros((7, 9), np.float32)
            mask[0], mask[1], mask[2, ::2] = least, -math.inf, least
            mask[3], mask[4] = 60000, self.rng.permutation([least, -math.inf, 0, 1, 2, 3, -60000, -5, 4])
            mask[5, 4:], mask[6, :8] = least, -math.inf
            large = q * dtype(30 if dtype == np.float16 else 1e4)
            for queries, softcap in (q, 0.0), (large, 0.0), (large, 2.0):
                with self.subTest(dtype=dtype.__name__, large=queries is large, softcap=softcap):
                    y, _, _, p = attn.onnx.attention(queries, k, v, mask.astype(dtype), softcap=softcap, qk_matmul_output=True,
                                                     qk_matmul_output_mode=3)
                    p = p.astype(np.float64)
                    sums = np.ones((2, 4, 7))
                    sums[:, :, 1] = 0
                    self.close(p.sum(-1), sums, 9 * step)
                    if queries is q and dtype != np.float16:  # whose least number leaves bits of a score
                        self.close(p[:, :, 0], np.full((2, 4, 9), 1 / 9), step)
                    if queries is q or softcap:  # rounding of large scores is the kernel's own
                        want = p @ np.repeat(v.astype(np.float64), 2, axis=1)
                        self.close(np.delete(y, 3, axis=2), np.delete(want, 3, axis=2), 40 * step)

    def test_a_mask_of_another_type_keeps_its_range(self):
        q, k, v = (self.normal(1, 2, s, 8, dtype=np.float16) for s in (3, 5, 5))
        mask = np.full((3, 5), np.finfo(np.float32).min, np.float32)
        mask[1, 2] = 1e5
        for backend in "reference", "cpu":
            self.close(attn.onnx.attention(q, k, v, mask, backend=backend)[0], written_out(q, k, v, mask)[0], 2e-3)

    def test_hidden_form(self):
        q, k, v = self.normal(2, 5, 4 * 8), self.normal(2, 9, 2 * 8), self.normal(2, 9, 2 * 6)
        got = attn.onnx.attention(q, k, v, is_causal=1, q_num_heads=4, kv_num_heads=2)
        heads = [x.reshape(2, x.shape[1], h, -1).swapaxes(1, 2) for x, h in ((q, 4), (k, 2), (v, 2))]
        want = written_out(*heads, causal=True)[0]
        self.close(got[0], want.swapaxes(1, 2).reshape(2, 5, -1))
        np.testing.assert_array_equal(got[1], heads[1])

    def test_refused(self):
        q, k, v = self.normal(2, 4, 5, 8), self.normal(2, 2, 9, 8), self.normal(2, 2, 9, 8)
        refuses = lambda error, words, *a, **o: self.refuses(error, words, attn.onnx.attention, *a, **o)
        refuses(attn.Unsupported, ["Q is float64", "accepted: float32"], q.astype(np.float64), k, v)
        refuses(attn.Unsupported, ["attn_mask is int32", "bool"], q, k, v, np.ones((5, 9), np.int32))
        refuses(attn.Unsupported, "softmax_precision is DOUBLE", q, k, v, softmax_precision=11)
        refuses(attn.InvalidArgument, ["K has shape [2, 9, 16]", "as many as Q's"], q, k.reshape(2, 9, 16), v)
        refuses(attn.InvalidArgument, ["q_num_heads is None", "[2, 5, 32]"], q.reshape(2, 5, 32), k.reshape(2, 9, 16), v.reshape(2, 9, 16))
        refuses(attn.InvalidArgument, "one of past_key and past_value", q, k, v, None, k)
        refuses(attn.InvalidArgument, "nonpad_kv_seqlen is given", q, k, v, None, k, v, np.array([3, 4]))
        refuses(attn.InvalidArgument, "left_window_size is -2", q, k, v, left_window_size=-2)
        refuses(attn.InvalidArgument, "qk_matmul_output_mode is 4", q, k, v, qk_matmul_output_mode=4)
        refuses(attn.InvalidArgument, "Q is a list", [1], k, v)
        refuses(attn.InvalidArgument, ["attn_mask has shape [5, 10]", "[2, 4, 5, 9]"], q, k, v, np.ones((5, 10), np.float32))


@unittest.skipUnless(importlib.util.find_spec("onnx"), "onnx is not installed")
@unittest.skipIf("asan" in os.environ.get("LD_PRELOAD", ""), "the cases take long under the address sanitizer")
class NodeCases(Case):
    """docs/onnx.md has the table."""

    def test_all(self):
        passed, refused = 0, {}
        for case, node, attributes in node_cases():
            for inputs, outputs in case.data_sets:
                given = iter(inputs)
                arguments = [next(given) if name else None for name in node.input]
                scores = len(node.output) > 3 and bool(node.output[3])
                with self.subTest(case.name):
                    try:
                        results = attn.onnx.attention(*arguments, **attributes, qk_matmul_output=scores)
                    except attn.Error as error:
                        refused[case.name] = str(error)
                        continue
                    for got, want in zip((r for r, name in zip(results, node.output) if name), outputs, strict=True):
                        self.assertEqual((got.dtype, got.shape), (want.dtype, want.shape))
                        # Two steps of bf16, as onnx's own runner allows.
                        relative = max(case.rtol, 2**-6 if want.dtype == ml_dtypes.bfloat16 else 0)
                        self.close(got, want, case.atol, relative)
                    passed += 1
        self.assertEqual(set(refused), set(REFUSED), refused)
        for name, words in REFUSED.items():
            self.assertIn(words, refused.get(name, ""))
        self.assertGreaterEqual(passed, 80)
        print(f"Attention node cases: {passed} passed, {len(refused)} refused")


@unittest.skipUnless(importlib.util.find_spec("onnxruntime"), "onnxruntime is not installed")
@unittest.skipIf("asan" in os.environ.get("LD_PRELOAD", ""), "onnxruntime is not built for the address sanitizer")
class Onnxruntime(Case):
    """The library of custom operators, in onnxruntime on the host."""

    def session(self, model, ours=True):
        import onnxruntime
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # errors are raised
        if ours:
            options.register_custom_ops_library(attn.onnx.library())
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def model(self, nodes, inputs, outputs, initializers=(), opset=24):
        from onnx import helper
        graph = helper.make_graph(nodes, "graph", inputs, outputs, initializers)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)

    def block(self):
        """A transformer's block as exporters write one: projections, attention in the hidden form, a residual."""
        from onnx import TensorProto, helper, numpy_helper
        nodes, weights = [], []
        for name, size in ("Q", 64), ("K", 32), ("V", 32), ("O", 64):
            weights.append(numpy_helper.from_array(self.normal(64, size) / np.float32(8), f"W{name}"))
        nodes += [helper.make_node("MatMul", ["X", f"W{n}"], [n]) for n in "QKV"]
        nodes.append(helper.make_node("Attention", ["Q", "K", "V", "mask"], ["A"], q_num_heads=4, kv_num_heads=2, is_causal=1))
        nodes.append(helper.make_node("MatMul", ["A", "WO"], ["B"]))
        nodes.append(helper.make_node("Add", ["X", "B"], ["Y"]))
        tensor = helper.make_tensor_value_info
        return self.model(nodes, [tensor("X", TensorProto.FLOAT, ["B", "S", 64]), tensor("mask", TensorProto.BOOL, ["B", 1, "S", "S"])],
                          [tensor("Y", TensorProto.FLOAT, ["B", "S", 64])], weights)

    def test_a_model(self):
        plain = self.block()
        ours = type(plain)()
        ours.CopyFrom(plain)
        self.assertEqual(attn.onnx.use_libattn(ours), 1)
        self.assertEqual(attn.onnx.use_libattn(ours), 0)
        with_ours, without = self.session(ours), self.session(plain, False)
        for batch, length in (1, 1), (2, 9), (3, 40), (2, 9):
            x = self.normal(batch, length, 64)
            mask = self.rng.random((batch, 1, length, length)) < 0.7
            mask[..., 0] = True
            got, want = (s.run(None, {"X": x, "mask": mask})[0] for s in (with_ours, without))
            self.close(got, want, 1e-5)

    def test_refused(self):
        from onnx import TensorProto, helper
        tensor = helper.make_tensor_value_info
        shapes = {"Q": [2, 4, 9, 16], "K": [2, 2, 13, 16], "V": [2, 2, 13, 16]}
        inputs = [tensor(name, TensorProto.FLOAT, ["B", "H", "S", 16]) for name in shapes]
        arrays = {name: self.normal(*shape) for name, shape in shapes.items()}
        for words, attributes, change in (("softmax_precision is DOUBLE", {"softmax_precision": 11}, {}),
                                          ("heads_q is 3; accepted: multiples of heads_kv = 2", {}, {"Q": self.normal(2, 3, 9, 16)}),
                                          ("V has shape [2, 2, 12, 16]", {}, {"V": self.normal(2, 2, 12, 16)})):
            node = helper.make_node("Attention", list(shapes), ["Y"], domain="libattn", **attributes)
            made = self.model([node], inputs, [tensor("Y", TensorProto.FLOAT, None)])
            made.opset_import.add(domain="libattn", version=1)
            self.refuses(Exception, ["libattn: ", words], self.session(made).run, None, {**arrays, **change})
        self.assertEqual(self.session(made).run(None, arrays)[0].shape, (2, 4, 9, 16))

    def test_shorter_masks(self):
        from onnx import TensorProto, helper
        tensor = helper.make_tensor_value_info
        arrays = {"Q": self.normal(2, 4, 5, 8), "K": self.normal(2, 2, 9, 8), "V": self.normal(2, 2, 9, 6)}
        for boolean in False, True:
            node = helper.make_node("Attention", [*arrays, "M"], ["Y"], domain="libattn")
            inputs = [tensor(name, TensorProto.FLOAT, x.shape) for name, x in arrays.items()]
            mask_type = TensorProto.BOOL if boolean else TensorProto.FLOAT
            for shape in MASK_SHAPES:
                made = self.model([node], [*inputs, tensor("M", mask_type, shape)], [tensor("Y", TensorProto.FLOAT, None)])
                made.opset_import.add(domain="libattn", version=1)
                mask = self.rng.random(shape) < 0.7 if boolean else self.normal(*shape)
                with self.subTest(shape=shape, boolean=boolean):
                    got = self.session(made).run(None, {**arrays, "M": mask})[0]
                    self.close(got, written_out(*arrays.values(), mask)[0])

    def test_node_cases(self):
        """Every Attention node case in the custom operator, but those that use_libattn() leaves alone."""
        passed, left = 0, []
        for case, node, _ in node_cases():
            model = type(case.model)()
            model.CopyFrom(case.model)
            inputs = case.data_sets[0][0]
            # onnxruntime's Python takes no arrays of bf16.
            if not attn.onnx.use_libattn(model) or any(x.dtype == ml_dtypes.bfloat16 for x in inputs):
                left.append(case.name)
                continue
            model.ir_version = min(model.ir_version, 10)
            for entry in model.opset_import:
                entry.version = min(entry.version, 24)  # no node of ONNX's own is left
            with self.subTest(case.name):
                session = self.session(model)
                for inputs, outputs in case.data_sets:
                    results = session.run(None, dict(zip((x.name for x in model.graph.input), inputs)))
                    for got, want in zip(results, outputs, strict=True):
                        self.assertEqual((got.dtype, got.shape), (want.dtype, want.shape))
                        self.close(got, want, case.atol, case.rtol)
                    passed += 1
        print(f"Attention node cases in onnxruntime: {passed} passed, {len(left)} left: {left}")
        self.assertGreaterEqual(passed, 60)


if __name__ == "__main__":
    unittest.main()
