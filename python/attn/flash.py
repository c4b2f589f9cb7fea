"""FlashAttention's functions under their own names: flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, and those of packed
q, k and v.

Arrays are NumPy's, PyTorch's or CuPy's, with FlashAttention's layouts: q [B, Sq, Hq, D], k [B, Skv, Hkv, D], packed [total, H, D],
pages [num_pages, page_size, Hkv, D]. Arguments may be given by position in the order of FlashAttention 2. Version 3 orders them
differently; its order is that of the module flash_attn_interface in the distribution libattn-flash-attn. Arguments that attn does not
implement are refused by name. num_splits, pack_gqa and deterministic are ignored: the plan decides, and equal calls give equal bits.
PyTorch tensors of the CPU and of CUDA that require grad have gradients; then there is no out, backend is "auto", and k and v are no pages.

    softmax_scale      None: 1 / sqrt(D)
    causal             query i sees key j <= i + Skv - Sq
    window_size        (left, right) around i + Skv - Sq, -1 = unbounded
    attention_chunk    a query sees only keys of its own chunk of this many, counted from key 0; 0 = none; q not packed
    softcap            0.0 = none
    alibi_slopes       f32 [Hq], or [B, Hq] if q is not packed: one call for each sequence
    s_aux              [Hq]: adds exp(s_aux[h]) to the softmax's denominator; learnable_sink is the same
    q_descale ...      f32 [B, Hkv] for fp8
    return_softmax_lse returns (out, lse): lse f32 [B, Hq, Sq], packed [Hq, total]
    return_attn_probs  returns (out, lse, None), as FlashAttention 2 does without dropout
    qv                 [.., Hq, Dv]: adds qv v^T to q k^T, the decode of latent attention (docs/mla.md). k and v are then views of one
                       array whose rows are v, then k; softmax_scale None is 1 / sqrt(D + Dv)
    out                an array for the result
    backend            as in attn.forward
"""
from . import forward, kv_append, types
from ._arrays import (arange, cast, contiguous, empty, integer, module_of, need, need_integers, need_shape, on_gpu, shape_text,
                      type_name)
from ._errors import renamed

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
           "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache"]


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                    deterministic=False, return_attn_probs=False, *, attention_chunk=0, s_aux=None, learnable_sink=None,
                    q_descale=None, k_descale=None, v_descale=None, qv=None, num_splits=0, pack_gqa=None, sm_margin=0,
                    return_softmax_lse=False, out=None, backend="auto"):
    """softmax(softmax_scale q k^T, masked) v -> out [B, Sq, Hq, Dv]; help(attn.flash) describes the arguments."""
    _refuse(dropout_p=dropout_p, sm_margin=sm_margin)
    result = _attend(q, k, v, qv=qv, scale=softmax_scale, causal=causal, window=window_size, chunk=attention_chunk, softcap=softcap,
                     slopes=alibi_slopes, sinks=_sinks(s_aux, learnable_sink), descales=(q_descale, k_descale, v_descale),
                     lse=return_softmax_lse or return_attn_probs, out=out, backend=backend, names={})
    return (*result, None) if return_attn_probs else result


def flash_attn_qkvpacked_func(qkv, *arguments, **options):
    """flash_attn_func of qkv [B, S, 3, H, D]."""
    need_shape(qkv, "qkv", (None, None, 3, None, None), "[B, S, 3, H, D]")
    return flash_attn_func(*_split(qkv), *arguments, **options)


def flash_attn_kvpacked_func(q, kv, *arguments, **options):
    """flash_attn_func of kv [B, Skv, 2, Hkv, D]."""
    need_shape(kv, "kv", (None, None, 2, None, None), "[B, Skv, 2, Hkv, D]")
    return flash_attn_func(q, *_split(kv), *arguments, **options)


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, *arguments, **options):
    """flash_attn_varlen_func of qkv [total, 3, H, D]."""
    need_shape(qkv, "qkv", (None, 3, None, None), "[total, 3, H, D]")
    return flash_attn_varlen_func(*_split(qkv), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *arguments, **options)


