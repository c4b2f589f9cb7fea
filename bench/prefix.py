"""Times attention over a prefix that the batch shares: as a shared segment and as keys of each sequence, in rounds that take turns.

    python3 bench/prefix.py --lib build/release/lib/libattn.so
    python3 bench/prefix.py --lib new=a/libattn.so --lib old=b/libattn.so --batch 16 --kv e4m3 --out docs/measured/NAME.json

A figure is microseconds per launch of a graph of calls over caches that are larger than L2 together.
"""
import argparse
import ctypes as c
import datetime
import statistics

import measured
import torch
from contenders import BYTE_TYPES, TYPE_OF, Args, Libattn, Plan, Problem, Segment, SegmentArgs, make
from decode import BLOCK_BYTES, to_blocks
from timing import Launches, Nvml, take_rounds


class SharedSegment(c.Structure):
    _fields_ = Segment._fields_ + [("shared", c.c_int32)]


def calls_of(library, o, sets, flat):
    """A call for each of `sets`: q, k and v of the prefix and k and v of the sequences. flat: these have the prefix too."""
    kind = BYTE_TYPES.get(o.kv) or TYPE_OF[sets[0][1].dtype]
    segments = [make(SharedSegment, k_type=kind, v_type=kind, seqlen=length, shared=shared)
                for length, shared in (((o.prefix + o.own, 0),) if flat else ((o.prefix, 1), (o.own, 0)))]
    array = (SharedSegment * len(segments))(*segments)
    plan = Plan(library, make(Problem, batch=o.batch, heads_q=o.heads, heads_kv=o.heads_kv, head_dim=o.dim, seqlen_q=o.seqlen_q,
                              q_type=TYPE_OF[torch.bfloat16], num_segments=len(segments),
                              segments=c.cast(array, c.POINTER(Segment))))
    out = torch.empty_like(sets[0][0])

    def call(q, *caches):
        of_each = [make(SegmentArgs, k=k.data_ptr(), v=v.data_ptr()) for k, v in zip(caches[::2], caches[1::2])]
        args = make(Args, q=q.data_ptr(), out=out.data_ptr(), num_segments=len(of_each),
                    segments=(SegmentArgs * len(of_each))(*of_each))
        return lambda keep=(array, caches): (plan.run(args), out)[1]
    return [call(*one) for one in sets], plan.kernel


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", action="append", required=True, help="[LABEL=]PATH")
    for name, default in (("batch", 64), ("heads", 32), ("heads-kv", 8), ("dim", 128), ("prefix", 8192), ("own", 256),
                          ("seqlen-q", 1), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kv", choices=("bf16", "e4m3", *BLOCK_BYTES), default="bf16")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", help="JSON")
    o = parser.parse_args()
    kind = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}.get(o.kv, torch.uint8)

    def random(batch, length):
        x = torch.randn(batch, length, o.heads_kv, o.dim, device="cuda", dtype=torch.bfloat16)
        return to_blocks(torch, x, o.kv) if o.kv in BLOCK_BYTES else x.to(kind)
    torch.manual_seed(0)

    def shared_set():
        return (torch.randn(o.batch, o.seqlen_q, o.heads, o.dim, device="cuda", dtype=torch.bfloat16), random(1, o.prefix),
                random(1, o.prefix), random(o.batch, o.own), random(o.batch, o.own))
    shared = [shared_set() for _ in range(6)]

    def copied(prefix, own):
        return torch.cat([prefix.view(torch.uint8).expand(o.batch, -1, -1, -1), own.view(torch.uint8)], 1).view(kind)
    flat = [(q, copied(k, own_k), copied(v, own_v)) for q, k, v, own_k, own_v in shared[:1]]
    launches, kernels, outputs = {}, {}, {}
    for lib in o.lib:
        label, _, path = lib.rpartition("=")
        library = Libattn(path)
        for name, sets in (("shared", shared), ("flat", flat)):
            each = f"{label} {name}".strip()
            calls, kernels[each] = calls_of(library, o, sets, name == "flat")
            outputs[each] = calls[0]().float().clone()
            launches[each] = Launches(calls, 20, 10)
    want = outputs[next(x for x in outputs if x.endswith("flat"))]
    nvml = Nvml()
    rounds, clocks = take_rounds(launches, o.rounds, nvml)
    us = {label: statistics.median(times) for label, times in rounds.items()}
    for label, value in us.items():
        print(f"{label:16} {value:8.1f} us  {kernels[label]}  differs by {(outputs[label] - want).abs().max().item():.2e}")
    if o.out:
        problem = {name: value for name, value in vars(o).items() if name not in ("lib", "out", "commit", "rounds")}
        result = {"date": str(datetime.date.today()), "commit": o.commit, "problem": problem, "us": us, "rounds_us": rounds,
                  "kernels": kernels, "clocks": clocks,
                  "gpu": {"name": torch.cuda.get_device_name(), "driver": nvml.driver()}}
        measured.write(o.out, result)


if __name__ == "__main__":
    main()
