#!/usr/bin/env python3
"""Times the backward pass next to PyTorch's FlashAttention-2 and cuDNN, and FlashAttention-3, live, in TFLOP/s of 2.5 forwards.

    bench/backward.py --lib build/release/lib/libattn.so [--kernel NAME] [--cells d128 causal] [--out FILE]
    bench/backward.py --plot docs/measured/NAME.json docs/measured/NAME.png     draws a result

16384 tokens, heads * head_dim = 2048, unless the cell says otherwise. Each libattn gradient is compared with
FlashAttention-2's. --packed: 32768 tokens in documents, and windows, whose gradients are compared with FlashAttention-3's. --lib NAME=PATH
may be given several times; builds take turns. With --softcap and --bias peers are left out, and gradients are those of other
scores than out and lse have: for times only. --fa3: `xformers/flash_attn_3/_C.so` of PyPI's xformers 0.0.34, which wants
libcudart.so.12 (--cudart), as nvidia-cuda-runtime-cu12 has it.
"""
import argparse
import ctypes as c
import datetime
import json
import math
import pathlib
import random
import statistics
from dataclasses import asdict, dataclass

import measured
import torch
from contenders import CAUSAL, TYPE_OF, Args, Libattn, Problem, Segment, SegmentArgs, Strides, make, stream
from timing import Launches, Nvml, take_rounds

aten = torch.ops.aten
PACKED, WINDOW = 1, 1 << 2


class BackwardProblem(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("forward", c.POINTER(Problem)), ("d_out_type", c.c_int),
                ("d_out_stride", Strides), ("gradients", c.c_uint32), ("accumulate", c.c_uint32), ("dq_type", c.c_int),
                ("dk_type", c.c_int), ("dv_type", c.c_int), ("dq_stride", Strides), ("dk_stride", Strides),
                ("dv_stride", Strides), ("d_bias_type", c.c_int), ("d_bias_stride", c.c_int64 * 4), ("kernel", c.c_char_p)]


class BackwardArgs(c.Structure):
    _fields_ = [("struct_size", c.c_size_t), ("forward", c.POINTER(Args))] + [
        (n, c.c_void_p) for n in ("d_out", "d_lse", "dq", "dk", "dv", "d_sinks", "d_bias")]


@dataclass(frozen=True)
class Cell:
    dim: int
    seqlen: int
    causal: bool
    heads: int
    heads_kv: int
    batch: int
    dtype: str = "bf16"
    documents: tuple = ()  # their lengths
    window: int = 0  # keys that a query sees, itself among them

    @property
    def fa3_only(self):
        """PyTorch's operators lack this mask, so FlashAttention-3 computes out, lse and the gradients to compare with."""
        return bool(self.documents or self.window)

    def name(self):
        mask = f"window of {self.window}" if self.window else "causal" if self.causal else "full"
        tokens = f"{len(self.documents)} documents in {self.seqlen}" if self.documents else f"{self.batch}x{self.seqlen}"
        return f"{self.dtype} d{self.dim} {mask} {self.heads}/{self.heads_kv} heads {tokens}"

    def flops(self):  # of 2.5 forwards
        if self.fa3_only:
            seen = [n * (n + 1) / 2 for n in self.documents] or [self.window * (self.seqlen - (self.window - 1) / 2)]
            return 10 * self.heads * self.dim * sum(seen)
        return 10 * self.batch * self.heads * self.seqlen ** 2 * self.dim / (2 if self.causal else 1)