def flash_attn_varlen_kvpacked_func(q, kv, *arguments, **options):
    """flash_attn_varlen_func of kv [total_k, 2, Hkv, D]."""
    need_shape(kv, "kv", (None, 2, None, None), "[total_k, 2, Hkv, D]")
    return flash_attn_varlen_func(q, *_split(kv), *arguments, **options)


def _split(packed):
    """The arrays that a dimension before the heads counts."""
    return [packed[..., i, :, :] for i in range(packed.shape[-3])]


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
                           causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                           return_attn_probs=False, block_table=None, *, seqused_q=None, seqused_k=None, attention_chunk=0,
                           s_aux=None, learnable_sink=None, q_descale=None, k_descale=None, v_descale=None, qv=None, num_splits=0,
                           pack_gqa=None, sm_margin=0, return_softmax_lse=False, out=None, backend="auto"):
    """flash_attn_func for packed sequences: q [total_q, Hq, D], k and v [total_k, Hkv, D].

    cu_seqlens_q, cu_seqlens_k  i32 [B + 1]; None: q, or k and v, are [B, S, H, D]
    max_seqlen_q, max_seqlen_k  the longest sequence, or more; None: as if one sequence had all tokens
    seqused_q, seqused_k        i32 [B]: the first this many tokens of each sequence count. Later rows of out are 0, of lse -inf
    block_table                 i32 [B, pages]: k and v are pages; lengths are in seqused_k or cu_seqlens_k
    """
    _refuse(dropout_p=dropout_p, sm_margin=sm_margin)
    need(qv is None or seqused_q is None, "seqused_q is given; accepted with qv: None")
    if return_attn_probs:
        return_softmax_lse = True
    xp = module_of(q, "q")
    cu_seqlens_q, batch = _queries(q, cu_seqlens_q)
    if cu_seqlens_k is not None:
        cu_seqlens_k = need_integers(cu_seqlens_k, "cu_seqlens_k", (batch + 1,), "[B + 1]")
    if seqused_k is not None:
        seqused_k = need_integers(seqused_k, "seqused_k", (batch,), "[B]")
    if block_table is not None:
        block_table = need_integers(block_table, "block_table", (batch, None), "[B, pages]")
    max_seqlen_q, max_seqlen_k = (None if x is None else integer(x, name, "an integer or None")
                                  for x, name in ((max_seqlen_q, "max_seqlen_q"), (max_seqlen_k, "max_seqlen_k")))

    lengths, names = seqused_k, {"seqlens_kv": "seqused_k", "cu_seqlens_kv": "cu_seqlens_k"}
    packed_k = cu_seqlens_k if block_table is None else None
    if block_table is not None and lengths is None:
        need(cu_seqlens_k is not None, "seqused_k is None; accepted with block_table: lengths there or in cu_seqlens_k")
        lengths = contiguous(cu_seqlens_k[1:] - cu_seqlens_k[:-1])
        names["seqlens_kv"] = "cu_seqlens_k"
    elif packed_k is not None and lengths is not None:  # part of each: tokens are pages of one
        for name, x in ("k", k), ("v", v):
            module_of(x, name)
            need_shape(x, name, (None,) * 3, "[total_k, Hkv, D]")
        _need_room(seqused_k, "seqused_k", packed_k[1:] - packed_k[:-1])
        longest = k.shape[0] if max_seqlen_k is None else max_seqlen_k
        need(longest >= 0, f"max_seqlen_k is {longest}; accepted: 0 or more")
        block_table = _rows(packed_k[:-1, None] + arange(longest, q)[None, :], k.shape[0])
        k, v, packed_k = k[:, None], v[:, None], None

    used = None
    if seqused_q is not None:
        seqused_q = need_integers(seqused_q, "seqused_q", (batch,), "[B]")
        starts = cu_seqlens_q
        if starts is None:
            starts = arange(batch + 1, q) * q.shape[1]
        _need_room(seqused_q, "seqused_q", starts[1:] - starts[:-1])
        used = _Used(starts, seqused_q, q.shape[0] if cu_seqlens_q is not None else q.shape[0] * q.shape[1], q)
        if out is not None:
            _need_out(out, (*q.shape[:-1], getattr(v, "shape", q.shape)[-1]), q)
    result = _attend(q if used is None else used.pack(q), k, v, qv=qv, cu_q=cu_seqlens_q if used is None else used.offsets,
                     max_q=max_seqlen_q if cu_seqlens_q is not None or used is not None else None, cu_k=packed_k,
                     lengths=lengths, table=block_table, scale=softmax_scale, causal=causal, window=window_size,
                     chunk=attention_chunk, softcap=softcap, slopes=alibi_slopes, sinks=_sinks(s_aux, learnable_sink),
                     descales=(q_descale, k_descale, v_descale), lse=return_softmax_lse, out=out if used is None else None,
                     backend=backend, names=names)
    if used is None:
        return (*result, None) if return_attn_probs else result
    made, lse = result if return_softmax_lse else (result, None)
    made = used.unpack(made, 0, 0).reshape(*q.shape[:-1], made.shape[-1])
    if out is not None:
        out[...] = made
        made = out
    if lse is None:
        return made
    lse = used.unpack(lse, 1, -xp.inf)
    if cu_seqlens_q is None:
        lse = contiguous(lse.reshape(lse.shape[0], *q.shape[:2]).swapaxes(0, 1))
    return (made, lse, None) if return_attn_probs else (made, lse)


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
                            cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
                            window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
                            return_softmax_lse=False, *, qv=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
                            max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None,
                            attention_chunk=0, s_aux=None, learnable_sink=None, scheduler_metadata=None, pack_gqa=None,
                            sm_margin=0, out=None, backend="auto"):
    """flash_attn_func over a cache, k_cache [B, S, Hkv, D] or pages. If k and v are given, they are written to the cache first.

    k, v                [B, T, Hkv, D], or packed with cu_seqlens_k_new: written from position cache_seqlens[b] on
    rotary_cos, rotary_sin  [S or more positions, R / 2]: rotates k for its positions and query i for cache_seqlens[b] + i (without
                        causal, window_size and attention_chunk every query for cache_seqlens[b]). f32 is used directly, other types
                        are converted
    rotary_interleaved  True: pairs are elements 2 i and 2 i + 1; False: i and i + R / 2
    rotary_seqlens      i32 [B]: used for the rotation instead of cache_seqlens
    cache_seqlens       i32 or i64 [B], or one integer: keys in the cache; None: it is full. New keys that have no room are refused on the
                        host, on a GPU they are not written
    cache_batch_idx     i32 [B]: sequence b is row cache_batch_idx[b] of k_cache
    cache_leftpad       i32 [B]: the position of each sequence's first key
    block_table         i32 [B, pages]; page_table is the same
    cu_seqlens_q, max_seqlen_q  q is packed
    """
    _refuse(sm_margin=sm_margin, scheduler_metadata=scheduler_metadata)
    module_of(q, "q")
    need(block_table is None or page_table is None, "page_table is given; accepted with block_table: None")
    cu_seqlens_q, batch = _queries(q, cu_seqlens_q)
    table, table_name = (block_table, "block_table") if page_table is None else (page_table, "page_table")
    need(cache_batch_idx is None or table is None, f"cache_batch_idx is given; accepted with {table_name}: None")
    if table is not None:
        table = need_integers(table, table_name, (batch, None), "[B, pages]")
    for name, x in ("k_cache", k_cache), ("v_cache", v_cache):
        module_of(x, name)
        need_shape(x, name, (None,) * 4, "[B, S, Hkv, D], or pages" if table is None else "[pages, page_size, Hkv, D]")
    if cache_batch_idx is not None:
        rows = need_integers(cache_batch_idx, "cache_batch_idx", (batch,), "[B]")
        _need_room(rows, "cache_batch_idx", rows * 0 + (k_cache.shape[0] - 1))
        table, table_name = rows[:, None], "cache_batch_idx"
    lengths = _lengths(cache_seqlens, batch, q)
    if cache_leftpad is not None:
        cache_leftpad = need_integers(cache_leftpad, "cache_leftpad", (batch,), "[B]")
    if rotary_seqlens is not None:
        rotary_seqlens = need_integers(rotary_seqlens, "rotary_seqlens", (batch,), "[B]")
    if max_seqlen_q is not None:
        max_seqlen_q = integer(max_seqlen_q, "max_seqlen_q", "an integer or None")
    window_size, attention_chunk = _window(window_size), integer(attention_chunk, "attention_chunk")
    need((k is None) == (v is None), "one of k and v is None; accepted: both, or neither")
    need(k is None or lengths is not None, "cache_seqlens is None; accepted with k and v: how many keys the cache holds")
    for name, x in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin), ("cu_seqlens_k_new", cu_seqlens_k_new)):
        need(k is not None or x is None, f"{name} is given; accepted without k and v: None")
    need((rotary_cos is None) == (rotary_sin is None), "one of rotary_cos and rotary_sin is None; accepted: both, or neither")
    names = {"k": "k_cache", "v": "v_cache", "seqlens_kv": "cache_seqlens", "block_table": table_name}
    if k is not None:
        form = "[B, T, Hkv, D], or packed with cu_seqlens_k_new"
        if cu_seqlens_k_new is not None:
            cu_seqlens_k_new = need_integers(cu_seqlens_k_new, "cu_seqlens_k_new", (batch + 1,), "[B + 1]")
            form = "[total, Hkv, D]"
        for name, x in ("k", k), ("v", v):
            module_of(x, name)
            need_shape(x, name, (None,) * (4 if cu_seqlens_k_new is None else 3), form)
        new = k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new[1:] - cu_seqlens_k_new[:-1]
        if not on_gpu(lengths):
            _need_room(lengths, "cache_seqlens", lengths * 0 + k_cache.shape[1] * (1 if table is None else table.shape[1]) - new)
        if cache_leftpad is not None:
            _need_room(cache_leftpad, "cache_leftpad", lengths + new)
        append_names = {"k_new": "k", "v_new": "v", "seqlens": "cache_seqlens", "cu_seqlens_new": "cu_seqlens_k_new",
                        "block_table": table_name}
        q, lengths = _append(q, k, v, k_cache, v_cache, lengths, table, cu_seqlens_q, cu_seqlens_k_new, rotary_cos, rotary_sin,
                             rotary_interleaved, rotary_seqlens, (k_descale, v_descale), backend, append_names,
                             each=causal or attention_chunk > 0 or max(window_size) >= 0)
    if cache_leftpad is not None:
        if table is None:
            table = arange(batch, q)[:, None]
        k_cache, v_cache, table = _behind(cache_leftpad, k_cache, v_cache, table)
        if lengths is None:
            lengths = cache_leftpad * 0 + table.shape[1]
        _need_room(cache_leftpad, "cache_leftpad", lengths)
        lengths = contiguous(lengths - cache_leftpad)
    return _attend(q, k_cache, v_cache, qv=qv, cu_q=cu_seqlens_q, max_q=max_seqlen_q,
                   lengths=lengths, table=table, scale=softmax_scale, causal=causal, window=window_size, chunk=attention_chunk,
                   softcap=softcap, slopes=alibi_slopes, sinks=_sinks(s_aux, learnable_sink),
                   descales=(q_descale, k_descale, v_descale), lse=return_softmax_lse, out=out, backend=backend, names=names)


