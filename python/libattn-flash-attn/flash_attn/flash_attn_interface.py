"""The same functions under the module's name of version 2, and the private ones by which packages for several GPUs make one step."""
import attn as _attn
from attn._arrays import need as _need

from . import *  # noqa: F403
from . import flash_attn_func as _fixed, flash_attn_varlen_func as _packed


def _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
                        return_softmax):
    """-> out, lse [B, Hq, Sq], None, None. Nothing is recorded for gradients."""
    return (*_fixed(*_plain(q, k, v), dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes,
                    return_softmax_lse=True), None, None)


def _flash_attn_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
                               window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
                               block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False):
    """-> out, lse [Hq, total_q], None, None. Nothing is recorded for gradients."""
    _need(leftpad_k is None, "leftpad_k is given; accepted: None")
    return (*_packed(*_plain(q, k, v), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
                     (window_size_left, window_size_right), softcap, alibi_slopes, block_table=block_table, seqused_k=seqused_k,
                     return_softmax_lse=True), None, None)


def _flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
                         window_size_right, softcap, alibi_slopes, deterministic, rng_state=None):
    """Writes dq, dk and dv; one that is None is not computed. out and lse may be those of more keys than k has. -> None"""
    _gradients(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
               alibi_slopes)


def _flash_attn_varlen_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
                                rng_state=None, zero_tensors=False):
    """_flash_attn_backward for packed sequences."""
    _gradients(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
               alibi_slopes, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_k, max_seqlen_q=int(max_seqlen_q))


def _gradients(dout, q, k, v, out, lse, dq, dk, dv, dropout_p, scale, causal, left, right, softcap, slopes, **packed):
    _need(dropout_p == 0, f"dropout_p is {dropout_p}; accepted: 0")
    arrays = {"dq": dq, "dk": dk, "dv": dv}
    want = [name[1:] for name, x in arrays.items() if x is not None]
    _attn.backward(*_plain(dout, q, k, v, out, lse), causal=bool(causal), window=(int(left), int(right)), scale=scale,
                   softcap=softcap, alibi_slopes=slopes, want=want, **arrays, **packed)


def _plain(*arrays):
    return [x.detach() if getattr(x, "requires_grad", False) else x for x in arrays]
