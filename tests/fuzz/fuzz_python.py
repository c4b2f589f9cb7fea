"""Calls the Python package with random shapes, zeros among them, views, types and options of every kind.

    .venv/bin/python tests/fuzz/fuzz_python.py build/asan/python            for ATTN_FUZZ_SECONDS (20)
    .venv/bin/python tests/fuzz/fuzz_python.py build/asan/python SEED CASE  one case again

The argument is the directory that has the package `attn`, built with the address sanitizer or without. A call ends in a
result, an attn.Error, a TypeError, a ValueError or a MemoryError. A result of "cpu" is that of "reference", no element is
left unwritten, nothing else is written. Arrays are NumPy's, and PyTorch's and JAX's where these are installed.
"""
import decimal
import faulthandler
import fractions
import importlib.util
import inspect
import math
import mmap
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings

HANG = 300  # seconds that no 32 cases take
POISON = 0xa5


def main():
    """Runs the cases in a process of its own and says which one it died of."""
    package = pathlib.Path(sys.argv[1]).resolve()
    one = [int(x) for x in sys.argv[2:4]]
    seed = one[0] if one else int.from_bytes(os.urandom(4), "little")
    environment = dict(os.environ, PYTHONPATH=str(package), PYTHONDONTWRITEBYTECODE="1", JAX_PLATFORMS="cpu")
    if (package / "preload").exists():  # the runtime of the sanitizer that the package was built with
        # Not Python's own blocks but each array's memory has an end that is watched.
        environment.update(LD_PRELOAD=(package / "preload").read_text(), PYTHONMALLOC="malloc",
                           ASAN_OPTIONS="detect_leaks=0:quarantine_size_mb=64:allocator_may_return_null=1:"
                                        "max_allocation_size_mb=4096",
                           UBSAN_OPTIONS="print_stacktrace=1")
    with tempfile.TemporaryFile() as file:
        file.write(bytes(8))
        file.flush()
        child = subprocess.run([sys.executable, __file__, "--child", str(file.fileno()), str(seed), *map(str, one[1:])],
                               env=environment, pass_fds=[file.fileno()])
        file.seek(0)
        case, = struct.unpack("q", file.read(8))
    if child.returncode:
        print(f"fuzz_python: failed: {sys.executable} {sys.argv[0]} {sys.argv[1]} {seed} {case}", flush=True)
    return child.returncode != 0


if __name__ == "__main__" and sys.argv[1] != "--child":
    sys.exit(main())

import ml_dtypes
import numpy as np

import attn
import attn._frameworks

torch = jax = None
if importlib.util.find_spec("torch"):
    import torch
    torch.set_num_threads(1)
if importlib.util.find_spec("jax"):
    import jax

INT_MAX = 2 ** 31 - 1
FLOATS = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f8_e4m3fn": ml_dtypes.float8_e4m3fn,
          "f8_e5m2": ml_dtypes.float8_e5m2, "f8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz}
OTHERS = [np.float64, np.int32, np.int64, np.uint8, np.bool_, np.uint32, np.complex64, np.int16, ">f4", "M8[s]", object, "V3",
          ml_dtypes.int4, ml_dtypes.float8_e4m3b11fnuz]
TORCH = {"bfloat16": "bfloat16", "float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2",
         "float8_e4m3fnuz": "float8_e4m3fnuz"}
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Planted(Exception):
    """What an object of the fuzzer raises by itself; it may come through."""


class Odd:
    """Raises whatever it is asked."""
    def raises(self, *arguments, **options):
        raise Planted
    __index__ = __float__ = __int__ = __bool__ = __len__ = __iter__ = __getitem__ = __str__ = __repr__ = __eq__ = raises
    __hash__ = object.__hash__

    def __getattr__(self, name):
        raise Planted


class OddArray:
    """An array by its methods' names only."""
    def __init__(self, device, capsule):
        self.device, self.capsule = device, capsule

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if self.capsule is Planted:
            raise Planted
        return self.capsule


class Wrapped:
    """An array of no framework that attn knows."""
    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


class OwnArray(np.ndarray):
    pass


def junk():
    values = [None, True, False, 0, 1, -1, 2, 3, 64, 2 ** 31, 2 ** 32 + 1, 2 ** 63 - 1, 2 ** 63, -2 ** 63, 2 ** 70]
    values += [0.0, -0.0, 0.5, 1e-50, 1e-40, 1e300, 10 ** 400, math.inf, -math.inf, math.nan, 1j]
    values += ["", "x", "auto", "cpu", "reference", "cuda", "hip-emu", "head", "amax", "f32", "f16", "f64", "q8_0", "\ud800",
               "a\0b", b"x"]
    values += [(), (1,), (1, 2), (-1, 3), (1, 2, 3), [], [None], [0.5, 1], {}, {0: 1, 1: 2}, set(), object(), int, len]
    values += [np.True_, np.array(True), np.array([True]), np.float16(1), np.int8(3), np.array(1), np.array([1]),
               np.array([1, 2]), np.array("x"), np.datetime64(1, "s"), np.float32, np.dtype("f2"), ml_dtypes.bfloat16]
    values += [np.zeros(0, np.float32), np.zeros((0, 0, 0, 0), np.float32), np.ones((1, 1, 1, 1), np.float32),
               np.ma.masked_array(np.zeros((1, 2, 1, 4), np.float32)), Wrapped(np.zeros((2, 3), np.float32))]
    values += [fractions.Fraction(1, 3), decimal.Decimal("0.25"), Odd(), Odd]
    values += [OddArray(device, None) for device in ((1, 0), (2, 0), (2 ** 40, 0), (1,), None, ("x", 0))]
    values += [OddArray((1, 0), 7), OddArray((1, 0), Planted)]
    if torch:
        values += [torch.tensor(True), torch.tensor(1), torch.tensor(0.5), torch.float16, torch.device("cpu"),
                   torch.zeros(1, 2, 1, 4), torch.zeros(3, device="meta"), torch.tensor(1., device="meta"),
                   torch.zeros(2, 2).to_sparse(), torch.zeros(0)]
    return values


