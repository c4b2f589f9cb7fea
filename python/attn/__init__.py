"""Attention on NVIDIA GPUs, AMD GPUs and CPUs, with gradients on NVIDIA GPUs and CPUs: libattn's Python interface.

Arrays may be NumPy's, PyTorch's, CuPy's, JAX's or any other's with __dlpack__. Results are arrays of q's framework, on q's device. On a
GPU a call launches in the framework's current stream and returns. Errors are attn.Error and its subclasses.

In shapes B is the batch, Sq and Skv are queries and keys of a sequence, Hq and Hkv the heads of q and of k and v, D and Dv the head
dimensions. Types are named as in attn.h, and types() lists them, or given as a framework's dtype.
"""
import json
import os

from . import _attn, _mla, _rocm
from ._errors import (DriverError, DriverMissing, Error, InternalError, InvalidArgument, NoDevice, OutOfMemory,
                      Unsupported, renamed)
from ._masks import BlockMask

__all__ = ["BlockMask", "DriverError", "DriverMissing", "Error", "InternalError", "InvalidArgument", "NoDevice",
           "OutOfMemory", "Plan", "Unsupported", "backward", "cache_clear", "cache_info", "check", "explain", "forward",
           "get_num_threads", "info", "kv_append", "kv_roll", "merge", "mla_decode", "quantize", "set_num_threads", "types"]
__version__ = _attn.version()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_attn.forget_everything)


def _read_in_c(function):
    """A function of _attn with `function`'s signature and documentation. It parses the arguments in C, because in Python parsing this
    many takes longer than the rest of a small call."""
    names = function.__code__.co_varnames[:function.__code__.co_argcount]
    options = (f"{name}={default!r}" for name, default in function.__kwdefaults__.items())
    return _attn.make_forward(__name__, f"{function.__name__}({', '.join((*names, '*', *options))})\n--\n\n{function.__doc__ or ''}")


