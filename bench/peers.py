"""Times libattn next to whatever else is importable: the same tensors, one process, rounds interleaved.

    python3 bench/peers.py --lib build/release/lib/libattn.so --out docs/measured/NAME.json
    python3 bench/peers.py --lib new=a/libattn.so --lib old=b/libattn.so --only d128,causal,8k,16k
    python3 bench/peers.py --plot docs/measured/NAME.json --png docs/measured/NAME.png

Cells: "grid" has batch x seqlen = 16384 and heads x head_dim = 2048 for d64, d128, d256, full and causal, 512 to 16k;
"gqa" 64 query and 8 K/V heads, d128, 2k to 32k, batch 1; "latency" batch 1, 8 heads, 512, d64, f16. docs/bench.md tells
how a figure comes about. cuDNN (bf16; f16 in "latency") is the live anchor: a peer that is not importable appears as
cuDNN's time of this run times their ratio in published.json, and is marked "derived".
"""
import argparse
import datetime
import faulthandler
import json
import math
import pathlib
import statistics
import sys
from collections import Counter
from dataclasses import dataclass

import measured

HERE = pathlib.Path(__file__).parent
L2_BYTES = 50 << 20  # H100 and H200


# ---- cells ------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Cell:
    group: str
    batch: int
    heads: int
    heads_kv: int
    seqlen: int
    dim: int
    causal: bool
    dtype: str = "bf16"

    @property
    def tags(self):
        return {"group": self.group, "dim": f"d{self.dim}", "mask": "causal" if self.causal else "full",
                "seqlen": f"{self.seqlen // 1024}k" if self.seqlen >= 1024 else str(self.seqlen)}

    @property
    def name(self):
        heads = f" {self.heads}/{self.heads_kv}" if self.heads != self.heads_kv else ""
        return f"{self.tags['dim']} {self.tags['mask']} {self.tags['seqlen']}{heads}{'' if self.group != 'latency' else ' f16'}"

    @property
    def operations(self):
        return 4 * self.batch * self.heads * self.seqlen ** 2 * self.dim / (2 if self.causal else 1)


