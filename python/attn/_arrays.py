"""What attn.flash and attn.onnx do with arrays themselves, alike for NumPy, PyTorch and CuPy: these spell almost all of it
the same, so callers use module_of(x).where and its siblings, and here is what they do not."""
import sys

from ._errors import InvalidArgument
from . import _frameworks


def module_of(array, name):
    """numpy, torch or cupy; refuses arrays of others, which cannot be written."""
    module = type(array).__module__.partition(".")[0]
    if module not in ("numpy", "torch", "cupy"):
        raise InvalidArgument(f"{name} is a {type(array).__name__}; accepted: arrays of NumPy, PyTorch or CuPy")
    return sys.modules[module]


def type_name(array):
    """"float16", "bool", "int32" ..., of any of these modules."""
    return str(array.dtype).rpartition(".")[2]


def on_gpu(array):
    return module_of(array, "array").__name__ == "cupy" or getattr(array, "is_cuda", False)


def cast(array, name):
    if type_name(array) == name:
        return array
    xp = module_of(array, "array")
    return array.to(getattr(xp, name)) if xp.__name__ == "torch" else array.astype(_frameworks._numpy_dtype(name))


def _place(like):
    """The arguments that put a new array where `like` is."""
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


def need_integers(array, name, shape, form):
    """int32, contiguous; integers of another width are converted."""
    kind = type_name(array)
    need(kind in ("int32", "int64"), f"{name} is {kind}; accepted: int32, int64")
    need(tuple(array.shape) == tuple(shape), f"{name} has shape {shape_text(array)}; accepted: {form} = {list(shape)}")
    if kind == "int64":  # what int32 has no room for stays too large or too small
        array = array.clip(-2**31, 2**31 - 1)
    return contiguous(cast(array, "int32"))
