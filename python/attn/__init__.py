"""Attention forward on NVIDIA, AMD and CPU: libattn's Python face.

Arrays are NumPy's, PyTorch's, CuPy's, JAX's or any other's with __dlpack__. Results are arrays of q's framework, where q
is. On a GPU a call launches in the framework's current stream and returns. Errors are attn.Error and its subclasses.

Types are named as in attn.h, which types() lists, or given as a framework's dtype.
"""
import json
import os

from . import _attn, _rocm
from ._errors import (DriverError, DriverMissing, Error, InternalError, InvalidArgument, NoDevice, OutOfMemory,
                      Unsupported)
from ._masks import BlockMask

__all__ = ["BlockMask", "DriverError", "DriverMissing", "Error", "InternalError", "InvalidArgument", "NoDevice",
           "OutOfMemory", "Plan", "Unsupported", "cache_clear", "cache_info", "check", "explain", "forward",
           "get_num_threads", "info", "kv_append", "kv_roll", "merge", "quantize", "set_num_threads", "types"]
__version__ = _attn.version()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_attn.forget_everything)


def _read_in_c(function):
    """`function` as _attn has it, whose signature and documentation are this one's: Python takes longer to read so many arguments
    than all else of a small call."""
    names = function.__code__.co_varnames[:function.__code__.co_argcount]
    options = (f"{name}={default!r}" for name, default in function.__kwdefaults__.items())
    return _attn.make_forward(__name__, f"{function.__name__}({', '.join((*names, '*', *options))})\n--\n\n{function.__doc__ or ''}")


@_read_in_c
def forward(q, k, v, *, causal=False, causal_top_left=False, window=(-1, -1), scale=None, softcap=0.0, bias=None,
            alibi_slopes=None, sinks=None, block_mask=None, tree=None, tree_keys=0, seqlens_kv=None, cu_seqlens_q=None,
            cu_seqlens_kv=None, max_seqlen_q=None, block_table=None, q_descale=None, k_descale=None, v_descale=None,
            k_type=None, v_type=None, k_scale=None, v_scale=None, bias_slopes=None, out_scale=None, out_dtype=None,
            return_lse=False, out=None, backend="auto"):
    """softmax(scale q k^T + bias, masked) v -> out, or (out, lse) with return_lse.

    q [B, Sq, Hq, D], k [B, Skv, Hkv, D], v [B, Skv, Hkv, Dv]; out [B, Sq, Hq, Dv], lse f32 [B, Hq, Sq] natural log. Any
    strides, the last dimension contiguous; Hq is a multiple of Hkv.

    causal             query i sees key j <= i + Skv - Sq; causal_top_left: j <= i
    window             (left, right): i + Skv - Sq - left <= j <= i + Skv - Sq + right, -1 = unbounded, and so is
                       any side longer than the keys, up to 2^63 - 1
    scale, softcap     S = scale q k^T (None: 1 / sqrt(D); 0: all visible keys weigh the same), then softcap * tanh(S / softcap) if
                       softcap is not 0
    bias               f32, f16 or q's type [B, Hq, Sq, Skv], 1 where it broadcasts; added to S
    bias_slopes        f32 [Hq]: bias * slope in its place, as ggml's mask; -inf stays
    alibi_slopes       f32 [Hq]: S - slope * |i + Skv - Sq - j|
    sinks              f32 [Hq]: exp(sink) joins the denominator and lse
    block_mask         a BlockMask
    tree, tree_keys    u64 or i64 [B, Sq, 2], packed q: [total_q, 2]: query i sees key n of the sequence's last tree_keys, up to 128,
                       only if bit n % 64 of its word n / 64 is set
    seqlens_kv         i32 [B]: keys of each sequence, the rest of k and v is not read
    cu_seqlens_q       i32 [B + 1]: q is packed [total_q, Hq, D], lse [Hq, total_q]
    max_seqlen_q       with cu_seqlens_q: the longest sequence or more, None = total_q; the smaller the faster on GPUs
    cu_seqlens_kv      i32 [B + 1]: k and v are packed [total, Hkv, D]
    block_table        i32 [B, pages]: k and v are pages [num_pages, page_size, Hkv, D]
    q_descale          f32 [1] or [B, Hkv]; k_descale, v_descale also [B, Hkv, blocks of 64 or 128 keys]: value = stored *
                       descale
    k_type, v_type     what k and v in uint8 are: one of ggml's types, or i4; None: q8_0 or q4_0, by their size
    k_scale, v_scale   f16 as k and v without the last dimension, of i8 and i4: value = code * scale
    out_scale          f32 [1], fp8 out: stored = round(value * out_scale)
    out_dtype          None: q's type, bf16 for an fp8 q; or that of `out`
    out                an array for the result; it is what is returned
    backend            "auto": by where q lies; "reference" (float64) or "cpu" for host memory, "cuda", "hip"

    k and v may be lists of segments, older keys first; seqlens_kv, cu_seqlens_kv, block_table, k_descale, v_descale, k_type,
    v_type, k_scale and v_scale are then lists too, with None where a segment has none. K/V in ggml's blocks and i4 are uint8
    arrays whose last dimension is the bytes of a row. Arrays that require grad are refused but under torch.no_grad() and
    inference_mode(). out must not overlap an input. With cu_seqlens_q, rows of out and lse beyond cu_seqlens_q[-1] are 0 and
    -inf. Plans are kept for calls that differ in data only.
    """


