"""Times attn.distributed.

    python3 -m torch.distributed.run --nproc-per-node 4 bench/distributed.py --json OUT
    python3 -m torch.distributed.run --nproc-per-node 4 bench/distributed.py --timeline OUT
    python3 bench/distributed.py --host --json OUT

The first times calls on the GPUs of a host under NCCL, next to those of one GPU; the second writes which kernels the GPU of rank 0 runs when, for
docs/timeline.py; the third times, on the CPU under gloo, what calls of tiny shapes cost.
A GPU's figure is the wall clock of a mean call, on the slowest rank, the median of three rounds. "host" is how long the call itself takes, without waiting for the GPU,
"graph" a replay of the call as a CUDA graph. --only: which of cells (prefill), pieces, documents, decode and peer (PyTorch's context_parallel).
With --host "us" is wall clock and "cpu_us" the time of all threads of a process: the least mean of 15 rounds of 20 calls, on the slowest
rank. "python_calls": how many Python functions a call enters."""
import argparse
import cProfile
import datetime
import functools
import itertools
import json
import os
import pstats
import tempfile
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
for name, value in ("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"):  # NVLink multicast
    os.environ.setdefault(name, value)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import attn  # noqa: E402
import attn.distributed as ad  # noqa: E402
import measured  # noqa: E402
import timing  # noqa: E402

SCHEMES, COMPARE = ("all_gather", "ring", "ulysses"), ("always", "once")
IN_GRAPH = ad.Machine(call=0, piece=0)
WAYS = {**{s: (s, False) for s in SCHEMES}, "peers": ("all_gather", True)}  # (scheme, peers)
HEADS, HEADS_KV, DIM = 32, 8, 128


def slowest(seconds, device):
    x = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.item()


# ---- GPUs ----------------------------------------------------------------------------------------

def timed(call, device, seconds=0.1, most=50):
    """ms of a call, equal numbers of calls on all ranks."""
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
    return slowest((time.perf_counter() - begin) / calls, device) * 1e3


def host_us(call, device):
    """us until a call returns to an idle GPU's host."""
    host = float("inf")
    for _ in range(5):
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        host = min(host, time.perf_counter() - begin)
    torch.cuda.synchronize()
    return round(slowest(host, device) * 1e6, 1)


ROUNDS = 3