@_read_in_c
def forward(q, k, v, *, causal=False, causal_top_left=False, window=(-1, -1), scale=None, softcap=0.0, bias=None,
            alibi_slopes=None, sinks=None, block_mask=None, tree=None, tree_keys=0, seqlens_kv=None, kv_begin=None,
            causal_sequences=None, query_start=None, key_start=None, key_places=None, ready=None, cu_seqlens_q=None,
            cu_seqlens_kv=None, max_seqlen_q=None, max_seqlen_kv=None, block_table=None, shared_segments=0, q_descale=None,
            k_descale=None, v_descale=None, k_type=None, v_type=None, k_scale=None, v_scale=None, head_dim_v=None, lists=None, list_lengths=None,
            list_block=None, list_queries=None, list_of_pool=None, no_positions=None, bias_slopes=None, out_scale=None,
            out_dtype=None, return_lse=False, out=None, lse=None, accumulate=False, backend="auto"):
    """softmax(scale q k^T + bias, masked) v -> out, or (out, lse) with return_lse.

    q [B, Sq, Hq, D], k [B, Skv, Hkv, D], v [B, Skv, Hkv, Dv]; out [B, Sq, Hq, Dv]; lse f32 [B, Hq, Sq], natural logarithm. Any
    strides, with a contiguous last dimension. Hq is a multiple of Hkv.

    causal             query i sees key j <= i + Skv - Sq; causal_top_left: j <= i
    window             (left, right): i + Skv - Sq - left <= j <= i + Skv - Sq + right; -1, or more than there are keys (up to
                       2^63 - 1), is unbounded
    scale, softcap     S = scale q k^T (None: 1 / sqrt(D); 0: all visible keys weigh the same), then softcap * tanh(S / softcap) if
                       softcap is not 0
    bias               f32, f16 or q's type [B, Hq, Sq, Skv], or 1 in dimensions that broadcast; added to S
    bias_slopes        f32 [Hq]: adds bias * slope instead of bias, as ggml's mask; a bias of -inf stays -inf
    alibi_slopes       f32 [Hq]: S - slope * |i + Skv - Sq - j|
    sinks              f32 [Hq]: exp(sink) joins the denominator and lse
    block_mask         a BlockMask
    tree, tree_keys    u64 or i64 [B, Sq, 2], for packed q [total_q, 2]: of the sequence's last tree_keys keys (up to 128), a query
                       sees key n only if bit n % 64 of its word n / 64 is set
    seqlens_kv         i32 [B]: keys of each sequence; the rest of k and v is not read
    kv_begin           i32 [B]: the first key of each sequence that is seen, as after padding on the left; hidden keys still count in
                       positions
    causal_sequences   i32 [B], with causal: 0 where a sequence is not causal; on the host only
    query_start        i64 [B]: the position of each sequence's first query, instead of Skv - Sq. On the CPU and CUDA, as the next two
    key_start          i64 [B]: the position of each sequence's first key, with query_start; causal, window and alibi_slopes compare
                       positions. Where the keys are interleaved over ranks, that of the first key of rank 0
    key_places         (interleave, ranks, rank): key c is at key_start + (c // interleave * ranks + rank) * interleave + c % interleave
    ready              u32 [2]: the keys and values are there once ready[0] has got to ready[1]. Before, the host refuses the call;
                       CUDA makes the stream wait; docs/distributed.md says what must not wait for the stream in turn
    cu_seqlens_q       i32 [B + 1]: q is packed [total_q, Hq, D], lse [Hq, total_q]
    max_seqlen_q       with cu_seqlens_q: the length of the longest sequence or more, None = total_q; smaller is faster on GPUs
    max_seqlen_kv      with block_table: the most keys of a sequence, or more, None = all that the table has room for; smaller is faster on
                       GPUs
    cu_seqlens_kv      i32 [B + 1]: k and v are packed [total, Hkv, D]
    block_table        i32 [B, pages]: k and v are pages [num_pages, page_size, Hkv, D]
    q_descale          f32 [1] or [B, Hkv] (the query heads of a K/V head share one): value = stored * descale. [B, Hkv] with
                       strides of 0 is [1]
    k_descale, v_descale  the same, or [B, Hkv, blocks of 64 or 128 keys]
    k_type, v_type     the type of k and v in uint8: one of ggml's types, i4, or a cache's format; None: q8_0 or q4_0, by their size
    k_scale, v_scale   for types with scales: i8 and i4 f16, f8_e4m3fn_token f32, shaped as k and v without the last dimension; nvfp4
                       [..., D / 16] and mla_584 [..., 8] u8: value = code * scale
    head_dim_v         with v None: V is the first head_dim_v columns of k, as in a latent cache; None: all. docs/mla.md says which
                       kernels compute this and the following
    lists              i32 [B, Sq, Hkv or 1, n], for packed q [total_q, Hkv or 1, n]: the keys that each query sees, in any order; -1
                       and keys that are not there are none; a key that is listed twice counts twice
    list_lengths       i32, the shape of lists without n: how many entries of each list count
    list_block, list_queries  keys of an entry, and queries that have one list together: 1, 64 or 128
    list_of_pool       True: entries are page * page_size + place in the page; without block_table, with no_positions
    no_positions       True: causal masks and windows do not hide these keys, and positions do not count them
    out_scale          f32 [1], fp8 out: stored = round(value * out_scale)
    out_dtype          None: the type of `out`, if given, else q's, or bf16 for an fp8 q
    out, lse           arrays for the results, which are returned; they must not overlap an input
    accumulate         out (f32) and lse hold the result of earlier calls over other keys, and this call's is merged into it. Rows
                       of lse that are -inf hold nothing. On the host and CUDA
    backend            "auto": by q's memory; "reference" (float64) or "cpu" for host memory, "cuda", "hip"

    k and v may be lists of segments, older keys first. seqlens_kv, key_start, ready, cu_seqlens_kv, max_seqlen_kv, block_table, k_descale,
    v_descale, k_type, v_type, k_scale, v_scale, lists, list_lengths, list_of_pool and no_positions are then lists too, with None
    for a segment that has none. K/V in ggml's blocks and i4 are uint8
    arrays whose last dimension is the bytes of a row.

    The first shared_segments segments are a prefix that all sequences of the batch share: their k and v are [1, Skv, Hkv, D] or
    pages, and their seqlens_kv, block_table, descales and scales those of a batch of 1. The result is that of a copy for each
    sequence; where a prefix_* kernel runs, the prefix is read once for the batch (docs/decode.md).

    A query that sees no key has out 0 and lse -inf. So have packed rows from cu_seqlens_q[-1] on. Arrays that require grad are
    refused, except under torch.no_grad() and inference_mode(): attn.torch.forward has autograd. Calls that differ only in data use one plan, which is kept.
    """


