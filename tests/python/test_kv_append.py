"""kv_append() beside the same in NumPy: positions and pages by indexing, rotation in float64, conversions by ml_dtypes."""
import itertools
import unittest

from support import Case, attn, ml_dtypes, np, softmax_attention
from test_frameworks import needs

TYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f8_e4m3fn": ml_dtypes.float8_e4m3fn,
         "f8_e5m2": ml_dtypes.float8_e5m2, "f8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz}


def rotated(x, positions, cos, sin, interleaved):
    """x [tokens, H, D] in float64."""
    x = np.array(x, np.float64)
    r = 2 * cos.shape[1]
    first, second = (slice(0, r, 2), slice(1, r, 2)) if interleaved else (slice(0, r // 2), slice(r // 2, r))
    c, s = (t.astype(np.float64)[positions][:, None] for t in (cos, sin))
    a, b = x[..., first].copy(), x[..., second].copy()
    x[..., first], x[..., second] = a * c - b * s, a * s + b * c
    return x


def same(got, want):
    """Bit for bit, but for the sign and payload of NaN."""
    got, want = np.asarray(got), np.asarray(want)
    nan = np.isnan(want.astype(np.float64))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float64)), nan)
    bits = f"u{got.dtype.itemsize}"
    np.testing.assert_array_equal(np.where(nan, 0, got.view(bits)), np.where(nan, 0, want.view(bits)))


