"""Makes docs/distributed_timeline.svg: what the GPU of rank 0 runs when, from what bench/distributed.py --timeline wrote.

    python3 docs/timeline.py
"""
import html
import json
import pathlib

HERE = pathlib.Path(__file__).parent
REPORT = sorted((HERE / "measured").glob("*_distributed_timeline_*.json"))[-1]
SCHEMES = ("all_gather", "all_gather by peers", "ring")
COLORS = {"attention": "#1f77b4", "nccl": "#d62728", "copy": "#2ca02c", "merge": "#9467bd", "meeting": "#ff7f0e", "other": "#7f7f7f"}
LABELS = {"attention": "attention kernels", "nccl": "NCCL: K and V of other ranks", "copy": "copies", "merge": "merge", "meeting": "ranks meet", "other": "other"}
LEFT, W, ROW, GAP = 110, 700, 22, 44


def rows(entries):
    """[(label, entries), ...]: NCCL's last; what overlaps otherwise is in rows of its own. A graph's streams say nothing."""
    found = []
    for label, wanted in ("computation", False), ("NCCL", True):
        lanes = []
        for entry in sorted((x for x in entries if (x[0] == "nccl") == wanted), key=lambda x: x[2]):
            free = next((lane for lane in lanes if lane[-1][2] + lane[-1][3] <= entry[2] + 0.2), None)
            if free is None:
                lanes.append(free := [])
            free.append(entry)
        found += [(label, lane) for lane in lanes]
    return found


def panel(top, scheme, entries, end):
    """Lines of one scheme, and how high they are."""
    lines, scale = [f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{scheme}</text>'], W / end
    y = top
    for label, of_row in rows(entries):
        lines.append(f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{label}</text>')
        for what, _, begin, us, name in of_row:
            lines.append(f'<rect x="{LEFT + begin * scale:.2f}" y="{y + 2}" width="{max(us * scale, 0.3):.2f}" height="{ROW - 4}" fill="{COLORS[what]}">'
                         f'<title>{html.escape(name)}: {us} us from {begin} us</title></rect>')
        y += ROW
    for n in range(int(end // 1000) + 1):
        x = LEFT + n * 1000 * scale
        lines.append(f'<path d="M{x:.1f},{top}V{y + 4}" stroke="#999" stroke-width="0.5"/><text x="{x:.1f}" y="{y + 16}" text-anchor="middle">{n} ms</text>')
    return lines, y - top


def main():
    report = json.loads(REPORT.read_text())
    end = max(begin + us for s in SCHEMES for _, _, begin, us, _ in report["schemes"][s])
    what = f"{report['gpus']} x {report['gpu']}, commit {report['commit']}: {report['tokens']} tokens, {report['shape']}, the GPU of rank 0"
    top, lines = 52, [f'<text x="{LEFT}" y="18">{what}</text>']
    for scheme in SCHEMES:
        found, height = panel(top, scheme, report["schemes"][scheme], end)
        lines += found
        top += height + GAP
    x = LEFT
    for what, color in COLORS.items():
        lines.append(f'<rect x="{x}" y="{top - 14}" width="10" height="10" fill="{color}"/><text x="{x + 14}" y="{top - 5}">{LABELS[what]}</text>')
        x += 34 + 6 * len(LABELS[what])
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + W + 20}" height="{top + 10}" font-family="sans-serif" font-size="11">',
            f'<rect width="{LEFT + W + 20}" height="{top + 10}" fill="#fff"/>']
    (HERE / "distributed_timeline.svg").write_text("\n".join(head + lines + ["</svg>"]) + "\n")
    for scheme in SCHEMES:
        entries = report["schemes"][scheme]
        busy = [x for x in entries if x[0] != "nccl"]
        hidden = sum(max(0, min(a[2] + a[3], b[2] + b[3]) - max(a[2], b[2])) for a in entries if a[0] == "nccl" for b in busy)
        sums = {what: round(sum(x[3] for x in entries if x[0] == what)) for what in COLORS}
        print(scheme, f"ends after {max(x[2] + x[3] for x in entries):.0f} us; us:", sums, f"; NCCL while something is computed: {hidden:.0f} us")


if __name__ == "__main__":
    main()
