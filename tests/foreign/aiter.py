"""AITER's forward kernels for MI300X (the package amd-aiter) against a float64 reference, and
`amdhsa check` over all of the package's objects for gfx942. AITER packs an argument into each 16 bytes."""
import struct

import numpy as np

from reference import attention, from_bf16, to_bf16

THREADS, TILE_Q = 512, 256


def arguments(q, k, v, out, lse, shape):
    """fmha_fwd_v3_args: q, k, v and out are [batch][token][head][128] in bf16."""
    batch, seqlen_q, seqlen_kv, heads, kv_heads, dim = shape
    q_token, kv_token = heads * dim * 2, kv_heads * dim * 2
    numbers = [seqlen_q, q_token, TILE_Q * q_token, dim * 2, seqlen_q * q_token, heads // kv_heads,
               kv_token, dim * 2, seqlen_kv * kv_token, 5, int(lse != 0), seqlen_kv, dim, dim, heads,
               kv_token, dim * 2, seqlen_kv * kv_token, q_token, dim * 2, seqlen_q * q_token]
    slots = [struct.pack("<Q", pointer) for pointer in (out, q, k, v, lse)]
    slots.append(struct.pack("<f", dim ** -0.5))
    slots += [struct.pack("<I", number) for number in numbers]
    slots += [struct.pack("<Q", 0)] * 2 + [struct.pack("<I", seqlen_q * 4)] + [struct.pack("<Q", 0)] * 2
    return b"".join(slot.ljust(16, b"\0") for slot in slots)


def forward(hip, path, name, causal, shape=(1, 512, 512, 2, 1, 128), seed=1):
    """The largest error of out and of lse against float64."""
    batch, seqlen_q, seqlen_kv, heads, kv_heads, dim = shape
    random = np.random.default_rng(seed)
    q = to_bf16(random.normal(size=(batch, seqlen_q, heads, dim)))
    k = to_bf16(random.normal(size=(batch, seqlen_kv, kv_heads, dim)))
    v = to_bf16(random.normal(size=(batch, seqlen_kv, kv_heads, dim)))
    out, lse = hip.empty(q.nbytes), hip.empty(batch * heads * seqlen_q * 4)
    buffers = [hip.put(x) for x in (q, k, v)]
    blocks = -(-seqlen_q // TILE_Q)
    grid = (-(-blocks // 2) if causal else blocks, heads, batch)
    try:
        hip.launch(hip.function(path, name), grid, (THREADS, 1, 1),
                   arguments(*buffers, out, lse, shape))
        got = from_bf16(hip.get(out, q.shape, np.uint16))
        got_lse = hip.get(lse, (batch, heads, seqlen_q), np.float32)
    finally:
        hip.free(out, lse, *buffers)
    expected, expected_lse = attention(from_bf16(q), from_bf16(k), from_bf16(v), causal)
    return np.abs(got - expected).max(), np.abs(got_lse - expected_lse).max()
