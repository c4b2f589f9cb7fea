"""attn.forward and attn.kv_append as operators."""
import torch

from .. import forward as _forward
from .. import kv_append as _kv_append
from .. import types as _types
from ._gradients import forward_with_grad, wants_grad
from ._library import define, need_storage, traced


_FORWARD = ("q", "k", "v", "bias", "alibi_slopes", "sinks", "tree", "seqlens_kv", "cu_seqlens_q", "cu_seqlens_kv", "block_table",
            "q_descale", "k_descale", "v_descale", "kv_begin")
_KV_APPEND = ("k_new", "v_new", "k_cache", "v_cache", "seqlens", "q", "cu_seqlens_new", "block_table", "k_descale", "v_descale",
              "rotary_cos", "rotary_sin")


def forward(q, k, v, *, causal=False, causal_top_left=False, window=(-1, -1), scale=None, softcap=0.0, bias=None,
            alibi_slopes=None, sinks=None, tree=None, tree_keys=0, seqlens_kv=None, kv_begin=None, cu_seqlens_q=None,
            cu_seqlens_kv=None, max_seqlen_q=None, block_table=None, q_descale=None, k_descale=None, v_descale=None, return_lse=False):
    """attn.forward for one segment, without block masks and out=. In compiled code it is the operator torch.ops.attn.forward.

    Where q, k, v, bias or sinks requires grad, autograd records the call: tensors of the CPU or of CUDA, q, k and v of one type, no tree, pages and
    descales. lse has a gradient too. There is no second derivative."""
    if traced(q) or wants_grad(q, k, v, bias, alibi_slopes, sinks):
        tensors = (q, k, v, bias, alibi_slopes, sinks, tree, seqlens_kv, cu_seqlens_q, cu_seqlens_kv, block_table, q_descale,
                   k_descale, v_descale)
        need_storage(_FORWARD, (*tensors, kv_begin))
        out, lse = torch.ops.attn.forward(*tensors, causal, causal_top_left, window[0],
                                          window[1], scale, softcap, tree_keys, max_seqlen_q, kv_begin)
        return (out, lse) if return_lse else out
    return _forward(q, k, v, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks, tree=tree, seqlens_kv=seqlens_kv, kv_begin=kv_begin,
                    cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, block_table=block_table, q_descale=q_descale,
                    k_descale=k_descale, v_descale=v_descale, causal=causal, causal_top_left=causal_top_left, window=window,
                    scale=scale, softcap=softcap, tree_keys=tree_keys, max_seqlen_q=max_seqlen_q, return_lse=return_lse)


def kv_append(k_new, v_new, k_cache, v_cache, seqlens, *, q=None, cu_seqlens_new=None, max_seqlen_new=None, block_table=None,
              k_descale=None, v_descale=None, rotary_cos=None, rotary_sin=None, rotary_interleaved=False, advance_seqlens=False):
    """attn.kv_append -> rotated q, or None without q. In compiled code it is the operator torch.ops.attn.kv_append."""
    if not traced(k_new):
        return _kv_append(k_new, v_new, k_cache, v_cache, seqlens, q=q, cu_seqlens_new=cu_seqlens_new, block_table=block_table,
                          k_descale=k_descale, v_descale=v_descale, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
                          max_seqlen_new=max_seqlen_new, rotary_interleaved=rotary_interleaved, advance_seqlens=advance_seqlens)
    tensors = (k_new, v_new, k_cache, v_cache, seqlens, q, cu_seqlens_new, block_table, k_descale, v_descale, rotary_cos, rotary_sin)
    need_storage(_KV_APPEND, tensors)
    rotated = torch.ops.attn.kv_append(*tensors, max_seqlen_new, rotary_interleaved, advance_seqlens)
    return None if q is None else rotated


def _run_forward(q, k, v, bias, alibi_slopes, sinks, tree, seqlens_kv, cu_seqlens_q, cu_seqlens_kv, block_table, q_descale,
                 k_descale, v_descale, causal, causal_top_left, window_left, window_right, scale, softcap, tree_keys, max_seqlen_q,
                 kv_begin=None):
    return _forward(q, k, v, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks, tree=tree, seqlens_kv=seqlens_kv, kv_begin=kv_begin,
                    cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, block_table=block_table, q_descale=q_descale,
                    k_descale=k_descale, v_descale=v_descale, causal=causal, causal_top_left=causal_top_left,
                    window=(window_left, window_right), scale=scale, softcap=softcap, tree_keys=tree_keys,
                    max_seqlen_q=max_seqlen_q, return_lse=True)


_Q8_0, _Q4_0 = (_types()[name] for name in ("q8_0", "q4_0"))


def _forward_shape(q, k, v, *rest):
    dtype = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    dim = v.shape[-1]
    if v.dtype == torch.uint8:  # rows of q8_0 and q4_0: bytes
        q8, q4 = _Q8_0["block_bytes"], _Q4_0["block_bytes"]
        q8_dim = dim // q8 * _Q8_0["block_elements"]
        dim = q8_dim if dim % q8 == 0 and (dim % q4 or q8_dim == q.shape[-1]) else dim // q4 * _Q4_0["block_elements"]
    lse = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty((*q.shape[:-1], dim), dtype=dtype), q.new_empty(lse, dtype=torch.float32)


def _run_kv_append(k_new, v_new, k_cache, v_cache, seqlens, q, cu_seqlens_new, block_table, k_descale, v_descale, rotary_cos,
                   rotary_sin, max_seqlen_new, rotary_interleaved, advance_seqlens):
    rotated = _kv_append(k_new, v_new, k_cache, v_cache, seqlens, q=q, cu_seqlens_new=cu_seqlens_new, block_table=block_table,
                         k_descale=k_descale, v_descale=v_descale, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
                         max_seqlen_new=max_seqlen_new, rotary_interleaved=rotary_interleaved, advance_seqlens=advance_seqlens)
    return k_new.new_empty(0) if rotated is None else rotated


def _kv_append_shape(k_new, v_new, k_cache, v_cache, seqlens, q, *rest):
    return k_new.new_empty(0) if q is None else q.new_empty(q.shape)


define("forward(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, Tensor? tree, Tensor? seqlens_kv, "
       "Tensor? cu_seqlens_q, Tensor? cu_seqlens_kv, Tensor? block_table, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
       "bool causal, bool causal_top_left, SymInt window_left, SymInt window_right, float? scale, float softcap, SymInt tree_keys, "
       "SymInt? max_seqlen_q, Tensor? kv_begin=None) -> (Tensor, Tensor)", _run_forward, _forward_shape, forward_with_grad)
define("kv_append(Tensor k_new, Tensor v_new, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) seqlens, Tensor? q, "
       "Tensor? cu_seqlens_new, Tensor? block_table, Tensor? k_descale, Tensor? v_descale, Tensor? rotary_cos, Tensor? rotary_sin, "
       "SymInt? max_seqlen_new, bool rotary_interleaved, bool advance_seqlens) -> Tensor", _run_kv_append, _kv_append_shape)
