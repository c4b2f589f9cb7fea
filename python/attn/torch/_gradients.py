"""Gradients: the operator attn.backward, and autograd of the operators that have some."""
import torch

from .. import backward as _backward
from .._errors import InvalidArgument, Unsupported
from ._library import define

_TYPES = {"cpu": (torch.float32, torch.float16, torch.bfloat16), "cuda": (torch.float16, torch.bfloat16)}


def wants_grad(*tensors):
    """Whether autograd is to record a call on these (None: no tensor)."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def need_backward(q, k, v, **others):
    """Refuses what has no gradients, before forward computes anything. others: arguments of forward that must not be given."""
    device = "cpu" if q.device.type == "meta" else q.device.type
    if device == "cuda" and torch.version.hip or device not in _TYPES:
        raise Unsupported(f"q, k or v requires grad in memory of {'hip' if torch.version.hip else device}; accepted: tensors of the CPU or of "
                          "CUDA, or torch.no_grad(): there is no backward kernel for this backend yet")
    types = _TYPES[device]
    for name, x in ("q", q), ("k", k), ("v", v):
        if x.dtype not in types or x.dtype != q.dtype:
            raise Unsupported(f"{name} is {str(x.dtype)[6:]} where q, k or v requires grad; accepted: q's type, "
                              f"{' or '.join(str(t)[6:] for t in types)}")
    for name, x in others.items():
        if x is not None:
            raise InvalidArgument(f"{name} is given where q, k or v requires grad; accepted: None")


def _dense(x):
    """With a contiguous last dimension, and elements of its own: the gradient of a sum is one number that repeats. On GPUs with rows at
    multiples of 16 bytes, which kernels want."""
    if x.stride(-1) != 1 or 0 in x.stride():
        return x.contiguous()
    aligned = x.device.type == "cpu" or not (x.data_ptr() % 16 or any(n * x.element_size() % 16 for n in x.stride()[:-1]))
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


_WANT = ("q", "k", "v", "bias", "sinks")


def _run(d_out, d_lse, q, k, v, out, lse, bias, alibi_slopes, sinks, seqlens_kv, cu_seqlens_q, cu_seqlens_kv, causal, causal_top_left,
         window_left, window_right, scale, softcap, max_seqlen_q, want, kv_begin=None):
    names = tuple(name for name, wanted in zip(_WANT, want) if wanted)
    got = _backward(_dense(d_out), q, k, v, out, lse, d_lse=None if d_lse is None else d_lse.contiguous(), bias=bias,
                    alibi_slopes=alibi_slopes, sinks=sinks, seqlens_kv=seqlens_kv, kv_begin=kv_begin, cu_seqlens_q=cu_seqlens_q,
                    cu_seqlens_kv=cu_seqlens_kv, causal=causal, causal_top_left=causal_top_left, window=(window_left, window_right),
                    scale=scale, softcap=softcap, max_seqlen_q=max_seqlen_q, want=names)
    made = dict(zip(names, got))
    return tuple(made[name] if name in made else q.new_empty(0) for name in _WANT)


def _shapes(d_out, d_lse, q, k, v, out, lse, bias, alibi_slopes, sinks, seqlens_kv, cu_seqlens_q, cu_seqlens_kv, causal,
            causal_top_left, window_left, window_right, scale, softcap, max_seqlen_q, want, kv_begin=None):
    return tuple(x.new_empty(x.shape) if wanted else q.new_empty(0) for x, wanted in zip((q, k, v, bias, sinks), want))


class _Once(torch.autograd.Function):
    """attn.backward where autograd records it, because somebody may ask for a second derivative."""

    @staticmethod
    def forward(ctx, *arguments):
        return torch.ops.attn.backward(*arguments)

    @staticmethod
    def backward(ctx, *gradients):
        raise InvalidArgument("the gradient of a gradient is asked for; accepted: first derivatives, attn has no second ones")


define("backward(Tensor d_out, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? bias, Tensor? alibi_slopes, "
       "Tensor? sinks, Tensor? seqlens_kv, Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, bool causal, bool causal_top_left, "
       "SymInt window_left, SymInt window_right, float? scale, float softcap, SymInt? max_seqlen_q, bool[] want, "
       "Tensor? kv_begin=None) "
       "-> (Tensor, Tensor, Tensor, Tensor, Tensor)", _run, _shapes, _Once.apply)


class Forward(torch.autograd.Function):
    """The operator attn.forward, with gradients for q, k, v, bias and sinks."""

    @staticmethod
    def forward(ctx, *arguments):
        (q, k, v, bias, alibi_slopes, sinks, tree, seqlens_kv, cu_seqlens_q, cu_seqlens_kv, block_table, q_descale, k_descale, v_descale,
         causal, causal_top_left, window_left, window_right, scale, softcap, tree_keys, max_seqlen_q, kv_begin) = arguments
        out, lse = torch.ops.attn.forward(*arguments)
        ctx.save_for_backward(q, k, v, out, lse, bias, alibi_slopes, sinks, seqlens_kv, cu_seqlens_q, cu_seqlens_kv, kv_begin)
        ctx.rest = causal, causal_top_left, window_left, window_right, scale, softcap, max_seqlen_q
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, d_out, d_lse):
        none = (None,) * 18
        if d_out is None and d_lse is None:
            return None, None, None, None, None, *none
        q, k, v, out, lse, *others, kv_begin = ctx.saved_tensors
        need = ctx.needs_input_grad
        want = [*need[:4], need[5]]
        dq, dk, dv, d_bias, d_sinks = torch.ops.attn.backward(
            torch.zeros_like(out) if d_out is None else d_out, d_lse, q, k, v, out, lse, *others, *ctx.rest, want, kv_begin)
        given = [x if wanted else None for x, wanted in zip((dq, dk, dv, d_bias, d_sinks), want)]
        return *given[:4], None, given[4], *none[:17]


def forward_with_grad(*arguments):
    (q, k, v, bias, alibi_slopes, sinks, tree, seqlens_kv, cu_seqlens_q, cu_seqlens_kv, block_table, q_descale, k_descale,
     v_descale, *rest) = arguments
    need_backward(q, k, v, tree=tree, block_table=block_table, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    if wants_grad(alibi_slopes):
        raise InvalidArgument("alibi_slopes requires grad; accepted: slopes that do not, they have no gradient")
    return Forward.apply(*arguments)


class Sdpa(torch.autograd.Function):
    """The operator attn.sdpa, with gradients for query, key, value and a mask that is added."""

    @staticmethod
    def forward(ctx, query, key, value, mask, is_causal, scale, enable_gqa, lower_right):
        out, lse = torch.ops.attn.sdpa_lse(query, key, value, mask, is_causal, scale, enable_gqa, lower_right)
        ctx.save_for_backward(query, key, value, mask, out, lse)
        ctx.rest = lower_right, is_causal, -1, -1, scale, 0.0, None
        return out

    @staticmethod
    def backward(ctx, d_out):
        query, key, value, mask, out, lse = ctx.saved_tensors
        want = [*ctx.needs_input_grad[:4], False]
        d_out, q, k, v, o = (x.transpose(1, 2) for x in (d_out, query, key, value, out))
        *made, d_mask, _ = torch.ops.attn.backward(d_out, None, q, k, v, o, lse, mask, None, None, None, None, None, *ctx.rest, want)
        given = [x.transpose(1, 2) if wanted else None for x, wanted in zip(made, want)]
        return *given, d_mask if want[3] else None, None, None, None, None


def sdpa_with_grad(query, key, value, attn_mask, *rest):
    need_backward(query, key, value)
    return Sdpa.apply(query, key, value, attn_mask, *rest)
