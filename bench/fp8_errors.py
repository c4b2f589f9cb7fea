"""How the error of FP8 attention grows with the number of keys, libattn next to FlashAttention-3 and cuDNN.

    python3 bench/fp8_errors.py --lib build/release/lib/libattn.so --out docs/measured/NAME.json
    python3 bench/fp8_errors.py --plot docs/measured/NAME.json --png docs/measured/NAME.png

One head, head_dim 128, 256 queries; V of |N(0,1)| ("abs"), which adds up, and of N(0,1) ("normal"). All is rounded to e4m3,
and truth is float64 on the same codes: relative Frobenius errors. same_p: float64 sums of P as fwd_sm90_fp8_* round it,
with tiles of 128 keys from the last and the largest score so far (docs/numerics.md). libattn_precise: with
ATTN_FP8_PRECISE. "sigma": four heads of 1024 queries and keys, q, k and v of N(0, sigma^2).
"""
import argparse
import ctypes
import datetime
import json
import math
import pathlib

import measured

DIM, QUERIES, TILE_KEYS, OFFSET = 128, 256, 128, 8
F32 = 1  # of attn.h
LENGTHS = (1024, 8192, 32768, 131072)


def distance(a, b):
    return ((a - b).norm() / b.norm()).item()


def same_p(torch, scores, v):
    """Sums of the rounded P, exact; scores are in the log2 domain."""
    rows, keys = scores.shape
    most = torch.full((rows, 1), -math.inf, device="cuda", dtype=torch.double)
    out = torch.zeros(rows, DIM, device="cuda", dtype=torch.double)
    total = torch.zeros(rows, 1, device="cuda", dtype=torch.double)
    for first in range((keys - 1) // TILE_KEYS * TILE_KEYS, -1, -TILE_KEYS):
        tile = scores[:, first:first + TILE_KEYS]
        new = torch.maximum(most, tile.amax(1, keepdim=True))
        shrink = torch.exp2(most - new)
        p = torch.exp2(tile - new + OFFSET).float().to(torch.float8_e4m3fn).double()
        out = out * shrink + p @ v[first:first + TILE_KEYS]
        total = total * shrink + p.sum(1, keepdim=True)
        most = new
    return out / total


def libattn_f32(torch, library, q, k, v, flags=0):
    from contenders import TYPE_OF, Plan, Problem, Segment, make
    e4m3 = TYPE_OF[torch.float8_e4m3fn]
    segment = make(Segment, k_type=e4m3, v_type=e4m3, seqlen=k.shape[1])
    heads = q.shape[2]
    problem = make(Problem, batch=1, heads_q=heads, heads_kv=heads, head_dim=DIM, head_dim_v=DIM, seqlen_q=q.shape[1],
                   q_type=e4m3, out_type=F32, num_segments=1, segments=ctypes.pointer(segment), flags=flags)
    out = torch.empty(1, q.shape[1], heads, DIM, device="cuda")
    Plan(library, problem).call(q, k, v, out)()
    return out


def measure(options):
    import torch
    from contenders import FP8_PRECISE, Libattn, cudnn_fp8, fa3
    from peers import Cell
    torch.zeros(1, device="cuda")  # makes the context current that libattn then uses
    library = Libattn(str(pathlib.Path(options.lib).resolve()))
    result = {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"), "commit": options.commit,
              "device": torch.cuda.get_device_name(), "rows": []}
    for seqlen in LENGTHS:
        for kind in ("abs", "normal"):
            torch.manual_seed(seqlen)
            q, k, v = (torch.randn(1, rows, 1, DIM, device="cuda") for rows in (QUERIES, seqlen, seqlen))
            q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v.abs() if kind == "abs" else v))
            scores = q[0, :, 0].double() @ k[0, :, 0].double().T / math.sqrt(DIM)
            values = v[0, :, 0].double()
            truth = torch.softmax(scores, -1) @ values
            rounded = same_p(torch, scores * math.log2(math.e), values)

            def errors(out):
                torch.cuda.synchronize()
                out = out[0, :QUERIES, 0].double()
                return {"error": distance(out, truth), "to_same_p": distance(out, rounded),
                        "mean": ((out - truth).mean() / truth.abs().mean()).item()}
            row = {"seqlen": seqlen, "v": kind, "same_p": distance(rounded, truth),
                   "libattn": errors(libattn_f32(torch, library, q, k, v)),
                   "libattn_precise": errors(libattn_f32(torch, library, q, k, v, FP8_PRECISE))}
            queries = torch.zeros(1, seqlen, 1, DIM, device="cuda").to(torch.float8_e4m3fn)  # peers' cells are square
            queries[:, :QUERIES] = q
            for name, peer in (("fa3", fa3), ("cudnn", cudnn_fp8)):
                try:
                    row[name] = errors(peer(Cell("grid", 1, 1, 1, seqlen, DIM, False), queries, k, v)())
                except (ImportError, RuntimeError) as error:
                    row[name] = str(error)[:60]
            result["rows"].append(row)
            print(json.dumps(row), flush=True)
    result["sigma"] = []
    for sigma in (0.5, 1, 3):
        torch.manual_seed(1)
        q, k, v = ((torch.randn(1, 1024, 4, DIM, device="cuda") * sigma).to(torch.float8_e4m3fn) for _ in range(3))
        heads_first = [x.transpose(1, 2).double() for x in (q, k, v)]
        scores = heads_first[0] @ heads_first[1].transpose(2, 3) / math.sqrt(DIM)
        truth = (torch.softmax(scores, -1) @ heads_first[2]).transpose(1, 2)
        row = {"sigma": sigma}
        for name, call in (("libattn", lambda: libattn_f32(torch, library, q, k, v)),
                           ("libattn_precise", lambda: libattn_f32(torch, library, q, k, v, FP8_PRECISE)),
                           ("fa3", fa3(Cell("grid", 1, 4, 4, 1024, DIM, False), q, k, v))):
            try:
                row[name] = distance(call().double(), truth)
            except (ImportError, RuntimeError) as error:
                row[name] = str(error)[:60]
        result["sigma"].append(row)
        print(json.dumps(row), flush=True)
    if options.out:
        measured.write(options.out, result)


