"""How operators of torch.ops.attn are made, and which tensors they take."""
import torch

from .._errors import InvalidArgument
from .._frameworks import NO_BACKWARD, computes_for_itself, unreadable

_library = torch.library.Library("attn", "DEF")
_HOST_AND_GPU = ("CPU", "CUDA")
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # classes whose tensors' storage mostly is their value
_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)  # of a tracer, say


def stands_in(x):
    """Whether x is a tracer's placeholder for a future tensor. Operators accept it, and their fake kernels answer."""
    return type(x) not in _PLAIN and type(x).__module__.startswith("torch._subclasses.")


def traced(x):
    """Whether a call on x must go through an operator, so that a compiler or tracer sees it."""
    return torch.compiler.is_compiling() or _modes() > 0 or stands_in(x)


@torch.compiler.assume_constant_result
def _class_is_plain(kind):  # Dynamo has other methods of a class than Python has
    return computes_for_itself(kind) is None


def hidden(x):
    """Why a tensor's storage is not its value, as the end of a sentence that starts with the argument's name; None if it is."""
    if type(x) in _PLAIN:
        return None if not (x.is_nested or x.is_quantized) and x.layout is torch.strided else unreadable("torch", x)
    if not isinstance(x, torch.Tensor) or stands_in(x):
        return None
    if torch.compiler.is_compiling() and _class_is_plain(type(x)):
        return None
    return unreadable("torch", x)


def need_storage(names, tensors):
    """Refuses tensors that would be read wrongly. The module _attn does too; this check runs before any other use of them."""
    for name, x in zip(names, tensors):
        if x is not None:
            reason = hidden(x)
            if reason is not None:
                raise InvalidArgument(f"{name} {reason}")


def define(schema, run, shape, with_grad=None):
    """Defines an operator: `run` computes on real tensors, `shape` makes the result for fake ones. with_grad(*all arguments) is called
    where one requires grad; without it such arguments are refused, compiled or not. So are tensors whose storage is not their value."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in _HOST_AND_GPU:
        _library.impl(name, run, key)
    operator = getattr(torch.ops.attn, name).default
    declared = operator._schema.arguments
    names = [argument.name for argument in declared]

    def below(*arguments, **options):
        grad = torch.is_grad_enabled()
        records = False
        for argument, x in (*zip(names, arguments), *options.items()):
            if isinstance(x, torch.Tensor):
                need_storage((argument,), (x,))
                if grad and x.requires_grad:
                    if with_grad is None:
                        raise InvalidArgument(f"{argument} {NO_BACKWARD}")
                    records = True
        if records:
            return with_grad(*arguments, *(options.get(a.name, a.default_value) for a in declared[len(arguments):]))
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments, **options)

    _library.impl(name, below, "Autograd")
    torch.library.register_fake(f"attn::{name}", shape, lib=_library)
    return operator