_WITHOUT_KERNEL = {"dropout_p": ("0, attn has no dropout", lambda x: x == 0),
                   "sm_margin": ("0", lambda x: x == 0), "scheduler_metadata": ("None", lambda x: x is None)}


def _refuse(**arguments):
    for name, value in arguments.items():
        accepted, good = _WITHOUT_KERNEL[name]
        need(getattr(value, "ndim", 0) == 0 and good(value), f"{name} is {type(value).__name__ if hasattr(value, 'shape') else value}; accepted: {accepted}")


def _queries(q, offsets):
    """(cu_seqlens_q as int32 or None, the batch)"""
    if offsets is None:
        need_shape(q, "q", (None,) * 4, "[B, Sq, Hq, D], or packed with cu_seqlens_q")
        return None, q.shape[0]
    need_shape(q, "q", (None,) * 3, "[total_q, Hq, D]")
    offsets = need_integers(offsets, "cu_seqlens_q", (None,), "[B + 1]")
    need(offsets.shape[0] > 0, "cu_seqlens_q has shape [0]; accepted: [B + 1]")
    return offsets, offsets.shape[0] - 1


def _window(size):
    """(left, right)"""
    accepted = "a pair of integers (left, right), -1 = unbounded"
    try:
        left, right = size
    except (TypeError, ValueError):
        shown = f"a {type(size).__name__}" if isinstance(size, str) or not hasattr(size, "__len__") else size
        raise TypeError(f"window_size is {shown}; accepted: {accepted}") from None
    return integer(left, "window_size[0]", accepted), integer(right, "window_size[1]", accepted)


