"""Checks attn.distributed under NCCL on the GPUs of a host, against float64 formulas.

    PYTHONPATH=build/release/python python3 tests/device/distributed.py 4 [PART ...] [--repeats 1000] [--json OUT]

Parts run one after the other in the same processes, one a GPU, then those in which a rank ends or does not call, at the same time, each in processes of
its own. All are ended after 120 s a part. Needs PyTorch. Exit code: 1 if a part failed.

masks        out and lse of every scheme, layout and mask, bf16 with a float32 result, and the same calls on one GPU; also for weights that
             bf16 holds exactly: then within 1e-5
gradients    dq, dk, dv and the sinks', bf16
decode       caches by tokens and by pages, every way of partial results; several queries and windows, which need positions
graphs       attention and decode as CUDA graphs: the bits of plain calls, also with other data
repeats      equal calls give equal bits: forward and gradients of each scheme, also by peers, a tenth as often with layout documents; decode
disagree     ranks that differ, or refuse: an error on every rank, and the group still works
dies         a rank ends where the others wait for it: synchronize() raises on them, also after a replay of a graph
absent       a rank lives and does not call
watchdog     what torch alone does: no synchronize(), rank 1 ends
"""
import argparse
import contextlib
import datetime
import itertools
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))
for variable, off in ("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"):  # NVLink multicast
    os.environ.setdefault(variable, off)
LIMIT, TIME_OUT = 120, 15  # seconds of a part, and of its group
PARTS = ("masks", "gradients", "decode", "graphs", "repeats", "disagree", "dies", "absent", "watchdog")
ENDS = {"dies", "watchdog"}  # parts in which rank 1 ends
ALONE = {*ENDS, "absent"}  # parts with processes of their own
SCHEMES, LAYOUTS = ("all_gather", "ring", "ulysses"), ("zigzag", "contiguous", "documents")
FORWARD = [*((s, False) for s in SCHEMES), ("all_gather", True)]  # (scheme, peers)
TOKENS, HEADS, HEADS_KV, DIM = 256, 8, 2, 128  # of a rank


# ---- on the ranks --------------------------------------------------------------------------------

