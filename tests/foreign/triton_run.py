"""Triton's kernels (triton_kernels.py compiled them) on the emulator against NumPy."""
import json
import struct

import numpy as np

from reference import attention, from_bf16, to_bf16

PACKED = {"i32": "<i", "fp32": "<f"}


def kernarg(types, values):
    """The arguments at their alignment, and the two scratch pointers that Triton adds."""
    data = b""
    for kind, value in [*zip(types, values), ("*", 0), ("*", 0)]:
        packed = struct.pack("<Q" if kind.startswith("*") else PACKED[kind], value)
        data += b"\0" * (-len(data) % len(packed)) + packed
    return data


def fnuz(codes):
    """The values of e4m3 codes without infinities and -0."""
    codes = codes.astype(np.int64)
    exponent, fraction = codes >> 3 & 15, (codes & 7) / 8
    values = np.where(exponent == 0, fraction * 2.0**-7, (1 + fraction) * 2.0**(exponent - 8.0))
    return np.where(codes & 0x80, -values, values)


class Operands:
    """Random matrices as the kernel gets them and as float64."""

    def __init__(self, kind):
        self.kind, self.random = kind.lstrip("*"), np.random.default_rng(3)

    def make(self, *shape):
        if self.kind == "fp8e4b8":
            codes = self.random.integers(0, 256, shape, np.uint8)
            codes[(codes & 0x78) > 0x48] &= 0x87  # small, and no NaN
            codes[codes == 0x80] = 0
            return codes, fnuz(codes)
        x = self.random.normal(size=shape)
        if self.kind == "bf16":
            return to_bf16(x), from_bf16(to_bf16(x))
        stored = x.astype({"fp16": np.float16, "fp32": np.float32}[self.kind])
        return stored, stored.astype(np.float64)


def case(about):
    """(grid, input arrays, numbers behind them, expected float64, tolerance) of a kernel."""
    kernel, constants = about["kernel"], about["constants"]
    make = Operands(about["types"][1]).make
    if kernel == "copy":
        n = 3000
        x, values = make(n)
        return (-(-n // constants["BLOCK"]), 1, 1), [x], [n], values, 0
    if kernel == "softmax":
        x, values = make(5, 781)
        weights = np.exp(values - values.max(axis=1, keepdims=True))
        return (5, 1, 1), [x], [781], weights / weights.sum(axis=1, keepdims=True), 1e-6
    if kernel == "gemm":
        m, n, k = 100, 72, 200
        (a, a_values), (b, b_values) = make(m, k), make(k, n)
        grid = (-(-m // constants["BM"]), -(-n // constants["BN"]), 1)
        return grid, [a, b], [m, n, k], a_values @ b_values, 2e-3 if constants["PRECISION"] == "tf32" else 1e-6
    heads, seqlen, dim = 2, 200, constants["D"]
    made = [make(heads, seqlen, dim) for _ in range(3)]
    # One batch entry, heads before tokens.
    q, k, v = (values.transpose(1, 0, 2)[None] for _, values in made)
    expected = attention(q, k, v, constants["CAUSAL"])[0][0].transpose(1, 0, 2)
    grid = (-(-seqlen // constants["BM"]), heads, 1)
    return grid, [x for x, _ in made], [seqlen, dim ** -0.5], expected, 5e-3


def run(hip, folder, name):
    """The largest error, and whether it is within what the types allow."""
    about = json.loads((folder / f"{name}.json").read_text())
    grid, inputs, numbers, expected, tolerance = case(about)
    result = np.float16 if about["types"][0] == "*fp16" else np.float32
    out = hip.put(np.full(expected.shape, np.nan, result))
    buffers = [hip.put(x) for x in inputs]
    try:
        hip.launch(hip.function(folder / f"{name}.hsaco", about["symbol"]), grid, (about["threads"], 1, 1),
                   kernarg(about["types"], [out, *buffers, *numbers]), about["shared"])
        got = hip.get(out, expected.shape, result).astype(np.float64)
    finally:
        hip.free(out, *buffers)
    error = np.abs(got - expected).max()
    return error, bool(error <= tolerance * max(1, np.abs(expected).max()))
