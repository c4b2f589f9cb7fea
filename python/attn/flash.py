"""FlashAttention's functions, by its names: flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache.

Arrays are NumPy's, PyTorch's or CuPy's, laid out as there: q [B, Sq, Hq, D], k [B, Skv, Hkv, D], packed [total, H, D], pages
[num_pages, page_size, Hkv, D]. Versions 2 and 3 put different arguments behind the arrays, so these are given by name. What
has no kernel here is refused by name. num_splits, pack_gqa and deterministic are hints, which change nothing: the plan decides,
and equal calls give equal bits. There is no backward.

    softmax_scale      None: 1 / sqrt(D)
    causal             query i sees key j <= i + Skv - Sq
    window_size        (left, right) around i + Skv - Sq, -1 = unbounded
    attention_chunk    only keys of the query's chunk of so many, counted from key 0; 0 = none; q not packed
    softcap            0.0 = none
    alibi_slopes       f32 [Hq], or [B, Hq] where q is not packed: one call for each sequence
    q_descale ...      f32 [B, Hkv] for fp8
    return_softmax_lse (out, lse f32 [B, Hq, Sq]), packed [Hq, total]
    out                an array for the result
    backend            as in attn.forward
"""
from . import forward, kv_append
from ._arrays import arange, cast, contiguous, empty, module_of, need, shape_text, type_name

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def flash_attn_func(q, k, v, *, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0,
                    softcap=0.0, alibi_slopes=None, q_descale=None, k_descale=None, v_descale=None, qv=None, num_splits=0,
                    pack_gqa=None, sm_margin=0, deterministic=False, return_attn_probs=False, return_softmax_lse=False, out=None,
                    backend="auto"):
    """softmax(softmax_scale q k^T, masked) v -> out [B, Sq, Hq, Dv]; the module's help has the arguments."""
    _refuse(dropout_p=dropout_p, qv=qv, sm_margin=sm_margin, return_attn_probs=return_attn_probs)
    return _attend(q, k, v, scale=softmax_scale, causal=causal, window=window_size, chunk=attention_chunk, softcap=softcap,
                   slopes=alibi_slopes, descales=(q_descale, k_descale, v_descale), lse=return_softmax_lse, out=out,
                   backend=backend)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, seqused_q=None, seqused_k=None,
                           block_table=None, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                           attention_chunk=0, softcap=0.0, alibi_slopes=None, q_descale=None, k_descale=None, v_descale=None,
                           qv=None, num_splits=0, pack_gqa=None, sm_margin=0, deterministic=False, return_attn_probs=False,
                           return_softmax_lse=False, out=None, backend="auto"):
    """The same of packed sequences: q [total_q, Hq, D], k and v [total_k, Hkv, D].

    cu_seqlens_q, cu_seqlens_k  i32 [B + 1]; None: q, or k and v, are [B, S, H, D]
    max_seqlen_q, max_seqlen_k  the longest sequence, or more
    seqused_q, seqused_k        i32 [B]: so many tokens of each sequence count. Rows of out and lse beyond are 0 and -inf
    block_table                 i32 [B, pages]: k and v are pages, of lengths seqused_k or those of cu_seqlens_k
    """
    _refuse(dropout_p=dropout_p, qv=qv, sm_margin=sm_margin, return_attn_probs=return_attn_probs)
    xp = module_of(q, "q")
    lengths = seqused_k
    packed_k = cu_seqlens_k if block_table is None else None
    if block_table is not None and lengths is None:
        need(cu_seqlens_k is not None, "seqused_k is None; accepted with block_table: lengths there or in cu_seqlens_k")
        lengths = contiguous(cu_seqlens_k[1:] - cu_seqlens_k[:-1])
    elif packed_k is not None and lengths is not None:  # part of each: tokens are pages of one
        block_table = _rows(packed_k[:-1, None] + arange(max_seqlen_k, q)[None, :], k.shape[0])
        k, v, packed_k = k[:, None], v[:, None], None

    used = None
    if seqused_q is not None:
        starts = cu_seqlens_q
        if starts is None:
            starts = arange(q.shape[0] + 1, q) * q.shape[1]
        used = _Used(starts, seqused_q, q.shape[0] if cu_seqlens_q is not None else q.shape[0] * q.shape[1], q)
    result = _attend(q if used is None else used.pack(q), k, v, cu_q=cu_seqlens_q if used is None else used.offsets,
                     max_q=int(max_seqlen_q) if cu_seqlens_q is not None or used is not None else None, cu_k=packed_k,
                     lengths=lengths, table=block_table, scale=softmax_scale, causal=causal, window=window_size,
                     chunk=attention_chunk, softcap=softcap, slopes=alibi_slopes, descales=(q_descale, k_descale, v_descale),
                     lse=return_softmax_lse, out=out if used is None else None, backend=backend)
    if used is None:
        return result
    made, lse = result if return_softmax_lse else (result, None)
    made = used.unpack(made, 0, 0).reshape(*q.shape[:-1], made.shape[-1])
    if out is not None:
        out[...] = made
        made = out
    if lse is None:
        return made
    lse = used.unpack(lse, 1, -xp.inf)
    return made, lse if cu_seqlens_q is not None else contiguous(lse.reshape(lse.shape[0], *q.shape[:2]).swapaxes(0, 1))


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, *, qv=None, rotary_cos=None, rotary_sin=None,
                            cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, page_table=None,
                            cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None,
                            k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1),
                            attention_chunk=0, softcap=0.0, rotary_interleaved=True, alibi_slopes=None, scheduler_metadata=None,
                            num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False, out=None, backend="auto"):
    """The same over a cache, k_cache [B, S, Hkv, D] or pages, into which k and v are written first.

    k, v                [B, T, Hkv, D], or packed with cu_seqlens_k_new: written from position cache_seqlens[b] on
    rotary_cos, rotary_sin  [positions, R / 2], S or more: k is rotated for its positions, q for cache_seqlens[b] + i, without causal,
                        window_size and attention_chunk all of it for cache_seqlens[b]. f32 ones are taken as they are
    rotary_interleaved  pairs are elements 2 i and 2 i + 1, else i and i + R / 2
    rotary_seqlens      i32 [B]: rotated as if cache_seqlens were these
    cache_seqlens       i32 [B] or one integer: keys that the cache holds; None: it is full
    cache_batch_idx     i32 [B]: sequence b is row cache_batch_idx[b] of k_cache
    cache_leftpad       i32 [B]: where the keys of each sequence begin
    block_table         i32 [B, pages]; page_table is the same
    cu_seqlens_q, max_seqlen_q  q is packed
    """
    _refuse(qv=qv, sm_margin=sm_margin, scheduler_metadata=scheduler_metadata)
    xp = module_of(q, "q")
    need(block_table is None or page_table is None, "page_table is given; accepted with block_table: None")
    table = page_table if block_table is None else block_table
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if cache_batch_idx is not None:
        need(table is None, "cache_batch_idx is given; accepted with block_table: None")
        table = contiguous(cast(cache_batch_idx, "int32")[:, None])  # a row of the cache is a page
    lengths = cache_seqlens
    if lengths is not None and not hasattr(lengths, "shape"):
        lengths = arange(batch, q) * 0 + int(lengths)
    need((k is None) == (v is None), "one of k and v is None; accepted: both, or neither")
    need(k is None or lengths is not None, "cache_seqlens is None; accepted with k and v: how many keys the cache holds")
    need(k is not None or rotary_cos is None, "rotary_cos is given; accepted without k and v: None")
    if k is not None:
        q, lengths = _append(q, k, v, k_cache, v_cache, lengths, table, cu_seqlens_q, cu_seqlens_k_new, rotary_cos, rotary_sin,
                             rotary_interleaved, rotary_seqlens, (k_descale, v_descale), backend,
                             each=causal or attention_chunk > 0 or max(window_size) >= 0)
    if cache_leftpad is not None:
        if table is None:
            table = arange(batch, q)[:, None]
        k_cache, v_cache, table = _behind(cache_leftpad, k_cache, v_cache, table)
        if lengths is None:
            lengths = cache_leftpad * 0 + table.shape[1]
        lengths = contiguous(lengths - cache_leftpad)
    return _attend(q, k_cache, v_cache, cu_q=cu_seqlens_q, max_q=None if max_seqlen_q is None else int(max_seqlen_q),
                   lengths=lengths, table=table, scale=softmax_scale, causal=causal, window=window_size, chunk=attention_chunk,
                   softcap=softcap, slopes=alibi_slopes, descales=(q_descale, k_descale, v_descale), lse=return_softmax_lse,
                   out=out, backend=backend)