def medians(calls, device):
    """{name: ms} of {name: call}, each the median of rounds that time all of them: clocks drift."""
    found = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            found[name].append(timed(call, device))
    return {name: round(sorted(x)[ROUNDS // 2], 4) for name, x in found.items()}


def as_graph(call):
    """A function that replays call() as a CUDA graph; call() compares nothing."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay


def cells(alone, ways, device, compares=COMPARE):
    """Cells of ways = [(cell, make)], next to calls `alone` by name: times of make(compare)() as each of compare, and as a graph."""
    calls = dict(alone)
    for i, (cell, make) in enumerate(ways):
        try:
            for compare in compares:
                call = make(compare)
                call()
                cell[f"{compare}_host_us"] = host_us(call, device)
                calls[i, f"{compare}_ms"] = call
            calls[i, "graph_ms"] = as_graph(make("once"))
        except RuntimeError as error:  # such as GPUs that cannot read each other's memory
            cell["error"] = str(error)[:200]
    found = medians(calls, device)
    for i, (cell, _) in enumerate(ways):
        yield cell | {name: found[name] for name in alone} | {name[1]: ms for name, ms in found.items() if name[0] == i}


def random(generator, *shape):
    return torch.randn(*shape, device=generator.device, generator=generator).to(torch.bfloat16)


def of_heads(device, tokens, heads_kv=HEADS_KV):
    generator = torch.Generator(device).manual_seed(1)
    return [random(generator, 1, tokens, heads, DIM) for heads in (HEADS, heads_kv, heads_kv)]


def with_difference(cell, call, want, device):
    return cell if "error" in cell else cell | {"largest_difference": slowest((call().float() - want.float()).abs().max().item(), device)}


def prefill(arguments, device, ranks):
    for tokens in arguments.tokens:
        q, k, v = of_heads(device, tokens)
        whole = ad.shard(attn.forward(q, k, v, causal=True))
        local = [ad.shard(x) for x in (q, k, v)]
        calls, ways = [], []
        for scheme, peers, pieces in [(*way, n) for way in arguments.ways for n in [None] + arguments.pieces * way[1]]:
            calls.append(functools.partial(ad.attention, *local, causal=True, scheme=scheme, peers=peers, head_pieces=pieces))
            estimated = ad.estimate(ranks, tokens, heads_q=HEADS, heads_kv=HEADS_KV, head_dim=DIM, peers=peers, machine=IN_GRAPH, head_pieces=pieces)[scheme]
            cell = {"tokens": tokens, "scheme": scheme, "peers": peers, "head_pieces": pieces, "estimated_graph_ms": round(1e3 * estimated, 4)}
            ways.append((cell, lambda compare, call=calls[-1]: functools.partial(call, compare=compare)))
        alone = {"alone_ms": lambda: attn.forward(q, k, v, causal=True)}
        for cell, call in zip(cells(alone, ways, device, arguments.compare), calls):
            yield with_difference(cell, call, whole, device)


def pieces(arguments, device, ranks):
    """all_gather in other numbers of pieces of heads than estimate() chooses."""
    for tokens in (x for x in arguments.tokens if x <= 8192):
        q, k, v = of_heads(device, tokens)
        local, ways = [ad.shard(x) for x in (q, k, v)], []
        for n, peers in itertools.product(arguments.pieces, (False, True)):
            call = functools.partial(ad.attention, *local, causal=True, scheme="all_gather", head_pieces=n, peers=peers)
            ways.append(({"tokens": tokens, "head_pieces": n, "peers": peers}, lambda compare, call=call: functools.partial(call, compare=compare)))
        yield from cells({"alone_ms": lambda: attn.forward(q, k, v, causal=True)}, ways, device, arguments.compare)


def documents(arguments, device, ranks):
    """64k tokens in documents of random lengths."""
    tokens = 65536
    generator = torch.Generator().manual_seed(3)
    ends = [0]
    while ends[-1] < tokens:
        ends.append(min(tokens, ends[-1] + int(torch.randint(256, 16384, (1,), generator=generator))))
    q, k, v = (x[0] for x in of_heads(device, tokens))
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    longest = max(b - a for a, b in zip(ends, ends[1:]))
    alone = functools.partial(attn.forward, q, k, v, causal=True, cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=longest)
    whole, calls, ways = alone(), [], []
    for (scheme, peers), layout in itertools.product(arguments.ways, ("zigzag", "documents")):
        local = [ad.shard(x, dim=0, layout=layout, cu_seqlens=ends) for x in (q, k, v)]
        for n in arguments.pieces if scheme == "all_gather" else (None,):
            calls.append(functools.partial(ad.attention, *local, causal=True, cu_seqlens=ends, scheme=scheme, layout=layout, peers=peers, head_pieces=n))
            cell = {"tokens": tokens, "documents": len(ends) - 1, "layout": layout, "scheme": scheme, "peers": peers, "head_pieces": n}
            ways.append((cell, lambda compare, call=calls[-1]: functools.partial(call, compare=compare)))
    for cell, call in zip(cells({"alone_ms": alone}, ways, device, arguments.compare), calls):
        yield with_difference(cell, call, ad.shard(whole, dim=0, layout=cell["layout"], cu_seqlens=ends), device)


def of_decode(device, ranks, batch, keys):
    """(q of all heads, of this rank's, this rank's k and v, their lengths, the same over all keys)"""
    rank, n = dist.get_rank(), HEADS // ranks
    generator = torch.Generator(device).manual_seed(1)
    all_k, all_v = (random(generator, batch, keys, HEADS_KV, DIM) for _ in range(2))
    q = random(generator, batch, 1, HEADS, DIM)
    k, v = (x[:, rank * (keys // ranks):][:, :keys // ranks].contiguous() for x in (all_k, all_v))
    lengths = torch.full((batch,), keys // ranks, dtype=torch.int32, device=device)
    return q, q[:, :, rank * n:][:, :, :n].contiguous(), k, v, lengths, lambda: attn.forward(q, all_k, all_v)


DECODE_WAYS = ("split", 0, "by heads"), ("split", 1 << 30, "to all"), ("split", 0, "peers"), ("all", 0, "to all"), ("all", 0, "peers")


def decode(arguments, device, ranks):
    for batch, keys in arguments.decode:
        q, mine, k, v, lengths, whole = of_decode(device, ranks, batch, keys)
        alone = {"alone_ms": whole, "alone_graph_ms": as_graph(whole),
                 "shard_graph_ms": as_graph(lambda: attn.forward(q, k, v, seqlens_kv=lengths, out_dtype="f32", return_lse=True))}
        ways = []
        for heads, most, way in DECODE_WAYS:
            def make(compare, given=mine if heads == "split" else q, most=most, options={"heads": heads, "peers": way == "peers"}):
                def call():
                    ad._MOST_GATHERED = most
                    return ad.decode(given, k, v, compare=compare, seqlens_kv=lengths, **options)
                return call
            ways.append(({"batch": batch, "keys": keys, "heads": heads, "parts": way}, make))
        yield from cells(alone, ways, device, arguments.compare)
        del k, v, whole, alone, ways


def peer(arguments, device, ranks):
    """PyTorch's context_parallel over scaled_dot_product_attention, next to attention() with the same heads."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel
    mesh = init_device_mesh("cuda", (ranks,))
    for tokens in (x for x in arguments.tokens if x >= 8192):
        q, k, v = of_heads(device, tokens, HEADS)
        local = [ad.shard(x) for x in (q, k, v)]
        cell = {"tokens": tokens, "heads": f"{HEADS}/{HEADS}"}
        calls = {"alone_ms": lambda: attn.forward(q, k, v, causal=True)}
        for scheme, peers in arguments.ways:
            calls[f"{scheme}{' by peers' * peers}_ms"] = functools.partial(ad.attention, *local, causal=True, scheme=scheme, peers=peers, compare="once")
        cell |= medians(calls, device)
        for backend in SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION:
            theirs = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
            name = f"context_parallel, {backend.name.lower()}"
            try:
                with sdpa_kernel(backend), torch.no_grad(), context_parallel(mesh, buffers=theirs, buffer_seq_dims=[2] * 3, no_restore_buffers=set(theirs)):
                    def call():
                        return torch.nn.functional.scaled_dot_product_attention(*theirs, is_causal=True)
                    cell |= {f"{name}: ms": medians({name: call}, device)[name]}
            except Exception as error:
                cell[f"{name}: error"] = str(error)[:200]
        yield cell


GPU_PARTS = {"cells": prefill, "pieces": pieces, "documents": documents, "decode": decode, "peer": peer}


def begun(arguments):
    """(device, rank, ranks)"""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=40), device_id=device)
    return device, dist.get_rank(), dist.get_world_size()


def facts(arguments, ranks):
    return {"date": time.strftime("%Y-%m-%d"), "commit": arguments.commit, "gpus": ranks, "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())), "nvlink_multicast": "off" if os.environ["NCCL_NVLS_ENABLE"] == "0" else "on",
            "shape": f"causal bf16, {HEADS}/{HEADS_KV} heads of {DIM}"}


def on_gpus(arguments):
    device, rank, ranks = begun(arguments)
    nvml = timing.Nvml()
    report = {**facts(arguments, ranks), "gpu": {"name": torch.cuda.get_device_name(), "driver": nvml.driver(), "before": nvml.state()},
              "timed": "wall clock of a mean call on the slowest rank, median of 3 rounds over all calls, no gradients; host_us: until a call returns, the GPU being idle; "
                       "graph_ms: replays of a CUDA graph of the call; alone: one GPU; shard: the kernels of one rank alone"}
    for name in arguments.only:
        report[name] = []
        for cell in GPU_PARTS[name](arguments, device, ranks):
            report[name].append(cell)
            if rank == 0:
                print(name, *(f"{what} {value}" for what, value in cell.items()), flush=True)
                report["gpu"]["after"] = nvml.state()
                if arguments.json:
                    measured.write(arguments.json, report)
    torch.cuda.synchronize()
    dist.barrier()
    os._exit(0)  # graphs would have to end before the group


# ---- what the GPU does when ---------------------------------------------------------------------------

def kind(name):
    """What a kernel or copy is."""
    for word, what in (("AllGather", "nccl"), ("SendRecv", "nccl"), ("nccl", "nccl"), ("fwd_", "attention"), ("decode_", "attention"),
                       ("merge", "merge"), ("barrier", "meeting"), ("CatArray", "copy"), ("copy", "copy"), ("Memcpy", "copy"), ("Memset", "copy")):
        if word in name:
            return what
    return "other"


def entries_of(replay, rank):
    """[kind, stream, begin us, us, name] of what a replay runs on the GPU of rank 0; None on others."""
    for _ in range(3):
        replay()
    torch.cuda.synchronize()
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            with torch.profiler.record_function("the call"):
                replay()
        torch.cuda.synchronize()
    if rank:
        return None
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        with open(file.name) as trace:
            events = json.load(trace)["traceEvents"]
    called = max(e["ts"] for e in events if e.get("name") == "the call" and e.get("cat") == "user_annotation")
    found = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and e["ts"] > called]
    begin = min(e["ts"] for e in found)
    return [[kind(e["name"]), e["args"]["stream"], round(e["ts"] - begin, 1), round(e["dur"], 1), e["name"].partition("(")[0][:60]]
            for e in sorted(found, key=lambda e: e["ts"])]


