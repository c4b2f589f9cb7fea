"""attn.mla_decode."""
from ._arrays import need, shape_text
from ._errors import renamed

_NAMES = {"k": "cache", "k_type": "cache_type", "k_scale": "cache_scale", "k_descale": "descale", "seqlens_kv": "seqlens",
          "lists": "indices", "list_of_pool": "indices_of_pool"}


def _need_dims(x, name, dims, form):
    need(getattr(x, "ndim", None) in dims, f"{name} has shape {shape_text(x) if hasattr(x, 'shape') else None}; accepted: {form}")


def split_584(cache):
    """vLLM's pages [pages, page_size, 584] of uint8 -> (rows [pages, page_size, 1, 576], scales [pages, page_size, 1, 8]), both views."""
    pages, size, last = cache.shape
    need(last == 584, f"cache has shape {shape_text(cache)}; accepted of mla_584: [pages, page_size, 584]")
    flat = cache.reshape(pages, size * 584)
    return flat[:, :size * 576].reshape(pages, size, 1, 576), flat[:, size * 576:].reshape(pages, size, 1, 8)


def decode(forward, q, cache, block_table, seqlens, *, head_dim_v, causal, cache_type, cache_scale, descale, indices, list_lengths,
           indices_of_pool, window, **options):
    _need_dims(cache, "cache", (3, 4), "[pages, page_size, D], [B, S, D], or these with a head")
    if cache.ndim == 4:
        need(cache.shape[2] == 1, f"cache has shape {shape_text(cache)}; accepted: 1 head")
        cache = cache[:, :, 0]
    if cache_type is None and str(cache.dtype).endswith("uint8") and cache.shape[2] == 656:
        cache_type = "mla_656"
    if str(cache_type) == "mla_584":
        need(cache_scale is None, "cache_scale is given; accepted with mla_584: None, the pages have the scales")
        cache, cache_scale = split_584(cache)
    else:
        if cache_scale is not None:
            form = "the shape of cache without its last dimension, or with that of its scales"
            _need_dims(cache_scale, "cache_scale", (2, 3, 4), form)
            if tuple(cache_scale.shape[:2]) != tuple(cache.shape[:2]) or (cache_scale.ndim == 4 and cache_scale.shape[2] != 1):
                need(False, f"cache_scale has shape {shape_text(cache_scale)} and cache {shape_text(cache)}; accepted: {form}")
            cache_scale = cache_scale.reshape(*cache.shape[:2], 1, *cache_scale.shape[2 + (cache_scale.ndim == 4):])
        cache = cache[:, :, None]
    if indices is not None:
        _need_dims(indices, "indices", (3,), "[B, Sq, n]")
        indices = indices[:, :, None]
        if list_lengths is not None:
            _need_dims(list_lengths, "list_lengths", (2,), "[B, Sq]")
            list_lengths = list_lengths[:, :, None]
    if indices_of_pool:
        need(indices is not None, "indices is None; accepted with indices_of_pool: i32 [B, Sq, n]")
        for name, value in ("block_table", block_table), ("seqlens", seqlens):
            need(value is None, f"{name} is given; accepted with indices_of_pool: None")
        options.update(list_of_pool=True, no_positions=True)
    else:
        options.update(causal=causal, window=window)
    with renamed(_NAMES):
        return forward(q, cache, None, head_dim_v=head_dim_v, block_table=block_table, seqlens_kv=seqlens, k_type=cache_type,
                       k_scale=cache_scale, k_descale=descale, lists=indices, list_lengths=list_lengths, **options)