def backward(d_out, q, k, v, out, lse, *, causal=False, causal_top_left=False, window=(-1, -1), scale=None, softcap=0.0, bias=None,
             alibi_slopes=None, sinks=None, block_mask=None, seqlens_kv=None, kv_begin=None, cu_seqlens_q=None, cu_seqlens_kv=None,
             max_seqlen_q=None, bias_slopes=None, d_lse=None, want=("q", "k", "v"), dtype=None, dq=None, dk=None, dv=None, d_bias=None,
             d_sinks=None, accumulate=False, backend="auto"):
    """The gradients of a number that depends on forward()'s out and lse -> a tuple in the order of `want`.

    d_out, out         f32, f16 or bf16 [B, Sq, Hq, Dv], or packed [total_q, Hq, Dv]: the gradient of out, and out as forward() gave it
    lse, d_lse         f32 [B, Hq, Sq], or [Hq, total_q]: forward()'s lse, and its gradient (None: 0)
    q, k, v, causal .. bias_slopes  as forward() had them; k and v are one segment of q's type, without pages
    want               of "q", "k", "v", "bias", "sinks"; d_bias has bias's shape: sums where that broadcasts
    dtype              of the gradients but d_sinks, which is f32. None: that of each input; f32; f64 (reference)
    dq, dk, dv, d_bias, d_sinks  arrays for the results, which are returned; they must not overlap another array
    accumulate         the results are added to what dq, dk ... hold
    backend            "auto", "reference", "cpu" or "cuda", which takes f16 and bf16; hip has no kernel yet

    Equal calls give equal bits, on any number of threads and multiprocessors. docs/backward.md says what is computed, and how accurately."""
    with renamed({"seqlens": "seqlens_kv", "cu_seqlens": "cu_seqlens_kv"}):
        return _attn.backward(locals())


class Plan(_attn.Plan):
    """A kernel chosen and loaded for calls like this one: Plan(q, k, v, **arguments of forward).

    The arrays are examples: only their shapes, types, strides and device matter. Further arguments: kernel (the name of the only
    kernel to use), num_threads (on the host; 0: what get_num_threads() returns now), max_sms, fixed_split (keys per split),
    split_invariant, fp8_precise; attn.h explains them. kv_prefix_stable is accepted, without effect.

    plan(q, k, v, **arrays) is forward() with the plan's scalars and options; `arrays` are forward's array arguments, out and
    return_lse.

    A plan does not change, so copying returns the plan itself. It cannot be pickled. In the child of a fork a plan of the host
    works, one of a GPU does not.
    """

    def __init__(self, q, k, v, **options):
        super().__init__(q, k, v, **options)

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __reduce_ex__(self, protocol):
        raise TypeError("a Plan is loaded into its process and cannot be pickled; accepted: Plan(q, k, v, **options) made where it runs")

    def __repr__(self):
        return f"<attn.Plan {self.kernel}>"


def check(q, k, v, **options):
    """Raises InvalidArgument if forward(q, k, v, **options) should not run on these lengths, offsets, pages or mask blocks; takes Plan's options.

    A run on a GPU does not check them: it clamps bad lengths and treats keys of bad pages as absent. On the host every run checks
    lengths and offsets; check() checks pages too. Waits for the stream."""
    _attn.check(q, k, v, **options)


def explain(q, k, v, **options):
    """Which kernel Plan(q, k, v, **options) would choose, and why each other one declines: {"kernel", "backend",
    "workspace", "declined": [{"kernel", "reason"}]}, and of prefix_* the kernels that it consists of, "parts"."""
    return json.loads(_attn.explain(q, k, v, **options))


def merge(parts, *, out_dtype=None, backend="auto"):
    """Merges results over disjoint sets of keys into (out, lse) over all of them.

    parts: [(out, lse), ...], each out [B, Sq, Hq, Dv] in f32, f16 or bf16 with lse f32 [B, Hq, Sq], or packed [total_q, Hq, Dv] with
    [Hq, total_q]. A part with lse -inf contributes nothing. Only one part may have been computed with sinks."""
    try:
        parts = list(parts)
    except TypeError:
        raise TypeError(f"parts is a {type(parts).__name__}; accepted: a list of (out, lse)") from None
    for i, part in enumerate(parts):
        if not isinstance(part, (list, tuple)) or len(part) != 2:
            length = f" of {len(part)}" if isinstance(part, (list, tuple)) else ""
            raise TypeError(f"parts[{i}] is a {type(part).__name__}{length}; accepted: (out, lse)")
    return _attn.merge([tuple(part) for part in parts], out_dtype, backend)


