"""ONNX's operator Attention, opsets 23 to 25.

attention(Q, K, V, ...) computes it on arrays, with the operator's names for inputs and attributes; the package onnx is not needed. To
let onnxruntime compute a model's Attention nodes with libattn, call use_libattn(model) and
options.register_custom_ops_library(attn.onnx.library())."""
import math
from pathlib import Path

from . import forward, types
from ._arrays import arange, cast, contiguous, empty, integer, module_of, need, need_integers, on_gpu, shape_text, type_name
from ._errors import Unsupported, renamed

__all__ = ["attention", "library", "use_libattn"]

_FLOATS = [t["dtype"] for t in types().values() if t["kind"] == "float" and not t["output_only"]]
_DOUBLE = 11  # TensorProto.DataType
# forward()'s argument names, in error sentences -> this operator's names.
_NAMES = {"q": "Q", "k": "K", "v": "V", "bias": "attn_mask", "seqlens_kv": "nonpad_kv_seqlen",
          "seqlens": "nonpad_kv_seqlen", "window": "left_window_size, right_window_size"}


def attention(Q, K, V, attn_mask=None, past_key=None, past_value=None, nonpad_kv_seqlen=None, *, is_causal=0, q_num_heads=None,
              kv_num_heads=None, scale=None, softcap=0.0, softmax_precision=None, left_window_size=-1, right_window_size=-1,
              qk_matmul_output_mode=0, qk_matmul_output=False, backend="auto"):
    """-> (Y, present_key, present_value, qk_matmul_output), on arrays of NumPy, PyTorch or CuPy.

    Q [B, Hq, Sq, D], or [B, Sq, Hq * D] with q_num_heads; K and V likewise with kv_num_heads; f32, f16 or bf16
    attn_mask           bool or float, broadcasts to [B, Hq, Sq, past + Skv], except its last dimension: if that is shorter (also
                        if it is 1), the keys after it are not visible
    past_key, past_value  [B, Hkv, past, D]; present_key and present_value are these followed by K and V, or without a past K
                        and V
    nonpad_kv_seqlen    integers [B]: keys of each sequence; not with a past
    is_causal           query i sees key j <= i + offset: past; nonpad_kv_seqlen[b] - Sq; else 0
    left_window_size, right_window_size  i + offset - left <= j <= i + offset + right, -1 = unbounded
    softmax_precision   a TensorProto.DataType; softmax is computed in float32, with backend="reference" in float64
    qk_matmul_output    True: also returns the scores [B, Hq, Sq, past + Skv] as qk_matmul_output_mode says, in Q's type, which the
                        framework computes again in float32. False: None
    A query that sees no key has a row of zeros.
    """
    xp = module_of(Q, "Q")
    for name, x in (("K", K), ("V", V), ("attn_mask", attn_mask), ("past_key", past_key), ("past_value", past_value),
                    ("nonpad_kv_seqlen", nonpad_kv_seqlen)):
        need(x is None and name not in "KV" or module_of(x, name) is xp,
             f"{name} is a {type(x).__name__}; accepted: an array of {xp.__name__}, as Q")
    for name, x in (("Q", Q), ("K", K), ("V", V)):
        need(x.ndim == Q.ndim and x.ndim in (3, 4), f"{name} has shape {shape_text(x)}; accepted: 3 or 4 dimensions, as many as Q's")
        if type_name(x) not in _FLOATS:
            raise Unsupported(f"{name} is {type_name(x)}; accepted: {', '.join(_FLOATS)}")
    if softmax_precision == _DOUBLE and backend != "reference":
        raise Unsupported('softmax_precision is DOUBLE; accepted: FLOAT, FLOAT16, BFLOAT16, and DOUBLE with backend="reference"')
    need(integer(qk_matmul_output_mode, "qk_matmul_output_mode") in range(4),
         f"qk_matmul_output_mode is {qk_matmul_output_mode}; accepted: 0 to 3")
    for name, size in (("left_window_size", left_window_size), ("right_window_size", right_window_size)):
        need(integer(size, name) >= -1, f"{name} is {size}; accepted: -1 or more")
    need((past_key is None) == (past_value is None), "one of past_key and past_value is None; accepted: both, or neither")
    need(past_key is None or nonpad_kv_seqlen is None, "nonpad_kv_seqlen is given; accepted with past_key: None")

    hidden = Q.ndim == 3
    q = _heads(Q, q_num_heads, "Q", "q_num_heads")  # [B, Sq, Hq, D], as k and v
    k = _heads(K, kv_num_heads, "K", "kv_num_heads")
    v = _heads(V, kv_num_heads, "V", "kv_num_heads")
    need(k.shape[0] == q.shape[0] and k.shape[3] == q.shape[3] and tuple(v.shape[:3]) == tuple(k.shape[:3]),
         f"V has shape {shape_text(V)}, K {shape_text(K)}, Q {shape_text(Q)}; accepted: the same batch, K's head size as Q's, and V as K "
         "except its head size")
    past = 0
    if past_key is not None:
        past = past_key.shape[2] if past_key.ndim == 4 else 0
        for name, x, like, new in (("past_key", past_key, k, K), ("past_value", past_value, v, V)):
            want = [like.shape[0], like.shape[2], past, like.shape[3]]
            need(list(x.shape) == want, f"{name} has shape {shape_text(x)}; accepted: [B, Hkv, past, D] = {want}")
            need(type_name(x) == type_name(new), f"{name} is {type_name(x)}; accepted: {type_name(new)}, as what comes after it")
        k = xp.concatenate((past_key, k.swapaxes(1, 2)), axis=2).swapaxes(1, 2)
        v = xp.concatenate((past_value, v.swapaxes(1, 2)), axis=2).swapaxes(1, 2)
    present_key, present_value = k.swapaxes(1, 2), v.swapaxes(1, 2)
    seqlen_q, total = q.shape[1], k.shape[1]

    lengths = None if nonpad_kv_seqlen is None else need_integers(nonpad_kv_seqlen, "nonpad_kv_seqlen", (q.shape[0],), "[B]")
    bias = None if attn_mask is None else _bias(attn_mask, q, total)
    right = 0 if is_causal else right_window_size
    rule, keys, hides = _rule(seqlen_q, total, past, left_window_size, right, lengths)
    pairs = _pairs(q, total, past, lengths, left_window_size, right) if hides or qk_matmul_output else None
    if hides:
        bias = pairs if bias is None else bias + pairs
    served_bias = None if bias is None else bias[..., :keys]

    served_v = _whole_head(v[:, :keys])
    shape = (q.shape[0], q.shape[2], seqlen_q, served_v.shape[3])
    out = empty((shape[0], shape[2], shape[1], shape[3]) if hidden else shape, type_name(Q), Q)
    with renamed(_NAMES):
        forward(_whole_head(q), _whole_head(k[:, :keys]), served_v, scale=_scale(scale, q), softcap=softcap or 0.0, bias=served_bias,
                seqlens_kv=lengths, out=out if hidden else out.swapaxes(1, 2), backend=backend, **rule)
    out = out[..., :v.shape[3]]
    scores = None
    if qk_matmul_output:
        scores = _scores(q, k, _scale(scale, q), softcap or 0.0, bias, pairs, qk_matmul_output_mode)
        scores = cast(scores, type_name(Q))
    return out.reshape(shape[0], shape[2], -1) if hidden else out, present_key, present_value, scores


