"""patch()"""
import contextlib

import torch
import torch.nn.functional as functional

from .._errors import DriverMissing, InvalidArgument, NoDevice, Unsupported
from ._library import define
from ._sdpa import _compiling, _shape, scaled_dot_product_attention


class Taken:
    """What became of the calls: `calls`, those that attn `taken`, and how many others went to torch for which reason."""

    def __init__(self):
        self.calls, self.taken, self.others = 0, 0, {}

    def _left(self, reason):
        self.others[reason] = self.others.get(reason, 0) + 1

    def __repr__(self):
        text = f"{self.taken} of {self.calls} calls taken"
        return text + "".join(f"\n  {count} to torch: {reason}" for reason, count in self.others.items())


@contextlib.contextmanager
def patch():
    """While it lasts, torch.nn.functional.scaled_dot_product_attention, looked up there, is attn's where a kernel takes the
    call, and torch's else; on all threads. `with attn.torch.patch() as taken:` - print(taken) says what became of the calls. Modules
    that imported the function by name keep theirs."""
    original, taken = functional.scaled_dot_product_attention, Taken()

    def patched(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        return _either(original, taken, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    functional.scaled_dot_product_attention = patched
    _patches.append((original, taken))
    try:
        yield taken
    finally:
        functional.scaled_dot_product_attention = original
        _patches.remove((original, taken))


def _either(original, taken, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    arguments = (query, key, value, attn_mask, dropout_p, is_causal)
    options = {"scale": scale, "enable_gqa": enable_gqa}
    if _compiling():  # what a kernel takes is known when it runs
        wants_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        if wants_grad or dropout_p != 0.0 or query.dim() != 4 or (attn_mask is not None and is_causal):
            return original(*arguments, **options)
        return torch.ops.attn.sdpa_or_torch(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    taken.calls += 1
    try:
        result = scaled_dot_product_attention(*arguments, **options)
    except _LEFT_TO_TORCH as error:
        taken._left(str(error))
        return original(*arguments, **options)
    taken.taken += 1
    return result


_LEFT_TO_TORCH = (InvalidArgument, Unsupported, DriverMissing, NoDevice)
_patches = []  # the one entered last counts the calls of compiled code


def _run(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    original, taken = _patches[-1] if _patches else (_of_torch, Taken())
    result = _either(original, taken, query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)
    want = _shape(query, key, value)  # the memory order that the compiler was told
    return result if result.stride() == want.stride() else want.copy_(result)


_of_torch = functional.scaled_dot_product_attention
define("sdpa_or_torch(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, bool is_causal=False, float? scale=None, "
       "bool enable_gqa=False) -> Tensor", _run, _shape)
