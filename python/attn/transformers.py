"""attn in the package transformers, under two names of attn_implementation:

    libattn          any model, with from_pretrained, generate, training on the CPU and CUDA
    libattn_flash_3  models that support FlashAttention: transformers' flash path with attn.flash, which model.generate_batch() needs

Importing this module registers both, as attn.transformers.register() does."""
import functools
import inspect

import torch
import transformers.masking_utils as masking
import transformers.modeling_flash_attention_utils as flash_utils
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.utils import logging

from . import flash
from ._errors import InvalidArgument
from .torch import forward
from .torch._library import need_storage
from .torch._sdpa import additive, autocast

__all__ = ["FLASH", "NAME", "Mask", "libattn", "libattn_mask", "register"]

NAME, FLASH = "libattn", "libattn_flash_3"  # the latter by transformers' rules for its server: "flash", later 2 or 3
_PAGED = f"paged|{FLASH}"  # what the servers of older versions, such as 5.17, make of it

_logger = logging.get_logger("transformers")


class Mask(torch.Tensor):
    """A mask of bools [B, 1, Sq, Skv] that is arguments of attn.forward in place of memory. Any operation on it is one on dense(), so
    models that change or combine their masks get what they expect.

    rule: causal, causal_top_left, window, seqlens_kv and kv_begin (i32 [B] or None), as attn.forward has them"""

    @staticmethod
    def __new__(cls, shape, device, rule):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)

    def __init__(self, shape, device, rule):
        self.seqlens_kv, self.kv_begin = rule.get("seqlens_kv"), rule.get("kv_begin")
        self.flags = {name: value for name, value in rule.items() if name not in ("seqlens_kv", "kv_begin")}

    @property
    def rule(self):
        return {**self.flags, "seqlens_kv": self.seqlens_kv, "kv_begin": self.kv_begin}

    def dense(self):
        """The same mask in memory."""
        batch, _, queries, keys = self.shape
        i = torch.arange(queries, device=self.device)[:, None]
        j = torch.arange(keys, device=self.device)
        column = lambda x: x[:, None, None].to(torch.int64)
        length = keys if self.seqlens_kv is None else column(self.seqlens_kv)
        at = i + length - queries  # of a query among the keys
        left, right = self.flags.get("window", (-1, -1))
        seen = (j < length) & (j >= 0) & (i >= 0)
        if self.flags.get("causal"):
            seen = seen & (j <= at)
        if self.flags.get("causal_top_left"):
            seen = seen & (j <= i)
        if left >= 0:
            seen = seen & (j >= at - left)
        if right >= 0:
            seen = seen & (j <= at + right)
        if self.kv_begin is not None:
            seen = seen & (j >= column(self.kv_begin))
        return seen.expand(batch, queries, keys)[:, None].contiguous()

    def __repr__(self):
        return f"attn.transformers.Mask({list(self.shape)}, {self.rule})"

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        dense = lambda x: x.dense() if isinstance(x, Mask) else x
        arguments, options = torch.utils._pytree.tree_map(dense, (arguments, options or {}))
        return function(*arguments, **options)

    def __tensor_flatten__(self):
        held = [name for name in ("seqlens_kv", "kv_begin") if getattr(self, name) is not None]
        return held, (tuple(self.shape), self.device, tuple(self.flags.items()))

    @staticmethod
    def __tensor_unflatten__(held, context, shape, stride):
        _, device, flags = context
        return Mask(shape, device, {**dict(flags), **held})


# What transformers' functions that combine masks return has the code of what they return here.
_AND, _SLIDING, _AROUND = (
    make(*arguments).__code__ if make else None
    for make, arguments in ((getattr(masking, "and_masks", None), (masking.causal_mask_function,)),
                            (getattr(masking, "sliding_window_overlay", None), (1,)),
                            (getattr(masking, "sliding_window_bidirectional_overlay", None), (1,))))


def _held(function):
    """What a function's closure holds, by name."""
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ())))


def _pattern(function):
    """(causal, window) of one of transformers' mask functions: the keys at i - left to i + right. None: another one."""
    plain = {masking.causal_mask_function: True, getattr(masking, "bidirectional_mask_function", None): False}
    if function in plain:
        return plain[function], (-1, -1)
    if getattr(function, "__code__", None) is not _AND:
        return None
    causal, window = None, (-1, -1)
    for part in _held(function).get("mask_functions", ()):
        size = _held(part).get("sliding_window") if part not in plain else None
        if part in plain:
            causal = causal or plain[part]
        elif part.__code__ is _SLIDING and isinstance(size, int):
            window = (size - 1, -1)
        elif part.__code__ is _AROUND and isinstance(size, int):
            window = (size, size)
        else:
            return None
    return None if causal is None else (causal, window)


