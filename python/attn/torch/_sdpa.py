"""scaled_dot_product_attention and the operator that it calls."""

import math

import torch

from .. import _attn
from .. import forward as _forward
from .._errors import InvalidArgument
from ._gradients import sdpa_with_grad, wants_grad
from ._library import _modes, define, need_storage, traced

_plain = torch.Tensor
_autocast = getattr(torch._C, "_is_any_autocast_enabled", torch.is_autocast_enabled)
_compiling = torch.compiler.is_compiling


def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """torch.nn.functional.scaled_dot_product_attention: query [..., Hq, L, E], key [..., Hkv, S, E], value [..., Hkv, S, Ev] ->
    [..., Hq, L, Ev], with query's memory layout. All dimensions before the last two broadcast, as torch's do.

    attn_mask    bool, True = visible, or a float that is added to the scores; broadcasts to [..., Hq, L, S]. Or
                 torch.nn.attention.bias's causal_upper_left(L, S) or causal_lower_right(L, S)
    is_causal    query i sees key j <= i, from the top left; not together with a mask
    scale        None: 1 / sqrt(E); 0: all visible keys weigh the same
    enable_gqa   Hq may be a multiple of Hkv
    dropout_p    0 alone

    query, key, value and a float mask may require grad, on the CPU and on CUDA. There is no second derivative.
    A query that sees no key gives 0. Types and sizes that no kernel serves raise attn.Unsupported, with each kernel's reason.
    Tensors whose storage is not their value (nested, distributed, quantized ones ...) raise attn.InvalidArgument.
    """
    if dropout_p != 0.0:
        raise InvalidArgument(f"dropout_p is {dropout_p}; accepted: 0, attn has no dropout")
    if (attn_mask is None and type(query) is _plain and query.dim() == 4
            and not (_compiling() or _modes() or _autocast() or wants_grad(query, key, value))):
        try:
            return _attn.sdpa(query, key, value, None, is_causal, scale, enable_gqa, False)
        except InvalidArgument:
            pass  # sizes may broadcast
    return _any(query, key, value, attn_mask, is_causal, scale, enable_gqa)


def causal_bias(mask):
    """Whether the mask is torch.nn.attention.bias's CausalBias, whose storage is never written. Does not import that module."""
    kind = type(mask)
    return kind.__name__ == "CausalBias" and kind.__module__ == "torch.nn.attention.bias"


def lower_right(bias):
    """Of a CausalBias: whether it differs from is_causal."""
    return bias.variant.name == "LOWER_RIGHT" and bias.seq_len_q != bias.seq_len_kv


def _any(query, key, value, mask, is_causal, scale, enable_gqa, right=False):
    if mask is not None and is_causal:
        raise InvalidArgument("is_causal is True; accepted with attn_mask: False")
    bias = causal_bias(mask)
    need_storage(("query", "key", "value", "attn_mask"), (query, key, value, None if bias else mask))
    if query.dim() < 2 or key.dim() < 2 or value.dim() < 2:
        shapes = ", ".join(str(list(x.shape)) for x in (query, key, value))
        raise InvalidArgument(f"query, key and value have shapes {shapes}; accepted: [..., L, E], [..., S, E], [..., S, Ev]")
    if bias:
        sizes, want = [mask.seq_len_q, mask.seq_len_kv], [query.shape[-2], key.shape[-2]]
        if sizes != want:
            raise InvalidArgument(f"attn_mask is a CausalBias of {sizes}; accepted: [L, S] = {want}")
        right = lower_right(mask)
        is_causal, mask = not right, None
    query, key, value, mask = autocast(query, key, value, mask)

    dims, batch = 4, ()
    q, k, v = query.shape, key.shape, value.shape
    if not (len(q) == 4 and k[:2] == v[:2] and len(k) == len(v) == 4 and k[0] == q[0] and (k[1] == q[1] or enable_gqa)):
        dims, batch, query, key, value = _broadcast(query, key, value, enable_gqa)
    if mask is not None:
        mask = additive(_flat_mask(mask, batch), query, key)
    as_operator = type(query) is not _plain or traced(query) or wants_grad(query, key, value, mask)
    run = torch.ops.attn.sdpa if as_operator else _attn.sdpa
    out = run(query, key, value, mask, is_causal, scale, enable_gqa, right)
    return out if dims == 4 else out.reshape((*batch, *out.shape[1:])[-dims:])


def _broadcast(query, key, value, enable_gqa):
    """(dimensions that out is to have, sizes before the heads, the three as [B, H, ., .])"""
    dims = max(query.dim(), key.dim(), value.dim())
    query, key, value = (_with_dims(x, max(dims, 4)) for x in (query, key, value))
    heads_q, heads_kv = query.shape[-3], key.shape[-3]
    if not enable_gqa and heads_kv == value.shape[-3] and 1 < heads_kv < heads_q and heads_q % heads_kv == 0:
        raise InvalidArgument(f"enable_gqa is False with {heads_q} heads of q and {heads_kv} of k and v; accepted: True")
    heads = None if enable_gqa else _common(query, key, value, -3)
    batch = [_common(query, key, value, d) for d in range(query.dim() - 3)]
    if heads_kv == value.shape[-3] and (enable_gqa or heads_kv == 1):
        heads_kv = None  # their own: one head serves all of query's
    elif enable_gqa:
        heads_kv = heads_q
        key, value = _repeat("key", key, heads_kv), _repeat("value", value, heads_kv)
    else:
        heads_kv = heads
    query = _spread(query, batch, heads)
    if 0 in query.stride():  # out is made in its order
        query = query.contiguous()
    return dims, batch, query, _spread(key, batch, heads_kv), _spread(value, batch, heads_kv)


