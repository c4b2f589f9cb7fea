"""Times block masks next to FlexAttention compiled: one process, rounds interleaved, bf16, B1 H16 S8192 d128.

    python3 bench/masks.py --lib build/release/lib/libattn.so --out docs/measured/NAME.json

TFLOP/s count 4 * head_dim per visible pair of query and key. libattn gets each mask as a dense tensor on the device, which
`mask_cuda` turns into blocks; how long that takes is a line of its own. "none" is libattn without a mask. What is compared of
libattn with itself, none, full and half empty, is measured once more, in rounds of its own, after one that does not count.
"""
import argparse
import datetime
import faulthandler
import pathlib
import sys

import measured
from peers import Cell, builds

BLOCK = 128


def documents(torch, seqlen):
    """The number of its document for each position: about 1000 positions each, uneven."""
    torch.manual_seed(1)
    ends = torch.cumsum(torch.randint(700, 1300, (seqlen // 700 + 1,)), 0)
    return torch.bucketize(torch.arange(seqlen), ends, right=True).cuda()


def masks(torch, seqlen):
    """name -> whether query i sees key j, as FlexAttention takes it; None: no mask."""
    document = documents(torch, seqlen)
    prefix = seqlen // 8
    images = [(seqlen // 8, seqlen // 8 + 1024), (seqlen // 2, seqlen // 2 + 1024)]
    torch.manual_seed(2)
    side = seqlen // BLOCK
    lottery = torch.rand(side, side).fill_diagonal_(2)  # each query sees its own block
    empty = lottery.flatten().argsort()[:side * side // 2]
    blocks = torch.ones(side * side, dtype=torch.bool).index_fill(0, empty, False).view(side, side).cuda()

    def text_and_images(b, h, i, j):
        sees = i >= j
        for begin, end in images:
            sees = sees | ((i >= begin) & (i < end) & (j >= begin) & (j < end))
        return sees
    return {
        "none": None,
        "full": lambda b, h, i, j: i >= 0,
        "causal": lambda b, h, i, j: i >= j,
        "window 1024": lambda b, h, i, j: (i >= j) & (i - j <= 1024),
        "documents": lambda b, h, i, j: (i >= j) & (document[i] == document[j]),
        "prefix": lambda b, h, i, j: (i >= j) | (j < prefix),
        "text and images": text_and_images,
        "half empty": lambda b, h, i, j: blocks[i // BLOCK, j // BLOCK],
    }


def build_microseconds(torch, build):
    """Of one build on the device, the median of 20, each between two events: the host's part overlaps other work."""
    kept, times = [build() for _ in range(3)], []
    filler = torch.zeros(1 << 28, device="cuda")
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        filler.zero_()  # a quarter of a millisecond, in which the host issues what follows
        begin.record()
        kept.append(build())  # freeing one would wait for the device
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


def measure(options):
    import torch
    from contenders import BlockMask, Libattn
    from timing import Launches, Nvml, take_rounds
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    torch.zeros(1, device="cuda")
    paths = builds(options.lib)
    libraries = {label: Libattn(str(pathlib.Path(path).resolve())) for label, path in paths.items()}
    nvml = Nvml()
    cell = Cell("masks", 1, options.heads, options.heads, options.seqlen, options.dim, False)
    shape = (1, cell.seqlen, cell.heads, cell.dim)
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    result = {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"), "commit": options.commit,
              "gpu": {"name": torch.cuda.get_device_name(), "driver": nvml.driver()}, "cuda": torch.version.cuda,
              "torch": torch.__version__, "cell": cell.__dict__, "block": BLOCK, "rounds": options.rounds, "masks": []}
    at = torch.arange(cell.seqlen, device="cuda")
    own = {}  # name -> launches of the first library

    def save():
        if options.out:
            measured.write(options.out, result)

    for name, visible in masks(torch, cell.seqlen).items():
        if options.only and name not in options.only.split(","):
            continue
        faulthandler.dump_traceback_later(options.patience, exit=True)  # a kernel that hangs
        dense = visible(0, 0, at[:, None], at[None, :]).expand(cell.seqlen, cell.seqlen) if visible else None
        dense = dense.to(torch.uint8).contiguous() if visible else None
        pairs = int(dense.sum()) if visible else cell.seqlen ** 2
        row = {"mask": name, "visible_pairs": pairs, "kernels": {}, "difference_to_flex": {}}
        calls = {}
        for label, library in libraries.items():
            mask = BlockMask(library, dense, BLOCK) if visible else None
            calls[label], row["kernels"][label] = library.forward(cell, [(q, k, v)], mask)
            if name == "causal":
                row.setdefault("build_us", {})[label] = build_microseconds(torch, lambda: BlockMask(library, dense, BLOCK))
        if options.flex:
            torch._dynamo.reset()
            compiled = torch.compile(flex_attention, dynamic=False)
            blocks = create_block_mask(visible, None, None, cell.seqlen, cell.seqlen) if visible else None
            calls["flex"] = [lambda: compiled(*heads_first, block_mask=blocks).transpose(1, 2)]
            truth = calls["flex"][0]().float()
            for label in libraries:
                row["difference_to_flex"][label] = ((calls[label][0]().float() - truth).norm() / truth.norm()).item()
        launches = {label: Launches(made, options.ms, options.settle) for label, made in calls.items()}
        if name in ("none", "full", "half empty"):
            own[name] = next(iter(launches.values()))
        rounds, row["clocks"] = take_rounds(launches, options.rounds, nvml)
        faulthandler.cancel_dump_traceback_later()
        row["rounds_us"] = rounds
        row["tflops"] = {label: 4 * cell.heads * cell.dim * pairs / max(times) / 1e6 for label, times in rounds.items()}
        if options.flex:
            row["ratio_to_flex"] = {label: min(theirs / ours for ours, theirs in zip(rounds[label], rounds["flex"]))
                                    for label in libraries}
        result["masks"].append(row)
        print(f"{name:16}" + "".join(f" {label} {max(rounds[label]):8.1f} us {row['tflops'][label]:6.1f} TFLOP/s;"
                                     for label in launches) +
              "".join(f" {label} / flex {ratio:.3f}" for label, ratio in row.get("ratio_to_flex", {}).items()) +
              f" {row['difference_to_flex']} {row['kernels']} {row.get('build_us', '')}", flush=True)
        save()
    if len(own) == 3:
        take_rounds(own, 1, nvml)  # not counted: who comes first finds the device cooler
        rounds, clocks = take_rounds(own, options.rounds, nvml)
        none, full, half = (rounds[name] for name in ("none", "full", "half empty"))
        result["own"] = {"rounds_us": rounds, "clocks": clocks, "none_to_full": [a / b for a, b in zip(none, full)],
                         "half_empty_to_full": [a / b for a, b in zip(half, full)]}
        print("none / full", *(f"{x:.3f}" for x in result["own"]["none_to_full"]), " half empty / full",
              *(f"{x:.3f}" for x in result["own"]["half_empty_to_full"]), flush=True)
        save()
    if not result["masks"]:
        sys.exit(f"--only {options.only}: no mask is called so")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", action="append", required=True, help="[LABEL=]path of a libattn.so; may be given again")
    parser.add_argument("--only", default="", help="comma-separated names of masks")
    parser.add_argument("--flex", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ms", type=float, default=300, help="of GPU time per contender and round")
    parser.add_argument("--settle", type=float, default=400, help="milliseconds of its own work before each of its measures")
    parser.add_argument("--patience", type=float, default=120, help="seconds for a mask before the run is given up")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out")
    measure(parser.parse_args())
