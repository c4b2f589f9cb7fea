"""FlashAttention 3's functions, with its order of arguments, computed by libattn. return_attn_probs returns (out, lse)."""
from attn import flash as _flash

__all__ = ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
                    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
                    return_attn_probs=False, s_aux=None):
    options = dict(locals())
    return _flash.flash_attn_func(return_softmax_lse=options.pop("return_attn_probs"), **options)


def flash_attn_qkvpacked_func(qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
                              attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False):
    """qkv [B, S, 3, H, D], or with num_heads_q [B, S, num_heads_q + 2 Hkv, D]."""
    options = dict(locals())
    qkv, heads = options.pop("qkv"), options.pop("num_heads_q")
    if heads is None:
        return _flash.flash_attn_qkvpacked_func(qkv, return_softmax_lse=options.pop("return_attn_probs"), **options)
    heads_kv = (qkv.shape[2] - heads) // 2
    q, k, v = qkv[:, :, :heads], qkv[:, :, heads:heads + heads_kv], qkv[:, :, heads + heads_kv:]
    return _flash.flash_attn_func(q, k, v, return_softmax_lse=options.pop("return_attn_probs"), **options)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
                           softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
                           attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
                           return_attn_probs=False, s_aux=None):
    options = dict(locals())
    return _flash.flash_attn_varlen_func(return_softmax_lse=options.pop("return_attn_probs"), **options)


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
                            cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
                            max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
                            causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
                            scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False, s_aux=None):
    return _flash.flash_attn_with_kvcache(**locals())
