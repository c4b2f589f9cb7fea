"""What the tests share: attention in float64, random arrays, and a watch on kernels that ran."""
import math
import unittest

import attn
import attn._attn
import ml_dtypes
import numpy as np


def softmax_attention(q, k, v, visible=None, scale=None):
    """(out, lse) of q [B, Sq, Hq, D], k and v [B, Skv, Hkv, D] in float64; visible broadcasts to [B, Hq, Sq, Skv]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    repeat = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, repeat, axis=2), np.repeat(v, repeat, axis=2)
    s = np.einsum("bihd,bjhd->bhij", q, k) * (scale or 1 / math.sqrt(q.shape[3]))
    if visible is not None:
        s = np.where(visible, s, -math.inf)
    m = np.max(s, axis=-1, keepdims=True, initial=-1e300)
    p = np.exp(s - m)
    total = p.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.where(total > 0, np.einsum("bhij,bjhd->bhid", p, v) / total, 0)
        lse = np.where(total > 0, m + np.log(total), -math.inf)
    return out.transpose(0, 2, 1, 3), lse[..., 0]


def causal(seqlen_q, seqlen_kv):
    return np.arange(seqlen_kv) <= np.arange(seqlen_q)[:, None] + seqlen_kv - seqlen_q


class Case(unittest.TestCase):
    def setUp(self):
        self.rng = np.random.default_rng(7)

    def normal(self, *shape, dtype=np.float32):
        return self.rng.standard_normal(shape).astype(dtype)

    def qkv(self, batch=2, seqlen_q=9, seqlen_kv=13, heads=4, heads_kv=2, dim=16, dtype=np.float32):
        return (self.normal(batch, seqlen_q, heads, dim, dtype=dtype),
                self.normal(batch, seqlen_kv, heads_kv, dim, dtype=dtype),
                self.normal(batch, seqlen_kv, heads_kv, dim, dtype=dtype))

    def close(self, got, want, bound=2e-6, relative=0):
        """|got - want| <= bound + relative * |want|; -inf equals -inf."""
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        self.assertEqual(got.shape, want.shape)
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
        np.testing.assert_allclose(np.where(np.isfinite(got), got, 0), np.where(np.isfinite(want), want, 0),
                                   rtol=relative, atol=bound)

    def refuses(self, error, words, call, *arguments, **options):
        """The sentence has all of `words`."""
        with self.assertRaises(error) as caught:
            call(*arguments, **options)
        for word in [words] if isinstance(words, str) else words:
            self.assertIn(word, str(caught.exception))
        return caught.exception

    def gpu(self, *backends):
        """torch, if it has a GPU and attn one of these backends there; skips the test else."""
        try:
            import torch
        except ModuleNotFoundError:
            self.skipTest("torch is not installed")
        if not torch.cuda.is_available():
            self.skipTest("torch has no GPU")
        found = [b for b in attn.info()["backends"] if b["name"] in backends]
        if not any(b["available"] for b in found):
            self.skipTest("; ".join(f"{b['name']}: {b['reason']}" for b in found))
        return torch

    def growth(self, call, first, then):
        """Bytes of a GPU by torch's count and by the driver's, and of the host, that `then` calls took more than the `first`."""
        import resource

        import torch
        used = []
        for calls in first, then:
            for _ in range(calls):
                call()
            torch.cuda.synchronize()
            used.append(np.array([torch.cuda.memory_allocated(), -torch.cuda.mem_get_info()[0],
                                  resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10]))
        return (used[1] - used[0]).tolist()