_WITHOUT_KERNEL = {"dropout_p": ("0, attn is for inference", lambda x: not x), "qv": ("None", lambda x: x is None),
                   "sm_margin": ("0", lambda x: x == 0), "scheduler_metadata": ("None", lambda x: x is None),
                   "return_attn_probs": ("False; return_softmax_lse=True returns (out, lse)", lambda x: not x)}


def _refuse(**arguments):
    for name, value in arguments.items():
        accepted, good = _WITHOUT_KERNEL[name]
        need(good(value), f"{name} is {type(value).__name__ if hasattr(value, 'shape') else value}; accepted: {accepted}")


def _attend(q, k, v, *, cu_q=None, max_q=None, cu_k=None, lengths=None, table=None, scale, causal, window, chunk, softcap,
            slopes, descales, lse, out, backend):
    bias = None
    if chunk:
        need(chunk > 0, f"attention_chunk is {chunk}; accepted: 1 or more, 0 for none")
        need(cu_q is None and cu_k is None, f"attention_chunk is {chunk}; accepted with packed sequences: 0")
        keys = k.shape[1] * (1 if table is None else table.shape[1])
        bias = _chunks(q, keys, lengths, chunk)
    names = ("q_descale", "k_descale", "v_descale")
    options = {"causal": causal, "window": (int(window[0]), int(window[1])), "scale": scale, "softcap": softcap,
               "cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_k, "max_seqlen_q": max_q if cu_q is not None else None,
               "seqlens_kv": lengths, "block_table": table, "bias": bias, "return_lse": lse, "backend": backend,
               **{name: None if x is None else contiguous(cast(x, "float32")) for name, x in zip(names, descales)}}
    if slopes is None or slopes.ndim == 1:
        return forward(q, k, v, alibi_slopes=slopes, out=out, **options)

    need(cu_q is None, f"alibi_slopes has shape {shape_text(slopes)}; accepted with packed q: [Hq]")
    need(tuple(slopes.shape) == (q.shape[0], q.shape[2]),
         f"alibi_slopes has shape {shape_text(slopes)}; accepted: [Hq], [B, Hq] = {[q.shape[0], q.shape[2]]}")
    if out is None:
        out = empty((*q.shape[:3], v.shape[3]), "bfloat16" if type_name(q).startswith("float8") else type_name(q), q)
    parts = []
    for b in range(q.shape[0]):
        one = {name: value[b:b + 1] if value is not None and getattr(value, "shape", (1,))[0] > 1 else value
               for name, value in options.items() if name in ("seqlens_kv", "block_table", "bias", *names)}
        kv = (k, v) if table is not None else (k[b:b + 1], v[b:b + 1])
        parts.append(forward(q[b:b + 1], *kv, alibi_slopes=slopes[b], out=out[b:b + 1], **{**options, **one}))
    return (out, module_of(q, "q").concatenate([part[1] for part in parts], axis=0)) if lse else out


