"""memory_efficient_attention with the interface of xformers.ops, whose biases it takes by their classes' names. xformers need not be
installed.

    from attn.xformers import memory_efficient_attention
"""
from ._errors import InvalidArgument
from .torch import forward
from .torch._sdpa import additive

__all__ = ["memory_efficient_attention"]


def _window(bias):
    """(left, right) of a bias that keeps the last _window_size keys, or keys between two sides."""
    return (bias.window_left, bias.window_right) if hasattr(bias, "window_left") else (bias._window_size - 1, -1)


# A class's rule of masking: arguments of forward() from the bias.
_RULES = {
    "LowerTriangularMask": lambda b: {"causal_top_left": True},
    "LowerTriangularMaskWithTensorBias": lambda b: {"causal_top_left": True, "bias": b._bias},
    "LowerTriangularFromBottomRightMask": lambda b: {"causal": True},
    "LowerTriangularFromBottomRightLocalAttentionMask": lambda b: {"causal": True, "window": _window(b)},
    "LocalAttentionFromBottomRightMask": lambda b: {"window": _window(b)},
    "BlockDiagonalMask": lambda b: {},
    "BlockDiagonalCausalMask": lambda b: {"causal_top_left": True},
    "BlockDiagonalCausalFromBottomRightMask": lambda b: {"causal": True},
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": lambda b: {"causal": True, "window": _window(b)},
    "BlockDiagonalPaddedKeysMask": lambda b: {},
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": lambda b: {"causal": True},
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": lambda b: {"causal": True, "window": _window(b)},
    "BlockDiagonalLocalAttentionPaddedKeysMask": lambda b: {"window": _window(b)},
    "PagedBlockDiagonalPaddedKeysMask": lambda b: {},
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": lambda b: {"causal": True},
}


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    """softmax(scale q k^T + attn_bias) v: query [B, M, H, K], key [B, N, H, K], value [B, N, H, Kv] -> [B, M, H, Kv].

    Forms    [B, M, K] for one head; [B, M, G, H, K] for G groups of H query heads, whose key and value may be expanded along H
    attn_bias  None, a tensor that broadcasts to [B, H, M, N], or one of xformers' biases: LowerTriangular*, LocalAttention*,
             BlockDiagonal* and PagedBlockDiagonal*, except gappy keys and local blocks from the top left
    p        0; op and output_dtype: None"""
    for name, value_given, accepted in (("p", p, 0), ("op", op, None), ("output_dtype", output_dtype, None)):
        if value_given != accepted:
            raise InvalidArgument(f"{name} is {value_given}; accepted: {accepted}")
    if query.dim() not in (3, 4, 5) or key.dim() != query.dim() or value.dim() != query.dim():
        raise InvalidArgument(f"query, key and value have shapes {', '.join(str(list(x.shape)) for x in (query, key, value))}; accepted: "
                              "[B, M, K], [B, M, H, K] or [B, M, G, H, K], all of one of these")
    shape = (*query.shape[:-1], value.shape[-1])
    q, k, v = _heads(query, False), _heads(key, True), _heads(value, True)
    if attn_bias is None or hasattr(attn_bias, "stride"):
        bias = attn_bias
        if bias is not None and bias.dim() == 5:  # [B, G, H, M, N]
            bias = bias.flatten(1, 2)
        elif bias is not None and bias.dim() == 3:  # [B, M, N] of one head
            bias = bias[:, None]
        rule = {"bias": bias}
    else:
        kind = type(attn_bias).__name__
        if kind not in _RULES:
            raise InvalidArgument(f"attn_bias is a {kind}; accepted: None, a tensor, {', '.join(_RULES)}")
        rule = _RULES[kind](attn_bias)
        if "BlockDiagonal" in kind:
            q, k, v, more = _blocks(kind, attn_bias, q, k, v)
            rule.update(more)
    if rule.get("bias") is not None:
        rule["bias"] = additive(rule["bias"], q, k.transpose(1, 2))
    return forward(q, k, v, scale=scale, **rule).reshape(shape)


def _heads(x, shared):
    """[B, M, heads, K]; an expanded dimension of heads, which K/V heads serve without copies, is one head."""
    if x.dim() == 3:
        return x[:, :, None]
    if x.dim() == 4:
        return x
    return x[:, :, :, 0] if shared and x.stride(3) == 0 else x.flatten(2, 3)


def _blocks(kind, bias, q, k, v):
    """Packed queries with packed keys, or with keys of a padded length or in pages."""
    info = bias.q_seqinfo
    more = {"cu_seqlens_q": _i32(info.seqstart, q), "max_seqlen_q": int(info.max_seqlen)}
    if kind.startswith("Paged"):
        k, v = (x.reshape(-1, bias.page_size, *x.shape[2:]) for x in (k, v))
        more.update(block_table=_i32(bias.block_tables, q), seqlens_kv=_i32(bias.k_seqinfo.seqlen, q))
    elif "PaddedKeys" in kind:
        k, v = (x.reshape(-1, bias.k_seqinfo.padding, *x.shape[2:]) for x in (k, v))
        more["seqlens_kv"] = _i32(bias.k_seqinfo.seqlen, q)
    else:
        k, v = k[0], v[0]
        more["cu_seqlens_kv"] = _i32(bias.k_seqinfo.seqstart, q)
    return q[0], k, v, more


def _i32(x, like):
    return x.to(device=like.device, dtype=like.new_empty(0).int().dtype).contiguous()
