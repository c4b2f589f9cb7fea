"""A small language model of bytes, trained twice from the same weights: with libattn's attention and with PyTorch's.

    python3 examples/train.py [--steps STEPS] [--device cuda] [--curve train.png]

The text is this repository's documentation, of which the last tenth is kept for evaluation. What is to be copied from here is Attention: one call, whose
gradients autograd takes from libattn. Both runs see the same batches, so their losses agree to rounding; libattn's gradients have the same bits in
every run, which the checksum of the trained weights shows. Needs torch and tqdm, and matplotlib for --curve.
"""
import argparse
import hashlib
import json
import sys
import time
from pathlib import Path

import attn.torch
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
LAYERS, WIDTH, HEADS, HEADS_KV = 4, 128, 4, 2
DIM = WIDTH // HEADS
SDPA = {"libattn": attn.torch.scaled_dot_product_attention, "torch": F.scaled_dot_product_attention}


def documentation():
    """Bytes for training and bytes for evaluation, i64."""
    files = [ROOT / "README.md", ROOT / "HACKING.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    kept = len(text) // 10
    return text[:-kept], text[-kept:]


def rotate(x, angles):
    """Rotary embedding of x [B, H, S, DIM] by angles [S, DIM / 2]."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Attention(nn.Module):
    """Causal, with two query heads for each K/V head."""

    def __init__(self, sdpa):
        super().__init__()
        self.sdpa = sdpa
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * HEADS_KV) * DIM, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, angles):
        q, k, v = self.qkv(x).unflatten(-1, (-1, DIM)).transpose(1, 2).split([HEADS, HEADS_KV, HEADS_KV], dim=1)
        y = self.sdpa(rotate(q, angles), rotate(k, angles), v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, sdpa):
        super().__init__()
        self.attention = Attention(sdpa)
        self.before_attention, self.before_mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, angles):
        x = x + self.attention(self.before_attention(x), angles)
        return x + self.mlp(self.before_mlp(x))


class Model(nn.Module):
    def __init__(self, sdpa):
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(Layer(sdpa) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def loss(self, tokens):
        """Mean cross entropy, nats per byte, of tokens [B, S + 1] each from those before."""
        x = self.embedding(tokens[:, :-1])
        frequencies = 10000.0 ** (-torch.arange(0, DIM, 2, device=x.device) / DIM)
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * frequencies
        for layer in self.layers:
            x = layer(x, angles)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def batch_of(text, options, generator):
    begins = torch.randint(len(text) - options.seqlen, (options.batch, 1), generator=generator)
    return text[begins + torch.arange(options.seqlen + 1)].to(options.device)


def train(name, options):
    """Losses of each step, the loss of the text kept for evaluation, seconds, and a checksum of the trained weights."""
    text, kept = documentation()
    torch.manual_seed(options.seed)
    model = Model(SDPA[name]).to(options.device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=2e-3, total_steps=options.steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(options.seed)
    # GPU kernels take 16-bit types; weights and sums of the optimiser stay in float32.
    mixed = torch.autocast(options.device, torch.bfloat16, enabled=options.device != "cpu")
    losses, begin = [], time.perf_counter()
    for _ in (bar := tqdm(range(options.steps), desc=f"{name:8}")):
        with mixed:
            loss = model.loss(batch_of(text, options, generator))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    seconds = time.perf_counter() - begin
    with torch.no_grad(), mixed:
        generator.manual_seed(options.seed)
        evaluated = sum(model.loss(batch_of(kept, options, generator)).item() for _ in range(8)) / 8
    weights = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    return {"losses": losses, "evaluated": evaluated, "seconds": seconds, "weights": hashlib.sha256(weights).hexdigest()[:16]}


def differences(runs):
    """Of the two runs' losses, step by step."""
    return [abs(a - b) for a, b in zip(*(run["losses"] for run in runs.values()))]


def draw(runs, path):
    import matplotlib
    matplotlib.use("agg")
    from matplotlib import pyplot
    figure, (axes, below) = pyplot.subplots(2, sharex=True, figsize=(7, 4), height_ratios=[3, 1], layout="constrained")
    for (name, run), style in zip(runs.items(), ("-", "--")):
        axes.plot(run["losses"], style, linewidth=1, label=name)
    axes.set(ylabel="loss, nats per byte")
    axes.legend()
    below.set(xlabel="step", ylabel="difference")
    if len(runs) == 2:
        below.semilogy(differences(runs), linewidth=1, color="grey")
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=1000, help="of the optimiser (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step (%(default)s)")
    parser.add_argument("--seqlen", type=int, default=256, help="bytes of a sequence (%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu, where all is float32, or cuda, with bf16 (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of weights and batches (%(default)s)")
    parser.add_argument("--attention", choices=[*SDPA, "both"], default="both", help="(%(default)s)")
    parser.add_argument("--curve", metavar="PNG", help="draw the losses")
    parser.add_argument("--json", metavar="FILE", help="write what is printed, and the loss of each step")
    options = parser.parse_args()
    runs = {name: train(name, options) for name in SDPA if options.attention in (name, "both")}
    for name, run in runs.items():
        print(f"{name:8} loss {run['losses'][0]:.4f} -> {run['losses'][-1]:.4f}, of unseen text {run['evaluated']:.4f}, {run['seconds']:.1f} s, "
              f"weights {run['weights']}")
    if len(runs) == 2:
        apart = differences(runs)
        print(f"losses differ by at most {max(apart):.1e}, at the end by {apart[-1]:.1e}")
    if options.curve:
        draw(runs, options.curve)
    if options.json:
        Path(options.json).write_text(json.dumps(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