def _padding(mask, keys, offset):
    """(begin, end) i32 [B] of the keys that a 2-D padding mask shows, (None, None) if it shows all; None if some are between others."""
    if mask.shape[1] >= offset + keys and bool(mask[:, offset:offset + keys].all()):
        return None, None
    mask = torch.nn.functional.pad(mask, (0, max(0, offset + keys - mask.shape[1])))[:, offset:offset + keys] != 0
    count = mask.sum(1)
    begin = torch.where(count > 0, mask.int().argmax(1), keys)
    end = torch.where(count > 0, keys - mask.flip(1).int().argmax(1), keys)
    return (begin.int(), end.int()) if bool((end - begin == count).all()) else None


def _rule(pattern, batch, queries, keys, q_offset, kv_offset, padding, device):
    """The arguments of attn.forward that say what a mask says, or None."""
    causal, (left, right) = pattern
    begin, end = padding
    number = not isinstance(q_offset, torch.Tensor)
    if not number and kv_offset:
        return None
    moved = q_offset - kv_offset  # the place of query 0 among the keys
    if end is not None:  # one wait for a GPU
        least, most_begin = torch.stack((end.min(), begin.max())).tolist()
        begin = begin if most_begin > 0 else None
        end = end if least < keys else None
    can_begin = device.type == "cpu" or torch.version.hip or not torch.is_grad_enabled()  # CUDA's kernels of gradients lack kv_begin
    if begin is not None and not can_begin:
        return None

    if not causal:
        if (left, right) != (-1, -1) and (end is not None or not number or moved != keys - queries):
            return None
        return {"window": (left, right), "seqlens_kv": end, "kv_begin": begin}
    length = moved + queries  # keys up to the last query
    if number and length > keys:
        return None
    # Keys after the last query's place are hidden by causal. Where the place is in a GPU's memory, nothing waits for it.
    if end is not None and left >= 0 and number and moved == 0 and queries > 1:
        end = None  # only queries that are padding themselves come after it; they see such keys then
    late = end is not None and (least < length if number else device.type != "cpu" or bool((end < length).any()))
    if not late:
        lengths = None
        if not number:
            lengths = length.to(device=device, dtype=torch.int32).reshape(1).expand(batch).contiguous()
        elif length < keys:
            lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
        return {"causal": queries > 1, "window": (left, -1), "seqlens_kv": lengths, "kv_begin": begin}
    if queries == 1:
        if left >= 0 and not (number and can_begin):
            return None
        if left >= 0:  # the window is counted from the query, which is not the last key
            begin = (torch.zeros_like(end) if begin is None else begin).clamp(min=max(0, length - 1 - left))
        return {"seqlens_kv": end.clamp(max=length), "kv_begin": begin}
    if left < 0 and number and moved == 0:
        return {"causal_top_left": True, "seqlens_kv": end, "kv_begin": begin}
    return None


def libattn_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=masking.causal_mask_function, attention_mask=None,
                 local_size=None, allow_is_causal_skip=True, allow_is_bidirectional_skip=False, device="cpu", **others):
    """The mask function of "libattn": a Mask where one can say what the mask says, None where no mask is needed, else the mask of "sdpa".
    Padding on the left is a Mask, but on CUDA where gradients are enabled."""
    device = torch.device(device)
    tracing = torch.compiler.is_compiling() or any(type(x).__module__.startswith("torch._subclasses") for x in (attention_mask, q_offset))
    pattern = None if tracing else _pattern(mask_function)  # PyTorch 2.11 does not trace how closures are read
    if pattern is not None and (attention_mask is None or attention_mask.dim() == 2):
        padding = (None, None) if attention_mask is None else _padding(attention_mask, kv_length, kv_offset)
        rule = padding and _rule(pattern, batch_size, q_length, kv_length, q_offset, kv_offset, padding, device)
        if rule is not None:
            plain = rule.get("seqlens_kv") is None and rule.get("kv_begin") is None and rule.get("window", (-1, -1)) == (-1, -1)
            if plain and allow_is_causal_skip and pattern[0] and (q_length == 1 or q_length == kv_length):
                return None
            if plain and allow_is_bidirectional_skip and not pattern[0]:
                return None
            return Mask((batch_size, 1, q_length, kv_length), device, rule)
    return masking.sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
                             mask_function=mask_function, attention_mask=attention_mask, local_size=local_size,
                             allow_is_causal_skip=allow_is_causal_skip, allow_is_bidirectional_skip=allow_is_bidirectional_skip,
                             device=device, **others)


