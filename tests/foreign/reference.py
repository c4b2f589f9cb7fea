"""Attention in float64, and bf16 as 16-bit integers."""
import numpy as np


def to_bf16(x):
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(x):
    return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def attention(q, k, v, causal):
    """out [batch][query][head][dim] and lse [batch][head][query]; q, k, v are [batch][token][head][dim]."""
    heads, kv_heads = q.shape[2], k.shape[2]
    k, v = (np.repeat(x.astype(np.float64), heads // kv_heads, axis=2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q.astype(np.float64), k) / np.sqrt(q.shape[3])
    if causal:
        queries, keys = scores.shape[2:]
        scores = np.where(np.arange(keys) > np.arange(queries)[:, None] + keys - queries, -np.inf, scores)
    most = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - most)
    total = weights.sum(axis=-1, keepdims=True)
    lse = (most + np.log(total))[..., 0]
    return np.einsum("bhqk,bkhd->bqhd", weights / total, v), lse
