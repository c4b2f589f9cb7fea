"""AITER's attention kernels for gfx942 (bf16, head dim 128), as its host code launches them, against float64."""
import re
import struct

import numpy as np

from reference import attention, from_bf16, to_bf16

THREADS, TILE_Q = 512, 256
DIM = 128


def arguments(out, q, k, v, lse, starts, shape):
    """fmha_fwd_v3_args: one argument in each 16 bytes; strides are bytes. Tensors are
    [batch][token][head][DIM], lse is [batch][head][query]."""
    batch, seqlen, heads, kv_heads = shape
    token, kv_token, head = heads * DIM * 2, kv_heads * DIM * 2, DIM * 2
    tokens = [token, TILE_Q * token, head, seqlen * token]
    kv_tokens = [kv_token, head, seqlen * kv_token]
    numbers = [seqlen, *tokens, heads // kv_heads, *kv_tokens, 5, 1, seqlen, DIM, DIM, heads, *kv_tokens,
               token, head, seqlen * token]
    packed = [struct.pack("<Q", pointer) for pointer in (out, q, k, v, lse)] + [struct.pack("<f", DIM**-0.5)]
    packed += [struct.pack("<I", number) for number in numbers]
    packed += [struct.pack("<Q", starts)] * 2 + [struct.pack("<I", seqlen * 4)]
    packed += [struct.pack("<Q", starts)] * 2
    return b"".join(argument.ljust(16, b"\0") for argument in packed)


def forward(hip, path, shape=(1, 512, 2, 1)):
    """The largest errors of out and of lse."""
    batch, seqlen, heads, kv_heads = shape
    name = "fmha_" + re.sub(r"\.co$", "", path.name)
    causal, group = "causal" in name, "group" in name
    random = np.random.default_rng(1)
    q, k, v = (to_bf16(random.normal(size=(batch, seqlen, n, DIM))) for n in (heads, kv_heads, kv_heads))
    blocks = -(-seqlen // TILE_Q)
    blocks = -(-blocks // 2) if causal else blocks  # the other half of a causal mask comes along
    # Those without the name of a rounding, which the host code no longer launches, have the old grid.
    grid = (heads, batch, blocks) if group and "rt" in name else (blocks, heads, batch)
    buffers = [hip.put(x) for x in (q, k, v)]
    out, lse = hip.empty(q.nbytes), hip.empty(batch * heads * seqlen * 4)
    starts = hip.put(np.arange(batch + 1, dtype=np.int32) * seqlen) if group else 0
    try:
        hip.launch(hip.function(path, f"_ZN5aiter{len(name)}{name}E"), grid, (THREADS, 1, 1),
                   arguments(out, *buffers, lse, starts, shape))
        got, got_lse = hip.get(out, q.shape, np.uint16), hip.get(lse, (batch, heads, seqlen), np.float32)
    finally:
        hip.free(out, lse, *buffers, *([starts] if starts else []))
    expected, expected_lse = attention(from_bf16(q), from_bf16(k), from_bf16(v), causal)
    return np.abs(from_bf16(got) - expected).max(), np.abs(got_lse - expected_lse).max()