def all_cells():
    cells = [Cell(dim, s, causal, 2048 // dim, 2048 // dim, 16384 // s)
             for dim in (64, 128, 256) for causal in (False, True) for s in (512, 2048, 8192, 16384)]
    return cells + [Cell(128, s, True, 32, 8, 16384 // s) for s in (4096, 16384)]


def packed_cells():
    draw, lengths = random.Random(1), []
    while sum(lengths) < 32768:
        lengths.append(min(draw.randint(700, 1300), 32768 - sum(lengths)))
    return [Cell(dim, 32768, not window, 2048 // dim, 2048 // dim, 1, documents=() if window else tuple(lengths), window=window)
            for window in (0, 1024) for dim in (64, 128, 256)]


class Inputs:
    def __init__(self, cell):
        dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[cell.dtype]
        draw = lambda heads: torch.randn(cell.batch, cell.seqlen, heads, cell.dim, device="cuda", dtype=dtype)  # noqa: E731
        self.q, self.k, self.v, self.d_out = draw(cell.heads), draw(cell.heads_kv), draw(cell.heads_kv), draw(cell.heads)
        group = cell.heads // cell.heads_kv  # PyTorch's operators want as many K/V heads
        self.t = [x.transpose(1, 2) for x in (self.q, self.k.repeat_interleave(group, 2), self.v.repeat_interleave(group, 2))]
        self.t_d_out = self.d_out.transpose(1, 2)
        self.cu = None
        if cell.documents:
            self.cu = torch.tensor([0, *cell.documents], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)
            self.q, self.k, self.v, self.d_out = (x.squeeze(0) for x in (self.q, self.k, self.v, self.d_out))


def fa2(cell, x):
    o, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = aten._scaled_dot_product_flash_attention(*x.t, 0.0, cell.causal)

    def call():
        return aten._scaled_dot_product_flash_attention_backward(x.t_d_out, *x.t, o, lse, cum_q, cum_k, max_q, max_k, 0.0,
                                                                 cell.causal, seed, offset)
    x.out, x.lse = o.transpose(1, 2).contiguous(), lse.contiguous()
    return call


def cudnn(cell, x):
    o, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        *x.t, None, True, 0.0, cell.causal)
    return lambda: aten._scaled_dot_product_cudnn_attention_backward(x.t_d_out, *x.t, o, lse, seed, offset, None, cum_q, cum_k,
                                                                     max_q, max_k, 0.0, cell.causal)


def fa3(cell, x, deterministic):
    """Its gradients, and the call. Computes x.out and x.lse if the cell is fa3_only; else fa2() has done so."""
    grads = [torch.empty_like(t) for t in (x.q, x.k, x.v)]
    options = {"is_causal": cell.causal}
    if cell.window:
        options |= {"window_size_left": cell.window - 1, "window_size_right": 0}
    if cell.documents:
        longest = max(cell.documents)
        options |= {"cu_seqlens_q": x.cu, "cu_seqlens_k": x.cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
    if cell.fa3_only:
        x.out, x.lse = torch.ops.flash_attn_3.fwd(x.q, x.k, x.v, num_splits=1, **options)[:2]

    def call():
        torch.ops.flash_attn_3.bwd(x.d_out, x.q, x.k, x.v, x.out, x.lse, *grads, deterministic=deterministic, **options)
    return grads, call


def libattn(library, kernel, cell, x, options):
    """The call and the gradients that it writes."""
    lib = library.lib
    kind = TYPE_OF[x.q.dtype]
    segment = make(Segment, k_type=kind, v_type=kind, seqlen=cell.seqlen)
    forward = make(Problem, batch=cell.batch, heads_q=cell.heads, heads_kv=cell.heads_kv, head_dim=cell.dim,
                   head_dim_v=cell.dim, seqlen_q=cell.seqlen, q_type=kind, num_segments=1, segments=c.pointer(segment),
                   flags=CAUSAL if cell.causal else 0, softcap=options.softcap)
    if cell.window:
        forward.flags, forward.window_left = WINDOW, cell.window - 1
    if cell.documents:
        forward.batch, forward.seqlen_q, forward.total_q, forward.q_layout = len(cell.documents), max(cell.documents), cell.seqlen, PACKED
        segment.layout, segment.seqlen, segment.total = PACKED, max(cell.documents), cell.seqlen
    gradients, bias, d_bias = 7, None, None
    if options.bias:  # of each head, for all sequences
        bias = torch.zeros(cell.heads, cell.seqlen, cell.seqlen, device="cuda", dtype=x.q.dtype)
        forward.bias_type = kind
        forward.bias_stride = (c.c_int64 * 4)(0, cell.seqlen ** 2, cell.seqlen, 1)
        if options.bias == "gradient":
            gradients, d_bias = 7 | 16, torch.empty_like(bias)
    problem = make(BackwardProblem, forward=c.pointer(forward), kernel=kernel.encode() if kernel else None, gradients=gradients)
    plan = c.c_void_p()
    library.check(lib.attn_plan_create_backward(library.context, c.byref(problem), c.byref(plan)))
    size = c.c_size_t(lib.attn_plan_workspace(plan))
    space = torch.empty(max(size.value, 1), dtype=torch.uint8, device="cuda")
    memory = c.c_void_p(space.data_ptr())
    library.check(lib.attn_workspace_init(plan, memory, size, stream()))
    grads = [torch.empty_like(t) for t in (x.q, x.k, x.v)]
    cu = x.cu.data_ptr() if cell.documents else None
    segment_args = make(SegmentArgs, k=x.k.data_ptr(), v=x.v.data_ptr(), cu_seqlens=cu)
    args = make(Args, q=x.q.data_ptr(), out=x.out.data_ptr(), lse=x.lse.data_ptr(), cu_seqlens_q=cu, num_segments=1,
                segments=c.pointer(segment_args), bias=bias.data_ptr() if options.bias else None)
    run = make(BackwardArgs, forward=c.pointer(args), d_out=x.d_out.data_ptr(), dq=grads[0].data_ptr(),
               dk=grads[1].data_ptr(), dv=grads[2].data_ptr(), d_bias=d_bias.data_ptr() if d_bias is not None else None)

    def call(keep=(space, grads, segment_args, args, bias, d_bias)):
        library.check(lib.attn_run_backward(plan, c.byref(run), memory, size, stream()))
    return call, grads, lib.attn_plan_kernel(plan).decode(), size.value


def difference(cell, grads, wanted):
    """Of each gradient the largest difference, relative to the root of its mean square."""
    group = cell.heads // cell.heads_kv
    text = []
    for name, got, want in zip(("dq", "dk", "dv"), grads, wanted):
        want = (want if cell.fa3_only else want.transpose(1, 2)).float()
        if name != "dq" and group > 1:
            want = want.unflatten(2, (cell.heads_kv, group)).sum(3)
        text.append(f"{name} {((got.float() - want).abs().max() / want.square().mean().sqrt()).item():.3g}")
    return ", ".join(text)


def plot(path, png):
    """One chart for each head dimension and mask, with a group of bars for each length."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    result = json.loads(pathlib.Path(path).read_text())
    cells = [c for c in result["cells"] if not Cell(**c["cell"]).fa3_only]
    groups = {}
    for c in cells:
        at = c["cell"]
        heads = f"{at['heads']}/{at['heads_kv']} heads, " if at["heads"] != at["heads_kv"] else ""
        groups.setdefault((f"{heads}d{at['dim']}", "causal" if at["causal"] else "full"), []).append(c)
    columns = list(dict.fromkeys(dim for dim, _ in groups))
    names = {"libattn": "libattn, same bits in every run", "fa3": "FlashAttention-3", "cudnn": "cuDNN", "fa2": "FlashAttention-2"}
    figure, axes = plt.subplots(2, len(columns), figsize=(3.6 * len(columns), 6.4), sharey=True, squeeze=False, layout="constrained")
    for line, mask in enumerate(("full", "causal")):
        for column, dim in enumerate(columns):
            axis, rows = axes[line][column], sorted(groups.get((dim, mask), []), key=lambda c: c["cell"]["seqlen"])
            if not rows:
                axis.set_axis_off()
                continue
            for n, (name, label) in enumerate(names.items()):
                axis.bar([x + n / 5 for x in range(len(rows))], [c["tflops"].get(name, 0) for c in rows], 1 / 5, label=label, color=f"C{n}")
            axis.set_xticks([x + 0.3 for x in range(len(rows))], [str(c["cell"]["seqlen"]) for c in rows])
            axis.set_title(f"{dim}, {mask}")
            axis.grid(axis="y", linewidth=0.4)
            axis.set_axisbelow(True)
        axes[line][0].set_ylabel("TFLOP/s of 2.5 forwards")
    figure.suptitle(f"bf16 gradients, {result['gpu']['name']}, {result['date']}, commit {result['commit']}")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(png, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", action="append", metavar="[NAME=]PATH")
    parser.add_argument("--kernel", help="demand this one; {dim} stands for the head dimension")
    parser.add_argument("--packed", action="store_true", help="the cells of documents and windows; needs --fa3")
    parser.add_argument("--plot", nargs=2, metavar=("JSON", "PNG"), help="draw this result instead of measuring; needs matplotlib")
    parser.add_argument("--cells", nargs="*", default=[], help="only cells whose names have all of these words")
    parser.add_argument("--milliseconds", type=float, default=60)
    parser.add_argument("--settle", type=float, default=0, help="milliseconds of a contender before each of its measures")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", default="fa2,cudnn,fa3", help="those that are timed (%(default)s)")
    parser.add_argument("--no-peers", action="store_true", help="compare with FlashAttention-2, but do not time it")
    parser.add_argument("--softcap", type=float, default=0)
    parser.add_argument("--bias", choices=["read", "gradient"], help="with a bias [1, H, S, S] of q's type, and with its gradient")
    parser.add_argument("--fa3", metavar="FILE")
    parser.add_argument("--cudart", metavar="FILE")
    parser.add_argument("--deterministic", action="store_true", help="FlashAttention-3 too, which refuses head dimension 256 then")
    parser.add_argument("--out", help="JSON")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    if options.plot:
        plot(*options.plot)
        return
    if not options.lib or options.packed and not options.fa3:
        parser.error("--packed needs --fa3" if options.lib else "--lib is missing")
    builds = dict(x.split("=", 1) if "=" in x else ("libattn", x) for x in options.lib)
    libraries = {name: Libattn(path) for name, path in builds.items()}
    for library in libraries.values():
        library.lib.attn_plan_workspace.restype = c.c_size_t
    if options.cudart:
        c.CDLL(options.cudart, c.RTLD_GLOBAL)
    if options.fa3:
        torch.ops.load_library(options.fa3)
    nvml, results = Nvml(), []
    torch.manual_seed(1)
    for cell in packed_cells() if options.packed else all_cells():
        if not all(word in cell.name().split() for word in options.cells):
            continue
        x = Inputs(cell)
        calls, wanted = {}, None
        if not cell.fa3_only:
            calls["fa2"] = fa2(cell, x)
            wanted = calls["fa2"]()[:3]
            try:
                calls["cudnn"] = cudnn(cell, x)
            except RuntimeError as error:
                print(f"  cudnn: {str(error).splitlines()[0]}")
        kernels, agree = {}, {}
        if options.fa3:
            try:
                grads, calls["fa3"] = fa3(cell, x, options.deterministic)
                calls["fa3"]()
                if cell.fa3_only:
                    wanted = grads
                else:
                    agree["fa3"] = difference(cell, grads, wanted)
            except RuntimeError as error:
                calls.pop("fa3", None)
                print(f"  fa3: {str(error).splitlines()[0]}")
                if cell.fa3_only:
                    continue
        if options.no_peers or options.softcap or options.bias:
            calls = {}
        calls = {name: call for name, call in calls.items() if name in options.peers.split(",")}
        for name, library in libraries.items():
            call, grads, kernels[name], space = libattn(library, options.kernel and options.kernel.format(dim=cell.dim), cell, x, options)
            call()
            torch.cuda.synchronize()
            agree[name] = difference(cell, grads, wanted)
            calls[name] = call
        launches = {label: Launches([call], options.milliseconds, options.settle) for label, call in calls.items()}
        rounds, clocks = take_rounds(launches, options.rounds, nvml)
        row = {label: cell.flops() / statistics.median(us) / 1e6 for label, us in rounds.items()}
        print(f"{cell.name()}: " + ", ".join(f"{label} {t:.0f}" for label, t in row.items()) +
              f" TFLOP/s; {' '.join(set(kernels.values()))}; {'; '.join(f'{label}: {text}' for label, text in agree.items())}", flush=True)
        results.append({"cell": asdict(cell), "tflops": row, "microseconds": {k: statistics.median(v) for k, v in rounds.items()},
                        "kernels": kernels, "differences": agree, "softcap": options.softcap, "bias": options.bias, "clocks": clocks, "workspace": space})
        assert all(math.isfinite(t) for t in row.values())
        del x, calls, launches, wanted
        if options.out:
            measured.write(options.out, {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"), "commit": options.commit,
                                         "gpu": {"name": torch.cuda.get_device_name(), "driver": nvml.driver()}, "cuda": torch.version.cuda,
                                         "torch": torch.__version__, "rounds": options.rounds, "milliseconds": options.milliseconds,
                                         "settle": options.settle, "cells": results})


if __name__ == "__main__":
    main()