def timeline(arguments):
    """A replay of each scheme, and of decode, as a CUDA graph."""
    device, rank, ranks = begun(arguments)
    tokens, (batch, keys) = arguments.tokens[-1], arguments.decode[-1]
    local = [ad.shard(x) for x in of_heads(device, tokens)]
    report = {**facts(arguments, ranks), "gpu": torch.cuda.get_device_name(), "tokens": tokens, "decoded": f"{batch} x {keys}",
              "entry": "kind, stream, begin us, us, name", "schemes": {}, "decode": {}}
    calls = [("schemes", scheme + " by peers" * peers, functools.partial(ad.attention, *local, causal=True, scheme=scheme, peers=peers, compare="once"))
             for scheme, peers in arguments.ways]
    q, mine, k, v, lengths, _ = of_decode(device, ranks, batch, keys)
    calls += [("decode", f"{heads} by {'peers' if peers else 'NCCL'}", functools.partial(
        ad.decode, mine if heads == "split" else q, k, v, heads=heads, peers=peers, seqlens_kv=lengths, compare="once"))
        for heads, peers in itertools.product(("split", "all"), (False, True))]
    for part, name, call in calls:
        report[part][name] = entries = entries_of(as_graph(call), rank)
        if rank == 0:
            by_kind = {}
            for what, _, _, us, _ in entries:
                by_kind[what] = round(by_kind.get(what, 0) + us, 1)
            print(name, len(entries), "entries, end", max(e[2] + e[3] for e in entries), by_kind, flush=True)
            measured.write(arguments.timeline, report)
    torch.cuda.synchronize()
    dist.barrier()
    os._exit(0)


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
    parser.add_argument("--only", type=lambda text: text.split(","), default=["cells", "documents", "decode"], help=", ".join(GPU_PARTS))
    parser.add_argument("--decode", type=lambda text: [tuple(map(int, x.split("x"))) for x in text.split(",")], metavar="BATCHxKEYS,...",
                        default=[(1, 1 << 20), (8, 65536), (64, 8192)])
    parser.add_argument("--compare", type=lambda text: text.split(","), default=COMPARE, help=", ".join(COMPARE))
    parser.add_argument("--ways", type=lambda text: [WAYS[x] for x in text.split(",")], default=[*WAYS.values()],
                        help=f"of cells, documents and the time line: {', '.join(WAYS)}")
    parser.add_argument("--pieces", type=lambda text: [tuple(map(int, x.split("+"))) if "+" in x else int(x) for x in text.split(",")], default=[1, 2, (1, 3, 4), 4],
                        help="of heads, for pieces, documents, and cells by peers: 2, or 1+3+4 of their K/V heads")
    parser.add_argument("--timeline", metavar="OUT")
    parser.add_argument("--commit", default="")
    parser.add_argument("--json", metavar="OUT")
    arguments = parser.parse_args()
    (on_host if arguments.host else timeline if arguments.timeline else on_gpus)(arguments)


main()