def _lengths(given, batch, like):
    """cache_seqlens as int32 [B] where `like` is, or None."""
    if given is None:
        return None
    shape = getattr(given, "shape", ())
    if isinstance(shape, tuple) and len(shape) > 0:
        return need_integers(given, "cache_seqlens", (batch,), "one integer, or [B]")
    if _is_tensor(given, like):  # on a GPU nothing waits for its value
        given = need_integers(given.reshape(1), "cache_seqlens", (1,), "one integer")
    else:
        given = integer(given, "cache_seqlens", "an integer or an array [B] of int32 or int64")
        need(0 <= given < 2**31, f"cache_seqlens is {given}; accepted: 0 to 2^31 - 1")
    return arange(batch, like) * 0 + given


def _is_tensor(value, like):
    return type(value).__module__.partition(".")[0] in ("torch", "cupy") and module_of(like, "q") is module_of(value, "cache_seqlens")


def _need_room(used, name, room):
    """On the host, where looking at them costs nothing."""
    if not on_gpu(used) and not on_gpu(room):
        for b, (n, most) in enumerate(zip(used.tolist(), room.tolist())):
            need(0 <= n <= most, f"{name}[{b}] is {n}; accepted: 0 to {most}")


_OUTS = [t["dtype"] for t in types().values() if t["kind"] in ("float", "fp8") and not t["output_only"]]


