"""Makes the golden values: one safetensors file per case beside this script, and index.json (case -> description).

Each file has the inputs under the names that `attn run` reads, golden.out and golden.lse (F64), and in __metadata__ the
types that safetensors has no name for and "options", a JSON object: causal, causal_top_left, window [left, right], scale,
softcap, descale_block_keys; absent means unset. Cases merge_* have out.N and lse.N instead.

Memory that must not be read, or not matter, is NaN: keys and values that no query of their (batch, kv head) may see by
causal, window, block mask, tree or length (page tails, unused pages and padding among them), and bias columns beyond the
length. Needs NumPy only and uses nothing of libattn.
"""
import json
import math
import zlib
from pathlib import Path

import numpy as np

import st

HERE = Path(__file__).resolve().parent
EMPTY, CAUSAL, FULL, PARTIAL = 0, 1, 2, 3


# ---- number formats: raw bits to float64 ----

def decode_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def fp8_table(exponent_bits, bias, is_nan, is_inf=lambda code: False):
    """The value of each of the 256 codes."""
    mantissa_bits = 7 - exponent_bits
    table = np.empty(256)
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent = (code & 0x7F) >> mantissa_bits
        fraction = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
        if is_nan(code):
            table[code] = math.nan
        elif is_inf(code):
            table[code] = sign * math.inf
        elif exponent == 0:
            table[code] = sign * fraction * 2.0 ** (1 - bias)
        else:
            table[code] = sign * (1 + fraction) * 2.0 ** (exponent - bias)
    return table


FP8 = {
    "f8_e4m3fn": fp8_table(4, 7, is_nan=lambda c: c & 0x7F == 0x7F),
    "f8_e5m2": fp8_table(5, 15, is_nan=lambda c: c & 0x7F > 0x7C, is_inf=lambda c: c & 0x7F == 0x7C),
    "f8_e4m3fnuz": fp8_table(4, 8, is_nan=lambda c: c == 0x80),
}
FP8_NAN = {"f8_e4m3fn": 0x7F, "f8_e5m2": 0x7E, "f8_e4m3fnuz": 0x80}


def decode_q8_0(data):
    """Blocks of 34 bytes: f16 scale, 32 int8."""
    blocks = np.ascontiguousarray(data).reshape(*data.shape[:-1], -1, 34)
    scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float64)
    values = scale * np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return values.reshape(*data.shape[:-1], -1)


def decode_q4_0(data):
    """Blocks of 18 bytes: f16 scale, 16 bytes whose low nibbles are elements 0..15 and high nibbles 16..31."""
    blocks = np.ascontiguousarray(data).reshape(*data.shape[:-1], -1, 18)
    scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float64)
    nibbles = np.concatenate([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], axis=-1)
    return (scale * (nibbles.astype(np.int64) - 8)).reshape(*data.shape[:-1], -1)


def decode_halves(data, size, values, has_min=False, has_bit=False):
    """Blocks of `size` bytes: f16 scale, f16 minimum, u32 of fifth bits, 16 bytes as those of q4_0; of values[code]."""
    blocks = np.ascontiguousarray(data).reshape(*data.shape[:-1], -1, size)
    scale, minimum = (np.ascontiguousarray(blocks[..., at:at + 2]).view(np.float16).astype(np.float64) for at in (0, 2))
    codes = np.concatenate([blocks[..., -16:] & 15, blocks[..., -16:] >> 4], axis=-1).astype(np.int64)
    if has_bit:
        codes += 16 * np.unpackbits(np.ascontiguousarray(blocks[..., -20:-16]), axis=-1, bitorder="little")
    return (scale * np.asarray(values)[codes] + (minimum if has_min else 0)).reshape(*data.shape[:-1], -1)


GGML = {  # bytes of a block, its elements
    "q8_0": (34, decode_q8_0),
    "q4_0": (18, decode_q4_0),
    "q4_1": (20, lambda data: decode_halves(data, 20, range(16), has_min=True)),
    "q5_0": (22, lambda data: decode_halves(data, 22, range(-16, 16), has_bit=True)),
    "q5_1": (24, lambda data: decode_halves(data, 24, range(32), has_min=True, has_bit=True)),
    "iq4_nl": (18, lambda data: decode_halves(data, 18, [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])),
}


def decode_i4(data):
    """Two's complement, two a byte, the even element in the low half."""
    codes = np.stack([data & 15, data >> 4], axis=-1).astype(np.int64)
    return ((codes ^ 8) - 8).astype(np.float64).reshape(*data.shape[:-1], -1)