class KvAppend(Case):
    def tables(self, positions, half):
        angle = np.outer(np.arange(positions), 10000.0 ** (-np.arange(half) / half))
        return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    def stored(self, x, descale, dtype):
        """x / descale, within the range of fp8."""
        x = np.asarray(x, np.float64) / descale
        if np.dtype(dtype).itemsize == 1:
            top = float(ml_dtypes.finfo(dtype).max)
            x = np.clip(x, -top, top)
        return x.astype(dtype)

    def test_types_and_layouts(self):
        lengths, table = np.array([5, 0, 9], np.int32), np.array([[3, 7], [8, 1], [0, 5]], np.int32)
        for name, dtype in TYPES.items():
            for new_type in np.float32, np.float16, ml_dtypes.bfloat16:
                for paged in False, True:
                    for packed in False, True:
                        for backend in "reference", "cpu":
                            with self.subTest(name, new=new_type, paged=paged, packed=packed, backend=backend):
                                self.one(dtype, new_type, lengths, table if paged else None, packed, backend)

    def one(self, dtype, new_type, lengths, table, packed, backend):
        added = [4, 0, 2] if packed else [3] * 3
        k_new, v_new, q = ([self.normal(n, heads, dim, dtype=new_type) for n in added]
                           for heads, dim in ((2, 16), (2, 24), (4, 16)))
        shape = (9, 6, 2) if table is not None else (3, 12, 2)
        k, v = self.normal(*shape, 16).astype(dtype), self.normal(*shape, 24).astype(dtype)
        want_k, want_v = k.copy(), v.copy()
        cos, sin = self.tables(13, 5)
        k_descale, v_descale = np.array([0.5], np.float32), self.rng.uniform(0.5, 2, (3, 2)).astype(np.float32)
        interleaved = bool(self.rng.integers(2))
        want_q = []
        for b, length in enumerate(lengths):
            at = length + np.arange(added[b])
            place = (table[b][at // 6], at % 6) if table is not None else (b, at)
            want_k[place] = self.stored(rotated(k_new[b], at, cos, sin, interleaved), 0.5, dtype)
            want_v[place] = self.stored(v_new[b], v_descale[b][:, None].astype(np.float64), dtype)
            want_q.append(rotated(q[b], at, cos, sin, interleaved).astype(new_type))
        options = {"block_table": table, "k_descale": k_descale, "v_descale": v_descale, "rotary_cos": cos,
                   "rotary_sin": sin, "rotary_interleaved": interleaved, "advance_seqlens": True, "backend": backend}
        join = np.concatenate if packed else np.stack
        if packed:
            options["cu_seqlens_new"] = np.cumsum([0, *added]).astype(np.int32)
        after = lengths.copy()
        q_out = attn.kv_append(join(k_new), join(v_new), k, v, after, q=join(q), **options)
        np.testing.assert_array_equal(after, lengths + added)
        same(k, want_k)
        same(v, want_v)
        same(q_out, join(want_q))

    def test_slots(self):
        """Each token to the page and place that its slot says, negative ones nowhere; all types of caches, [T, ...] and [B, T, ...]."""
        slots = self.rng.permutation(9 * 6)[:8].astype(np.int64)
        slots[[1, 6]] = -1, -7
        for (name, dtype), backend, flat in itertools.product(TYPES.items(), ("reference", "cpu"), (False, True)):
            with self.subTest(name, backend=backend, flat=flat):
                k_new, v_new = self.normal(2, 4, 2, 16, dtype=ml_dtypes.bfloat16), self.normal(2, 4, 2, 24, dtype=ml_dtypes.bfloat16)
                k, v = self.normal(9, 6, 2, 16).astype(dtype), self.normal(9, 6, 2, 24).astype(dtype)
                want_k, want_v = k.copy(), v.copy()
                k_descale, v_descale = np.array([0.5], np.float32), self.rng.uniform(0.5, 2, (1 if flat else 2, 2)).astype(np.float32)
                for n, slot in enumerate(slots):
                    if slot >= 0:
                        place, b = (slot // 6, slot % 6), n // 4
                        want_k[place] = self.stored(k_new[b, n % 4], 0.5, dtype)
                        want_v[place] = self.stored(v_new[b, n % 4], v_descale[0 if flat else b][:, None].astype(np.float64), dtype)
                if flat:
                    k_new, v_new = k_new.reshape(8, 2, 16), v_new.reshape(8, 2, 24)
                attn.kv_append(k_new, v_new, k, v, slot_mapping=slots if flat else slots.reshape(2, 4), k_descale=k_descale,
                               v_descale=v_descale, backend=backend)
                same(k, want_k)
                same(v, want_v)

    def test_descales_that_repeat(self):
        """[B, Hkv] with strides of 0, as engines expand one number, is that number, in kv_append and forward."""
        k_new, v_new, q = self.normal(3, 2, 2, 16), self.normal(3, 2, 2, 16), self.normal(3, 2, 4, 16)
        made = []
        for repeat in (lambda x: x), lambda x: np.broadcast_to(x, (3, 2)):
            scales = {"k_descale": repeat(np.array([0.5], np.float32)), "v_descale": repeat(np.array([2], np.float32))}
            k, v = (np.zeros((3, 4, 2, 16), ml_dtypes.float8_e4m3fn) for _ in range(2))
            attn.kv_append(k_new, v_new, k, v, np.array([0, 1, 2], np.int32), **scales)
            self.assertTrue((k[0, 0] == (k_new[0, 0] / 0.5).astype(k.dtype)).all())
            made.append((k, v, attn.forward(q, k, v, **scales)))
        for a, b in zip(*made):
            np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32))
        ramp = np.broadcast_to(np.array([1, 2], np.float32), (3, 2))  # one for each head: neither [1] nor in memory
        self.refuses(ValueError, ["k_descale is not contiguous"], attn.forward, q, k, v, k_descale=ramp)

    def test_slots_refused(self):
        k, cache, slots = self.normal(8, 2, 16), np.zeros((9, 6, 2, 16), np.float32), np.arange(8)
        run = lambda **options: attn.kv_append(k, k, cache, cache.copy(), **{"slot_mapping": slots, **options})
        self.refuses(ValueError, ["slot_mapping[0, 7] is 54", "up to 53"], run, slot_mapping=slots + 47)
        self.refuses(ValueError, ["slot_mapping is i32", "i64"], run, slot_mapping=slots.astype(np.int32))
        self.refuses(ValueError, ["slot_mapping has shape [7]", "[T]"], run, slot_mapping=slots[:7])
        for name in "seqlens", "block_table", "seqlens_out":
            self.refuses(ValueError, [f"{name} is given", "accepted with slot_mapping: None"], run, **{name: np.zeros(1, np.int32)})
        self.refuses(ValueError, "advance_seqlens is True", run, advance_seqlens=True)
        self.refuses(ValueError, ["rotary_dim is 16", "has_slots"], run, rotary_cos=self.normal(9, 8), rotary_sin=self.normal(9, 8))
        self.assertTrue((cache == 0).all())

    def test_rotation_by_complex_numbers(self):
        """Pairs as complex numbers times exp(i angle), in both orders of pairs, on all of a head and on part of it."""
        for part in 16, 12, 2:
            angle = self.rng.uniform(-9, 9, (20, part // 2))
            cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
            k, q = self.normal(2, 3, 2, 16), self.normal(2, 3, 4, 16)
            lengths = np.array([0, 16], np.int32)
            for interleaved in False, True:
                with self.subTest(part=part, interleaved=interleaved):
                    cache = np.zeros((2, 20, 2, 16), np.float32)
                    got_q = attn.kv_append(k, k, cache, cache.copy(), lengths, q=q, rotary_cos=cos, rotary_sin=sin,
                                           rotary_interleaved=interleaved)
                    for b, at in enumerate(lengths):
                        turn = np.exp(1j * angle[at:at + 3])[:, None]
                        for x, got in (k[b], cache[b, at:at + 3]), (q[b], got_q[b]):
                            want = x.astype(np.float64)
                            if interleaved:
                                pairs = (want[..., :part:2] + 1j * want[..., 1:part:2]) * turn
                                want[..., :part:2], want[..., 1:part:2] = pairs.real, pairs.imag
                            else:
                                pairs = (want[..., :part // 2] + 1j * want[..., part // 2:part]) * turn
                                want[..., :part] = np.concatenate([pairs.real, pairs.imag], axis=-1)
                            self.close(got, want, 1e-6)

    def test_layers_with_the_same_lengths(self):
        """All but the last leave the lengths as they are and attend with those that come out."""
        lengths, after = np.array([3, 0, 7], np.int32), np.full(3, -1, np.int32)
        table = np.array([[0, 5], [2, 1], [4, 3]], np.int32)
        caches = np.zeros((3, 2, 6, 4, 2, 16), np.float32)
        caches[:] = self.normal(*caches.shape)
        for step in range(2):
            before = lengths.copy()
            for layer, (k_pages, v_pages) in enumerate(caches):
                k, v, q = self.normal(3, 1, 2, 16), self.normal(3, 1, 2, 16), self.normal(3, 1, 4, 16)
                last = layer == len(caches) - 1
                options = {"advance_seqlens": True} if last else {"seqlens_out": after}
                attn.kv_append(k, v, k_pages, v_pages, lengths, block_table=table, **options)
                np.testing.assert_array_equal(lengths if last else after, np.minimum(before + 1, 8))
                if not last:
                    np.testing.assert_array_equal(lengths, before)
                got = attn.forward(q, k_pages, v_pages, block_table=table, seqlens_kv=lengths if last else after)
                for b, n in enumerate(before):
                    whole_k, whole_v = (pages[table[b]].reshape(8, 2, 16)[:n + 1] for pages in (k_pages, v_pages))
                    if n < 8:  # else there was no room
                        np.testing.assert_array_equal(whole_k[n], k[b, 0])
                    self.close(got[b:b + 1], softmax_attention(q[b:b + 1], whole_k[None], whole_v[None])[0])

    def test_roll(self):
        """A cache of f16 pages whose old ones go to another type: as the same keys appended by hand; tables turned, lengths moved."""
        for kind in "i8", "q8_0", "f8_e4m3fn":
            with self.subTest(kind):
                pages = [self.normal(9, 4, 2, 32).astype(np.float16) for _ in range(2)]
                table, lengths = np.array([[3, 7, 1, -1], [8, 2, 5, 0]], np.int32), np.array([11, 16], np.int32)
                rows = [p[[3, 7, 8, 2, 5]].reshape(20, 2, 32) for p in pages]
                caches = {}
                for call in "roll", "append":
                    if kind == "i8":
                        caches[call] = [np.zeros((2, 20, 2, 32), np.int8) for _ in range(2)] + \
                            [np.zeros((2, 20, 2), np.float16) for _ in range(2)]
                    elif kind == "q8_0":
                        caches[call] = [np.zeros((2, 20, 2, 34), np.uint8) for _ in range(2)] + [None, None]
                    else:
                        caches[call] = [np.zeros((2, 20, 2, 32), ml_dtypes.float8_e4m3fn) for _ in range(2)] + [None, None]
                old = np.array([0, 5], np.int32)
                k, v, k_scale, v_scale = caches["append"]
                attn.kv_append(*rows, k, v, old, cu_seqlens_new=np.array([0, 8, 20], np.int32), k_scale=k_scale, v_scale=v_scale)
                k, v, k_scale, v_scale = caches["roll"]
                self.assertIsNone(attn.kv_roll(*pages, table, lengths, k, v, old, keep=3, k_scale=k_scale, v_scale=v_scale))
                for got, want in zip(caches["roll"], caches["append"]):
                    if want is not None:
                        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
                self.assertEqual(lengths.tolist(), [3, 4])
                self.assertEqual(old.tolist(), [8, 17])
                self.assertEqual(table.tolist(), [[1, 3, 7, -1], [0, 8, 2, 5]])

    def test_what_it_returns(self):
        new, cache, lengths = self.normal(1, 2, 3, 8), np.zeros((1, 5, 3, 8), np.float32), np.array([4], np.int32)
        self.assertIsNone(attn.kv_append(new, new, cache, cache.copy(), lengths))
        np.testing.assert_array_equal(cache[0, 4], new[0, 0])  # for the other token there is no room
        np.testing.assert_array_equal(cache[0, :4], 0)
        np.testing.assert_array_equal(lengths, [4])
        cos, sin = self.tables(5, 4)
        q, out = self.normal(1, 2, 3, 8), np.full((1, 2, 3, 8), 7, np.float32)
        self.assertIs(attn.kv_append(new, new, cache, cache.copy(), lengths, q=q, q_out=out, rotary_cos=cos, rotary_sin=sin), out)
        np.testing.assert_array_equal(out[0, 1], 7)
        self.assertIs(attn.kv_append(new, new, cache, cache.copy(), lengths, q=q, q_out=q, rotary_cos=cos, rotary_sin=sin), q)
        np.testing.assert_array_equal(q[0, 0], out[0, 0])

    def test_blocks(self):
        new, lengths = self.normal(2, 3, 2, 64), np.array([1, 2], np.int32)
        for kind in (name for name, t in attn.types().items() if t["kind"] == "ggml"):
            blocks = attn.quantize(new, kind)[0]
            k, v = np.zeros((2, 5, 2, blocks.shape[-1]), np.uint8), np.zeros((2, 5, 2, 64), np.float32)
            attn.kv_append(new, new, k, v, lengths, k_type=kind)
            for b, n in enumerate(lengths):
                np.testing.assert_array_equal(k[b, n:n + 3], blocks[b])
                np.testing.assert_array_equal(v[b, n:n + 3], new[b])

    def test_scales_beside(self):
        new, lengths = self.normal(2, 3, 2, 48), np.array([1, 2], np.int32)
        for kind, dtype in ("i8", np.int8), ("i4", np.uint8):
            codes, scale = attn.quantize(new, kind)
            k, v = np.zeros((2, 5, 2, codes.shape[-1]), dtype), np.zeros((2, 5, 2, 48), np.float32)
            scales = np.zeros((2, 5, 2), np.float16)
            attn.kv_append(new, new, k, v, lengths, k_type="i4" if kind == "i4" else None, k_scale=scales)
            for b, n in enumerate(lengths):
                np.testing.assert_array_equal(k[b, n:n + 3], codes[b])
                np.testing.assert_array_equal(scales[b, n:n + 3], scale[b])
                np.testing.assert_array_equal(scales[b, :n], 0)
        self.refuses(ValueError, ["k_scale is None", "k_cache in i8"], attn.kv_append, new, new, np.zeros((2, 5, 2, 48), np.int8), v, lengths)

    def test_decode_step_by_step(self):
        """Tokens one by one into pages, attention after each, beside all of it at once."""
        k, v = self.normal(2, 7, 2, 16), self.normal(2, 7, 2, 16)
        q = self.normal(2, 7, 4, 16)
        cos, sin = self.tables(8, 8)
        pages = np.zeros((2, 5, 4, 2, 16), np.float32)
        table, lengths = np.array([[4, 0], [2, 3]], np.int32), np.zeros(2, np.int32)
        at = np.arange(7)
        whole_k, whole_q = (np.stack([rotated(x[b], at, cos, sin, False) for b in range(2)]) for x in (k, q))
        for t in range(7):
            step = slice(t, t + 1)
            turned = attn.kv_append(k[:, step], v[:, step], *pages, lengths, block_table=table, q=q[:, step], rotary_cos=cos,
                                    rotary_sin=sin, advance_seqlens=True)
            out = attn.forward(turned, *pages, block_table=table, seqlens_kv=lengths)
            self.close(out, softmax_attention(whole_q[:, step], whole_k[:, :t + 1], v[:, :t + 1])[0])

    def test_sentences(self):
        new, k, v = self.normal(2, 3, 2, 8), self.normal(2, 6, 2, 8), self.normal(2, 6, 2, 8)
        lengths = np.array([0, 6], np.int32)
        cos, sin = self.tables(6, 4)
        rotary = {"rotary_cos": cos, "rotary_sin": sin}

        def refuses(words, *arguments, error=ValueError, **options):
            given = dict(zip(("k_new", "v_new", "k_cache", "v_cache", "seqlens"), (new, new, k, v, lengths)), **options)
            before = k.copy(), v.copy()
            self.refuses(error, words, attn.kv_append, **given)
            np.testing.assert_array_equal((k, v), before)
        refuses(["k_new is i32", "f32, f16, bf16"], k_new=new.astype(np.int32))
        refuses(["k_new is f8_e5m2", "f32, f16, bf16"], k_new=new.astype(ml_dtypes.float8_e5m2), v_new=new.astype(ml_dtypes.float8_e5m2))
        refuses(["v_new is f16", "f32"], v_new=new.astype(np.float16))
        refuses(["v_new has shape [1, 3, 2, 8]", "k_new's shape"], v_new=new[:1])
        refuses(["k_cache has shape [1, 6, 2, 8]", "[B, S, Hkv, D] = [2, any, 2, any]"], k_cache=k[:1])
        refuses(["k_cache: a row has 4 elements", "accepted: 8"], k_cache=k[..., :4])
        refuses(["v_cache has shape [2, 5, 2, 8]", "k_cache's shape"], v_cache=v[:, :5])
        frozen = k.copy()
        frozen.flags.writeable = False
        refuses(["k_cache is read-only"], k_cache=frozen)
        refuses(["seqlens[1] is 7", "0 to 6"], seqlens=np.array([0, 7], np.int32))
        refuses(["seqlens is i64", "i32"], seqlens=lengths.astype(np.int64))
        refuses(["seqlens has shape [1]", "[B] = [2]"], seqlens=lengths[:1])
        refuses(["k_cache is at", "overlaps v_cache"], v_cache=k)
        refuses(["max_seqlen_new is given", "None"], max_seqlen_new=3)
        refuses(["one of rotary_cos and rotary_sin is None"], rotary_cos=cos)
        refuses(["rotary_sin has shape [6, 3]", "[6, 4]"], rotary_cos=cos, rotary_sin=sin[:, :3])
        refuses(["rotary_cos is f64"], rotary_cos=cos.astype(np.float64), rotary_sin=sin)
        refuses(["rotary_cos has no columns"], rotary_cos=cos[:, :0], rotary_sin=sin[:, :0])
        refuses(["rotary_positions is 5", "capacity 6"], rotary_cos=cos[:5], rotary_sin=sin[:5])
        wide = self.tables(6, 5)
        refuses(["rotary_dim is 10", "head_dim = 8"], rotary_cos=wide[0], rotary_sin=wide[1])
        refuses(["rotary_interleaved is given"], rotary_interleaved=True)
        refuses(["q is given", "rotary_cos"], q=new)
        refuses(["q_out is given", "without q"], q_out=new, **rotary)
        refuses(["q has shape [2, 3, 2, 7]", "[B, T, Hq, D]"], q=new[..., :7], **rotary)
        refuses(["q has shape [2, 3, 0, 8]", "1 head"], q=new[:, :, :0], **rotary)
        refuses(["q is f16", "f32"], q=new.astype(np.float16), **rotary)
        refuses(["q_out has shape"], q=new, q_out=new[:1], **rotary)
        refuses(["block_table[0, 0] is 9", "0 to 3"], k_cache=k.reshape(4, 3, 2, 8), v_cache=v.reshape(4, 3, 2, 8),
                block_table=np.array([[9, 1], [2, 3]], np.int32))
        refuses(["k_descale has shape [3]", "[1]"], k_descale=np.ones(3, np.float32))
        refuses(["seqlens_out is given", "advance_seqlens"], advance_seqlens=True, seqlens_out=lengths.copy())
        refuses(["seqlens_out has shape [1]", "[B] = [2]"], seqlens_out=lengths[:1].copy())
        refuses(["seqlens_out is i64", "i32"], seqlens_out=lengths.astype(np.int64))
        refuses(["advance_seqlens is a int"], error=TypeError, advance_seqlens=1)
        refuses(["backend is cuda", "host memory"], backend="cuda")

    def test_names_in_errors_of_roll(self):
        recent, old, lengths = self.normal(4, 2, 1, 8), np.zeros((2, 8, 1, 8), np.float16), np.zeros(2, np.int32)
        table, too_long = np.array([[0, 1], [2, 3]], np.int32), np.array([4, 5], np.int32)

        def refuses(words, **options):
            given = dict(k_recent=recent, v_recent=recent.copy(), recent_table=table, recent_seqlens=lengths + 4, k_old=old, v_old=old.copy(),
                         old_seqlens=lengths, keep=0)
            self.refuses(ValueError, words, attn.kv_roll, **{**given, **options})
        refuses(["recent_seqlens[1] is 5", "0 to 4"], recent_seqlens=too_long)
        refuses(["recent_table[0, 0] is 9", "0 to 3"], recent_table=table + 9)
        refuses(["old_seqlens[0] is 9", "0 to 8"], old_seqlens=lengths + 9)
        refuses(["k_old is at", "overlaps v_old"], v_old=old)

    def test_plans_are_kept(self):
        new, k, v = self.normal(2, 3, 2, 8), self.normal(2, 6, 2, 8), self.normal(2, 6, 2, 8)
        attn.cache_clear()
        for _ in range(3):
            attn.kv_append(new, new, k, v, np.zeros(2, np.int32))
        info = attn.cache_info()
        self.assertEqual([info[name] for name in ("plans", "hits", "misses")], [1, 2, 1])


@needs("torch")
class Torch(Case):
    def test_tensors(self):
        import torch
        new = torch.from_numpy(self.normal(2, 3, 2, 16)).to(torch.bfloat16)
        cos, sin = torch.from_numpy(self.normal(9, 8)), torch.from_numpy(self.normal(9, 8))
        for dtype in torch.float16, torch.bfloat16, torch.float8_e4m3fn:
            k, v = (torch.zeros(2, 2, 9, 16).to(dtype).transpose(1, 2) for _ in range(2))
            lengths = torch.tensor([2, 5], dtype=torch.int32)
            q = new.clone()
            out = attn.kv_append(new, new, k, v, lengths, q=q, q_out=q, rotary_cos=cos, rotary_sin=sin, advance_seqlens=True)
            self.assertIs(out, q)
            self.assertEqual(lengths.tolist(), [5, 8])
            for b, n in enumerate((2, 5)):
                at = np.arange(n, n + 3)
                want = torch.from_numpy(rotated(new[b].double().numpy(), at, cos.numpy(), sin.numpy(), False))
                self.assertTrue(torch.equal(k[b, n:n + 3].float(), want.to(dtype).float()))
                self.assertTrue(torch.equal(v[b, n:n + 3].float(), new[b].to(dtype).float()))
                self.assertTrue(torch.equal(q[b], want.to(torch.bfloat16)))


if __name__ == "__main__":
    unittest.main()