def _need_out(out, shape, like):
    """Of an out that is not forward()'s."""
    xp = module_of(out, "out")
    need(xp is module_of(like, "q"), "out is of another framework than q; accepted: the same")
    need(type_name(out) in _OUTS, f"out is {type_name(out)}; accepted: {', '.join(_OUTS)}")
    need_shape(out, "out", shape, "q's shape, with v's last dimension")
    need(xp.__name__ != "numpy" or out.flags.writeable, "out is read-only; accepted: an array that can be written")


def _scales(array, name):
    """f32, contiguous, of any type of floats; or None."""
    if array is None:
        return None
    module_of(array, name)
    accepted = ("float32", "float16", "bfloat16", "float64")
    need(type_name(array) in accepted, f"{name} is {type_name(array)}; accepted: {', '.join(accepted)}")
    return contiguous(cast(array, "float32"))


def _sinks(s_aux, learnable_sink):
    """f32 [Hq], or None"""
    need(s_aux is None or learnable_sink is None, "learnable_sink is given; accepted with s_aux: None")
    return _scales(s_aux, "s_aux") if learnable_sink is None else _scales(learnable_sink, "learnable_sink")


# What forward() and kv_append() call these arguments.
_NAMES = {"scale": "softmax_scale", "sinks": "s_aux", "window": "window_size", "window_left": "window_size[0]",
          "window_right": "window_size[1]", "seqlen_q": "max_seqlen_q", "bias": "attention_chunk", "return_lse": "return_softmax_lse", "rotary_positions": "rotary_cos.shape[0]",
          "rotary_dim": "2 * rotary_cos.shape[1]", ", and of other types with k_type and v_type": ""}


