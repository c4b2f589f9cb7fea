"""Times a step of a server: 127 single tokens and a chunk of 2048, each over 8192 keys in pages, in one call and in two.

    python3 bench/step.py --lib build/release/lib/libattn.so --out docs/measured/NAME.json
    python3 bench/step.py --lib new=a/libattn.so --lib old=b/libattn.so --tokens 31

A figure is microseconds per launch of a graph. 32/8 heads of 128, bf16, causal, pages of 64.
"""
import argparse
import ctypes as c
import datetime
import math
import pathlib
import statistics

import torch
import measured
from contenders import CAUSAL, TYPE_OF, Args, Libattn, Plan, Problem, Segment, SegmentArgs, make
from peers import builds
from timing import Launches, Nvml, take_rounds

KEYS, HEADS, HEADS_KV, DIM, PAGE = 8192, 32, 8, 128, 64


class Step:
    """Sequences with this many queries each, against the first of the caches from `first` on."""

    def __init__(self, library, cache, table, q, lengths, first):
        batch, total = len(lengths), sum(lengths)
        self.q, self.out = q, torch.empty_like(q)
        ends = torch.tensor([0, *lengths]).cumsum(0)
        self.cu = ends.to(device="cuda", dtype=torch.int32)
        self.table = table[first:first + batch].contiguous()
        kind = TYPE_OF[torch.bfloat16]
        segment = make(Segment, k_type=kind, v_type=kind, layout=2, num_pages=cache[0].shape[0], page_size=PAGE,
                       max_pages=KEYS // PAGE)
        self.plan = Plan(library, make(
            Problem, batch=batch, heads_q=HEADS, heads_kv=HEADS_KV, head_dim=DIM, seqlen_q=max(lengths), total_q=total,
            q_layout=1, q_type=kind, num_segments=1, segments=c.pointer(segment), flags=CAUSAL))
        self.segment = make(SegmentArgs, k=cache[0].data_ptr(), v=cache[1].data_ptr(), block_table=self.table.data_ptr())
        self.args = make(Args, q=q.data_ptr(), out=self.out.data_ptr(), cu_seqlens_q=self.cu.data_ptr(), num_segments=1,
                         segments=c.pointer(self.segment))

    def __call__(self):
        self.plan.run(self.args)
        return self.out


def expected(cache, table, q, sequence):
    """Attention in float32 of the last queries of a sequence."""
    k, v = (x[table[sequence].long()].reshape(KEYS, HEADS_KV, DIM).float().repeat_interleave(HEADS // HEADS_KV, 1)
            for x in cache)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) / math.sqrt(DIM)
    seen = torch.arange(KEYS, device="cuda")[None] <= torch.arange(len(q), device="cuda")[:, None] + KEYS - len(q)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", action="append", required=True, metavar="[LABEL=]PATH",
                        help="a build of libattn.so; of several, tokens and chunk alone are timed with the first")
    parser.add_argument("--tokens", type=int, default=127)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    tokens, chunk = options.tokens, options.chunk
    libraries = {label: Libattn(str(pathlib.Path(path).resolve())) for label, path in builds(options.lib).items()}
    nvml = Nvml()
    torch.manual_seed(0)
    pages = (tokens + 1) * KEYS // PAGE
    table = torch.randperm(pages, device="cuda", dtype=torch.int32).view(tokens + 1, -1).contiguous()
    cache = [torch.randn(pages, PAGE, HEADS_KV, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    q = torch.randn(tokens + chunk, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    first = next(iter(libraries.values()))
    in_one = {f"one call, {label}" if len(libraries) > 1 else "one call":
              Step(library, cache, table, q, [1] * tokens + [chunk], 0) for label, library in libraries.items()}
    steps = {**in_one, "tokens": Step(first, cache, table, q[:tokens], [1] * tokens, 0),
             "chunk": Step(first, cache, table, q[tokens:], [chunk], tokens)}
    errors = {}
    for name, step in steps.items():
        out = step().float()
        for sequence, rows in ((0, slice(0, 1)), (tokens, slice(-chunk, None))):
            if (name == "tokens" and sequence) or (name == "chunk" and not sequence):
                continue
            want = expected(cache, table, step.q[rows], sequence)
            errors[f"{name}, sequence {sequence}"] = ((out[rows] - want).norm() / want.norm()).item()
    assert max(errors.values()) < 0.01, errors

    def both():
        steps["tokens"]()
        return steps["chunk"]()
    calls = {**steps, "two calls": both}
    launches = {name: Launches([call], 100) for name, call in calls.items()}
    rounds, clocks = take_rounds(launches, options.rounds, nvml)
    us = {name: statistics.median(times) for name, times in rounds.items()}
    print(f"{tokens} tokens, {chunk} queries, over {KEYS} keys")
    for name, time in us.items():
        print(f"{name:16} {time:8.1f} us  {steps[name].plan.kernel if name in steps else ''}")
    for name in in_one:
        alone = us["tokens"] + us["chunk"]
        print(f"{name} / two calls {us[name] / us['two calls']:.3f}, / sum {us[name] / alone:.3f}")
    print("errors " + " ".join(f"{e:.1e}" for e in errors.values()))
    if options.out:
        measured.write(options.out, {
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"), "commit": options.commit,
            "tokens": tokens, "chunk": chunk, "keys": KEYS,
            "gpu": {"name": torch.cuda.get_device_name(), "driver": nvml.driver()}, "cuda": torch.version.cuda,
            "kernels": {name: step.plan.kernel for name, step in steps.items()}, "errors": errors, "rounds_us": rounds,
            "us": us, "clocks": clocks})
