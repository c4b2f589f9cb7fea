"""How operators of torch.ops.attn are made."""
import torch

from .._errors import InvalidArgument
from .._frameworks import NO_BACKWARD

_library = torch.library.Library("attn", "DEF")
_HOST_AND_GPU = ("CPU", "CUDA")


def define(schema, run, shape):
    """`run` computes on real tensors, `shape` makes the result of fake ones. Arguments that require grad are refused, compiled
    or not."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in _HOST_AND_GPU:
        _library.impl(name, run, key)
    operator = getattr(torch.ops.attn, name).default
    names = [argument.name for argument in operator._schema.arguments]

    def below(*arguments, **options):
        if torch.is_grad_enabled():
            for argument, x in (*zip(names, arguments), *options.items()):
                if isinstance(x, torch.Tensor) and x.requires_grad:
                    raise InvalidArgument(f"{argument} {NO_BACKWARD}")
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments, **options)

    _library.impl(name, below, "Autograd")
    torch.library.register_fake(f"attn::{name}", shape, lib=_library)
    return operator