JUNK = junk()
OPTIONS = list(inspect.signature(attn.forward).parameters)[3:]
# What a plan's call takes of these.
OF_A_RUN = {"bias", "alibi_slopes", "sinks", "block_mask", "tree", "seqlens_kv", "cu_seqlens_q", "cu_seqlens_kv", "block_table", "q_descale",
            "k_descale", "v_descale", "k_scale", "v_scale", "bias_slopes", "out_scale", "out", "return_lse"}


def filling(empty):
    """Fresh arrays hold what no other call leaves there: an element that stays unwritten differs between two calls."""
    def filled(framework, shape, dtype, like):
        array = empty(framework, shape, dtype, like)
        filled.byte = filled.byte % 250 + 1
        if framework == "numpy" and array.size:
            array.view(np.uint8 if array.ndim and array.shape[-1] else array.dtype)[...] = filled.byte
        elif framework == "torch" and array.numel() and array.is_contiguous():
            array.view(torch.uint8).fill_(filled.byte)
        return array
    filled.byte = 0
    return filled


attn._frameworks.empty = filling(attn._frameworks.empty)


class Failure(Exception):
    pass


class Case:
    def __init__(self, seed, number):
        self.rng = random.Random(f"{seed} {number}")
        self.numbers = np.random.default_rng(self.rng.getrandbits(64))
        self.tame = True      # values for which the backends agree
        self.watched = []     # (base, its bytes, where it may change)
        self.framework = self.pick("numpy", "numpy", "numpy", *(["torch"] * 2 if torch else []),
                                   *(["jax"] if jax and self.chance(4) else []))
        self.log = []

    # ---- choices ----

    def chance(self, n):
        return self.rng.randrange(n) == 0

    def pick(self, *values):
        return self.rng.choice(values)

    def size(self):
        return self.pick(0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 33, 65) if not self.chance(20) else self.pick(64, 129, 200)

    # ---- arrays ----

    def values(self, shape, dtype):
        dtype = np.dtype(dtype)
        if dtype == np.bool_:
            return np.asarray(self.numbers.random(shape) < 0.6)
        if dtype.kind in "iu":  # of u8, any bytes
            self.tame = self.tame and dtype != np.uint8
            return np.asarray(self.numbers.integers(0, 256 if dtype == np.uint8 else 5, shape)).astype(dtype)
        if dtype.kind in "fcV" and dtype.names is None and dtype != np.dtype("V3"):
            return np.asarray(self.numbers.standard_normal(shape)).astype(np.float32).astype(dtype)
        return np.empty(shape, dtype)

    def strided(self, x, rows=True, written=False):
        """The same values elsewhere: other strides, some negative, poison between; the last one is 1 if `rows`."""
        dims = list(range(x.ndim))
        order = dims[:]
        if self.chance(2):
            head = order[:-1] if rows else order
            self.rng.shuffle(head)
            order = head + order[len(head):]
        base_shape, cut = [], []
        for i in dims:
            exact = rows and i == x.ndim - 1
            step = 1 if exact or not self.chance(4) else self.pick(2, 3)
            back = not exact and self.chance(8)
            before, after = (0 if self.chance(2) else self.rng.randrange(4) for _ in range(2))
            length = (x.shape[i] - 1) * step + 1 if x.shape[i] else 0
            base_shape.append(before + length + after)
            cut.append((slice(before, before + length, step), slice(None, None, -1) if back else slice(None)))
        if math.prod(base_shape) > 200_000:
            return np.ascontiguousarray(x)
        base = np.empty([base_shape[i] for i in order], x.dtype)

        def look(array):
            array = array.transpose(np.argsort(order))
            return array[tuple(a for a, _ in cut)][tuple(b for _, b in cut)]
        if x.dtype != object:
            base.view(BITS.get(x.dtype.itemsize, x.dtype)).fill(POISON) if x.dtype.itemsize in BITS else None
        look(base)[...] = x
        if x.dtype.itemsize in BITS and x.dtype != object:
            may = np.zeros(base.shape, bool)
            if written:
                look(may)[...] = True
            self.watched.append((base, base.view(BITS[x.dtype.itemsize]).copy(), may))
        return look(base)

    def array(self, shape, dtype, rows=True, written=False, small=False):
        """Of the case's framework, mostly."""
        x = self.values(shape, dtype)
        if x.ndim and (not small and self.chance(2) or self.chance(30)):
            x = self.strided(x, rows or not self.chance(3), written)
        if not written and x.ndim > 1 and self.chance(12):
            one = list(x.shape)
            axis = self.rng.randrange(x.ndim - 1)
            if one[axis]:
                x = np.broadcast_to(x[(slice(None),) * axis + (slice(1),)], one)
        return self.framed(x)

    def framed(self, x, framework=None):
        framework = framework or (self.framework if not self.chance(40) else self.pick("numpy", "other", "own", "masked",
                                                                                       "torch", "jax"))
        plain = x.dtype.kind in "fiub" and x.dtype.isbuiltin == 1 and x.dtype.isnative
        if framework == "torch" and torch and all(s >= 0 for s in x.strides):
            name = TORCH.get(x.dtype.name)
            if plain or name:
                size = x.dtype.itemsize
                t = torch.from_numpy(x if not name else x.view(np.int16 if size == 2 else np.uint8))
                return self.tensor(t.view(getattr(torch, name)) if name else t)
        if framework == "jax" and jax and (plain or x.dtype.name in TORCH):
            return jax.numpy.asarray(x)
        if framework == "other" and plain:
            return Wrapped(x)
        if framework == "own":
            return x.view(OwnArray)
        if framework == "masked":
            return np.ma.masked_array(x)
        return x

    def tensor(self, t):
        if not self.chance(15):
            return t
        kind = self.rng.randrange(8)
        if kind == 0 and t.is_floating_point():
            return t.requires_grad_()
        if kind == 1 and t.is_floating_point() and t.dtype.itemsize > 1:
            return torch._neg_view(t)
        if kind == 2:
            return t.to("meta")
        if kind == 3 and t.dim() and t.numel():
            try:
                return t.to_sparse()
            except (RuntimeError, NotImplementedError):
                return t
        if kind == 4:
            return t.as_subclass(OwnTensor)
        if kind == 5:
            return torch.nn.Parameter(t, requires_grad=False)
        if kind == 6 and t.dim():
            return t.expand(t.shape)
        return t

    def small(self, values, dtype):
        """An array of lengths and the like: contiguous, but seldom."""
        x = np.array(values, dtype)
        return self.framed(x if not self.chance(30) else self.strided(x, rows=False))

    # ---- calls ----

    def call(self, function, *arguments, **options):
        """The result, or None after an error that a caller may get."""
        name = getattr(function, "__name__", str(function))
        self.log.append((name, arguments, options))
        tried[name] = tried.get(name, 0) + 1
        try:
            result = function(*arguments, **options)
        except attn.InternalError:
            raise
        except (attn.Error, TypeError, ValueError, MemoryError, Planted) as error:
            self.error = error
            text = str(error)
            if isinstance(error, attn.Error) and (not text or "\n" in text):
                raise Failure(f"the sentence is {text!r}") from error
            return None
        answered[name] = answered.get(name, 0) + 1
        return result if result is not None else ()

    def unharmed(self):
        for base, before, may in self.watched:
            now = base.view(BITS[base.dtype.itemsize])
            changed = (now != before) & ~may
            if changed.any():
                raise Failure(f"{changed.sum()} elements of an input or beside out were written")

    def same(self, got, want, bound, what):
        got, want = (x.astype(np.float64) for x in (got, want))
        if got.shape != want.shape:
            raise Failure(f"{what} has shape {got.shape}, reference {want.shape}")
        finite = np.isfinite(want)
        largest = np.abs(want[finite]).max(initial=1)
        good = np.where(finite, np.abs(got - np.where(finite, want, 0)) <= bound * largest,
                        (got == want) | (np.isnan(got) & np.isnan(want)))
        if not good.all():
            at = tuple(np.argwhere(~good)[0])
            raise Failure(f"{what} at {at} is {got[at]}, reference {want[at]}; {(~good).sum()} of {good.size} differ")

    def both(self, function, arguments, options, compare):
        """On "cpu" and on "reference": one answer, of which `out` held nothing before."""
        results, errors, types = [], [], []
        out = plain(options.get("out"))
        for number, backend in enumerate(("cpu", "reference")):
            self.error = None
            if isinstance(out, np.ndarray) and out.dtype in FLOATS.values() and out.flags.writeable:
                out[...] = np.array(number + 1, out.dtype)
            result = self.call(function, *arguments, **{**options, "backend": backend})
            errors.append(self.error)
            self.unharmed()
            parts = result if isinstance(result, tuple) else (result,)
            types.append([type(x) for x in parts])
            results.append(None if result is None else [None if x is None else np.array(plain(x)) for x in parts])
        if all(r is not None for r in results):
            if types[0] != types[1]:
                raise Failure(f"results are {types}")
            if self.tame:
                compare(*results)
        elif any(r is not None for r in results) and not isinstance(next(e for e in errors if e),
                                                                    (attn.Unsupported, MemoryError)):
            raise Failure(f"one backend refuses, the other does not: {errors}")

    # ---- forward and what takes its arguments ----

    def offsets(self, batch, total):
        end = total if self.chance(3) else self.rng.randint(0, total)
        return [0, *sorted(self.rng.randint(0, end) for _ in range(batch - 1)), end] if batch else [0]

    def keys(self, shape, dim, kind):
        """k or v [..., dim] in a type; blocks of ggml from what attn makes of floats."""
        if kind in ("q8_0", "q4_0"):
            floats = self.values((1, math.prod(shape[:-1]), shape[-1], dim), np.float32)
            stored = attn.quantize(floats, kind, backend="reference")[0]
            stored = stored.reshape(*shape, stored.shape[-1])
            return self.framed(self.strided(stored) if self.chance(2) else stored)
        return self.array((*shape, dim), FLOATS[kind])

    def segment(self, batch, heads, dim, dim_v, kinds):
        length = self.size()
        layout = self.pick("padded", "padded", "packed", "paged")
        s = {"capacity": length}
        if layout == "packed":
            shape = (length, heads)
            s["cu_seqlens_kv"] = self.small(self.offsets(batch, length), np.int32)
        elif layout == "paged":
            pages, page, columns = self.rng.randrange(5), self.pick(1, 2, 4, 16), self.rng.randrange(4)
            shape = (pages, page, heads)
            s["capacity"] = page * columns
            low, high = (-1, pages + 1) if self.chance(6) else (0, max(pages, 1))
            s["block_table"] = self.small(self.numbers.integers(low, high, (batch, columns)), np.int32)
        else:
            shape = (batch, length, heads)
        if layout != "packed" and self.chance(2):
            high = s["capacity"] + (1 if self.chance(10) else 0)
            s["seqlens_kv"] = self.small([self.rng.randint(-1 if self.chance(30) else 0, high) for _ in range(batch)], np.int32)
        s["k"], s["v"] = (self.keys(shape, d, kind) for d, kind in zip((dim, dim_v), kinds))
        keys = self.pick(64, 128)
        for name in "k_descale", "v_descale":
            if self.chance(3):
                form = self.pick((1,), (batch, heads), (batch, heads, -(-s["capacity"] // keys)))
                s[name] = self.small(self.numbers.uniform(0.5, 2, form), np.float32)
        return s

    def forward_arguments(self):
        batch = self.pick(1, 1, 2, 3) if not self.chance(25) else 0
        heads, group = self.pick(1, 1, 2, 3), self.pick(1, 1, 2, 3)
        kinds = [self.pick("f32", "f32", *FLOATS), *(self.pick("f32", *FLOATS, "q8_0", "q4_0") for _ in range(2))]
        if self.chance(2):
            kinds[1:] = kinds[:1] * 2
        blocks = [kind in ("q8_0", "q4_0") for kind in kinds[1:]]
        dims = [self.pick(32, 64) if block else self.pick(1, 2, 4, 7, 8, 16, 24, 32, 33, 64, 128) for block in blocks]
        if not blocks[1] and self.chance(2):
            dims[1] = dims[0]
        if self.chance(40):
            if any(blocks):
                dims = [self.pick(288, 544)] * 2  # 306 bytes are either
            else:
                dims[self.rng.randrange(2)] = self.pick(0, 288)
        dim, dim_v = dims
        heads_q = heads * group
        a, seqlen_q = {}, self.size()
        packed = self.chance(3)
        if packed:
            a["q"] = self.array((seqlen_q, heads_q, dim), FLOATS[kinds[0]])
            offsets = self.offsets(batch, seqlen_q)
            a["cu_seqlens_q"] = self.small(offsets, np.int32)
            if self.chance(2):
                longest = max(np.diff(offsets), default=0)
                a["max_seqlen_q"] = int(longest) + self.rng.randrange(3) - (1 if self.chance(20) else 0)
            out_shape, lse_shape = (seqlen_q, heads_q, dim_v), (heads_q, seqlen_q)
        else:
            a["q"] = self.array((batch, seqlen_q, heads_q, dim), FLOATS[kinds[0]])
            out_shape, lse_shape = (batch, seqlen_q, heads_q, dim_v), (batch, heads_q, seqlen_q)
        several = self.chance(4)
        segments = [self.segment(batch, heads, dim, dim_v, kinds[1:]) for _ in range(self.rng.randint(1, 4) if several else 1)]
        for name in "k", "v", "seqlens_kv", "cu_seqlens_kv", "block_table", "k_descale", "v_descale":
            given = [s.get(name) for s in segments]
            if any(x is not None for x in given):
                a[name] = (tuple(given) if self.chance(3) else given) if several else given[0]
        capacity = sum(s["capacity"] for s in segments)
        if self.chance(3):
            a[self.pick("causal", "causal_top_left")] = self.pick(True, np.True_, np.array(True))
        if self.chance(4):
            a["window"] = self.pick(tuple, list, np.array)([self.rng.randint(-1, 9), self.rng.randint(-1, 9)])
        if self.chance(4):
            a["scale"] = self.pick(float, np.float32, np.float64, np.array)(self.pick(0.1, 0.5, -0.3, 1.0))
        if self.chance(5):
            a["softcap"] = self.pick(0, 0.5, 3, np.float32(20))
        if self.chance(4) and (not packed or self.chance(10)):
            shape = [n if not self.chance(3) else 1 for n in (batch, heads_q, seqlen_q, capacity)]
            a["bias"] = self.array(shape, FLOATS[kinds[0]] if kinds[0] in ("f16", "bf16") and self.chance(2) else np.float32,
                                   rows=False)
        if self.chance(5):
            a["alibi_slopes"] = self.small(self.numbers.uniform(0, 1, heads_q), np.float32)
        if self.chance(5):
            a["sinks"] = self.small(self.numbers.standard_normal(heads_q), np.float32)
        if self.chance(6):
            a["q_descale"] = self.small(self.numbers.uniform(0.5, 2, self.pick((1,), (batch, heads))), np.float32)
        if self.chance(5) and (not packed or self.chance(10)):
            shape = (self.pick(1, batch), self.pick(1, heads_q), seqlen_q, capacity)
            mask = self.mask(shape[2:] if shape[:2] == (1, 1) else shape)
            if mask is not None:
                a["block_mask"] = mask
        if self.chance(5):
            a["tree"] = self.small(self.numbers.integers(0, 2 ** 64, (*out_shape[:-2], 2), np.uint64), np.uint64)
            a["tree_keys"] = self.pick(1, 3, 64, 100, 128, 0, 129)
        kind = kinds[0] if kinds[0][:2] != "f8" else "bf16"
        if self.chance(3):
            kind = a["out_dtype"] = self.pick("f32", "f16", "bf16", "f8_e4m3fn", "f8_e5m2", "f8_e4m3fnuz", "f64")
        if kind[:2] == "f8" and self.chance(2):
            a["out_scale"] = self.small([self.pick(0.5, 1, 4)], np.float32)
        a["return_lse"] = self.pick(True, False, np.True_)
        self.out = out_shape, FLOATS.get(kind, np.float64)
        if self.chance(4):
            a["out"] = self.array(*self.out, written=True)
        self.kind, self.out_shape, self.lse_shape = kind, out_shape, lse_shape
        return a

    def spoil(self, a):
        """An argument or two become something else."""
        for _ in range(self.pick(0, 0, 0, 0, 1, 1, 2)):
            name = self.pick(*a) if self.chance(2) else self.pick("q", "k", "v", *OPTIONS)
            old = a.get(name)
            how = self.rng.randrange(4)
            large = isinstance(old, np.ndarray) and old.size > 100_000
            if how == 0 or large or not isinstance(plain(old), np.ndarray):
                self.tame = False
                a[name] = self.pick(*JUNK)
                continue
            old = np.asarray(plain(old))
            if how == 1:  # another shape
                shape = list(old.shape)
                if shape and not self.chance(5):
                    i = self.rng.randrange(len(shape))
                    shape[i] = max(0, self.pick(0, 0, 1, 2, shape[i] - 1, shape[i] + 1, shape[i] * 2))
                else:
                    shape = shape + [1] if self.chance(2) else shape[:-1]
                a[name] = self.array(shape, old.dtype, not self.chance(4),
                                     name == "out") if math.prod(shape) < 100_000 else None
            elif how == 2:  # another type
                self.tame = False
                a[name] = self.array(old.shape, self.pick(*FLOATS.values(), *OTHERS), True, name == "out")
            elif old.ndim:  # many of the same
                shape = list(old.shape)
                shape[self.rng.randrange(len(shape))] = self.pick(2 ** 31, 2 ** 32 + 4, 2 ** 40, 2 ** 41)
                try:
                    a[name] = np.broadcast_to(old.ravel()[:1] if old.size else np.zeros(1, old.dtype), shape)
                except ValueError:  # NumPy's limit
                    pass
        return a

    def compare_forward(self, cpu, reference):
        kind = str(cpu[0].dtype)
        bound = {"float32": 2e-3, "float16": 4e-3, "bfloat16": 2e-2}.get(kind)
        if bound:
            self.same(cpu[0], reference[0], bound, "out")
        else:
            got, want = (np.isnan(x[0].astype(np.float32)) for x in (cpu, reference))
            if want.all() != got.all():
                raise Failure("out is not a number on one backend")
        if len(cpu) > 1:
            self.same(cpu[1], reference[1], 2e-3, "lse")

    def forward(self):
        a = self.spoil(self.forward_arguments())
        if self.chance(2):
            what = "both"
        else:
            what = self.pick("forward", "Plan", "explain", "check", "check")
        arguments = [a.pop(name, None) for name in ("q", "k", "v")]
        if what == "both":
            self.both(attn.forward, arguments, a, self.compare_forward)
            return
        if self.chance(40):
            a["surprise"] = 1
        if what != "forward":
            for name, values in {"kernel": ["reference", "cpu_baseline", "cpu_avx2", "fwd_sm80_bf16_d128", ""],
                                 "max_sms": [0, 1, -1], "num_threads": [0, 1, 3, np.int8(2), -1, 5000, None],
                                 "fixed_split": [0, 1, 3, 64, np.int16(2)], "split_invariant": [True, np.True_],
                                 "kv_prefix_stable": [True, False]}.items():
                if self.chance(8):
                    a[name] = self.pick(*values) if not self.chance(8) else self.pick(*JUNK)
        a["backend"] = self.pick("auto", "cpu", "reference", "reference") if not self.chance(30) else self.pick(*JUNK)
        result = self.call(getattr(attn, what), *arguments, **a)
        if what == "Plan" and result is not None:
            good = result.backend in ("cpu", "reference") and result.workspace >= 0 and result.kernel in repr(result)
            if not good:
                raise Failure(f"{result!r} of {result.backend}")
            arrays = {name: a[name] for name in OF_A_RUN & a.keys()}
            for _ in range(2):
                self.call(result, *arguments, **(arrays if self.chance(2) else self.spoil(dict(arrays))))

    # ---- the other functions ----

    def mask(self, shape=None):
        size = self.pick(1, 3, 8, 16, 64, (4, 16), np.int64(8), np.array([5, 7]), 128)
        if shape:
            return self.call(attn.BlockMask.from_dense, self.framed(self.values(shape, self.pick(np.bool_, np.uint8))),
                             block_size=size)
        odd = (lambda value: value) if not self.chance(4) else lambda value: value if self.chance(2) else self.pick(*JUNK)
        make = self.rng.randrange(6)
        sq, skv = self.size(), self.size()
        if make == 0:
            lead = self.pick((), (), (1, 1), (2, 3), (0, 1), (1, 0))
            dense = self.array((*lead, sq, skv), self.pick(np.bool_, np.uint8), small=not self.chance(8))
            return self.call(attn.BlockMask.from_dense, odd(dense), block_size=odd(size))
        if make == 1:
            lead = self.pick((), (), (1, 1), (2, 3), (0, 1))
            x = np.sort(self.numbers.integers(0, sq + 1, (*lead, skv, self.pick(1, 1, 2, 2, 0, 3), 2)), axis=-1)
            return self.call(attn.BlockMask.from_intervals, odd(self.small(x, np.int32)), odd(sq), block_size=odd(size))
        if make == 2:
            lengths = [self.rng.randrange(20) for _ in range(self.rng.randrange(5))]
            return self.call(attn.BlockMask.from_documents, odd(self.pick(list, np.array)(lengths)) if lengths else [],
                             causal=odd(self.pick(True, np.False_)), block_size=odd(size), device=odd("cpu"))
        if make == 3:
            return self.call(attn.BlockMask.from_window, odd(sq), odd(skv),
                             odd((self.rng.randint(-1, 9), self.rng.randint(-1, 9))),
                             global_tokens=odd(self.rng.randrange(4)), block_size=odd(size), device=odd("cpu"))
        if make == 4:
            return self.call(attn.BlockMask.from_prefix, odd(sq), odd(skv), odd(self.rng.randrange(9)), block_size=odd(size))
        bq, bk = (int(size), int(size)) if np.ndim(size) == 0 else (int(x) for x in size)
        grid = (*self.pick((), (), (1, 1), (2, 3), (0, 1)), -(-sq // bq), -(-skv // bk))
        kinds = self.numbers.integers(0, 4 if not self.chance(8) else 6, grid).astype(np.uint8)
        partial = kinds == 3
        index = np.where(partial, np.cumsum(partial).reshape(grid) - 1, -1).astype(np.int32)
        count = int(partial.sum())
        bits = self.array((count, bq, bk), np.bool_) if self.chance(2) else self.small(
            self.numbers.integers(0, 2 ** 32, (count, bq, -(-bk // 32))), np.uint32)
        return self.call(attn.BlockMask.from_kinds, odd(self.framed(kinds)), odd(sq), odd(skv), block_size=odd(size),
                         index=odd(self.framed(index)), bits=odd(bits))

    def masks(self):
        made = [m for m in (self.mask() for _ in range(2)) if m is not None]
        for m in made:
            if m.device != "cpu" or len(m.shape) != 4 or "BlockMask" not in repr(m):
                raise Failure(repr(m))
            other = self.pick(*made, self.pick(*JUNK[:40]))
            both = self.call(m.__or__ if self.chance(2) else m.__and__, other)
            use = both if isinstance(both, attn.BlockMask) else m
            batch, heads, sq, skv = use.shape
            q, k = (self.framed(self.values((batch, n, heads, 8), np.float32)) for n in (sq, skv))
            self.both(attn.forward, (q, k, k), {"block_mask": use, "return_lse": True}, self.compare_forward)

    def merge(self):
        packed, kind = self.chance(3), FLOATS[self.pick("f32", "f16", "bf16") if not self.chance(9) else self.pick(*FLOATS)]
        batch, heads, seqlen, dim = self.pick(0, 1, 2, 2), self.rng.randrange(1, 4), self.size(), self.pick(1, 4, 8, 16, 33, 0)
        dim = dim or self.pick(0, 8)
        state = self.rng.getstate()
        parts = []
        for _ in range(self.rng.randint(1, 4)):
            self.rng.setstate(state)  # so that all parts have the same strides
            out = self.array((seqlen, heads, dim) if packed else (batch, seqlen, heads, dim), kind)
            lse = self.numbers.standard_normal((heads, seqlen) if packed else (batch, heads, seqlen)).astype(np.float32)
            lse[self.numbers.random(lse.shape) < 0.2] = -np.inf
            parts.append((out, lse))
        parts = [(out, self.small(lse, np.float32)) for out, lse in parts]
        options = {"out_dtype": self.pick("f32", "f16", np.float32, "f64", *JUNK)} if self.chance(3) else {}
        for _ in range(self.pick(0, 0, 0, 1)):
            i = self.rng.randrange(len(parts))
            parts[i] = self.pick((parts[i][1], parts[i][0]), (self.pick(*JUNK), parts[i][1]), (parts[i][0], self.pick(*JUNK)),
                                 self.pick(*JUNK),
                                 (self.array((2, 3, 1, 8), np.float32), parts[i][1]))
            self.tame = False
        self.both(attn.merge, (parts,), options, self.compare_forward)

    def quantize(self):
        shape = (self.pick(0, 1, 2), self.size(), self.rng.randrange(1, 4), self.pick(1, 8, 16, 32, 33, 64, 0))
        shape = shape if self.chance(2) else shape[1:]
        x = self.array(shape, self.pick(np.float32, np.float16, ml_dtypes.bfloat16) if not self.chance(9)
                       else self.pick(*OTHERS))
        options = {}
        if self.chance(2):
            options["per"] = self.pick("tensor", "head", 64, 128, np.int64(64)) if not self.chance(8) else self.pick(*JUNK)
        if self.chance(2):
            batch, seqlen, heads = (1, *shape[:2]) if len(shape) == 3 else shape[:3]
            form = self.pick((1,), (batch, heads), (batch, heads, -(-seqlen // 64)))
            options["scale"] = self.pick("amax", "amax", 1, 2, 0.5, np.float32(3),
                                         self.small(self.numbers.uniform(0.5, 2, form), np.float32))
            if self.chance(8):
                options["scale"] = self.pick(*JUNK)
        if self.chance(3):
            options["saturate"] = self.pick(True, np.True_, False) if not self.chance(8) else self.pick(*JUNK)
        dtype = self.pick(*(name for name, t in attn.types().items() if t["kind"] != "float")) if not self.chance(10) else self.pick(*JUNK)

        def compare(cpu, reference):
            for name, got, want in zip(("stored", "descale"), cpu, reference):
                if (got is None) != (want is None):
                    raise Failure(f"{name} is {got} and {want}")
                if got is not None:
                    got, want = (np.ascontiguousarray(x) for x in (got, want))
                    if got.shape != want.shape or got.tobytes() != want.tobytes():
                        raise Failure(f"{name} differs between the backends")
        self.both(attn.quantize, (x if not self.chance(30) else self.pick(*JUNK), dtype), options, compare)

    def kv_append(self):
        batch, heads, seqlen = self.pick(0, 1, 2, 3), self.rng.randrange(1, 4), self.pick(0, 1, 1, 2, 5, 9)
        new = FLOATS[self.pick("f32", "f16", "bf16") if not self.chance(15) else self.pick(*FLOATS)]
        kinds = [self.pick(*FLOATS, "q8_0", "q4_0") for _ in range(2)]
        dims = [self.pick(32, 64, 288) if kind in ("q8_0", "q4_0") else self.pick(1, 2, 7, 8, 16, 33, 64, 0 if self.chance(9) else 4)
                for kind in kinds]
        options, lead, added = {}, (batch, seqlen), [seqlen] * batch
        if self.chance(3):
            offsets = self.offsets(batch, seqlen)
            options["cu_seqlens_new"] = self.small(offsets, np.int32)
            lead, added = (seqlen,), np.diff(offsets).tolist()
            if self.chance(3):
                options["max_seqlen_new"] = self.pick(max(added, default=0), seqlen)
        capacity, shape = self.size(), None
        if self.chance(2):
            page, columns = self.pick(1, 2, 4, 16), self.rng.randrange(4)
            pages, capacity = batch * columns + self.rng.randrange(3), page * columns
            table = self.numbers.permutation(max(pages, batch * columns))[:batch * columns].reshape(batch, columns)
            options["block_table"] = self.small(table - (1 if self.chance(20) else 0), np.int32)
            shape = (pages, page, heads)
        caches = []
        for dim, kind in zip(dims, kinds):
            size = {"q8_0": 34, "q4_0": 18}.get(kind)
            full = (*(shape or (batch, capacity, heads)), dim // 32 * size if size else dim)
            caches.append(self.array(full, np.uint8 if size else FLOATS[kind], written=True))
        lengths = [self.rng.randint(0, capacity + (1 if self.chance(20) else 0)) for _ in range(batch)]
        for name in "k_descale", "v_descale":
            if self.chance(4):
                form = self.pick((1,), (batch, heads), (batch, heads, -(-capacity // 64)))
                options[name] = self.small(self.numbers.uniform(0.5, 2, form), np.float32)
        if self.chance(2):
            half = self.rng.randint(0 if self.chance(9) else 1, max(dims[0] // 2 + self.chance(9), 1))
            for name in "rotary_cos", "rotary_sin":
                options[name] = self.small(self.numbers.uniform(-1, 1, (capacity + self.rng.randrange(2), half)), np.float32)
            options["rotary_interleaved"] = self.pick(True, False, np.True_)
            if self.chance(2):
                options["q"] = self.array((*lead, self.rng.randint(0 if self.chance(9) else 1, 4), dims[0]), new)
        arguments = [*(self.array((*lead, heads, dim), new) for dim in dims), *caches, self.small(lengths, np.int32)]
        for _ in range(self.pick(0, 0, 0, 0, 1)):
            if self.chance(2):
                arguments[self.rng.randrange(5)] = self.pick(*JUNK, self.array((2, 3, 1, 8), np.float32))
            else:
                options[self.pick("advance_seqlens", "seqlens_out", "q", "q_out", "rotary_cos", "block_table", "max_seqlen_new")] = self.pick(*JUNK)
            self.tame = False
        if self.chance(4):
            arguments[4] = self.array((batch,), np.int32, rows=False, written=True, small=True)
            return self.call(attn.kv_append, *arguments, **options, **({} if "advance_seqlens" in options else {"advance_seqlens": True}))
        room = all(n + more <= capacity for n, more in zip(lengths, added)) and sum(added) == math.prod(lead)

        def compare(cpu, reference):
            if room and cpu and (cpu[0].shape != reference[0].shape or cpu[0].tobytes() != reference[0].tobytes()):
                raise Failure("q_out differs between the backends")
        self.both(attn.kv_append, arguments, options, compare)

    def state(self):
        self.call(self.pick(attn.cache_clear, attn.cache_info, attn.info, attn.get_num_threads))
        if self.chance(2):
            self.call(attn.set_num_threads, self.pick(0, 1, 2, 5) if self.chance(2) else self.pick(*JUNK))

    def run(self):
        what = self.pick(*[self.forward] * 24, *[self.masks] * 5, *[self.merge] * 4, *[self.quantize] * 6, *[self.kv_append] * 6, self.state)
        grad = torch is not None and self.chance(3)
        with torch.no_grad() if grad else warnings.catch_warnings():
            what()
            self.unharmed()


if torch:
    class OwnTensor(torch.Tensor):
        pass


def plain(x):
    """As NumPy's, where that can be."""
    if torch and isinstance(x, torch.Tensor):
        if x.device.type != "cpu" or x.layout != torch.strided:
            return None
        x = x.detach().resolve_neg().as_subclass(torch.Tensor)
        name = TORCH.get(str(x.dtype)[6:])
        if not name:
            return x.numpy()
        bits = x.contiguous().view(torch.uint8 if x.dtype.itemsize == 1 else torch.int16)
        return bits.numpy().view(getattr(ml_dtypes, name))
    if jax and isinstance(x, jax.Array):
        return np.asarray(x)
    if isinstance(x, Wrapped):
        return x.array
    return x


def shown(x):
    """An argument for a report."""
    if isinstance(x, (list, tuple)):
        return f"[{', '.join(map(shown, x))}]"
    try:
        if isinstance(x, np.ndarray) and x.size > 8 or torch and isinstance(x, torch.Tensor):
            strides = x.strides if isinstance(x, np.ndarray) else x.layout == torch.strided and x.stride()
            return f"{type(x).__name__} {x.dtype} {tuple(x.shape)} strides {strides}"
        return repr(x)[:300]
    except Exception:
        return object.__repr__(x)


tried, answered = {}, {}


def child(descriptor, seed, only=None):
    warnings.simplefilter("ignore")
    faulthandler.enable()
    number = mmap.mmap(descriptor, 8)
    seconds = float(os.environ.get("ATTN_FUZZ_SECONDS", "20"))
    start = time.monotonic()
    count = 0 if only is None else only
    while only is not None or time.monotonic() - start < seconds:
        number[:] = struct.pack("q", count)
        if count % 32 == 0 or only is not None:
            faulthandler.dump_traceback_later(HANG, exit=True)
        case = Case(seed, count)
        try:
            case.run()
        except Exception:
            traceback.print_exc()
            for name, arguments, options in case.log[-2:]:
                print(f"{name}:", *(f"\n  {shown(x)}" for x in arguments),
                      *(f"\n  {key} = {shown(x)}" for key, x in options.items()))
            return 1
        count += 1
        if only is not None:
            break
    calls = ", ".join(f"{name} {tried[name]} ({answered.get(name, 0)})" for name in sorted(tried, key=tried.get, reverse=True))
    print(f"fuzz_python: {count} inputs of seed {seed} in {time.monotonic() - start:.0f} s; calls (with a result): {calls}")
    return 0


if __name__ == "__main__":
    sys.exit(child(*map(int, sys.argv[2:])))