def _scale(scale, q):
    return 1 / math.sqrt(q.shape[3]) if scale is None else scale


def _whole_head(x):
    """x [B, S, H, D]; on a GPU with zeros after each row, because kernels take rows of multiples of 16 bytes."""
    missing = -x.shape[3] % 8
    if not (missing and on_gpu(x)):
        return x
    wide = empty((*x.shape[:3], x.shape[3] + missing), type_name(x), x)
    wide[..., :x.shape[3]] = x
    wide[..., x.shape[3]:] = 0
    return wide


def _heads(x, heads, name, attribute):
    """[B, S, H, D]"""
    if x.ndim == 4:
        return x.swapaxes(1, 2)
    need(heads and x.shape[2] % heads == 0,
         f"{attribute} is {heads}; accepted for {name} of shape {shape_text(x)}: heads that divide its last dimension")
    return x.reshape(x.shape[0], x.shape[1], heads, x.shape[2] // heads)


def _bias(mask, q, total):
    """As a float that is added, 4 dimensions, the last one `total`: Q's type or float32, whose range neither 16-bit type has."""
    xp = module_of(mask, "attn_mask")
    boolean = type_name(mask) == "bool"
    if not boolean and type_name(mask) not in _FLOATS:
        raise Unsupported(f"attn_mask is {type_name(mask)}; accepted: bool, {', '.join(_FLOATS)}")
    need(1 <= mask.ndim <= 4, f"attn_mask has shape {shape_text(mask)}; accepted: 1 to 4 dimensions")
    given = mask
    mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    full = (q.shape[0], q.shape[2], q.shape[1])
    need(all(n in (1, want) for n, want in zip(mask.shape, full)) and mask.shape[3] <= total,
         f"attn_mask has shape {shape_text(given)}; accepted: what broadcasts to [B, Hq, Sq, past + Skv] = {[*full, total]}, the last "
         "dimension shorter at most")
    if boolean:
        mask = xp.where(mask, 0.0, -math.inf)
    mask = cast(mask, type_name(q) if boolean or type_name(mask) == type_name(q) else "float32")
    if mask.shape[3] == total:
        return mask
    hidden = empty((*mask.shape[:3], total - mask.shape[3]), type_name(mask), q)
    hidden[...] = -math.inf
    return xp.concatenate((mask, hidden), axis=3)


def _rule(seqlen_q, total, past, left, right, lengths):
    """forward()'s arguments for the operator's offset, how many keys it needs, and whether no argument says it: forward()
    counts from the end of the keys, i + keys - Sq."""
    if lengths is not None:  # so does the operator
        return _window(left, right), total, False
    if left < 0 and right < 0:
        return {}, total, False
    keys = total if right < 0 else min(total, past + seqlen_q + right)
    surplus = keys - seqlen_q - past
    if 0 <= left < -surplus:
        return {}, total, True
    return _window(left + surplus if left >= 0 else -1, right - surplus if right >= 0 else -1), keys, False


def _window(left, right):
    return {"causal": right == 0, "window": (left, -1 if right == 0 else right)}


def _pairs(q, total, past, lengths, left, right):
    """0 where the rules of lengths, causal and window show a key, -inf elsewhere: [B or 1, 1, Sq, total]."""
    xp = module_of(q, "Q")
    i, j = arange(q.shape[1], q)[:, None], arange(total, q)[None, :]
    if lengths is not None:
        n = lengths[:, None, None, None]
        position, visible = i + n - q.shape[1], j < n
    else:
        position, visible = (i + past)[None, None], (j >= 0)[None, None]
    if left >= 0:
        visible = visible & (j >= position - left)
    if right >= 0:
        visible = visible & (j <= position + right)
    return cast(xp.where(visible, 0.0, -math.inf), type_name(q))


def _scores(q, k, scale, softcap, bias, hidden, mode):
    """The matrix of one of the operator's modes, f32 [B, Hq, Sq, total]."""
    xp = module_of(q, "Q")
    q, k = cast(q, "float32").swapaxes(1, 2), cast(k, "float32").swapaxes(1, 2)
    repeat = q.shape[1] // k.shape[1]
    grouped = q.reshape(q.shape[0], k.shape[1], repeat * q.shape[2], q.shape[3])
    s = xp.matmul(grouped, k.swapaxes(2, 3)).reshape(*q.shape[:3], k.shape[2]) * scale
    if mode >= 1 and softcap:
        s = xp.tanh(s / softcap) * softcap
    if mode >= 2:
        s = s + cast(hidden, "float32")
        if bias is not None:
            s = s + cast(bias, "float32")
    if mode == 3 and s.shape[3]:
        # By the row's own maximum: log(sum) is lost in the rounding of a lse of 1e6 or more.
        largest = xp.amax(s, axis=3, keepdims=True)
        weights = xp.exp(s - xp.where(largest == -math.inf, 0.0, largest))
        total = weights.sum(axis=3, keepdims=True)
        s = weights / xp.where(total == 0, 1.0, total)
    return s


def library():
    """The path of the library of custom operators, for onnxruntime.SessionOptions.register_custom_ops_library()."""
    return str(Path(__file__).with_name("libattn_onnxruntime.so"))


def use_libattn(model):
    """Moves the Attention nodes of an onnx.ModelProto, and of graphs within its nodes, into the domain "libattn" -> how many.

    library() has the operator of that domain for float, float16 and bfloat16. Nodes that want scores, softmax in double precision, or
    double inputs stay with onnxruntime."""
    moved = _moved(model.graph)
    if moved and all(entry.domain != "libattn" for entry in model.opset_import):
        entry = model.opset_import.add()
        entry.domain, entry.version = "libattn", 1
    return moved


def _moved(graph):
    moved = 0
    for node in graph.node:
        for attribute in node.attribute:
            inner = [attribute.g] if attribute.HasField("g") else attribute.graphs
            moved += sum(_moved(g) for g in inner)
        attributes = {attribute.name: attribute.i for attribute in node.attribute}
        scores = len(node.output) > 3 and node.output[3]
        if node.op_type == "Attention" and not node.domain and not scores and attributes.get("softmax_precision") != _DOUBLE:
            node.domain = "libattn"
            moved += 1
    return moved
