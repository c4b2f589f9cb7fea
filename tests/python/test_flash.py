"""attn.flash over the parameter grids of FlashAttention's published tests (versions 2 and 3: its lengths, head sizes, head
counts and switches), against float64 written out. A run takes a random part of each grid, small problems first of all;
ATTN_FLASH_CASES=2000 takes so many of each, of every size."""
import itertools
import os
import re
import unittest
import unittest.mock

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
        for name, value in {"dropout_p": 0.1, "qv": q, "sm_margin": 8}.items():
            self.refuses(ValueError, [name, "accepted"], flash_attn_func, q, k, v, **{name: value})
        self.refuses(ValueError, "scheduler_metadata is 7", flash_attn_with_kvcache, q, k, v, scheduler_metadata=7)
        self.refuses(ValueError, ["attention_chunk is 4", "packed"], flash_attn_varlen_func, q[0], k, v, np.array([0, 4, 9], np.int32),
                     None, 9, 13, attention_chunk=4)
        self.refuses(ValueError, ["alibi_slopes has shape [2, 4]", "packed"], flash_attn_varlen_func, q[0], k, v,
                     np.array([0, 4, 9], np.int32), None, 9, 13, alibi_slopes=np.zeros((2, 4), np.float32))
        self.refuses(ValueError, ["alibi_slopes has shape [3, 4]", "[2, 4]"], flash_attn_func, q, k, v,
                     alibi_slopes=np.zeros((3, 4), np.float32))
        self.refuses(ValueError, "cache_seqlens is None", flash_attn_with_kvcache, q, k, v, k, v)
        full = dict(cache_seqlens=np.array([11, 12], np.int32))
        self.refuses(ValueError, "cache_seqlens[1] is 12; accepted: 0 to 11", flash_attn_with_kvcache, q, k.copy(), v.copy(), k[:, :2], v[:, :2],
                     **full)
        self.refuses(ValueError, "cache_seqlens[1] is 12; accepted: 0 to 11", flash_attn_with_kvcache, q, k.copy(), v.copy(), k[0, :3], v[0, :3],
                     cu_seqlens_k_new=np.array([0, 1, 3], np.int32), **full)
        self.refuses(ValueError, "cache_seqlens[0] is 11; accepted: 0 to 6", flash_attn_with_kvcache, q, k[:, :8].copy(), v[:, :8].copy(),
                     k[:, :2], v[:, :2], block_table=np.array([[0], [1]], np.int32), **full)
        self.refuses(ValueError, "rotary_cos is given", flash_attn_with_kvcache, q, k, v, rotary_cos=q)
        self.refuses(ValueError, "page_table is given", flash_attn_with_kvcache, q, k, v, block_table=q, page_table=q)
        self.refuses(ValueError, "cache_batch_idx is given", flash_attn_with_kvcache, q, k, v, block_table=q,
                     cache_batch_idx=np.array([0, 1], np.int32))
        self.refuses(TypeError, "q is a list", flash_attn_func, [1], k, v)
        for scale in None, 0.25:  # version 3's order
            self.refuses(ValueError, "dropout_p is", flash_attn_func, q, k, v, scale, True)
        self.refuses(ValueError, "learnable_sink is given", flash_attn_func, q, k, v, s_aux=q[0, 0, :, 0], learnable_sink=q[0, 0, :, 0])

    def test_positions(self):
        """Arguments by position, in the order of FlashAttention 2."""
        q, k, v = self.qkv(seqlen_q=7, seqlen_kv=7)
        slopes = np.abs(self.normal(4)) / 8
        want, want_lse = (np.stack(x) for x in zip(*(one_sequence(*x, True, (3, 0), 0, 5.0, slopes, 0.3) for x in zip(q, k, v))))
        out, lse, probs = flash_attn_func(q, k, v, 0.0, 0.3, True, (3, 0), 5.0, slopes, False, True)
        self.close(out, want)
        self.close(lse, want_lse)
        self.assertIsNone(probs)
        offsets = np.array([0, 7, 14], np.int32)
        packed = [x.reshape(14, *x.shape[2:]) for x in (q, k, v)]
        out, lse, probs = flash_attn_varlen_func(*packed, offsets, offsets, 7, 7, 0.0, 0.3, True, (3, 0), 5.0, slopes, False, True)
        self.close(out, want.reshape(out.shape))
        self.close(lse, want_lse.transpose(1, 0, 2).reshape(lse.shape))
        self.assertIsNone(probs)
        table = np.array([[1], [0]], np.int32)
        out = flash_attn_varlen_func(packed[0], k[::-1].copy(), v[::-1].copy(), offsets, offsets, 7, 7, 0.0, 0.3, True, (3, 0), 5.0,
                                     slopes, False, False, table)
        self.close(out, want.reshape(out.shape))
        caches = [np.zeros_like(x) for x in (k, v)]
        out = flash_attn_with_kvcache(q, *caches, k, v, None, None, 0, None, None, None, 0.3, True, (3, 0), 5.0, True, slopes, 0)
        self.close(out, want)
        kv = np.stack((k, v), 2)
        self.close(attn.flash.flash_attn_kvpacked_func(q, kv, 0.0, 0.3, True, (3, 0), 5.0, slopes), want)
        self.close(attn.flash.flash_attn_varlen_kvpacked_func(packed[0], kv.reshape(14, 2, 2, 16), offsets, offsets, 7, 7, 0.0, 0.3,
                                                              True, (3, 0), 5.0, slopes), want.reshape(out.reshape(14, 4, 16).shape))
        qkv = np.stack((q, np.repeat(k, 2, 2), np.repeat(v, 2, 2)), 2)
        self.close(attn.flash.flash_attn_qkvpacked_func(qkv, 0.0, 0.3, True, (3, 0), 5.0, slopes), want)
        self.close(attn.flash.flash_attn_varlen_qkvpacked_func(qkv.reshape(14, 3, 4, 16), offsets, 7, 0.0, 0.3, True, (3, 0), 5.0,
                                                               slopes), want.reshape(14, 4, 16))
        self.refuses(ValueError, ["kv has shape", "[B, Skv, 2, Hkv, D]"], attn.flash.flash_attn_kvpacked_func, q, k)

    def test_sinks(self):
        """s_aux and learnable_sink against float64: a key with that score and the value 0."""
        q, k, v = self.qkv()
        sinks = self.normal(4)
        plain, lse = (np.stack(x) for x in zip(*(one_sequence(*x, True) for x in zip(q, k, v))))
        share = 1 / (1 + np.exp(sinks[None, :, None] - lse))  # [B, H, Sq]
        want = plain * share.transpose(0, 2, 1)[..., None]
        for name, given in (("s_aux", sinks), ("learnable_sink", sinks), ("s_aux", sinks.astype(BF16))):
            bound = 2e-6 if given is sinks else 1e-2
            with self.subTest(name, type=given.dtype):
                self.close(flash_attn_func(q, k, v, causal=True, **{name: given}), want, bound)
                self.close(flash_attn_with_kvcache(q, k, v, causal=True, **{name: given}), want, bound)
                out = flash_attn_varlen_func(q.reshape(18, 4, 16), k.reshape(26, 2, 16), v.reshape(26, 2, 16), np.array([0, 9, 18]),
                                             np.array([0, 13, 26]), 9, 13, causal=True, **{name: given})
                self.close(out, want.reshape(18, 4, 16), bound)
        got = flash_attn_func(q, k, v, alibi_slopes=np.zeros((2, 4), np.float32), causal=True, s_aux=sinks)  # a call for each sequence
        self.close(got, want)

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
        got = flash_attn_func(q[:0], k[:0], v[:0], alibi_slopes=slopes[:0], return_softmax_lse=True)
        self.assertEqual([x.shape for x in got], [(0, 9, 4, 16), (0, 4, 9)])
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


    def test_lengths_of_any_integers(self):
        """cache_seqlens: Python's and NumPy's integers, arrays without dimensions, arrays of i32 and i64."""
        q, k, v = self.qkv(dtype=np.float16)
        want = attn.forward(q, k[:, :5], v[:, :5])
        both = np.array([5, 5])
        given = [5, np.int32(5), np.int64(5), np.uint8(5), np.array(5), np.array(5, np.int32), both.astype(np.int32), both, both[::-1],
                 np.array([[5, 9], [5, 9]])[:, 0]]
        torch_arrays = []
        try:
            import torch
            torch_arrays = [torch.tensor(5), torch.tensor(5, dtype=torch.int32), torch.from_numpy(both), torch.from_numpy(both).int()]
        except ModuleNotFoundError:
            pass
        for lengths in given:
            with self.subTest(lengths=lengths, type=type(lengths).__name__):
                np.testing.assert_array_equal(flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths), want)
                caches = k.copy(), v.copy()
                got = flash_attn_with_kvcache(q, *caches, k[:, :2] * 2, v[:, :2] * 2, cache_seqlens=lengths)
                np.testing.assert_array_equal(got, attn.forward(q, caches[0][:, :7], caches[1][:, :7]))
                np.testing.assert_array_equal(caches[0], np.concatenate((k[:, :5], k[:, :2] * 2, k[:, 7:]), axis=1))
        for lengths in torch_arrays:
            with self.subTest(lengths=lengths):
                got = flash_attn_with_kvcache(*map(torch.from_numpy, (q, k, v)), cache_seqlens=lengths)
                np.testing.assert_array_equal(got.numpy(), want)

    def test_other_integers(self):
        """i64 for each array of integers, and no max_seqlen_k, or NumPy's."""
        q, k, v = self.qkv(dtype=np.float16)
        cu_q, cu_k, used = np.array([0, 4, 9]), np.array([0, 6, 13]), np.array([3, 7])
        want = [attn.forward(q[:1, a:b], k[:1, c:c + n], v[:1, c:c + n]) for a, b, c, n in ((0, 4, 0, 3), (4, 9, 6, 7))]
        for kind, longest in itertools.product((np.int32, np.int64), (None, 7, np.int64(7), np.array(7), 13)):
            with self.subTest(kind=kind, longest=longest):
                got = flash_attn_varlen_func(q[0], k[0], v[0], cu_q.astype(kind), cu_k.astype(kind), None if longest is None else 9, longest,
                                             seqused_k=used.astype(kind))
                self.close(got, np.concatenate(want, axis=1)[0], 1e-3)
        index, pads = np.array([1, 0]), np.array([2, 0])
        got = flash_attn_with_kvcache(q, k, v, cache_batch_idx=index, cache_leftpad=pads)
        self.close(got, flash_attn_with_kvcache(q, k, v, cache_batch_idx=index.astype(np.int32), cache_leftpad=pads.astype(np.int32)), 0)
        self.close(got[1], attn.forward(q[1:], k[:1], v[:1])[0], 1e-3)

    def test_a_scale_of_0_is_a_scale(self):
        q, k, v = self.qkv()
        given = []
        with unittest.mock.patch.object(attn.flash, "forward", lambda *_, scale, **__: given.append(scale)):
            for scale in 0, 0.0, None:
                flash_attn_func(q, k, v, softmax_scale=scale)
                flash_attn_varlen_func(q[0], k[0], v[0], np.array([0, 9]), np.array([0, 13]), 9, 13, softmax_scale=scale)
                flash_attn_with_kvcache(q, k, v, softmax_scale=scale)
        self.assertEqual(given, [0] * 6 + [None] * 3)

    def test_refusals_have_these_names(self):
        """What forward(), kv_append() and the library refuse is told by the names that the caller used."""
        f32, i32 = self.normal, lambda *x: np.array(x, np.int32)
        q, k, v = self.qkv()  # [2, 9, 4, 16], [2, 13, 2, 16]
        pages, table = f32(6, 4, 2, 16), i32(0, 1, 2, 3).reshape(2, 2)
        base = {"func": {"q": q, "k": k, "v": v},
                "varlen": {"q": q[0], "k": k[0], "v": v[0], "cu_seqlens_q": i32(0, 4, 9), "cu_seqlens_k": i32(0, 6, 13), "max_seqlen_q": 9,
                           "max_seqlen_k": 13},
                "cache": {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": i32(3, 4)}}
        base["new"] = {**base["cache"], "k": k[:, :2], "v": v[:, :2]}
        turn = {"rotary_cos": f32(13, 4), "rotary_sin": f32(13, 4)}
        base["rotary"] = {**base["new"], **turn}
        base["pages"] = {**base["varlen"], "k": pages, "v": pages, "block_table": table}
        for name in "block_table", "page_table":
            base[name] = {**base["cache"], "k_cache": pages, "v_cache": pages, name: table}
            base["new " + name] = {**base[name], "k": k[:, :2], "v": v[:, :2]}
        calls = {"func": flash_attn_func, "varlen": flash_attn_varlen_func, "pages": flash_attn_varlen_func}
        everywhere = ["func", "varlen", "cache", "new", "rotary", "pages", "block_table", "page_table", "new page_table"]
        packed, cached, new = ["varlen", "pages"], ["cache", "new", "rotary", "block_table", "page_table"], ["new", "rotary", "new page_table"]
        half, short = k[..., :8].copy(), lambda x: x[:, :5] if x.ndim == 4 else x[:5]
        cases = [  # calls, argument, values; the sentence begins with the argument
            (everywhere, "softmax_scale", ["x", np.inf, 1e60]), (everywhere, "causal", ["x", 1]),
            (everywhere, "window_size", [3, (1,), ("a", 1), (1.5, 2), (-3, 0), (0, -3), (2**63, 0), "ab", None]),
            (everywhere, "softcap", ["x", -1.0, np.nan]), (everywhere, "attention_chunk", [-1, 2.5, None, "x"]), (packed, "attention_chunk", [4]),
            (everywhere, "backend", ["x", "cuda", 3]), (everywhere, "return_softmax_lse", ["x", 1]),
            (everywhere, "q_descale", [f32(3), f32(2, 3), 1.0]), (everywhere, "k_descale", [f32(3, 3), f32(2, 2, 7), [1.0]]),
            (everywhere, "v_descale", [f32(3, 3), i32(1)]), (everywhere, "alibi_slopes", [f32(3), f32(2, 2, 2), np.ones(4), [1.0] * 4]),
            (everywhere, "out", [f32(2, 9, 4, 8), np.zeros((2, 9, 4, 16), np.int32), "x"]), (everywhere, "sm_margin", [3, None]),
            (everywhere, "qv", [q, 1]), (["func", "varlen"], "dropout_p", [0.1, f32(2), None]), (everywhere, "s_aux", [f32(3), i32(1, 2, 3, 4), 1.0]),
            (["cache", "new"], "scheduler_metadata", [3, f32(2)]),
            (everywhere, "q", [q[0, 0], "x"]), (["func", "cache", "new"], "q", [q.astype(np.float64)]),
            (["func"], "k", [half, k[0], k.astype(np.int32), None]), (["func", "varlen"], "v", [short(v), f32(2, 13, 2, 0), None]),
            (["varlen", "pages"], "k", [k[0, 0], None]), (["new", "rotary"], "k", [k[0], k[:, :2].astype(np.int32)]),
            (["new", "rotary"], "v", [v[0], short(v), v[:, :2].astype(np.float64)]),
            (["cache", "new"], "k_cache", [half, k.astype(np.int32)]), (cached, "k_cache", [k[0], None]), (cached, "v_cache", [short(v)[:, :3], v[0], v.astype(np.int32), None]),
            (packed, "cu_seqlens_q", [i32(0, 4, 99), i32(0, 7, 4), i32(1, 4, 9), i32()[:0], i32(0, 4, 9)[:, None], f32(3)]),
            (["varlen"], "cu_seqlens_k", [i32(0, 4, 99), i32(0, 8, 4), i32(0, 4), f32(3)]), (["pages"], "cu_seqlens_k", [i32(0, 4, 40)]),
            (packed, "max_seqlen_q", ["x", -1, 1.5]), (packed, "max_seqlen_k", ["x", 1.5]),
            (packed, "seqused_k", [i32(1, 99), i32(-1, 2), i32(1), f32(2)]), (packed, "seqused_q", [i32(1, 9), i32(-1, 2), i32(1, 2, 3), f32(2)]),
            (["pages", "block_table"], "block_table", [table[:1], table[0], table.astype(np.float32)]),
            (["page_table", "new page_table"], "page_table", [table[:1], table[0], table.astype(np.float32)]),
            (["new block_table"], "block_table", [i32(0, 99, 1, 2).reshape(2, 2)[:, ::-1]]),
            (["new page_table"], "page_table", [i32(0, 99, 1, 2).reshape(2, 2)[:, ::-1]]),
            (cached + new, "cache_seqlens", [99, -1, 2**40, 1.5, "x", [1, 2], i32(1, 99), i32(-1, 3), np.array([1, 2**40]), i32(1), f32(2)]),
            (["cache", "new"], "cache_batch_idx", [i32(0), i32(0, 99), f32(2)]), (["page_table"], "cache_batch_idx", [i32(0, 1)]),
            (cached, "cache_leftpad", [i32(0), i32(99, 0), i32(-1, 0), f32(2)]),
            (["cache", "new"], "max_seqlen_q", [1.5, "x"]), (["cache"], "rotary_cos", [f32(13, 4)]), (["cache"], "cu_seqlens_k_new", [i32(0, 1, 2)]),
            (["rotary"], "rotary_cos", [f32(4), i32(1)]), (["rotary"], "rotary_sin", [f32(13, 3), i32(1)]),
            (["rotary"], "rotary_interleaved", ["x", 1]), (["rotary"], "rotary_seqlens", [i32(1), f32(2)]), (["new"], "cache_seqlens", [None])]
        count, wrong = 0, []
        foreign = re.compile(r"seqlens_kv|cu_seqlens_kv|(?<!seqlens_)[kv]_new|[kv]_type|window_(left|right)|return_lse|attn_mask|seqlens_q_new|bias"
                             r"|segments\[|(?<![\w])(scale|window|seqlens|cu_seqlens|seqlen_q|new_type)(?!\w)")
        for names, argument, values in cases:
            for name, value in itertools.product(names, values):
                count += 1
                arguments = {key: x.copy() if isinstance(x, np.ndarray) else x for key, x in {**base[name], argument: value}.items()}
                case = f"{name}, {argument} = {value if not hasattr(value, 'shape') else (value.dtype.name, value.shape)}: "
                try:
                    calls.get(name, flash_attn_with_kvcache)(**arguments)
                    wrong.append(case + "answered")
                except (attn.Error, TypeError) as error:
                    said = str(error)
                    if not said.startswith((argument, "heads_q is", "one of")) or "accepted" not in said or foreign.search(said):
                        wrong.append(case + said)
        self.assertFalse(wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong))
        print(f"attn.flash refusals: {count}")


if __name__ == "__main__":
    unittest.main()