def _latent(q, qv, k, v, names):
    """(queries, rows) whose products are q k^T + qv v^T: `rows` is where k and v are."""
    xp = module_of(q, "q")
    k_name, v_name = names.get("k", "k"), names.get("v", "v")
    for name, x in ("qv", qv), (k_name, k), (v_name, v):
        need(module_of(x, name) is xp, f"{name} is of another framework than q; accepted: the same")
    need_shape(qv, "qv", (*q.shape[:-1], v.shape[-1]), "q's shape, with v's last dimension")
    need(type_name(qv) == type_name(q), f"qv is {type_name(qv)}; accepted: {type_name(q)} as q")
    if xp.__name__ == "torch":
        at, strides, size = lambda x: x.data_ptr(), lambda x: x.stride(), v.element_size()
    else:
        at = lambda x: x.__array_interface__["data"][0] if xp.__name__ == "numpy" else x.data.ptr
        strides, size = lambda x: tuple(n // x.itemsize for n in x.strides), v.itemsize
    together = (type_name(k) == type_name(v) and k.shape[:-1] == v.shape[:-1] and strides(k) == strides(v) and
                at(k) == at(v) + v.shape[-1] * size)
    need(together, f"qv is given, and {k_name} and {v_name} are arrays of their own; accepted with qv: views rows[..., Dv:] and "
         "rows[..., :Dv] of one array, so that nothing is copied")
    shape = (*v.shape[:-1], v.shape[-1] + k.shape[-1])
    rows = v.as_strided(shape, v.stride()) if xp.__name__ == "torch" else xp.lib.stride_tricks.as_strided(v, shape, v.strides)
    return xp.concatenate((qv, q), axis=-1), rows


def _attend(q, k, v, *, qv=None, cu_q=None, max_q=None, cu_k=None, lengths=None, table=None, scale, causal, window, chunk, softcap,
            slopes, sinks, descales, lse, out, backend, names):
    names = {**_NAMES, **names}
    names.update(seqlens=names.get("seqlens_kv"), cu_seqlens=names.get("cu_seqlens_kv"))  # attn.h's own
    bias, latent = None, {}
    module_of(v, names.get("v", "v"))  # None is what forward() takes for v in k
    if qv is not None:
        need(descales[2] is None, "v_descale is given; accepted with qv: None, k_descale is of both")
        if getattr(slopes, "ndim", 0) > 1:
            need(False, f"alibi_slopes has shape {shape_text(slopes)}; accepted with qv: [Hq]")
        latent = {"head_dim_v": v.shape[-1]}
        q, k = _latent(q, qv, k, v, names)
        v = None
    chunk, window = integer(chunk, "attention_chunk"), _window(window)
    if chunk:
        need(chunk > 0, f"attention_chunk is {chunk}; accepted: 1 or more, 0 for none")
        need(cu_q is None and cu_k is None, f"attention_chunk is {chunk}; accepted with packed sequences: 0")
        for name, x in ("q", q), (names.get("k", "k"), k):
            module_of(x, name)
            need_shape(x, name, (None,) * 4, "4 dimensions")
        keys = k.shape[1] * (1 if table is None else table.shape[1])
        bias = _chunks(q, keys, lengths, chunk)
    descales = {name: _scales(x, name) for name, x in zip(("q_descale", "k_descale", "v_descale"), descales)}
    options = {"causal": causal, "window": window, "scale": scale, "softcap": softcap,
               "cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_k, "max_seqlen_q": max_q if cu_q is not None else None,
               "seqlens_kv": lengths, "block_table": table, "bias": bias, "sinks": sinks, "return_lse": lse, "backend": backend, **descales,
               **latent}
    with renamed(names):
        return _of_slopes(q, k, v, slopes, table, lse, out, options, tuple(descales))


def _of_slopes(q, k, v, slopes, table, lse, out, options, names):
    run = forward
    if any(getattr(x, "requires_grad", False) for x in (q, k, v)):
        from .torch._gradients import wants_grad
        if wants_grad(q, k, v):
            run = _with_grad
    if slopes is None or module_of(slopes, "alibi_slopes") and slopes.ndim <= 1:
        return run(q, k, v, alibi_slopes=slopes, out=out, **options)

    need(options["cu_seqlens_q"] is None, f"alibi_slopes has shape {shape_text(slopes)}; accepted with packed q: [Hq]")
    need(tuple(slopes.shape) == (q.shape[0], q.shape[2]),
         f"alibi_slopes has shape {shape_text(slopes)}; accepted: [Hq], [B, Hq] = {[q.shape[0], q.shape[2]]}")
    if q.shape[0] == 0:
        return run(q, k, v, out=out, **options)
    if out is not None:
        _need_out(out, (*q.shape[:3], v.shape[3]), q)
    elif run is forward:
        out = empty((*q.shape[:3], v.shape[3]), "bfloat16" if type_name(q).startswith("float8") else type_name(q), q)
    parts = []
    for b in range(q.shape[0]):
        one = {name: value[b:b + 1] if value is not None and getattr(value, "shape", (1,))[0] > 1 else value
               for name, value in options.items() if name in ("seqlens_kv", "block_table", "bias", *names)}
        kv = (k, v) if table is not None else (k[b:b + 1], v[b:b + 1])
        of_b = out if out is None else out[b:b + 1]
        parts.append(run(q[b:b + 1], *kv, alibi_slopes=slopes[b], out=of_b, **{**options, **one}))
    if run is not forward:
        import torch
        return tuple(torch.cat(x) for x in zip(*parts)) if lse else torch.cat(parts)
    return (out, module_of(q, "q").concatenate([part[1] for part in parts], axis=0)) if lse else out


def _with_grad(q, k, v, *, out, backend, **options):
    """forward() that autograd records."""
    from .torch import forward as recorded
    need(out is None, "out is given where q, k or v requires grad; accepted: None")
    need(backend == "auto", f"backend is {backend} where q, k or v requires grad; accepted: auto")
    return recorded(q, k, v, **options)


def _rows(table, count):
    """table as contiguous int32, clipped to rows below `count`: entries after a sequence's end are not read, but must be valid rows."""
    return contiguous(cast(table.clip(0, count - 1), "int32"))


def _chunks(q, keys, lengths, chunk):
    """0 within the query's chunk, -inf elsewhere: [B or 1, 1, Sq, keys] in q's type, f32 for fp8."""
    xp = module_of(q, "q")
    i, j = arange(q.shape[1], q)[:, None], arange(keys, q)[None, :]
    offset = keys - q.shape[1] if lengths is None else lengths[:, None, None, None] - q.shape[1]
    begin = i + offset
    begin = begin - begin % chunk
    visible = (j >= begin) & (j < begin + chunk)
    bias = cast(xp.where(visible, 0.0, -xp.inf), "float32" if type_name(q).startswith("float8") else type_name(q))
    return bias if bias.ndim == 4 else bias[None, None]


def _behind(leftpad, k_cache, v_cache, table):
    """(k, v, table) whose sequences begin after the padding: the tokens of the cache become pages of size 1."""
    pages, size = k_cache.shape[:2]
    j = arange(table.shape[1] * size, leftpad)[None, :] + leftpad[:, None]
    page = (j // size).clip(0, table.shape[1] - 1)
    b = arange(table.shape[0], leftpad)[:, None]
    rows = table[cast(b, "int64"), cast(page, "int64")] * size + j % size
    flat = [x.reshape(pages * size, 1, *x.shape[2:]) for x in (k_cache, v_cache)]
    return *flat, _rows(rows, pages * size)


class _Used:
    """The first tokens of each sequence of a packed array, packed more tightly and back; sizes do not depend on lengths."""

    def __init__(self, starts, used, total, like):
        xp = module_of(like, "q")
        self.total, self.starts, self.used = total, starts, used
        zero = arange(1, like)
        self.offsets = contiguous(cast(xp.concatenate((zero, xp.cumsum(used, 0)), axis=0), "int32"))
        self.tokens = arange(total, like)
        self.batch = used.shape[0]

    def _sequence(self, offsets):
        found = module_of(self.tokens, "q").searchsorted(offsets, self.tokens, side="right") - 1
        return cast(found.clip(0, self.batch - 1), "int64")

    def pack(self, x):
        b = self._sequence(self.offsets)
        rows = self.starts[b] + self.tokens - self.offsets[b]
        return x.reshape(self.total, *x.shape[-2:])[cast(rows.clip(0, self.total - 1), "int64")]

    def unpack(self, x, axis, fill):
        """x's rows where the whole sequence has them; `fill` for those that are not used."""
        xp = module_of(x, "out")
        b = self._sequence(self.starts)
        place = self.tokens - self.starts[b]
        rows = cast((self.offsets[b] + place).clip(0, self.total - 1), "int64")
        good = (place >= 0) & (place < self.used[b])
        if axis == 0:
            wide = cast(x[rows], "float32") if xp.__name__ != "torch" else x[rows]
            return cast(xp.where(good[:, None, None], wide, fill), type_name(x))
        return xp.where(good[None, :], x[:, rows], fill)


def _append(q, k, v, k_cache, v_cache, lengths, table, cu_q, cu_new, cos, sin, interleaved, rotary_lengths, descales, backend,
            names, each):
    """Writes k and v -> (rotated q, the new lengths). `names`: flash's argument names for kv_append's."""
    after = empty(lengths.shape, "int32", q)
    options = {"cu_seqlens_new": cu_new, "block_table": table, "k_descale": _scales(descales[0], "k_descale"),
               "v_descale": _scales(descales[1], "v_descale"), "seqlens_out": after, "backend": backend}
    append = lambda *arrays, **more: _named_append(names, *arrays, **options, **more)
    if cos is not None:
        cos, sin = _scales(cos, "rotary_cos"), _scales(sin, "rotary_sin")
        need_shape(cos, "rotary_cos", (None, None), "[positions, R / 2]")
        need_shape(sin, "rotary_sin", cos.shape, "rotary_cos's shape")
        need(2 * cos.shape[1] <= q.shape[-1], f"rotary_cos has shape {shape_text(cos)}; accepted: up to D / 2 = {q.shape[-1] // 2} columns")
        begin = lengths if rotary_lengths is None else rotary_lengths
        same_tokens = q.shape[:-2] == k.shape[:-2] and cu_q is cu_new and type_name(q) == type_name(k)
        turn = {}
        if rotary_lengths is None:
            turn = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
        else:
            k = _rotate(k, cos, sin, interleaved, begin, cu_new, True)
        if rotary_lengths is None and each and same_tokens:
            return append(k, v, k_cache, v_cache, lengths, q=q, **turn), after
        q = _rotate(q, cos, sin, interleaved, begin, cu_q, each)
        append(k, v, k_cache, v_cache, lengths, **turn)
    else:
        append(k, v, k_cache, v_cache, lengths)
    return q, after


def _named_append(names, *arrays, **options):
    with renamed({**_NAMES, **names}):
        return kv_append(*arrays, **options)


def _rotate(x, cos, sin, interleaved, begin, offsets, each):
    """x [B, S, H, D] or packed; token t of sequence b for position begin[b] + t, or begin[b] alone."""
    xp = module_of(x, "q")
    if offsets is None:
        position = begin[:, None] + arange(x.shape[1], x)[None, :] * int(bool(each))
    else:
        token = arange(x.shape[0], x)
        b = cast((xp.searchsorted(offsets, token, side="right") - 1).clip(0, begin.shape[0] - 1), "int64")
        position = begin[b] + (token - offsets[b]) * int(bool(each))
    position = cast(position.clip(0, cos.shape[0] - 1), "int64")
    c, s = cos[position][..., None, :], sin[position][..., None, :]
    half = cos.shape[1]
    rotated = cast(x[..., :2 * half], "float32")
    first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, half), slice(half, None))
    out = empty(x.shape, type_name(x), x)
    out[..., 2 * half:] = x[..., 2 * half:]
    front = empty(rotated.shape, "float32", x)
    front[..., first] = rotated[..., first] * c - rotated[..., second] * s
    front[..., second] = rotated[..., first] * s + rotated[..., second] * c
    out[..., :2 * half] = cast(front, type_name(x))
    return out
