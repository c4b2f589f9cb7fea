"""Whole models of llama.cpp on the CPU, with ggml's attention and with libattn's: bench/dev/llama_tokens.cpp by type of the cache,
depth and threads. Each run has both sides by turns; figures are medians over the runs. Prints a table and writes JSON.

    python3 bench/llama.py --program ./llama_tokens --backend build/release/lib/libggml-attn.so --model MODEL.gguf
        --commit $(git rev-parse --short HEAD) --out docs/measured/NAME.json
"""
import argparse
import datetime
import itertools
import json
import pathlib
import statistics
import subprocess

PARTS = ("prompt_512", "token")
CLOCKS = ("processor_ms", "wall_ms")
SIDES = ("ggml", "libattn")


def measure(options, kind, threads, depth):
    """{side: {part: {clock: {"rounds": [...], "median": x}}}} in milliseconds."""
    found = {side: {part: {clock: [] for clock in CLOCKS} for part in PARTS} for side in SIDES}
    for _ in range(options.runs):
        command = [*options.prefix.split(), options.program, options.backend, options.model, kind, str(threads), str(depth),
                   str(options.rounds if depth == 0 else 1)]
        run = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for side, part, clock in itertools.product(SIDES, PARTS, CLOCKS):
            found[side][part][clock] += run[side][part][clock]["rounds"]
    return {side: {part: {clock: {"rounds": rounds, "median": round(statistics.median(rounds), 3)} for clock, rounds in clocks.items()}
                   for part, clocks in parts.items()} for side, parts in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="./llama_tokens")
    parser.add_argument("--backend", default="build/release/lib/libggml-attn.so")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prefix", default="", help="before the program, as 'chrt -f 50'")
    parser.add_argument("--types", default="f16,q8_0,q4_0")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--depths", default="0,4096")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3, help="of a run at depth 0; others have one")
    parser.add_argument("--device", default="", help="a name of the processor for the result")
    parser.add_argument("--note", default="")
    parser.add_argument("--commit")
    parser.add_argument("--out")
    options = parser.parse_args()
    cells = []
    print(f"{'':24}{'512 tokens, ms':>34}{'a token, ms':>34}")
    for kind, depth, threads in itertools.product(options.types.split(","), map(int, options.depths.split(",")),
                                                  map(int, options.threads.split(","))):
        sides = measure(options, kind, threads, depth)
        cells.append({"type": kind, "depth": depth, "threads": threads, **sides})
        line = f"{kind:5} depth {depth:4}, {threads} thr. "
        for part in PARTS:
            clock = CLOCKS[threads > 1]
            ggml, libattn = (sides[side][part][clock]["median"] for side in SIDES)
            line += f"{ggml:13.2f}{libattn:12.2f} {ggml / libattn:6.2f}x "
        print(line, flush=True)
        if options.out:
            result = {"date": f"{datetime.date.today()}", "commit": options.commit, "device": options.device,
                      "model": pathlib.Path(options.model).name, "command": f"{options.prefix} {pathlib.Path(options.program).name}".strip(),
                      "note": options.note, "cells": cells}
            pathlib.Path(options.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
