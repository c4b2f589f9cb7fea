"""Errors of libattn and of the peers against float64, on the same inputs: B1 H4 S1024, N(0, sigma^2) rounded to the type.

    python3 bench/accuracy.py --lib build/release/lib/libattn.so --out docs/measured/NAME.json

Prints the largest and the mean absolute error of each, and how many times those of cuDNN and of FlashAttention-2 libattn's are.
Inputs are made on the CPU, so that they are the same on every machine.
"""
import argparse
import datetime

import measured
from peers import Cell

COMPARED_WITH = ("cudnn", "fa2")


def reference(torch, q, k, v, causal):
    """Attention of [B, S, H, D] in float64."""
    q, k, v = (x.transpose(1, 2).double() for x in (q, k, v))
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if causal:
        rows, columns = scores.shape[2:]
        hidden = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril().logical_not()
        scores = scores.masked_fill(hidden, float("-inf"))
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)


def errors(out, want):
    away = (out.double() - want).abs()
    return {"max": away.max().item(), "mean": away.mean().item()}


def times(mine, theirs):
    return {name: mine[name] / theirs[name] for name in mine}


def inputs(torch, cell, dtype, sigma, seed, device):
    torch.manual_seed(seed)
    shape = (cell.batch, cell.seqlen, cell.heads, cell.dim)
    return [(torch.randn(shape) * sigma).to(dtype).to(device) for _ in range(3)]


def measure(options):
    import torch
    from contenders import DTYPES, PEERS, Libattn
    from timing import Nvml
    library = Libattn(options.lib, options.kernel)
    result = {"date": datetime.date.today().isoformat(), "commit": options.commit,
              "gpu": {"name": torch.cuda.get_device_name(), "driver": Nvml().driver()}, "cuda": torch.version.cuda,
              "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "sigma": options.sigma, "cells": []}
    for dtype in ("f16", "bf16"):
        for dim in (64, 128, 256):
            for causal in (False, True):
                cell = Cell("accuracy", 1, 4, 4, 1024, dim, causal, dtype)
                q, k, v = inputs(torch, cell, DTYPES[dtype][1], options.sigma, options.seed, "cuda")
                want = reference(torch, q, k, v, causal)
                calls, kernel = library.forward(cell, [(q, k, v)])
                found, missing = {"libattn": errors(calls[0](), want)}, {}
                for name in ("cudnn", "fa2", "fa3"):
                    try:
                        found[name] = errors(PEERS[name](cell, q, k, v)(), want)
                    except (ImportError, RuntimeError) as error:
                        missing[name] = str(error).splitlines()[0]
                row = {"dtype": dtype, "dim": dim, "causal": causal, "kernel": kernel, "errors": found, "missing": missing,
                       "times": {name: times(found["libattn"], found[name]) for name in COMPARED_WITH if name in found}}
                result["cells"].append(row)
                print(f"{dtype:5}{cell.tags['dim']:5}{cell.tags['mask']:7}" +
                      "; ".join(f"{name} {e['max']:.3e} {e['mean']:.3e}" for name, e in found.items()) +
                      "".join(f"; of {name} {t['max']:.3f} {t['mean']:.3f}" for name, t in row["times"].items()), flush=True)
                if options.out:
                    measured.write(options.out, result)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", required=True, help="path of a libattn.so")
    parser.add_argument("--kernel", help="to demand, in which {dim} and {dtype} are the cell's")
    parser.add_argument("--sigma", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out")
    measure(parser.parse_args())
