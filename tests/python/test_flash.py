"""attn.flash over the parameter grids of FlashAttention's published tests (versions 2 and 3: its lengths, head sizes, head
counts and switches), against float64 written out. A run takes a random part of each grid, small problems first of all;
ATTN_FLASH_CASES=2000 takes so many of each, of every size."""
import itertools
import os
import unittest

from support import Case, attn, ml_dtypes, np

import attn.flash
from attn.flash import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

CASES = int(os.environ.get("ATTN_FLASH_CASES", 0))
SHARE = 4 if "asan" in os.environ.get("LD_PRELOAD", "") else 1
SMALL = 1 << 15  # pairs of query and key, unless CASES says otherwise

LENGTHS = [(1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211),
           (108, 256), (256, 512), (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048),
           (1, 3), (2, 1), (511, 1), (3, 513), (307, 256)]
CACHE_LENGTHS = [(1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (128, 128), (256, 512), (16, 3000)]
DIMS = [32, 40, 59, 64, 96, 111, 128, 160, 192, 224, 256]
BF16, F16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(ml_dtypes.float8_e4m3fn)


def one_sequence(q, k, v, causal=False, window=(-1, -1), chunk=0, softcap=0.0, slopes=None, scale=None):
    """(out, lse [H, Sq]) of q [Sq, H, D], k and v [Skv, Hkv, D], in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    repeat = q.shape[1] // k.shape[1]
    s = np.einsum("ihd,jhd->hij", q, np.repeat(k, repeat, 1)) * (scale or q.shape[2] ** -0.5)
    if softcap:
        s = softcap * np.tanh(s / softcap)
    i, j = np.arange(len(q))[:, None] + len(k) - len(q), np.arange(len(k))
    if slopes is not None:
        s = s - np.asarray(slopes, np.float64)[:, None, None] * abs(i - j)
    visible = np.ones((len(q), len(k)), bool)
    left, right = window[0], 0 if causal else window[1]
    visible &= (left < 0) | (j >= i - left)
    visible &= (right < 0) | (j <= i + right)
    if chunk:
        visible &= j // chunk == i // chunk
    s = np.where(visible, s, -np.inf)
    m = np.max(s, -1, keepdims=True, initial=-1e300)
    p = np.exp(s - m)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.where(total > 0, p @ np.repeat(v, repeat, 1).swapaxes(0, 1) / total, 0).swapaxes(0, 1)
        return out, np.where(total > 0, m + np.log(total), -np.inf)[..., 0]


def rotated(x, cos, sin, interleaved, positions):
    """x [S, H, D] for positions [S], rounded to its type."""
    half = cos.shape[1]
    pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    c, s = (np.asarray(t, np.float64)[positions][:, None] for t in (cos, sin))
    out = np.asarray(x, np.float64)
    a, b = out[..., pairs[0]].copy(), out[..., pairs[1]].copy()
    out[..., pairs[0]], out[..., pairs[1]] = a * c - b * s, a * s + b * c
    return out.astype(np.float32).astype(x.dtype)


class Grid(Case):
    def setUp(self):
        super().setUp()
        self.served, self.refused = 0, {}

    def pick(self, values):
        return values[self.rng.integers(len(values))]

    def array(self, *shape, dtype=BF16, factor=1.0):
        return (self.rng.standard_normal(shape, np.float32) * np.float32(factor)).astype(dtype)

    def problems(self, lengths, count):
        """Random members of a grid."""
        lengths = [pair for pair in lengths if CASES or pair[0] * pair[1] <= SMALL]
        for _ in range(CASES or count // SHARE):
            seqlen_q, seqlen_k = self.pick(lengths)
            d = self.pick(DIMS)
            local = self.pick((False, True))
            yield {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "d": d, "dv": self.pick([256, 512, d] if d <= 64 else [128, d]),
                   "heads": 6, "heads_kv": self.pick((6, 2, 1)), "causal": self.pick((False, True)),
                   "window": tuple(int(x) for x in self.rng.integers(0, seqlen_k, 2)) if local else (-1, -1),
                   "softcap": self.pick((0.0, 0.0, 15.0)), "dtype": self.pick((BF16, F16)),
                   "hints": {"num_splits": self.pick((0, 1, 3)), "pack_gqa": self.pick((None, False, True))}}

    def near(self, got, want, dtype, loose=1):
        """Rounding of the result, and what float32 does to scores; `loose` where q and k were rounded on the way."""
        step = {BF16: 2**-8, F16: 2**-11}.get(dtype, 2**-8)
        self.close(got, want, 2e-5 + (loose > 1) * 4 * step, step * loose)

    def report(self, what):
        if CASES:
            print(f"{what}: {self.served} served, refused: {self.refused}")
        self.assertGreater(self.served, 0)

    def slopes(self, p, batch, packed=False):
        form = self.pick(("none", "none", "heads") if packed else ("none", "none", "heads", "batch"))
        if form == "none":
            return None, [None] * batch
        slopes = (self.rng.random((p["heads"],) if form == "heads" else (batch, p["heads"])) * 0.3).astype(np.float32)
        return slopes, [slopes] * batch if form == "heads" else list(slopes)

    def test_func(self):
        for p in self.problems(LENGTHS, 24):
            batch = 3
            fp8 = self.rng.random() < 0.2
            dtype = E4M3 if fp8 else p["dtype"]
            q = self.array(batch, p["seqlen_q"], p["heads"], p["d"], dtype=dtype, factor=p["softcap"] / 4 or 1)
            k = self.array(batch, p["seqlen_k"], p["heads_kv"], p["d"], dtype=dtype)
            v = self.array(batch, p["seqlen_k"], p["heads_kv"], p["dv"], dtype=dtype)
            descales = self.rng.random((3, batch, p["heads_kv"])).astype(np.float32) + 0.5 if fp8 else [None] * 3
            chunk = int(self.pick((0, self.rng.integers(1, 2 * p["seqlen_k"]))))
            slopes, each = self.slopes(p, batch)
            options = {"causal": p["causal"], "window_size": p["window"], "attention_chunk": chunk, "softcap": p["softcap"],
                       "alibi_slopes": slopes, **dict(zip(("q_descale", "k_descale", "v_descale"), descales))}
            with self.subTest(**p, chunk=chunk, fp8=fp8, slopes=None if slopes is None else slopes.shape):
                out, lse = flash_attn_func(q, k, v, return_softmax_lse=True, **options, **p["hints"])
                for b in range(batch):
                    x, y, z = (np.asarray(a[b], np.float64) for a in (q, k, v))
                    if fp8:
                        x = x * np.repeat(descales[0][b], 6 // p["heads_kv"])[:, None]
                        y, z = y * descales[1][b][:, None], z * descales[2][b][:, None]
                    want, want_lse = one_sequence(x, y, z, p["causal"], p["window"], chunk, p["softcap"], each[b])
                    self.near(out[b], want, BF16 if fp8 else dtype)
                    self.close(lse[b], want_lse, 1e-4, 1e-5)
                self.served += 1
        self.report("flash_attn_func")

    def test_varlen(self):
        for p in self.problems(LENGTHS, 24):
            batch = 3
            total = lambda n, low: [int(self.rng.integers(max(low, n - 20), n + 1)) for _ in range(batch)]
            room_q, room_k = total(p["seqlen_q"], 1), total(p["seqlen_k"], 0)
            partial_q, partial_k, padded = (self.pick((False, True)) for _ in range(3))
            used_q = [int(self.rng.integers(0, n + 1)) for n in room_q] if partial_q else room_q
            used_k = [int(self.rng.integers(0, n + 1)) for n in room_k] if partial_k else room_k
            cu_q, cu_k = (np.cumsum([0, *n]).astype(np.int32) for n in (room_q, room_k))
            q = self.array(cu_q[-1] + 2, p["heads"], p["d"], dtype=p["dtype"])
            k, v = (self.array(cu_k[-1] + 1, p["heads_kv"], d, dtype=p["dtype"]) for d in (p["d"], p["dv"]))
            slopes, each = self.slopes(p, batch, packed=True)
            options = {"causal": p["causal"], "window_size": p["window"], "softcap": p["softcap"], "alibi_slopes": slopes}
            i32 = lambda x: np.array(x, np.int32)
            if padded:  # K and V with room for the longest each
                wide = [np.full((batch, p["seqlen_k"], p["heads_kv"], x.shape[2]), np.nan, np.float32).astype(p["dtype"])
                        for x in (k, v)]
                for b, (w, x) in itertools.product(range(batch), zip(wide, (k, v))):
                    w[b, :room_k[b]] = x[cu_k[b]:cu_k[b] + room_k[b]]
                arrays = (q, *wide, cu_q, None)
            else:
                arrays = (q, k, v, cu_q, cu_k)
            with self.subTest(**p, used_q=used_q, used_k=used_k, padded=padded):
                out, lse = flash_attn_varlen_func(*arrays, p["seqlen_q"], p["seqlen_k"], seqused_q=i32(used_q) if partial_q else None,
                                                  seqused_k=i32(used_k) if partial_k or padded else None,
                                                  return_softmax_lse=True, **options, **p["hints"])
                want, want_lse = np.zeros(out.shape), np.full(lse.shape, -np.inf)
                for b in range(batch):
                    rows = slice(cu_q[b], cu_q[b] + used_q[b])
                    keys = slice(cu_k[b], cu_k[b] + used_k[b])
                    want[rows], want_lse[:, rows] = one_sequence(q[rows], k[keys], v[keys], p["causal"], p["window"], 0,
                                                                 p["softcap"], each[b])
                self.near(out, want, p["dtype"])
                self.close(lse, want_lse, 1e-4, 1e-5)
                self.served += 1
        self.report("flash_attn_varlen_func")

    def test_kvcache(self):
        for p in self.problems(CACHE_LENGTHS, 40):
            batch, seqlen_q, seqlen_k = 3, p["seqlen_q"], p["seqlen_k"]
            new, varlen, leftpad, by_index = (self.pick((False, True)) for _ in range(4))
            page_size = self.pick((None, None, 1, 4, 128))
            if page_size and seqlen_k % page_size or page_size and by_index:
                page_size = None
            if new and seqlen_q > seqlen_k:
                continue
            # Rotary halves as in the published tests, whose R is a multiple of 16.
            rotary = int(self.pick((0, 0.5, 1)) * p["d"]) // 16 * 16 if new else 0
            interleaved, shifted = (self.pick((False, True)) for _ in range(2))
            local = max(p["window"]) >= 0
            t = seqlen_q if self.pick((False, True)) else int(self.rng.integers(1, seqlen_q + 1))
            rows = batch * 2 if by_index else batch
            lengths = self.rng.integers(0 if new else 1, seqlen_k - max(t, seqlen_q) + 1 if new else seqlen_k + 1, batch).astype(np.int32)
            pads = np.array([self.rng.integers(0, n) if n else 0 for n in lengths], np.int32) if leftpad else np.zeros(batch, np.int32)
            index = self.rng.permutation(rows)[:batch].astype(np.int32) if by_index else np.arange(batch)
            caches = [self.array(rows, seqlen_k, p["heads_kv"], d, dtype=p["dtype"]) for d in (p["d"], p["dv"])]
            given, table = [c.copy() for c in caches], None
            if page_size:
                pages = seqlen_k // page_size
                table = self.rng.permutation(rows * pages).astype(np.int32).reshape(rows, pages)
                for at, cache in enumerate(caches):
                    given[at] = np.empty((rows * pages, page_size, *cache.shape[2:]), cache.dtype)
                    given[at][table.reshape(-1)] = cache.reshape(rows * pages, page_size, *cache.shape[2:])
            count_q = [int(self.rng.integers(1, seqlen_q + 1)) for _ in range(batch)] if varlen else [seqlen_q] * batch
            count_t = ([int(self.rng.integers(1, t + 1)) for _ in range(batch)] if varlen else [t] * batch) if new else [0] * batch
            qs = [self.array(n, p["heads"], p["d"], dtype=p["dtype"]) for n in count_q]
            ks, vs = ([self.array(n, p["heads_kv"], d, dtype=p["dtype"]) for n in count_t] for d in (p["d"], p["dv"]))
            join = np.concatenate if varlen else np.stack
            offsets = lambda n: np.cumsum([0, *n]).astype(np.int32) if varlen else None
            angles = self.rng.random((seqlen_k, rotary // 2)) * 6.28
            cos, sin = (f(angles).astype(np.float32).astype(p["dtype"]) if rotary else None for f in (np.cos, np.sin))
            chunk = int(self.pick((0, self.rng.integers(1, 2 * seqlen_k)))) if not varlen else 0
            begin = lengths // 2 if shifted else lengths
            options = {"causal": p["causal"], "window_size": p["window"], "softcap": p["softcap"], "attention_chunk": chunk,
                       "rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved,
                       "rotary_seqlens": begin if shifted and rotary else None, "cache_seqlens": lengths,
                       "cache_leftpad": pads if leftpad else None, "cache_batch_idx": index if by_index else None,
                       "block_table" if interleaved else "page_table": table, "cu_seqlens_q": offsets(count_q),
                       "cu_seqlens_k_new": offsets(count_t) if new else None, "max_seqlen_q": seqlen_q if varlen else None}
            with self.subTest(**p, new=new, varlen=varlen, leftpad=leftpad, by_index=by_index, page_size=page_size, rotary=rotary,
                              interleaved=interleaved, shifted=shifted, t=t, chunk=chunk):
                out, lse = flash_attn_with_kvcache(join(qs), *given, join(ks) if new else None, join(vs) if new else None,
                                                   return_softmax_lse=True, **options, **p["hints"])
                if page_size:
                    given = [g[table.reshape(-1)].reshape(cache.shape) for g, cache in zip(given, caches)]
                at = 0
                for b in range(batch):
                    n, row, end = lengths[b], index[b], lengths[b] + count_t[b]
                    q = qs[b]
                    if new:
                        if rotary:
                            ks[b] = rotated(ks[b], cos, sin, interleaved, begin[b] + np.arange(count_t[b]))
                            each = np.arange(count_q[b]) * (p["causal"] or local or chunk > 0)
                            q = rotated(q, cos, sin, interleaved, np.minimum(begin[b] + each, seqlen_k - 1))
                        caches[0][row, n:end], caches[1][row, n:end] = ks[b], vs[b]
                    k, v = (cache[row, pads[b]:end] for cache in caches)
                    want, want_lse = one_sequence(q, k, v, p["causal"], p["window"], chunk, p["softcap"])
                    got = out[at:at + len(q)] if varlen else out[b]
                    got_lse = lse[:, at:at + len(q)] if varlen else lse[b]
                    self.near(got, want, p["dtype"], 4 if rotary else 1)
                    self.close(got_lse, want_lse, 0.05 if rotary else 1e-4, 1e-5)
                    at += len(q)
                for got, want in zip(given, caches):  # what was written, and nothing beside it
                    self.close(got, want, 0, 2**-7 if rotary else 0)
                self.served += 1
        self.report("flash_attn_with_kvcache")


class Arguments(Case):
    def test_refused_by_name(self):
        q, k, v = self.qkv(dtype=np.float16)
        for name, value in {"dropout_p": 0.1, "qv": q, "sm_margin": 8, "return_attn_probs": True}.items():
            self.refuses(ValueError, [name, "accepted"], flash_attn_func, q, k, v, **{name: value})
        self.refuses(ValueError, "scheduler_metadata is 7", flash_attn_with_kvcache, q, k, v, scheduler_metadata=7)
        self.refuses(ValueError, ["attention_chunk is 4", "packed"], flash_attn_varlen_func, q[0], k, v, np.array([0, 4, 9], np.int32),
                     None, 9, 13, attention_chunk=4)
        self.refuses(ValueError, ["alibi_slopes has shape [2, 4]", "packed"], flash_attn_varlen_func, q[0], k, v,
                     np.array([0, 4, 9], np.int32), None, 9, 13, alibi_slopes=np.zeros((2, 4), np.float32))
        self.refuses(ValueError, ["alibi_slopes has shape [3, 4]", "[2, 4]"], flash_attn_func, q, k, v,
                     alibi_slopes=np.zeros((3, 4), np.float32))
        self.refuses(ValueError, "cache_seqlens is None", flash_attn_with_kvcache, q, k, v, k, v)
        self.refuses(ValueError, "rotary_cos is given", flash_attn_with_kvcache, q, k, v, rotary_cos=q)
        self.refuses(ValueError, "page_table is given", flash_attn_with_kvcache, q, k, v, block_table=q, page_table=q)
        self.refuses(ValueError, "cache_batch_idx is given", flash_attn_with_kvcache, q, k, v, block_table=q,
                     cache_batch_idx=np.array([0, 1], np.int32))
        self.refuses(TypeError, "q is a list", flash_attn_func, [1], k, v)
        self.assertRaises(TypeError, flash_attn_func, q, k, v, 0.0)  # versions 2 and 3 differ in what that would be

    def test_forms(self):
        """One integer as cache_seqlens, out=, and a cache that is full."""
        q, k, v = self.qkv(dtype=np.float16)
        out = np.empty_like(q)
        self.assertIs(flash_attn_with_kvcache(q, k, v, cache_seqlens=5, out=out, causal=True), out)
        self.close(out, attn.forward(q, k[:, :5], v[:, :5], causal=True), 0)
        self.close(flash_attn_with_kvcache(q, k, v), flash_attn_func(q, k, v), 0)
        slopes = np.ones((2, 4), np.float32)
        self.assertIs(flash_attn_func(q, k, v, alibi_slopes=slopes, out=out), out)
        self.close(out, attn.forward(q, k, v, alibi_slopes=slopes[0]), 0)
        pads = np.array([3, 0], np.int32)
        got = flash_attn_with_kvcache(q, k, v, cache_leftpad=pads)
        self.close(got[0], attn.forward(q[:1], k[:1, 3:], v[:1, 3:])[0], 1e-3)
        offsets, table = np.array([0, 5, 18], np.int32), np.array([[0], [1]], np.int32)
        got = flash_attn_varlen_func(q.reshape(18, 4, 16), k, v, offsets, offsets // 2, 13, 13, block_table=table)
        self.close(got[:5], attn.forward(q.reshape(1, 18, 4, 16)[:, :5], k[:1, :2], v[:1, :2])[0], 1e-3)
        padded = flash_attn_varlen_func(q, k, v, None, None, 9, 13, seqused_q=np.array([4, 9], np.int32), return_softmax_lse=True)
        want, want_lse = attn.forward(q, k, v, return_lse=True)
        self.close(padded[0][0, :4], want[0, :4], 1e-3)
        self.close(padded[0][0, 4:], np.zeros((5, 4, 16)), 0)
        self.close(padded[1][1], want_lse[1], 1e-5)


if __name__ == "__main__":
    unittest.main()