def cases(total, device):
    """(name, options, whether each query sees each key, options of the formula)."""
    import torch
    import attn
    from test_distributed import band
    below = band(total, -1, 0)
    yield "full", {}, torch.ones(total, total, dtype=torch.bool), {}
    yield "causal", {"causal": True}, below, {}
    yield "window", {"causal": True, "window": (100, -1)}, band(total, 100, 0), {}
    yield "wide", {"window": (37, 61)}, band(total, 37, 61), {}
    yield "right", {"window": (-1, 45)}, band(total, -1, 45), {}
    yield "softcap", {"causal": True, "softcap": 15.0}, below, {"softcap": 15.0}
    sinks = torch.linspace(-2, 3, HEADS)
    yield "sinks", {"causal": True, "window": (20, 0), "sinks": sinks}, band(total, 20, 0), {"sinks": sinks.double()}
    bits = torch.arange(total * total).reshape(total, total) * 2654435761 % 7 < 4
    bits |= torch.eye(total, dtype=torch.bool)
    mask = attn.BlockMask.from_dense(bits, block_size=128)
    yield "block mask", {"block_mask": mask}, bits, {}
    yield "block mask causal", {"block_mask": mask, "causal": True, "window": (300, -1)}, bits & band(total, 300, 0), {}
    kinds = (torch.arange(total // 64 * (total // 64)).reshape(total // 64, -1) % 3).to(torch.uint8)
    by_kind = kinds.repeat_interleave(64, 0).repeat_interleave(64, 1)
    yield "kinds", {"block_mask": attn.BlockMask.from_kinds(kinds.cpu().numpy(), total, total, block_size=64, device=device)}, \
        (by_kind == 2) | (by_kind == 1) & below, {}
    ends = sorted({0, 1, 2, total // 3, total // 3 + 5, total - 70, total - 2})
    number = torch.bucketize(torch.arange(total), torch.tensor(ends[1:]), right=True)
    same = (number[:, None] == number) & (torch.arange(total) < ends[-1])
    yield "documents", {"cu_seqlens": ends, "causal": True}, same & below, {}
    yield "documents full", {"cu_seqlens": ends}, same, {}
    yield "documents window", {"cu_seqlens": ends, "window": (40, 20)}, same & band(total, 40, 20), {}


def tensors(total, device, batch=2, heads=HEADS, heads_kv=HEADS_KV, exact=False):
    """q, k, v. exact: q and k of -1, 0 and 1, so that with exact_scale() all weights are powers of two, which bf16 holds."""
    import torch
    g = torch.Generator(device).manual_seed(5)
    found = [torch.randn(batch, total, h, DIM, generator=g, device=device) for h in (heads, heads_kv, heads_kv)]
    if exact:
        found[:2] = ((x > 1.15).to(x.dtype) - (x < -1.15).to(x.dtype) for x in found[:2])
    return [x.to(torch.bfloat16) for x in found]


def exact_scale(options):
    """Options that make scores multiples of log 2, with a softcap by those of which it leaves 0 and its limits."""
    softcap = {"softcap": 4 * math.log(2)} if "softcap" in options else {}
    return {"scale": math.log(2) * (64 if softcap else 1), **softcap}


def largest(x):
    import torch
    return x[torch.isfinite(x)].abs().max().item() if x.numel() else 0.0


def variants(packed):
    """(scheme, layout, peers), layout documents only for documents"""
    found = [(s, y, False) for s, y in itertools.product(SCHEMES, LAYOUTS)] + [("all_gather", y, True) for y in LAYOUTS]
    return [x for x in found if packed or x[1] != "documents"]


class Notes:
    """What a rank found: facts, and failures, which do not stop it, because others wait for it."""

    def __init__(self):
        self.facts, self.failures = {}, []

    @contextlib.contextmanager
    def of(self, what):
        import attn
        try:
            yield
        except attn.Unsupported as error:  # on every rank
            self.facts.setdefault("declined", []).append(f"{what}: {error}"[:200])
        except (AssertionError, attn.InvalidArgument) as error:
            self.failures.append(f"{what}: {error}"[:300])

    def least(self, name, value):
        self.facts[name] = max(self.facts.get(name, 0), value)


def masks(rank, ranks, device, notes, arguments):
    import torch
    import attn
    import attn.distributed as ad
    from test_distributed import dense
    total = TOKENS * ranks
    for (name, options, visible, rules), exact in itertools.product(cases(total, device), (True, False)):
        packed = "cu_seqlens" in options
        dim = 0 if packed else 1
        if exact:
            options, rules = {**options, **exact_scale(options)}, {**rules, **exact_scale(options)}
        data, allowed, allowed_lse = ("exact weights", 1e-5, 1e-5) if exact else ("random", 0.02, 2e-3)
        q, k, v = tensors(total, device, batch=1 if packed else 2, exact=exact)
        want, want_lse = dense(q.double(), k.double(), v.double(), visible, **rules)
        alone = None
        if not packed:
            alone = attn.forward(q, k, v, out_dtype="f32", **options)
            notes.least(f"{data}: one GPU: out", largest(alone - want))
        cu = options.get("cu_seqlens")
        for scheme, layout, peers in variants(packed):
            what = f"{name} {scheme} {layout}{' peers' if peers else ''}, {data}"
            with notes.of(what):
                local = [ad.shard(x[0] if packed else x, layout=layout, dim=dim, cu_seqlens=cu) for x in (q, k, v)]
                out, lse = ad.attention(*local, scheme=scheme, layout=layout, peers=peers, return_lse=True, out_dtype=torch.float32, **options)
                if packed:
                    out, lse = out[None], lse[None]
                mine, mine_lse = ad.shard(want, layout=layout, cu_seqlens=cu), ad.shard(want_lse, layout=layout, dim=2, cu_seqlens=cu)
                assert torch.equal(torch.isfinite(lse), torch.isfinite(mine_lse)), "rows without keys"
                error, of_lse = largest(out - mine), largest(lse - mine_lse)
                notes.least(f"{data}: {scheme}: out", error)
                notes.least(f"{data}: {scheme}: lse", of_lse)
                if alone is not None:
                    notes.least(f"{data}: {scheme}: out - one GPU's", largest(out - ad.shard(alone, layout=layout)))
                assert error < allowed and of_lse < allowed_lse, f"errors {error:.2g}, lse {of_lse:.2g}"
                notes.facts["cases"] = notes.facts.get("cases", 0) + 1


def gradients(rank, ranks, device, notes, arguments):
    import torch
    import torch.distributed as dist
    import attn.distributed as ad
    from test_distributed import dense
    total = TOKENS * ranks
    for name, options, visible, rules in cases(total, device):
        packed = "cu_seqlens" in options
        dim = 0 if packed else 1
        given = tensors(total, device, batch=1 if packed else 2)
        whole = [x.double().requires_grad_() for x in given]
        sinks = options.get("sinks")
        if sinks is not None:
            rules = {**rules, "sinks": sinks.double().requires_grad_()}
        want, _ = dense(*whole, visible, **rules)
        g = torch.Generator(device).manual_seed(9)
        d_out = torch.randn(want.shape, generator=g, device=device).to(torch.bfloat16)
        wanted = torch.autograd.grad((want * d_out.double()).sum(), [*whole, *([rules["sinks"]] if sinks is not None else [])])
        cu = options.get("cu_seqlens")
        for scheme, layout, peers in variants(packed):
            what = f"{name} {scheme} {layout}{' peers' if peers else ''}"
            with notes.of(what):
                local = [ad.shard(x[0] if packed else x, layout=layout, dim=dim, cu_seqlens=cu).requires_grad_() for x in given]
                leaves = [*local, *([sinks.clone().requires_grad_()] if sinks is not None else [])]
                named = {**options, "sinks": leaves[3]} if sinks is not None else options
                out = ad.attention(*local, scheme=scheme, layout=layout, peers=peers, **named)
                mine = ad.shard(d_out, layout=layout, cu_seqlens=cu)
                got = torch.autograd.grad(out, leaves, mine[0] if packed else mine)
                for x, y, letter in zip(got, wanted, "qkvs"):
                    if letter == "s":
                        dist.all_reduce(x)
                    else:
                        x, y = x[None] if packed else x, ad.shard(y, layout=layout, cu_seqlens=cu)
                    error = largest(x - y) / largest(y)
                    notes.least(f"d{letter}, of the largest", error)
                    assert error < 0.02, f"d{letter}: {error:.2g} of the largest"
                notes.facts["cases"] = notes.facts.get("cases", 0) + 1


def decode(rank, ranks, device, notes, arguments):
    import torch
    import attn.distributed as ad
    from test_distributed import dense
    heads, longest, page = 4 * ranks, 1024, 64
    lengths = torch.tensor([1, 70, 333, 1024])
    g = torch.Generator(device).manual_seed(5)
    q, k, v = (torch.randn(4, n, h, DIM, generator=g, device=device).to(torch.bfloat16) for n, h in ((1, heads), (longest, 2), (longest, 2)))
    sinks = torch.linspace(-1, 1, heads)
    wide = torch.zeros(4, longest, heads, DIM, dtype=torch.float64)
    wide[:, :1] = q.double()
    visible = (torch.arange(longest) < lengths[:, None])[:, None, None, :].expand(4, 1, longest, longest)
    for interleave, with_sinks in itertools.product((1, page), (False, True)):
        options = {"sinks": sinks} if with_sinks else {}
        want, want_lse = dense(wide, k.double(), v.double(), visible, **({"sinks": sinks.double()} if with_sinks else {}))
        want, want_lse = want[:, :1], want_lse[:, :, :1]
        mine = [p for p in range(longest) if p // interleave % ranks == rank]
        local = torch.tensor([sum(p < n for p in mine) for n in lengths.tolist()], dtype=torch.int32)
        cache = [x[:, mine].contiguous() for x in (k, v)]
        pages = len(mine) // page
        table = torch.randperm(4 * pages, generator=torch.Generator().manual_seed(3), device="cpu").to(device, torch.int32).reshape(4, pages)
        pool = [torch.empty(4 * pages, page, 2, DIM, dtype=torch.bfloat16) for _ in cache]
        for x, y in zip(cache, pool):
            y[table.long()] = x.unflatten(1, (pages, page))
        n = heads // ranks
        of_rank = slice(rank * n, (rank + 1) * n)
        shared = dict(return_lse=True, out_dtype=torch.float32, **options)
        for most, peers in (0, False), (1 << 20, False), (0, True):
            ad._MOST_GATHERED = most
            shared["peers"] = peers
            for what, arrays, more in (("tokens", cache, {}), ("pages", pool, {"block_table": table})):
                with notes.of(f"{what} {interleave} {with_sinks} {most} {peers}"):
                    out, lse = ad.decode(q[:, :, of_rank].contiguous(), *arrays, seqlens_kv=local, **more, **shared)
                    whole, whole_lse = ad.decode(q, *arrays, seqlens_kv=local, heads="all", **more, **shared)
                    assert torch.equal(whole[:, :, of_rank], out) and torch.equal(whole_lse[:, of_rank], lse), "heads differ"
                    error, of_lse = largest(whole - want), largest(whole_lse - want_lse)
                    notes.least("out", error)
                    notes.least("lse", of_lse)
                    assert error < 0.02 and of_lse < 2e-3, f"errors {error:.2g}, lse {of_lse:.2g}"
    # Several queries, and windows: places of queries and keys count.
    for interleave, queries, window, exact in itertools.product((1, page), (1, 3), (-1, 30), (True, False)):
        if queries == 1 and window < 0:
            continue
        q, k, v = tensors(longest, device, 4, heads, 2, exact)
        q = q[:, :queries]
        options = exact_scale({}) if exact else {}
        place = (lengths - queries)[:, None] + torch.arange(queries)
        at = torch.arange(longest)
        seen = (at < lengths[:, None])[:, None, :] & (at <= place[:, :, None])
        if window >= 0:
            seen &= at >= place[:, :, None] - window
        wide = torch.zeros(4, longest, heads, DIM, dtype=torch.float64)
        wide[:, :queries] = q.double()
        visible = torch.zeros(4, 1, longest, longest, dtype=torch.bool)
        visible[:, 0, :queries] = seen
        want, want_lse = dense(wide, k.double(), v.double(), visible, **options)
        want, want_lse = want[:, :queries], want_lse[:, :, :queries]
        mine = [p for p in range(longest) if p // interleave % ranks == rank]
        local = torch.tensor([sum(p < n for p in mine) for n in lengths.tolist()], dtype=torch.int32)
        n = heads // ranks
        for most, peers in (0, False), (1 << 20, False), (0, True):
            ad._MOST_GATHERED = most
            with notes.of(f"positions {interleave} {queries} {window} {exact} {most} {peers}"):
                out, lse = ad.decode(q[:, :, rank * n:][:, :, :n].contiguous(), k[:, mine].contiguous(), v[:, mine].contiguous(), seqlens_kv=local,
                                     interleave=interleave, total_seqlens=lengths.to(torch.int32), window=(window, -1), peers=peers, return_lse=True,
                                     out_dtype=torch.float32, **options)
                mine_want, mine_lse = want[:, :, rank * n:][:, :, :n], want_lse[:, rank * n:][:, :n]
                assert torch.equal(torch.isfinite(lse), torch.isfinite(mine_lse)), "rows without keys"
                error, of_lse = largest(out - mine_want), largest(lse - mine_lse)
                data = "exact weights" if exact else "random"
                notes.least(f"positions, {data}: out", error)
                notes.least(f"positions, {data}: lse", of_lse)
                assert error < (1e-5 if exact else 0.02) and of_lse < (1e-5 if exact else 2e-3), f"errors {error:.2g}, lse {of_lse:.2g}"
                notes.facts["positions"] = notes.facts.get("positions", 0) + 1


def captured(call):
    """(graph, what call() returned in it)"""
    import torch
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = call()
    return graph, out


def graphs(rank, ranks, device, notes, arguments):
    import torch
    import attn.distributed as ad
    local = [ad.shard(x) for x in tensors(TOKENS * ranks, device)]
    rows = [x.flatten(0, 1) for x in local]
    ends = [0, 300, 301, TOKENS * ranks, 2 * TOKENS * ranks - 7]
    calls = {f"attention {s}{' peers' * p}": lambda s=s, p=p: ad.attention(*local, causal=True, scheme=s, peers=p, compare="once") for s, p in FORWARD}
    calls |= {f"documents {s}{' peers' * p}": lambda s=s, p=p: ad.attention(*rows, causal=True, scheme=s, peers=p, compare="once", layout="documents",
                                                                             cu_seqlens=ends) for s, p in FORWARD}
    calls |= {f"decode {h} {p}": lambda h=h, p=p: ad.decode(local[0][:, :1], *local[1:], heads=h, peers=p, compare="once")
              for p in (False, True) for h in ("split", "all")}
    for name, call in calls.items():
        with notes.of(name):
            graph, out = captured(call)
            for turn in range(3):
                for x in local:
                    x.mul_(-0.5)
                graph.replay()
                got = out.clone()
                assert torch.equal(got, call()), f"turn {turn}"
            del graph
    torch.cuda.synchronize()


def repeats(rank, ranks, device, notes, arguments):
    import torch
    import attn.distributed as ad
    local = [ad.shard(x) for x in tensors(TOKENS * ranks, device)]
    d_out = torch.ones_like(local[0])
    rows, of_rows = [x.flatten(0, 1) for x in local], d_out.flatten(0, 1)
    ends = [0, 300, 301, TOKENS * ranks, 2 * TOKENS * ranks - 7]
    for what, arrays, gradient, options, turns in (("", local, d_out, {}, arguments.repeats),
                                                   (" documents", rows, of_rows, {"layout": "documents", "cu_seqlens": ends}, arguments.repeats // 10)):
        for scheme, peers in FORWARD:
            first, differ = None, torch.zeros((), dtype=torch.bool)
            for _ in range(turns):
                leaves = [x.detach().requires_grad_() for x in arrays]
                out = ad.attention(*leaves, causal=True, scheme=scheme, peers=peers, compare="once", **options)
                got = [out.detach(), *torch.autograd.grad(out, leaves, gradient)]
                first = first or got
                for x, y in zip(got, first):
                    differ |= (x.view(torch.int16) != y.view(torch.int16)).any()
            name = f"{scheme}{what}{' peers' if peers else ''}"
            with notes.of(name):
                assert not differ.item(), "bits differ"
            notes.facts[name] = turns
    for name, most, peers in ("by heads", 0, False), ("to all", 1 << 20, False), ("peers", 0, True):
        ad._MOST_GATHERED, first, differ = most, None, torch.zeros((), dtype=torch.bool)
        for _ in range(arguments.repeats):
            got = ad.decode(local[0][:, :1], *local[1:], peers=peers, compare="once")
            first = got if first is None else first
            differ |= (got.view(torch.int16) != first.view(torch.int16)).any()
        with notes.of(f"decode {name}"):
            assert not differ.item(), "bits differ"
        notes.facts[f"decode {name}"] = arguments.repeats


def disagree(rank, ranks, device, notes, arguments):
    import torch
    import attn
    import attn.distributed as ad
    odd = rank == 1
    q, k, v = (ad.shard(x) for x in tensors(TOKENS * ranks, device))
    before = ad.attention(q, k, v, causal=True)
    for what, call in {
            "tokens": lambda: ad.attention(*((x[:, :128] if odd else x) for x in (q, k, v))),
            "no tokens": lambda: ad.attention(*((x[:, :0] if odd else x) for x in (q, k, v))),
            "scheme": lambda: ad.attention(q, k, v, scheme="ring" if odd else "all_gather"),
            "a refusal": lambda: ad.attention(q, k, v, scheme="rings" if odd else "ring"),
            "window": lambda: ad.attention(q, k, v, window=(4, -1) if odd else (-1, -1)),
            "heads of decode": lambda: ad.decode(q[:, :1, :4] if odd else q[:, :1], k, v)}.items():
        with notes.of(what):
            try:
                call()
            except attn.InvalidArgument:
                pass
            else:
                raise AssertionError("no error")
    ad.synchronize()
    with notes.of("after the errors"):
        assert torch.equal(ad.attention(q, k, v, causal=True), before)


def raises(notes, call):
    """Notes how long call() takes to raise torch.distributed's error."""
    import torch.distributed as dist
    begin = time.monotonic()
    try:
        call()
    except dist.DistBackendError as error:
        notes.facts.setdefault("raised after s", []).append(round(time.monotonic() - begin, 2))
        notes.facts["error"] = str(error)[:200]
    else:
        notes.failures.append("no error")


def after_a_graph(ad, local, replays):
    """Two calls in a graph, replayed."""
    graph, _ = captured(lambda: ad.decode(local[0][:, :1], *local[1:], compare="once"))
    for _ in range(replays):
        graph.replay()
    return graph


def dies(rank, ranks, device, notes, arguments):
    import torch
    import torch.distributed as dist
    import attn.distributed as ad
    local = [ad.shard(x) for x in tensors(TOKENS * ranks, device)]

    def call():
        if arguments.scheme == "peers":
            return ad.decode(local[0][:, :1], *local[1:], peers=True, compare="once")
        return ad.attention(*local, causal=True, scheme=arguments.scheme if arguments.scheme != "graph" else "ring", compare="once")
    for _ in range(2):
        call()
    ad.synchronize()
    graph = after_a_graph(ad, local, 3) if arguments.scheme == "graph" else None
    ad.synchronize()
    if rank == 1:
        os._exit(3)
    if graph:
        graph.replay()
    else:
        call()
    raises(notes, ad.synchronize)
    raises(notes, call)
    begin = time.monotonic()
    try:
        torch.cuda.synchronize()
        notes.facts["GPU works after it"] = bool(torch.ones(8).sum().item() == 8)
    except RuntimeError as error:  # kernels that read other GPUs' memory end with an error
        notes.facts["GPU"] = str(error)[:100]
        assert arguments.scheme == "peers"
    notes.facts["GPU idle after s"] = round(time.monotonic() - begin, 2)
    if not graph and arguments.scheme != "peers":
        begin = time.monotonic()
        dist.destroy_process_group()
        notes.facts["group destroyed after s"] = round(time.monotonic() - begin, 2)


def absent(rank, ranks, device, notes, arguments):
    import torch
    import torch.distributed as dist
    import attn.distributed as ad
    store = dist.distributed_c10d._get_default_store()
    local = [ad.shard(x) for x in tensors(TOKENS * ranks, device)]
    ad.attention(*local, causal=True, scheme="ring", compare="once")
    ad.synchronize()
    if rank == 1:
        store.set_timeout(datetime.timedelta(seconds=60))
        for other in range(ranks):
            if other != 1:
                store.get(f"over{other}")
        return
    ad.attention(*local, causal=True, scheme="ring", compare="once")
    raises(notes, lambda: ad.synchronize(timeout=2))
    torch.cuda.synchronize()
    store.set(f"over{rank}", "1")


def watchdog(rank, ranks, device, notes, arguments):
    import torch
    import attn.distributed as ad
    local = [ad.shard(x) for x in tensors(TOKENS * ranks, device)]
    ad.attention(*local, causal=True, compare="once")
    graph = after_a_graph(ad, local, 2) if arguments.scheme == "graph" else None
    torch.cuda.synchronize()
    if rank == 1:
        os._exit(3)
    if graph:
        graph.replay()
    else:
        ad.attention(*local, causal=True, compare="once")
    torch.cuda.synchronize()
    notes.facts["torch.cuda.synchronize()"] = "returned"


# ---- processes -----------------------------------------------------------------------------------

def run_rank(rank, ranks, folder, arguments):
    """The parts, one after the other; after one that could not go on, no other."""
    import torch
    import torch.distributed as dist
    import attn.distributed as ad
    parts = arguments.together.split(",")
    alone = parts[0] in ALONE
    failed = False
    for part in parts:
        notes, begin = Notes(), time.monotonic()
        try:
            if not dist.is_initialized():
                device = torch.device("cuda", rank)
                torch.cuda.set_device(device)
                torch.set_default_device(device)
                dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, device_id=device,
                                        timeout=datetime.timedelta(seconds=TIME_OUT if alone else 60))
                ad._layouts._TILE = 16  # so that short documents have two pieces on a rank
                most = ad._MOST_GATHERED
            ad._MOST_GATHERED = most
            globals()[part](rank, ranks, device, notes, arguments)
        except BaseException:
            notes.failures.append(traceback.format_exc()[-1500:])
            failed = True
        found = {"facts": notes.facts, "failures": notes.failures, "seconds": round(time.monotonic() - begin, 1)}
        pathlib.Path(folder, f"{part}{rank}.json").write_text(json.dumps(found))
        if failed:
            break
    if not alone and not failed:
        dist.destroy_process_group()
    sys.stderr.flush()
    os._exit(1 if failed else 0)


def ranks_of(arguments):
    """Runs parts on their ranks -> of each {facts, failures, codes, seconds}."""
    import torch
    import attn.distributed  # noqa: F401: before the fork
    ranks, parts = arguments.ranks, arguments.together.split(",")
    torch.set_num_threads(4)
    with tempfile.TemporaryDirectory() as folder:
        begin, limit, children, codes = time.monotonic(), arguments.limit * len(parts), {}, [None] * ranks
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                run_rank(rank, ranks, folder, arguments)
            children[child] = rank
        ended = [None] * ranks
        while children:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child:
                rank = children.pop(child)
                codes[rank], ended[rank] = os.waitstatus_to_exitcode(status), round(time.monotonic() - begin, 1)
            elif time.monotonic() - begin > limit:
                for child in children:
                    os.kill(child, signal.SIGKILL)
                limit = math.inf
            else:
                time.sleep(0.01)
        expected = [3 if parts[0] in ENDS and r == 1 else 0 for r in range(ranks)]
        report = []
        for part in parts:
            found = {"part": part, "ranks": ranks, "facts": {}, "failures": []}
            notes = {}
            for rank in range(ranks):
                path = pathlib.Path(folder, f"{part}{rank}.json")
                if path.exists():
                    notes[rank] = json.loads(path.read_text())
            for rank, note in notes.items():
                found["failures"] += [f"rank {rank}: {x}" for x in note["failures"]]
                for name, value in note["facts"].items():
                    old = found["facts"].get(name, value)
                    found["facts"][name] = max(old, value) if isinstance(value, float) and isinstance(old, float) else old
            if part in ALONE:
                found |= {"scheme": arguments.scheme, "codes": codes, "seconds": ended}
            else:
                found["seconds"] = max((note["seconds"] for note in notes.values()), default=None)
            if part != "watchdog" and (codes != expected and part == parts[-1] or len(notes) < expected.count(0)):
                found["failures"].append(f"{len(notes)} ranks have a result, exit codes {codes}")
            report.append(found)
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int)
    parser.add_argument("parts", nargs="*", default=[*PARTS[:-1]])
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--scheme", choices=[*SCHEMES, "graph", "peers"], default="ring", help="of watchdog")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of a part")
    parser.add_argument("--json", metavar="OUT")
    parser.add_argument("--together", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.together:
        print(json.dumps(ranks_of(arguments)))
        return
    together = [",".join(x for x in arguments.parts if x not in ALONE)]
    report = []
    for sets in [[(x, arguments.scheme) for x in together if x],
                 [(x, s) for x in arguments.parts if x in ALONE for s in ([*SCHEMES, "graph", "peers"] if x == "dies" else [arguments.scheme])]]:
        # Those of a list at the same time: ranks that wait for one that is gone leave their GPU to others.
        begun = [subprocess.Popen([sys.executable, __file__, str(arguments.ranks), "--together", parts, "--scheme", scheme, "--repeats",
                                   str(arguments.repeats), "--limit", str(arguments.limit)], stdout=subprocess.PIPE, text=True) for parts, scheme in sets]
        for process, (parts, _) in zip(begun, sets):
            lines = process.communicate()[0].strip().splitlines()
            for found in json.loads(lines[-1]) if lines else [{"part": parts, "failures": ["no result"]}]:
                report.append(found)
                print("FAILED" if found["failures"] else "passed", json.dumps(found)[:1500], flush=True)
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(any(x["failures"] for x in report))


if __name__ == "__main__":
    main()
