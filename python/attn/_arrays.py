"""Array operations of attn.flash and attn.onnx for NumPy, PyTorch and CuPy. Where the three have equal functions, callers use them
directly, as module_of(x).where; the others are here."""
import operator
import sys

import numpy

from ._errors import InvalidArgument
from . import _frameworks


def module_of(array, name):
    """numpy, torch or cupy; refuses arrays of other frameworks, which cannot be written, and values that are not arrays."""
    for kind in type(array).__mro__:
        module = kind.__module__.partition(".")[0]
        if module in ("numpy", "torch", "cupy") and kind.__name__ in ("ndarray", "Tensor"):
            need(not isinstance(array, numpy.ma.MaskedArray), f"{name} is a {type(array).__name__}; accepted: arrays without a mask")
            return sys.modules[module]
    raise InvalidArgument(f"{name} is a {type(array).__name__}; accepted: arrays of NumPy, PyTorch or CuPy")


def type_name(array):
    """"float16", "bool", "int32" ..., of any of these modules."""
    name = str(array.dtype).removeprefix("torch.")
    return name if getattr(array.dtype, "isnative", True) else f"{name} (not this machine's byte order)"


def on_gpu(array):
    return module_of(array, "array").__name__ == "cupy" or getattr(array, "is_cuda", False)


def cast(array, name):
    if type_name(array) == name:
        return array
    xp = module_of(array, "array")
    return array.to(getattr(xp, name)) if xp.__name__ == "torch" else array.astype(_frameworks._numpy_dtype(name))


def _place(like):
    """The arguments that create an array on the device of `like`."""
    return {"device": like.device} if module_of(like, "array").__name__ == "torch" else {}


def arange(stop, like):
    """int32 [stop]"""
    xp = module_of(like, "array")
    return xp.arange(stop, dtype=xp.int32, **_place(like))


def empty(shape, name, like):
    return _frameworks.empty(module_of(like, "array").__name__, tuple(shape), name, like)


def contiguous(array):
    return array.contiguous() if module_of(array, "array").__name__ == "torch" else module_of(array, "array").ascontiguousarray(array)


def need(truth, sentence):
    if not truth:
        raise InvalidArgument(sentence)


def shape_text(array):
    return str(list(array.shape))


def need_shape(array, name, shape, form):
    """Refuses the array unless it has this shape; None accepts any size."""
    good = array.ndim == len(shape) and all(want in (None, n) for n, want in zip(array.shape, shape))
    sizes = ", ".join("any" if n is None else str(n) for n in shape)
    need(good, f"{name} has shape {shape_text(array)}; accepted: {form}" + (f" = [{sizes}]" if any(shape) else ""))


def need_integers(array, name, shape, form):
    """int32, contiguous; integers of another width are converted."""
    module_of(array, name)
    kind = type_name(array)
    need(kind in ("int32", "int64"), f"{name} is {kind}; accepted: int32, int64")
    need_shape(array, name, shape, form)
    if kind == "int64":  # what int32 has no room for stays too large or too small
        array = array.clip(-2**31, 2**31 - 1)
    return contiguous(cast(array, "int32"))


def integer(value, name, accepted="an integer"):
    """An int, also of a NumPy scalar or an array without dimensions."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is a {type(value).__name__}; accepted: {accepted}") from None