def plot(path, png):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    result = json.loads(pathlib.Path(path).read_text())
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for axis, kind, title in zip(axes, ("abs", "normal"), ("V = |N(0,1)|", "V = N(0,1)")):
        rows = [row for row in result["rows"] if row["v"] == kind]
        for name, label in (("fa3", "FlashAttention-3"), ("cudnn", "cuDNN"), ("libattn", "libattn"), ("libattn_precise", "libattn, precise")):
            shown = [row for row in rows if isinstance(row.get(name), dict)]
            axis.loglog([row["seqlen"] for row in shown], [row[name]["error"] for row in shown], marker="o", label=label)
        axis.loglog([row["seqlen"] for row in rows], [row["same_p"] for row in rows], "k:", label="exact sums of the rounded P")
        axis.set_title(title)
        axis.set_xlabel("keys")
    axes[0].set_ylabel("relative Frobenius error")
    axes[0].legend(fontsize=8)
    figure.suptitle(f"e4m3 forward, {result['device']}, {result['date']}")
    figure.tight_layout()
    figure.savefig(png, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", default="build/release/lib/libattn.so", help="a build of libattn.so")
    parser.add_argument("--out", help="write the result here")
    parser.add_argument("--commit", default="", help="recorded in the result")
    parser.add_argument("--plot", metavar="JSON", help="draw this result instead of measuring")
    parser.add_argument("--png", default="fp8_errors.png", help="where --plot draws; needs matplotlib")
    options = parser.parse_args()
    if options.plot:
        plot(options.plot, options.png)
    else:
        measure(options)


if __name__ == "__main__":
    main()
