"""A toy layer of DeepSeek's latent attention, decoding token by token over a latent cache, and the same layer expanded to ordinary heads.

    python3 examples/latent.py [--tokens N] [--cache f32|mla_656]

The latent form never makes the keys and values of the heads: the up-projection of the keys goes into the query, that of the values comes
after attention (arXiv 2405.04434, section 2.1). Both forms must agree.
"""
import argparse
import sys

import attn
import numpy as np

HIDDEN, HEADS, NOPE, ROPE, V_DIM, LATENT, PAGE = 128, 8, 32, 64, 32, 512, 16


def rotate(x, position):
    """x [B, T, ROPE] or [B, T, HEADS, ROPE], by pairs of neighbours."""
    angle = np.multiply.outer(position, 10000.0 ** (-np.arange(0, ROPE, 2) / ROPE)).reshape(len(position), *(1,) * (x.ndim - 3), -1)
    c, s = np.cos(angle), np.sin(angle)
    out = np.empty_like(x)
    out[..., 0::2], out[..., 1::2] = x[..., 0::2] * c - x[..., 1::2] * s, x[..., 0::2] * s + x[..., 1::2] * c
    return out


class Layer:
    def __init__(self, rng):
        weight = lambda *shape: (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
        self.to_q = weight(HIDDEN, HEADS * (NOPE + ROPE)).reshape(HIDDEN, HEADS, NOPE + ROPE)
        self.to_latent, self.to_rope = weight(HIDDEN, LATENT), weight(HIDDEN, ROPE)
        self.k_up = weight(LATENT, HEADS * NOPE).reshape(LATENT, HEADS, NOPE)
        self.v_up = weight(LATENT, HEADS * V_DIM).reshape(LATENT, HEADS, V_DIM)
        self.scale = (NOPE + ROPE) ** -0.5

    def project(self, x, position):
        """x [B, T, HIDDEN] -> (q without rotation, q rotated, rows of the cache [B, T, LATENT + ROPE])"""
        q = np.einsum("bth,hnd->btnd", x, self.to_q)
        rows = np.concatenate((x @ self.to_latent, rotate(x @ self.to_rope, position)), -1).astype(np.float32)
        return q[..., :NOPE], rotate(q[..., NOPE:], position), rows

    def expanded(self, x):
        """[B, T, HEADS, V_DIM], with keys and values of every head."""
        q, q_rope, rows = self.project(x, np.arange(x.shape[1]))
        latent = rows[..., :LATENT]
        rope = np.broadcast_to(rows[..., None, LATENT:], (*rows.shape[:2], HEADS, ROPE))
        k = np.concatenate((np.einsum("btl,lnd->btnd", latent, self.k_up), rope), -1).astype(np.float32)
        v = np.einsum("btl,lnd->btnd", latent, self.v_up).astype(np.float32)
        return attn.forward(np.concatenate((q, q_rope), -1).astype(np.float32), k, v, causal=True, scale=self.scale)


class Cache:
    """Pages of latent rows, f32 or FlashMLA's 656 bytes."""

    def __init__(self, batch, tokens, kind):
        pages = -(-tokens // PAGE)
        self.kind = None if kind == "f32" else kind
        self.table = np.random.default_rng(1).permutation(batch * pages).reshape(batch, pages).astype(np.int32)
        shape = (batch * pages, PAGE, 1, LATENT + ROPE if self.kind is None else 656)
        self.rows = np.zeros(shape, np.float32 if self.kind is None else np.uint8)
        self.lengths = np.zeros(batch, np.int32)

    def append(self, rows):
        attn.kv_append(rows[:, :, None], None, self.rows, None, self.lengths, block_table=self.table, k_type=self.kind, advance_seqlens=True)


def decode(layer, x, kind):
    """layer.expanded(x), one token at a time over the cache."""
    batch, tokens = x.shape[:2]
    cache, out = Cache(batch, tokens, kind), []
    for t in range(tokens):
        q, q_rope, rows = layer.project(x[:, t:t + 1], np.array([t]))
        cache.append(rows)
        absorbed = np.einsum("btnd,lnd->btnl", q, layer.k_up)  # q (W c) = (q W) c
        query = np.concatenate((absorbed, q_rope), -1).astype(np.float32)
        latent = attn.mla_decode(query, cache.rows, cache.table, cache.lengths, head_dim_v=LATENT, scale=layer.scale, cache_type=cache.kind)
        out.append(np.einsum("btnl,lnd->btnd", latent, layer.v_up))
    return np.concatenate(out, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=40, help="of each of two sequences (%(default)s)")
    parser.add_argument("--cache", choices=("f32", "mla_656"), default="f32", help="what a row of the cache is (%(default)s)")
    options = parser.parse_args()
    if options.tokens < 1:
        parser.error(f"--tokens is {options.tokens}; accepted: 1 or more")
    rng = np.random.default_rng(7)
    layer, x = Layer(rng), rng.standard_normal((2, options.tokens, HIDDEN)).astype(np.float32)
    want, got = layer.expanded(x), decode(layer, x, options.cache)
    worst, largest = np.abs(got - want).max(), np.abs(want).max()
    allowed = largest * (1e-5 if options.cache == "f32" else 0.1)
    print(f"{options.tokens} tokens, {HEADS} heads: a latent row has {LATENT + ROPE} numbers, expanded keys and values "
          f"{HEADS * (NOPE + ROPE + V_DIM)}\nlargest value {largest:.3f}, largest difference of the two forms {worst:.2g}")
    return int(not worst <= allowed)


if __name__ == "__main__":
    sys.exit(main())
