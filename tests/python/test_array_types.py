"""Arrays of types that attn does not read, wherever arrays come in: the sentence names argument, type and what is accepted."""
import array
import unittest

from support import Case, attn, ml_dtypes, np

import attn.flash
import attn.onnx


def odd_types(x):
    """(what the sentence calls it, x in that type)"""
    x = np.zeros(x.shape, np.float32)
    yield "complex64", x.astype(np.complex64)
    yield "int16", x.astype(np.int16)
    yield "float128" if np.dtype(np.longdouble).itemsize == 16 else "longdouble", x.astype(np.longdouble)
    yield "object", x.astype(object)
    yield "<U5", x.astype("U5")
    yield "|S5", x.astype("S5")
    yield "datetime64[s]", np.zeros(x.shape, "M8[s]")
    yield "timedelta64[s]", np.zeros(x.shape, "m8[s]")
    yield "[('a', '<f4'), ('b', '<f4')]", np.zeros(x.shape, [("a", "f4"), ("b", "f4")])
    yield "|V4", np.zeros(x.shape, "V4")
    yield ">f4 (not this machine's byte order)", x.astype(">f4")
    yield ">i4 (not this machine's byte order)", x.astype(">i4")
    for name in ("float8_e4m3b11fnuz", "float8_e8m0fnu", "float8_e3m4", "float4_e2m1fn", "float6_e2m3fn", "int4", "uint4", "int2"):
        if hasattr(ml_dtypes, name):
            yield name, np.zeros(x.shape, getattr(ml_dtypes, name))


def no_arrays(x):
    """(what the sentence calls it, it)"""
    yield "list", x.tolist()
    yield "tuple", (x,)
    yield "float", 1.5
    yield "str", "q"
    yield "memoryview", memoryview(x)
    yield "array", array.array("f", [1, 2])
    yield "float32", np.float32(1)
    yield "type", type(x)


