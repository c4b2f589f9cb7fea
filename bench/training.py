#!/usr/bin/env python3
"""Times whole training steps of a stack of layers of 1 billion parameters with random weights, and what attention takes of them.

    bench/training.py [--cells 4x2048 1x8192] [--fa3 FILE --cudart FILE] [--out FILE]

16 layers of width 2048 with 32 query and 8 K/V heads of 64 and an MLP of 8192, causal, bf16, as Llama 3.2 1B without its embeddings; AdamW. A step is
forward, backward and the optimiser's. Contenders take turns: libattn through attn.torch, cuDNN and FlashAttention-2 through PyTorch, FlashAttention-3 (of
bench/backward.py's --fa3) and none, whose attention returns q. Attention's share is what a step takes more than none's.
"""
import argparse
import ctypes
import datetime
import statistics

import measured
import torch
import torch.nn.functional as F
from timing import Nvml, Watch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

LAYERS, WIDTH, HEADS, HEADS_KV, DIM, MLP = 16, 2048, 32, 8, 64, 8192


class Fa3(torch.autograd.Function):
    """q, k and v are [B, S, H, D]."""

    @staticmethod
    def forward(context, q, k, v):
        out, lse = torch.ops.flash_attn_3.fwd(q, k, v, is_causal=True, num_splits=1)[:2]
        context.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(context, d_out):
        q, k, v, out, lse = context.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        torch.ops.flash_attn_3.bwd(d_out.contiguous(), q, k, v, out, lse, *grads, is_causal=True)
        return tuple(grads)


def none(q, k, v):
    """Gradients of k and v are zeros, which cost a little."""
    return q + 0 * (k.sum() + v.sum())


def libattn(q, k, v):
    import attn.torch
    return attn.torch.forward(q, k, v, causal=True)


def by_torch(backend):
    def call(q, k, v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True).transpose(1, 2)
    return call


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        linear = lambda n, m: nn.Linear(n, m, bias=False)  # noqa: E731
        self.qkv, self.out = linear(WIDTH, (HEADS + 2 * HEADS_KV) * DIM), linear(HEADS * DIM, WIDTH)
        self.gate, self.up, self.down = linear(WIDTH, MLP), linear(WIDTH, MLP), linear(MLP, WIDTH)
        self.before_attention, self.before_mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x, attention):
        q, k, v = self.qkv(self.before_attention(x)).unflatten(-1, (-1, DIM)).split([HEADS, HEADS_KV, HEADS_KV], dim=2)
        x = x + self.out(attention(q, k, v).flatten(2))
        y = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="*", default=["4x2048", "2x4096", "1x8192"], help="batch and length (%(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="of a measure (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fa3", metavar="FILE")
    parser.add_argument("--cudart", metavar="FILE")
    parser.add_argument("--out", help="JSON")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    attentions = {"none": none, "libattn": libattn, "cudnn": by_torch(SDPBackend.CUDNN_ATTENTION), "fa2": by_torch(SDPBackend.FLASH_ATTENTION)}
    if options.cudart:
        ctypes.CDLL(options.cudart, ctypes.RTLD_GLOBAL)
    if options.fa3:
        torch.ops.load_library(options.fa3)
        attentions["fa3"] = Fa3.apply
    torch.manual_seed(1)
    with torch.device("cuda"):
        layers = nn.ModuleList(Layer() for _ in range(LAYERS)).to(torch.bfloat16)
    parameters = list(layers.parameters())
    optimiser = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    nvml, results = Nvml(), []
    for cell in options.cells:
        batch, seqlen = map(int, cell.split("x"))
        x = torch.randn(batch, seqlen, WIDTH, device="cuda", dtype=torch.bfloat16)

        def step(attention):
            y = x
            for layer in layers:
                y = layer(y, attention)
            loss = y.float().square().mean()
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            return loss

        losses, rounds = {}, {}
        for name, attention in list(attentions.items()):
            try:
                losses[name] = step(attention).item()
                step(attention)
                rounds[name] = []
            except RuntimeError as error:
                optimiser.zero_grad()
                print(f"  {name}: {str(error).splitlines()[0]}", flush=True)
        watches = {name: Watch(nvml) for name in rounds}
        for _ in range(options.rounds):
            for name in rounds:
                step(attentions[name])
                with watches[name]:
                    begin.record()
                    for _ in range(options.steps):
                        step(attentions[name])
                    end.record()
                    end.synchronize()
                rounds[name].append(begin.elapsed_time(end) / options.steps)
        took = {name: statistics.median(times) for name, times in rounds.items()}
        share = {name: 1 - took["none"] / ms for name, ms in took.items() if name != "none"}
        told = [f"{name} {ms:.1f} ms" + (f" ({share[name]:.1%} attention)" if name in share else "") for name, ms in took.items()]
        print(f"{cell}: {', '.join(told)}", flush=True)
        results.append({"cell": cell, "milliseconds": took, "share_of_attention": share, "losses": losses,
                        "clocks": {name: watch.means() for name, watch in watches.items()}})
        if options.out:
            measured.write(options.out, {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"), "commit": options.commit,
                                         "gpu": {"name": torch.cuda.get_device_name(), "driver": nvml.driver()}, "cuda": torch.version.cuda,
                                         "torch": torch.__version__, "parameters": sum(p.numel() for p in parameters), "layers": LAYERS,
                                         "rounds": options.rounds, "steps": options.steps, "cells": results})


if __name__ == "__main__":
    main()