def libattn(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, position_bias=None, softcap=None,
            s_aux=None, **others):
    """query [B, Hq, Sq, D], key [B, Hkv, Skv, D], value [B, Hkv, Skv, Dv] -> ([B, Sq, Hq, Dv], None). attention_mask is a Mask or
    one of transformers' "sdpa" masks; without one a causal module counts from the top left. softcap, position_bias and s_aux (sinks) are
    supported; attention weights are not returned."""
    if dropout:
        raise InvalidArgument(f"dropout is {dropout}; accepted: 0, attn has no dropout: attention_dropout=0 in the model's config, or model.eval()")
    if others.get("output_attentions"):
        _logger.warning_once("libattn returns no attention weights: output_attentions=True has no effect. attn_implementation=\"eager\" has them.")
    if isinstance(attention_mask, Mask) and attention_mask.shape[-2:] == (query.shape[2], key.shape[2]):
        rule, attention_mask = attention_mask.rule, None
    else:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        rule = {"causal_top_left": causal and attention_mask is None and query.shape[2] > 1}
    if isinstance(attention_mask, Mask):
        attention_mask = attention_mask.dense()
    need_storage(("query", "key", "value", "attention_mask"), (query, key, value, attention_mask))
    query, key, value, attention_mask = autocast(query, key, value, attention_mask)
    bias = None if attention_mask is None else additive(attention_mask[..., :key.shape[2]], query, key)
    if position_bias is not None:
        position_bias = position_bias.to(query.dtype)
        bias = position_bias if bias is None else position_bias + bias
    out = forward(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale=scaling, softcap=softcap or 0.0, bias=bias,
                  sinks=None if s_aux is None else s_aux.float(), **rule)
    return out, None


def _load_flash(load):
    """transformers' loader of flash functions, which knows ours too."""
    @functools.wraps(load)
    def functions(implementation, *arguments, **options):
        if implementation in (FLASH, _PAGED):
            return (flash.flash_attn_func, flash.flash_attn_varlen_func, flash.flash_attn_with_kvcache, flash_utils._pad_input,
                    flash_utils._unpad_input)
        return load(implementation, *arguments, **options)
    functions.attn_wraps = load
    return functions


def _check_names(check):
    """transformers' check of attn_implementation. Models whose kernels must have sinks list the names that have; ours has them. Models
    that compute attention themselves would take a mask of bools for one of numbers."""
    @functools.wraps(check)
    def checked(self, attn_implementation, *arguments, **options):
        supports = ("_supports_sdpa", "_supports_flash_attn", "_supports_attention_backend")
        if attn_implementation in (NAME, FLASH, _PAGED) and not any(getattr(self, name, False) for name in supports):
            raise InvalidArgument(f"attn_implementation is {attn_implementation}; accepted for {type(self).__name__}, whose attention is its own: "
                                  "eager")
        listed = getattr(self, "_compatible_flash_implementations", None)
        if attn_implementation in (FLASH, _PAGED) and listed and FLASH not in listed and any("flash" in name for name in listed):
            listed.append(FLASH)
        return check(self, attn_implementation, *arguments, **options)
    checked.attn_wraps = check
    return checked


def _server_inputs():
    """The classes that hold the inputs of transformers' server, in versions whose server has streams."""
    try:
        from transformers.generation.continuous_batching import input_outputs
    except ImportError:
        return []
    kinds = (getattr(input_outputs, name, None) for name in ("ContinuousBatchingIOs", "ContinuousBatchingAsyncIOs"))
    return [kind for kind in kinds if hasattr(kind, "get_model_kwargs")]


def _in_order(inputs):
    """get_model_kwargs of transformers' server (5.17), whose own streams copy a batch's inputs and compute it. A reset is in the current
    stream, which they do not wait for: on a GPU with other work it can come after the copies, and the first batch is then one of zeros."""
    @functools.wraps(inputs)
    def ordered(self, *arguments, **options):
        for stream in (getattr(self, name, None) for name in ("h2d_stream", "compute_stream")):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(stream.device))
        return inputs(self, *arguments, **options)
    ordered.attn_wraps = inputs
    return ordered


def register():
    """Registers both names; registering twice has no effect."""
    AttentionInterface.register(NAME, libattn)
    masking.AttentionMaskInterface.register(NAME, libattn_mask)
    AttentionInterface.register(FLASH, flash_attention_forward)
    masking.AttentionMaskInterface.register(FLASH, masking.flash_attention_mask)
    paged = AttentionInterface().get("paged|flash_attention_2")
    if paged is not None:
        AttentionInterface.register(_PAGED, paged)
    servers = [(kind, "get_model_kwargs", _in_order) for kind in _server_inputs()]
    for where, name, wrap in ((flash_utils, "_lazy_imports", _load_flash),
                              (PreTrainedModel, "_check_and_adjust_attn_implementation", _check_names), *servers):
        now = inspect.getattr_static(where, name)
        if not hasattr(now, "attn_wraps"):
            setattr(where, name, wrap(now))


register()