def _with_dims(x, dims):
    return x if x.dim() == dims else x[(None,) * (dims - x.dim())]


def _common(query, key, value, d):
    """The size of dimension d that all three broadcast to."""
    size = 1
    for x in query, key, value:
        n = x.shape[d]
        if n != 1:
            if size != 1 and n != size:
                raise InvalidArgument(f"query, key and value have shapes {list(query.shape)}, {list(key.shape)}, {list(value.shape)}; "
                                      "accepted: dimensions before the last two that are equal, or 1")
            size = n
    return size


def _repeat(name, x, heads):
    """Each head so often that there are as many as query has."""
    n = x.shape[-3]
    if n == 0 or heads % n:
        raise InvalidArgument(f"{name} has {n} heads; accepted: divisors of {heads}, the heads of query")
    return x if n in (1, heads) else x.repeat_interleave(heads // n, -3)


def _spread(x, batch, heads):
    """x as [B, H, S, E], with leading sizes of 1 expanded to `batch` and `heads` (None: unchanged)."""
    want = (*batch, x.shape[-3] if heads is None else heads, *x.shape[-2:])
    if tuple(x.shape) != want:
        x = x.expand(want)
        if x.shape[-2] == 1:  # so that not all strides are 0
            x = x.contiguous()
    return x if len(batch) == 1 else x.reshape(math.prod(batch), *want[-3:])


def _flat_mask(mask, batch):
    """Whose leading dimensions beyond four are one, as those of query, key and value."""
    if len(batch) < 2:
        return mask
    mask = _with_dims(mask, max(len(batch) + 3, mask.dim()))
    lead = mask.shape[:-3]
    if len(lead) > len(batch) or any(m not in (1, n) for m, n in zip(lead, batch)):
        raise InvalidArgument(f"attn_mask has shape {list(mask.shape)}; accepted: what broadcasts to {batch} and [Hq, L, S]")
    if any(m != 1 for m in lead):
        mask = mask.expand(*batch, *mask.shape[-3:])
    return mask.reshape(math.prod(mask.shape[:-3]), *mask.shape[-3:])


def autocast(query, key, value, mask):
    """In autocast's type, where it is on; a mask of bools stays."""
    kind = query.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return query, key, value, mask
    dtype = torch.get_autocast_dtype(kind)
    cast = lambda x: x.to(dtype) if x is not None and x.is_floating_point() else x
    return cast(query), cast(key), cast(value), cast(mask)


def additive(mask, query, key):
    """Four dimensions, added to the scores."""
    if mask.dtype == torch.bool:
        mask = mask.to(query.dtype).log_()  # 0 where it is True, else -inf
    if mask.dim() > 4:
        raise InvalidArgument(f"attn_mask has shape {list(mask.shape)}; accepted: what broadcasts to [B, Hq, L, S]")
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.numel() == 1 or not any(mask.stride()):  # one number, which is no bias
        mask = mask[:1, :1, :1, :1]
        mask = mask.expand(1, 1, 1, key.shape[-2]).contiguous()
    return mask


def _run(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False, lower_right=False):
    return _attn.sdpa(query, key, value, attn_mask, is_causal, scale, enable_gqa, lower_right)


def _shape(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False, lower_right=False):
    if value.shape[-1] == query.shape[-1]:
        return torch.empty_like(query)
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


define("sdpa(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, bool is_causal=False, float? scale=None, "
       "bool enable_gqa=False, bool lower_right=False) -> Tensor", _run, _shape, sdpa_with_grad)


def _run_lse(query, key, value, attn_mask, is_causal, scale, enable_gqa, lower_right):
    if query.shape[1] != key.shape[1] != 1 and not enable_gqa:
        return _run(query, key, value, attn_mask, is_causal, scale, enable_gqa, lower_right)  # which says so
    out = _shape(query, key, value)
    _, lse = _forward(*(x.transpose(1, 2) for x in (query, key, value)), bias=attn_mask, causal_top_left=is_causal, causal=lower_right,
                      scale=scale, out=out.transpose(1, 2), return_lse=True)
    return out, lse


def _shape_lse(query, key, value, *rest):
    return _shape(query, key, value), query.new_empty(query.shape[:3], dtype=torch.float32)


# sdpa with the logarithm of its denominators, f32 [B, H, L], which its gradients need.
define("sdpa_lse(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, float? scale, bool enable_gqa, "
       "bool lower_right) -> (Tensor, Tensor)", _run_lse, _shape_lse)