def _rows(table, count):
    """i32, contiguous, none beyond `count`: what lies behind a sequence is not read, but is a row."""
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
    """(k, v, table) whose sequences begin behind the padding: the tokens of the cache are pages of one."""
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
            each):
    """Writes k and v; (q rotated, lengths behind them)."""
    after = empty(lengths.shape, "int32", q)
    options = {"cu_seqlens_new": cu_new, "block_table": table, "k_descale": descales[0], "v_descale": descales[1],
               "seqlens_out": after, "backend": backend}
    if cos is not None:
        cos, sin = contiguous(cast(cos, "float32")), contiguous(cast(sin, "float32"))
        begin = lengths if rotary_lengths is None else rotary_lengths
        same_tokens = q.shape[:-2] == k.shape[:-2] and cu_q is cu_new and type_name(q) == type_name(k)
        if rotary_lengths is None:
            options.update(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved)
        else:
            k = _rotate(k, cos, sin, interleaved, begin, cu_new, True)
        if rotary_lengths is None and each and same_tokens:
            return kv_append(k, v, k_cache, v_cache, lengths, q=q, **options), after
        q = _rotate(q, cos, sin, interleaved, begin, cu_q, each)
    kv_append(k, v, k_cache, v_cache, lengths, **options)
    return q, after


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
