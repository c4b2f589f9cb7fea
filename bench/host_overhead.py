"""host_overhead.py [--json OUT]: microseconds of a call of a small problem from Python, on one thread, where the tensors are and on a GPU where
there is one. Contenders take turns, a round of each after the other; the smallest round counts, which a busy machine disturbs least. On
the host a call contains its computation; on a GPU it launches only, and rounds are short of what the queue holds. "hit" and "miss" are calls
with k of 100 and of 400 strides in turn, of which attn keeps 256 plans."""
import argparse
import importlib.util
import itertools
import os
import platform
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402

import attn  # noqa: E402
import measured  # noqa: E402

ROUNDS, CALLS = 60, 100


def smallest(contenders, wait=lambda: None):
    """{name: us} of {name: function}."""
    best = dict.fromkeys(contenders, float("inf"))
    for call in contenders.values():
        call()
    for _ in range(ROUNDS):
        for name, call in contenders.items():
            wait()
            begin = time.perf_counter_ns()
            for _ in range(CALLS):
                call()
            best[name] = min(best[name], (time.perf_counter_ns() - begin) / CALLS / 1000)
    wait()
    return {name: round(us, 2) for name, us in best.items()}


def turns(k):
    """{name: an endless iterator} of k with other strides between its heads, as caches have that grow: in plans' cache, and not."""
    room = np.empty(k.size * 600, k.dtype)
    views = [np.lib.stride_tricks.as_strided(room, k.shape, (*k.strides[:2], k.strides[2] + 64 * i, k.strides[3])) for i in range(500)]
    room[:] = 1
    return {"hit": itertools.cycle(views[:100]), "miss": itertools.cycle(views[100:])}


def of_numpy(batch, heads, seqlen, dim):
    q, k, v = (np.random.default_rng(i).standard_normal((batch, seqlen, heads, dim), np.float32) for i in range(3))
    plan, out = attn.Plan(q, k, v), np.empty_like(q)
    of = turns(k)
    return {"attn.forward": lambda: attn.forward(q, k, v), "attn.Plan, out=": lambda: plan(q, k, v, out=out),
            "hit": lambda: attn.forward(q, next(of["hit"]), v), "miss": lambda: attn.forward(q, next(of["miss"]), v)}


def of_torch(batch, heads, seqlen, dim, device):
    import torch
    import torch.nn.functional as F

    import attn.torch
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    dtype = torch.float32 if device == "cpu" else torch.float16
    q, k, v = (torch.randn(batch, heads, seqlen, dim, device=device).to(dtype) for _ in range(3))
    rows = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    plan, out = attn.Plan(*rows), torch.empty_like(rows[0])
    launch = {"a launch": lambda: torch.cuda._sleep(0)} if device == "cuda" else {}  # of a kernel that does nothing, by torch
    return {**launch, "torch's sdpa": lambda: F.scaled_dot_product_attention(q, k, v),
            "attn.torch sdpa": lambda: attn.torch.scaled_dot_product_attention(q, k, v),
            "torch's sdpa, causal": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            "attn.torch sdpa, causal": lambda: attn.torch.scaled_dot_product_attention(q, k, v, is_causal=True),
            "attn.forward": lambda: attn.forward(*rows), "attn.Plan, out=": lambda: plan(*rows, out=out)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="OUT")
    arguments = parser.parse_args()
    attn.set_num_threads(1)
    report = {"date": time.strftime("%Y-%m-%d"), "attn": attn.__version__, "machine": platform.processor() or platform.machine(),
              "rounds": ROUNDS, "calls_of_a_round": CALLS, "cases": []}
    shapes = (1, 1, 1, 32), (1, 4, 1, 64), (2, 8, 1, 64), (1, 8, 16, 64)
    places = [("numpy", None)]
    if importlib.util.find_spec("torch"):
        import torch
        report["torch"] = torch.__version__
        places += [("torch", "cpu")] + [("torch", "cuda")] * torch.cuda.is_available()
    for framework, device in places:
        for shape in shapes:
            wait = torch.cuda.synchronize if device == "cuda" else lambda: None
            found = smallest(of_numpy(*shape) if framework == "numpy" else of_torch(*shape, device), wait)
            report["cases"].append({"framework": framework, "device": device or "cpu", "batch_heads_seqlen_dim": shape, "us": found})
            print(f"{framework} {device or 'cpu'} B{shape[0]} H{shape[1]} S{shape[2]} D{shape[3]}: "
                  + ", ".join(f"{name} {us}" for name, us in found.items()), flush=True)
    if arguments.json:
        measured.write(arguments.json, report)


main()
