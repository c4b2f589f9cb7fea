"""What attn needs from array frameworks; the module _attn calls it. No framework except NumPy is imported before an array of it is
passed."""
import functools

import numpy


@functools.cache
def _numpy_dtype(name):
    if name.startswith(("bfloat16", "float8")):
        import ml_dtypes
        return numpy.dtype(getattr(ml_dtypes, name))
    return numpy.dtype(name)


@functools.cache
def torch_fp8():
    """Torch's dtypes that DLPack may have no name for -> attn's."""
    import torch
    from . import _attn
    fp8 = {name: t["dtype"] for name, t in _attn.types().items() if t["kind"] == "fp8"}
    return {getattr(torch, theirs): name for name, theirs in fp8.items() if hasattr(torch, theirs)}


NO_BACKWARD = ("requires grad; accepted: arrays that do not, and any under torch.no_grad() or inference_mode(); attn.torch has functions "
               "with a backward")


def computes_for_itself(kind):
    """The method of a tensor class that may give tensors another value than their storage has; None if there is none."""
    import torch
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return "__torch_dispatch__"
    function, own = kind.__torch_function__, torch.Tensor.__torch_function__.__func__
    inherited = function is torch._C._disabled_torch_function_impl or getattr(function, "__func__", None) is own
    return None if inherited else "__torch_function__"


def _unreadable_tensor(x):
    """unreadable() for a tensor. Calls no method of the tensor before its class is known to behave like torch.Tensor."""
    import torch
    kind = type(x)
    method = computes_for_itself(kind)
    if method is not None:
        return f"is a {kind.__name__}, which computes for itself ({method}); accepted: plain tensors" + (
            ", as_subclass(torch.Tensor) makes one of its memory" if method == "__torch_function__" else "")
    if x.is_nested:
        return f"is a nested {kind.__name__}; accepted: plain tensors"
    if x.layout is not torch.strided:
        return f"is a {kind.__name__} of layout {x.layout}; accepted: torch.strided"
    if x.is_quantized:
        return f"is a quantized {kind.__name__}; accepted: its dequantize(), or attn's own types"
    if x.is_meta:
        return f"is a {kind.__name__} on the device meta, without memory; accepted: tensors in the memory of one device"
    functorch = getattr(torch._C, "_functorch", None)
    if functorch is not None and functorch.is_functorch_wrapped_tensor(x):
        return f"is a {kind.__name__} wrapped by torch.func (vmap, say); accepted: plain tensors"
    if torch._is_functional_tensor(x):
        return f"is a functional {kind.__name__}, as tracers make it; accepted: plain tensors"
    if x._is_zerotensor():
        return f"is a {kind.__name__} of zeros without memory; accepted: its clone()"
    if x.is_neg():
        return "has the negative bit set; accepted: its resolve_neg()"
    return None


def unreadable(framework, array):
    """Why an array's memory is not its value, as the end of a sentence that starts with the argument's name; None if it is."""
    if framework == "torch":
        return _unreadable_tensor(array)
    if isinstance(array, numpy.ma.MaskedArray):
        return f"is a {type(array).__name__}; accepted: arrays without a mask"
    return None


def empty(framework, shape, dtype, like):
    """An uninitialised array of `framework` on the device of `like`."""
    if framework == "numpy":
        return numpy.empty(shape, _numpy_dtype(dtype))
    if framework == "torch":
        import torch
        make = torch.empty if type(like) is torch.Tensor else like.new_empty  # which makes one of a subclass
        return make(shape, dtype=getattr(torch, dtype), device=like.device)
    if framework == "cupy":
        import cupy
        with like.device:
            return cupy.empty(shape, _numpy_dtype(dtype))
    import jax.numpy
    # Memory that no other array has; attn writes it before anyone reads it.
    return jax.numpy.empty(shape, _numpy_dtype(dtype), device=like.device).block_until_ready()


def captured(size, like):
    """`size` bytes of the graph's memory if torch is capturing its current stream on the device of `like`, else None."""
    import torch
    index = like.device.index
    if index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return captured(size, like)
    if not torch.cuda.is_current_stream_capturing():
        return None
    return torch.empty(size, dtype=torch.uint8, device=like.device)


def full(framework, shape, value, like):
    """float32, every element `value`."""
    if framework == "jax":
        import jax.numpy
        return jax.numpy.full(shape, value, numpy.float32, device=like.device).block_until_ready()
    if framework == "cupy":
        import cupy
        with like.device:
            return cupy.full(shape, value, numpy.float32)
    array = empty(framework, shape, "float32", like)
    array[...] = value
    return array


def stream(framework, like):
    """The current stream on the device of `like`, as a number; 0 is the default stream."""
    if framework == "torch":
        import torch
        return torch.cuda.current_stream(like.device).cuda_stream
    if framework == "cupy":
        import cupy
        with like.device:
            return cupy.cuda.get_current_stream().ptr
    return 0
