"""Latent caches (v in k), lists of keys and of blocks, and the formats of servers' caches, against NumPy in float64 that shares no code
with the library."""
import math
import unittest

from attn.flash import flash_attn_with_kvcache
from support import Case, attn, ml_dtypes, np

BACKENDS = "reference", "cpu"
E4M3 = np.arange(256).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def one_query(q, rows, values, counts, scale, softcap=0.0, sink=None):
    """(out, lse) of one head: q [D], rows [n, D], values [n, Dv]; row j counts counts[j] times."""
    s = rows @ q * scale
    if softcap:
        s = softcap * np.tanh(s / softcap)
    seen = counts > 0
    if not seen.any() and sink is None:
        return np.zeros(values.shape[1]), -math.inf
    m = max([s[seen].max()] if seen.any() else [], default=-math.inf)
    m = m if sink is None else max(m, sink)
    w = np.where(seen, counts * np.exp(np.where(seen, s, m) - m), 0)
    total = w.sum() + (0 if sink is None else math.exp(sink - m))
    return w[seen] @ values[seen] / total, m + math.log(total)


def oracle(q, segments, dim_v, *, causal=False, window=None, scale=None, softcap=0.0, sinks=None):
    """(out, lse). segments: for each the rows [B][n, Hkv, D] (float64), what a query sees of them, counts(b, i, h) or None for all, and
    whether they have positions."""
    batch, queries, heads, dim = q.shape
    scale = scale or 1 / math.sqrt(dim)
    out, lse = np.zeros((batch, queries, heads, dim_v)), np.zeros((batch, heads, queries))
    for b in range(batch):
        total = sum(len(rows[b]) for rows, _, positions in segments if positions)
        for i in range(queries):
            at = i + total - queries
            for h in range(heads):
                keys, counts, first = [], [], 0
                for rows, listed, positions in segments:
                    kv = rows[b][:, h * rows[b].shape[1] // heads]
                    count = np.ones(len(kv)) if listed is None else listed(b, i, h)
                    if positions:
                        j = first + np.arange(len(kv))
                        first += len(kv)
                        if causal:
                            count = count * (j <= at)
                        if window:
                            left, right = window
                            count = count * ((j >= at - left) | (left < 0)) * ((j <= at + right) | (right < 0))
                    keys.append(kv)
                    counts.append(count)
                keys = np.concatenate(keys)
                out[b, i, h], lse[b, h, i] = one_query(q[b, i, h].astype(np.float64), keys, keys[:, :dim_v], np.concatenate(counts),
                                                       scale, softcap, None if sinks is None else float(sinks[h]))
    return out, lse


def multiplicities(lists, keys, block=1, per=1):
    """counts(b, i, h) of lists [B, ceil(Sq / per), Hkv or 1, n] over keys[b] keys."""
    def counts(b, i, h, heads=None):
        head = 0 if lists.shape[2] == 1 else h * lists.shape[2] // heads
        found = np.zeros(keys[b])
        for entry in lists[b, i // per, head]:
            if entry >= 0:
                for j in range(entry * block, min((entry + 1) * block, keys[b])):
                    found[j] += 1
        return found
    return counts


def paged(rng, rows, page_size, spare=3):
    """rows [B, n, ...] in shuffled pages -> (pages, block table)."""
    batch, keys = rows.shape[:2]
    per = -(-keys // page_size)
    order = rng.permutation(batch * per + spare)
    pages = np.zeros((len(order), page_size, *rows.shape[2:]), rows.dtype)
    table = order[:batch * per].reshape(batch, per).astype(np.int32)
    for b in range(batch):
        for n in range(per):
            part = rows[b, n * page_size:(n + 1) * page_size]
            pages[table[b, n], :len(part)] = part
    return pages, table


def rows_656(rng, *shape):
    """FlashMLA's rows by hand -> (bytes [*shape, 656], values [*shape, 576])."""
    codes = rng.integers(0, 256, (*shape, 512)).astype(np.uint8)
    codes[(codes & 0x7f) == 0x7f] = 0x30
    scales = np.exp2(rng.integers(-13, -8, (*shape, 4))).astype(np.float32)
    rope = rng.standard_normal((*shape, 64)).astype(ml_dtypes.bfloat16)
    data = np.concatenate((codes, scales.view(np.uint8), rope.view(np.uint8)), -1)
    return data, np.concatenate((E4M3[codes] * np.repeat(scales.astype(np.float64), 128, -1), rope.astype(np.float64)), -1)


def rows_584(rng, *shape):
    """vLLM's rows by hand -> (rows [*shape, 576], scales [*shape, 8], values [*shape, 512])."""
    codes = rng.integers(0, 256, (*shape, 448)).astype(np.uint8)
    codes[(codes & 0x7f) == 0x7f] = 0x30
    powers = rng.integers(114, 119, (*shape, 8)).astype(np.uint8)
    powers[..., 7] = 255  # not used: NaN if it were
    rope = rng.standard_normal((*shape, 64)).astype(ml_dtypes.bfloat16)
    scales = np.exp2(powers[..., :7].astype(np.float64) - 127)
    return (np.concatenate((codes, rope.view(np.uint8)), -1), powers,
            np.concatenate((E4M3[codes] * np.repeat(scales, 64, -1), rope.astype(np.float64)), -1))


class Latent(Case):
    """V is the first columns of K."""

    def near(self, got, want, backend, bound=2e-5):
        for a, b in zip(got, want):
            self.close(a, b, 2e-6 if backend == "reference" else bound, 0 if backend == "reference" else 1e-5)

    def test_heads_of_every_size(self):
        for dim, dim_v in (512, 512), (320, 256), (576, 512), (576, 576):
            q, k, v = self.normal(2, 3, 4, dim), self.normal(2, 70, 2, dim), self.normal(2, 70, 2, dim_v)
            same = self.normal(2, 70, 1, dim)
            for backend in BACKENDS:
                options = dict(causal=True, softcap=9.0, sinks=self.normal(4), window=(50, -1), return_lse=True, backend=backend)
                got = attn.forward(q, k, v, **options)
                for h in range(4):  # V has an array of its own
                    both = np.concatenate((k, v), -1).astype(np.float64)
                    for b in range(2):
                        for i in range(3):
                            j = np.arange(70)
                            at = i + 67
                            out, lse = one_query(q[b, i, h].astype(np.float64), both[b, :, h // 2, :dim], both[b, :, h // 2, dim:],
                                                 ((j <= at) & (j >= at - 50)).astype(float), 1 / math.sqrt(dim), 9.0, float(options["sinks"][h]))
                            self.close(got[0][b, i, h], out, 1e-5)
                            self.close(got[1][b, h, i], lse, 1e-5)
                in_k = attn.forward(q, same, None, head_dim_v=dim_v, **options)
                apart = attn.forward(q, same, np.ascontiguousarray(same[..., :dim_v]), **options)
                self.close(in_k[0], apart[0], 0 if backend == "reference" else 1e-6)
                self.close(in_k[1], apart[1], 0 if backend == "reference" else 1e-6)

    def test_random_problems(self):
        for seed in range(60):
            rng = np.random.default_rng(seed)
            batch, queries, heads = rng.integers(1, 4), rng.choice([1, 1, 2, 5, 9]), rng.choice([1, 3, 8, 16, 40])
            dim, dim_v = [(576, 512), (320, 256), (512, 512), (40, 24), (33, 7)][rng.integers(5)]
            keys = rng.choice([1, 7, 64, 200, 700])
            rows = rng.standard_normal((batch, keys, 1, dim)).astype(np.float32)
            lengths = rng.integers(0, keys + 1, batch).astype(np.int32) if rng.integers(2) else None
            n = [keys] * batch if lengths is None else lengths
            q = rng.standard_normal((batch, queries, heads, dim)).astype(np.float32)
            options = dict(causal=bool(rng.integers(2)), window=(int(rng.integers(-1, 60)), -1), softcap=[0.0, 4.0][rng.integers(2)])
            sinks = rng.standard_normal(heads).astype(np.float32) if rng.integers(2) else None
            want = oracle(q, [([rows[b, :n[b]].astype(np.float64) for b in range(batch)], None, True)], dim_v, sinks=sinks, **options)
            cache, table = (rows, None)
            if rng.integers(2):
                cache, table = paged(rng, rows, [1, 3, 64][rng.integers(3)])
                lengths = np.array(n, np.int32)  # a table has room for whole pages
            for dtype, bound in (np.float32, 2e-5), (np.float16, None):
                for backend in BACKENDS:
                    with self.subTest(seed=seed, backend=backend, dtype=dtype.__name__):
                        got = attn.forward(q, cache.astype(dtype), None, head_dim_v=int(dim_v), seqlens_kv=lengths, block_table=table,
                                           sinks=sinks, return_lse=True, backend=backend, **options)
                        if bound:
                            self.near(got, want, backend)
                        else:
                            self.close(got[0], want[0], 1e-2)

    def test_mistakes_are_found(self):
        """What the tests above would say of a wrong kernel: their bound is far below the difference."""
        q, rows = self.normal(1, 2, 4, 576), self.normal(1, 50, 1, 576)
        want = oracle(q, [([rows[0].astype(np.float64)], None, True)], 512)
        wrong = q.copy()
        wrong[..., 512:] = 0  # rope columns left out of the scores
        scale = 1 / math.sqrt(576)
        no_rope = oracle(wrong, [([rows[0].astype(np.float64)], None, True)], 512, scale=scale)
        shifted = oracle(np.roll(q, -1, -1), [([np.roll(rows[0], -1, -1).astype(np.float64)], None, True)], 512)  # V a column on
        for mistake in no_rope, shifted:
            self.assertGreater(np.abs(mistake[0] - want[0]).max(), 1e-2)

    def test_segments_and_types(self):
        """Two segments of several types, descales, and one that the batch shares."""
        rng = np.random.default_rng(3)
        q = self.normal(2, 2, 4, 64)
        shared, own = self.normal(1, 30, 1, 64), self.normal(2, 21, 1, 64)
        codes = own.astype(ml_dtypes.float8_e4m3fn)
        descale = np.array([0.75], np.float32)
        want = oracle(q, [([shared[0].astype(np.float64)] * 2, None, True),
                          ([x.astype(np.float64) * 0.75 for x in codes], None, True)], 48, causal=True)
        pages, table = paged(rng, codes, 8)
        for backend in BACKENDS:
            for k, t in (codes, None), (pages, table):
                got = attn.forward(q, [shared, k], [None, None], head_dim_v=48, shared_segments=1, block_table=[None, t],
                                   seqlens_kv=[None, None if t is None else np.array([21, 21], np.int32)], k_descale=[None, descale],
                                   causal=True, return_lse=True, backend=backend)
                self.near(got, want, backend)

    def test_packed(self):
        q, rows = self.normal(7, 4, 32), self.normal(30, 1, 32)
        offsets_q, offsets = np.array([0, 2, 7], np.int32), np.array([0, 11, 30], np.int32)
        for backend in BACKENDS:
            got = attn.forward(q, rows, None, head_dim_v=20, cu_seqlens_q=offsets_q, cu_seqlens_kv=offsets, causal=True, backend=backend)
            for b in range(2):
                a, z = offsets_q[b:b + 2]
                want = oracle(q[None, a:z], [([rows[offsets[b]:offsets[b + 1]].astype(np.float64)], None, True)], 20, causal=True)
                self.near((got[a:z],), (want[0][0],), backend)

    def test_many_keys_and_parts(self):
        """Few rows and many keys: the cpu kernel cuts them into parts; fixed_split does, too."""
        q, rows = self.normal(1, 1, 8, 64), self.normal(1, 9000, 1, 64)
        want = oracle(q, [([rows[0].astype(np.float64)], None, True)], 48)
        for split in 0, 1024:
            plan = attn.Plan(q, rows, None, head_dim_v=48, fixed_split=split, backend="cpu")
            self.close(plan(q, rows, None), want[0], 2e-5)

    def test_refused(self):
        q, rows = self.normal(2, 1, 4, 32), self.normal(2, 9, 1, 32)
        self.refuses(ValueError, ["head_dim_v is 33", "head_dim = 32"], attn.forward, q, rows, None, head_dim_v=33)
        self.refuses(ValueError, ["head_dim_v is 0; accepted: 1 to 32"], attn.forward, q, rows, None, head_dim_v=0)
        self.refuses(ValueError, ["head_dim_v is given"], attn.forward, q, rows, rows, head_dim_v=16)
        self.refuses(ValueError, ["v_descale is given"], attn.forward, q, rows, None, v_descale=np.ones(1, np.float32))


class Lists(Case):
    def lists(self, rng, batch, rows, heads, size, keys, spread=1.3):
        made = rng.integers(-2, int(keys * spread) + 1, (batch, rows, heads, size)).astype(np.int32)
        made[rng.random(made.shape) < 0.1] = -1
        return made

    def random(self, seed):
        """(call(backend), want)"""
        rng = np.random.default_rng(seed)
        batch, queries = rng.integers(1, 4), rng.choice([1, 1, 2, 5])
        heads_kv = rng.choice([1, 1, 2])
        heads = heads_kv * rng.choice([1, 4, 16, 70])
        latent = heads_kv == 1 and rng.integers(2)
        dim, dim_v = ((576, 512) if rng.integers(4) == 0 else (48, 40)) if latent else (64, 64)
        segments, args, names = [], [], ("k", "lists", "list_lengths", "block_table", "seqlens_kv", "list_of_pool", "no_positions")
        block, per = [(1, 1), (1, 1), (64, 1), (1, 64)][rng.integers(4)]
        q = rng.standard_normal((batch, queries, heads, dim)).astype(np.float32)
        for n in range(rng.integers(1, 3)):
            keys = int(rng.choice([1, 20, 150, 300]))
            rows = rng.standard_normal((batch, keys, heads_kv, dim)).astype(np.float32)
            lengths = rng.integers(0, keys + 1, batch).astype(np.int32) if rng.integers(2) else None
            count = np.full(batch, keys) if lengths is None else lengths
            pages, table = paged(rng, rows, [1, 16, 64][rng.integers(3)]) if rng.integers(2) else (rows, None)
            if table is not None:
                lengths = count.astype(np.int32)
            listed = n == 0 or rng.integers(2)
            lists = sizes = None
            positions = bool(rng.integers(2))
            find = None
            if listed:
                lists = self.lists(rng, batch, -(-queries // per), rng.choice([1, heads_kv]), int(rng.choice([1, 5, 40, 130])),
                                   -(-keys // block))
                read = lists
                if rng.integers(2):
                    sizes = rng.integers(0, lists.shape[-1] + 1, lists.shape[:3]).astype(np.int32)
                    read = np.where(np.arange(lists.shape[-1]) < sizes[..., None], lists, -1)
                counts = multiplicities(read, count, block, per)
                find = lambda b, i, h, counts=counts: counts(b, i, h, heads)
            segments.append(([rows[b, :count[b]].astype(np.float64) for b in range(batch)], find, positions))
            args.append((pages, lists, sizes, table, lengths, None, not positions))
        options = dict(causal=bool(rng.integers(2)), window=(int(rng.integers(-1, 80)), -1), softcap=[0.0, 5.0][rng.integers(2)])
        sinks = rng.standard_normal(heads).astype(np.float32) if rng.integers(2) else None
        if not latent:
            dim_v = dim
        want = oracle(q, segments, dim_v, sinks=sinks, **options)
        arrays = {name: [a[i] for a in args] for i, name in enumerate(names)}
        k = arrays.pop("k")

        def call(backend, lists=None):
            given = dict(arrays, lists=lists) if lists else arrays
            v = [None if latent else x for x in k]
            extra = {"head_dim_v": int(dim_v)} if latent else {}
            return attn.forward(q, k, v, return_lse=True, backend=backend, sinks=sinks, list_block=block, list_queries=per, **options,
                                **given, **extra)
        return call, want, arrays["lists"], rng

    def test_random_problems(self):
        for seed in range(80):
            call, want, lists, rng = self.random(seed)
            for backend in BACKENDS:
                with self.subTest(seed=seed, backend=backend):
                    got = call(backend)
                    for a, b in zip(got, want):
                        self.close(a, b, 2e-6 if backend == "reference" else 3e-5, 0 if backend == "reference" else 1e-5)

    def test_order(self):
        """Lists in any order: the same but for rounding; the same list: the same bits, 100 times."""
        for seed in range(12):
            call, want, lists, rng = self.random(seed)
            shuffled = [None if x is None else rng.permuted(x, axis=-1) for x in lists]
            whole = [None if x is None else x for x in lists]
            if any(x is not None for x in lists):
                arrays = {}
                first = call("cpu", whole)
                for _ in range(8):
                    again = call("cpu", whole)
                    self.assertTrue(np.array_equal(first[0], again[0]) and np.array_equal(first[1], again[1]))
        rng = np.random.default_rng(5)
        q, rows = self.normal(2, 2, 16, 576), self.normal(2, 500, 1, 576)
        lists = self.lists(rng, 2, 2, 1, 300, 500)
        plan = attn.Plan(q, rows, None, head_dim_v=512, lists=lists, backend="cpu")
        one = plan(q, rows, None, lists=lists)
        for _ in range(100):
            self.assertTrue(np.array_equal(one, plan(q, rows, None, lists=lists)))
        for _ in range(5):
            self.close(plan(q, rows, None, lists=rng.permuted(lists, axis=-1)), one, 1e-4)

    def test_duplicates_count_twice(self):
        q, rows = self.normal(1, 1, 2, 16), self.normal(1, 4, 1, 16)
        lists = np.array([2, 0, 2, -1, 99], np.int32).reshape(1, 1, 1, 5)
        for backend in BACKENDS:
            got = attn.forward(q, rows, rows, lists=lists, return_lse=True, backend=backend)
            for h in range(2):
                out, lse = one_query(q[0, 0, h].astype(np.float64), rows[0, :, 0].astype(np.float64), rows[0, :, 0].astype(np.float64),
                                     np.array([1., 0, 2, 0]), 0.25)
                self.close(got[0][0, 0, h], out, 1e-6)
                self.close(got[1][0, h, 0], lse, 1e-6)
                once, _ = one_query(q[0, 0, h].astype(np.float64), rows[0, :, 0].astype(np.float64), rows[0, :, 0].astype(np.float64),
                                    np.array([1., 0, 1, 0]), 0.25)
                self.assertGreater(np.abs(once - out).max(), 1e-3)  # a duplicate that counts once is found
            none = attn.forward(q, rows, rows, lists=np.full((1, 1, 1, 3), -1, np.int32), return_lse=True, backend=backend)
            self.assertEqual((none[0].any(), np.isneginf(none[1]).all()), (False, True))

    def test_mistakes_are_found(self):
        rng = np.random.default_rng(8)
        q, rows = self.normal(1, 3, 4, 64), self.normal(1, 90, 1, 64)
        lists = rng.integers(0, 90, (1, 3, 1, 12)).astype(np.int32)
        keys = [rows[0].astype(np.float64)]
        answer = lambda x: oracle(q, [(keys, multiplicities(x, [90]), True)], 64)[0]
        want = answer(lists)
        for mistake in lists + 1, np.roll(lists, 1, 1), np.where(lists == lists[..., :1], -1, lists), lists[..., :-1]:
            self.assertGreater(np.abs(answer(mistake) - want).max(), 1e-2)
        for backend in BACKENDS:
            self.close(attn.forward(q, rows, rows, lists=lists, backend=backend), want, 1e-5)

    def test_pool(self):
        """Places in the pool, whose rows no table names."""
        rng = np.random.default_rng(4)
        pages = self.normal(6, 8, 1, 32)
        q = self.normal(2, 3, 4, 32)
        lists = rng.integers(-1, 50, (2, 3, 1, 20)).astype(np.int32)
        flat = pages.reshape(48, 1, 32).astype(np.float64)
        want = oracle(q, [([flat, flat], multiplicities(lists, [48, 48]), False)], 24)
        for backend in BACKENDS:
            got = attn.forward(q, pages, None, head_dim_v=24, lists=lists, list_of_pool=True, no_positions=True, return_lse=True,
                               backend=backend)
            self.close(got[0], want[0], 1e-5)
            self.close(attn.mla_decode(q, pages, head_dim_v=24, indices=lists[:, :, 0], indices_of_pool=True, backend=backend), want[0], 1e-5)

    def test_packed_q(self):
        rng = np.random.default_rng(6)
        q, rows = self.normal(5, 4, 32), self.normal(2, 40, 1, 32)
        offsets = np.array([0, 2, 5], np.int32)
        lists = rng.integers(-1, 45, (5, 1, 9)).astype(np.int32)
        for backend in BACKENDS:
            got = attn.forward(q, rows, rows, cu_seqlens_q=offsets, lists=lists, causal=True, backend=backend)
            for b in range(2):
                a, z = offsets[b:b + 2]
                want = oracle(q[None, a:z], [([rows[b].astype(np.float64)], multiplicities(lists[None, a:z], [40]), True)], 32, causal=True)
                self.close(got[a:z], want[0][0], 1e-5)

    def test_bad_rows_are_not_read(self):
        q, rows = self.normal(1, 2, 4, 64), self.normal(1, 50, 1, 64)
        lists = np.array([[[1, 7, 7, 30]], [[2, 0, -1, 49]]], np.int32)[None]
        want = {b: attn.forward(q, rows, None, lists=lists, backend=b) for b in BACKENDS}
        hidden = np.setdiff1d(np.arange(50), lists)
        rows[:, hidden] = np.nan
        for backend in BACKENDS:
            self.assertTrue(np.array_equal(want[backend], attn.forward(q, rows, None, lists=lists, backend=backend)))

    def test_refused(self):
        q, rows = self.normal(2, 2, 4, 32), self.normal(2, 9, 2, 32)
        lists = np.zeros((2, 2, 1, 4), np.int32)
        refused = lambda words, **options: self.refuses(ValueError, words, attn.forward, q, rows, rows, **{"lists": lists, **options})
        refused(["lists.shape[-2] is 3; accepted: 1, 2 (heads_kv)"], lists=np.zeros((2, 2, 3, 4), np.int32))
        refused(["lists has shape [2, 1, 1, 4]"], lists=np.zeros((2, 1, 1, 4), np.int32))
        refused(["list_block is 32", "1, 64, 128"], list_block=32)
        refused(["list_block is 4294967297; accepted: 1, 64, 128"], list_block=2**32 + 1)
        refused(["list_queries is 3", "1, 64, 128"], list_queries=3, lists=np.zeros((2, 1, 1, 4), np.int32))
        refused(["list_lengths[1] is 5", "0 to 4"], list_lengths=np.array([4, 5, 0, 1], np.int32).reshape(2, 2, 1))
        refused(["list_lengths is given"], lists=None, list_lengths=np.zeros((2, 2, 1), np.int32))
        refused(["bias is f32", "lists of keys"], bias=self.normal(2, 4, 2, 9))
        refused(["ATTN_ALIBI", "lists of keys"], alibi_slopes=self.normal(4))
        refused(["tree_keys is 2"], tree=np.zeros((2, 2, 2), np.uint64), tree_keys=2)
        refused(["has_kv_begin is 1"], kv_begin=np.zeros(2, np.int32))
        refused(["no_positions is 0", "list_of_pool"], list_of_pool=True)
        refused(["ATTN_ALIBI", "no_positions"], lists=None, no_positions=True, alibi_slopes=self.normal(4))


class WindowAndList(Case):
    def test_v4(self):
        """DeepSeek V4: compressed keys of their own list, and a window of the last keys, in one call with sinks."""
        rng = np.random.default_rng(9)
        q = self.normal(2, 4, 8, 64)
        compressed, recent = self.normal(2, 60, 1, 64), self.normal(2, 20, 1, 64)
        lists = rng.integers(-1, 62, (2, 4, 1, 16)).astype(np.int32)
        sinks = self.normal(8)
        options = dict(causal=True, window=(6, 0))
        for listed in lists, None:
            counts = None if listed is None else multiplicities(listed, [60, 60])
            want = oracle(q, [([x.astype(np.float64) for x in compressed], counts, False),
                              ([x.astype(np.float64) for x in recent], None, True)], 64, sinks=sinks, **options)
            for backend in BACKENDS:
                got = attn.forward(q, [compressed, recent], [None, None], lists=[listed, None], no_positions=[True, False], sinks=sinks,
                                   return_lse=True, backend=backend, **options)
                self.close(got[0], want[0], 1e-5)
                self.close(got[1], want[1], 1e-5)


class Blocks(Case):
    def test_from_lists(self):
        rng = np.random.default_rng(2)
        for seed in range(10):
            sq, skv = int(rng.integers(1, 80)), int(rng.integers(1, 200))
            bq, bk = [(1, 64), (16, 32), (64, 64)][seed % 3]
            rows, columns = -(-sq // bq), -(-skv // bk)
            lists = rng.integers(-1, columns, (2, 4, rows, 3)).astype(np.int32)
            dense = np.zeros((2, 4, sq, skv), bool)
            for b in range(2):
                for h in range(4):
                    for i in range(sq):
                        for e in lists[b, h, i // bq]:
                            if e >= 0:
                                dense[b, h, i, e * bk:(e + 1) * bk] = True
            q, k = self.normal(2, sq, 4, 32), self.normal(2, skv, 2, 32)
            by_lists = attn.BlockMask.from_lists(lists, sq, skv, block_size=(bq, bk))
            by_bits = attn.BlockMask.from_dense(dense, block_size=(bq, bk))
            for backend in BACKENDS:
                for causal in False, True:
                    got, want = (attn.forward(q, k, k, block_mask=m, causal=causal, return_lse=True, backend=backend) for m in (by_lists, by_bits))
                    self.close(got[0], want[0], 0)
                    self.close(got[1], want[1], 0)
        self.refuses(ValueError, ["is 4", "-1 (none) to 3"], attn.BlockMask.from_lists, np.full((1, 2), 4, np.int32), 64, 256, block_size=64)
        self.refuses(ValueError, ["is -2"], attn.BlockMask.from_lists, np.full((1, 2), -2, np.int32), 64, 256, block_size=64)
        self.refuses(ValueError, ["lists has shape [3, 2]"], attn.BlockMask.from_lists, np.zeros((3, 2), np.int32), 64, 256, block_size=64)

    def test_packed_q(self):
        """A block mask over packed q: each sequence begins at the grid's first row."""
        rng = np.random.default_rng(1)
        q, k = self.normal(50, 4, 32), self.normal(2, 70, 2, 32)
        offsets = np.array([0, 18, 50], np.int32)
        dense = rng.integers(0, 2, (2, 1, 32, 70)).astype(bool)
        mask = attn.BlockMask.from_dense(dense, block_size=16)
        for backend in BACKENDS:
            got = attn.forward(q, k, k, cu_seqlens_q=offsets, max_seqlen_q=32, block_mask=mask, backend=backend)
            for b in range(2):
                a, z = offsets[b:b + 2]
                one = attn.BlockMask.from_dense(np.ascontiguousarray(dense[b, 0, :z - a]), block_size=16)
                want = attn.forward(q[None, a:z], k[b:b + 1], k[b:b + 1], block_mask=one, backend=backend)
                self.close(got[a:z], want[0], 1e-6)


class Formats(Case):
    def test_656(self):
        rng = np.random.default_rng(11)
        data, values = rows_656(rng, 2, 70, 1)
        q = self.normal(2, 2, 16, 576)
        want = oracle(q, [(list(values), None, True)], 512, causal=True)
        pages, table = paged(rng, data, 64)
        lengths = np.array([70, 70], np.int32)
        for backend in BACKENDS:
            got = attn.forward(q, data, None, head_dim_v=512, k_type="mla_656", causal=True, return_lse=True, backend=backend)
            self.close(got[0], want[0], 3e-5)
            self.close(got[1], want[1], 3e-5)
            self.close(attn.mla_decode(q, pages[:, :, 0], table, lengths, backend=backend), want[0], 3e-5)
        # a scale of the neighbouring 128 elements
        wrong = data.copy()
        scales = wrong[..., 512:528].reshape(2, 70, 1, 4, 4)
        scales[...] = np.roll(scales, 1, -2)
        self.assertGreater(np.abs(attn.mla_decode(q, wrong) - want[0]).max(), 1e-2)

    def test_decode_refused(self):
        q, table, lengths = self.normal(1, 1, 2, 512), np.zeros((1, 2), np.int32), np.array([5], np.int32)
        refused = lambda words, cache, **options: self.refuses(ValueError, words, attn.mla_decode, q, cache, table, lengths, **options)
        refused(["cache: dimension 0 has stride 2336", "multiples of 576"], np.zeros((2, 4, 584), np.uint8), cache_type="mla_584")
        cache = self.normal(2, 4, 512)
        refused(["indices has shape None", "[B, Sq, n]"], cache, indices=[[1]])
        refused(["list_lengths has shape [1]", "[B, Sq]"], cache, indices=np.zeros((1, 1, 3), np.int32), list_lengths=np.ones(1, np.int32))
        refused(["cache_scale has shape None"], np.zeros((2, 4, 512), np.uint8), cache_type="f8_e4m3fn_token", cache_scale=[1.0])
        for shape in (2, 3), (1, 4), (2, 4, 2, 1):
            refused([f"cache_scale has shape {list(shape)}", "cache [2, 4, 512]", "without its last dimension"],
                    np.zeros((2, 4, 512), np.uint8), cache_type="f8_e4m3fn_token", cache_scale=np.ones(shape, np.float32))

    def test_584(self):
        rng = np.random.default_rng(12)
        rows, scales, values = rows_584(rng, 2, 70, 1)
        q = self.normal(2, 1, 16, 512)
        want = oracle(q, [(list(values), None, True)], 512)
        for backend in BACKENDS:
            got = attn.forward(q, rows, None, k_type="mla_584", k_scale=scales, return_lse=True, backend=backend)
            self.close(got[0], want[0], 3e-5)
            self.close(got[1], want[1], 3e-5)
        # vLLM's pages: codes of all keys, then their scales, a multiple of 576 bytes apart
        size, stride = 64, -(-64 * 584 // 576) * 576
        (pages, table), (of_pages, _) = paged(np.random.default_rng(0), rows, size), paged(np.random.default_rng(0), scales, size)
        memory = np.zeros((len(pages), stride), np.uint8)
        memory[:, :size * 576] = pages.reshape(len(pages), -1)
        memory[:, size * 576:size * 584] = of_pages.reshape(len(pages), -1)
        cache = np.lib.stride_tricks.as_strided(memory, (len(pages), size, 584), (stride, 584, 1))
        lengths = np.array([70, 70], np.int32)
        for backend in BACKENDS:
            self.close(attn.mla_decode(q, cache, table, lengths, cache_type="mla_584", backend=backend), want[0], 3e-5)
            indices = np.random.default_rng(1).integers(-1, 75, (2, 1, 33)).astype(np.int32)
            listed = oracle(q, [(list(values), multiplicities(indices[:, :, None], [70, 70]), True)], 512)
            self.close(attn.mla_decode(q, cache, table, lengths, cache_type="mla_584", indices=indices, backend=backend), listed[0], 3e-5)

    def test_token_scales(self):
        """vLLM's fp8 with a float scale for each token and head."""
        x = self.normal(2, 40, 2, 48) * 5
        for backend in BACKENDS:
            stored, scale = attn.quantize(x, "f8_e4m3fn_token", backend=backend)
            np.testing.assert_array_equal(scale, (np.abs(x).max(-1).astype(np.float64) / 448).astype(np.float32))
            codes = (x.astype(np.float64) / scale[..., None].astype(np.float64)).astype(ml_dtypes.float8_e4m3fn)
            self.assertLess(np.mean(stored.view(np.uint8) != codes.view(np.uint8)), 2e-3)
            values = E4M3[stored.view(np.uint8)] * scale[..., None].astype(np.float64)
            np.testing.assert_allclose(values, x, atol=np.abs(x).max() / 16)
            q = self.normal(2, 3, 4, 48)
            want = oracle(q, [(list(values), None, True)], 48)
            got = attn.forward(q, stored, stored, k_type="f8_e4m3fn_token", v_type="f8_e4m3fn_token", k_scale=scale, v_scale=scale,
                               backend=backend)
            self.close(got, want[0], 3e-5)

    def nvfp4(self, stored, scale, descale):
        nibbles = np.stack((stored & 15, stored >> 4), -1).reshape(*stored.shape[:-1], -1)
        return E2M1[nibbles] * np.repeat(E4M3[scale], 16, -1) * float(descale[0])

    def test_nvfp4(self):
        x = self.normal(2, 40, 2, 64) * 3
        x[0, 0, 0, :16] = 0
        for backend in BACKENDS:
            stored, scale, descale = attn.quantize(x, "nvfp4", scale="amax", backend=backend)
            self.assertEqual((stored.shape, scale.shape), ((2, 40, 2, 32), (2, 40, 2, 4)))
            np.testing.assert_allclose(descale, np.abs(x).max() / (6 * 448), rtol=1e-6)
            groups = np.abs(x.astype(np.float64)).reshape(2, 40, 2, 4, 16).max(-1) / 6 / float(descale[0])
            np.testing.assert_array_equal(scale, groups.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
            values = self.nvfp4(stored, scale, descale)
            steps = np.repeat(E4M3[scale], 16, -1) * float(descale[0])
            scaled = np.abs(x / np.where(steps > 0, steps, 1))
            nearest = np.abs(np.minimum(scaled, 6)[..., None] - E2M1[:8]).min(-1)  # distance to the nearest of the eight numbers
            got = np.abs(np.abs(values / np.where(steps > 0, steps, 1)) - np.minimum(scaled, 6))
            np.testing.assert_allclose(np.where(steps > 0, got, 0), np.where(steps > 0, nearest, 0), atol=1e-5)
            q = self.normal(2, 3, 4, 64)
            options = dict(k_type="nvfp4", v_type="nvfp4", v_scale=scale, k_descale=descale, v_descale=descale, backend=backend)
            want = oracle(q, [(list(values), None, True)], 64)
            self.close(attn.forward(q, stored, stored, k_scale=scale, **options), want[0], 3e-5)
            # the scale of the neighbouring 16 elements
            wrong = attn.forward(q, stored, stored, k_scale=np.ascontiguousarray(np.roll(scale, 1, -1)), **options)
            self.assertGreater(np.abs(wrong - want[0]).max(), 1e-2)

    def test_nvfp4_without_keys(self):
        """NumPy's arrays without elements have strides of 0."""
        q = self.normal(1, 2, 4, 64)
        for name, scale in ("nvfp4", (4,)), ("f8_e4m3fn_token", ()):
            rows, scales, *_ = attn.quantize(self.normal(1, 0, 2, 64), name)
            self.assertEqual(scales.shape, (1, 0, 2, *scale))
            out, lse = attn.forward(q, rows, rows, k_type=name, v_type=name, k_scale=scales, v_scale=scales, return_lse=True)
            self.assertFalse(out.any())
            self.assertTrue(np.isneginf(lse).all())

    def test_quantize_rows(self):
        x = self.normal(1, 30, 1, 576) * 4
        for backend in BACKENDS:
            stored, none = attn.quantize(x, "mla_656", backend=backend)
            self.assertIsNone(none)
            scales = stored[..., 512:528].copy().view(np.float32)
            most = np.abs(x[..., :512].reshape(1, 30, 1, 4, 128)).max(-1)
            np.testing.assert_array_equal(scales, np.exp2(np.ceil(np.log2(most / 448))))
            codes = (x[..., :512] / np.repeat(scales, 128, -1)).astype(ml_dtypes.float8_e4m3fn)
            np.testing.assert_array_equal(stored[..., :512], codes.view(np.uint8))
            np.testing.assert_array_equal(stored[..., 528:], x[..., 512:].astype(ml_dtypes.bfloat16).view(np.uint8))
            y = np.ascontiguousarray(x[..., :512])
            rows, powers = attn.quantize(y, "mla_584", backend=backend)
            most = np.abs(y[..., :448].reshape(1, 30, 1, 7, 64)).max(-1)
            np.testing.assert_array_equal(powers[..., :7], np.ceil(np.log2(most / 448)) + 127)
            codes = (y[..., :448] / np.repeat(np.exp2(powers[..., :7].astype(np.float64) - 127), 64, -1)).astype(ml_dtypes.float8_e4m3fn)
            np.testing.assert_array_equal(rows[..., :448], codes.view(np.uint8))
            np.testing.assert_array_equal(rows[..., 448:], y[..., 448:].astype(ml_dtypes.bfloat16).view(np.uint8))
        self.refuses(ValueError, ["multiple of 576"], attn.quantize, self.normal(1, 2, 1, 512), "mla_656")
        self.refuses(ValueError, ["multiple of 16"], attn.quantize, self.normal(1, 2, 1, 24), "nvfp4")
        x = self.normal(1, 2, 1, 32)
        self.refuses(ValueError, ["per is head (2)", "accepted for nvfp4: none (0), tensor (1)"], attn.quantize, x, "nvfp4", per="head")
        self.refuses(ValueError, ["per is block (3)", "for nvfp4"], attn.quantize, x, "nvfp4", per=64)
        self.refuses(ValueError, ["scale is amax (2)", "accepted for f8_e4m3fn_token: one (0)"], attn.quantize, x, "f8_e4m3fn_token",
                     scale="amax")
        self.refuses(ValueError, ["scale is given (1)", "accepted for i8: one (0)"], attn.quantize, x, "i8", scale=2.0)

    def test_append_and_roll(self):
        """What kv_append and kv_roll write is what quantize makes."""
        for name, dim in ("f8_e4m3fn_token", 48), ("nvfp4", 48), ("mla_656", 576), ("mla_584", 512):
            for backend in BACKENDS:
                x = self.normal(2, 6, 1, dim)
                made = attn.quantize(x, name, backend=backend)
                stored, scale = made[0], (made[1] if attn.types()[name]["has_scales"] else None)
                cache = np.zeros((2, 9, 1, stored.shape[-1]), np.uint8)
                scales = None if scale is None else np.zeros((2, 9, *scale.shape[2:]), scale.dtype)
                lengths = np.array([3, 1], np.int32)
                attn.kv_append(x, None, cache, None, lengths, k_type=name, k_scale=scales, advance_seqlens=True, backend=backend)
                self.assertEqual(lengths.tolist(), [9, 7])
                for b, first in (0, 3), (1, 1):
                    np.testing.assert_array_equal(cache[b, first:first + 6], stored[b].view(np.uint8))
                    self.assertFalse(cache[b, :first].any())
                    if scales is not None:
                        np.testing.assert_array_equal(scales[b, first:first + 6], scale[b])
                recent, table = paged(self.rng, x, 2)
                recent_lengths = np.array([6, 6], np.int32)
                old, old_scales = np.zeros_like(cache), None if scales is None else np.zeros_like(scales)
                old_lengths = np.array([0, 2], np.int32)
                attn.kv_roll(recent, None, table, recent_lengths, old, None, old_lengths, keep=2, k_type=name, k_scale=old_scales,
                             backend=backend)
                self.assertEqual((recent_lengths.tolist(), old_lengths.tolist()), ([2, 2], [4, 6]))
                for b, first in (0, 0), (1, 2):
                    np.testing.assert_array_equal(old[b, first:first + 4], stored[b, :4].view(np.uint8))

    def test_special_numbers(self):
        x = np.zeros((1, 4, 1, 576), np.float32)
        x[0, 1, 0, 5], x[0, 1, 0, 6] = np.inf, 448.0
        x[0, 2, 0, 7] = np.nan
        x[0, 3] = 1e-40
        stored, _ = attn.quantize(x, "mla_656")
        self.assertEqual(stored[0, 1, 0, 512:516].view(np.float32)[0], 1)
        self.assertEqual(E4M3[stored[0, 1, 0, 5:7]].tolist(), [448, 448])  # an infinity saturates
        self.assertTrue(np.isnan(E4M3[stored[0, 2, 0, 7]]))
        self.assertEqual(stored[0, 3, 0, 512:516].view(np.float32)[0], 2.0**-126)
        stored, scale, _ = attn.quantize(x[..., :32], "nvfp4")
        self.assertTrue(np.isnan(E4M3[scale[0, 2, 0, 0]]))
        self.assertEqual(scale[0, 0].tolist(), [[0, 0]])

    def test_refused(self):
        q, rows = self.normal(1, 1, 4, 512), np.zeros((1, 5, 1, 576), np.uint8)
        self.refuses(ValueError, ["k_scale is None", "u8 scales", "64 elements"], attn.forward, q, rows, None, k_type="mla_584")
        self.refuses(ValueError, ["multiples of 656 bytes"], attn.forward, q, rows, None, k_type="mla_656")
        self.refuses(ValueError, ["k_scale has shape [1, 5, 1]"], attn.forward, q, rows, None, k_type="mla_584",
                     k_scale=np.zeros((1, 5, 1), np.uint8))


class Decode(Case):
    def test_flash_qv(self):
        """FlashAttention 3's qv: k and v are views of a cache whose rows are latent, rope."""
        cache = self.normal(2, 50, 1, 80, dtype=np.float16)
        q, qv = self.normal(2, 2, 8, 16, dtype=np.float16), self.normal(2, 2, 8, 64, dtype=np.float16)
        v, k = cache[..., :64], cache[..., 64:]
        lengths = np.array([50, 21], np.int32)
        rows = [x[:n].astype(np.float64) for x, n in zip(cache, lengths)]
        want = oracle(np.concatenate((qv, q), -1), [(rows, None, True)], 64, causal=True)
        got = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, qv=qv, causal=True)
        self.close(got, want[0], 4e-3)
        self.refuses(ValueError, ["arrays of their own", "rows[..., :Dv]"], flash_attn_with_kvcache, q, k.copy(), v.copy(), qv=qv)
        self.refuses(ValueError, ["qv has shape"], flash_attn_with_kvcache, q, k, v, qv=q)

    def test_devices_decline(self):
        """Of devices' kernels those of latent caches alone take V in K, and none the rest."""
        found = {k["name"]: k["takes"] for k in attn.info()["kernels"] if k["op"] == "forward"}
        for name, takes in found.items():
            for what in "v in k", "lists of keys", "keys without positions", "block mask with packed q":
                if name.startswith("prefix_"):
                    continue
                taken = name == "reference" or name.startswith("cpu_") or what == "v in k" and name.startswith("mla_sm90_")
                self.assertEqual(what in takes, taken, (name, what))


if __name__ == "__main__":
    unittest.main()