class Plan(_attn.Plan):
    """A kernel chosen and loaded for calls like this one: Plan(q, k, v, **arguments of forward).

    The arrays are examples: shapes, types, strides and device count. More arguments: kernel (a name, no other will do),
    num_threads (on the host; 0: as get_num_threads() says now), max_sms, fixed_split (keys per split), split_invariant,
    fp8_precise; attn.h has their meaning. kv_prefix_stable is accepted, without effect.

    plan(q, k, v, **arrays) is forward() with the scalars and execution options of the plan; `arrays` are its array arguments, out
    and return_lse.

    A plan does not change, so its copy is itself. It cannot be pickled. In the child of a fork a plan of the host works, one of a GPU
    does not.
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
    """Raises InvalidArgument if lengths, offsets, pages or blocks of a mask are none for Plan(q, k, v, **options) to run
    on. A run on a GPU does not look at them, but takes what is bad for a key that is not there; this waits for the stream.
    On the host every run checks lengths and offsets, this pages too."""
    _attn.check(q, k, v, **options)


def explain(q, k, v, **options):
    """Which kernel Plan(q, k, v, **options) would choose, and why each other one declines: {"kernel", "backend",
    "workspace", "declined": [{"kernel", "reason"}]}."""
    return json.loads(_attn.explain(q, k, v, **options))


def merge(parts, *, out_dtype=None, backend="auto"):
    """One (out, lse) from those of disjoint sets of keys: [(out, lse), ...], out [B, Sq, Hq, Dv] in f32, f16 or bf16 with
    lse f32 [B, Hq, Sq], or packed [total_q, Hq, Dv] with [Hq, total_q]. Parts whose lse is -inf contribute nothing. With
    sinks, one part alone may have them."""
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
    """(stored, descale) of x [B, S, H, D], or packed [total, H, D], in f32, f16 or bf16; value = stored * descale.

    dtype      one of fp8; one of ggml's types (stored: uint8 [..., bytes of a row],
               descale None); i8, i4 (int8 and, two a byte, uint8; in the place of descale the scales, f16 [B, S, H])
    scale      a number or an f32 array, which becomes descale; "amax": the largest |x| / the type's largest value
    per        what has a scale of its own: "tensor" [1], "head" [B, H], 64 or 128 keys [B, H, blocks]
    saturate   a value beyond the range becomes the largest one, else NaN (inf for f8_e5m2)
    """
    return _attn.quantize(x, dtype, scale, per, saturate, backend)


def kv_append(k_new, v_new, k_cache, v_cache, seqlens, *, cu_seqlens_new=None, max_seqlen_new=None, block_table=None,
              k_descale=None, v_descale=None, k_type=None, v_type=None, k_scale=None, v_scale=None, rotary_cos=None,
              rotary_sin=None, rotary_interleaved=False, q=None, q_out=None, advance_seqlens=False, seqlens_out=None, backend="auto"):
    """Writes k_new and v_new into a cache, token t of sequence b at position seqlens[b] + t -> q rotated, None without q.

    k_new [B, T, Hkv, D], v_new [B, T, Hkv, Dv] in f32, f16 or bf16; k_cache [B, S, Hkv, D], v_cache [B, S, Hkv, Dv] in any
    type of forward()'s k and v, whose elements are stored = round(x / descale); seqlens i32 [B]. Nothing is written for a
    token whose position is S or more.

    cu_seqlens_new      i32 [B + 1]: k_new, v_new and q are packed [total, heads, D]
    max_seqlen_new      with cu_seqlens_new: the most tokens of a sequence or more, None = total
    block_table         i32 [B, pages]: k_cache and v_cache are pages [num_pages, page_size, Hkv, D]
    k_descale           f32 [1], [B, Hkv] or [B, Hkv, blocks of 64 or 128 keys], as v_descale; read
    k_type, v_type      as forward()'s; k_scale, v_scale too, which are written
    rotary_cos          f32 [S or more positions, R / 2], as rotary_sin: the first R elements of each head of k_new and q are
                        rotated for their position, elements i and i + R / 2 by angle i
    rotary_interleaved  elements 2 i and 2 i + 1 by angle i instead
    q                   k_new's type [B, T, Hq, D]; rotated as k_new is, with rotary_cos and rotary_sin alone
    q_out               an array for the result, q itself too; rows of tokens without room are not written
    advance_seqlens     seqlens becomes what the cache holds then
    seqlens_out         i32 [B]: becomes that instead; of several layers with the same seqlens, the last one advances them
    backend             as forward()'s
    """
    return _attn.kv_append(locals())


def kv_roll(k_recent, v_recent, recent_table, recent_seqlens, k_old, v_old, old_seqlens, *, keep, old_table=None, k_descale=None,
            v_descale=None, k_type=None, v_type=None, k_scale=None, v_scale=None, backend="auto"):
    """Moves the oldest full pages of a cache in f32, f16 or bf16 behind the keys of one in another type, as kv_append converts.

    k_recent [pages, page_size, Hkv, D], v_recent [.., Dv], recent_table i32 [B, pages of a sequence], recent_seqlens i32 [B];
    k_old [B, S, Hkv, D], v_old [B, S, Hkv, Dv] in any type of forward()'s k and v, old_seqlens i32 [B]. Of a sequence so many
    pages move as leave `keep` keys or more and have room. Both lengths are written, and the entries of recent_table that have
    keys are turned: pages that are free now come last.

    old_table           i32 [B, pages]: k_old and v_old are pages too
    k_descale, ..       k_descale, v_descale, k_type, v_type, k_scale, v_scale: kv_append's, of k_old and v_old
    backend             as forward()'s
    """
    _attn.kv_roll(locals())


def set_num_threads(n):
    """Calls on the host from now on use up to n threads, the caller's included; few for little work. Plans keep theirs.

    0 is the default: the first number of OMP_NUM_THREADS, which is read once in a process, else the cores it may use."""
    _attn.set_num_threads(n)


def get_num_threads():
    """What set_num_threads() has set, or the default."""
    return _attn.num_threads()


def types():
    """attn.h's types by name: {"f16": {"dtype": what arrays of it are of, "kind": "float", "fp8", "ggml" or "codes", "block_elements",
    "block_bytes", "has_scales", "output_only"}, ...}; attn_dtype_properties says what these are."""
    return _attn.types()


def info():
    """{"version", "backends": [{"name", "available", "reason", "devices": [{"device", "name", "arch", "passed_by", "kernels", ...}]}],
    "auto": {"backend", "device"}, "types": [...], "kernels": [...]}

    passed_by: why the C library's backend auto does not take a device, "" if it may. A device's kernels: those that there is code of
    for it. hip also comes from AMD's package rocm-sdk-core, wherever it is on sys.path, if there is no other.
    """
    found = json.loads(_attn.info())
    hip = next(b for b in found["backends"] if b["name"] == "hip")
    return found if hip["available"] or not _rocm.open_wheel() else json.loads(_attn.info())


def cache_info():
    """{"plans", "hits", "misses"} of forward(), merge(), quantize() and kv_append() since the start or cache_clear()."""
    return dict(zip(("plans", "hits", "misses"), _attn.cache_counts()))


def cache_clear():
    """Drops the plans that the functions keep, and their workspaces."""
    _attn.cache_clear()
