"""scaled_dot_product_attention and the operator behind it."""

import torch

from .. import _attn
from .._errors import InvalidArgument
from ._library import define

_plain = torch.Tensor
_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)  # of a tracer, say
_autocast = getattr(torch._C, "_is_any_autocast_enabled", torch.is_autocast_enabled)
_compiling = torch.compiler.is_compiling


def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """torch.nn.functional.scaled_dot_product_attention: query [..., Hq, L, E], key [..., Hkv, S, E], value [..., Hkv, S, Ev] ->
    [..., Hq, L, Ev], in the memory order of query.

    attn_mask    bool, True = visible, or a float that is added to the scores; broadcasts to [..., Hq, L, S]
    is_causal    query i sees key j <= i, from the top left; not beside a mask
    enable_gqa   Hq may be a multiple of Hkv
    dropout_p    0 alone, and nothing may require grad

    A query that sees no key gives 0. Types and sizes that no kernel serves raise attn.Unsupported, with each kernel's reason.
    """
    if dropout_p != 0.0:
        raise InvalidArgument(f"dropout_p is {dropout_p}; accepted: 0, attn is for inference")
    if attn_mask is None and query.dim() == 4 and type(query) is _plain and not (_compiling() or _modes() or _autocast()):
        try:
            return _attn.sdpa(query, key, value, None, is_causal, scale, enable_gqa)
        except InvalidArgument:
            if key.shape[0] != 1 or query.shape[0] == 1:  # else one batch for all
                raise
    return _any(query, key, value, attn_mask, is_causal, scale, enable_gqa)


def _any(query, key, value, attn_mask, is_causal, scale, enable_gqa):
    if attn_mask is not None and is_causal:
        raise InvalidArgument("is_causal is True; accepted with attn_mask: False")
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (x.to(dtype) if x.is_floating_point() else x for x in (query, key, value))
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = attn_mask.to(dtype)
    lead = query.shape[:-2]
    if query.dim() < 2:
        raise InvalidArgument(f"query has shape {list(query.shape)}; accepted: [..., L, E]")
    if query.dim() != 4:  # [..., H, L, E] with one head, or several batches
        heads = () if query.dim() > 4 else (1,)
        shape = lambda x: (-1, *(heads or (x.shape[-3],)), *x.shape[-2:])
        if attn_mask is not None and attn_mask.dim() > 2:
            attn_mask = attn_mask.expand(*lead, *attn_mask.shape[-2:])
            attn_mask = attn_mask.reshape(-1, *(heads or (lead[-1],)), *attn_mask.shape[-2:])
        out = _any(*(x.reshape(shape(x)) for x in (query, key, value)), attn_mask, is_causal, scale, enable_gqa)
        return out.reshape(*lead, *out.shape[-2:])
    if key.dim() == 4 and value.dim() == 4:
        key, value = (x.expand(query.shape[0], -1, -1, -1) if x.shape[0] == 1 else x for x in (key, value))
    bias = None if attn_mask is None else additive(attn_mask, query, key)
    if type(query) is _plain and not (_compiling() or _modes()):
        return _attn.sdpa(query, key, value, bias, is_causal, scale, enable_gqa)
    return torch.ops.attn.sdpa(query, key, value, bias, is_causal, scale, enable_gqa)


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


def _run(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    return _attn.sdpa(query, key, value, attn_mask, is_causal, scale, enable_gqa)


def _shape(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    if value.shape[-1] == query.shape[-1]:
        return torch.empty_like(query)
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


define("sdpa(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, bool is_causal=False, float? scale=None, "
       "bool enable_gqa=False) -> Tensor", _run, _shape)