def quantize(x, dtype, *, scale=1, per="tensor", saturate=False, backend="auto"):
    """Converts x [B, S, H, D], or packed [total, H, D], in f32, f16 or bf16 -> (stored, descale); value = stored * descale.

    dtype      one of fp8; one of ggml's types (stored: uint8 [..., bytes of a row]; descale: None); i8 (stored: int8), i4
               (stored: uint8, two codes per byte); these two return scales, f16 [B, S, H], instead of descale. A format of servers'
               caches (docs/mla.md; stored: uint8): mla_656 returns descale None, f8_e4m3fn_token and mla_584 scales instead of
               descale, nvfp4 (stored, scales, descale)
    scale      a number or an f32 array, which becomes descale; "amax": the largest |x| / the type's largest value
    per        what shares a descale: "tensor" [1], "head" [B, H], 64 or 128 keys [B, H, blocks]
    saturate   True: a value beyond the range becomes the largest one; False: NaN (f8_e5m2: inf)
    """
    with renamed({"kind": "per"}):
        return _attn.quantize(x, dtype, scale, per, saturate, backend)


def kv_append(k_new, v_new, k_cache, v_cache, seqlens=None, *, cu_seqlens_new=None, max_seqlen_new=None, block_table=None, slot_mapping=None,
              k_descale=None, v_descale=None, k_type=None, v_type=None, k_scale=None, v_scale=None, rotary_cos=None,
              rotary_sin=None, rotary_interleaved=False, q=None, q_out=None, advance_seqlens=False, seqlens_out=None, backend="auto"):
    """Writes k_new and v_new into a cache, token t of sequence b at position seqlens[b] + t -> rotated q, or None without q.

    v_new and v_cache are None where v is in k (docs/mla.md).

    k_new [B, T, Hkv, D], v_new [B, T, Hkv, Dv] in f32, f16 or bf16; k_cache [B, S, Hkv, D], v_cache [B, S, Hkv, Dv] in any
    type that forward() takes for k and v, with stored = round(x / descale); seqlens i32 [B]. A token whose position is S or more
    is not written.

    cu_seqlens_new      i32 [B + 1]: k_new, v_new and q are packed [total, heads, D]
    max_seqlen_new      with cu_seqlens_new: the most new tokens of a sequence, or more; None = total
    block_table         i32 [B, pages]: k_cache and v_cache are pages [num_pages, page_size, Hkv, D]
    slot_mapping        i64 [B, T], or [T] for k_new [T, Hkv, D]: instead of seqlens and block_table, where each token goes in the pages,
                        page * page_size + place; negative: nowhere. If two tokens have one slot, its contents are
                        undefined. Without rotation
    k_descale           f32 [1], [B, Hkv] or [B, Hkv, blocks of 64 or 128 keys]; read. v_descale: the same
    k_type, v_type      as in forward(); k_scale, v_scale too, but they are written
    rotary_cos          f32 [S or more positions, R / 2], as rotary_sin: the first R elements of each head of k_new and q are
                        rotated for their position, elements i and i + R / 2 by angle i
    rotary_interleaved  rotates elements 2 i and 2 i + 1 by angle i instead
    q                   k_new's type [B, T, Hq, D]; rotated as k_new is; requires rotary_cos and rotary_sin
    q_out               an array for rotated q, may be q itself; rows of tokens that have no room are not written
    advance_seqlens     seqlens is set to the new lengths
    seqlens_out         i32 [B]: is set to the new lengths instead. If several layers share seqlens, only the last one advances it
    backend             as in forward()
    """
    with renamed({"k": "k_cache", "v": "v_cache"}):
        return _attn.kv_append(locals())


# attn.h's names in errors of kv_roll.
_ROLLED = {"recent.k": "k_recent", "recent.v": "v_recent", "recent.seqlens": "recent_seqlens", "recent.block_table": "recent_table",
           "old.k": "k_old", "old.v": "v_old", "old.seqlens": "old_seqlens", "old.block_table": "old_table", "old.k_scale": "k_scale",
           "old.v_scale": "v_scale"}


