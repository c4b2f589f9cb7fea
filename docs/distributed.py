"""Makes docs/distributed.svg, and the tables of docs/distributed.md, from attn.distributed.estimate. Needs torch.

    PYTHONPATH=build/release/python python3 docs/distributed.py
"""
import json
import pathlib
from dataclasses import replace

from attn.distributed import Machine, estimate

TOKENS = [4096 << n for n in range(10)]
COLORS = {"all_gather": "#1f77b4", "ring": "#d62728", "ulysses": "#2ca02c"}
HEADS = dict(heads_q=32, heads_kv=8, head_dim=128)
GPU_ALONE = replace(Machine(), call=0, piece=0)
ONCE = replace(Machine(), call=300e-6)
CALLS = {json.loads(path.read_text())["gpus"]: path  # by bench/distributed.py, the last of each number of GPUs
         for path in sorted((pathlib.Path(__file__).parent / "measured").glob("*_distributed_[24]gpus_*.json"))}
W, H, LEFT, TOP = 330, 220, 50, 30


def efficiency(ranks, tokens, **options):
    """{scheme: part of ideal}. One GPU is attn.forward, which sends nothing and has no fixed cost that counts."""
    shape = {**HEADS, **options}
    one = estimate(1, tokens, **shape, head_pieces=1, machine=replace(GPU_ALONE, latency=0))["all_gather"]
    return {scheme: one / ranks / seconds for scheme, seconds in estimate(ranks, tokens, **shape).items()}


def calls():
    """Rows of the tables of measured calls: what bench/distributed.py wrote, and what estimate() says."""
    decode = []
    for report in map(json.loads, (path.read_text() for path in CALLS.values())):
        if not any("graph_ms" in cell for cell in report["cells"]):
            continue  # of before
        for tokens in sorted({cell["tokens"] for cell in report["cells"]}):
            cells = {cell["scheme"]: cell for cell in report["cells"] if cell["tokens"] == tokens and not cell.get("peers")}
            host, gpu = (estimate(report["gpus"], tokens, **HEADS, machine=machine) for machine in (ONCE, GPU_ALONE))
            row = [f"{cells[s]['once_ms']:.3g} ({1e3 * host[s]:.3g}) / {cells[s]['graph_ms']:.3g} ({1e3 * gpu[s]:.3g})" for s in COLORS]
            yield f"| {report['gpus']} | {tokens} | {cells['ring']['alone_ms']:.3g} | {' | '.join(row)} |"
        for cell in report["decode"]:
            names = "alone_graph_ms", "shard_graph_ms", "once_ms", "graph_ms"
            decode.append(f"| {report['gpus']} | {cell['batch']} | {cell['keys']} | {cell['heads']}, {cell['parts']} | "
                          f"{' | '.join(f'{cell[name]:.3f}' for name in names)} | {cell['alone_graph_ms'] / cell['graph_ms']:.2f} |")
    yield "\n| GPUs | batch | keys | heads, parts | one GPU | a rank's part alone | call | graph | speed-up |\n|---|---|---|---|---|---|---|---|---|"
    yield from decode


def panel(x0, title, ranks):
    """Lines of one number of ranks, from 0 to 1 of ideal over tokens."""
    def at(n, y):
        return f"{x0 + LEFT + n * W / (len(TOKENS) - 1):.1f},{TOP + (1 - y) * H:.1f}"
    yield f'<text x="{x0 + LEFT}" y="{TOP - 10}">{title}</text>'
    for tenth in range(0, 11, 2):
        y = TOP + (1 - tenth / 10) * H
        yield f'<path d="M{x0 + LEFT},{y:.1f}h{W}" stroke="#ddd"/><text x="{x0 + LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tenth / 10:.1f}</text>'
    for n, tokens in enumerate(TOKENS):
        yield f'<text x="{x0 + LEFT + n * W / (len(TOKENS) - 1):.1f}" y="{TOP + H + 16}" text-anchor="middle">{tokens >> 10}k</text>'
    for scheme, color in COLORS.items():
        points = [(n, efficiency(ranks, t)[scheme]) for n, t in enumerate(TOKENS) if scheme in efficiency(ranks, t)]
        if points:
            yield f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{" ".join(at(n, y) for n, y in points)}"/>'


def main():
    lines = ['<svg xmlns="http://www.w3.org/2000/svg" width="830" height="310" font-family="sans-serif" font-size="11">',
             '<rect width="830" height="310" fill="#fff"/>']
    lines += panel(0, "8 GPUs of one host", 8)
    lines += panel(420, "64 GPUs, 400 Gbit/s each between hosts", 64)
    for n, (scheme, color) in enumerate(COLORS.items()):
        lines.append(f'<text x="{LEFT + 110 * n}" y="290" fill="{color}">{scheme}</text>')
    lines.append(f'<text x="{LEFT + 340}" y="290">of ideal, by tokens of the sequence; estimated: causal bf16, 32/8 heads of 128</text></svg>')
    (pathlib.Path(__file__).parent / "distributed.svg").write_text("\n".join(lines) + "\n")
    print("\n| GPUs | tokens | one GPU | all_gather | ring | ulysses |\n|---|---|---|---|---|---|", *calls(), sep="\n")
    print("\n| tokens | heads | 8 GPUs | 64 GPUs |\n|---|---|---|---|")
    for tokens in 8192, 32768, 131072, 1 << 20:
        for heads in {"32/8": (32, 8), "32/32": (32, 32), "64/8": (64, 8), "128/128": (128, 128)}.items():
            row = []
            for ranks in 8, 64:
                found = efficiency(ranks, tokens, heads_q=heads[1][0], heads_kv=heads[1][1])
                best = sorted(found, key=found.get, reverse=True)
                row.append(", ".join(f"{s} {found[s]:.2f}" for s in best))
            print(f"| {tokens} | {heads[0]} | {row[0]} | {row[1]} |")
    print(Machine())


if __name__ == "__main__":
    main()
