"""After `import attn.transformers`, models of the package transformers accept attn_implementation="libattn"."""
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ._errors import InvalidArgument
from .torch import forward
from .torch._library import need_storage
from .torch._sdpa import additive

__all__ = ["libattn"]


def libattn(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, position_bias=None, softcap=None,
            s_aux=None, **others):
    """query [B, Hq, Sq, D], key [B, Hkv, Skv, D], value [B, Hkv, Skv, Dv] -> ([B, Sq, Hq, Dv], None). attention_mask is
    one of transformers' "sdpa" masks; without one a causal module counts from the top left. softcap, position_bias and s_aux (sinks) are
    supported; attention weights are not returned."""
    if dropout:
        raise InvalidArgument(f"dropout is {dropout}; accepted: 0, attn has no dropout: attention_dropout=0 in the model's config, or model.eval()")
    need_storage(("query", "key", "value", "attention_mask"), (query, key, value, attention_mask))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    bias = None if attention_mask is None else additive(attention_mask[..., :key.shape[2]], query, key)
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + bias
    out = forward(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale=scaling, softcap=softcap or 0.0, bias=bias,
                  sinks=None if s_aux is None else s_aux.float(), causal_top_left=causal and attention_mask is None and query.shape[2] > 1)
    return out, None


AttentionInterface.register("libattn", libattn)
AttentionMaskInterface.register("libattn", sdpa_mask)
