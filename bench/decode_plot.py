#!/usr/bin/env python3
"""Draws what bench/decode.py measured: for each row the time to read as many bytes, as a part of each library's time.

    bench/decode_plot.py docs/measured/NAME.json docs/measured/NAME.png

Needs matplotlib.
"""
import json
import sys

NAMES = {"libattn": "libattn", "cudnn": "cuDNN", "fa3": "FlashAttention-3", "flashinfer": "FlashInfer"}
COLOURS = {"libattn": "tab:blue", "cudnn": "tab:green", "fa3": "tab:orange", "flashinfer": "tab:gray"}


def plot(path, png):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    result = json.load(open(path))
    rows = {c["name"].replace(" d128", ""): c["us"] for c in result["cells"] if not c["warm"] and c["seqlen_q"] < 2048}
    figure, axes = pyplot.subplots(figsize=(9, 0.34 * len(rows) + 1.2))
    for n, us in enumerate(rows.values()):
        for who, colour in COLOURS.items():
            if who in us:
                axes.plot(us["read"] / us[who], n, "o", color=colour, markersize=8 if who == "libattn" else 5, zorder=3 if who == "libattn" else 2)
    for who, colour in COLOURS.items():
        axes.plot([], [], "o", color=colour, label=NAMES[who])
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0.3, 1.02)
    axes.grid(axis="both", alpha=0.3)
    axes.set_xlabel("time to read as many bytes / time")
    axes.set_title(f"Decode, {result['gpu']['name']}, commit {result['commit']}", fontsize=10)
    axes.legend(loc="lower left", fontsize=8)
    figure.tight_layout()
    figure.savefig(png, dpi=110)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    plot(*sys.argv[1:])
