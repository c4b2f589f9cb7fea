"""Decode on the CPU: libattn next to PyTorch, on all cores.

    python3 bench/cpu_decode.py --commit $(git rev-parse --short HEAD) --out docs/measured/NAME.json

Contenders take turns in every round; a ratio is taken within a round, and the median over rounds counts. docs/bench.md.
"""
import argparse
import datetime
import statistics
import time

import torch

import attn
import measured


def cases():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for queries in (1, 4, 16):
            yield {"batch": 4, "heads": 32, "heads_kv": 8, "keys": 4096, "dim": 128, "queries": queries, "dtype": dtype}
        yield {"batch": 1, "heads": 8, "heads_kv": 1, "keys": 16384, "dim": 128, "queries": 1, "dtype": dtype}
        yield {"batch": 1, "heads": 32, "heads_kv": 32, "keys": 4096, "dim": 128, "queries": 1, "dtype": dtype}


def contenders(case):
    torch.manual_seed(0)
    kv = (case["batch"], case["keys"], case["heads_kv"], case["dim"])
    q = torch.randn(case["batch"], case["queries"], case["heads"], case["dim"], dtype=case["dtype"])
    k, v = (torch.randn(kv, dtype=case["dtype"]) for _ in range(2))
    plan, out = attn.Plan(q, k, v), torch.empty_like(q)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]

    def pytorch():
        return torch.nn.functional.scaled_dot_product_attention(*heads_first, enable_gqa=True).transpose(1, 2)
    difference = (plan(q, k, v, out=out).float() - pytorch().float()).norm() / pytorch().float().norm()
    return {"libattn": lambda: plan(q, k, v, out=out), "pytorch": pytorch}, difference.item(), k.nbytes + v.nbytes


def milliseconds(call, clock):
    start = clock()
    call()
    return (clock() - start) * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--cpu-time", action="store_true", help="count the process's time on cores: other work is running")
    parser.add_argument("--commit", default="")
    parser.add_argument("--device", default="", help="a name of the processor for the result")
    parser.add_argument("--out")
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    result = {"date": datetime.date.today().isoformat(), "device": options.device, "commit": options.commit, "torch": torch.__version__,
              "threads": torch.get_num_threads(), "clock": "process" if options.cpu_time else "wall", "cells": []}
    with torch.no_grad():
        for case in cases():
            calls, difference, size = contenders(case)
            rounds = {name: [] for name in calls}
            for turn in range(options.rounds):
                names = list(calls)
                at = turn % len(names)
                for name in names[at:] + names[:at]:
                    rounds[name].append(milliseconds(calls[name], clock))
            ms = {name: statistics.median(times) for name, times in rounds.items()}
            ratio = statistics.median(their / our for our, their in zip(rounds["libattn"], rounds["pytorch"]))
            row = {**case, "dtype": str(case["dtype"]).split(".")[1], "ms": ms, "ratio": ratio,
                   "gbytes_per_second": size / ms["libattn"] / 1e6, "difference_to_pytorch": difference}
            result["cells"].append(row)
            print(f"{row['dtype']:9} B{row['batch']} {row['heads']}/{row['heads_kv']} Sq{row['queries']:<3} Skv{row['keys']:<6} "
                  f"libattn {ms['libattn']:8.3f} ms {row['gbytes_per_second']:6.1f} GB/s  pytorch {ms['pytorch']:8.3f} ms  "
                  f"ratio {ratio:5.2f}  difference {difference:.1e}", flush=True)
    if options.out:
        measured.write(options.out, result)


if __name__ == "__main__":
    main()
