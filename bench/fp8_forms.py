"""What a problem has beside masks of ranges, and what it costs in FP8: the plain kernels, softcap's kernels without any of theirs,
descales of blocks of K and V, block masks that are all FULL, out in fp8, and ATTN_FP8_PRECISE.

    python3 bench/fp8_forms.py --lib build/release/lib/libattn.so --out docs/measured/NAME.json
    python3 bench/fp8_forms.py --lib new=a/libattn.so --lib old=b/libattn.so --out docs/measured/NAME.json

e4m3, 16k tokens, heads * head_dim 2048; microseconds, contenders by turns as in peers.py. difference: of out to that of the
first build's plain kernel, relative Frobenius.
"""
import argparse
import datetime
import pathlib
import statistics

import measured


def forms(torch, plain, score, cell, inputs):
    """name -> calls of a build, of all that it has. score: the same build, with that kernel demanded."""
    from contenders import FP8_PRECISE, BlockMask
    made = {"": lambda: plain.forward(cell, inputs),
            " score": lambda: score.forward(cell, inputs),
            " descales of 64 keys": lambda: plain.forward(cell, inputs, descale_keys=64),
            " descales of 128 keys": lambda: plain.forward(cell, inputs, descale_keys=128),
            " out in fp8": lambda: plain.forward(cell, inputs, out_dtype=torch.float8_e4m3fn),
            " precise": lambda: plain.forward(cell, inputs, flags=FP8_PRECISE)}
    if not cell.causal:
        full = torch.ones(cell.seqlen, cell.seqlen, dtype=torch.uint8, device="cuda")
        made[" mask"] = lambda: plain.forward(cell, inputs, BlockMask(plain, full, 128))
    return {name: make()[0] for name, make in made.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", action="append", required=True, metavar="[LABEL=]PATH", help="a build of libattn.so; repeatable")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ms", type=float, default=60, help="work per measure in milliseconds")
    parser.add_argument("--settle", type=float, default=100, help="milliseconds of its own work before each of its measures")
    parser.add_argument("--out", help="write the result here, after every cell")
    parser.add_argument("--commit", default="", help="recorded in the result")
    options = parser.parse_args()
    import torch
    from contenders import Libattn
    from peers import all_cells, builds, random_inputs
    from timing import Launches, Nvml, take_rounds
    torch.zeros(1, device="cuda")  # makes the context current that libattn then uses
    nvml = Nvml()
    paths = {label: str(pathlib.Path(path).resolve()) for label, path in builds(options.lib).items()}
    libraries = {label: (Libattn(path), Libattn(path, "fwd_sm90_fp8_d{dim}_score")) for label, path in paths.items()}
    result = {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"), "commit": options.commit,
              "gpu": {"name": torch.cuda.get_device_name(), "driver": nvml.driver()}, "rounds": options.rounds, "cells": []}
    for cell in all_cells():
        if cell.group != "grid" or (cell.seqlen, cell.causal) not in ((1024, False), (8192, False), (8192, True)):
            continue
        inputs = random_inputs(torch, cell, True, True)[1]
        calls = {label + name: made for label, (plain, score) in libraries.items()
                 for name, made in forms(torch, plain, score, cell, inputs).items()}
        truth = next(iter(calls.values()))[0]().float().clone()
        row = {"cell": cell.name, "difference": {name: ((made[0]().float() - truth).norm() / truth.norm()).item()
                                                 for name, made in calls.items()}}
        rounds, row["clocks"] = take_rounds({name: Launches(made, options.ms, options.settle) for name, made in calls.items()},
                                            options.rounds, nvml)
        row["rounds_us"], row["us"] = rounds, {name: statistics.median(us) for name, us in rounds.items()}
        result["cells"].append(row)
        print(cell.name.ljust(16), *(f"{name} {us:.1f}" for name, us in row["us"].items()), sep="  ", flush=True)
        if options.out:
            measured.write(options.out, result)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
