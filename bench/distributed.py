"""Times attn.distributed.

    python3 -m torch.distributed.run --nproc-per-node 4 bench/distributed.py --json OUT
    python3 bench/distributed.py --host --json OUT

The first times calls on the GPUs of a host under NCCL, beside those of one GPU; the second, on the CPU under gloo, what calls of tiny shapes cost.
A GPU's figure is the wall clock of a mean call, on the slowest rank. "host" is how long the call itself takes, without waiting for the GPU.
With --host "us" is wall clock and "cpu_us" the time of all threads of a process: the least mean of 15 rounds of 20 calls, on the slowest
rank. "python_calls": how many Python functions a call enters."""
import argparse
import cProfile
import datetime
import json
import os
import pstats
import tempfile
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import attn  # noqa: E402
import attn.distributed as ad  # noqa: E402
import measured  # noqa: E402
import timing  # noqa: E402

SCHEMES, COMPARE = ("all_gather", "ring", "ulysses"), ("always", "once")
HEADS, HEADS_KV, DIM = 32, 8, 128


def slowest(seconds, device):
    x = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.item()


# ---- GPUs ----------------------------------------------------------------------------------------

def timed(call, device, seconds=0.25, most=50):
    """(ms of a call, us until it returns to an idle GPU's host), equal numbers of calls on all ranks."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    calls = int(max(5, min(most, seconds / slowest(time.perf_counter() - begin, device))))
    dist.barrier()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    mean = slowest((time.perf_counter() - begin) / calls, device)
    host = float("inf")
    for _ in range(5):
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        host = min(host, time.perf_counter() - begin)
    return round(mean * 1e3, 4), round(slowest(host, device) * 1e6, 1)


def on_gpus(arguments):
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=40))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    nvml = timing.Nvml()
    report = {"date": time.strftime("%Y-%m-%d"), "commit": arguments.commit, "gpus": ranks,
              "gpu": {"name": torch.cuda.get_device_name(), "driver": nvml.driver(), "before": nvml.state()},
              "torch": torch.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version())),
              "nvlink_multicast": "off" if os.environ["NCCL_NVLS_ENABLE"] == "0" else "on", "shape": f"causal bf16, {HEADS}/{HEADS_KV} heads of {DIM}",
              "timed": "wall clock of a mean call on the slowest rank, no gradients; host_us: until a call returns, the GPU being idle",
              "cells": [], "decode": []}

    def random(*shape):
        return torch.randn(*shape, device=device, generator=generator).to(torch.bfloat16)

    def show(kind, cell):
        report[kind].append(cell)
        if rank == 0:
            print(kind, *(f"{name} {value}" for name, value in cell.items()), flush=True)

    for tokens in arguments.tokens:
        generator = torch.Generator(device).manual_seed(1)
        q, k, v = random(1, tokens, HEADS, DIM), random(1, tokens, HEADS_KV, DIM), random(1, tokens, HEADS_KV, DIM)
        alone_ms, _ = timed(lambda: attn.forward(q, k, v, causal=True), device)
        whole = attn.forward(q, k, v, causal=True)
        for scheme in SCHEMES:
            local = [ad.shard(x) for x in (q, k, v)]
            cell = {"tokens": tokens, "scheme": scheme, "alone_ms": alone_ms}
            for compare in COMPARE:
                def call():
                    return ad.attention(*local, causal=True, scheme=scheme, compare=compare)
                cell[f"{compare}_ms"], cell[f"{compare}_host_us"] = timed(call, device)
            cell["estimated_ms"] = round(1e3 * ad.estimate(ranks, tokens, heads_q=HEADS, heads_kv=HEADS_KV, head_dim=DIM)[scheme], 4)
            difference = (ad.attention(*local, causal=True, scheme=scheme).float() - ad.shard(whole).float()).abs().max().item()
            show("cells", {**cell, "largest_difference": slowest(difference, device)})
    generator = torch.Generator(device).manual_seed(1)
    batch, keys = 8, 65536
    k, v = (random(batch, keys // ranks, HEADS_KV, DIM) for _ in range(2))
    all_k, all_v = (ad.gather(x, layout="contiguous") for x in (k, v))
    q = random(batch, 1, HEADS, DIM)
    lengths = torch.full((batch,), keys // ranks, dtype=torch.int32, device=device)
    n = HEADS // ranks
    mine = q[:, :, rank * n:][:, :, :n].contiguous()
    cell = {"batch": batch, "keys": keys, "alone_ms": timed(lambda: attn.forward(q, all_k, all_v), device)[0]}
    for compare in COMPARE:
        def call():
            return ad.decode(mine, k, v, seqlens_kv=lengths, compare=compare)
        cell[f"{compare}_ms"], cell[f"{compare}_host_us"] = timed(call, device)
    show("decode", cell)
    report["gpu"]["after"] = nvml.state()
    if rank == 0 and arguments.json:
        measured.write(arguments.json, report)
    dist.destroy_process_group()


# ---- the host's part ------------------------------------------------------------------------------

def cases():
    """(name, function without arguments)."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 16, h, 16, generator=generator) for h in (8, 4, 4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    for compare in COMPARE:
        for scheme in SCHEMES:
            yield f"{scheme}, {compare}", lambda s=scheme, c=compare: ad.attention(q, k, v, causal=True, scheme=s, compare=c)
        for scheme in SCHEMES:
            yield f"{scheme} with gradients, {compare}", lambda s=scheme, c=compare: torch.autograd.grad(
                ad.attention(*leaves, causal=True, scheme=s, compare=c).sum(), leaves)
        yield f"decode, {compare}", lambda c=compare: ad.decode(q[:, :1], k, v, compare=c)