def all_cells():
    masks = (False, True)
    return ([Cell("grid", 16384 // s, 2048 // d, 2048 // d, s, d, causal)
             for d in (64, 128, 256) for causal in masks for s in (512, 1024, 2048, 4096, 8192, 16384)] +
            [Cell("gqa", 1, 64, 8, s, 128, causal) for causal in masks for s in (2048, 4096, 8192, 16384, 32768)] +
            [Cell("latency", 1, 8, 8, 512, 64, False, "f16")])


def select(cells, only):
    """Cells that have one of the wanted tags of every kind that `only` names: "d128,causal,8k,16k"."""
    kinds = {tag: kind for cell in cells for kind, tag in cell.tags.items()}
    wanted = {}
    for tag in filter(None, only.split(",")):
        if tag not in kinds:
            sys.exit(f"--only {tag}: not one of {' '.join(kinds)}")
        wanted.setdefault(kinds[tag], set()).add(tag)
    return [cell for cell in cells if all(cell.tags[kind] in tags for kind, tags in wanted.items())]


def derived_names(fp8):
    return ("cudnn_fp8", "fa3_fp8") if fp8 else ("fa2", "fa3")


def derived(cell, cudnn_us, name, published):
    """(us, host-bound) of a peer from cuDNN's live time and the published ratio of the two, or None."""
    for row in published["rows"]:
        if (row["group"], row["head_dim"], row["causal"]) == (cell.group, cell.dim, cell.causal) and \
                cell.seqlen in row["seqlens"] and name in row:
            at = row["seqlens"].index(cell.seqlen)
            bound = cell.group == "grid" and cell.seqlen in published["host_bound"].get(name, ())
            return cudnn_us * row["cudnn"][at] / row[name][at], bound
    return None


# ---- one cell ---------------------------------------------------------------------------------------------------------

def random_inputs(torch, cell, rotate, fp8):
    """Sets of q, k, v that are together larger than twice L2, or one; with fp8 also the same values rounded to e4m3."""
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[cell.dtype]
    shapes = [(cell.batch, cell.seqlen, heads, cell.dim) for heads in (cell.heads, cell.heads_kv, cell.heads_kv)]
    set_bytes = sum(math.prod(shape) for shape in shapes) * (1 if fp8 else 2)
    sets = math.ceil(2 * L2_BYTES / set_bytes) if rotate else 1
    torch.manual_seed(0)
    plain = [[torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes] for _ in range(sets)]
    return plain, [[x.to(torch.float8_e4m3fn) for x in one] for one in plain] if fp8 else None


def contenders(torch, cell, libraries, peers, plain, eight, row):
    """name -> calls, one per set of inputs; why others are not here goes into row["missing"]."""
    calls = {}

    def add(name, make_calls):
        try:
            made = make_calls()
            made[0]()
            calls[name] = made
        except Exception as error:  # every package has its own for "not on this machine" and "not this problem"
            row["missing"][name] = (str(error) or type(error).__name__).splitlines()[0]
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:  # nothing runs in this process after that
            sys.exit(f"{cell.name}: {name}: {str(error).splitlines()[0]}")

    def library_calls(label, library):
        made, row["kernels"][label] = library.forward(cell, eight or plain)
        return made

    for label, library in libraries.items():
        add(label, lambda: library_calls(label, library))
    for name, peer in peers.items():
        inputs = eight if name.endswith("_fp8") else plain
        add(name, lambda: [peer(cell, *one) for one in inputs])
    return calls


def measure_cell(torch, cell, libraries, peers, options, nvml, published):
    from contenders import ANCHOR
    from timing import Launches, take_rounds
    row = {**cell.__dict__, "name": cell.name, "kernels": {}, "missing": {}}
    # A short call is timed as a model's step would see it, its inputs just written.
    rotate = cell.group != "latency" and not options.warm
    plain, eight = random_inputs(torch, cell, rotate, options.fp8)
    row["input_sets"] = len(plain)
    calls = contenders(torch, cell, libraries, peers, plain, eight, row)
    truth = calls[ANCHOR][0]().float() if ANCHOR in calls else None
    if truth is not None:
        norm = truth.norm()
        row["difference_to_cudnn"] = {name: ((made[0]().float() - truth).norm() / norm).item()
                                      for name, made in calls.items() if name != ANCHOR}
    truth = None

    launches = {name: Launches(made, options.ms, options.settle) for name, made in calls.items()}
    rounds, row["clocks"] = take_rounds(launches, options.rounds, nvml)
    row["launches_per_graph"] = {name: one.count for name, one in launches.items()}
    row["rounds_us"] = rounds
    row["us"] = {name: statistics.median(times) for name, times in rounds.items()}
    row["derived"], row["host_bound"] = [], []
    if ANCHOR in rounds:
        for name in derived_names(options.fp8):
            found = None if name in rounds else derived(cell, 1, name, published)
            if found:
                rounds[name] = [us * found[0] for us in rounds[ANCHOR]]
                row["us"][name] = row["us"][ANCHOR] * found[0]
                row["derived"].append(name)
                row["host_bound"] += [name] if found[1] else []
    row["tflops"] = {name: cell.operations / us / 1e6 for name, us in row["us"].items()}
    row["ratio"] = {label: {peer: ratio(rounds[label], rounds[peer], options.take) for peer in rounds
                            if peer not in libraries} for label in libraries if label in rounds}
    rivals = [name for name in (("fa3_fp8", "cudnn_fp8") if options.fp8 else ("fa3", "cudnn")) if name in rounds]
    for label, ratios in row["ratio"].items():
        if rivals:
            best = [min(times) for times in zip(*(rounds[name] for name in rivals))]
            ratios["best"] = ratio(rounds[label], best, options.take)
    row["best_of"] = rivals
    return row


def ratio(ours, theirs, take):
    """Their time over ours, taken round by round: above 1 we are faster."""
    ratios = [their / our for our, their in zip(ours, theirs)]
    return min(ratios) if take == "worst" else statistics.median(ratios)


# ---- a run ------------------------------------------------------------------------------------------------------------

def show(row, labels, peers, header):
    """One line per cell: microseconds, then per build TFLOP/s and ratios, then clocks and differences."""
    shown = ("best", "cudnn_fp8", "cudnn") if "cudnn_fp8" in peers else ("best", "cudnn", "fa2")

    def text(name):
        if name not in row["us"]:
            return "-"
        return f"{row['us'][name]:.1f}" + ("~" if name in row["host_bound"] else "*" if name in row["derived"] else " ")
    if header:
        print(f"{'us':21}" + "".join(f"{name[-11:]:>12}" for name in labels + peers) +
              "".join(f" | {label[-10:]:>10} TFLOP/s" + "".join(f" {'/' + peer:>10}" for peer in shown) for label in labels) +
              " |  MHz     W  difference")
    line = f"{row['name']:21}" + "".join(f"{text(name):>12}" for name in labels + peers)
    for label in labels:
        ratios = row["ratio"].get(label, {})
        line += f" | {row['tflops'].get(label, math.nan):18.1f}" + "".join(
            f" {ratios.get(peer, math.nan):10.3f}" for peer in shown)
    clocks = row["clocks"].get(labels[0]) or {}
    line += f" | {clocks.get('sm_mhz', '-'):>4} {clocks.get('watts', '-'):>5}"
    for label in labels:
        difference = row.get("difference_to_cudnn", {}).get(label)
        if difference is not None:
            line += f"  {difference:.1e}" + ("" if difference < row["difference_bound"] else " WRONG")
        elif label in row["missing"]:
            line += f"  [{label}: {row['missing'][label][:160]}]"
    print(line, flush=True)


def summary(result):
    """Geometric mean and worst cell of every build against every peer, per group."""
    lines = []
    for label in result["libraries"]:
        for group in dict.fromkeys(row["group"] for row in result["cells"]):
            rows = [row for row in result["cells"] if row["group"] == group and label in row["ratio"]]
            for peer in dict.fromkeys(peer for row in rows for peer in row["ratio"][label]):
                here = [row for row in rows if peer in row["ratio"][label]]
                ratios = {row["name"]: row["ratio"][label][peer] for row in here}
                worst = min(ratios, key=ratios.get)
                lines.append({"library": label, "group": group, "peer": peer, "cells": len(ratios),
                              "geometric_mean": statistics.geometric_mean(ratios.values()), "worst": ratios[worst],
                              "worst_cell": worst, "derived_cells": sum(peer in row["derived"] for row in here),
                              "best_of": dict(Counter(" ".join(row["best_of"]) for row in here)) if peer == "best" else None})
    return lines


def drift(result):
    """FA2 / cuDNN of this run over the published ratio: how well derived figures can be trusted."""
    found = [row["published_fa2_drift"] for row in result["cells"] if row.get("published_fa2_drift")]
    return statistics.geometric_mean(found) if found else None


def builds(libs):
    """label -> path of `--lib [LABEL=]PATH`; without labels they are libattn, libattn2 and so on."""
    return dict(one.split("=", 1) if "=" in one else (f"libattn{at + 1 if at else ''}", one) for at, one in enumerate(libs))


def libraries_of(libs, files=None):
    """label -> (Libattn, the kernel that it is to take, "" for the plan's) of `--lib [LABEL=]PATH[@KERNEL]`. files: label -> device code in
    place of the build's."""
    from contenders import Libattn
    found = {}
    for label, lib in builds(libs).items():
        path, _, kernel = lib.partition("@")
        found[label] = Libattn(str(pathlib.Path(path).resolve()), kernel_file=(files or {}).get(label)), kernel
    return found


def add_options(parser, rounds, ms, settle):
    """What benchmarks of builds in turn have in common: `lib` for libraries_of(), how long they measure, and where the result goes."""
    parser.add_argument("--lib", action="append", required=True, metavar="[LABEL=]PATH[@KERNEL]",
                        help="a build of libattn.so, and the kernel it is to take instead of the plan's")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--ms", type=float, default=ms)
    parser.add_argument("--settle", type=float, default=settle)
    parser.add_argument("--out")
    parser.add_argument("--commit", default="")


def measure(options):
    import torch
    from contenders import ANCHOR, PEERS, PEERS_FP8, Libattn
    from timing import Nvml
    torch.zeros(1, device="cuda")  # makes the context current that libattn then uses
    paths = builds(options.lib)
    kernels = dict(one.split("=", 1) if "=" in one else (label, one) for one in options.kernel for label in paths)
    libraries = {label: Libattn(str(pathlib.Path(path).resolve()), kernels.get(label)) for label, path in paths.items()}
    known = PEERS_FP8 if options.fp8 else PEERS
    names = options.peers.split(",") if options.peers else [name for name in known if name != "flex"]
    for name in names:
        if name not in known:
            sys.exit(f"--peers {name}: not one of {' '.join(known)}")
    peers = {name: known[name] for name in dict.fromkeys([ANCHOR] + names)}
    published = json.loads((HERE / "published.json").read_text())
    result = {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"), "commit": options.commit,
              "gpu": {"name": torch.cuda.get_device_name()}, "cuda": torch.version.cuda, "torch": torch.__version__,
              "cudnn": torch.backends.cudnn.version(), "dtype": "f8_e4m3fn" if options.fp8 else "bf16",
              "libraries": {label: {"version": library.lib.attn_version().decode(), "kernel": library.kernel}
                            for label, library in libraries.items()},
              "rounds": options.rounds, "take": options.take, "inputs": "warm" if options.warm else "cold",
              "published": published["source"], "cells": []}
    try:
        nvml = Nvml()
        result["gpu"].update(driver=nvml.driver(), before=nvml.state())
    except (OSError, AttributeError) as error:
        nvml = None
        result["gpu"]["clocks"] = f"not measured: {error}"
        print(result["gpu"]["clocks"])

    labels = list(libraries)
    columns = list(dict.fromkeys(list(peers) + list(derived_names(options.fp8))))
    for cell in select(all_cells(), options.only):
        if options.fp8 and cell.group == "latency":
            continue
        faulthandler.dump_traceback_later(options.patience, exit=True)  # a kernel that hangs
        row = measure_cell(torch, cell, libraries, peers, options, nvml, published)
        faulthandler.cancel_dump_traceback_later()
        torch.cuda.empty_cache()
        row["difference_bound"] = 0.1 if options.fp8 else 0.01
        old = derived(cell, 1, "fa2", published)
        if old and "fa2" in row["us"] and "fa2" not in row["derived"]:
            row["published_fa2_drift"] = row["us"]["fa2"] / row["us"][ANCHOR] / old[0]
        result["cells"].append(row)
        show(row, labels, columns, header=len(result["cells"]) == 1)
        result["summary"] = summary(result)
        if options.out:
            measured.write(options.out, result)
    if not result["cells"]:
        sys.exit(f"--only {options.only}: no cell has all of these")
    if nvml:
        result["gpu"]["after"] = nvml.state()
    result["published_fa2_drift"] = drift(result)
    if options.out:
        measured.write(options.out, result)

    print("\n* derived from cuDNN's time of this run and the published ratio; ~ the same, from a figure that understates the peer")
    if result["published_fa2_drift"]:
        print(f"FA2 / cuDNN here over the published ratio: {result['published_fa2_drift']:.3f}")
    for one in result["summary"]:
        name = one["peer"]
        if one["best_of"]:
            name = "best of " + ", ".join(f"{names} ({count})" for names, count in one["best_of"].items())
        note = f", {one['derived_cells']} derived" if one["derived_cells"] else ""
        print(f"{one['library']} against {name}, {one['group']}, {one['cells']} cells{note}: geometric mean "
              f"{one['geometric_mean']:.3f}, worst {one['worst']:.3f} ({one['worst_cell']})")
    for name in dict.fromkeys(name for row in result["cells"] for name in row["missing"]):
        rows = [row for row in result["cells"] if name in row["missing"]]
        print(f"{name}: missing in {len(rows)} of {len(result['cells'])} cells: {rows[0]['missing'][name]}")


# ---- plot -------------------------------------------------------------------------------------------------------------

def plot(path, png):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    result = json.loads(pathlib.Path(path).read_text())
    cells = [row for row in result["cells"] if row["group"] == "grid"]
    dims = sorted({row["dim"] for row in cells})
    names = list(dict.fromkeys(name for row in cells for name in row["tflops"]))
    figure, axes = plt.subplots(2, len(dims), figsize=(4.4 * len(dims), 6.4), sharey=True, squeeze=False)
    for at, dim in enumerate(dims):
        for line, causal in enumerate((False, True)):
            rows = sorted((r for r in cells if (r["dim"], r["causal"]) == (dim, causal)), key=lambda r: r["seqlen"])
            axis = axes[line][at]
            width = 1 / (len(names) + 1)
            for n, name in enumerate(names):
                is_derived = any(name in r["derived"] for r in rows)
                axis.bar([x + n * width for x in range(len(rows))], [r["tflops"].get(name, 0) for r in rows], width,
                         label=name + (", derived" if is_derived else ""), color=f"C{n}",
                         alpha=0.45 if is_derived else 1, hatch="///" if is_derived else None)
            axis.set_xticks([x + (len(names) - 1) / 2 * width for x in range(len(rows))], [str(r["seqlen"]) for r in rows])
            axis.set_title(f"head_dim {dim}, {'causal' if causal else 'full'}")
    for line in axes:
        line[0].set_ylabel("TFLOP/s")
    axes[0][0].legend(fontsize=8)
    figure.suptitle(f"{result['dtype']} forward, {result['gpu']['name']}, {result['date']}")
    figure.tight_layout()
    figure.savefig(png, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", action="append", metavar="[LABEL=]PATH", help="a build of libattn.so; repeatable")
    parser.add_argument("--kernel", action="append", default=[], metavar="[LABEL=]NAME",
                        help="demand a kernel, of every build or of one; {dim} stands for the head size")
    parser.add_argument("--only", default="", metavar="TAGS", help="cells with these tags, such as d128,causal,8k,16k or gqa")
    parser.add_argument("--peers", default="", help="comma-separated; default all but flex, which compiles for long. cudnn always runs")
    parser.add_argument("--fp8", action="store_true", help="libattn and fp8 peers on e4m3 inputs; cuDNN bf16 stays the anchor")
    parser.add_argument("--warm", action="store_true", help="one set of inputs instead of several larger than L2 together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--take", default="median", choices=["median", "worst"], help="which round's ratio counts")
    parser.add_argument("--ms", type=float, default=300, help="work per measure in milliseconds")
    parser.add_argument("--settle", type=float, default=400, help="milliseconds of its own work before each of its measures")
    parser.add_argument("--patience", type=float, default=120, help="seconds that a cell may take before the run is given up")
    parser.add_argument("--out", help="write the result here, after every cell")
    parser.add_argument("--commit", default="", help="recorded in the result")
    parser.add_argument("--plot", metavar="JSON", help="draw this result instead of measuring")
    parser.add_argument("--png", help="draw the grid's cells into this file; needs matplotlib")
    options = parser.parse_args()
    options.lib = options.lib or ["build/release/lib/libattn.so"]
    if options.png and not (options.plot or options.out):
        parser.error("--png draws a result: of --plot, or of this run with --out")
    if not options.plot:
        measure(options)
    if options.plot or options.png:
        plot(options.plot or options.out, options.png or "peers.png")


if __name__ == "__main__":
    main()
