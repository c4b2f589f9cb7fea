"""patch()"""
import contextlib
import threading

import torch
import torch.nn.functional as functional

from .._errors import DriverMissing, InvalidArgument, NoDevice, Unsupported
from ._library import define, hidden
from ._sdpa import _any, _compiling, _shape, causal_bias, lower_right, scaled_dot_product_attention


class Taken:
    """Counts of a patch: all `calls`, those `taken` by attn, and in `others` how many went to torch for which reason."""

    def __init__(self):
        self.calls, self.taken, self.others = 0, 0, {}

    def _count(self, calls=0, taken=0, reason=None):
        with _lock:
            self.calls += calls
            self.taken += taken
            if reason is not None:
                self.others[reason] = self.others.get(reason, 0) + 1

    def __repr__(self):
        text = f"{self.taken} of {self.calls} calls taken"
        return text + "".join(f"\n  {count} to torch: {reason}" for reason, count in self.others.items())


class _Layer:
    """A function that replaces torch's, or another replacement of it, while `open` has patches. Without patches it only passes calls
    on, because other code may still hold it."""

    def __init__(self, original):
        self.original, self.open = original, ()  # a tuple: calls on other threads read it

        def patched(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
            return _either(self, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

        patched.attn_layer = self
        self.patched = patched


_lock = threading.RLock()
_patches = []  # (layer, taken): the one entered last counts the calls of compiled code


@contextlib.contextmanager
def patch():
    """A context in which torch.nn.functional.scaled_dot_product_attention is attn's, on all threads: `with attn.torch.patch() as taken:`.

    Calls that no kernel takes go to torch; print(taken) says how many and why. Modules that imported torch's function by name are not
    affected. Patches may begin and end in any order, on any threads. A call is counted by the active patch that began last. The end of
    the last patch restores the function that was there before the first. If other code replaced the function meanwhile, that
    replacement stays; if it calls attn's function, that passes calls on to torch from then on.
    """
    taken = Taken()
    with _lock:
        _drop_closed()
        layer = getattr(functional.scaled_dot_product_attention, "attn_layer", None)
        if layer is None:
            layer = _Layer(functional.scaled_dot_product_attention)
            functional.scaled_dot_product_attention = layer.patched
        layer.open += (taken,)
        _patches.append((layer, taken))
    try:
        yield taken
    finally:
        with _lock:
            layer.open = tuple(other for other in layer.open if other is not taken)
            _patches.remove((layer, taken))
            _drop_closed()


def _drop_closed():
    """Removes layers without patches from the function, unless other code has replaced it on top of them."""
    while (layer := getattr(functional.scaled_dot_product_attention, "attn_layer", None)) is not None and not layer.open:
        functional.scaled_dot_product_attention = layer.original


def _either(layer, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, right=False):
    arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, right)
    if _compiling():  # what a kernel takes is known when it runs
        return _traced(layer.original, *arguments)
    patches = layer.open
    if not patches:
        return _original(layer.original, *arguments)
    taken = patches[-1]
    taken._count(calls=1)
    try:
        if right:
            result = _any(query, key, value, attn_mask, is_causal, scale, enable_gqa, right)
        else:
            result = scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    except _LEFT_TO_TORCH as error:
        taken._count(reason=str(error))
        return _original(layer.original, *arguments)
    taken._count(taken=1)
    return result


def _traced(original, query, key, value, mask, dropout_p, is_causal, scale, enable_gqa, right):
    """Calls the operator if attn may take the call; its result has query's sizes except the last."""
    left = (dropout_p != 0.0 or (mask is not None and is_causal) or any(hidden(x) is not None for x in (query, key, value))
            or any(x.dim() != 4 for x in (query, key, value))
            or (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
            or any(x.shape[0] not in (1, query.shape[0]) for x in (key, value))
            or not enable_gqa and any(x.shape[1] not in (1, query.shape[1]) for x in (key, value)))
    causal, other = is_causal, mask
    if not left and causal_bias(mask):
        left = mask.seq_len_q != query.shape[2] or mask.seq_len_kv != key.shape[2]
        right = lower_right(mask)
        causal, other = not right, None
    if left or (other is not None and hidden(other) is not None):
        return _original(original, query, key, value, mask, dropout_p, is_causal, scale, enable_gqa, False)
    return torch.ops.attn.sdpa_or_torch(query, key, value, other, causal, scale, enable_gqa, right)


def _original(original, query, key, value, mask, dropout_p, is_causal, scale, enable_gqa, right):
    """Translates a CausalBias, which works only with torch's own function object, and that is replaced here."""
    sizes = (query.shape[-2], key.shape[-2]) if right else None
    if causal_bias(mask) and not is_causal:
        if lower_right(mask):
            sizes = (mask.seq_len_q, mask.seq_len_kv)
        else:
            is_causal = True
        mask = None
    if sizes is not None:
        mask = torch.ones(sizes, dtype=torch.bool, device=query.device).tril(sizes[1] - sizes[0])
    return original(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


_LEFT_TO_TORCH = (InvalidArgument, Unsupported, DriverMissing, NoDevice)
_of_torch = _Layer(functional.scaled_dot_product_attention)


def _run(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False, lower_right=False):
    layer = _patches[-1][0] if _patches else _of_torch
    result = _either(layer, query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa, lower_right)
    want = _shape(query, key, value)  # the memory order that the compiler was told
    return result if result.stride() == want.stride() else want.copy_(result)


define("sdpa_or_torch(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, bool is_causal=False, float? scale=None, "
       "bool enable_gqa=False, bool lower_right=False) -> Tensor", _run, _shape)