def host_rank(rank, ranks, folder, out):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    attn.set_num_threads(1)
    found = {}
    for name, call in cases():
        for _ in range(5):
            call()
        best = [float("inf")] * 2
        for _ in range(15):
            dist.barrier()
            begin = time.perf_counter(), time.process_time()
            for _ in range(20):
                call()
            best = [min(x, (now - then) / 20) for x, now, then in zip(best, (time.perf_counter(), time.process_time()), begin)]
        wall, busy = (slowest(x, "cpu") for x in best)
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(20):
            call()
        profile.disable()
        stats = pstats.Stats(profile)
        found[name] = {"us": round(wall * 1e6, 1), "cpu_us": round(busy * 1e6, 1),
                       "python_calls": sum(entry[1] for place, entry in stats.stats.items() if place[0] != "~") / 20}
        if rank == 0:
            print(f"{ranks} ranks, {name}:", ", ".join(f"{value} {what}" for what, value in found[name].items()), flush=True)
    if rank == 0 and out:
        measured.write(out, found)
    dist.destroy_process_group()


def on_host(arguments):
    report = {"date": time.strftime("%Y-%m-%d"), "commit": arguments.commit, "torch": torch.__version__,
              "shape": "16 tokens of a rank, 8/4 heads of 16, f32, causal", "ranks": {}}
    for ranks in 1, 2:
        with tempfile.TemporaryDirectory() as folder:
            children = []
            for rank in range(ranks):
                child = os.fork()
                if child == 0:
                    host_rank(rank, ranks, folder, f"{folder}/out")
                    os._exit(0)
                children.append(child)
            if any(os.waitpid(child, 0)[1] for child in children):
                raise SystemExit("a rank ended")
            with open(f"{folder}/out") as file:
                report["ranks"][str(ranks)] = json.load(file)
    if arguments.json:
        measured.write(arguments.json, report)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--tokens", type=lambda text: [int(x) for x in text.split(",")], default=[1024, 4096, 8192, 32768, 131072])
    parser.add_argument("--commit", default="")
    parser.add_argument("--json", metavar="OUT")
    arguments = parser.parse_args()
    (on_host if arguments.host else on_gpus)(arguments)


main()