class Typed:
    """Raw storage of a type that NumPy lacks; looks like an array where only the shape matters."""

    def __init__(self, kind, bits):
        self.kind, self.bits, self.shape = kind, bits, bits.shape

    def real(self):
        if self.kind == "bf16":
            return decode_bf16(self.bits)
        if self.kind in FP8:
            return FP8[self.kind][self.bits]
        if self.kind == "i4":
            return decode_i4(self.bits)
        return GGML[self.kind][1](self.bits)

    def poison(self, where):
        if self.kind == "bf16":
            self.bits[where] = 0x7FC0
        elif self.kind in FP8:
            self.bits[where] = FP8_NAN[self.kind]
        elif self.kind != "i4":  # every scale NaN
            bytes_per_block = GGML[self.kind][0]
            rows = self.bits[where]
            rows.reshape(len(rows), rows.shape[1] // bytes_per_block, bytes_per_block)[:, :, :2] = np.frombuffer(np.float16("nan").tobytes(), np.uint8)
            self.bits[where] = rows

    def stored(self):
        if self.kind in (*GGML, "i4"):
            return self.bits
        return {"bf16": "BF16", "f8_e5m2": "F8_E5M2"}.get(self.kind, "F8_E4M3"), self.bits


def real(tensor):
    return tensor.real() if isinstance(tensor, Typed) else tensor.astype(np.float64)


def poison(tensor, where):
    if isinstance(tensor, Typed):
        tensor.poison(where)
    elif tensor is not None and tensor.dtype != np.int8:  # scales of i8 and i4 are poison enough
        tensor[where] = np.nan


# ---- the meaning ----

class Segment:
    """Where the keys of one segment lie."""

    def __init__(self, tensors, suffix, batch, shared=False):
        self.entries = 1 if shared else batch  # a shared segment has the arrays of a batch of 1
        self.k, self.v = tensors["k" + suffix], tensors["v" + suffix]
        self.k_descale, self.v_descale = tensors.get("k_descale" + suffix), tensors.get("v_descale" + suffix)
        self.k_scale, self.v_scale = tensors.get("k_scale" + suffix), tensors.get("v_scale" + suffix)
        self.table = tensors.get("block_table" + suffix)
        self.cu = tensors.get("cu_seqlens_kv" + suffix)
        if self.cu is not None:
            self.lens, self.capacity = np.diff(self.cu), int(np.diff(self.cu).max())
        else:
            self.capacity = self.k.shape[1] * (1 if self.table is None else self.table.shape[1])
            self.lens = np.resize(tensors.get("seqlens_kv" + suffix, self.capacity), batch)

    def place(self, b, t):
        """Index into the outer dimensions of k and v of key t of batch entry b."""
        b %= self.entries
        if self.cu is not None:
            return (int(self.cu[b]) + t,)
        if self.table is not None:
            page_size = self.k.shape[1]
            return (int(self.table[b, t // page_size]), t % page_size)
        return (b, t)

    def descale(self, which, b, t, hk, options):
        return descale_at(which, b, hk, t // options["descale_block_keys"] if which is not None and which.ndim == 3 else 0)

    def rows(self, b, hk, options):
        """Real values of k [len, D] and v [len, Dv]."""
        k, v = real(self.k), real(self.v)
        b %= self.entries
        places = [self.place(b, t) + (hk,) for t in range(self.lens[b])]
        k, v = (x if scale is None else x * scale.astype(np.float64)[..., None] for x, scale in ((k, self.k_scale), (v, self.v_scale)))
        k_rows = [k[p] * self.descale(self.k_descale, b, t, hk, options) for t, p in enumerate(places)]
        v_rows = [v[p] * self.descale(self.v_descale, b, t, hk, options) for t, p in enumerate(places)]
        return (np.array(k_rows).reshape(len(places), k.shape[-1]), np.array(v_rows).reshape(len(places), v.shape[-1]))


def descale_at(descale, b, hk, block=0):
    """[1], [B, Hkv] or [B, Hkv, nblocks]."""
    if descale is None:
        return 1.0
    if descale.ndim == 1:
        return float(descale[0])
    return float(descale[b, hk] if descale.ndim == 2 else descale[b, hk, block])


def broadcast_at(array, b, h):
    """array [B|1, Hq|1, ...]."""
    return array[b if array.shape[0] > 1 else 0, h if array.shape[1] > 1 else 0]


def segments_of(tensors, batch):
    if "k" in tensors:
        return [Segment(tensors, "", batch)]
    count = sum(name.startswith("k.") for name in tensors)
    shared = tensors.get("shared_segments", [0])[0]
    return [Segment(tensors, f".{n}", batch, n < shared) for n in range(count)]


def visible(tensors, options, b, h, seqlen_q, seqlen_kv):
    """What causal, window and block mask let query i see: bool [Sq, Skv]."""
    i = np.arange(seqlen_q)[:, None]
    j = np.arange(seqlen_kv)[None, :]
    position = i + seqlen_kv - seqlen_q
    see = np.ones((seqlen_q, seqlen_kv), bool)
    if options.get("causal"):
        see &= j <= position
    if options.get("causal_top_left"):
        see &= j <= i
    left, right = options.get("window", (-1, -1))
    if left >= 0:
        see &= j >= position - left
    if right >= 0:
        see &= j <= position + right
    if "block_kinds" in tensors and see.size:
        bq, bk = tensors["block_size"]
        kind = broadcast_at(tensors["block_kinds"], b, h)[i // bq, j // bk]
        allowed = (kind == FULL) | ((kind == CAUSAL) & (j <= position))
        if "block_bits" in tensors:
            index = broadcast_at(tensors["block_index"], b, h)[i // bq, j // bk]
            allowed |= (kind == PARTIAL) & tensors["block_bits"][index, i % bq, j % bk]
        see &= allowed
    return see


class Problem:
    def __init__(self, tensors, options):
        self.tensors, self.options = tensors, options
        self.q = tensors["q"]
        self.packed = "cu_seqlens_q" in tensors
        if self.packed:
            self.starts = tensors["cu_seqlens_q"]
            self.batch = len(self.starts) - 1
        else:
            self.batch = self.q.shape[0]
        self.heads = self.q.shape[-2]
        self.segments = segments_of(tensors, self.batch)
        self.heads_kv = self.segments[0].k.shape[-2]

    def seqlen_q(self, b):
        return int(self.starts[b + 1] - self.starts[b]) if self.packed else self.q.shape[1]

    def queries(self, b):
        """Index of the query rows of batch entry b."""
        return slice(self.starts[b], self.starts[b + 1]) if self.packed else (b,)

    def seqlen_kv(self, b):
        return int(sum(s.lens[b] for s in self.segments))

    def visible(self, b, h):
        see = visible(self.tensors, self.options, b, h, self.seqlen_q(b), self.seqlen_kv(b))
        if "tree" in self.tensors:  # a bit for each of the last keys
            keys, first = int(self.tensors["tree_keys"][0]), self.seqlen_kv(b) - int(self.tensors["tree_keys"][0])
            for row, words in zip(see, self.tensors["tree"][self.queries(b)]):
                number = int(words[0]) | int(words[1]) << 64
                for bit in range(max(-first, 0), keys):
                    row[first + bit] &= bool(number >> bit & 1)
        return see

    def poison_unused(self):
        used = [np.zeros(s.k.shape[:-1], bool) for s in self.segments]
        for b in range(self.batch):
            for h in range(self.heads):
                hk = h // (self.heads // self.heads_kv)
                seen = self.visible(b, h).any(axis=0)
                offset = 0
                for segment, mark in zip(self.segments, used):
                    for t in range(segment.lens[b]):
                        mark[segment.place(b, t) + (hk,)] |= seen[offset + t]
                    offset += segment.lens[b]
        for segment, mark in zip(self.segments, used):
            poison(segment.k, ~mark)
            poison(segment.v, ~mark)
            poison(segment.k_scale, ~mark)
            poison(segment.v_scale, ~mark)
        bias = self.tensors.get("bias")
        if bias is not None:
            for b in range(bias.shape[0]):
                lens = [self.seqlen_kv(b)] if bias.shape[0] > 1 else map(self.seqlen_kv, range(self.batch))
                bias[b, :, :, max(lens):] = np.nan

    def golden(self):
        heads_per_kv = self.heads // self.heads_kv
        q = real(self.q)
        head_dim_v = real(self.segments[0].v).shape[-1]
        out = np.full(self.q.shape[:-1] + (head_dim_v,), np.nan)
        lse = np.full((self.heads, len(q)) if self.packed else (self.batch, self.heads, q.shape[1]), np.nan)
        for b in range(self.batch):
            for hk in range(self.heads_kv):
                rows = [s.rows(b, hk, self.options) for s in self.segments]
                k = np.concatenate([r[0] for r in rows])
                v = np.concatenate([r[1] for r in rows])
                for h in range(hk * heads_per_kv, (hk + 1) * heads_per_kv):
                    q_rows = q[self.queries(b)][:, h] * descale_at(self.tensors.get("q_descale"), b, hk)
                    out_rows, lse_rows = self.attend(b, h, q_rows, k, v)
                    out[self.queries(b)][:, h] = out_rows
                    if self.packed:
                        lse[h, self.queries(b)] = lse_rows
                    else:
                        lse[b, h] = lse_rows
        return out, lse

    def attend(self, b, h, q, k, v):
        """One (batch entry, head): q [Sq, D], k [Skv, D], v [Skv, Dv]."""
        options, tensors = self.options, self.tensors
        seqlen_q, seqlen_kv = len(q), len(k)
        scale = options.get("scale", 1 / math.sqrt(q.shape[-1]))
        softcap = options.get("softcap", 0)
        sink = float(tensors["sinks"][h]) if "sinks" in tensors else -math.inf
        see = self.visible(b, h)
        if "bias" in tensors:
            bias = broadcast_at(tensors["bias"], b, h).astype(np.float64)
            see &= bias[:, :seqlen_kv] != -math.inf
            if "bias_slopes" in tensors:
                bias = np.where(bias == -math.inf, 0, bias) * float(tensors["bias_slopes"][h])
        out, lse = np.zeros((seqlen_q, v.shape[-1])), np.full(seqlen_q, -math.inf)
        for i in range(seqlen_q):
            j = np.flatnonzero(see[i])
            s = scale * (k[j] * q[i]).sum(axis=-1)
            if softcap > 0:
                s = softcap * np.tanh(s / softcap)
            if "bias" in tensors:
                s = s + bias[i, j]
            if "alibi_slopes" in tensors:
                s = s - float(tensors["alibi_slopes"][h]) * np.abs(i + seqlen_kv - seqlen_q - j)
            m = max(s.max(initial=-math.inf), sink)
            if m == -math.inf:
                continue
            p = np.exp(s - m)
            total = p.sum() + math.exp(sink - m)
            out[i] = (p[:, None] * v[j]).sum(axis=0) / total
            lse[i] = m + math.log(total)
        return out, lse


def merged(outs, lses):
    """outs [..., H, Dv] with lses [..., H]."""
    out, lse = np.zeros(outs[0].shape), np.full(lses[0].shape, -math.inf)
    for row in np.ndindex(lse.shape):
        parts = [(float(l[row]), o[row]) for o, l in zip(outs, lses) if l[row] != -math.inf]
        if parts:
            m = max(l for l, _ in parts)
            weights = [math.exp(l - m) for l, _ in parts]
            out[row] = sum(w * o for w, (_, o) in zip(weights, parts)) / sum(weights)
            lse[row] = m + math.log(sum(weights))
    return out, lse


# ---- inputs ----

def encoded(kind, values):
    """Nearest value of the type."""
    if kind == "f32":
        return values.astype(np.float32)
    if kind == "f16":
        return values.astype(np.float16)
    if kind == "bf16":
        bits = values.astype(np.float32).view(np.uint32)
        return Typed(kind, ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))
    if kind in FP8:
        distance = np.abs(np.nan_to_num(FP8[kind], nan=np.inf) - values[..., None])
        return Typed(kind, distance.argmin(axis=-1).astype(np.uint8))
    # ggml blocks: random scales of either sign, minima that balance them, random integers; `values` gives the shape
    blocks = values.shape[:-1] + (values.shape[-1] // 32,)
    rng = np.random.default_rng(zlib.crc32(np.ascontiguousarray(values).tobytes()))
    sign = rng.choice([-1.0, 1.0], blocks + (1,))
    if kind == "q8_0":
        scale = (sign * rng.uniform(0.004, 0.016, blocks + (1,))).astype(np.float16)
        payload = rng.integers(0, 256, blocks + (32,), np.uint8)
    else:
        small = {"q5_0": 2, "q5_1": 2, "iq4_nl": 16}.get(kind, 1)
        scale = (sign * rng.uniform(0.08, 0.2, blocks + (1,)) / small).astype(np.float16)
        payload = rng.integers(0, 256, blocks + (16 + 4 * kind.startswith("q5"),), np.uint8)
        if kind.endswith("_1"):
            minimum = (-scale.astype(np.float64) * 8 * small).astype(np.float16)
            payload = np.concatenate([minimum.view(np.uint8), payload], axis=-1)
    data = np.concatenate([scale.view(np.uint8), payload], axis=-1)
    return Typed(kind, data.reshape(values.shape[:-1] + (-1,)))


class Inputs:
    """Random inputs of one case; the seed is the case's name."""

    def __init__(self, name):
        self.rng = np.random.default_rng(zlib.crc32(name.encode()))

    def normal(self, *shape, kind="f32", sigma=1.0):
        return encoded(kind, sigma * self.rng.standard_normal(shape))

    def uniform(self, low, high, *shape):
        return self.rng.uniform(low, high, shape).astype(np.float32)

    def eighths(self, *shape):
        """Multiples of 1/8 in [-1, 1]: dot products are exact."""
        return (self.rng.integers(-8, 9, shape) / 8).astype(np.float32)

    def codes(self, kind, *shape):
        """Every finite code of an fp8 type, again and again."""
        finite = np.flatnonzero(np.isfinite(FP8[kind])).astype(np.uint8)
        return Typed(kind, self.rng.permutation(np.resize(finite, math.prod(shape))).reshape(shape))

    def qkv(self, batch, seqlen_q, seqlen_kv, heads, heads_kv, dim, dim_v=None, kinds=("f32",) * 3, sigma=1.0):
        return {"q": self.normal(batch, seqlen_q, heads, dim, kind=kinds[0], sigma=sigma),
                "k": self.normal(batch, seqlen_kv, heads_kv, dim, kind=kinds[1], sigma=sigma),
                "v": self.normal(batch, seqlen_kv, heads_kv, dim_v or dim, kind=kinds[2], sigma=sigma)}

    def block_mask(self, kinds, seqlen_q, seqlen_kv, bq, bk):
        """kinds [B|1, Hq|1, ceil(Sq/bq), ceil(Skv/bk)]; the bits of PARTIAL blocks are random, beyond Sq and Skv too."""
        kinds = np.asarray(kinds, np.uint8)
        assert kinds.shape[2:] == (-(-seqlen_q // bq), -(-seqlen_kv // bk))
        partial = kinds == PARTIAL
        mask = {"block_kinds": kinds, "block_size": i32(bq, bk)}
        if partial.any():
            index = np.full(kinds.shape, -1, np.int32)
            index[partial] = self.rng.permutation(partial.sum())
            mask.update(block_index=index, block_bits=self.rng.random((partial.sum(), bq, bk)) < 0.5)
        return mask


def tree(inputs, keys, *rows):
    return {"tree": inputs.rng.integers(0, 2 ** 64, (*rows, 2), np.uint64), "tree_keys": i32(keys)}


def i32(*values):
    return np.array(values, np.int32)


def f32(*values):
    return np.array(values, np.float32)


# ---- files ----

INDEX = {}


def save(name, description, tensors, options, out, lse):
    assert name not in INDEX, name
    stored = {n: t.stored() if isinstance(t, Typed) else t for n, t in tensors.items()}
    metadata = {n: t.kind for n, t in tensors.items()
                if isinstance(t, Typed) and t.kind in ("f8_e4m3fnuz", "i4", *GGML)}
    st.save(HERE / f"{name}.safetensors", {**stored, "golden.out": out, "golden.lse": lse},
            {**metadata, "options": json.dumps(options)})
    INDEX[name] = description


def case(name, description, tensors, **options):
    tensors = {n: t.copy() if isinstance(t, np.ndarray) else t for n, t in tensors.items()}
    problem = Problem(tensors, options)
    problem.poison_unused()
    out, lse = problem.golden()
    assert np.isfinite(out).all() and not np.isnan(lse).any() and (lse < np.inf).all(), name
    save(name, description, tensors, options, out, lse)


def merge_case(name, description, outs, lses):
    """outs [B, S, H, Dv] with lses [B, H, S], or packed [total, H, Dv] with [H, total]."""
    by_row = [np.moveaxis(lse.astype(np.float64), -2, -1) for lse in lses]
    out, lse = merged([real(o) for o in outs], by_row)
    assert np.isfinite(out).all() and not np.isnan(lse).any(), name
    tensors = {f"out.{n}": o for n, o in enumerate(outs)} | {f"lse.{n}": l for n, l in enumerate(lses)}
    save(name, description, tensors, {}, out, np.ascontiguousarray(np.moveaxis(lse, -1, -2)))


# ---- the cases ----

SHAPES = {"sq_lt_skv": (7, 19), "sq_gt_skv": (19, 7), "sq_eq_skv": (13, 13)}


def basic_cases():
    a = Inputs("full")
    case("full", "no mask, Hq = Hkv", a.qkv(2, 9, 17, 2, 2, 8))
    a = Inputs("single")
    case("single", "one query, one key", a.qkv(1, 1, 1, 1, 1, 8))
    a = Inputs("scale")
    case("scale", "scale 0.25 given", a.qkv(1, 5, 11, 2, 2, 8), scale=0.25)
    a = Inputs("gqa")
    case("gqa", "four query heads on two kv heads", a.qkv(2, 6, 15, 4, 2, 8))
    a = Inputs("mqa")
    case("mqa", "four query heads on one kv head", a.qkv(2, 6, 15, 4, 1, 8))
    a = Inputs("gqa3_causal")
    case("gqa3_causal", "three query heads per kv head, causal", a.qkv(1, 6, 15, 6, 2, 8), causal=True)
    a = Inputs("dv_small")
    case("dv_small", "head_dim 24, head_dim_v 8", a.qkv(2, 6, 15, 2, 2, 24, 8))
    a = Inputs("dv_large")
    case("dv_large", "head_dim 8, head_dim_v 32", a.qkv(2, 6, 15, 2, 1, 8, 32), causal=True)
    a = Inputs("dim_odd")
    case("dim_odd", "head_dim 7, head_dim_v 5", a.qkv(2, 6, 15, 2, 2, 7, 5))
    a = Inputs("dim_one")
    case("dim_one", "head_dim 1, head_dim_v 3", a.qkv(1, 6, 15, 2, 2, 1, 3))
    a = Inputs("long")
    case("long", "70 keys, 67 queries, causal", a.qkv(1, 67, 70, 2, 1, 8), causal=True)
    a = Inputs("sigma3")
    case("sigma3", "sigma 3, large scores", a.qkv(1, 7, 33, 2, 2, 16, sigma=3.0))


def mask_cases():
    for shape, (sq, skv) in SHAPES.items():
        for option in ("causal", "causal_top_left"):
            name = f"{option}_{shape}"
            a = Inputs(name)
            case(name, f"{option}, Sq {sq}, Skv {skv}", a.qkv(2, sq, skv, 2, 1, 8), **{option: True})
    windows = {"3_0": (3, 0), "0_0": (0, 0), "2_3": (2, 3), "unbounded_1": (-1, 1), "2_unbounded": (2, -1),
               "unbounded": (-1, -1), "large": (100, 100)}
    for tag, window in windows.items():
        a = Inputs("window_" + tag)
        case("window_" + tag, f"window {window}, Sq 9, Skv 14", a.qkv(1, 9, 14, 2, 1, 8), window=window)
    a = Inputs("window_no_keys")
    case("window_no_keys", "window (2, 1), Sq 19, Skv 7: early rows see nothing", a.qkv(2, 19, 7, 2, 2, 8), window=(2, 1))
    a = Inputs("window_causal")
    case("window_causal", "window (4, 2) with causal, Sq 7, Skv 19", a.qkv(1, 7, 19, 2, 2, 8), window=(4, 2), causal=True)
    a = Inputs("window_causal_top_left")
    case("window_causal_top_left", "window (4, -1) counts from the bottom right, causal_top_left from the top left; Sq 11, "
         "Skv 13: late rows see few keys", a.qkv(1, 11, 13, 2, 2, 8), window=(4, -1), causal_top_left=True)
    a = Inputs("window_causal_top_left_no_keys")
    case("window_causal_top_left_no_keys", "as above with Sq 7, Skv 19: no row sees a key",
         a.qkv(1, 7, 19, 2, 2, 8), window=(4, -1), causal_top_left=True)


def score_cases():
    a = Inputs("softcap")
    case("softcap", "softcap 5, sigma 3", a.qkv(2, 6, 15, 2, 2, 8, sigma=3.0), softcap=5.0)
    a = Inputs("softcap_bias")
    case("softcap_bias", "softcap 2, then bias [B, Hq, Sq, Skv]",
         a.qkv(2, 6, 15, 2, 2, 8, sigma=2.0) | {"bias": a.normal(2, 2, 6, 15)}, softcap=2.0)
    for tag, (b, h) in {"full": (2, 4), "head": (1, 4), "batch": (2, 1), "one": (1, 1)}.items():
        name = "bias_" + tag
        a = Inputs(name)
        case(name, f"bias [{b}, {h}, Sq, Skv] with B 2, Hq 4, Hkv 2", a.qkv(2, 5, 9, 4, 2, 8) | {"bias": a.normal(b, h, 5, 9)})
    a = Inputs("bias_inf")
    bias = a.normal(1, 2, 7, 11)
    bias[a.rng.random(bias.shape) < 0.4] = -np.inf
    bias[0, 0, 3], bias[0, 1, 0] = -np.inf, -np.inf
    case("bias_inf", "bias with -inf entries, two rows all -inf", a.qkv(2, 7, 11, 2, 2, 8) | {"bias": bias}, causal=True)
    a = Inputs("bias_finite_large")
    bias = a.eighths(1, 2, 8, 12)
    bias[a.rng.random(bias.shape) < 0.3] = -65504
    bias[a.rng.random(bias.shape) < 0.2] = -1e38
    bias[:, 0, 1], bias[:, 0, 2], bias[:, 0, 3] = -65504, -1e9, -1e38
    bias[:, 1, 1, :6], bias[:, 1, 1, 6:] = -np.inf, -1e38
    case("bias_finite_large", "finite bias of -65504, -1e9, -1e38 is a number: whole rows of each, and -inf beside -1e38",
         {"q": a.eighths(1, 8, 2, 8), "k": a.eighths(1, 12, 2, 8), "v": a.eighths(1, 12, 2, 8), "bias": bias}, scale=0.25)
    a = Inputs("bias_f16")
    bias = a.normal(2, 1, 6, 10, kind="f16")
    bias[0, 0, 1, 2:7], bias[1, 0, 4] = -np.inf, -65504
    case("bias_f16", "f16 bias with f16 q, k, v; -inf entries",
         a.qkv(2, 6, 10, 2, 1, 8, kinds=("f16",) * 3) | {"bias": bias})
    a = Inputs("bias_slopes")
    bias = a.normal(2, 1, 6, 10, kind="f16")
    bias[0, 0, 2, ::3] = -math.inf
    case("bias_slopes", "ggml's mask: f16 bias times a slope of each head, one of them 0, f32 q; -inf entries; softcap",
         a.qkv(2, 6, 10, 3, 3, 8, sigma=2.0) | {"bias": bias, "bias_slopes": f32(0.5, 0, 0.0625)}, softcap=3.0)
    a = Inputs("bias_bf16")
    case("bias_bf16", "bf16 bias with bf16 q, k, v",
         a.qkv(1, 6, 10, 2, 1, 8, kinds=("bf16",) * 3) | {"bias": BiasBf16(a.normal(1, 2, 6, 10, kind="bf16").bits)})
    a = Inputs("bias_seqlens")
    case("bias_seqlens", "bias with seqlens_kv and causal; bias beyond the length is NaN",
         a.qkv(2, 6, 15, 2, 2, 8) | {"bias": a.normal(2, 2, 6, 15), "seqlens_kv": i32(9, 13)}, causal=True)
    for shape, (sq, skv) in SHAPES.items():
        name = "alibi_" + shape
        a = Inputs(name)
        case(name, f"ALiBi, Sq {sq}, Skv {skv}, no mask",
             a.qkv(1, sq, skv, 2, 1, 8) | {"alibi_slopes": f32(0.5, 0.0625)})
    a = Inputs("alibi_causal_seqlens")
    case("alibi_causal_seqlens", "ALiBi with causal and seqlens_kv",
         a.qkv(2, 5, 14, 4, 2, 8) | {"alibi_slopes": a.uniform(0, 1, 4), "seqlens_kv": i32(14, 8)}, causal=True)
    a = Inputs("alibi_bias_softcap")
    case("alibi_bias_softcap", "softcap, bias, ALiBi, window and a sink together",
         a.qkv(2, 7, 12, 2, 1, 8, sigma=2.0)
         | {"alibi_slopes": f32(0.25, 1.5), "bias": a.normal(1, 2, 7, 12), "sinks": f32(0.5, -1)},
         softcap=3.0, window=(5, 2), scale=0.5)
    a = Inputs("sinks")
    case("sinks", "a sink per head, small and dominant", a.qkv(2, 6, 15, 4, 2, 8) | {"sinks": f32(-2, 0, 1.5, 20)})
    a = Inputs("sinks_no_keys")
    case("sinks_no_keys", "sinks with causal, Sq 19, Skv 7: rows without keys have lse = sink",
         a.qkv(1, 19, 7, 2, 2, 8) | {"sinks": f32(0.75, -3)}, causal=True)
    a = Inputs("sinks_empty")
    case("sinks_empty", "sinks with seqlens_kv 0 and 5", a.qkv(2, 3, 8, 2, 2, 8)
         | {"sinks": f32(0.75, -3), "seqlens_kv": i32(0, 5)})


class BiasBf16(Typed):
    """bf16 bias: indexed like the arrays of the other bias types."""

    def __init__(self, bits):
        super().__init__("bf16", bits)

    def __getitem__(self, index):
        return decode_bf16(self.bits[index])

    def __setitem__(self, index, value):
        self.bits[index] = (np.float32(value).reshape(1).view(np.uint32) >> 16)[0]


def length_cases():
    a = Inputs("seqlens")
    case("seqlens", "seqlens_kv 5 and 17 of 17", a.qkv(2, 6, 17, 2, 1, 8) | {"seqlens_kv": i32(5, 17)})
    a = Inputs("seqlens_zero")
    case("seqlens_zero", "seqlens_kv 0 and 1", a.qkv(2, 4, 9, 2, 2, 8) | {"seqlens_kv": i32(0, 1)})
    a = Inputs("seqlens_causal")
    case("seqlens_causal", "seqlens_kv 3 and 12, Sq 6, causal: the diagonal follows each length",
         a.qkv(2, 6, 17, 2, 1, 8) | {"seqlens_kv": i32(3, 12)}, causal=True)
    a = Inputs("seqlens_top_left_window")
    case("seqlens_window", "seqlens_kv 4 and 15 with window (3, 1)",
         a.qkv(2, 6, 17, 2, 1, 8) | {"seqlens_kv": i32(4, 15)}, window=(3, 1))
    a = Inputs("varlen")
    varlen = {"cu_seqlens_q": i32(0, 5, 5, 6, 17), "cu_seqlens_kv": i32(0, 9, 13, 13, 20)}
    packed = lambda kinds=("f32",) * 3, dim=8: {
        "q": a.normal(17, 4, dim, kind=kinds[0]), "k": a.normal(23, 2, dim, kind=kinds[1]), "v": a.normal(23, 2, dim, kind=kinds[2])}
    case("varlen", "packed q and kv: lengths 5,0,1,11 and 9,4,0,7; three spare tokens in kv", packed() | varlen)
    a = Inputs("varlen_causal")
    case("varlen_causal", "the same with causal: the third entry has no keys, the fourth more queries than keys",
         packed() | varlen, causal=True)
    a = Inputs("varlen_top_left")
    case("varlen_top_left", "the same with causal_top_left", packed() | varlen, causal_top_left=True)
    a = Inputs("varlen_window_alibi_sinks")
    case("varlen_window_alibi_sinks", "the same with window (4, 1), ALiBi, sinks, softcap",
         packed() | varlen | {"alibi_slopes": f32(.5, .25, .125, 1), "sinks": f32(0, 1, -1, 2)}, window=(4, 1), softcap=4.0)
    a = Inputs("varlen_f16")
    case("varlen_f16", "the same in f16 with causal", packed(("f16",) * 3) | varlen, causal=True)
    a = Inputs("varlen_mixed_padded_kv")
    case("varlen_mixed_padded_kv", "packed q of lengths 1, 9, 1 (decode and prefill mixed) on padded kv with seqlens_kv, causal",
         {"q": a.normal(11, 4, 8), "k": a.normal(3, 16, 2, 8), "v": a.normal(3, 16, 2, 8),
          "cu_seqlens_q": i32(0, 1, 10, 11), "seqlens_kv": i32(16, 9, 7)}, causal=True)
    a = Inputs("varlen_padded_kv_full")
    case("varlen_padded_kv_full", "packed q of lengths 2, 0, 3 on padded kv without lengths",
         {"q": a.normal(5, 2, 8), "k": a.normal(3, 6, 2, 8), "v": a.normal(3, 6, 2, 8), "cu_seqlens_q": i32(0, 2, 2, 5)})
    a = Inputs("padded_q_packed_kv")
    case("padded_q_packed_kv", "padded q on packed kv of lengths 10 and 4, causal",
         {"q": a.normal(2, 5, 2, 8), "k": a.normal(14, 1, 8), "v": a.normal(14, 1, 8), "cu_seqlens_kv": i32(0, 10, 14)}, causal=True)


def paged_cases():
    table = np.array([[4, 1, 6, -1], [2, 4, -1, 7]], np.int32)
    pages = lambda kinds=("f32", "f32"), dim=8: {"k": a.normal(8, 4, 2, dim, kind=kinds[0]), "v": a.normal(8, 4, 2, dim, kind=kinds[1])}
    a = Inputs("paged")
    case("paged", "page_size 4, lengths 11 and 6, unused table entries -1 or a NaN page, page 4 shared",
         {"q": a.normal(2, 3, 4, 8), "block_table": table, "seqlens_kv": i32(11, 6)} | pages())
    a = Inputs("paged_causal")
    case("paged_causal", "the same with causal", {"q": a.normal(2, 7, 4, 8), "block_table": table, "seqlens_kv": i32(11, 6)} | pages(),
         causal=True)
    a = Inputs("paged_full")
    case("paged_full", "no lengths: every page is full",
         {"q": a.normal(2, 3, 2, 8), "block_table": np.array([[3, 0], [1, 5]], np.int32)} | pages())
    a = Inputs("paged_varlen")
    case("paged_varlen", "packed q of lengths 1 and 5 on paged kv, one length 0, causal",
         {"q": a.normal(6, 2, 8), "cu_seqlens_q": i32(0, 1, 6, 6), "seqlens_kv": i32(9, 8, 0),
          "block_table": np.array([[5, 0, 3], [2, 7, -1], [-1, -1, -1]], np.int32)} | pages(), causal=True)
    a = Inputs("paged_window")
    case("paged_window", "window (3, 0) leaves whole pages unseen; sinks and ALiBi",
         {"q": a.normal(2, 2, 2, 8), "block_table": table, "seqlens_kv": i32(12, 7), "sinks": f32(1, -1),
          "alibi_slopes": f32(.5, .25)} | pages(), window=(3, 0))
    a = Inputs("paged_page_size_1")
    case("paged_page_size_1", "page_size 1",
         {"q": a.normal(1, 2, 2, 8), "k": a.normal(7, 1, 2, 8), "v": a.normal(7, 1, 2, 8),
          "block_table": i32(6, 2, 0, 3).reshape(1, 4), "seqlens_kv": i32(3)}, causal=True)
    a = Inputs("paged_q8_0")
    case("paged_q8_0", "paged q8_0 k and q4_0 v, f16 q", {"q": a.normal(2, 2, 4, 32, kind="f16"), "block_table": table,
         "seqlens_kv": i32(11, 6)} | pages(("q8_0", "q4_0"), 32), causal=True)


def segment_cases():
    paged_and_packed = lambda kinds=("f32",) * 4, dim=8: {
        "k.0": a.normal(8, 4, 2, dim, kind=kinds[0]), "v.0": a.normal(8, 4, 2, dim, kind=kinds[1]),
        "block_table.0": np.array([[4, 1, 6], [2, 0, -1]], np.int32), "seqlens_kv.0": i32(10, 5),
        "k.1": a.normal(9, 2, dim, kind=kinds[2]), "v.1": a.normal(9, 2, dim, kind=kinds[3]), "cu_seqlens_kv.1": i32(0, 3, 7)}
    for option in ("causal", "causal_top_left"):
        name = "segments_" + option
        a = Inputs(name)
        case(name, f"a paged segment of 10 and 5 keys, then a packed one of 3 and 4; {option}",
             {"q": a.normal(2, 6, 4, 8)} | paged_and_packed(), **{option: True})
    a = Inputs("segments_types")
    case("segments_types", "f16 q; q8_0 and q4_0 in the paged segment, f16 and bf16 in the packed one; causal",
         {"q": a.normal(2, 4, 4, 32, kind="f16")} | paged_and_packed(("q8_0", "q4_0", "f16", "bf16"), 32), causal=True)
    a = Inputs("segments_varlen")
    case("segments_varlen", "packed q of lengths 1 and 6 on the paged and packed segments; window, ALiBi, sinks",
         {"q": a.normal(7, 4, 8), "cu_seqlens_q": i32(0, 1, 7), "alibi_slopes": f32(.5, .25, .125, 1), "sinks": f32(0, 1, -1, 2)}
         | paged_and_packed(), window=(6, 1))
    a = Inputs("segments_tree")
    case("segments_tree", "packed q of lengths 1 and 6; bits for the last 9 keys, which lie in both segments; causal",
         {"q": a.normal(7, 4, 8), "cu_seqlens_q": i32(0, 1, 7)} | paged_and_packed() | tree(a, 9, 7), causal=True)
    a = Inputs("segments_bias")
    case("segments_bias", "two padded segments of capacity 8 and 6, lengths per entry (one 0); bias over the whole, block mask, causal",
         {"q": a.normal(2, 5, 2, 8), "k.0": a.normal(2, 8, 2, 8), "v.0": a.normal(2, 8, 2, 8), "seqlens_kv.0": i32(8, 0),
          "k.1": a.normal(2, 6, 2, 8), "v.1": a.normal(2, 6, 2, 8), "seqlens_kv.1": i32(4, 6), "bias": a.normal(2, 2, 5, 14)}
         | a.block_mask([[[[FULL, PARTIAL, CAUSAL, FULL], [PARTIAL, FULL, EMPTY, PARTIAL]]]], 5, 14, 4, 4), causal=True)
    a = Inputs("segments_empty")
    case("segments_empty", "three segments, the middle one empty everywhere; one entry has no keys at all",
         {"q": a.normal(2, 4, 2, 8), "k.0": a.normal(2, 5, 1, 8), "v.0": a.normal(2, 5, 1, 8), "seqlens_kv.0": i32(3, 0),
          "k.1": a.normal(2, 4, 1, 8), "v.1": a.normal(2, 4, 1, 8), "seqlens_kv.1": i32(0, 0),
          "k.2": a.normal(2, 7, 1, 8), "v.2": a.normal(2, 7, 1, 8), "seqlens_kv.2": i32(5, 0)}, causal=True)
    a = Inputs("segments_decode")
    case("segments_decode", "one query on a long fp8 prefix without lengths and a short f16 tail, descales in the prefix only",
         {"q": a.normal(2, 1, 4, 16, kind="f16"),
          "k.0": a.normal(2, 32, 2, 16, kind="f8_e4m3fn", sigma=16), "v.0": a.normal(2, 32, 2, 16, kind="f8_e5m2", sigma=16),
          "k_descale.0": a.uniform(.04, .08, 2, 2), "v_descale.0": a.uniform(.04, .08, 1),
          "k.1": a.normal(2, 4, 2, 16, kind="f16"), "v.1": a.normal(2, 4, 2, 16, kind="f16"), "seqlens_kv.1": i32(1, 4)},
         causal=True)
    a = Inputs("segments_shared")
    case("segments_shared", "three sequences share 9 keys in pages of 4 and 5 padded ones with descales, before keys of their own; causal, sinks",
         {"q": a.normal(3, 2, 4, 16), "shared_segments": i32(2), "sinks": f32(0, 1, -1, 2),
          "k.0": a.normal(5, 4, 2, 16), "v.0": a.normal(5, 4, 2, 16), "block_table.0": i32(4, 0, 3).reshape(1, 3), "seqlens_kv.0": i32(9),
          "k.1": a.normal(1, 5, 2, 16, kind="f8_e4m3fn", sigma=16), "v.1": a.normal(1, 5, 2, 16, kind="f8_e4m3fn", sigma=16),
          "k_descale.1": a.uniform(.04, .08, 1, 2), "v_descale.1": a.uniform(.04, .08, 1, 2),
          "k.2": a.normal(3, 6, 2, 16), "v.2": a.normal(3, 6, 2, 16), "seqlens_kv.2": i32(6, 0, 3)}, causal=True)


def block_cases():
    sq, skv = 19, 29
    grid = [[FULL, PARTIAL, EMPTY, CAUSAL], [EMPTY, EMPTY, EMPTY, EMPTY], [PARTIAL, CAUSAL, FULL, PARTIAL]]
    other = [[EMPTY, FULL, CAUSAL, FULL], [PARTIAL, EMPTY, FULL, EMPTY], [CAUSAL, PARTIAL, EMPTY, FULL]]
    a = Inputs("blocks")
    case("blocks", "blocks of (8, 8), every kind, one mask for all; eight rows see nothing",
         a.qkv(2, sq, skv, 4, 2, 8) | a.block_mask([[grid]], sq, skv, 8, 8))
    a = Inputs("blocks_head")
    case("blocks_head", "a mask per head", a.qkv(2, sq, skv, 2, 1, 8) | a.block_mask([[grid, other]], sq, skv, 8, 8))
    a = Inputs("blocks_batch")
    case("blocks_batch", "a mask per batch entry, broadcast over heads",
         a.qkv(2, sq, skv, 2, 1, 8) | a.block_mask([[other], [grid]], sq, skv, 8, 8))
    a = Inputs("blocks_batch_head")
    case("blocks_batch_head", "a mask per batch entry and head, with seqlens_kv 0 and 21 and sinks",
         a.qkv(2, sq, skv, 2, 2, 8) | a.block_mask([[grid, other], [other, grid]], sq, skv, 8, 8)
         | {"seqlens_kv": i32(0, 21), "sinks": f32(1, -1)})
    a = Inputs("tree")
    case("tree", "bits for the last 5 keys, no other mask", a.qkv(2, 5, 12, 4, 2, 8) | tree(a, 5, 2, 5))
    a = Inputs("tree_two_words")
    case("tree_two_words", "bits for the last 77 of 90 keys, causal", a.qkv(1, 6, 90, 2, 1, 8) | tree(a, 77, 1, 6), causal=True)
    a = Inputs("tree_short")
    case("tree_short", "bits for 128 keys with seqlens_kv 0 and 21, block mask, window (12, 4) and sinks",
         a.qkv(2, sq, skv, 2, 2, 8) | a.block_mask([[grid]], sq, skv, 8, 8) | tree(a, 128, 2, sq)
         | {"seqlens_kv": i32(0, 21), "sinks": f32(1, -1)}, window=(12, 4))
    a = Inputs("blocks_uneven")
    case("blocks_uneven", "blocks of (7, 10) with window (12, 4)",
         a.qkv(1, sq, skv, 2, 2, 8) | a.block_mask([[[[PARTIAL, FULL, CAUSAL], [CAUSAL, PARTIAL, FULL], [FULL, CAUSAL, PARTIAL]]]],
                                                  sq, skv, 7, 10), window=(12, 4))
    a = Inputs("blocks_causal")
    case("blocks_causal", "blocks of (8, 8) with causal on top and seqlens_kv",
         a.qkv(2, sq, skv, 2, 1, 8) | a.block_mask([[other]], sq, skv, 8, 8) | {"seqlens_kv": i32(29, 17)}, causal=True)
    a = Inputs("blocks_64")
    case("blocks_64", "blocks of (64, 64), Sq 67, Skv 70",
         a.qkv(1, 67, 70, 2, 1, 8) | a.block_mask([[[[PARTIAL, CAUSAL], [FULL, PARTIAL]], [[CAUSAL, FULL], [EMPTY, PARTIAL]]]], 67, 70, 64, 64))
    a = Inputs("blocks_no_partial")
    case("blocks_no_partial", "no PARTIAL block: neither block_bits nor block_index",
         a.qkv(1, 9, 12, 2, 1, 8) | a.block_mask([[[[FULL, EMPTY, CAUSAL], [CAUSAL, FULL, FULL], [EMPTY, EMPTY, EMPTY]]]], 9, 12, 4, 4))
    a = Inputs("blocks_larger")
    case("blocks_larger", "one PARTIAL block of (64, 64) larger than the problem",
         a.qkv(1, 9, 12, 2, 1, 8) | a.block_mask([[[[PARTIAL]]]], 9, 12, 64, 64))


def type_cases():
    for kind in ("f16", "bf16", "f8_e4m3fn", "f8_e5m2", "f8_e4m3fnuz"):
        a = Inputs("type_" + kind)
        case("type_" + kind, f"q, k, v in {kind}, causal, seqlens_kv",
             a.qkv(2, 6, 14, 4, 2, 16, kinds=(kind,) * 3) | {"seqlens_kv": i32(14, 9)}, causal=True)
    for kind, v_descale in {"f8_e4m3fn": 2.0 ** -9, "f8_e5m2": 2.0 ** -16, "f8_e4m3fnuz": 2.0 ** -8}.items():
        a = Inputs("codes_" + kind)
        case("codes_" + kind, f"f32 q, small; every finite {kind} code in k and in v",
             {"q": a.normal(1, 4, 1, 16), "k": a.codes(kind, 1, 32, 1, 16), "v": a.codes(kind, 1, 32, 1, 16),
              "k_descale": f32(v_descale), "v_descale": f32(v_descale)})
    for kind in GGML:
        a = Inputs("type_" + kind)
        case("type_" + kind, f"f32 q, {kind} k and v, two blocks per row, causal, seqlens_kv",
             a.qkv(2, 3, 11, 2, 1, 64, kinds=("f32", kind, kind)) | {"seqlens_kv": i32(11, 7)}, causal=True)
    for kind in ("i8", "i4"):
        a = Inputs("type_" + kind)
        codes = [a.rng.integers(0, 256, (2, 11, 2, 24 if kind == "i8" else 12), np.uint8) for _ in range(2)]
        k, v = (x.view(np.int8) if kind == "i8" else Typed(kind, x) for x in codes)
        largest = {"i8": 0.016, "i4": 0.3}[kind]
        scales = {name: a.uniform(-largest, largest, 2, 11, 2).astype(np.float16) for name in ("k_scale", "v_scale")}
        case("type_" + kind, f"f32 q, {kind} k and v with f16 scales of each token and head, causal, seqlens_kv",
             {"q": a.normal(2, 3, 4, 24), "k": k, "v": v} | scales | {"seqlens_kv": i32(11, 7)}, causal=True)
    mixes = [("f16", "q8_0", "f16"), ("bf16", "f8_e4m3fn", "q4_0"), ("f32", "bf16", "f8_e5m2"), ("f8_e4m3fnuz", "f8_e5m2", "f8_e4m3fn")]
    for kinds in mixes:
        name = "mix_" + "_".join(kinds)
        a = Inputs(name)
        case(name, "q {}, k {}, v {}".format(*kinds), a.qkv(1, 4, 9, 2, 1, 32, kinds=kinds))


def descale_cases():
    fp8 = ("f8_e4m3fn",) * 3
    a = Inputs("descale_tensor")
    case("descale_tensor", "q, k, v descale [1]", a.qkv(2, 5, 13, 4, 2, 16, kinds=fp8, sigma=32)
         | {"q_descale": f32(.03), "k_descale": f32(.04), "v_descale": f32(.05)})
    a = Inputs("descale_head")
    case("descale_head", "q, k, v descale [B, Hkv]", a.qkv(2, 5, 13, 4, 2, 16, kinds=fp8, sigma=32)
         | {n + "_descale": a.uniform(.01, .06, 2, 2) for n in "qkv"}, causal=True)
    a = Inputs("descale_fnuz")
    case("descale_fnuz", "fnuz with q descale [1], k [B, Hkv], v [1]",
         a.qkv(2, 5, 13, 2, 2, 16, kinds=("f8_e4m3fnuz",) * 3, sigma=32)
         | {"q_descale": f32(.03), "k_descale": a.uniform(.01, .06, 2, 2), "v_descale": f32(.05)})

    def block_descale(seqlens, nblocks, block_keys):
        """NaN where the block has no keys."""
        descale = a.uniform(.01, .06, len(seqlens), 2, nblocks)
        for b, n in enumerate(seqlens):
            descale[b, :, -(-n // block_keys):] = np.nan
        return descale

    a = Inputs("descale_block_64")
    case("descale_block_64", "k, v descale [B, Hkv, 2] per 64 keys, seqlens_kv 70 and 61", a.qkv(2, 4, 70, 4, 2, 8, kinds=fp8, sigma=32)
         | {"q_descale": a.uniform(.01, .06, 2, 2), "k_descale": block_descale((70, 61), 2, 64),
            "v_descale": block_descale((70, 61), 2, 64), "seqlens_kv": i32(70, 61)}, descale_block_keys=64)
    a = Inputs("descale_block_128")
    case("descale_block_128", "k descale per 128 keys, v descale [B, Hkv]; f16 q", a.qkv(1, 3, 140, 2, 2, 8, kinds=("f16", "f8_e4m3fn", "f8_e5m2"), sigma=4)
         | {"k_descale": block_descale((140,), 2, 128), "v_descale": a.uniform(.1, .6, 1, 2)}, descale_block_keys=128)
    a = Inputs("descale_block_paged")
    case("descale_block_paged", "k, v descale per 64 keys on pages of 48: a block of keys is counted in the sequence, not in the page",
         {"q": a.normal(2, 2, 4, 8, kind="f16"), "k": a.normal(5, 48, 2, 8, kind="f8_e4m3fn", sigma=32),
          "v": a.normal(5, 48, 2, 8, kind="f8_e4m3fn", sigma=32), "block_table": np.array([[3, 1], [0, -1]], np.int32),
          "seqlens_kv": i32(90, 40), "k_descale": block_descale((90, 40), 2, 64), "v_descale": block_descale((90, 40), 2, 64)},
         causal=True, descale_block_keys=64)
    a = Inputs("descale_block_varlen")
    case("descale_block_varlen", "k, v descale per 64 keys on packed kv of lengths 5 and 66: blocks are counted within each sequence",
         {"q": a.normal(4, 2, 8, kind="f16"), "cu_seqlens_q": i32(0, 1, 4), "cu_seqlens_kv": i32(0, 5, 71),
          "k": a.normal(71, 2, 8, kind="f8_e4m3fn", sigma=32), "v": a.normal(71, 2, 8, kind="f8_e4m3fn", sigma=32),
          "k_descale": block_descale((5, 66), 2, 64), "v_descale": block_descale((5, 66), 2, 64)}, descale_block_keys=64)
    a = Inputs("descale_block_segments")
    case("descale_block_segments", "two segments, descale per 64 keys counted within each segment",
         {"q": a.normal(1, 3, 2, 8, kind="f16"),
          **{f"{n}.{s}": a.normal(1, 66, 2, 8, kind="f8_e4m3fn", sigma=32) for s in (0, 1) for n in "kv"}, "seqlens_kv.0": i32(65),
          **{f"{n}_descale.{s}": a.uniform(.01, .06, 1, 2, 2) for s in (0, 1) for n in "kv"}}, causal=True, descale_block_keys=64)
    a = Inputs("descale_f16")
    case("descale_f16", "descales on f16 q, k, v too", a.qkv(1, 4, 9, 2, 2, 8, kinds=("f16",) * 3)
         | {"q_descale": f32(.5), "k_descale": a.uniform(.5, 2, 1, 2), "v_descale": f32(3)})


def merge_cases():
    a = Inputs("merge_two")
    shape, lse_shape = (2, 5, 2, 8), (2, 2, 5)
    parts = lambda count, kind="f32": ([a.normal(*shape, kind=kind) for _ in range(count)],
                                       [a.normal(*lse_shape, sigma=3.0) for _ in range(count)])
    merge_case("merge_one", "one part", *parts(1))
    merge_case("merge_two", "two parts", *parts(2))
    merge_case("merge_five", "five parts", *parts(5))
    merge_case("merge_f16", "f16 outputs", *parts(3, "f16"))
    merge_case("merge_bf16", "bf16 outputs", *parts(3, "bf16"))
    outs, lses = parts(3)
    for n, (out, lse) in enumerate(zip(outs, lses)):
        empty = a.rng.random(lse_shape) < 0.5
        empty[0, 0, 0] = empty[1, 1, 4] = True
        lse[empty] = -np.inf
        out[np.moveaxis(empty, 1, 2)] = (0, 0, np.nan)[n]
    merge_case("merge_empty_parts", "lse -inf in some parts and rows, all of them in two rows; such outs are 0 or NaN", outs, lses)
    outs, lses = parts(2)
    merge_case("merge_all_empty", "every lse -inf: 0 and -inf", [np.zeros_like(o) for o in outs], [np.full_like(l, -np.inf) for l in lses])
    outs, lses = parts(3)
    merge_case("merge_far", "lse far apart: 0, 1000 and -1000 around", outs, [lses[0], lses[1] + 1000, lses[2] - 1000])
    merge_case("merge_packed", "packed: out [total, H, Dv], lse [H, total]",
               [a.normal(7, 2, 8) for _ in range(3)], [a.normal(2, 7, sigma=3.0) for _ in range(3)])


def main():
    for path in HERE.glob("*.safetensors"):
        path.unlink()
    for cases in (basic_cases, mask_cases, score_cases, length_cases, paged_cases, segment_cases, block_cases, type_cases,
                  descale_cases, merge_cases):
        cases()
    (HERE / "index.json").write_text(json.dumps(INDEX, indent=2) + "\n")
    print(f"{len(INDEX)} cases")


if __name__ == "__main__":
    main()
