"""Kernels in Triton, compiled for gfx942 without a device: triton_kernels.py FOLDER writes each as NAME.hsaco
with what a launch needs in NAME.json."""
import json
import sys
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def copy(out, x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def softmax(out, x, columns, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * columns + at, mask=at < columns, other=-float("inf"))
    weights = tl.exp(values - tl.max(values, axis=0))
    tl.store(out + row * columns + at, weights / tl.sum(weights, axis=0), mask=at < columns)


@triton.jit
def gemm(out, a, b, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
         PRECISION: tl.constexpr):
    """out [M][N] f32 = a [M][K] b [K][N]."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    sums = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        depth = k + tl.arange(0, BK)
        x = tl.load(a + rows[:, None] * K + depth[None, :], mask=(rows[:, None] < M) & (depth[None, :] < K),
                    other=0.0)
        y = tl.load(b + depth[:, None] * N + columns[None, :],
                    mask=(depth[:, None] < K) & (columns[None, :] < N), other=0.0)
        sums = tl.dot(x, y, sums, input_precision=PRECISION)
    tl.store(out + rows[:, None] * N + columns[None, :], sums,
             mask=(rows[:, None] < M) & (columns[None, :] < N))


@triton.jit
def attention(out, q, k, v, seqlen, scale, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
              CAUSAL: tl.constexpr):
    """out [head][seqlen][D] f32 of f16 q, k, v in the same layout."""
    start = tl.program_id(0) * BM
    base = tl.program_id(1) * seqlen * D
    rows, dims = start + tl.arange(0, BM), tl.arange(0, D)
    queries = tl.load(q + base + rows[:, None] * D + dims[None, :], mask=rows[:, None] < seqlen, other=0.0)
    most = tl.full((BM,), -1e30, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    sums = tl.zeros((BM, D), tl.float32)
    end = tl.minimum(start + BM, seqlen) if CAUSAL else seqlen
    for j in range(0, end, BN):
        keys = j + tl.arange(0, BN)
        x = tl.load(k + base + keys[None, :] * D + dims[:, None], mask=keys[None, :] < seqlen, other=0.0)
        scores = tl.dot(queries, x) * scale
        seen = keys[None, :] < seqlen
        if CAUSAL:
            seen = seen & (keys[None, :] <= rows[:, None])
        scores = tl.where(seen, scores, -1e30)
        now = tl.maximum(most, tl.max(scores, axis=1))
        weights = tl.exp(scores - now[:, None])
        shrink = tl.exp(most - now)
        y = tl.load(v + base + keys[:, None] * D + dims[None, :], mask=keys[:, None] < seqlen, other=0.0)
        sums = sums * shrink[:, None] + tl.dot(weights.to(tl.float16), y)
        total = total * shrink + tl.sum(weights, axis=1)
        most = now
    tl.store(out + base + rows[:, None] * D + dims[None, :], sums / total[:, None],
             mask=rows[:, None] < seqlen)


VARIANTS = {
    "copy_f32": (copy, "*fp32 *fp32 i32", {"BLOCK": 1024}, {}),
    "copy_f16": (copy, "*fp16 *fp16 i32", {"BLOCK": 512}, {"num_warps": 1}),
    "softmax": (softmax, "*fp32 *fp32 i32", {"BLOCK": 1024}, {}),
    "softmax_8_warps": (softmax, "*fp32 *fp32 i32", {"BLOCK": 1024}, {"num_warps": 8}),
    "gemm_f16": (gemm, "*fp32 *fp16 *fp16 i32 i32 i32", {"BM": 64, "BN": 64, "BK": 32, "PRECISION": "ieee"}, {}),
    "gemm_bf16": (gemm, "*fp32 *bf16 *bf16 i32 i32 i32", {"BM": 64, "BN": 32, "BK": 64, "PRECISION": "ieee"}, {}),
    "gemm_f32": (gemm, "*fp32 *fp32 *fp32 i32 i32 i32", {"BM": 32, "BN": 32, "BK": 32, "PRECISION": "ieee"}, {}),
    "gemm_tf32": (gemm, "*fp32 *fp32 *fp32 i32 i32 i32",
                  {"BM": 32, "BN": 32, "BK": 32, "PRECISION": "tf32"}, {}),
    "gemm_fp8": (gemm, "*fp32 *fp8e4b8 *fp8e4b8 i32 i32 i32", {"BM": 64, "BN": 64, "BK": 64, "PRECISION": "ieee"}, {}),
    "attention_d64": (attention, "*fp32 *fp16 *fp16 *fp16 i32 fp32",
                      {"BM": 64, "BN": 64, "D": 64, "CAUSAL": False}, {}),
    "attention_d128": (attention, "*fp32 *fp16 *fp16 *fp16 i32 fp32",
                       {"BM": 128, "BN": 32, "D": 128, "CAUSAL": False}, {"num_warps": 8}),
    "attention_causal": (attention, "*fp32 *fp16 *fp16 *fp16 i32 fp32",
                         {"BM": 64, "BN": 32, "D": 64, "CAUSAL": True}, {}),
}


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name, (kernel, types, constants, options) in VARIANTS.items():
        types = types.split()
        signature = {argument: types[i] if i < len(types) else "constexpr"
                     for i, argument in enumerate(kernel.arg_names)}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        made = triton.compile(source, target=GPUTarget("hip", "gfx942", 64), options=options)
        (folder / f"{name}.hsaco").write_bytes(made.asm["hsaco"])
        (folder / f"{name}.json").write_text(json.dumps({
            "kernel": kernel.__name__, "symbol": made.metadata.name, "types": types, "constants": constants,
            "threads": 64 * made.metadata.num_warps, "shared": made.metadata.shared,
            "triton": triton.__version__}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