class Everywhere(Case):
    def setUp(self):
        super().setUp()
        self.q, self.k, self.v = self.qkv(batch=2, seqlen_q=9, seqlen_kv=13, heads=4, heads_kv=2, dim=32)

    def calls(self):
        """(argument, a good value, call of one value in its place)"""
        q, k, v = self.q, self.k, self.v
        i32, f32 = lambda *x: np.array(x, np.int32), lambda *shape: np.ones(shape, np.float32)
        packed = {"cu_seqlens_q": i32(0, 4, 9)}
        arrays = {"bias": self.normal(2, 4, 9, 13), "alibi_slopes": f32(4), "sinks": f32(4), "seqlens_kv": i32(3, 13), "q_descale": f32(1),
                  "k_descale": f32(1), "v_descale": f32(2, 2), "out_scale": f32(1), "tree": np.zeros((2, 9, 2), np.uint64)}
        functions = {"forward": attn.forward, "Plan": attn.Plan, "check": attn.check, "explain": attn.explain}
        for name, call in functions.items():
            yield "q", q, lambda x, call=call: call(x, k, v)
            yield "k", k, lambda x, call=call: call(q, x, v)
            yield "v", v, lambda x, call=call: call(q, k, x)
            for argument, good in arrays.items():
                more = {"out_scale": {"out_dtype": "f8_e4m3fn"}, "tree": {"tree_keys": 5}}.get(argument, {})
                yield argument, good, lambda x, call=call, argument=argument, more=more: call(q, k, v, **{argument: x}, **more)
        yield "out", np.empty_like(q), lambda x: attn.forward(q, k, v, out=x)
        yield "k[1]", k, lambda x: attn.forward(q, [k, x], [v, v])
        yield "v[0]", v, lambda x: attn.forward(q, [k, k], [x, v])
        yield "seqlens_kv[1]", i32(1, 2), lambda x: attn.forward(q, [k, k], [v, v], seqlens_kv=[None, x])
        yield "cu_seqlens_q", i32(0, 4, 9), lambda x: attn.forward(q[0], k, v, cu_seqlens_q=x)
        yield "cu_seqlens_kv", i32(0, 4, 13), lambda x: attn.forward(q[0], k[0], v[0], cu_seqlens_kv=x, **packed)
        yield "block_table", i32(0, 1).reshape(2, 1), lambda x: attn.forward(q, k, v, block_table=x)
        yield "bias_slopes", f32(4), lambda x: attn.forward(q, k, v, bias=arrays["bias"], bias_slopes=x)
        codes, scales = attn.quantize(k, "i8")
        yield "k_scale", scales, lambda x: attn.forward(q, codes, v, k_scale=x)
        plan = attn.Plan(q, k, v)
        yield "q", q, lambda x: plan(x, k, v)
        yield "out", np.empty_like(q), lambda x: plan(q, k, v, out=x)
        out, lse = attn.forward(q, k, v, return_lse=True)
        yield "parts[0][0]", out, lambda x: attn.merge([(x, lse)])
        yield "parts[1][1]", lse, lambda x: attn.merge([(out, lse), (out, x)])
        yield "x", k, lambda x: attn.quantize(x, "f8_e4m3fn")
        append = lambda **o: attn.kv_append(**{"k_new": k[:, :2], "v_new": v[:, :2], "k_cache": k.copy(), "v_cache": v.copy(),
                                               "seqlens": i32(1, 2), **o})
        turn = {"rotary_cos": f32(13, 4), "rotary_sin": f32(13, 4)}
        new = {"k_new": (k[:, :2], {}), "v_new": (v[:, :2], {}), "k_cache": (k, {}), "v_cache": (v, {}), "seqlens": (i32(1, 2), {}),
               "k_descale": (f32(1), {}), "rotary_cos": (f32(13, 4), turn), "rotary_sin": (f32(13, 4), turn), "q": (q[:, :2], turn),
               "q_out": (q[:, :2].copy(), {**turn, "q": q[:, :2]}), "seqlens_out": (i32(1, 2), {}), "block_table": (i32(0, 1)[:, None], {})}
        for name, (good, more) in new.items():
            yield name, good, lambda x, name=name, more=more: append(**{**more, name: x})
        pages = self.normal(6, 4, 2, 32)
        roll = {"k_recent": pages, "v_recent": pages, "recent_table": i32(0, 1, 2, 3).reshape(2, 2), "recent_seqlens": i32(5, 6),
                "k_old": k, "v_old": v, "old_seqlens": i32(1, 2)}
        for name, good in roll.items():
            yield name, good, lambda x, name=name: attn.kv_roll(*[x if n == name else g.copy() for n, g in roll.items()], keep=1)
        yield "dense", np.ones((9, 13), bool), attn.BlockMask.from_dense
        yield "intervals", np.zeros((13, 1, 2), np.int32), lambda x: attn.BlockMask.from_intervals(x, 9)
        kinds, index = np.full((1, 1), 3, np.uint8), np.zeros((1, 1), np.int32)
        bits = np.ones((1, 128, 128), bool)
        yield "kinds", kinds, lambda x: attn.BlockMask.from_kinds(x, 9, 13, index=index, bits=bits)
        yield "index", index, lambda x: attn.BlockMask.from_kinds(kinds, 9, 13, index=x, bits=bits)
        yield "bits", bits, lambda x: attn.BlockMask.from_kinds(kinds, 9, 13, index=index, bits=x)

        Q, K, V = (x.swapaxes(1, 2).copy() for x in (q, k, v))
        onnx = {"Q": Q, "K": K, "V": V, "attn_mask": np.ones((9, 13), bool)}
        for name, good in onnx.items():
            yield name, good, lambda x, name=name: attn.onnx.attention(**{**onnx, name: x})
        for name, good in ("past_key", K), ("past_value", V):
            yield name, good, lambda x, name=name: attn.onnx.attention(Q, K, V, **{"past_key": K, "past_value": V, name: x})
        yield "nonpad_kv_seqlen", np.array([3, 13]), lambda x: attn.onnx.attention(Q, K, V, nonpad_kv_seqlen=x)

        flash = attn.flash
        cu_q, cu_k = i32(0, 4, 9), i32(0, 4, 13)
        for name, good in {"q": q, "k": k, "v": v, "alibi_slopes": f32(4), "q_descale": f32(1), "k_descale": f32(2, 2), "v_descale": f32(1),
                           "out": np.empty_like(q)}.items():
            yield name, good, lambda x, name=name: flash.flash_attn_func(**{"q": q, "k": k, "v": v, name: x})
        varlen = {"q": q[0], "k": k[0], "v": v[0], "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 9, "max_seqlen_k": 13}
        for name, good in {**varlen, "seqused_q": i32(2, 3), "seqused_k": i32(2, 3), "out": np.empty_like(q[0])}.items():
            if not name.startswith("max"):
                yield name, good, lambda x, name=name: flash.flash_attn_varlen_func(**{**varlen, name: x})
                yield name, good, lambda x, name=name: flash.flash_attn_varlen_func(
                    **{**varlen, "seqused_q": i32(2, 3), "seqused_k": i32(2, 3), name: x})
        yield "block_table", i32(0, 1).reshape(2, 1), lambda x: flash.flash_attn_varlen_func(**{**varlen, "k": k, "v": v, "block_table": x})
        cache = lambda: {"q": q, "k_cache": k.copy(), "v_cache": v.copy(), "cache_seqlens": i32(3, 4), "k": k[:, :2], "v": v[:, :2]}
        names = {**cache(), "cache_leftpad": i32(0, 1), "cache_batch_idx": i32(1, 0), "block_table": i32(0, 1)[:, None],
                 "page_table": i32(0, 1)[:, None], "rotary_cos": f32(13, 4), "rotary_sin": f32(13, 4), "rotary_seqlens": i32(1, 2),
                 "k_descale": f32(1), "alibi_slopes": f32(4)}
        for name, good in names.items():
            more = turn if name.startswith("rotary") else {}
            yield name, good, lambda x, name=name, more=more: flash.flash_attn_with_kvcache(**{**cache(), **more, name: x})
        yield "cu_seqlens_q", cu_q, lambda x: flash.flash_attn_with_kvcache(**{**cache(), "q": q[0], "cu_seqlens_q": x})
        yield "cu_seqlens_k_new", cu_q, lambda x: flash.flash_attn_with_kvcache(**{**cache(), "k": k[0, :9], "v": v[0, :9],
                                                                                   "cu_seqlens_k_new": x})

    def names(self, argument, type_name, call, value):
        """The sentence begins with the argument, has its type and what is accepted, and is attn.InvalidArgument or TypeError."""
        with self.subTest(argument=argument, type=type_name):
            said = self.refuses((attn.Error, TypeError), [f"{argument} is", type_name, "; accepted"], call, value)
            self.assertTrue(str(said).startswith(argument), said)

    def test_types(self):
        for argument, good, call in self.calls():
            with self.subTest(argument=argument, good=True):
                call(good.copy())
            for name, value in odd_types(good):
                self.names(argument, name, call, value)

    def test_types_that_other_arguments_have(self):
        """A type that attn reads is refused by the argument's name too, not by that of a field of attn.h."""
        q, k, v = self.q, self.k, self.v
        i32 = lambda *x: np.array(x, np.int32)
        out, lse = attn.forward(q, k, v, return_lse=True)
        calls = {"q": (q, lambda x: attn.forward(x, k, v), "f64 i8 u8 i32 bool"),
                 "bias": (self.normal(2, 4, 9, 13), lambda x: attn.forward(q, k, v, bias=x), "f64 i8 f8_e4m3fn bf16 u8 i32 bool"),
                 "out": (q, lambda x: attn.forward(q, k, v, out=x), "i8 u8 i32 bool"),
                 "parts[0][0]": (out, lambda x: attn.merge([(x, lse)]), "f64 i8 f8_e4m3fn u8 i32 bool"),
                 "x": (k, lambda x: attn.quantize(x, "q8_0"), "f64 i8 f8_e4m3fn u8 i32 bool"),
                 "k_new": (k, lambda x: attn.kv_append(x, x.copy(), k.copy(), v.copy(), i32(0, 0)), "f64 i8 f8_e4m3fn u8 i32 bool"),
                 "k_recent": (self.normal(6, 4, 2, 32), lambda x: attn.kv_roll(x, x.copy(), i32(0, 1).reshape(2, 1), i32(1, 1), k.copy(), v.copy(),
                                                                               i32(1, 2), keep=1), "f64 i8 f8_e4m3fn u8 i32 bool")}
        names = {"f64": np.float64, "i8": np.int8, "u8": np.uint8, "i32": np.int32, "bool": bool, "f8_e4m3fn": ml_dtypes.float8_e4m3fn,
                 "bf16": ml_dtypes.bfloat16}
        for argument, (good, call, refused) in calls.items():
            for name in refused.split():
                self.names(argument, f"{name}; accepted: f32, f16", call, np.zeros(good.shape, names[name]))
        for name in "i8", "q8_0", "u8", "i32":
            self.names("out_dtype", name, lambda x: attn.forward(q, k, v, out_dtype=x), name)
        for name in "i8", "f64", "f8_e4m3fn":
            self.names("out_dtype", name, lambda x: attn.merge([(out, lse)], out_dtype=x), name)

    def test_lists_of_arrays_and_numbers(self):
        out, lse = attn.forward(self.q, self.k, self.v, return_lse=True)
        for words, parts in (("parts is a NoneType", None), ("parts[0] is a ndarray", [out]), ("parts[1] is a list of 3", [(out, lse), [out, lse, lse]]),
                             ("parts[0] is a float", [1.0])):
            self.refuses(TypeError, [words, "(out, lse)"], attn.merge, parts)
        np.testing.assert_array_equal(attn.merge(zip([out], [lse]))[0], out)
        for words, lengths in (("lengths is a NoneType", None), ("lengths is a int", 5), ("lengths[1] is a float", [3, 1.5]),
                               ("lengths[0] is a MaskedConstant", np.ma.masked_array([3, 4], [True, False]))):
            self.refuses(TypeError, [words, "accepted"], attn.BlockMask.from_documents, lengths)

    def test_masked_arrays(self):
        for argument, good, call in self.calls():
            self.names(argument, "a MaskedArray; accepted: arrays without a mask", call, np.ma.masked_array(good, good > 0))
            self.names(argument, "a MaskedArray", call, np.ma.masked_array(good))

    def test_no_arrays(self):
        for argument, good, call in self.calls():
            for name, value in no_arrays(good):
                self.names(argument, f"a {name}", call, value)

    def test_subclasses_and_read_only_arrays_are_read(self):
        inputs = [x for x in self.calls()]
        subclass = type("Own", (np.ndarray,), {})
        for argument, good, call in inputs:
            with self.subTest(argument):
                call(good.copy().view(subclass))
                fixed = good.copy()
                fixed.flags.writeable = False
                try:
                    call(fixed)
                except attn.InvalidArgument as error:  # what is written
                    self.assertEqual(str(error), f"{argument} is read-only; accepted: an array that can be written")


if __name__ == "__main__":
    unittest.main()