def kv_roll(k_recent, v_recent, recent_table, recent_seqlens, k_old, v_old, old_seqlens, *, keep, old_table=None, k_descale=None,
            v_descale=None, k_type=None, v_type=None, k_scale=None, v_scale=None, backend="auto"):
    """Moves the oldest full pages of a cache in f32, f16 or bf16 to the end of a cache in another type, converted as by kv_append.

    v_recent and v_old are None where v is in k (docs/mla.md).

    k_recent [pages, page_size, Hkv, D], v_recent [.., Dv], recent_table i32 [B, pages of a sequence], recent_seqlens i32 [B];
    k_old [B, S, Hkv, D], v_old [B, S, Hkv, Dv] in any type that forward() takes, old_seqlens i32 [B]. From each sequence
    as many pages move as leave at least `keep` keys and have room in the old cache. Both lengths are updated, and the used entries of
    each row of recent_table are rotated left, so that the freed pages come last.

    old_table           i32 [B, pages]: k_old and v_old are pages too
    k_descale ...       k_descale, v_descale, k_type, v_type, k_scale, v_scale of k_old and v_old, as in kv_append()
    backend             as in forward()
    """
    with renamed(_ROLLED):
        _attn.kv_roll(locals())


def mla_decode(q, cache, block_table=None, seqlens=None, *, head_dim_v=512, scale=None, causal=True, cache_type=None, cache_scale=None,
               descale=None, indices=None, list_lengths=None, indices_of_pool=False, window=(-1, -1), softcap=0.0, sinks=None,
               return_lse=False, out=None, backend="auto"):
    """Attention over a latent cache, whose rows are keys and, in their first head_dim_v columns, values -> out, or (out, lse).

    q [B, Sq, Hq, D]: per head the query times the up-projection of the keys, then its rotated part. cache [pages, page_size, D] with
    block_table i32 [B, pages of a sequence] and seqlens i32 [B], or [B, S, D]; with a dimension of 1 head before D or without. out [B,
    Sq, Hq, head_dim_v]. docs/mla.md has an example.

    scale              None: 1 / sqrt(D). Models use that of their expanded heads, DeepSeek 1 / sqrt(192)
    causal             query i sees key j <= i + Skv - Sq
    cache_type         of a cache in uint8: mla_656 (None with rows of 656 bytes), mla_584 or another format. mla_584 is [pages,
                       page_size, 584] as vLLM has it: a page's codes and its scales one after the other, pages a multiple of 576 bytes
                       apart
    cache_scale        the scales of other types that have them, as k_scale of forward()
    descale            f32 [1]: value = stored * descale
    indices            i32 [B, Sq, n]: the keys that each query sees, as lists of forward(), with list_lengths i32 [B, Sq]
    indices_of_pool    True: they are page * page_size + place in the page, as FlashMLA has them; block_table and seqlens are None, and
                       causal and window have no effect
    window, softcap, sinks, return_lse, out, backend  as in forward()
    """
    return _mla.decode(forward, **locals())


def set_num_threads(n):
    """Lets later calls on the host use up to n threads, the caller's included; little work uses fewer. Existing plans keep theirs.

    0 is the default: the first number in OMP_NUM_THREADS, read once per process, else the number of cores that the process may use."""
    _attn.set_num_threads(n)


def get_num_threads():
    """The number that set_num_threads() set, or the default."""
    return _attn.num_threads()


def types():
    """attn.h's types by name: {"f16": {"dtype": what arrays of it are of, "kind": "float", "fp8", "ggml", "codes" or "cache",
    "block_elements", "block_bytes", "has_scales", "output_only", "scale_bytes", "scale_elements"}, ...}; attn_dtype_properties says
    what these are."""
    return _attn.types()


def info():
    """{"version", "backends": [{"name", "available", "reason", "devices": [{"device", "name", "arch", "passed_by", "kernels", ...}]}],
    "auto": {"backend", "device"}, "types": [...], "kernels": [...]}

    passed_by: why the C library's backend auto does not take the device, "" if it may. A device's "kernels" are those that this build
    has code of for it. If no other HIP library is found, the one in AMD's package rocm-sdk-core is used, wherever it is on sys.path.
    """
    found = json.loads(_attn.info())
    hip = next(b for b in found["backends"] if b["name"] == "hip")
    return found if hip["available"] or not _rocm.open_wheel() else json.loads(_attn.info())


def cache_info():
    """{"plans", "hits", "misses"} of forward(), merge(), quantize() and kv_append() since the start or cache_clear(), and {"workspaces",
    "workspace_bytes"} that are kept for later calls: one for each stream and for each thread that was in a call at the same time."""
    return dict(zip(("plans", "hits", "misses", "workspaces", "workspace_bytes"), _attn.cache_counts()))


def cache_clear():
    """Drops the plans and workspaces that the functions keep."""
    _attn.cache_clear()
