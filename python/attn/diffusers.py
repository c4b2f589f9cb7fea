"""attn as an attention backend of the package diffusers: after `import attn.diffusers`,

    model.set_attention_backend("libattn")

or diffusers' attention_backend("libattn") around calls. Models whose layers call PyTorch's attention themselves do not ask diffusers for a
backend; attn.torch.patch() serves them."""
from diffusers.models import attention_dispatch as dispatch

from ._errors import InvalidArgument
from .torch import forward
from .torch._sdpa import additive

__all__ = ["NAME", "libattn", "register"]

NAME = "libattn"


def libattn(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, return_lse=False,
            _parallel_config=None):
    """query [B, Sq, Hq, D], key [B, Skv, Hkv, D], value [B, Skv, Hkv, Dv] -> [B, Sq, Hq, Dv], with return_lse also lse [B, Sq, Hq].

    attn_mask    bools (True: visible) or numbers that are added: [B, Skv], or what broadcasts to [B, Hq, Sq, Skv]
    is_causal    query i sees key j <= i
    """
    if dropout_p:
        raise InvalidArgument(f"dropout_p is {dropout_p}; accepted: 0, attn has no dropout")
    if _parallel_config is not None:
        raise InvalidArgument("_parallel_config is given; accepted: None, libattn has no context parallelism in diffusers")
    if attn_mask is not None:
        if attn_mask.dim() == 2 and tuple(attn_mask.shape) == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None]
        attn_mask = additive(attn_mask, query, key.transpose(1, 2))
    out = forward(query, key, value, causal_top_left=is_causal, scale=scale, bias=attn_mask, return_lse=return_lse)
    return (out[0], out[1].transpose(1, 2)) if return_lse else out


def register():
    """Registers the backend; registering twice has no effect. diffusers' names are an enum without a way to add one, so this extends it."""
    names = dispatch.AttentionBackendName
    if NAME not in names._value2member_map_:
        member = str.__new__(names, NAME)
        member._name_, member._value_, member._sort_order_ = NAME.upper(), NAME, len(names)
        names._member_names_.append(member._name_)
        names._member_map_[member._name_] = names._value2member_map_[NAME] = member
        type.__setattr__(names, member._name_, member)
    dispatch._AttentionBackendRegistry.register(names(NAME), constraints=[dispatch._check_device, dispatch._check_shape])(libattn)


register()
